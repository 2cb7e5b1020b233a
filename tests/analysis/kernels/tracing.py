"""Traces made by hand or at random, as our own type and as the SQLite that nsys exports."""

import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels.attribution import Attribution, attribute
from cs336.analysis.kernels.explain import summarise
from cs336.analysis.kernels.modules import is_matmul_itself
from cs336.analysis.kernels.phases import PHASES, LaunchPhase
from cs336.analysis.kernels.step_profile import StepProfile
from cs336.analysis.kernels.trace import ApiCalls, DeviceWork, Ranges, Trace

PROCESS = 7 << 24
MAIN, AUTOGRAD = PROCESS + 100, PROCESS + 101


@dataclass(frozen=True)
class Kernel:
    """A kernel or a copy and its launch; `launch_ns` None where the launch was not seen."""

    name: str
    launch_ns: int | None
    thread: int = MAIN
    start_ns: int = 0
    duration_ns: int = 10
    stream: int = 7
    graph: int = 0
    device: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    """What torch.profiler writes of it besides."""


@dataclass(frozen=True)
class Span:
    """A range; `end_ns` None where it is still open, `is_nested` False where it is started and
    ended, not pushed. Of another category it is an operator or a frame of Python, which nsys has
    not.
    """

    name: str
    start_ns: int
    end_ns: int | None
    thread: int = MAIN
    is_nested: bool = True
    category: str = "user_annotation"
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A call of the CUDA runtime; it launched what has its start as launch, on its thread."""

    name: str
    start_ns: int
    end_ns: int
    thread: int = MAIN
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Recording:
    """What happened, row by row; files have a call for each launch if there are no others."""

    kernels: list[Kernel] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    copies: list[Kernel] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def launch(self, name: str, launch_ns: int, thread: int = MAIN, duration_ns: int = 10) -> None:
        # long after its range, as on a device that lags behind
        free = self.kernels[-1].start_ns + self.kernels[-1].duration_ns if self.kernels else 0
        self.kernels.append(
            Kernel(name, launch_ns, thread, max(launch_ns + 100_000, free), duration_ns)
        )


def process_of(thread: int) -> int:
    return thread >> 24 << 24


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def make_trace(recording: Recording) -> Trace:
    """The recording as a reader would give it."""
    kernels, spans, calls = recording.kernels, recording.spans, recording.calls
    strings = tuple(
        dict.fromkeys(
            event.name for events in (kernels, spans, recording.copies, calls) for event in events
        )
    )
    last = max([k.start_ns + k.duration_ns for k in kernels] + [0])
    return Trace(
        strings=strings,
        kernels=make_work(kernels, strings, calls),
        copies=make_work(recording.copies, strings, calls),
        ranges=Ranges(
            name=ints([strings.index(s.name) for s in spans]),
            process=ints([process_of(s.thread) for s in spans]),
            thread=ints([s.thread for s in spans]),
            start_ns=ints([s.start_ns for s in spans]),
            end_ns=ints([max(last, s.start_ns) if s.end_ns is None else s.end_ns for s in spans]),
            is_nested=np.array([s.is_nested for s in spans], dtype=np.bool_),
        ),
        api_calls=ApiCalls(
            name=ints([strings.index(c.name) for c in calls]),
            process=ints([process_of(c.thread) for c in calls]),
            thread=ints([c.thread for c in calls]),
            start_ns=ints([c.start_ns for c in calls]),
            end_ns=ints([c.end_ns for c in calls]),
            correlation=ints(range(1, len(calls) + 1)),
        ),
    )


def profile(made: Recording | Trace, **changes) -> StepProfile:
    """The explained recording."""
    return summarise(
        attribute(make_trace(made) if isinstance(made, Recording) else made),
        source="test",
        **changes,
    )


def module_path(attribution: Attribution, index: int) -> tuple[str, ...]:
    """Names of the ranges around and including a range, the outermost first; of equal neighbours
    one.
    """
    if index < 0:
        return ()
    around = module_path(attribution, int(attribution.parent[index]))
    name = attribution.trace.strings[attribution.trace.ranges.name[index]]
    return around if around[-1:] == (name,) else (*around, name)


def problem_of(read: Callable[[Path], Trace], path: Path) -> str:
    """What reading the file says: one short line that begins with its name, within bounded time."""
    begun = time.process_time()
    with pytest.raises(ProfileError) as caught:
        read(path)
    assert time.process_time() - begun < 10
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message.removeprefix(str(path))
    assert len(message) < len(str(path)) + 500
    return message.removeprefix(f"{path}: ")


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def each_ns(seconds: Iterable[float]) -> list[int]:
    return [ns(value) for value in seconds]


def make_work(
    kernels: Sequence[Kernel], strings: Sequence[str], calls: Sequence[Call]
) -> DeviceWork:
    # of calls with one start the longest
    call_of = {
        (calls[row].thread, calls[row].start_ns): row
        for row in sorted(range(len(calls)), key=lambda row: calls[row].end_ns)
    }
    return DeviceWork(
        name=ints([strings.index(k.name) for k in kernels]),
        process=ints([process_of(k.thread) for k in kernels]),
        device=ints([k.device for k in kernels]),
        stream=ints([k.stream for k in kernels]),
        start_ns=ints([k.start_ns for k in kernels]),
        end_ns=ints([k.start_ns + k.duration_ns for k in kernels]),
        is_launched=np.array([k.launch_ns is not None for k in kernels], dtype=np.bool_),
        launch_ns=ints([k.launch_ns or 0 for k in kernels]),
        thread=ints([0 if k.launch_ns is None else k.thread for k in kernels]),
        call=ints(
            [
                -1 if k.launch_ns is None else call_of.get((k.thread, k.launch_ns), -1)
                for k in kernels
            ]
        ),
        is_in_graph=np.array([k.graph != 0 for k in kernels], dtype=np.bool_),
        mark=ints([-1] * len(kernels)),
        message=np.full(len(kernels), -1, dtype=np.int64),
    )


KERNEL_COLUMNS = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER "
    "NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName "
    "INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER, "
    # what nobody reads, as wide as in a real file
    + ", ".join(f"unread{i} INTEGER NOT NULL DEFAULT 1000" for i in range(17))
)
CALL_COLUMNS = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER NOT NULL"
)
RANGE_COLUMNS = (
    "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT, "
    "globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER"
)


def num_matmuls(profiled: StepProfile, phase: LaunchPhase) -> int:
    """Matmuls of a phase over the steps, without their helpers."""
    return sum(
        row.count for row in profiled.kernels if row.phase is phase and is_matmul_itself(row.name)
    )


def totals(attribution: Attribution, step: int | None = None) -> dict[str, tuple[int, int]]:
    """Kernels of each phase and their nanoseconds, in one step or in the whole trace."""
    placed, duration_ns = attribution.jobs, attribution.trace.kernels.duration_ns
    profiled: dict[str, tuple[int, int]] = {}
    for row in range(len(duration_ns)):
        if step is None or placed.step[row] == step:
            count, time_ns = profiled.get(phase := PHASES[placed.phase[row]].value, (0, 0))
            profiled[phase] = count + 1, time_ns + int(duration_ns[row])
    return profiled


def counts(attribution: Attribution, step: int | None = None) -> dict[str, int]:
    """The same without times."""
    return {phase: count for phase, (count, _) in totals(attribution, step).items()}


_COPY_COLUMNS = (
    "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, "
    "globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER"
)
_KIND_COLUMNS = "id INTEGER PRIMARY KEY, name TEXT, label TEXT"
_RANGES = ("NvtxPushPopRange", "NvtxStartEndRange", "NvtxMark", "NvtxDomainCreate")
_COPIES = {"HtoD": "Host-to-Device", "DtoH": "Device-to-Host", "PtoP": "Peer-to-Peer"}
_MEMORIES = ("Pageable", "Pinned", "Device")
_ACTIVITY = "CUPTI_ACTIVITY_KIND_"

Row = dict[str, object]


def write_export(
    path: Path,
    recording: Recording,
    *,
    same_correlation: bool = False,
    registered: bool = False,
    kinds: int = 59,
) -> Path:
    """Write the recording as nsys would, names of ranges in place or (`registered`) in the table of
    strings. If it has no calls, each kernel has been launched by one of its own.

    With `same_correlation`, each process counts its calls from 1, as CUPTI does. `kinds` is the
    number of push/pop ranges in the file's table of kinds, that of start/end ranges follows.
    """
    calls, correlation_of = numbered_calls(recording, "_v7000", same_correlation=same_correlation)
    names = dict.fromkeys(event.name for event in (*recording.kernels, *recording.spans, *calls))
    number = {name: 1000 + index for index, name in enumerate(names)}
    kernels = [
        _work(k, correlation_of(k))
        | {"contextId": 1, "graphNodeId": k.graph or None}
        | dict.fromkeys(("demangledName", "shortName"), number[k.name])
        for k in recording.kernels
    ]
    of_calls: list[Row] = []
    for call in calls:
        row: Row = {"start": call.start_ns, "end": call.end_ns, "eventClass": 0}
        row |= {"globalTid": call.thread, "correlationId": correlation_of(call)}
        of_calls.append(row | {"nameId": number[call.name]})
    with sqlite3.connect(path) as db:
        strings = [{"id": key, "value": name} for name, key in number.items()]
        _insert(db, "StringIds", "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL", strings)
        _insert(db, _ACTIVITY + "KERNEL", KERNEL_COLUMNS, kernels)
        _insert(db, _ACTIVITY + "RUNTIME", CALL_COLUMNS, of_calls)
        _insert_kinds(db, "ENUM_NSYS_EVENT_TYPE", kinds, _RANGES)
        _insert_ranges(db, recording.spans, kinds, number if registered else {})
        if recording.copies:
            copies = [_work(copy, correlation_of(copy)) | _kind(copy) for copy in recording.copies]
            _insert(db, _ACTIVITY + "MEMCPY", _COPY_COLUMNS, copies)
            _insert_kinds(db, "ENUM_CUDA_MEMCPY_OPER", 1, _COPIES.values())
            _insert_kinds(db, "ENUM_CUDA_MEM_KIND", 0, _MEMORIES)
    db.close()
    return path


def numbered_calls(
    recording: Recording, suffix: str = "", *, same_correlation: bool = False
) -> tuple[Sequence[Call], Callable[[Call | Kernel], int]]:
    """The calls of the recording, or one of 3 ns for each launch, whose name has this suffix; and
    the number that a call shares with what it launched.
    """
    calls, launched = list(recording.calls), dict[int, Call]()
    places = {(call.thread, call.start_ns): call for call in calls}
    for job in (*recording.kernels, *recording.copies):
        if job.launch_ns is not None and not recording.calls:
            name = ("cudaGraphLaunch" if job.graph else "cudaLaunchKernel") + suffix
            calls.append(Call(name, job.launch_ns, job.launch_ns + 3, job.thread))
            launched[id(job)] = calls[-1]
        elif (job.thread, job.launch_ns) in places:
            launched[id(job)] = places[job.thread, job.launch_ns]
    counts, numbers = Counter[int](), dict[int, int]()
    for call in calls:
        process = process_of(call.thread) if same_correlation else 0
        counts[process] += 1
        numbers[id(call)] = counts[process]

    def number_of(event: Call | Kernel) -> int:
        return numbers.get(id(launched.get(id(event), event)), len(calls) + 1)

    return calls, number_of


def _work(job: Kernel, correlation: int) -> Row:
    times = {"start": job.start_ns, "end": job.start_ns + job.duration_ns}
    place = {"deviceId": job.device, "streamId": job.stream, "globalPid": process_of(job.thread)}
    return {**times, **place, "correlationId": correlation}


def _kind(copy: Kernel) -> Row:
    """The columns that say what a copy such as `Memcpy HtoD (Pinned -> Device)` does."""
    _, direction, source, *_, target = copy.name.replace("(", "").replace(")", "").split()
    kinds = {"copyKind": 1 + list(_COPIES).index(direction)}
    for column, memory in (("srcKind", source), ("dstKind", target)):
        # of a copy between devices, the target is the device's number
        kinds[column] = _MEMORIES.index(memory) if memory in _MEMORIES else 2
    return {"bytes": 4096, **kinds}


def _insert(db: sqlite3.Connection, table: str, columns: str, rows: Sequence[Row]) -> None:
    db.execute(f"CREATE TABLE {table} ({columns})")
    if rows:
        marks = ", ".join("?" * len(rows[0]))
        command = f"INSERT INTO {table} ({', '.join(rows[0])}) VALUES ({marks})"
        db.executemany(command, [tuple(row.values()) for row in rows])


def _insert_kinds(db: sqlite3.Connection, table: str, first: int, names: Iterable[str]) -> None:
    rows: list[Row] = [
        {"id": key, "name": name, "label": name} for key, name in enumerate(names, first)
    ]
    _insert(db, table, _KIND_COLUMNS, rows)


def _insert_ranges(
    db: sqlite3.Connection, spans: Iterable[Span], kinds: int, number: Mapping[str, int]
) -> None:
    """Write the ranges, with a mark and a domain, which are none."""

    def row(start_ns: int, end_ns: int | None, kind: int, name: str, thread: int) -> Row:
        text = None if name in number else name
        place: Row = {"start": start_ns, "end": end_ns, "globalTid": thread}
        place |= {"eventType": kinds + kind, "text": text, "textId": number.get(name)}
        return place | {"domainId": int(name == "NCCL")}

    rows = [
        row(s.start_ns, s.end_ns, not s.is_nested, s.name, s.thread)
        for s in spans
        if s.category == "user_annotation"
    ]
    others = row(1, None, 2, "forward", MAIN), row(0, None, 3, "NCCL", MAIN)
    _insert(db, "NVTX_EVENTS", RANGE_COLUMNS, [*rows, *others])


LAYERS = 3
STEP = {"forward": 4 * LAYERS + 1, "loss": 2, "backward": 8 * LAYERS + 2, "optimizer": 5}
"""Kernels of each phase of a step of `training`."""


def training(
    steps: int = 4,
    *,
    phases: bool = True,
    step_range: bool = False,
    process: int = PROCESS,
    around: str = "training",
) -> Recording:
    """A training loop whose kernels are known: per layer two gemms of `linear` and one of
    `scores`, and a norm.
    """
    made, main, autograd = Recording(), process + 100, process + 101
    now = 1_000

    def tick() -> int:
        nonlocal now
        now += 10
        return now

    def opened(name: str, wanted: bool = True) -> tuple[str, int] | None:
        return (name, tick()) if wanted else None

    def close(begun: tuple[str, int] | None) -> None:
        if begun is not None:
            made.spans.append(Span(*begun, tick(), main))

    whole = opened(around)
    for _ in range(steps):
        step = opened("step", step_range)
        if step_range:
            made.launch("random", tick(), main, 3)
        forward = opened("forward", phases)
        order = []
        for _ in range(LAYERS):
            block = opened("block")
            made.launch("norm", tick(), main, 5)
            for module in ("linear", "scores", "linear"):
                inner = opened(module)
                made.launch("gemm", tick(), main, 1_000)
                order.append(module)
                close(inner)
            close(block)
        head = opened("head")
        made.launch("gemm", tick(), main, 2_000)
        order.append("head")
        close(head)
        close(forward)
        loss = opened("loss", phases)
        for _ in range(STEP["loss"]):
            made.launch("softmax", tick(), main, 7)
        close(loss)
        backward = opened("backward", phases)
        for module in reversed(order):
            made.launch(f"gemm {module} a", tick(), autograd, 1_100)
            made.launch(f"gemm {module} b", tick(), autograd, 1_200)
            if module == "scores":
                made.launch("norm", tick(), autograd, 6)
                made.launch("norm", tick(), autograd, 6)
        close(backward)
        optimizer = opened("optimizer", phases)
        for _ in range(STEP["optimizer"]):
            made.launch("adam", tick(), main, 11)
        close(optimizer)
        close(step)
    close(whole)
    return made


def random_recording(generator: random.Random) -> Recording:
    """Phases, steps and modules on several threads, and launches anywhere."""
    made, threads = Recording(), [PROCESS + number for number in range(1, 4)]
    for thread in threads:
        names = ["forward", "backward", "optimizer", "loss", "step"] if thread == threads[0] else []
        _nest(made, generator, thread, 0, 1_000, [*names, "a", "b", "c"], 0)
    if generator.random() < 0.3:
        made.spans.append(Span("forward", 200, 300, threads[0], is_nested=False))
    for _ in range(100):
        launch = None if generator.random() < 0.1 else generator.randint(0, 1_010)
        duration = generator.randint(0, 50)
        made.kernels.append(
            Kernel("k", launch, generator.choice(threads), generator.randint(0, 5_000), duration)
        )
    return made


def _nest(
    made: Recording,
    generator: random.Random,
    thread: int,
    low: int,
    high: int,
    names: list[str],
    depth: int,
) -> None:
    while high - low > 2 and generator.random() < 0.9 and depth < 6:
        start = generator.randint(low, high - 1)
        end = generator.randint(start, high)
        made.spans.append(Span(generator.choice(names), start, end, thread))
        _nest(made, generator, thread, start, end, names, depth + 1)
        low = end
