"""Exports with known content, of several versions, and damaged files."""

import contextlib
import random
import sqlite3
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels.attribution import attribute
from cs336.analysis.kernels.readers.nsys import read_nsys
from tests.analysis.kernels.tracing import (
    MAIN,
    PROCESS,
    Kernel,
    Recording,
    Span,
    make_trace,
    problem_of,
    profile,
    random_recording,
    totals,
    training,
    write_export,
)

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
CALL = "CUPTI_ACTIVITY_KIND_RUNTIME"


def change(path: Path, *statements: str) -> Path:
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()
    return path


problem = partial(problem_of, read_nsys)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("registered", [False, True])
def test_what_was_written_is_read(tmp_path: Path, seed: int, registered: bool) -> None:
    made = random_recording(random.Random(seed))
    made.spans.append(Span("a", 900, None))
    expected = make_trace(made)
    read = read_nsys(
        write_export(tmp_path / "t.sqlite", made, registered=registered, kinds=59 + seed)
    )
    for work in (
        "start_ns",
        "duration_ns",
        "stream",
        "process",
        "is_launched",
        "launch_ns",
        "thread",
    ):
        assert np.array_equal(getattr(read.kernels, work), getattr(expected.kernels, work)), work
    for column in ("start_ns", "process", "thread", "is_nested"):
        assert np.array_equal(getattr(read.ranges, column), getattr(expected.ranges, column)), (
            column
        )
    closed = np.array([span.end_ns is not None for span in made.spans])
    assert np.array_equal(read.ranges.end_ns[closed], expected.ranges.end_ns[closed])
    for kind in ("kernels", "ranges"):
        names = [
            [trace.strings[i] for i in getattr(trace, kind).name] for trace in (read, expected)
        ]
        assert names[0] == names[1]


@pytest.mark.parametrize("seed", range(8))
def test_a_phase_that_was_left_open_is_none(tmp_path: Path, seed: int) -> None:
    """Else all steps after it would lie within it. One that is open where the recording ends, and
    has no later one of its name, lasts until then.
    """
    draw = random.Random(seed)
    made = training(4, step_range=draw.random() < 0.5)
    name = draw.choice(["forward", "backward", "optimizer"])
    *others, last = [row for row, span in enumerate(made.spans) if span.name == name]
    left = draw.choice(others)
    without = Recording(kernels=made.kernels, spans=list(made.spans))
    made.spans[left] = replace(made.spans[left], end_ns=None)
    del without.spans[left]
    read = read_nsys(write_export(tmp_path / "open.sqlite", made))
    expected = read_nsys(write_export(tmp_path / "without.sqlite", without))
    assert totals(attribute(read)) == totals(attribute(expected))
    assert any("1 phase" in note for note in read.notes)
    made.spans[left] = replace(made.spans[left], end_ns=made.spans[left].start_ns + 1)
    made.spans[last] = replace(made.spans[last], end_ns=None)
    cut = read_nsys(write_export(tmp_path / "cut.sqlite", made))
    assert len(cut.ranges) == len(made.spans)
    assert not any("phase" in note for note in cut.notes)


def test_a_file_without_operators_does_not_tell_an_evaluation_from_forward(tmp_path: Path) -> None:
    """That is said where forward is no range."""
    said = "whether autograd recorded"
    for has_ranges in (True, False):
        made = training(3, phases=has_ranges)
        path = write_export(tmp_path / f"{has_ranges}.sqlite", made)
        notes = profile(read_nsys(path)).notes
        assert any(said in note for note in notes) == (not has_ranges)


def test_two_processes_with_equal_correlation_ids_do_not_multiply(tmp_path: Path) -> None:
    made, other = training(2), training(2, process=9 << 24)
    both = Recording(made.kernels + other.kernels, made.spans + other.spans)
    read = read_nsys(write_export(tmp_path / "t.sqlite", both, same_correlation=True))
    assert len(read.kernels) == len(both.kernels)
    assert read.kernels.launch_ns.tolist() == [k.launch_ns for k in both.kernels]
    assert read.kernels.thread.tolist() == [k.thread for k in both.kernels]


def test_a_launch_counts_once_and_none_without_a_correlation_id(tmp_path: Path) -> None:
    path = write_export(
        tmp_path / "t.sqlite", Recording([Kernel("a", 5), Kernel("b", 6), Kernel("c", 7)])
    )
    change(
        path,
        f"INSERT INTO {CALL} SELECT start + 1, end, eventClass, globalTid, correlationId, nameId "
        f"FROM {CALL}",
    )
    assert read_nsys(path).kernels.launch_ns.tolist() == [5, 6, 7]
    for table in (KERNEL, CALL):
        change(
            path,
            f"UPDATE {table} SET correlationId = CASE correlationId WHEN 1 THEN NULL WHEN 2 THEN "
            "0 ELSE 3 END",
        )
    assert read_nsys(path).kernels.is_launched.tolist() == [False, False, True]


def test_each_kind_of_gpu_is_named_once(tmp_path: Path) -> None:
    path = write_export(tmp_path / "t.sqlite", training(1))
    assert read_nsys(path).device_names == ()
    change(path, "CREATE TABLE TARGET_INFO_GPU (vmId INT, id INT, name TEXT)")
    for number, name in enumerate(["NVIDIA H200", "NVIDIA H200", "NVIDIA A100"]):
        change(path, f"INSERT INTO TARGET_INFO_GPU VALUES (1, {number}, '{name}')")
    assert read_nsys(path).device_names == ("NVIDIA H200", "NVIDIA A100")


def test_copies_fills_and_whole_graphs(tmp_path: Path) -> None:
    common = "start INT, end INT, deviceId INT, streamId INT, globalPid INT, correlationId INT"
    path = change(
        write_export(tmp_path / "t.sqlite", Recording([Kernel("k", 5)], [Span("forward", 0, 50)])),
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({common}, bytes INT, copyKind INT)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (10, 14, 0, 7, {PROCESS}, 1, 4096, 1)",
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET ({common}, bytes INT)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (20, 23, 0, 7, {PROCESS}, 99, 8)",
        "CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER, name TEXT, label TEXT)",
        "INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'CUDA_MEMCPY_KIND_HTOD', 'Host-to-Device')",
        f"CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({common}, graphId INT)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (30, 99, 0, 7, {PROCESS}, 1, 12)",
    )
    read = read_nsys(path)
    assert [read.strings[i] for i in read.copies.name] == ["memcpy Host-to-Device", "memset"]
    assert read.copies.is_launched.tolist() == [True, False]
    assert [read.strings[i] for i in read.kernels.name] == ["k", "CUDA graph"]
    assert read.kernels.is_in_graph.tolist() == [False, True]
    attributed = attribute(read)
    assert attributed.jobs.step[attributed.jobs.is_copy].tolist() == [0, -1]
    assert "1 launches of CUDA graphs were traced as a whole" in attributed.notes[0]


def test_a_fill_that_the_driver_makes_a_kernel_is_none(tmp_path: Path) -> None:
    read = read_nsys(
        write_export(
            tmp_path / "t.sqlite", Recording([Kernel("memset32", 5, graph=3), Kernel("k", 6)])
        )
    )
    assert [read.strings[i] for i in read.kernels.name] == ["k"]
    assert [read.strings[i] for i in read.copies.name] == ["memset32"]


def test_tables_and_columns_that_a_version_lacks(tmp_path: Path) -> None:
    made = training(2)
    path = write_export(tmp_path / "t.sqlite", made)
    change(
        path,
        "DROP TABLE ENUM_NSYS_EVENT_TYPE",
        f"ALTER TABLE {KERNEL} DROP COLUMN graphNodeId",
        "ALTER TABLE NVTX_EVENTS DROP COLUMN textId",
    )
    assert totals(attribute(read_nsys(path))) == totals(attribute(make_trace(made)))
    change(path, "DROP TABLE NVTX_EVENTS", f"DROP TABLE {CALL}")
    notes = attribute(read_nsys(path)).notes
    assert [
        f"No table {table}" in note
        for table, note in zip((CALL, "NVTX_EVENTS"), notes, strict=False)
    ] == [True] * 2
    assert "have no launch in the file" in notes[-1]
    change(path, f"ALTER TABLE {KERNEL} DROP COLUMN globalPid")
    assert "has no globalPid" in problem(path)
    change(path, f"DROP TABLE {KERNEL}")
    assert f"no table {KERNEL}" in problem(path)
    assert "nsys profile --trace=cuda,nvtx" in problem(path)


def test_kernels_that_were_traced_and_lost_are_told_from_those_not_traced(tmp_path: Path) -> None:
    made = training(1)
    path = write_export(tmp_path / "t.sqlite", made)
    change(path, f"DROP TABLE {KERNEL}")
    launched = sum(kernel.launch_ns is not None for kernel in made.kernels)
    assert f" {launched} launches of kernels" in problem(path)
    assert "CuptiUseRawGpuTimestamps=false" in problem(path)
    assert "--trace" not in problem(path)
    change(path, "UPDATE StringIds SET value = 'cudaMalloc_v3020' WHERE value LIKE 'cudaLaunch%'")
    assert f"no launch of a kernel among the {launched}" in problem(path)


def test_names_may_be_anything(tmp_path: Path) -> None:
    path = write_export(tmp_path / "t.sqlite", Recording([Kernel("k", 5)], [Span("x", 0, 9)]))
    change(path, "UPDATE NVTX_EVENTS SET text = CAST(x'ff27000a' AS TEXT)", "DELETE FROM StringIds")
    read = read_nsys(path)
    assert read.strings[read.kernels.name[0]] == ""
    assert read.strings[read.ranges.name[0]].startswith("\ufffd'")


@pytest.mark.parametrize("name", ["a?mode=rwc.sqlite", "100%41 b&c=d#e.sqlite", "é'\".sqlite"])
def test_any_path_is_read_and_left_alone(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_export(tmp_path / "plain", training(1)).rename(tmp_path / name)
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert len(read_nsys(path).kernels) == len(read_nsys(Path(name)).kernels) > 0
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_database_that_is_none_or_another_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    whole = write_export(tmp_path / "whole", training(1)).read_bytes()
    for content in (whole[:16] + bytes(5000), whole[:100] + b"\xff" * len(whole)):
        path.write_bytes(content)
        assert "not a whole SQLite database" in problem(path)
    assert f"no table {KERNEL}" in problem(change(tmp_path / "empty.sqlite", "CREATE TABLE t (x)"))


def test_a_truncated_export_is_never_half_read(tmp_path: Path) -> None:
    whole = write_export(tmp_path / "whole.sqlite", training(20)).read_bytes()
    path = tmp_path / "t.sqlite"
    for length in [*range(100, len(whole), 3_001), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "truncated" in problem(path)


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_export_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    """Never another exception, whatever bytes were overwritten."""
    generator = random.Random(seed)
    content = bytearray(write_export(tmp_path / "whole.sqlite", training(5)).read_bytes())
    for _ in range(generator.choice([1, 10, 200])):
        content[generator.randrange(16, len(content))] = generator.randrange(256)
    path = tmp_path / "t.sqlite"
    path.write_bytes(bytes(content))
    begun = time.process_time()
    with contextlib.suppress(ProfileError):
        attribute(read_nsys(path))
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        ([f"UPDATE {KERNEL} SET start = 'soon'"], "needs whole numbers"),
        ([f"UPDATE {KERNEL} SET end = 1.5e300"], "needs whole numbers"),
        ([f"UPDATE {KERNEL} SET streamId = x'00'"], "needs whole numbers"),
        (["UPDATE NVTX_EVENTS SET globalTid = 'main'"], "NVTX_EVENTS needs whole numbers"),
        ([f"UPDATE {KERNEL} SET end = start - 1 WHERE rowid = 3"], "must end after they start"),
        ([f"UPDATE {CALL} SET end = start - 1"], "must end after they start"),
        (["UPDATE NVTX_EVENTS SET end = start - 1"], "must end after they start"),
        ([f"UPDATE {KERNEL} SET end = 9223372036854775807"], "need times within"),
        (
            [f"UPDATE {KERNEL} SET start = -9223372036854775808, end = 9223372036854775807"],
            "need times within",
        ),
        ([f"UPDATE {KERNEL} SET end = start + 1000000000000000000"], "together"),
        ([f"DROP TABLE {KERNEL}", f"CREATE VIEW {KERNEL} AS SELECT 1 AS start"], "no table"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, statements: list[str], said: str) -> None:
    path = write_export(tmp_path / "t.sqlite", training(2))
    # as the file came from elsewhere, its columns need not have kept their types
    change(
        path,
        f"CREATE TABLE copy AS SELECT * FROM {KERNEL}",
        f"DROP TABLE {KERNEL}",
        f"ALTER TABLE copy RENAME TO {KERNEL}",
    )
    assert said in problem(change(path, *statements))


def test_an_export_that_was_interrupted_is_refused(tmp_path: Path) -> None:
    path = write_export(tmp_path / "t.sqlite", training(1))
    db = sqlite3.connect(path, isolation_level=None)
    # or the journal counts only once SQLite has seen it on disk
    db.execute("PRAGMA synchronous = OFF")
    db.execute("BEGIN")
    db.execute(f"DELETE FROM {KERNEL}")
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(path.read_bytes())
    copy.with_name("copy.sqlite-journal").write_bytes(
        path.with_name("t.sqlite-journal").read_bytes()
    )
    db.close()
    assert "not a whole SQLite database" in problem(copy)


def test_main_thread_needs_no_number_of_its_own(tmp_path: Path) -> None:
    """The thread with the phases is the main one, even where another has the process's own
    number.
    """
    made = Recording(spans=[Span("forward", 0, 10, MAIN + 5)])
    made.launch("k", 5, PROCESS)
    assert attribute(read_nsys(write_export(tmp_path / "t.sqlite", made))).jobs.phase.tolist() == [
        1
    ]
