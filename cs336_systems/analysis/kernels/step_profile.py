"""The explained profile of a kernel trace: everything that is kept of it and that its tables are
made from.

Values of every step are kept; means per step are derived from them. Warm-up steps are left out,
unless the trace has no others. Times are seconds (`_s`), on the device unless the host is named.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from ...costs.communication import Collective, bus_share
from ...costs.tape import Form
from ...files import encode_json, write_atomically
from ...record import MAX_TIME_S, Count
from ..columns import ProfileError
from ..memory.profile import Place
from .classes import KernelClass
from .phases import LaunchPhase, PhaseSource

Time = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S)]
PROFILE_FORMAT_VERSION = 5
"""Versions 1 and 2 had nothing about collectives and other ranks. Version 3 had no copies by kind,
no distribution of idle times, no doubts, no rank, and convolutions among the matmuls. Version 4 had
attention in backward too, and each kernel of the pictured step.
"""
MAX_PROFILE_BYTES = 256 * 2**20
_HEAD_BYTES = 2**16
_FIRST_WORDS = (b'"source"', b'"work"', b'"phases_from"')


class Work(StrEnum):
    """What the profile lists as kernels."""

    KERNELS = "kernels"
    OPERATORS = "operators"
    """PyTorch's operators, for a trace of a CPU; each without the time of operators inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLabel:
    """What is known of one step beside its times."""

    kind: str = ""
    """Tells steps of one file apart that do different work: `prefill` and `decode`, `with the
    optimizer` and `without the optimizer`; empty where all are alike.
    """
    batch: Count | None = None
    """Requests or sequences, where a range's name says it."""
    tokens: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """How many of a kind there were over all steps, and how long they took together."""

    count: Count
    total_s: Time


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Times of one phase; each tuple has one entry per step."""

    phase: LaunchPhase
    launches: tuple[Count, ...]
    """Number of kernels."""
    kernel_s: tuple[Time, ...]
    """Sum of the kernels' durations, over all streams."""
    busy_s: tuple[Time, ...]
    """The part of the wall time in which at least one kernel or copy, of whatever phase, ran on the
    device.

    It is the mean over the devices that the step used.
    """
    wall_s: tuple[Time, ...]
    """Time on the device from the end of the previous phase to the end of this one, as CUDA events
    would show.

    A phase ends when the last of its kernels ends, or when the host leaves it, if that is later.
    `unattributed` is the time after the last phase; work launched between two phases is in the wall
    time of the later one.
    """
    host_s: tuple[Time, ...]
    """How long the host was in the phase."""
    recomputed_s: tuple[Time, ...]
    """The part of `kernel_s` that recomputes forward inside backward."""
    copies: tuple[Count, ...]
    """Number of copies and fills by the driver, which are not kernels."""
    copy_s: tuple[Time, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationTimes:
    """Kernels of collectives, and copies to peers, that ran during one phase on the device; one
    entry per step.

    The time of an NCCL kernel includes its wait for the other ranks.
    """

    phase: LaunchPhase
    collective: Collective | None
    """None for all kinds together."""
    launches: tuple[Count, ...]
    """Number of kernels or copies that began in the phase."""
    total_s: tuple[Time, ...]
    """The part of the phase's wall time in which at least one of the kernels ran."""
    exposed_s: tuple[Time, ...]
    """The part of `total_s` in which the device ran no kernel that computes, and no copy; the
    rest is overlapped.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes(Timed):
    """All launches of one kernel over the steps, in one phase or (`phase` None) in the whole
    step.
    """

    name: str
    """The profiler's name, cut off after MAX_NAME characters."""
    short_name: str
    kind: KernelClass
    phase: LaunchPhase | None
    mean_s: Time
    median_s: Time
    min_s: Time
    max_s: Time
    stdev_s: Time | None
    """None for a single launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimes(Timed):
    """All kernels of one class over the steps in one phase."""

    kind: KernelClass
    phase: LaunchPhase


class AttentionPart(StrEnum):
    """A part of naive attention."""

    SCORES = "scores"
    SOFTMAX = "softmax"
    VALUES = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTimes(Timed):
    """All kernels within the ranges around one part of attention over the steps, in forward."""

    part: AttentionPart
    phase: LaunchPhase
    product_count: Count
    product_s: Time
    """Time of the part's matmuls."""
    flops: Count | None
    """FLOPs over the same steps; None if the model's shape is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes(Timed):
    """Kernels launched directly inside a range, not in a range nested in it, over the steps, in
    one phase.
    """

    path: tuple[str, ...]
    """Names of the ranges around the launch, the outermost first; empty outside of all modules."""
    phase: LaunchPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes(Timed):
    """Kernels that calls of one operator with one shape launched over the steps, in one phase."""

    name: str
    """Empty for kernels whose operator is not in the file."""
    shape: str
    """Sides of the arguments that are tensors: `16x32, 32x64`; empty if the file lacks them."""
    type: str
    """The profiler's name of the first tensor's type."""
    phase: LaunchPhase
    calls: Count
    flops: Count | None
    """FLOPs of all calls; None where the shape does not say them, and for what is no matmul."""
    bytes: Count | None
    """The least bytes that all calls read and write; None where the shape does not say them."""


class Part(StrEnum):
    """What kernels of the ledger do."""

    MATMUL = "matmul"
    ATTENTION = "fused attention"
    BETWEEN = "between matmuls"
    """Everything that runs between two matmuls or fused attentions, taken together."""
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTimes(Timed):
    """Kernels that do the same over the steps, in one phase: equal matmuls, equal attention, or
    what lies between them.
    """

    phase: LaunchPhase
    part: Part
    names: tuple[str, ...]
    """Short names of the kernels, in the order in which they run first."""
    form: Form | None
    """None between matmuls, and where the tape does not tell which matmul it is."""
    sides: tuple[Count, Count, Count]
    """Rows, inner side and columns of the matmul, or of the scores of attention."""
    batch: Count
    """Number of matmuls in a batched one; for attention, heads of all sequences."""
    element_bytes: Count | None
    """Size of an element of a matmul's factors."""
    calls: Count
    """How often these kernels ran, one after the other."""
    flops: Count | None
    """FLOPs of all calls; of causal attention those that its mask leaves."""
    bytes: Count | None
    """Bytes that all calls read and write, if nothing is read twice; None if it is not known."""
    beside_others_s: Time | None = None
    """The part of `total_s` in which kernels of other rows run too and for which those count; None
    in profiles of earlier versions, which did not look at it.
    """

    @property
    def counted_s(self) -> float:
        """The part of `total_s` that counts for these kernels: so the rows of a ledger and the time
        without a kernel add up to the steps.
        """
        return self.total_s - (self.beside_others_s or 0.0)


class IdleCause(StrEnum):
    """Why the device had nothing to run."""

    LATE_LAUNCH = "late launch"
    """The host was busy and had not yet launched the next kernel: the CPU is the limit."""
    DATA = "waiting for data"
    """The host took a batch, in a range of the phase `data`, and had not yet launched the next
    kernel.
    """
    ALLOCATION = "memory allocation"
    """The host was in a call that allocates or frees memory of the device, or pinned memory."""
    HOST_PAUSE = "host pause"
    """The host neither launched nor waited for longer than HOST_PAUSE_S."""
    HOST_WAITED = "host waited"
    """The host waited for the device (a synchronisation, `.item()`) and launched nothing in the
    meantime.
    """
    BETWEEN_KERNELS = "between kernels"
    """The next kernel was launched in time, and the device took this long to begin it."""
    END_OF_STEP = "end of step"
    """After the last kernel of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTimes(Timed):
    """Idle time of the device over the steps, by cause and by the phase of the kernel that ended
    it.

    At the end of a step, the phase is the step's last. The time is the mean over the devices that a
    step used.
    """

    phase: LaunchPhase
    cause: IdleCause
    median_s: Time | None = None
    longest_s: Time | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes(Timed):
    """Copies or fills of one kind over the steps, or (`kind` None) all of them."""

    kind: str | None
    """Direction and memory: `host to device, pageable`."""
    alone_s: Time
    """The part of the steps in which such copies ran on the device, and no kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One of the longest idle times."""

    step: Count
    start_s: float
    """Time from the start of the step."""
    duration_s: Time
    phase: LaunchPhase
    cause: IdleCause
    before: str
    """Short name of the kernel before the gap; empty at the start of a step."""
    after: str
    """Short name of the kernel after the gap; empty at the end of a step."""
    module: tuple[str, ...]
    """Ranges around the launch of `after`."""
    host_call: str
    """The CUDA call in which the host spent most of the gap; empty for none."""
    host_range: str = ""
    """The innermost range that was open for most of the gap on the thread that launched `after`;
    empty for none.
    """
    library_call: str = ""
    """The innermost call of cuBLAS, cuDNN or the operating system that was open for most of the
    gap on the same thread; empty for none.
    """


class Awaited(StrEnum):
    """The copy that the host waits for."""

    UNKNOWN = ""
    """None, or one of which the file does not say where it goes."""
    TO_HOST = "to the host"
    TO_DEVICE = "to the device, from memory that is not pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCalls(Timed):
    """Calls of one CUDA function over the steps in one phase; calls that wait have an entry of
    their own.
    """

    name: str
    phase: LaunchPhase
    is_launch: bool
    """The function launches kernels, copies or fills."""
    is_wait: bool
    """The calls make the host wait for the device: synchronisations, or copies to the host
    followed by one.
    """
    awaited: Awaited = Awaited.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Start and end of a phase of the pictured step on the host and on the device, in seconds
    from the step's start.
    """

    phase: LaunchPhase
    host_start_s: float
    host_end_s: float
    device_start_s: float
    device_end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Kernels of one class, or copies and fills, on one stream that begin close together in the
    pictured step.
    """

    stream: int
    kind: KernelClass
    start_s: float
    end_s: float
    busy_s: Time
    """How long kernels ran during the piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturedStep:
    """One step, as data for a picture."""

    step: Count
    wall_s: Time
    windows: tuple[Window, ...]
    pieces: tuple[Piece, ...] = ()
    """Empty in profiles of version 4, whose picture needs the trace to be explained again."""
    places: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    """The thousandths of the step, from 0, in which a kernel begins, by the name that
    `KernelTimes` has; empty in profiles of earlier versions.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Kernels that are in none of the profiled steps."""

    warmup: Count
    warmup_s: Time
    outside: Count
    """Kernels launched outside of every step."""
    outside_s: Time
    no_launch: Count
    """Kernels whose launch is not in the file."""
    no_launch_s: Time
    cut: Count = 0
    """Kernels of steps that an edge of the file cuts."""
    cut_s: Time = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenSteps:
    """The time from the end of a profiled step on the device to the beginning of the next one, over
    all of them.
    """

    total_s: Time
    idle_s: Time
    """The part in which no device ran anything."""
    data_s: Time
    """The part of `idle_s` in which the host was in a range of the phase `data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Times of one of the ranks that share a step; each tuple has one entry per step."""

    rank: Count
    step_s: tuple[Time, ...]
    """Wall time of each step on the host."""
    phases: tuple[PhaseTimes, ...]
    communication: tuple[CommunicationTimes, ...]
    waited_s: tuple[Time, ...] | None
    """How much longer this rank's kernels of collectives ran than the shortest kernel of the same
    collective, in total.

    All kernels of a collective end together, so the shortest one began last: the other ranks waited
    for its rank. None if the ranks did not run the same collectives, if some are not here, and for
    a CPU.
    """
    last: tuple[Count, ...] | None = None
    """Number of collectives that this rank alone began last; None where `waited_s` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkew:
    """How far apart the ranks began the same collective in one step."""

    collectives: Count
    median_s: Time
    """Of the times from the first rank's start to the last one's."""
    largest_s: Time


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes(Timed):
    """Kernels of one kind of collective in one process group over the steps; sums over those of its
    ranks whose traces are here.
    """

    group: str
    """PyTorch's description of the group, or its name; empty where the file has neither."""
    ranks: str
    """Its ranks, in the profiler's words."""
    size: Count | None
    """Number of its ranks."""
    here: Count
    """Number of its ranks whose traces are here."""
    collective: Collective
    bytes: Count | None
    """Bytes of the whole tensors; None where the file does not say them."""
    exposed_s: Time
    """The part in which the device ran no kernel that computes, and no copy."""
    sent_s: Time
    """The part from the start of the last rank; all of `total_s` unless `is_met`."""
    is_met: bool
    """All ranks of the group are here and ran the same collectives, so that waiting for the last
    one is told from sending.
    """

    @property
    def bytes_per_s(self) -> float | None:
        """Algorithm bandwidth; a lower bound unless `is_met`."""
        return self.bytes / self.sent_s if self.bytes and self.sent_s else None

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth by the convention of nccl-tests; a lower bound unless `is_met`."""
        share = None if self.size is None else bus_share(self.collective, self.size)
        rate = self.bytes_per_s
        return None if rate is None or share is None else rate * share


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterMean:
    """Mean of a counter of the device over the steps, in one phase or (`phase` None) in all."""

    counter: str
    phase: LaunchPhase | None
    count: Count
    """Number of samples."""
    share: Annotated[float, msgspec.Meta(ge=0)]
    """Part of the counter's highest value."""
    module: tuple[str, ...] = ()
    """Path of the module, where the mean is over its kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedPeak:
    """The most memory that was reserved at one time, by any process of the file."""

    kind: str
    """Whose memory: that of the device, or pinned memory of the host."""
    device: int
    phase: LaunchPhase | None
    """None for the whole file, with what lies outside of the steps."""
    peak_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTimes(Timed):
    """Kernels that one line of the program launched, over the steps."""

    place: Place | None
    """The innermost line outside of libraries; None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One explained trace. The kernels of `phases` and `left` add up to all kernels of the file,
    to the nanosecond.
    """

    source: str
    """Name of the file."""
    work: Work
    device_names: tuple[str, ...]
    phases_from: tuple[PhaseSource, ...]
    """The evidence for the phases of each process."""
    num_steps: Count
    is_whole_trace: bool
    """The file has no steps, so it counts as one, from the first event of the device to the
    last.
    """
    is_warmup: bool
    """The file has only warm-up steps, which are shown."""
    num_kernels: Count
    """Number of kernels, or operators, in the whole file."""
    kernel_s: Time
    """Their total time in the whole file."""
    left: Left
    step_s: tuple[Time, ...]
    """Wall time of each step on the host: its range, which in this program's runs ends with a
    synchronisation.
    """
    phases: tuple[PhaseTimes, ...]
    """The phases in order; `unattributed` holds what is in a step but in no phase."""
    kernels: tuple[KernelTimes, ...]
    """Kernels of the whole step, then of each phase; the longest total first."""
    classes: tuple[ClassTimes, ...]
    attention: tuple[AttentionTimes, ...]
    """Empty unless attention's parts have ranges."""
    modules: tuple[ModuleTimes, ...]
    idle: tuple[IdleTimes, ...]
    gaps: tuple[Gap, ...]
    """The longest idle times, the longest first."""
    host_calls: tuple[HostCalls, ...]
    pictured: PicturedStep | None
    """The step of median wall time."""
    notes: tuple[str, ...]
    """Sentences about what the file lacks."""
    lacks_device: bool = False
    """The operators launched work of a device, which is not in the file."""
    communication: tuple[CommunicationTimes, ...] = ()
    """Collectives by phase and kind; empty for a trace of a CPU."""
    ranks: tuple[RankTimes, ...] = ()
    """All ranks of a run on several ranks; everything else in the profile is about the first
    rank.
    """
    copies: tuple[CopyTimes, ...] = ()
    """The longest total first, then all together."""
    doubts: tuple[str, ...] = ()
    """What cannot be in so many events that no verdict is sure."""
    rank: Count | None = None
    """Rank of the process, if the file or its ranges name it."""
    between: BetweenSteps | None = None
    """None where steps follow each other at once, and where there is only one."""
    graph_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the steps' kernels that CUDA graphs launched."""
    is_compiled: bool = False
    """Whether torch.compile made a kernel of the file, in a step or outside of all."""
    steps_from: str = ""
    """What showed the steps, in words: the name of their ranges, for example."""
    step_labels: tuple[StepLabel, ...] = ()
    """One for each step; empty where no step has any."""
    passes_per_step: Count | None = None
    """Passes of backward before each step of the optimizer; None where steps differ, or where
    either was not seen.
    """
    beside: tuple[PicturedStep, ...] = ()
    """Several steps of each kind, in coarser pieces; empty for a single step."""
    operators: tuple[OperatorTimes, ...] = ()
    """The longest first; empty if the file shows none. They add up to the kernels of `phases`."""
    counters: tuple[CounterMean, ...] = ()
    module_counters: tuple[CounterMean, ...] = ()
    """Only where there are samples enough."""
    reserved: tuple[ReservedPeak, ...] = ()
    places: tuple[PlaceTimes, ...] = ()
    """The longest total first; empty if the file has no stacks."""
    ledger: tuple[LedgerTimes, ...] = ()
    """The longest first; empty if the step has no tape. They add up to the kernels of `phases`."""
    groups: tuple[GroupTimes, ...] = ()
    """The longest first; of all ranks here. Empty for one rank whose file does not say what its
    collectives exchange.
    """
    skew: tuple[StepSkew, ...] = ()
    """One for each step; empty where it is not seen."""
    format_version: int = PROFILE_FORMAT_VERSION

    def kernels_of(self, phase: LaunchPhase | None) -> list[KernelTimes]:
        """The kernels of one phase, or of the whole step if that is None."""
        return [kernel for kernel in self.kernels if kernel.phase is phase]


def encode_profile(profile: StepProfile) -> bytes:
    """The profile as indented JSON."""
    return encode_json(profile, indent=1)


def decode_profile(data: bytes) -> StepProfile:
    """Decode a profile; raise ValueError for other data and for a profile that contradicts
    itself.
    """
    try:
        profile = msgspec.json.decode(data, type=StepProfile)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a step profile: {error}") from error
    if profile.format_version > PROFILE_FORMAT_VERSION:
        newest = (
            f"format version {profile.format_version} is newer than this program's "
            f"{PROFILE_FORMAT_VERSION}"
        )
        raise ValueError(f"not a step profile of this version: {newest}; update the program")
    if wrong := next(contradictions(profile), None):
        raise ValueError(f"not a whole step profile: {wrong}; explain the trace again")
    return profile


def contradictions(profile: StepProfile) -> Iterator[str]:
    """Contradictions in a profile, in words; one that was changed by hand has some."""
    left, phases, num_steps = profile.left, profile.phases, profile.num_steps
    times = [profile.step_s, *(phase.wall_s for phase in phases)]
    if not num_steps or any(len(of_steps) != num_steps for of_steps in times):
        yield f"it has {num_steps} steps, and times of others"
    count = left.warmup + left.outside + left.no_launch + left.cut
    time_s = left.warmup_s + left.outside_s + left.no_launch_s + left.cut_s
    for phase in phases:
        count += sum(phase.launches)
        time_s += sum(phase.kernel_s)
    is_whole_time = math.isclose(time_s, profile.kernel_s, rel_tol=1e-9, abs_tol=1e-9)
    if count != profile.num_kernels or not is_whole_time:
        yield (
            f"phases and what is left hold {count} {profile.work} and {time_s:.9f} s, "
            f"needed all {profile.num_kernels} and {profile.kernel_s:.9f} s of the file"
        )
    in_steps = sum(sum(phase.launches) for phase in phases)
    in_steps_s = sum(sum(phase.kernel_s) for phase in phases)
    ledger_s = sum(row.total_s for row in profile.ledger)
    if profile.ledger and not math.isclose(ledger_s, in_steps_s, rel_tol=1e-9, abs_tol=1e-9):
        yield f"its ledger holds {ledger_s:.9f} s of {in_steps_s:.9f} s in steps"
    parted: tuple[tuple[str, tuple[Timed, ...]], ...] = (
        ("operators", profile.operators),
        ("lines", profile.places),
        ("ledger", profile.ledger),
    )
    for name, parts in parted:
        if parts and sum(part.count for part in parts) != in_steps:
            yield f"its {name} have other kernels than its {in_steps} in steps"


def read_profile(path: Path) -> StepProfile | None:
    """Read a profile that `write_profile` wrote; return None for a file of another kind.

    Raises ProfileError for a damaged profile.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if not all(word in head for word in _FIRST_WORDS):
            return None
        data = head + file.read(MAX_PROFILE_BYTES)
    try:
        return decode_profile(data)
    except ValueError as error:
        raise ProfileError(path, str(error)) from error


def write_profile(profile: StepProfile, path: Path) -> None:
    """Write the profile as JSON."""
    write_atomically(path, encode_profile(profile))
