"""Writes drawn programs as torch.profiler and nsys write them."""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
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
    "kernel": "kernel",
    "copy": "gpu_memcpy",
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
    correlation_of, plan = _correlations(recorded), recorded.plan
    operator_of = _operators(recorded)
    events = [_host_event(span, correlation_of, operator_of) for span in recorded.spans]
    for number, job in enumerate(recorded.jobs):
        events += _device_events(job, number, correlation_of[job.launch], operator_of)
    top: dict[str, object] = {}
    if plan.ranks > 1:
        world = {"backend": "nccl", "rank": recorded.rank, "world_size": plan.ranks}
        top["distributedInfo"] = world
    return write_trace(path, [*events, *_annotations(recorded)], **top)


def _operators(recorded: Recorded) -> dict[Span, Event]:
    """The argument that numbers each operator, and the innermost operator around each call."""
    opened: defaultdict[int, list[Span]] = defaultdict(list)
    numbers: dict[Span, Event] = {}
    for span in sorted(recorded.spans, key=lambda span: (span.start_ns, -span.end_ns)):
        stack = opened[span.act.thread]
        while stack and stack[-1].end_ns <= span.start_ns:
            stack.pop()
        if span.kind == "operator":
            stack.append(span)
            numbers[span] = {"External id": len(numbers) + 1}
        elif span.kind == "call" and stack:
            numbers[span] = numbers[stack[-1]]
    return numbers


def _event(span: Span, pid: int, tid: int, args: Event) -> Event:
    category = "cuda_driver" if span.name.startswith("cuLaunch") else _CATEGORIES[span.kind]
    duration = span.end_ns - span.start_ns
    return complete(category, span.name, pid, tid, span.start_ns, duration, **args)


def _host_event(
    span: Span, correlation_of: dict[Span, int], operator_of: dict[Span, Event]
) -> Event:
    args = dict(operator_of.get(span, {}))
    if span.kind == "call":
        args["correlation"] = correlation_of[span]
    elif span.kind == "operator":
        args |= {**span.act.args, "Ev Idx": args["External id"]}
        if span.name.startswith("aten::"):
            shapes = [[768], [4096, 768], [768, 768]]
            args |= {"Input Dims": shapes, "Input type": ["c10::BFloat16"] * 3}
    elif span.kind == "frame":
        args |= {"Python id": span.start_ns, "Python module id": 0}
    return _event(span, _PID, span.act.thread, args)


def _device_events(
    job: Job, number: int, correlation: int, operator_of: dict[Span, Event]
) -> Iterator[Event]:
    device, stream = job.act.device, job.act.stream
    args = {"device": device, "context": 1, "stream": stream, "correlation": correlation}
    args |= operator_of.get(job.launch, {})
    args |= {"grid": [132, 1, 1]} if job.kind == "kernel" else {"bytes": 4096}
    if job.act.is_in_graph:
        args |= {"graph id": 2, "graph node id": number}
    said = job.act.args if "Collective name" in job.act.args else {}
    args |= {key: said[key] for key in ("Collective name", "In msg nelems") if said}
    yield _event(job, device, stream, args)
    arrow = {"ph": "f", "cat": "ac2g", "name": "ac2g", "bp": "e", "id": correlation}
    yield arrow | {"pid": device, "tid": stream, "ts": microseconds(BASE_NS + job.start_ns)}


def _annotations(recorded: Recorded) -> Iterator[Event]:
    """The device's copies of ranges: from the first kernel to the last of those launched within."""
    for span in [span for span in recorded.spans if span.kind == "range"]:
        inside: defaultdict[tuple[int, int], list[Job]] = defaultdict(list)
        for job in recorded.jobs:
            is_of_thread = job.launch.act.thread == span.act.thread
            if is_of_thread and span.start_ns <= job.launch.start_ns <= span.end_ns:
                inside[job.act.device, job.act.stream].append(job)
        for place, jobs in inside.items():
            start, end = jobs[0].start_ns, max(job.end_ns for job in jobs)
            yield complete("gpu_user_annotation", span.name, *place, start, end - start)


_COPIES = {
    "HtoD": (1, "Host-to-Device"),
    "DtoH": (2, "Device-to-Host"),
    "PtoP": (10, "Peer-to-Peer"),
}
_MEMORIES = {"Pageable": 0, "Pinned": 1, "Device": 2}
_ACTIVITY = "CUPTI_ACTIVITY_KIND_"


def write_nsys(recorded: Recorded, path: Path) -> Path:
    """Write the export of nsys, which has ranges and calls, and neither operators nor frames."""
    events = [*recorded.spans, *recorded.jobs]
    names = dict.fromkeys(event.name for event in events)
    strings = {name: number for number, name in enumerate(names, start=1000)}
    correlation_of = _correlations(recorded)
    rows: defaultdict[str, list[Event]] = defaultdict(list)
    rows["StringIds"] = [{"id": number, "value": text} for text, number in strings.items()]
    rows["ENUM_NSYS_EVENT_TYPE"] = [{"id": 59, "name": "NvtxPushPopRange"}]
    copies, memories = _COPIES.values(), _MEMORIES.items()
    rows["ENUM_CUDA_MEMCPY_OPER"] = [{"id": i, "name": name, "label": name} for i, name in copies]
    rows["ENUM_CUDA_MEM_KIND"] = [{"id": i, "name": name, "label": name} for name, i in memories]
    for span in recorded.spans:
        row: Event = {"start": span.start_ns, "end": span.end_ns}
        row["globalTid"] = PROCESS + span.act.thread
        if span.kind == "call":
            row |= {"correlationId": correlation_of[span], "nameId": strings[span.name]}
            rows[_ACTIVITY + "RUNTIME"].append(row)
        elif span.kind == "range":
            # the package nvtx registers its strings, PyTorch's nvtx writes them into the event
            text: Event = {"text": None, "textId": strings[span.name]}
            if recorded.plan.seed % 2:
                text = {"text": span.name, "textId": None}
            rows["NVTX_EVENTS"].append(row | {"eventType": 59} | text)
    for number, job in enumerate(recorded.jobs, start=1):
        row = {"start": job.start_ns, "end": job.end_ns, "globalPid": PROCESS, "contextId": 1}
        row |= {"deviceId": job.act.device, "streamId": job.act.stream}
        row["correlationId"] = correlation_of[job.launch]
        if job.kind == "kernel":
            node = number if job.act.is_in_graph else None
            names = {"demangledName": strings[job.name], "shortName": strings[job.name]}
            rows[_ACTIVITY + "KERNEL"].append(row | names | {"graphNodeId": node})
        else:
            _, kind, source, *_, target = job.name.replace("(", "").replace(")", "").split()
            row |= {"bytes": 4096, "copyKind": _COPIES[kind][0]}
            row |= {"srcKind": _MEMORIES[source], "dstKind": _MEMORIES.get(target, 2)}
            rows[_ACTIVITY + "MEMCPY"].append(row)
    with closing(sqlite3.connect(path)) as db, db:
        for table, of_table in rows.items():
            db.execute(f"CREATE TABLE {table} ({', '.join(of_table[0])})")
            marks = ", ".join("?" * len(of_table[0]))
            values = [tuple(row.values()) for row in of_table]
            db.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
    return path
