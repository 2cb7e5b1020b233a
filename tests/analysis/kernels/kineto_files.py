"""Traces as torch.profiler writes them, of known content."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.analysis.kernels.tracing import Kernel, Recording, Span, process_of

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


def kernel_events(kernel: Kernel, correlation: int) -> Iterator[Event]:
    """The kernel, the call that launched it, and the arrow between them."""
    device = {
        "device": 0,
        "context": 1,
        "stream": kernel.stream,
        "correlation": correlation,
        "grid": [1, 2, 3],
    }
    yield complete(
        "kernel", kernel.name, 0, kernel.stream, kernel.start_ns, kernel.duration_ns, **device
    )
    arrow = {"id": correlation, "cat": "ac2g", "name": "ac2g"}
    yield {
        "ph": "f",
        **arrow,
        "pid": 0,
        "tid": kernel.stream,
        "ts": microseconds(BASE_NS + kernel.start_ns),
        "bp": "e",
    }
    if kernel.launch_ns is not None:
        pid, tid = pid_tid(kernel.thread)
        call = "cudaGraphLaunch" if kernel.graph else "cudaLaunchKernel"
        yield complete(
            "cuda_runtime", call, pid, tid, kernel.launch_ns, 3, cbid=211, correlation=correlation
        )
        yield {
            "ph": "s",
            **arrow,
            "pid": pid,
            "tid": tid,
            "ts": microseconds(BASE_NS + kernel.launch_ns),
        }


def span_event(span: Span) -> Event:
    assert span.end_ns is not None
    return complete(
        "user_annotation",
        span.name,
        *pid_tid(span.thread),
        span.start_ns,
        span.end_ns - span.start_ns,
    )


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
    events = [
        event for i, k in enumerate(recording.kernels, start=1) for event in kernel_events(k, i)
    ]
    return [*OTHERS, *events, *map(span_event, recording.spans)]


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
