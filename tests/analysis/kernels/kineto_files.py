"""Traces as torch.profiler writes them, of known content."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.analysis.kernels.tracing import Call, Kernel, Recording, Span, numbered_calls, process_of

BASE_NS = 4_405_712_485_997_963
"""Where a real trace's clock stood: 51 days after its `baseTimeNanoseconds`."""

Event = dict[str, object]


def microseconds(time_ns: int) -> float:
    """As a float, which JSON shows with the three decimals of Kineto: up to 2**43 no two of them
    share one.
    """
    return time_ns / 1000


def complete(
    cat: str, name: str, pid: object, tid: object, start_ns: int, duration_ns: int, **args: object
) -> Event:
    times = {"ts": microseconds(BASE_NS + start_ns), "dur": microseconds(duration_ns)}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def pid_tid(thread: int) -> tuple[int, int]:
    return process_of(thread) >> 24, thread - process_of(thread)


def _arrow(end: str, number: int, pid: int, tid: int, time_ns: int) -> Event:
    """The start (`s`) or end (`f`) of the arrow from a call to what it launches."""
    kind: Event = {"ph": end, "id": number, "cat": "ac2g", "name": "ac2g"}
    place: Event = {"pid": pid, "tid": tid, "ts": microseconds(BASE_NS + time_ns)}
    return kind | place | ({"bp": "e"} if end == "f" else {})


def _call_events(call: Call, number: int) -> Iterator[Event]:
    place, duration_ns = pid_tid(call.thread), call.end_ns - call.start_ns
    category = "cuda_driver" if call.name.startswith("cuLaunch") else "cuda_runtime"
    args = {"cbid": 211, "correlation": number, **call.args}
    yield complete(category, call.name, *place, call.start_ns, duration_ns, **args)
    yield _arrow("s", number, *place, call.start_ns)


def _device_events(job: Kernel, number: int, category: str) -> Iterator[Event]:
    place: Event = {"device": job.device, "context": 1, "stream": job.stream, "correlation": number}
    place |= {"grid": [1, 2, 3]} if category == "kernel" else {"bytes": 4096}
    if job.graph:
        place |= {"graph id": 2, "graph node id": job.graph}
    ids = job.device, job.stream
    args = {**place, **job.args}
    yield complete(category, job.name, *ids, job.start_ns, job.duration_ns, **args)
    yield _arrow("f", number, *ids, job.start_ns)


def _span_event(span: Span) -> Event:
    assert span.end_ns is not None
    duration_ns = span.end_ns - span.start_ns
    place = pid_tid(span.thread)
    return complete(span.category, span.name, *place, span.start_ns, duration_ns, **span.args)


def recorded_events(recording: Recording) -> Iterator[Event]:
    """What was recorded, and nothing besides."""
    calls, number_of = numbered_calls(recording)
    for call in calls:
        yield from _call_events(call, number_of(call))
    for category, jobs in (("kernel", recording.kernels), ("gpu_memcpy", recording.copies)):
        for job in jobs:
            yield from _device_events(job, number_of(job), category)
    yield from map(_span_event, recording.spans)


def annotations(recording: Recording) -> Iterator[Event]:
    """The device's copies of ranges: from the first kernel to the last of those launched within."""
    for span in recording.spans:
        inside: defaultdict[tuple[int, int], list[Kernel]] = defaultdict(list)
        for job in (*recording.kernels, *recording.copies):
            is_inside = span.start_ns <= (job.launch_ns or -1) <= (span.end_ns or 0)
            if is_inside and (job.thread, "user_annotation") == (span.thread, span.category):
                inside[job.device, job.stream].append(job)
        for place, jobs in inside.items():
            start_ns = min(job.start_ns for job in jobs)
            end_ns = max(job.start_ns + job.duration_ns for job in jobs)
            yield complete("gpu_user_annotation", span.name, *place, start_ns, end_ns - start_ns)


OTHERS: tuple[Event, ...] = (
    {
        "ph": "M",
        "name": "process_name",
        "ts": microseconds(BASE_NS),
        "pid": 7,
        "tid": 0,
        "args": {"name": "python3"},
    },
    {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    complete("gpu_user_annotation", "forward", 0, 7, 0, 10**9),
    complete("overhead", "Activity Buffer Request", -1, 0, 5, 100),
    complete("Trace", "PyTorch Profiler (0)", "Spans", "PyTorch Profiler", -100, 10**9),
    {
        "ph": "i",
        "s": "g",
        "name": "Record Window End",
        "pid": "",
        "tid": "",
        "ts": microseconds(BASE_NS),
    },
    {"ph": "C", "name": "memory", "pid": 7, "ts": 1e3, "args": {"bytes": 5}},
    {"ph": "?", "cat": "kernel", "name": "begun and never ended", "pid": 0, "tid": 7, "ts": 5},
)
"""What a trace holds besides, or might, and nobody reads."""


def events_of(recording: Recording) -> list[Event]:
    return [*OTHERS, *recorded_events(recording)]


def write_trace(path: Path, events: Sequence[Mapping[str, object]], **top: object) -> Path:
    properties = [{"id": 0, "name": "NVIDIA H200", "numSms": 132}] * 2
    content = {
        "schemaVersion": 1,
        "deviceProperties": properties,
        "traceEvents": events,
        "traceName": "t",
        **top,
    }
    path.write_text(json.dumps(content))
    return path
