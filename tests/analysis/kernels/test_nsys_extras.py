"""Counters, memory, calls of libraries and stacks in exports of nsys, against what was written."""

import json
import random
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from cs336.analysis.kernels.counters import MIN_SAMPLES
from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.readers.nsys import read_nsys
from cs336.analysis.kernels.step_profile import StepProfile
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.findings import doing
from cs336.report.sections.kernels.recorded import activity
from tests.analysis.kernels.test_nsys import change
from tests.analysis.kernels.tracing import (
    MAIN,
    PROCESS,
    Kernel,
    Recording,
    Span,
    training,
    write_export,
)
from tests.analysis.kernels.tracing import profile as profile_of

PERIOD_NS = 100
ACTIVE = {"forward": 80, "loss": 7, "backward": 40, "optimizer": 0}
DEVICE_KIND, PINNED_KIND = 2, 1
ALLOCATED, FREED = 0, 1


def add(path: Path, table: str, columns: str, rows: Iterable[Sequence[object]]) -> Path:
    """Write a table with these columns into the export."""
    marks = ", ".join("?" * len(columns.split(",")))
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    db.close()
    return path


def explained(path: Path) -> StepProfile:
    return profile_of(read_nsys(path))


def phase_of(made: Recording, kernel: Kernel) -> str:
    """The phase's range around a launch."""
    for span in made.spans:
        if span.name in ACTIVE and span.start_ns <= (kernel.launch_ns or 0) <= (span.end_ns or 0):
            return span.name
    return ""


def with_counters(path: Path, made: Recording, device: int = 0) -> dict[str, int]:
    """Add samples of two counters to the export; return how many kernels' time each phase has,
    in periods.
    """
    times = [(k.start_ns, k.start_ns + k.duration_ns, phase_of(made, k)) for k in made.kernels]
    first, last = times[0][0], times[-1][1]
    rows = []
    for now in range(first - 20 * PERIOD_NS, last + 20 * PERIOD_NS, PERIOD_NS):
        middle = now - PERIOD_NS // 2
        running = [phase for start, end, phase in times if start <= middle < end]
        value = ACTIVE.get(running[0], 0) if running else 0
        for metric, number in ((1, value), (2, 100 - value), (3, 999)):
            rows.append((now, now, device, metric, number))
    random.Random(1).shuffle(rows)
    add(path, "GPU_METRICS", "rawTimestamp, timestamp, typeId, metricId, value", rows)
    names = ("Tensor Active [Throughput %]", "SMs Active [Throughput %]", "GPC Clock [MHz]")
    add(
        path,
        "TARGET_INFO_GPU_METRICS",
        "typeId, sourceId, typeName, metricId, metricName",
        [(device, 0, "GPU", number, name) for number, name in enumerate(names, 1)],
    )
    of_phases = dict.fromkeys(ACTIVE, 0)
    for start, end, phase in times:
        if phase:
            of_phases[phase] += (end - start) // PERIOD_NS
    return of_phases


def test_counters_are_averaged_over_the_time_of_their_phase_alone(tmp_path: Path) -> None:
    made = training(4)
    path = write_export(tmp_path / "t.sqlite", made)
    periods = with_counters(path, made)
    means = {(mean.counter, mean.phase): mean for mean in explained(path).counters}
    assert {counter for counter, _ in means} == {"Tensor Active", "SMs Active"}
    for phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD):
        tensor = means["Tensor Active", phase]
        assert tensor.share == pytest.approx(ACTIVE[phase] / 100, abs=0.01)
        # at each edge of each step, one sample lies in two phases
        assert abs(tensor.count - periods[phase]) <= 3 * 4 + periods["loss"]
        assert means["SMs Active", phase].share == pytest.approx(1 - tensor.share)
    # the optimizer's kernels take less than MIN_SAMPLES periods
    assert periods["optimizer"] < MIN_SAMPLES
    assert ("Tensor Active", LaunchPhase.OPTIMIZER) not in means
    whole = means["Tensor Active", None]
    expected = sum(ACTIVE[phase] * count for phase, count in periods.items())
    assert whole.share == pytest.approx(expected / sum(periods.values()) / 100, rel=0.02)


def test_counters_are_averaged_over_the_kernels_of_a_module_alone(tmp_path: Path) -> None:
    made = training(8)
    path = write_export(tmp_path / "t.sqlite", made)
    periods = with_counters(path, made)
    profile = explained(path)
    of_tensors = [mean for mean in profile.module_counters if mean.counter == "Tensor Active"]
    times = {row.path: row for row in profile.modules}
    assert {mean.module[-1] for mean in of_tensors} == {"linear", "scores", "head"}
    for mean in of_tensors:
        # all of them run in forward, and an edge of a kernel costs at most one sample
        assert mean.share == pytest.approx(ACTIVE["forward"] / 100)
        row = times[mean.module]
        of_module = row.total_s * 1e9 / PERIOD_NS
        assert of_module - 2 * row.count <= mean.count <= of_module
    assert sum(mean.count for mean in of_tensors) <= periods["forward"]
    rows = activity([Explained(profile=profile)]).rows
    shown = {row["module"]: row["Tensor Active"] for row in rows if row["module"]}
    assert list(shown.values()) == [mean.share for mean in of_tensors]


def test_tables_of_another_version_are_not_seen(tmp_path: Path) -> None:
    made = training(1)
    path = write_export(tmp_path / "t.sqlite", made)
    plain = explained(path)
    for table in ("CUDA_GPU_MEMORY_USAGE_EVENTS", "OSRT_API", "CUBLAS_EVENTS", "GPU_METRICS"):
        add(path, table, "start, renamed", [(1, 2)])
    names = [(0, 1, "Tensor Active [Throughput %]")]
    add(path, "TARGET_INFO_GPU_METRICS", "typeId, metricId, metricName", names)
    assert explained(path) == plain


def test_counters_of_a_device_that_ran_nothing_count_for_nothing(tmp_path: Path) -> None:
    made = training(2)
    path = write_export(tmp_path / "t.sqlite", made)
    with_counters(path, made, device=3)
    assert not explained(path).counters


@pytest.mark.parametrize("seed", range(5))
def test_reserved_memory_is_what_was_allocated_and_not_yet_freed(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    made = training(3)
    path = write_export(tmp_path / "t.sqlite", made)
    end = max(span.end_ns or 0 for span in made.spans)
    held, rows = dict[int, int](), []
    for now in sorted(generator.sample(range(end), 60)):
        if held and generator.random() < 0.4:
            address = generator.choice(list(held))
            rows.append((now, 0, address, held.pop(address), DEVICE_KIND, FREED))
        else:
            held[now] = generator.randint(1, 1000) << 20
            rows.append((now, 0, now, held[now], DEVICE_KIND, ALLOCATED))
    rows.append((5, 0, 1, 4096, PINNED_KIND, ALLOCATED))
    columns = "start, deviceId, address, bytes, memKind, memoryOperationType"
    add(path, "CUDA_GPU_MEMORY_USAGE_EVENTS", columns, generator.sample(rows, len(rows)))
    kinds = [(DEVICE_KIND, "Device"), (PINNED_KIND, "Pinned")]
    add(path, "ENUM_CUDA_MEM_KIND", "id, label", kinds)
    operations = [(ALLOCATED, "Allocation"), (FREED, "Deallocation")]
    add(path, "ENUM_CUDA_DEV_MEM_EVENT_OPER", "id, label", operations)

    def level(time: int) -> int:
        device = [row for row in rows if row[0] <= time and row[4] == DEVICE_KIND]
        return sum(-row[3] if row[5] == FREED else row[3] for row in device)

    peaks = {(peak.kind, peak.phase): peak.peak_bytes for peak in explained(path).reserved}
    times = [row[0] for row in rows]
    assert peaks["Device", None] == max(map(level, times))
    assert peaks["Pinned", None] == 4096
    for phase in ACTIVE:
        within = []
        for span in (span for span in made.spans if span.name == phase):
            within += [span.start_ns - 1]
            within += [time for time in times if span.start_ns <= time < (span.end_ns or 0)]
        assert peaks["Device", LaunchPhase(phase)] == max(map(level, within)), phase


def test_a_call_whose_stack_was_taken_is_one_call(tmp_path: Path) -> None:
    made = training(2)
    path = write_export(tmp_path / "t.sqlite", made)
    plain = explained(path)
    add(path, "ENUM_NSYS_EVENT_CLASS", "id, name", [(67, "TRACE_PROCESS_EVENT_CUDABACKTRACE")])
    change(
        path,
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME SELECT start - 1, end + 1, 67, globalTid, "
        "correlationId, nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME",
    )
    assert explained(path) == plain


LIBRARY = "/env/lib/python3.12/site-packages/torch/nn/functional.py"


def test_kernels_belong_to_the_innermost_line_of_the_program(tmp_path: Path) -> None:
    made = training(3)
    path = write_export(tmp_path / "t.sqlite", made)
    change(path, "ALTER TABLE NVTX_EVENTS ADD COLUMN jsonText TEXT")
    generator, rows = random.Random(7), []
    ids: dict[str, int] = {}

    def number(text: str) -> int:
        return ids.setdefault(text, 90_000 + len(ids))

    expected: dict[tuple[str, int] | None, list[int]] = {}
    for kernel in made.kernels:
        line = generator.randint(1, 4) if kernel.thread == MAIN else None
        key = None if line is None else ("model/net.py", line)
        expected.setdefault(key, []).append(kernel.duration_ns)
        if line is not None and kernel.launch_ns is not None:
            files = [(LIBRARY, 9), ("/home/me/model/net.py", line), ("/home/me/train.py", 3)]
            frames = [
                {"Function": number("f"), "File": number(file), "Line": at} for file, at in files
            ]
            stack = {"Thread state ID": 1, "Frames count": 3, "Frames": frames}
            text = json.dumps({"Python Backtrace on CUDA": stack})
            rows.append((kernel.launch_ns - 1, 34, None, MAIN, 2, text))
    rows.append((0, 75, "Python Backtrace on CUDA", MAIN, 2, None))
    # stacks that are sampled now and then belong to no call
    sampled = text.replace("Backtrace on CUDA", "Periodic Sampling")
    rows.append((0, 75, "Python Periodic Sampling", MAIN, -2, None))
    rows.append((1_010, 34, None, MAIN, -2, sampled))
    with sqlite3.connect(path) as db:
        columns = "start, eventType, text, globalTid, domainId, jsonText"
        db.executemany(f"INSERT INTO NVTX_EVENTS ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        db.executemany(
            "INSERT INTO StringIds (id, value) VALUES (?, ?)",
            [(key, text) for text, key in ids.items()],
        )
    db.close()
    times = explained(path).places
    by_line = {}
    for row in times:
        key = row.place and (row.place.file, row.place.line)
        by_line[key] = (row.count, round(row.total_s * 1e9))
    assert by_line == {key: (len(ns), sum(ns)) for key, ns in expected.items()}


def test_a_pause_of_the_host_is_explained_by_the_call_it_was_in(tmp_path: Path) -> None:
    made = Recording(spans=[Span("forward", 0, 9_000_000)])
    made.kernels.append(Kernel("gemm", 1_000, start_ns=2_000, duration_ns=1_000))
    made.kernels.append(Kernel("gemm", 8_000_000, start_ns=8_010_000, duration_ns=1_000))
    path = write_export(tmp_path / "t.sqlite", made)
    add(path, "StringIds", "id, value", [(1, "poll"), (2, "read")])
    calls = [(10_000, 7_900_000, MAIN, 1), (20_000, 30_000, MAIN, 2), (0, 8_000_000, PROCESS, 2)]
    add(path, "OSRT_API", "start, end, globalTid, nameId", calls)
    gap = explained(path).gaps[0]
    assert gap.library_call == "poll"
    assert "the host was in poll, in forward" in doing(gap)
