"""Traces as torch.profiler writes them, of known content."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.analysis.kernels.tracing import Kernel, Recording, Span, process_of

BASE_NS = 4_405_712_485_997_963
"""Where a real trace's clock stood: 51 days after its `baseTimeNanoseconds`."""

Event = dict[str, object]


def microseconds(time_ns: int) -> float:
    """As a float, which JSON shows with the three decimals of Kineto: up to 2**43 no two of them share one."""
    return time_ns / 1000


def text(time_ns: int) -> str:
    """As Kineto writes it."""
    return f"{time_ns // 1000}.{time_ns % 1000:03}"


def complete(cat: str, name: str, pid: object, tid: object, start_ns: int, duration_ns: int, **args: object) -> Event:
    times = {"ts": microseconds(BASE_NS + start_ns), "dur": microseconds(duration_ns)}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def pid_tid(thread: int) -> tuple[int, int]:
    return process_of(thread) >> 24, thread - process_of(thread)


def kernel_events(kernel: Kernel, correlation: int) -> Iterator[Event]:
    """The kernel, the call that launched it, and the arrow between them."""
    device = {"device": 0, "context": 1, "stream": kernel.stream, "correlation": correlation, "grid": [1, 2, 3]}
    yield complete("kernel", kernel.name, 0, kernel.stream, kernel.start_ns, kernel.duration_ns, **device)
    arrow = {"id": correlation, "cat": "ac2g", "name": "ac2g"}
    yield {"ph": "f", **arrow, "pid": 0, "tid": kernel.stream, "ts": microseconds(BASE_NS + kernel.start_ns), "bp": "e"}
    if kernel.launch_ns is not None:
        pid, tid = pid_tid(kernel.thread)
        call = "cudaGraphLaunch" if kernel.graph else "cudaLaunchKernel"
        yield complete("cuda_runtime", call, pid, tid, kernel.launch_ns, 3, cbid=211, correlation=correlation)
        yield {"ph": "s", **arrow, "pid": pid, "tid": tid, "ts": microseconds(BASE_NS + kernel.launch_ns)}


def span_event(span: Span) -> Event:
    assert span.end_ns is not None
    return complete("user_annotation", span.name, *pid_tid(span.thread), span.start_ns, span.end_ns - span.start_ns)


OTHERS: tuple[Event, ...] = (
    {"ph": "M", "name": "process_name", "ts": microseconds(BASE_NS), "pid": 7, "tid": 0, "args": {"name": "python3"}},
    {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    complete("gpu_user_annotation", "forward", 0, 7, 0, 10**9),
    complete("overhead", "Activity Buffer Request", -1, 0, 5, 100),
    complete("Trace", "PyTorch Profiler (0)", "Spans", "PyTorch Profiler", -100, 10**9),
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": microseconds(BASE_NS)},
    {"ph": "C", "name": "memory", "pid": 7, "ts": 1e3, "args": {"bytes": 5}},
    {"ph": "?", "cat": "kernel", "name": "begun and never ended", "pid": 0, "tid": 7, "ts": 5},
)
"""What a trace holds besides, or might, and nobody reads."""


def events_of(recording: Recording) -> list[Event]:
    events = [event for i, k in enumerate(recording.kernels, start=1) for event in kernel_events(k, i)]
    return [*OTHERS, *events, *map(span_event, recording.spans)]


def write_trace(path: Path, events: Sequence[Mapping[str, object]], **top: object) -> Path:
    properties = [{"id": 0, "name": "NVIDIA H200", "numSms": 132}] * 2
    content = {"schemaVersion": 1, "deviceProperties": properties, "traceEvents": events, "traceName": "t", **top}
    path.write_text(json.dumps(content))
    return path


_OPERATOR = """
  {{
    "ph": "X", "cat": "cpu_op", "name": "{name}", "pid": 439, "tid": {tid},
    "ts": {ts}, "dur": {dur},
    "args": {{
      "External id": {i},"Record function id": 0, "Sequence number": 5021, "Fwd thread id": 1, "Ev Idx": {i}
    }}
  }},"""
_LAUNCHED = """
  {{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 439, "tid": {tid},
    "ts": {ts}, "dur": 3.971,
    "args": {{
      "External id": {i}, "cbid": 211, "correlation": {i}
    }}
  }},
  {{
    "ph": "s", "id": {i}, "pid": 439, "tid": {tid}, "ts": {ts},
    "cat": "ac2g", "name": "ac2g"
  }},
  {{
    "ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": 7,
    "ts": {later}, "dur": 5.376,
    "args": {{
      "External id": {i},
      "queued": 0, "device": 0, "context": 1,
      "stream": 7, "correlation": {i},
      "registers per thread": 16,
      "shared memory": 0,
      "blocks per SM": 37.878788,
      "warps per SM": 151.515152,
      "grid": [5000, 1, 1],
      "block": [128, 1, 1],
      "est. achieved occupancy %": 100
    }}
  }},
  {{
    "ph": "f", "id": {i}, "pid": 0, "tid": 7, "ts": {later},
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  }},"""
_RANGE = """
  {{
    "ph": "X", "cat": "user_annotation", "name": "{name}", "pid": 439, "tid": {tid},
    "ts": {ts}, "dur": {dur},
    "args": {{
      "External id": {i},"Record function id": 0, "Ev Idx": {i}
    }}
  }},"""
_ARROW = """
  {{
    "ph": "{ph}", "id": {i}, "pid": 439, "tid": {tid}, "ts": {ts},
    "cat": "fwdbwd", "name": "fwdbwd"
  }},"""
GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel_"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)

LAUNCHES_PER_STEP = 1_000
EVENTS_PER_LAUNCH = 10
"""4 operators, 4 of the launch, 2 arrows from forward to backward: with ranges the mix of a real trace."""


def write_large(path: Path, num_events: int) -> int:
    """Write a trace of training steps in the very layout of torch 2.11; return the number of kernels."""
    steps = num_events // (LAUNCHES_PER_STEP * EVENTS_PER_LAUNCH + 100)
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": [')
        for step in range(steps):
            file.write("".join(_step(step)))
        file.write('{"ph": "M", "name": "process_name", "pid": 439, "tid": 0, "args": {"name": "python"}}]}')
    return steps * LAUNCHES_PER_STEP


def _step(step: int) -> Iterator[str]:
    each_ns, begun = 20_000, BASE_NS + step * (LAUNCHES_PER_STEP + 10) * 20_000
    bounds = {"forward": (0, 300), "backward": (300, 800), "optimizer": (800, LAUNCHES_PER_STEP)}
    for name, (first, last) in bounds.items():
        length = text((last - first) * each_ns)
        yield _RANGE.format(name=name, tid=439, ts=text(begun + first * each_ns), dur=length, i=first)
        thread = 464 if name == "backward" else 439
        for launch in range(first, last):
            now, i = begun + launch * each_ns, step * LAUNCHES_PER_STEP + launch + 1
            at = [text(now + offset) for offset in range(100, 900, 100)]
            for depth, operator in enumerate(("linear", "matmul", "mm", "empty_strided")):
                duration = text(9_000 - 1_000 * depth)
                yield _OPERATOR.format(name=f"aten::{operator}", tid=thread, ts=at[depth], dur=duration, i=i)
            yield _ARROW.format(ph="f" if name == "backward" else "s", tid=thread, ts=at[1], i=i)
            yield _ARROW.format(ph="s" if name == "forward" else "f", tid=thread, ts=at[2], i=i)
            later = text(now + 5_000_000)
            yield _LAUNCHED.format(name=ADD if launch % 3 else GEMM, tid=thread, ts=at[5], later=later, i=i)
            if launch % 10 == 0:
                yield _RANGE.format(name=f"block.{launch // 30}", tid=thread, ts=at[0], dur="9.5", i=i)
