"""Where the time of the profiled steps went: all that is kept of one kernel trace, and all that its tables are made of.

Raw values of every step are kept; what is "per step" is derived from them. Warm-up steps are left out, unless the trace
holds no others. All times are seconds (`_s`) of device or host as said.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase, PhaseSource
from cs336_systems.files import encode_json, write_atomically
from cs336_systems.record import MAX_TIME_S, Count

Time = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S)]
PROFILE_FORMAT_VERSION = 1
MAX_PROFILE_BYTES = 256 * 2**20
_HEAD_BYTES = 2**16
_FIRST_WORDS = (b'"source"', b'"work"', b'"phases_from"')


class Work(StrEnum):
    """What stands in the place of kernels."""

    KERNELS = "kernels"
    OPERATORS = "operators"
    """A trace of a CPU has no kernels: PyTorch's operators, each with the time that it spent in no other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """One phase; each tuple has one entry per step."""

    phase: LaunchPhase
    launches: tuple[Count, ...]
    """Kernels."""
    kernel_s: tuple[Time, ...]
    """Durations of the kernels, added up over streams."""
    busy_s: tuple[Time, ...]
    """Time in which at least one kernel or copy launched in any phase ran on the device, within the wall time.

    The mean over the devices that the step used.
    """
    wall_s: tuple[Time, ...]
    """On the device, from the end of the phase before to its own end, as CUDA events between the phases would see it:
    a phase ends when the last of its kernels has, or when the host leaves it, if that is later. For `unattributed` what
    follows the last phase: work launched between two phases is in the wall time of the later one."""
    host_s: tuple[Time, ...]
    """How long the host was in the phase, launching."""
    recomputed_s: tuple[Time, ...]
    """Of `kernel_s`, forward done again inside backward."""
    copies: tuple[Count, ...]
    """Copies and fills by the driver, which are no kernels."""
    copy_s: tuple[Time, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """All launches of one kernel over the steps, in one phase or (`phase` None) in the whole step."""

    name: str
    """As the profiler gives it, shortened to MAX_NAME characters."""
    short_name: str
    kind: KernelClass
    phase: LaunchPhase | None
    count: Count
    total_s: Time
    mean_s: Time
    median_s: Time
    min_s: Time
    max_s: Time
    stdev_s: Time | None
    """None for a single launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimes:
    """All kernels of one class over the steps in one phase."""

    kind: KernelClass
    phase: LaunchPhase
    count: Count
    total_s: Time


class AttentionPart(StrEnum):
    """What attention written out consists of."""

    SCORES = "scores"
    SOFTMAX = "softmax"
    VALUES = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTimes:
    """One part of attention over the steps, in forward or backward.

    In forward: all kernels within the part's range. In backward, where the ranges are of modules only: the products
    that differentiate the forward part's products, and the kernels of class softmax within attention.
    """

    part: AttentionPart
    phase: LaunchPhase
    count: Count
    total_s: Time
    product_count: Count
    product_s: Time
    """Of these, matrix products."""
    flops: Count | None
    """Over the same steps; None where the model's shape is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCounts:
    """Matrix products over the steps in one phase, without helpers such as the sum over split-K parts."""

    phase: LaunchPhase
    linear: Count
    """Of linear layers."""
    linear_s: Time
    attention: Count
    """Scores and values."""
    attention_s: Time
    unknown: Count
    """Those of which that cannot be told: no ranges around attention, or a compiler changed the order."""
    unknown_s: Time


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """Kernels launched inside a range and inside none of its own ranges, over the steps, in one phase."""

    path: tuple[str, ...]
    """Names of the ranges around the kernel, the outermost first; empty for kernels in no module's range."""
    phase: LaunchPhase
    count: Count
    total_s: Time


class IdleCause(StrEnum):
    """Why the device had nothing to run."""

    LATE_LAUNCH = "late launch"
    """The host was at work and had not launched the next kernel yet: the CPU is the limit."""
    HOST_PAUSE = "host pause"
    """The host did neither launch nor wait for longer than HOST_PAUSE_S: it slept or computed something else."""
    HOST_WAITED = "host waited"
    """The host waited for the device (a synchronisation, `.item()`), and launched nothing meanwhile."""
    BETWEEN_KERNELS = "between kernels"
    """The next kernel was launched in time and the device took as long to begin it."""
    END_OF_STEP = "end of step"
    """After the last kernel of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTimes:
    """Idle time of the device over the steps, by phase (of the kernel that ended the wait) and cause.

    At the end of a step, the phase is its last. The time is the mean over the devices that a step used.
    """

    phase: LaunchPhase
    cause: IdleCause
    count: Count
    total_s: Time


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One of the longest idle times."""

    step: Count
    start_s: float
    """From the start of its step."""
    duration_s: Time
    phase: LaunchPhase
    cause: IdleCause
    before: str
    """Short name of the kernel that ended before; empty at the start of a step."""
    after: str
    """Short name of the kernel that ended the wait; empty at the end of a step."""
    module: tuple[str, ...]
    """Ranges around the launch of `after`."""
    host_call: str
    """The CUDA call in which the host spent most of the gap; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCalls:
    """Calls of one function of the CUDA runtime or driver over the steps, in one phase; those that wait apart."""

    name: str
    phase: LaunchPhase
    count: Count
    total_s: Time
    is_launch: bool
    """It launches kernels, copies or fills."""
    is_wait: bool
    """It makes the host wait for the device: a synchronisation, or a copy to the host that is followed by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When one phase of the pictured step was, on the host and on the device, in seconds from the step's start."""

    phase: LaunchPhase
    host_start_s: float
    host_end_s: float
    device_start_s: float
    device_end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Kernels of one class and phase that followed each other closely on one stream of the pictured step.

    Where there are too many to draw, those in a sliver too thin to see, with the class that ran longest.
    """

    stream: int
    phase: LaunchPhase
    kind: KernelClass
    start_s: float
    end_s: float
    busy_s: Time
    """How long of it kernels ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturedStep:
    """The step of median wall time, for a picture."""

    step: Count
    wall_s: Time
    windows: tuple[Window, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Kernels that are in none of the profiled steps."""

    warmup: Count
    warmup_s: Time
    outside: Count
    """Launched outside of every step."""
    outside_s: Time
    no_launch: Count
    """Without a launch in the file."""
    no_launch_s: Time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One trace, explained. The kernels of `phases` and of `left` together are all of the file's, to the nanosecond."""

    source: str
    """Name of the file."""
    work: Work
    device_names: tuple[str, ...]
    phases_from: tuple[PhaseSource, ...]
    """How the phases of each process were told."""
    num_steps: Count
    is_whole_trace: bool
    """There are no steps in the file: the whole of it counts as one."""
    is_warmup: bool
    """There are only warm-up steps in the file: they are what is shown."""
    num_kernels: Count
    """In the whole file; or operators."""
    kernel_s: Time
    """In the whole file."""
    left: Left
    step_s: tuple[Time, ...]
    """Wall time of each step by the host's clock: its range, which ends with a synchronisation in our own records."""
    phases: tuple[PhaseTimes, ...]
    """In order; `unattributed` holds what is in a step and in no phase."""
    kernels: tuple[KernelTimes, ...]
    """By total time, the longest first: those of the whole step, then those of each phase."""
    classes: tuple[ClassTimes, ...]
    products: tuple[ProductCounts, ...]
    attention: tuple[AttentionTimes, ...]
    """Empty where attention is not written out in ranges of its own."""
    modules: tuple[ModuleTimes, ...]
    idle: tuple[IdleTimes, ...]
    gaps: tuple[Gap, ...]
    """The longest, in order of duration."""
    host_calls: tuple[HostCalls, ...]
    pictured: PicturedStep | None
    notes: tuple[str, ...]
    """What the file cannot tell, in sentences."""
    format_version: int = PROFILE_FORMAT_VERSION


def encode_profile(profile: StepProfile) -> bytes:
    """The profile as indented JSON."""
    return encode_json(profile, indent=1)


def decode_profile(data: bytes) -> StepProfile:
    """The profile in `data`; raise ValueError where there is none."""
    try:
        profile = msgspec.json.decode(data, type=StepProfile)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a step profile: {error}") from error
    if wrong := next(_contradictions(profile), None):
        raise ValueError(f"not a whole step profile: {wrong}; explain the trace again")
    return profile


def _contradictions(profile: StepProfile) -> Iterator[str]:
    """What cannot be, of a file that was cut or changed by hand."""
    num_steps = profile.num_steps
    if not num_steps:
        yield "it needs at least one step"
    of_steps = [("step_s", profile.step_s)]
    of_steps += [(f"{f.name} of {phase.phase}", getattr(phase, f.name))
                 for phase in profile.phases for f in fields(phase) if f.name != "phase"]  # fmt: skip
    for name, values in of_steps:
        if len(values) != num_steps:
            yield f"{name} needs {num_steps} entries, one for each step, got {len(values)}"
    pictured = () if profile.pictured is None else (profile.pictured,)
    for seen in (*pictured, *profile.gaps):
        if seen.step >= num_steps:
            yield f"there are {num_steps} steps, and what is said of step {seen.step} has none"
    left, phases = profile.left, profile.phases
    count = sum(sum(phase.launches) for phase in phases) + left.warmup + left.outside + left.no_launch
    time_s = sum(sum(phase.kernel_s) for phase in phases) + left.warmup_s + left.outside_s + left.no_launch_s
    if count != profile.num_kernels or not math.isclose(time_s, profile.kernel_s, rel_tol=1e-9, abs_tol=1e-9):
        yield (
            f"phases and what is left hold {count} {profile.work} and {time_s:.9f} s, "
            f"needed all {profile.num_kernels} and {profile.kernel_s:.9f} s of the file"
        )


def read_profile(path: Path) -> StepProfile | None:
    """The profile that `write_profile` wrote to `path`; None where the file is of another kind.

    Raises ProfileError where it is of this kind and damaged.
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
