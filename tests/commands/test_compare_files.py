"""`cs336 compare` of two files of any programs: answers, files, and refusals in one line.

The oracle is arithmetic on the profiles that the files were made from, and on hand-made memory.
"""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from cs336 import cli
from cs336.analysis.difference import Part, parts_of
from cs336.analysis.kernels.step_profile import write_profile
from cs336.analysis.memory.profile import MemoryProfile, write_memory_profile
from cs336.report.sections.memory.compared import (
    category_amounts,
    compared_snapshots,
    place_amounts,
    pool_amounts,
)
from tests.analysis.kernels.test_drawn_differences import PLANS, SLOWER, Slower, profile
from tests.report.sections.memory.profiles import MIB, make_bare, make_memory


def compare(*words: object) -> int:
    return cli.main(["compare", *map(str, words)])


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """Kept profiles of a program, and of the same one with a slower kernel."""
    paths = tmp_path / "a.json", tmp_path / "b.json"
    write_profile(profile(PLANS[0], tmp_path / "of_a"), paths[0])
    write_profile(profile(PLANS[0], tmp_path / "of_b", Slower), paths[1])
    return paths


def test_the_answer_comes_first_and_is_written(
    traces: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*traces, "--output", tmp_path / "out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("B's step is ")
    assert "nvjet" in lines[1]
    assert {file.stem for file in (tmp_path / "out").iterdir()} == {
        "difference",
        "phases",
        "contents",
        "modules",
        "kernels",
    }


def test_json_has_all_rows_and_they_add_up(
    traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*traces, "--json", "--top", "1") == 0
    said = json.loads(capsys.readouterr().out)
    numbers = said["answer"][0]["numbers"]
    whole_ms = 1e3 * (numbers["b_step_s"] - numbers["a_step_s"])
    for name in ("phases", "contents"):
        rows_ms = sum(row["difference"] for row in said[name])
        assert rows_ms == pytest.approx(whole_ms, rel=1e-9)
    assert said["kernels"][0]["part"] == SLOWER


def _sum(parts: list[Part]) -> int:
    return int(sum(part.difference for part in parts))


def _larger(memory: MemoryProfile) -> MemoryProfile:
    """The same with 64 MiB more of temporary memory at its peak."""
    categories = []
    for part in memory.peak.categories:
        more = 64 * MIB if part.category == "temporary" else 0
        categories.append(replace(part, num_bytes=part.num_bytes + more))
    peak = replace(
        memory.peak,
        categories=tuple(categories),
        allocated_bytes=memory.peak.allocated_bytes + 64 * MIB,
    )
    return replace(memory, peak=peak)


def test_snapshots_differ_in_what_one_has_more_of() -> None:
    a = make_memory()
    b = _larger(a)
    first = compared_snapshots(a, b, top=5).findings[0]
    assert first.numbers["difference_bytes"] == 64 * MIB
    parts = parts_of(category_amounts(a), category_amounts(b))
    assert parts[0].name == "temporary"
    assert parts[0].difference == 64 * MIB
    assert not any(part.difference for part in parts[1:])


def test_parts_of_snapshots_add_up_to_the_peaks() -> None:
    a, b = make_memory(), make_bare()
    allocated = b.peak.allocated_bytes - a.peak.allocated_bytes
    assert _sum(parts_of(category_amounts(a), category_amounts(b))) == allocated
    assert _sum(parts_of(place_amounts(a), place_amounts(b))) == allocated
    reserved = b.peak.reserved_bytes - a.peak.reserved_bytes
    assert _sum(parts_of(pool_amounts(a), pool_amounts(b))) == reserved


def test_what_cannot_be_compared_is_refused_in_one_line(
    traces: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory, other, record = (tmp_path / name for name in ("m.json", "x.pickle", "record.json"))
    write_memory_profile(make_memory(), memory)
    other.write_bytes(pickle.dumps({"no": "snapshot"}))
    record.write_text('{"status": "ok", "started_at": "2026"}')
    for sides in ((traces[0], memory), (memory, other), (traces[0], record)):
        assert compare(*sides) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
