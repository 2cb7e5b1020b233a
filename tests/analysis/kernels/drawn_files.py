"""Writes drawn programs as torch.profiler and nsys write them."""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pandas as pd

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


def write_kineto(recorded: Recorded, path: Path) -> Path:
    events = [_host_event(span) for span in recorded.spans]
    for job in recorded.jobs:
        events += _device_events(job)
    top: dict[str, object] = {}
    if recorded.plan.ranks > 1:
        world = {"backend": "nccl", "rank": recorded.rank, "world_size": recorded.plan.ranks}
        top["distributedInfo"] = world
    return write_trace(path, [*events, *_annotations(recorded)], **top)


def _event(span: Span, pid: int, tid: int, **args: object) -> Event:
    category = "cuda_driver" if span.name.startswith("cuLaunch") else _CATEGORIES[span.kind]
    if span.operator:
        args["External id"] = span.operator
    return complete(
        category, span.name, pid, tid, span.start_ns, span.end_ns - span.start_ns, **args
    )


def _host_event(span: Span) -> Event:
    args = dict(span.args)
    if span.kind == "call":
        args["correlation"] = span.number
    elif span.kind == "operator":
        args["Ev Idx"] = span.number
        if span.name.startswith("aten::"):
            args["Input Dims"] = [[768], [4096, 768], [768, 768]]
            args["Input type"] = ["c10::BFloat16"] * 3
    elif span.kind == "frame":
        args |= {"Python id": span.number, "Python module id": 0}
    return _event(span, _PID, span.thread, **args)


def _device_events(job: Job) -> Iterator[Event]:
    correlation = job.launch.number
    args: Event = {"device": job.device, "context": 1, "stream": job.stream}
    args |= {"grid": [132, 1, 1]} if job.kind == "kernel" else {"bytes": 4096}
    if job.is_in_graph:
        args |= {"graph id": 2, "graph node id": job.number}
    for key in {"Collective name", "In msg nelems"} & job.args.keys():
        args[key] = job.args[key]
    yield _event(job, job.device, job.stream, correlation=correlation, **args)
    arrow = {"ph": "f", "cat": "ac2g", "name": "ac2g", "bp": "e", "id": correlation}
    place = {"pid": job.device, "tid": job.stream}
    yield arrow | place | {"ts": microseconds(BASE_NS + job.start_ns)}


def _annotations(recorded: Recorded) -> Iterator[Event]:
    """The device's copies of ranges: from the first kernel to the last of those launched within."""
    for span in [span for span in recorded.spans if span.kind == "range"]:
        inside: defaultdict[tuple[int, int], list[Job]] = defaultdict(list)
        for job in recorded.jobs:
            is_of_thread = job.launch.thread == span.thread
            if is_of_thread and span.start_ns <= job.launch.start_ns <= span.end_ns:
                inside[job.device, job.stream].append(job)
        for place, jobs in inside.items():
            start, end = jobs[0].start_ns, max(job.end_ns for job in jobs)
            yield complete("gpu_user_annotation", span.name, *place, start, end - start)


_COPIES = {"HtoD": 1, "DtoH": 2, "PtoP": 10}
_MEMORIES = {"Pageable": 0, "Pinned": 1, "Device": 2}
_ENUMS = {
    "ENUM_NSYS_EVENT_TYPE": {"NvtxPushPopRange": 59},
    "ENUM_CUDA_MEMCPY_OPER": {"Host-to-Device": 1, "Device-to-Host": 2, "Peer-to-Peer": 10},
    "ENUM_CUDA_MEM_KIND": _MEMORIES,
}
_ACTIVITY = "CUPTI_ACTIVITY_KIND_"


def write_nsys(recorded: Recorded, path: Path) -> Path:
    """Write the export of nsys, which has ranges and calls, and neither operators nor frames."""
    names = dict.fromkeys(event.name for event in [*recorded.spans, *recorded.jobs])
    strings = {name: number for number, name in enumerate(names, start=1000)}
    rows: defaultdict[str, list[Event]] = defaultdict(list)
    rows["StringIds"] = [{"id": number, "value": text} for text, number in strings.items()]
    for table, numbers in _ENUMS.items():
        rows[table] = [{"id": i, "name": name, "label": name} for name, i in numbers.items()]
    for span in recorded.spans:
        row: Event = {"start": span.start_ns, "end": span.end_ns}
        row["globalTid"] = PROCESS + span.thread
        if span.kind == "call":
            row |= {"correlationId": span.number, "nameId": strings[span.name]}
            rows[_ACTIVITY + "RUNTIME"].append(row)
        elif span.kind == "range":
            # the package nvtx registers its strings, PyTorch's nvtx writes them into the event
            is_registered = recorded.plan.seed % 2 == 0
            row |= {"eventType": 59, "textId": strings[span.name] if is_registered else None}
            rows["NVTX_EVENTS"].append(row | {"text": None if is_registered else span.name})
    for job in recorded.jobs:
        row = {"start": job.start_ns, "end": job.end_ns, "globalPid": PROCESS, "contextId": 1}
        row |= {"deviceId": job.device, "streamId": job.stream}
        row["correlationId"] = job.launch.number
        if job.kind == "kernel":
            row |= dict.fromkeys(("demangledName", "shortName"), strings[job.name])
            row["graphNodeId"] = job.number if job.is_in_graph else None
            rows[_ACTIVITY + "KERNEL"].append(row)
        else:
            _, kind, source, *_, target = job.name.replace("(", "").replace(")", "").split()
            row |= {"bytes": 4096, "copyKind": _COPIES[kind]}
            row |= {"srcKind": _MEMORIES[source], "dstKind": _MEMORIES.get(target, 2)}
            rows[_ACTIVITY + "MEMCPY"].append(row)
    with closing(sqlite3.connect(path)) as db:
        for table, of_table in rows.items():
            pd.DataFrame(of_table, dtype=object).to_sql(table, db, index=False)
    return path
