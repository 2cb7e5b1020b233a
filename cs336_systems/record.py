"""The result of a run: raw times, memory, telemetry, environment, failure. One run is one JSON
file, or one line of the file of all runs that a published directory has.

All quantities are SI and unscaled: `_s` seconds, `_bytes` bytes, `_hz` hertz, `_w` watts, `_j`
joules; `_c` is degrees Celsius.
"""

import contextlib
import statistics
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec

from .config import Phase, RunConfig
from .files import RECORD, FileError, encode_json, read_json, write_atomically
from .loop_record import LoopRank, LoopRecord
from .subject import Subject, WatchedLoop, loop_of_earlier_record

FORMAT_VERSION = 1
RUNS = "runs"
"""The folder of records in a directory of results."""
MAX_TIME_S = 1e9
"""Longest time that a record may hold (thirty years), so that sums of times stay finite."""
# slow, and several tables ask for the same times
_stdev = lru_cache(maxsize=4096)(statistics.stdev)

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A count of at most 64 bits; JSON itself would allow any number of digits."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S)]
"""A time that a record may hold."""


def time_now(ago_s: float = 0.0) -> str:
    """The time of so many seconds ago, as records have it."""
    return (datetime.now(UTC) - timedelta(seconds=ago_s)).isoformat(timespec="seconds")


class RecordError(FileError):
    """The file `path` should hold a record and does not."""


class Status(StrEnum):
    """How a run, or a cell of a study, ended. Only the times of `ok` count.

    `unavailable` is for cells only: the data type or the device has no such kernel.
    """

    OK = "ok"
    UNAVAILABLE = "unavailable"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    KILLED = "killed"
    CUDA_ERROR = "cuda_error"
    INVALID = "invalid"

    @property
    def is_result(self) -> bool:
        """Whether the same run or cell would be expected to end the same way again; if not, a
        run is tried again.
        """
        return self in (Status.OK, Status.UNAVAILABLE, Status.OOM)


class WarningCode(StrEnum):
    """Reason to doubt a measured time."""

    FEW_WARMUP_STEPS = "few-warmup-steps"
    UNSTABLE = "unstable"
    OUTLIERS = "outliers"
    DRIFT = "drift"
    RECOMPILED = "recompiled"
    ALLOCATOR_GREW = "allocator-grew"
    THROTTLED = "throttled"
    GPU_SHARED = "gpu-shared"
    CPU_SHARED = "cpu-shared"
    PROCESSES_APART = "processes-apart"
    LAUNCH_BOUND = "launch-bound"
    UNEVEN_RANKS = "uneven-ranks"
    SKIPPED_STEPS = "skipped-steps"
    NOT_FINITE = "not-finite"
    NO_TELEMETRY = "no-telemetry"
    NO_SNAPSHOT = "no-snapshot"
    NOT_SEEN = "not-seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWarning:
    """An observation that puts a time in doubt; the message also says what to do about it."""

    code: WarningCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run failed."""

    message: str
    """One line for the table."""
    where: str | None = None
    """The phase and step that failed; None if the worker could not report it."""
    requested_bytes: Count | None = None
    free_bytes: Count | None = None
    signal: str | None = None
    traceback: str | None = None
    log_tail: str | None = None
    """The last lines of the worker's standard output and error."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Raw times of one phase. Statistics are derived from them, never stored."""

    phase: Phase
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ValueError without times, or for a time out of range."""
        if not self.times_s or not all(0 <= time_s <= MAX_TIME_S for time_s in self.times_s):
            raise ValueError(
                f"{self.phase} needs at least one time, each from 0 to {MAX_TIME_S:g} s"
            )

    @property
    def mean_s(self) -> float:
        """Mean of the times in seconds."""
        return statistics.fmean(self.times_s)

    @property
    def stdev_s(self) -> float | None:
        """Sample standard deviation, or None for a single time."""
        return _stdev(self.times_s) if len(self.times_s) > 1 else None

    @property
    def median_s(self) -> float:
        """Median of the times in seconds."""
        return statistics.median(self.times_s)

    @property
    def min_s(self) -> float:
        """Shortest of the times in seconds."""
        return min(self.times_s)

    @property
    def cv(self) -> float | None:
        """Coefficient of variation, std / mean, or None for a single time or a mean of 0."""
        if self.stdev_s is None or not self.mean_s:
            return None
        return self.stdev_s / self.mean_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Counters of PyTorch's CUDA allocator. Peaks are those of the measured steps unless said
    otherwise.
    """

    peak_allocated_bytes: Count
    peak_reserved_bytes: Count
    first_step_peak_allocated_bytes: Count | None = None
    """Peak of the first warm-up step, at whose end the optimizer makes its state; None without
    warm-up.
    """
    segments_allocated: Count
    """Segments that the allocator requested from the driver during the measured steps; 0 in a
    steady state.
    """
    alloc_retries: Count
    """How often the allocator flushed its cache during the measured steps to satisfy an
    allocation.
    """


class MomentName(StrEnum):
    """When a rank's memory is looked at: before the first step, and before and after the optimizer
    in a later step.

    The last of them is after the gradients have been dropped.
    """

    INITIALISED = "after initialisation"
    BEFORE_OPTIMIZER = "before the optimizer's step"
    AFTER_OPTIMIZER = "after the optimizer's step"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMoment:
    """What a rank keeps at a moment."""

    moment: MomentName
    allocated_bytes: Count | None
    """All that PyTorch's CUDA allocator has given out; None on a CPU."""
    parameters_bytes: Count
    """Bytes of the parameters and of their low-precision copies, if the model keeps any."""
    gradients_bytes: Count
    optimizer_state_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of the GPU at one moment, from NVML."""

    sm_clock_hz: Count
    max_sm_clock_hz: Count
    memory_clock_hz: Count
    power_w: float
    temperature_c: int
    throttle_reasons: tuple[str, ...]
    other_processes: Count
    """Other processes that hold a compute context on this GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """State of the GPU before the last warm-up step and just after the measured steps."""

    before: GpuState
    after: GpuState
    energy_per_step_j: float | None = None
    """Energy of the whole card per measured step (skipped steps included), from the card's own
    counter.

    The counter is updated about every 0.1 s on an H200, so the value is rough where all steps
    together take less than a second.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """How busy the units of the GPU were, by its own counters (NVML's GPM): means over `span_s`,
    which lies within the measured steps and has what lies between them. None is not counted.

    The counters are renewed about every 0.1 s, so the values are rough where the span is less than
    a second.
    """

    span_s: Seconds
    sm_share: float | None = None
    """Share of the multiprocessors that had work."""
    tensor_share: float | None = None
    """Share of the time in which tensor pipes computed, at the clock that the GPU had."""
    dram_share: float | None = None
    """Share of the memory's bandwidth."""
    nvlink_bytes_per_s: float | None = None
    """Rate over all NVLinks, and over PCIe, in the direction with more."""
    pcie_bytes_per_s: float | None = None
    pcie_peak_bytes_per_s: float | None = None
    """What the link to the host can move in one direction; None if not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Conditions that records of one table must share."""

    device_name: str
    driver: str | None
    torch: str
    code: str
    """Digest of the measuring source code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a run was measured."""

    identity: Identity
    device_uuid: str | None = None
    device_memory_bytes: Count | None = None
    cuda: str | None = None
    cudnn: str | None = None
    quack: str | None = None
    flash_attention_4: str | None = None
    python: str
    platform: str
    host: str
    cpu: str
    cpu_count: Count
    load_1min: float | None = None
    torch_threads: Count
    float32_matmul_precision: str
    allow_tf32_matmul: bool | None = None
    allow_tf32_cudnn: bool | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    package_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file of the user's that a run depends on (a model's source, a token file), as it was
    when the run began.
    """

    name: str
    """The same in every run that depends on the file."""
    state: str | None
    """A digest, or size and time of change; None if the file could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something that a run waited for until its steps were timed."""

    what: str
    seconds: Seconds
    """Without other waits inside it, such as the compilation inside a warm-up step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Wall time of the parts of a run. Warm-up and measured are sums over steps."""

    setup_s: Seconds
    warmup_s: Seconds
    measured_s: Seconds
    total_s: Seconds
    """From the first line of measure() to the finished record."""
    waits: tuple[Wait, ...] = ()
    """What the run waited for, in the order in which the waits ended. What came before measure() is
    known only of a command that measures in its own process. Empty in records written before this
    field existed.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What torch.compile did for the run: all of it during warm-up, unless there is a warning
    `recompiled`.
    """

    seconds: Seconds
    """Time spent compiling, as the compiler counts it; short if its cache on disk was already
    filled.
    """
    graphs: Count
    graph_breaks: Count
    """Places where the compiler had to end a graph and return to Python."""
    recompiles: Count
    """How often code was compiled again because an assumption that it was compiled under no
    longer held.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one kind in a step."""

    collective: str
    """Its name in torch.distributed's C++ library, such as allreduce."""
    count: Count
    payload_bytes: Count
    """Total bytes of the whole tensors; for an all-gather, of the gathered result."""
    sent_bytes: Count
    """Bytes that each rank sends if the ranks form a ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What is kept of one rank besides what all ranks share."""

    rank: Count
    measurements: tuple[Measurement, ...]
    """The phases in order, then the whole step, by the rank's own clock."""
    warmup_times_s: tuple[Seconds, ...]
    host_times_s: tuple[Seconds, ...]
    host_phases: tuple[Measurement, ...] = ()
    losses: tuple[float | None, ...]
    """Losses of the rank's own batches."""
    memory: Memory | None = None
    moments: tuple[MemoryMoment, ...] = ()
    telemetry: Telemetry | None = None
    device_uuid: str | None = None
    warnings: tuple[RunWarning, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything that is kept of one run, which is that of a configured step or of a watched loop.

    Of a run on several ranks, each step and its phases are those of the rank that took longest,
    losses are means over the ranks, memory is that of the rank with the highest peak, and what else
    belongs to one process is rank 0's.
    """

    config: RunConfig | None = None
    """None for a watched loop."""
    loop: WatchedLoop | None = None
    """None for a configured step."""
    status: Status
    started_at: str
    """UTC, ISO 8601."""
    format_version: int = FORMAT_VERSION
    failure: Failure | None = None
    failed_rank: Count | None = None
    """The rank that failed first, or that the others waited for at the timeout; None if not
    known.
    """
    measurements: tuple[Measurement, ...] = ()
    """The phases in order, then the whole step; empty unless status is ok."""
    warmup_times_s: tuple[Seconds, ...] = ()
    host_times_s: tuple[Seconds, ...] = ()
    """How long the host took to launch each measured step."""
    host_phases: tuple[Measurement, ...] = ()
    """How long the host took to launch each phase; empty on a CPU and where the host waits after
    each phase, and in records written before this field existed.
    """
    between_s: tuple[Seconds, ...] = ()
    """Of a watched loop: from the end of a step to the beginning of the next, on the device.
    Else empty.
    """
    seen: LoopRecord | None = None
    """What else was seen of a watched loop; None for a configured step, and in records written
    before this field existed.
    """
    losses: tuple[float | None, ...] = ()
    """Loss of every step, warm-up included; None for one that was not finite."""
    skipped_steps: Count = 0
    """Steps that GradScaler skipped; they have no times."""
    collector_on: bool | None = None
    """Whether Python's garbage collector was on during the measured steps."""
    num_parameters: Count | None = None
    memory: Memory | None = None
    moments: tuple[MemoryMoment, ...] = ()
    """Memory of a run on several ranks; the later moments are of a step without CUDA graphs.
    Empty for one process.
    """
    ranks: tuple[RankRecord, ...] = ()
    """Empty for a run in one process, and for one that failed."""
    traffic: tuple[Traffic, ...] | None = None
    """What one rank sends in a step, counted in a step after the measured ones; None for a run
    in one process.
    """
    compilation: Compilation | None = None
    """None for an eager run and for one that failed."""
    telemetry: Telemetry | None = None
    activity: Activity | None = None
    """None where the GPU has no such counters, under a profiler, and of steps that are over at
    once.
    """
    environment: Environment | None = None
    inputs: tuple[Input, ...] = ()
    """Empty for this project's model on random tokens, and in records written before this field
    existed.
    """
    durations: Durations | None = None
    warnings: tuple[RunWarning, ...] = ()

    def __post_init__(self) -> None:
        """Take the loop out of a record in which an earlier version wrote it as a configuration;
        raise ValueError unless the record has a configuration or a loop, and not both.
        """
        if self.loop is None and self.config is not None:
            loop = loop_of_earlier_record(self.config)
            if loop is not None:
                object.__setattr__(self, "config", None)
                object.__setattr__(self, "loop", loop)
        if (self.config is None) == (self.loop is None):
            raise ValueError("needed `config` or `loop`, of which a record has one")

    @property
    def subject(self) -> Subject:
        """The configured step or the watched loop."""
        subject = self.config or self.loop
        assert subject is not None
        return subject

    @property
    def key(self) -> str:
        """Name of the run, which is also that of its files."""
        return self.subject.key

    @property
    def device_name(self) -> str | None:
        """Name of the device that was measured; None for a run that ended before it could name its
        device.
        """
        return None if self.environment is None else self.environment.identity.device_name

    @property
    def times_s(self) -> dict[str, tuple[float, ...]]:
        """The times of the phases and of the whole step, by name."""
        return {str(times.phase): times.times_s for times in self.measurements}

    def measurement(self, phase: Phase) -> Measurement | None:
        """Times of `phase`, or None where the run has none."""
        for measurement in self.measurements:
            if measurement.phase is phase:
                return measurement
        return None


def encode_record(record: RunRecord) -> bytes:
    """The record as indented JSON."""
    return encode_json(record)


def read_record(path: Path, data: bytes | None = None) -> RunRecord:
    """The record in the file, or in `data` if that is its content; raise RecordError, which names
    the file and the first thing wrong in it.
    """
    return read_json(path, RunRecord, RECORD, version=FORMAT_VERSION, error=RecordError, data=data)


def write_record(record: RunRecord, directory: Path) -> Path:
    """Write the record under its key into `directory` and return its path."""
    path = directory / f"{record.key}.json"
    write_atomically(path, encode_record(record))
    return path


def write_rank(rank: LoopRank, runs: Path) -> Path:
    """Write what one rank of a watched loop has seen, which is joined to the record of the first
    rank when that is read.
    """
    directory = runs.with_name("ranks") / rank.run
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{rank.rank}.json"
    write_atomically(path, msgspec.json.encode(rank))
    return path


def with_other_ranks(record: RunRecord, runs: Path) -> RunRecord:
    """The record with what the other ranks of its loop have written so far, by rank."""
    seen = record.seen
    if seen is None or seen.rank is None or not seen.rank.run:
        return record
    others = []
    for path in (runs.with_name("ranks") / seen.rank.run).glob("*.json"):
        # a rank whose file is broken is as one that has not written yet
        with contextlib.suppress(OSError, msgspec.DecodeError):
            others.append(msgspec.json.decode(path.read_bytes(), type=LoopRank))
    others.sort(key=lambda rank: rank.rank)
    return replace(record, seen=replace(seen, other_ranks=tuple(others)))


def published_runs(runs: Path) -> Path:
    """The file beside the folder `runs` in which each line is a record, as published results have
    it.
    """
    return runs.with_name(f"{runs.name}.jsonl")


def load_records(runs: Path) -> tuple[list[RunRecord], list[RecordError]]:
    """All readable records of a directory of results by key, and the errors of the unreadable
    ones.

    They are read from the files of the folder `runs`, and from the lines of the file
    `published_runs` beside it. A run that both have was repeated later: its file counts.
    """
    records: dict[str, RunRecord] = {}
    problems: list[RecordError] = []
    joined = published_runs(runs)
    lines = joined.read_bytes().splitlines() if joined.is_file() else ()
    for number, line in enumerate(lines, start=1):
        try:
            record = read_record(Path(f"{joined}:{number}"), line)
            records[record.key] = record
        except RecordError as problem:
            problems.append(problem)
    for path in sorted(runs.glob("*.json")):
        try:
            records[path.stem] = with_other_ranks(read_record(path), runs)
        except RecordError as problem:
            problems.append(problem)
    return [records[key] for key in sorted(records)], problems
