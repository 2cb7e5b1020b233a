"""Traces with known content, one of PyTorch's own making, and damaged files."""

import contextlib
import gzip
import json
import random
from collections import Counter
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels import kineto_content
from cs336.analysis.kernels.attribution import attribute
from cs336.analysis.kernels.classes import KernelClass, classify_kernel
from cs336.analysis.kernels.kineto_events import BOOKKEEPING
from cs336.analysis.kernels.readers.kineto import read_kineto, self_times
from cs336.analysis.kernels.trace import Trace
from cs336.config import Device, ModelConfig, RunConfig
from cs336.measure.clock import HostClock
from cs336.measure.step import TrainingStep
from cs336.model.annotate import Annotator, backward_ranges, own_names, set_annotator
from tests.analysis.kernels.kineto_files import BASE_NS, Event, complete, events_of, write_trace
from tests.analysis.kernels.tracing import (
    Kernel,
    Recording,
    ints,
    make_trace,
    problem_of,
    process_of,
    random_recording,
    training,
)

CALL = complete("cuda_runtime", "cudaLaunchKernel", 7, 100, 0, 3, correlation=1)
KERNEL = complete("kernel", "k", 0, 7, 50, 10, device=0, stream=7, correlation=1)


problem = partial(problem_of, read_kineto)


def names(trace: Trace, column: np.ndarray) -> list[str]:
    return [trace.strings[index] for index in column]


def of_one_process(recording: Recording) -> Recording:
    """What torch.profiler can see: its own process, whose ranges are all pushed and popped."""
    first = min(process_of(k.thread) for k in recording.kernels)
    return Recording(
        [k for k in recording.kernels if process_of(k.thread) == first],
        [s for s in recording.spans if process_of(s.thread) == first and s.is_nested],
    )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("zipped", [False, True])
def test_what_was_written_is_read(tmp_path: Path, seed: int, zipped: bool) -> None:
    made = of_one_process(random_recording(random.Random(seed)))
    first = process_of(made.kernels[0].thread)
    # whose launch is seen, so that the process is known
    made.kernels.append(Kernel("last", 990, first + 1))
    expected = make_trace(made)
    path = write_trace(tmp_path / "t.anything", events_of(made))
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    read = read_kineto(path)
    for column in ("duration_ns", "stream", "is_launched"):
        assert np.array_equal(getattr(read.kernels, column), getattr(expected.kernels, column)), (
            column
        )
    launched = expected.kernels.is_launched
    assert np.array_equal(read.kernels.start_ns - BASE_NS, expected.kernels.start_ns)
    assert np.array_equal(
        read.kernels.launch_ns[launched] - BASE_NS, expected.kernels.launch_ns[launched]
    )
    assert set(read.kernels.process.tolist()) == {first >> 24}
    for column in ("start_ns", "end_ns"):
        assert np.array_equal(
            getattr(read.ranges, column) - BASE_NS, getattr(expected.ranges, column)
        ), column
    assert read.ranges.is_nested.all()
    for kind in ("kernels", "ranges"):
        assert names(read, getattr(read, kind).name) == names(
            expected, getattr(expected, kind).name
        )
    # threads are numbered anew, one to one
    theirs = [*expected.ranges.thread.tolist(), *expected.kernels.thread[launched].tolist()]
    ours = [*read.ranges.thread.tolist(), *read.kernels.thread[launched].tolist()]
    assert len(set(zip(theirs, ours, strict=True))) == len(set(theirs)) == len(set(ours))
    assert len(read.api_calls) == launched.sum()
    assert read.device_names == ("NVIDIA H200",)
    assert not read.is_of_host


def test_copies_fills_calls_and_graphs(tmp_path: Path) -> None:
    events = [
        complete(
            "gpu_memcpy",
            "Memcpy HtoD (Pageable -> Device)",
            0,
            7,
            10,
            4,
            stream=7,
            correlation=1,
            bytes=4096,
        ),
        complete(
            "gpu_memset",
            "Memset (Device)",
            1,
            9,
            20,
            3,
            device=1,
            stream=9,
            correlation=99,
            bytes=8,
        ),
        complete(
            "gpu_memcpy",
            "Memcpy PtoP (Device -> Device)",
            1,
            9,
            30,
            3,
            inDevice=1,
            toDevice=0,
            stream=9,
        ),
        *(complete("kernel", name, 0, 7, 30, 5, correlation=2) for name in "ab"),
        complete("kernel", "alone", 0, 7, 40, 5, correlation=3),
        complete("cuda_runtime", "cudaMemcpyAsync", 7, 100, 1, 1, correlation=1),
        complete("cuda_runtime", "cudaGraphLaunch", 7, 100, 2, 1, correlation=2),
        complete("cuda_driver", "cuLaunchKernelEx", 7, 101, 3, 1, correlation=3),
        complete("cuda_runtime", "cudaDeviceSynchronize", 7, 100, 4, 90),
    ]
    read = read_kineto(write_trace(tmp_path / "t.json", events))
    assert names(read, read.copies.name) == [
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy PtoP (Device -> Device)",
        "Memset (Device)",
    ]
    assert read.copies.is_launched.tolist() == [True, False, False]
    assert (read.copies.device.tolist(), read.copies.stream.tolist()) == ([0, 1, 1], [7, 9, 9])
    assert names(read, read.kernels.name) == ["a", "b", "alone"]
    assert read.kernels.is_in_graph.tolist() == [True, True, False]
    assert (read.kernels.launch_ns - BASE_NS).tolist() == [2, 2, 3]
    assert len(set(read.kernels.thread.tolist())) == 2
    assert names(read, read.api_calls.name[read.api_calls.duration_ns == 90]) == [
        "cudaDeviceSynchronize"
    ]
    assert sorted(read.api_calls.duration_ns.tolist()) == [1, 1, 1, 90]
    assert "2 kernels came from CUDA graphs" in attribute(read).notes[-1]


def test_a_fill_or_a_copy_in_a_graph_is_no_kernel(tmp_path: Path) -> None:
    """torch.profiler shows the driver's own kernel for it; one of somebody's own that begins
    with zeros is a kernel.
    """
    made = [
        "sgemm",
        "memset32",
        "memset8_aligned1D",
        "memcpy32_post",
        "sgemm",
        "void memset_kernel<float>(float*)",
    ]
    events = [
        complete("cuda_runtime", "cudaGraphLaunch", 7, 100, 2, 1, correlation=2),
        *(
            complete("kernel", name, 0, 7, 10 * i, 5 + i, stream=7, correlation=2)
            for i, name in enumerate(made)
        ),
        complete("gpu_memset", "Memset (Device)", 0, 7, 90, 3, stream=7, correlation=2, bytes=8),
    ]
    read = read_kineto(write_trace(tmp_path / "t.json", events))
    assert names(read, read.kernels.name) == [made[0], *made[4:]]
    assert names(read, read.copies.name) == ["Memset (Device)", *made[1:4]]
    assert read.kernels.duration_ns.tolist() == [5, 9, 10]
    assert read.copies.duration_ns.tolist() == [3, 6, 7, 8]
    assert read.copies.is_in_graph.all()
    assert {classify_kernel(name) for name in names(read, read.copies.name)} == {
        KernelClass.COPY_AND_FILL
    }


def test_what_a_trace_lacks_is_said(tmp_path: Path) -> None:
    read = read_kineto(write_trace(tmp_path / "t.json", [KERNEL]))
    assert not read.kernels.is_launched.any()
    assert [note[:28] for note in read.notes] == [
        "No calls of the device's run",
        "There are no ranges: record ",
    ]
    assert "1 of 1 kernels have no launch" in attribute(read).notes[-1]
    called = read_kineto(
        write_trace(tmp_path / "t.json", [CALL, complete("cpu_op", "aten::mm", 7, 100, 0, 5)])
    )
    assert called.is_of_host
    assert called.lacks_device
    assert "a device, whose work is not in the file" in called.notes[0]
    assert "no kernels of a device and no operators" in problem(
        write_trace(tmp_path / "t.json", [CALL])
    )
    assert "ProfilerActivity.CUDA" in problem(write_trace(tmp_path / "t.json", []))


@pytest.mark.parametrize("seed", range(5))
def test_what_one_event_begins_and_another_ends_is_said_to_be_missing(
    tmp_path: Path, seed: int
) -> None:
    """PyTorch writes one event for both; other programs may write two."""
    draw = random.Random(seed)
    made = training(2)
    kernels = [event for event in events_of(made) if event.get("cat") == "kernel"]
    others = [event for event in events_of(made) if event.get("cat") != "kernel"]
    whole = read_kineto(write_trace(tmp_path / "whole.json", [*others, *kernels]))
    assert sum(event.get("ph") == "?" for event in kernels) == 1
    left_out = 1
    for place in draw.sample(range(len(kernels)), draw.randint(1, 5)):
        if "dur" in kernels[place]:
            begin = {name: value for name, value in kernels[place].items() if name != "dur"}
            kernels[place] = begin | {"ph": "B"}
            kernels.append(begin | {"ph": "E", "ts": begin["ts"] + 1})
            left_out += 2
    apart = read_kineto(write_trace(tmp_path / "apart.json", [*others, *kernels]))
    assert len(whole.kernels) - len(apart.kernels) == (left_out - 1) // 2
    assert any(f" {left_out} event" in note for note in apart.notes)


def test_ranks_in_one_file_are_not_mixed_up(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", [CALL, {**CALL, "pid": 8}, KERNEL])
    assert "needed the trace of one process" in problem(path)
    assert "(7, 8, ...)" in problem(path)
    ops = [complete("cpu_op", "aten::mm", pid, 100, 0, 5) for pid in (7, 8)]
    assert len(set(read_kineto(write_trace(tmp_path / "t.json", ops)).kernels.thread.tolist())) == 2


@pytest.mark.parametrize(
    "text", ["4405712485997.963", "-12.5", "12", "1.25E+2", "1700000000000000.123", "1e-400"]
)
def test_times_are_exact(tmp_path: Path, text: str) -> None:
    """Against fractions of whole numbers, which round nothing."""
    path = write_trace(tmp_path / "t.json", [KERNEL])
    path.write_text(path.read_text().replace(json.dumps(KERNEL["ts"]), text))
    assert read_kineto(path).kernels.start_ns.tolist() == [round(Fraction(text) * 1000)]


@pytest.mark.parametrize("exponent", [30, 52, 53, 54, 61])
def test_times_of_any_size_are_exact(tmp_path: Path, exponent: int) -> None:
    """Below 2**43 microseconds, nearly 2**53 ns, floats of 64 bits suffice, from there on they
    do not.
    """
    generator = random.Random(exponent)
    expected = [2**exponent - 1 - generator.randrange(2 ** (exponent - 1)) for _ in range(2_000)]
    events = [{**KERNEL, "ts": 0.0} for _ in expected]
    path = write_trace(tmp_path / "t.json", events)
    times = iter(f'"ts": {time // 1000}.{time % 1000:03}' for time in expected)
    head, *rest = path.read_text().split('"ts": 0.0')
    path.write_text(head + "".join(next(times) + part for part in rest))
    assert read_kineto(path).kernels.start_ns.tolist() == expected


@pytest.mark.parametrize("seed", range(10))
def test_self_times_by_brute_force(seed: int) -> None:
    """Each nanosecond belongs to the interval that began last, on each thread apart."""
    generator = random.Random(seed)
    made = of_one_process(random_recording(generator))
    spans = [s for s in made.spans if s.end_ns is not None]
    rows = [(s.thread, s.start_ns, s.end_ns or 0) for s in spans]
    columns = [ints(column) for column in zip(*rows, strict=True)] if rows else [ints([])] * 3
    thread, start, end = columns
    own = self_times(thread, start, end)
    owned: Counter[int] = Counter()
    for number in set(thread.tolist()):
        for now in range(1_001):
            around = [i for i, (t, s, e) in enumerate(rows) if t == number and s <= now < e]
            if around:
                owned[max(around, key=lambda i: (rows[i][1], -rows[i][2], i))] += 1
    by_span: Counter[tuple[int, int, int]] = Counter()
    for index, time_ns in owned.items():
        by_span[rows[index]] += time_ns
    read: Counter[tuple[int, int, int]] = Counter()
    for row, time_ns in zip(rows, own.tolist(), strict=True):
        read[row] += time_ns  # of equal spans, either may be the inner one
    assert {k: v for k, v in read.items() if v} == dict(by_span)


def test_self_times_of_spans_that_cross_are_no_less_than_zero() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        start, duration = generator.integers(0, 50, 40), generator.integers(0, 30, 40)
        own = self_times(np.zeros(40, dtype=np.int64), start, start + duration)
        assert ((own >= 0) & (own <= duration)).all()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, profile]:
    """Two training steps on a CPU as PyTorch records them, and what PyTorch itself says of them."""
    model = ModelConfig(
        vocab_size=11, context_length=8, d_model=8, d_ff=12, num_layers=2, num_heads=2
    )
    config = RunConfig(size="custom", model=model, batch_size=3, device=Device.CPU)
    set_annotator(Annotator.RECORD_FUNCTION)
    step = TrainingStep(config)
    with backward_ranges(own_names(step.model)):
        step(HostClock())
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(2):
                step(HostClock())
    set_annotator(Annotator.NONE)
    path = tmp_path_factory.mktemp("kineto") / "cpu.json"
    # PyTorch writes the path into the trace, whatever character is in it
    with contextlib.chdir(path.parent):
        seen.export_chrome_trace(path.name)
    return path, seen


def test_operators_of_a_cpu_take_the_place_of_kernels(recorded: tuple[Path, profile]) -> None:
    path, seen = recorded
    read = read_kineto(path)
    assert read.is_of_host
    assert not len(read.copies)
    assert not read.api_calls.start_ns.size
    said: Counter[str] = Counter()
    for event in seen.events():
        if not event.is_user_annotation and not event.name.startswith(BOOKKEEPING):
            said[event.name] += round(event.self_cpu_time_total * 1000)
    mine: Counter[str] = Counter()
    for name, time_ns in zip(
        names(read, read.kernels.name), read.kernels.duration_ns.tolist(), strict=True
    ):
        mine[name] += time_ns
    assert set(mine) == set(said)
    for name, time_ns in said.items():
        assert mine[name] == pytest.approx(time_ns, abs=len(read.kernels))


def test_a_quote_in_a_range_name_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with profile(activities=[ProfilerActivity.CPU]) as seen, record_function('my "best" model'):
        torch.ones(2).add(1)
    seen.export_chrome_trace(str(path))
    try:
        json.loads(path.read_bytes())
    except json.JSONDecodeError:
        said = problem(path)
        assert "my " in said
        assert "rename the range" in said
    else:  # a PyTorch that has mended it
        assert 'my "best" model' in read_kineto(path).strings


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"SQLite format 3\0" + bytes(100), mtime=0), "it is something else"),
        (b'{"traceEvents": {}}', "Expected `array`, got `object`"),
        (b'{"traceEvents": [1]}', "Expected `object`, got `int`"),
        (b'{"traceEvents": [{}]}', "missing required field `name`"),
        (b'{"traceEvents": []} {', "trailing characters"),
        (b"{'traceEvents': []}", "malformed"),
        (b'{"traceEvents": [', "truncated"),
        (b'{"traceEvents": [{"name": "\xff", "pid": 1}]}', "not UTF-8"),
        (b'{"traceEvents": [{"args": {"grid": ' + b"[" * 10**6, "nested too deeply"),
    ],
)
def test_another_kind_of_file_is_said(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert said in problem(path)


def test_a_truncated_trace_is_never_half_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    whole = write_trace(path, events_of(training(2))).read_bytes()
    for length in [*range(1, len(whole), 1_009), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "truncated" in problem(path)
    zipped = gzip.compress(whole, mtime=0)
    for length in [*range(2, len(zipped), 101), len(zipped) - 1]:
        path.write_bytes(zipped[:length])
        assert "not a whole compressed file" in problem(path)
    path.write_bytes(zipped[:500] + b"\0\0\0\0" + zipped[504:])
    assert "not a whole compressed file" in problem(path)


def test_a_file_beyond_any_trace_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(kineto_content.MAX_TRACE_BYTES + 1)  # sparse
    assert "record fewer steps" in problem(path)
    monkeypatch.setattr(kineto_content, "MAX_TRACE_BYTES", 1_000)
    path.write_bytes(gzip.compress(write_trace(path, events_of(training(1))).read_bytes()))
    assert "record fewer steps" in problem(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ts": float("nan")}, "need times within"),
        ({"ts": 1e300}, "need times within"),
        ({"dur": 1e16}, "need times within"),
        ({"ts": None}, "need times within"),
        ({"dur": -0.001}, "must end after they start"),
        ({"ts": 0, "dur": 2e15}, "together"),
        ({"ts": "five"}, "Invalid decimal"),
        ({"name": 5}, "Expected `str`, got `int`"),
        ({"args": []}, "Expected `object`, got `array`"),
        ({"args": {"correlation": "one"}}, "whole numbers of 64 bits"),
        ({"args": {"stream": 7.5}}, "got `float`"),
        ({"args": {"correlation": 2**63}}, "whole numbers of 64 bits"),
    ],
)
def test_events_that_cannot_be_are_refused(tmp_path: Path, change: Event, said: str) -> None:
    assert said in problem(write_trace(tmp_path / "t.json", [CALL, *[{**KERNEL, **change}] * 2]))


def test_a_device_that_logs_calls_of_its_own_is_of_the_process_that_launched(
    tmp_path: Path,
) -> None:
    """As MTIA does. With the same ids in both, nothing tells which process launched."""
    own = {**CALL, "pid": 17, "args": {"correlation": 1_000}}
    trace = read_kineto(write_trace(tmp_path / "t.json", [CALL, own, KERNEL]))
    assert trace.kernels.process.tolist() == [7]
    assert trace.kernels.is_launched.tolist() == [True]
    both = [CALL, {**CALL, "pid": 17}, KERNEL]
    assert "needed the trace of one process" in problem(write_trace(tmp_path / "t.json", both))


@pytest.mark.parametrize("pid", ["rank 0", 10**30])
def test_a_process_must_have_a_number(tmp_path: Path, pid: object) -> None:
    assert "whole numbers of 64 bits" in problem(
        write_trace(tmp_path / "t.json", [{**CALL, "pid": pid}, KERNEL])
    )


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_trace_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    """Never another exception, whatever bytes were overwritten."""
    generator = random.Random(seed)
    path = write_trace(tmp_path / "t.json", events_of(training(3)))
    content = bytearray(path.read_bytes())
    for _ in range(generator.choice([1, 3, 30])):
        content[generator.randrange(len(content))] = generator.choice(b'0123456789"{}[],:eE-. \\x')
    path.write_bytes(bytes(content))
    with contextlib.suppress(ProfileError):
        attribute(read_kineto(path))
