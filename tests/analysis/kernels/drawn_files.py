"""Writes drawn programs as torch.profiler and nsys write them."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.analysis.kernels.drawn_machine import Job, Span
from tests.analysis.kernels.drawn_programs import Recorded
from tests.analysis.kernels.kineto_files import BASE_NS, Event, complete, microseconds, write_trace
from tests.analysis.kernels.tracing import CALL_COLUMNS, KERNEL_COLUMNS, PROCESS, RANGE_COLUMNS

PID = 100
_CATEGORIES = {
    "range": "user_annotation",
    "operator": "cpu_op",
    "call": "cuda_runtime",
    "frame": "python_function",
}


def write(recorded: Recorded, directory: Path) -> Path:
    """Write the file of the rank, of several beside each other."""
    if recorded.plan.is_nsys:
        return write_nsys(recorded, directory / "report.sqlite")
    names = (
        "rank{}_trace.json",
        "node-{}_{}.1700000000000000000.pt.trace.json",  # TensorBoard's
        "trace_{}.json",
    )
    name = names[recorded.plan.seed % len(names)]
    return write_kineto(recorded, directory / name.format(recorded.rank, PID + recorded.rank))


def write_kineto(recorded: Recorded, path: Path) -> Path:
    correlation_of = _correlations(recorded)
    operator_of = _operators(recorded)
    events = []
    for index, span in enumerate(recorded.spans):
        events.append(_host_event(span, index, correlation_of, operator_of))
    for index, job in enumerate(recorded.jobs):
        events += _device_events(job, index, correlation_of, operator_of)
    events += _annotations(recorded)
    top: dict[str, object] = {}
    plan = recorded.plan
    if plan.ranks > 1:
        top["distributedInfo"] = {
            "backend": "nccl",
            "rank": recorded.rank,
            "world_size": plan.ranks,
        }
    return write_trace(path, events, **top)


def _correlations(recorded: Recorded) -> dict[int, int]:
    """The correlation of each call, which lost ones had too."""
    calls = [span for span in recorded.spans if span.kind == "call"]
    calls += [job.launch for job in recorded.jobs]
    return {key: number for number, key in enumerate(dict.fromkeys(map(id, calls)), start=1)}


def _operators(recorded: Recorded) -> dict[int, int]:
    """The number of the innermost operator around each call."""
    opened: dict[int, list[tuple[int, int]]] = {}
    numbers: dict[int, int] = {}
    for index, span in enumerate(sorted(recorded.spans, key=lambda s: (s.start_ns, -s.end_ns))):
        stack = opened.setdefault(span.thread, [])
        while stack and stack[-1][0] <= span.start_ns:
            stack.pop()
        if span.kind == "operator":
            stack.append((span.end_ns, index + 1))
            numbers[id(span)] = index + 1
        elif span.kind == "call" and stack:
            numbers[id(span)] = stack[-1][1]
    return numbers


def _host_event(
    span: Span, index: int, correlation_of: dict[int, int], operator_of: dict[int, int]
) -> Event:
    args = dict(span.args)
    if span.kind == "call":
        args |= {"cbid": 211, "correlation": correlation_of[id(span)]}
    if id(span) in operator_of:
        args["External id"] = operator_of[id(span)]
    if span.kind == "operator":
        args |= {"Ev Idx": index, "Record function id": 0}
        if span.name.startswith("aten::"):
            args |= {
                "Input Dims": [[768], [4096, 768], [768, 768]],
                "Input type": ["c10::BFloat16"] * 3,
            }
    if span.kind == "frame":
        args |= {"Python id": index, "Python parent id": None, "Python module id": 0}
    duration = span.end_ns - span.start_ns
    category = _CATEGORIES[span.kind]
    if span.name.startswith("cuLaunch"):
        category = "cuda_driver"
    return complete(category, span.name, PID, span.thread, span.start_ns, duration, **args)


def _device_events(
    job: Job, index: int, correlation_of: dict[int, int], operator_of: dict[int, int]
) -> Iterator[Event]:
    correlation = correlation_of[id(job.launch)]
    args: dict[str, object] = {
        "device": job.device,
        "context": 1,
        "stream": job.stream,
        "correlation": correlation,
    }
    if id(job.launch) in operator_of:
        args["External id"] = operator_of[id(job.launch)]
    if job.is_in_graph:
        args |= {"graph id": 2, "graph node id": index}
    if job.kind == "kernel":
        args |= {"queued": 0, "registers per thread": 64, "shared memory": 0, "grid": [132, 1, 1]}
    else:
        args |= {"bytes": 4096, "memory bandwidth (GB/s)": 1.0}
    if job.collective:
        args |= {"Collective name": job.collective, "In msg nelems": job.num_bytes // 2}
    category = "kernel" if job.kind == "kernel" else "gpu_memcpy"
    duration = job.end_ns - job.start_ns
    yield complete(category, job.name, job.device, job.stream, job.start_ns, duration, **args)
    yield {
        "ph": "f",
        "id": correlation,
        "cat": "ac2g",
        "name": "ac2g",
        "pid": job.device,
        "tid": job.stream,
        "ts": microseconds(BASE_NS + job.start_ns),
        "bp": "e",
    }


def _annotations(recorded: Recorded) -> Iterator[Event]:
    """The device's copies of ranges: from the first kernel to the last of those launched within."""
    for span in recorded.spans:
        if span.kind != "range":
            continue
        inside: dict[tuple[int, int], list[Job]] = {}
        for job in recorded.jobs:
            is_of_thread = job.launch.thread == span.thread
            if is_of_thread and span.start_ns <= job.launch.start_ns <= span.end_ns:
                inside.setdefault((job.device, job.stream), []).append(job)
        for (device, stream), jobs in inside.items():
            start, end = jobs[0].start_ns, max(job.end_ns for job in jobs)
            yield complete("gpu_user_annotation", span.name, device, stream, start, end - start)


_UPLOAD, _DOWNLOAD, _PEERS = 1, 2, 10
_COPY_TABLE = (
    "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, "
    "streamId INTEGER, globalPid INTEGER, correlationId INTEGER, bytes INTEGER, "
    "copyKind INTEGER, srcKind INTEGER, dstKind INTEGER)"
)
_ENUMS = {
    "ENUM_NSYS_EVENT_TYPE": {59: "NvtxPushPopRange", 60: "NvtxStartEndRange", 34: "NvtxMark"},
    "ENUM_CUDA_MEMCPY_OPER": {
        _UPLOAD: "Host-to-Device",
        _DOWNLOAD: "Device-to-Host",
        _PEERS: "Peer-to-Peer",
    },
    "ENUM_CUDA_MEM_KIND": {0: "Pageable", 1: "Pinned", 2: "Device"},
}


def write_nsys(recorded: Recorded, path: Path) -> Path:
    """Write the export of nsys, which has ranges and calls, and neither operators nor frames."""
    correlation_of = _correlations(recorded)
    calls = [span for span in recorded.spans if span.kind == "call"]
    ranges = [span for span in recorded.spans if span.kind == "range"]
    names = Counter(event.name for event in (*recorded.jobs, *calls, *ranges))
    number = {name: 1000 + index for index, name in enumerate(names)}
    kernels = [job for job in recorded.jobs if job.kind == "kernel"]
    copies = [job for job in recorded.jobs if job.kind != "kernel"]
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, n) for n, i in number.items()])
        for table, values in _ENUMS.items():
            db.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, name TEXT, label TEXT)")
            rows = [(key, name, name) for key, name in values.items()]
            db.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", rows)
        if kernels:
            _write_kernels(db, kernels, number, correlation_of)
        if copies:
            _write_copies(db, copies, correlation_of)
        if calls:
            db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME ({CALL_COLUMNS})")
            rows = [
                (s.start_ns, s.end_ns, 0, PROCESS + s.thread, correlation_of[id(s)], number[s.name])
                for s in calls
            ]
            db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?,?)", rows)
        if ranges:
            db.execute(f"CREATE TABLE NVTX_EVENTS ({RANGE_COLUMNS})")
            # the package nvtx registers its strings, PyTorch's nvtx writes them into the event
            is_registered = recorded.plan.seed % 2 == 0
            rows = []
            for s in ranges:
                name = (None, number[s.name]) if is_registered else (s.name, None)
                rows.append((s.start_ns, s.end_ns, 59, PROCESS + s.thread, *name))
            columns = "start, end, eventType, globalTid, text, textId"
            db.executemany(f"INSERT INTO NVTX_EVENTS ({columns}) VALUES (?,?,?,?,?,?)", rows)
    db.close()
    return path


def _write_kernels(
    db: sqlite3.Connection, jobs: list[Job], number: dict[str, int], correlation_of: dict[int, int]
) -> None:
    db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({KERNEL_COLUMNS})")
    rows = []
    for index, job in enumerate(jobs, start=1):
        times = (job.start_ns, job.end_ns, job.device, 1, job.stream)
        name = number[job.name]
        node = index if job.is_in_graph else None
        rows.append((*times, correlation_of[id(job.launch)], PROCESS, name, name, node))
    columns = (
        "start, end, deviceId, contextId, streamId, correlationId, globalPid, demangledName, "
        "shortName, graphNodeId"
    )
    marks = ",".join("?" * 10)
    db.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL ({columns}) VALUES ({marks})", rows)


def _write_copies(db: sqlite3.Connection, jobs: list[Job], correlation_of: dict[int, int]) -> None:
    db.execute(_COPY_TABLE)
    rows = []
    for job in jobs:
        memory = 0 if "Pageable" in job.name else 1
        kinds = (_PEERS, 2, 2)
        if "PtoP" not in job.name:
            kinds = (_UPLOAD, memory, 2) if "HtoD" in job.name else (_DOWNLOAD, 2, memory)
        times = (job.start_ns, job.end_ns, job.device, job.stream)
        rows.append((*times, PROCESS, correlation_of[id(job.launch)], 4096, *kinds))
    marks = ",".join("?" * 10)
    db.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({marks})", rows)
