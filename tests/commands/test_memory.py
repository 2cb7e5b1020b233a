"""`cs336 memory` from end to end: what it prints and writes, and what it says of a file that is
no snapshot.
"""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cs336.analysis.kernels.step_profile import write_profile as write_kernel_profile
from cs336.analysis.memory.explain import explain_memory
from cs336.analysis.memory.profile import MemoryProfile, write_memory_profile
from cs336.cli import main
from cs336.config import RunConfig
from cs336.record import RunRecord, Status, write_record
from tests.analysis.memory.programs import BATCH, MODEL, Training
from tests.analysis.memory.snapshots import MIB
from tests.report.sections.kernels.profiles import make_profile


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Three steps of training, with notes beside them."""
    run = Training()
    for step in range(3):
        run.step(step)
    return run.end(tmp_path)


def memory(*words: object) -> int:
    return main(["memory", *map(str, words)])


def test_json_is_the_profile_and_is_read_again(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert memory(snapshot, "--json", "--output", tmp_path / "a" / "b") == 0
    printed, said = capsys.readouterr()
    assert str(tmp_path / "a" / "b") in said, "where the files are"
    assert msgspec.json.decode(printed, type=MemoryProfile) == explain_memory(snapshot)
    assert (tmp_path / "a" / "b" / "memory.json").read_text() == printed
    assert memory(tmp_path / "a" / "b" / "memory.json", "--json") == 0
    assert capsys.readouterr().out == printed
    assert memory(tmp_path / "a" / "b" / "memory.json") == 0
    said = capsys.readouterr().out
    assert said.startswith("The peak is")
    for words in ("Memory from phase to phase", "Largest allocations", "saves for backward"):
        assert words in said


def test_top_is_how_many_allocations_are_listed(
    snapshot: Path, tmp_path: Path, no_pictures: None
) -> None:
    for top in (2, 5):
        assert memory(snapshot, "--top", top, "--output", tmp_path / str(top)) == 0
        lines = (tmp_path / str(top) / "largest.md").read_text().splitlines()
        assert sum(line.startswith("| ") for line in lines) == 2 + top


def test_running_out_of_memory_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Training(limit_bytes=40 * MIB)
    run.forward(0)
    assert run.program.malloc(60 * MIB) is None
    assert memory(run.end(tmp_path)) == 0, "it is a result"
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("GPU 0 ran out of memory 1 time, ")
    assert "in backward of step 0" in said.partition("60.00 MiB were asked for")[0]


def check_refused(said: str, path: Path, words: str) -> None:
    assert len(said.splitlines()) == 1
    assert str(path) in said
    assert words in said


WRONG = {
    "empty": ("s.pickle", b"", "empty"),
    "code": ("s.pickle", pickle.dumps(replace), "would run code of the file"),
    "nothing in it": (
        "s.pickle",
        pickle.dumps({"segments": [], "device_traces": []}),
        "no device has any memory",
    ),
    "a pipe": ("s.pickle", None, "no regular file"),
    "no profile": ("s.json", b"[" * 100_000, "not a memory profile"),
    "an old profile": (
        "s.json",
        b'{"format_version": 1, "source": "s.pickle", "boundaries": [], "at_peak": []}',
        "explain the snapshot again",
    ),
    "an old file of somebody else": ("s.json", b'{"format_version": 1}', "not a memory profile"),
    "no notes": ("snapshot.notes.json", b"{}", "not notes on a memory snapshot"),
    "newer notes": ("snapshot.notes.json", b'{"format_version": 2}', "version 2 is newer"),
}
"""One for each layer that refuses; tests/analysis/memory has the others."""


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_what_is_needed_is_refused_in_one_line(
    name: str, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, words = WRONG[name]
    path = snapshot.parent / file
    path.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    assert memory(snapshot if "notes" in file else path, "--output", snapshot.parent / "out") == 2
    check_refused(capsys.readouterr().err, path, words)
    assert not (snapshot.parent / "out").exists()


@pytest.mark.parametrize("command", ["memory", "kernels"])
def test_wrong_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "a", "--top", "-3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: --top must be at least 1, got -3" in line


def test_a_file_for_another_command_is_called_what_it_is(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(size="custom", model=MODEL, batch_size=BATCH)
    record = RunRecord(config=config, status=Status.OK, started_at="2026-11-21T00:00:00+00:00")
    (tmp_path / "runs").mkdir()
    record_path, kernel_path = write_record(record, tmp_path / "runs"), tmp_path / "k.json"
    write_kernel_profile(make_profile(), kernel_path)
    profile_path = tmp_path / "memory" / record_path.name
    given = {record_path: "a record of a run", kernel_path: "a kernel profile"}
    for path, name in given.items():
        assert memory(path) == 2
        check_refused(capsys.readouterr().err, path, name)
    profile_path.parent.mkdir()
    write_memory_profile(explain_memory(snapshot), profile_path)
    given = {
        record_path: "a record of a run",
        profile_path: "a memory profile",
        snapshot: "`cs336 memory`",
    }
    for path, name in given.items():
        assert main(["kernels", str(path)]) == 2
        check_refused(capsys.readouterr().err, path, name)
