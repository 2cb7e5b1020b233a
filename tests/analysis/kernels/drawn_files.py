"""Writes drawn programs as torch.profiler and nsys write them."""

import sqlite3
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

from tests.analysis.kernels.drawn_machine import Job, Recorded, Span
from tests.analysis.kernels.kineto_files import BASE_NS, Event, complete, microseconds, write_trace
from tests.analysis.kernels.tracing import PROCESS

_PID = 100
_CATEGORIES = {
    "range": "user_annotation",
    "operator": "cpu_op",
    "call": "cuda_runtime",
    "frame": "python_function",
}
_NAMES = (
    "rank{}_trace.json",
    "node-{}_{}.1700000000000000000.pt.trace.json",  # TensorBoard's
    "trace_{}.json",
)


def write(recorded: Recorded, directory: Path) -> Path:
    """Write the file of the rank, of several beside each other."""
    if recorded.plan.is_nsys:
        return write_nsys(recorded, directory / "report.sqlite")
    name = _NAMES[recorded.plan.seed % len(_NAMES)]
    return write_kineto(recorded, directory / name.format(recorded.rank, _PID + recorded.rank))


def _correlations(recorded: Recorded) -> dict[Span, int]:
    """The number of each call, which lost ones had too."""
    calls = [span for span in recorded.spans if span.kind == "call"]
    calls += [job.launch for job in recorded.jobs]
    return {call: number for number, call in enumerate(dict.fromkeys(calls), start=1)}


def write_kineto(recorded: Recorded, path: Path) -> Path:
    correlation_of = _correlations(recorded)
    external_of = _operators(recorded)
    events = []
    for index, span in enumerate(recorded.spans):
        args = {"External id": external_of.get(span), "correlation": None}
        if span.kind == "call":
            args["correlation"] = correlation_of[span]
        events.append(_host_event(span, index, args))
    for index, job in enumerate(recorded.jobs):
        args = {"External id": external_of.get(job.launch)}
        events += _device_events(job, index, correlation_of[job.launch], args)
    top: dict[str, object] = {}
    plan = recorded.plan
    if plan.ranks > 1:
        world = {"backend": "nccl", "rank": recorded.rank, "world_size": plan.ranks}
        top["distributedInfo"] = world
    return write_trace(path, [*events, *_annotations(recorded)], **top)


def _operators(recorded: Recorded) -> dict[Span, int]:
    """The number of each operator, and of the innermost operator around each call."""
    opened: dict[int, list[tuple[int, int]]] = {}
    numbers: dict[Span, int] = {}
    for index, span in enumerate(sorted(recorded.spans, key=lambda s: (s.start_ns, -s.end_ns))):
        stack = opened.setdefault(span.thread, [])
        while stack and stack[-1][0] <= span.start_ns:
            stack.pop()
        if span.kind == "operator":
            stack.append((span.end_ns, index + 1))
        if span.kind in ("operator", "call") and stack:
            numbers[span] = stack[-1][1]
    return numbers


def _event(
    category: str, name: str, place: tuple[int, int], times: Span | Job, args: Event
) -> Event:
    said = {key: value for key, value in args.items() if value is not None}
    length = times.end_ns - times.start_ns
    return complete(category, name, *place, times.start_ns, length, **said)


def _host_event(span: Span, index: int, args: Event) -> Event:
    if span.kind == "operator":
        args |= span.act.args | {"Ev Idx": index, "Record function id": 0}
        if span.name.startswith("aten::"):
            shapes = [[768], [4096, 768], [768, 768]]
            args |= {"Input Dims": shapes, "Input type": ["c10::BFloat16"] * 3}
    if span.kind == "frame":
        args |= {"Python id": index, "Python module id": 0}
    category = "cuda_driver" if span.name.startswith("cuLaunch") else _CATEGORIES[span.kind]
    return _event(category, span.name, (_PID, span.thread), span, args)


def _device_events(job: Job, index: int, correlation: int, args: Event) -> Iterator[Event]:
    act, place = job.act, (job.at.device, job.act.stream)
    args |= {"device": place[0], "context": 1, "stream": place[1], "correlation": correlation}
    if job.at.is_in_graph:
        args |= {"graph id": 2, "graph node id": index}
    for key in ("Collective name", "In msg nelems"):
        args[key] = act.args.get(key)
    size = {"grid": [132, 1, 1]} if act.kind == "kernel" else {"bytes": 4096}
    category = "kernel" if act.kind == "kernel" else "gpu_memcpy"
    yield _event(category, act.name, place, job, args | size)
    arrow = {"ph": "f", "cat": "ac2g", "name": "ac2g", "bp": "e", "id": correlation}
    yield arrow | {"pid": place[0], "tid": place[1], "ts": microseconds(BASE_NS + job.start_ns)}


def _annotations(recorded: Recorded) -> Iterator[Event]:
    """The device's copies of ranges: from the first kernel to the last of those launched within."""
    for span in recorded.spans:
        inside: dict[tuple[int, int], list[Job]] = {}
        for job in recorded.jobs:
            is_of_thread = span.kind == "range" and job.launch.thread == span.thread
            if is_of_thread and span.start_ns <= job.launch.start_ns <= span.end_ns:
                inside.setdefault((job.at.device, job.act.stream), []).append(job)
        for place, jobs in inside.items():
            start, end = jobs[0].start_ns, max(job.end_ns for job in jobs)
            yield complete("gpu_user_annotation", span.name, *place, start, end - start)


_COPIES = {
    "HtoD": (1, "Host-to-Device"),
    "DtoH": (2, "Device-to-Host"),
    "PtoP": (10, "Peer-to-Peer"),
}
_MEMORIES = {"Pageable": 0, "Pinned": 1, "Device": 2}


def write_nsys(recorded: Recorded, path: Path) -> Path:
    """Write the export of nsys, which has ranges and calls, and neither operators nor frames."""
    correlation_of, numbers = _correlations(recorded), count(1000)
    strings: dict[str, int] = {}
    rows: dict[str, list[Mapping[str, object]]] = {
        "ENUM_NSYS_EVENT_TYPE": [{"id": 59, "name": "NvtxPushPopRange"}],
        "ENUM_CUDA_MEMCPY_OPER": [{"id": i, "name": n, "label": n} for i, n in _COPIES.values()],
        "ENUM_CUDA_MEM_KIND": [{"id": i, "name": n, "label": n} for n, i in _MEMORIES.items()],
    }

    def name(text: str) -> int:
        return strings.setdefault(text, next(numbers))

    for span in recorded.spans:
        times = {"start": span.start_ns, "end": span.end_ns, "globalTid": PROCESS + span.thread}
        if span.kind == "call":
            row = {"correlationId": correlation_of[span], "nameId": name(span.name)}
            rows.setdefault("CUPTI_ACTIVITY_KIND_RUNTIME", []).append(times | row)
        elif span.kind == "range":
            # the package nvtx registers its strings, PyTorch's nvtx writes them into the event
            is_registered = recorded.plan.seed % 2 == 0
            texts = {"text": None, "textId": name(span.name)}
            row = texts if is_registered else {"text": span.name, "textId": None}
            rows.setdefault("NVTX_EVENTS", []).append(times | {"eventType": 59} | row)
    for index, job in enumerate(recorded.jobs, start=1):
        row = {"start": job.start_ns, "end": job.end_ns, "globalPid": PROCESS, "contextId": 1}
        row |= {"deviceId": job.at.device, "streamId": job.act.stream}
        row |= {"correlationId": correlation_of[job.launch]}
        if job.act.kind == "kernel":
            row |= {"demangledName": name(job.act.name), "shortName": name(job.act.name)}
            row["graphNodeId"] = index if job.at.is_in_graph else None
            rows.setdefault("CUPTI_ACTIVITY_KIND_KERNEL", []).append(row)
        else:
            _, kind, memories = job.act.name.split(maxsplit=2)
            source, target = (_MEMORIES[word.split()[0]] for word in memories[1:-1].split(" -> "))
            row |= {"bytes": 4096, "copyKind": _COPIES[kind][0]}
            row |= {"srcKind": source, "dstKind": target}
            rows.setdefault("CUPTI_ACTIVITY_KIND_MEMCPY", []).append(row)
    rows["StringIds"] = [{"id": number, "value": text} for text, number in strings.items()]
    _write_tables(path, rows)
    return path


def _write_tables(path: Path, rows_of: Mapping[str, list[Mapping[str, object]]]) -> None:
    with sqlite3.connect(path) as db:
        for table, rows in rows_of.items():
            if rows:
                columns, marks = ", ".join(rows[0]), ", ".join("?" * len(rows[0]))
                db.execute(f"CREATE TABLE {table} ({columns})")
                values = [tuple(row.values()) for row in rows]
                db.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
    db.close()
