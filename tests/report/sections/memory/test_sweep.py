"""Tables and files over several recorded runs, made of hand-made profiles."""

import csv

import pytest
from matplotlib.image import imread

from cs336_systems.analysis.memory.profile import Category
from cs336_systems.config import Mode, Precision, Profiler
from cs336_systems.report.formats import WRITERS
from cs336_systems.report.sections.memory import plots as peak_bars
from cs336_systems.report.sections.memory.entries import MemoryEntry
from cs336_systems.report.sections.memory.files import memory_tables, write_memory
from tests.report.making import HOSTILE, make_config, make_record
from tests.report.sections.memory.profiles import MIB, make_inference, make_like, make_memory, make_moment, make_oom

TABLES = ("peaks", "boundaries", "phases", "largest")

NAMES = {category.replace(" ", "_") for category in Category}


def entry(profile=None, size="small", context_length=128, plain_bytes=None, **fields):
    config = make_config(size, context_length, profiler=Profiler.MEMORY, **fields)
    plain = None if plain_bytes is None else make_record(config.unprofiled, (0.03,), peak_bytes=plain_bytes)
    return MemoryEntry(config=config, profile=profile or make_memory(), plain=plain)


def mixed_profile():
    """Half of 780 MiB: 390, of which 190 are saved activations and 20 held throughout."""
    return make_memory(peak=make_moment("backward", 13, 900, counted=False, parameters=100, gradients=80, saved=190,
                                        held=20))  # fmt: skip


def grid():
    """Inference and training at two contexts; training runs out of memory at the longer one, but not in bf16."""
    return [
        entry(make_inference(), mode=Mode.INFERENCE), entry(plain_bytes=781 * MIB),
        entry(mixed_profile(), precision=Precision.BF16),
        entry(make_inference(), context_length=512, mode=Mode.INFERENCE), entry(make_oom(), context_length=512),
    ]  # fmt: skip


def read(directory, name):
    with (directory / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_file_is_written(tmp_path) -> None:
    paths = write_memory(grid(), tmp_path / "sweep")
    names = {path.relative_to(tmp_path / "sweep").as_posix() for path in paths}
    timelines = {f"plots/{one.config.key}_timeline.png" for one in grid()}
    tables = {f"{name}.{ending}" for name in TABLES for ending in ("csv", *WRITERS)}
    assert names == tables | timelines | {"plots/peaks.png"}
    assert imread(tmp_path / "sweep" / "plots" / "peaks.png").ndim == 3


@pytest.mark.usefixtures("no_pictures")
def test_peaks_of_every_run(tmp_path) -> None:
    write_memory(grid(), tmp_path)
    found = read(tmp_path, "peaks")
    assert [(row["context_length"], row["mode"], row["precision"], row["status"]) for row in found] == [
        ("128", "inference", "fp32", "ok"), ("128", "train", "fp32", "ok"), ("128", "train", "bf16", "ok"),
        ("512", "inference", "fp32", "ok"), ("512", "train", "fp32", "oom"),
    ]  # fmt: skip
    assert [int(row["peak_allocated_bytes"]) / MIB for row in found] == [160, 780, 390, 160, 780]
    assert [row["plain_peak_allocated_bytes"] for row in found] == ["", str(781 * MIB), "", "", ""]
    predicted = [int(row["predicted_peak_allocated_bytes"]) / 2**30 for row in found]
    # what plain runs took on one H200 (data/e2e_benchmark)
    assert predicted == pytest.approx([0.5509, 2.0677, 2.1201, 0.6648, 3.9967], rel=0.01)
    assert found[1]["block_saved_bytes"] == str(60 * MIB)
    assert found[0]["block_saved_bytes"] == ""
    assert {row["residual_stream_bytes"] for row in found} == {"6553600"}


def test_forward_alone_against_a_whole_step() -> None:
    by_mode, every, categories = memory_tables(grid())
    assert [heading.name for heading in by_mode.headings] == ["size", "context", "precision", "inference", "train"]
    assert by_mode.rows == (
        ("small", "128", "fp32", "0.16", "0.76"),
        ("small", "128", "bf16", "", "0.38"),
        ("small", "512", "fp32", "0.16", "above 0.76"),
    )
    assert "inference," not in by_mode.notes[-1], "the rows stand for both modes"
    assert [row[-1] for row in every.rows] == ["ok"] * 4 + ["out of memory"]
    assert every.failed == {4}
    assert len(categories.rows) == 5
    _, categories = memory_tables([entry()])  # one mode needs no table by mode
    assert [heading.name for heading in categories.headings][:1] == ["parameters"], "one run is told from no other"
    assert "small, ctx 128" in categories.notes[-1]


@pytest.mark.usefixtures("no_pictures")
def test_categories_add_up_in_every_row(tmp_path) -> None:
    write_memory(grid(), tmp_path)
    for row in read(tmp_path, "peaks"):
        assert sum(float(value) for name, value in row.items() if name.endswith("_share")) == pytest.approx(1)
        parts = [int(value) for name, value in row.items() if name.removesuffix("_bytes") in NAMES]
        assert sum(parts) == int(row["peak_allocated_bytes"])


@pytest.mark.usefixtures("no_pictures")
def test_every_boundary_is_beside_the_allocators_count(tmp_path) -> None:
    """Of make_memory: 8 boundaries, each what profiles.py says; make_oom has 5, make_inference 2."""
    write_memory([entry(), entry(make_oom(), context_length=512)], tmp_path)
    rows = read(tmp_path, "boundaries")
    assert [row["moment"] for row in rows[:4]] == ["start", "end of forward", "end of backward", "end of optimizer"]
    step = [310, 710, 410, 310]
    assert [int(row["allocated_bytes"]) // MIB for row in rows] == [*step, *step, *step, 310]
    for row in rows:
        parts = sum(int(value) for name, value in row.items() if name.removesuffix("_bytes") in NAMES)
        assert parts == int(row["allocated_bytes"]) == int(row["counted_bytes"])
        assert row["difference_bytes"] == "0"
    text = (tmp_path / "boundaries.md").read_text()
    assert text.count("\n| small") == 4 + 1, "of the last step of each"
    assert "Check: at all 13 boundaries the categories add up to what PyTorch's allocator" in text
    phases = read(tmp_path, "phases")
    assert [int(row["peak_bytes"]) // MIB for row in phases] == [710, 780, 415] * 3 + [530]
    assert [row["status"] for row in phases] == ["ok"] * 9 + ["oom"]
    text = (tmp_path / "phases.md").read_text()
    assert text.count("\n| small") == 3 + 1
    assert text.count("out of memory |") == 1


def test_what_ran_out_of_memory_is_no_result() -> None:
    _, categories = memory_tables([entry(make_oom()), entry(context_length=512)])
    assert [row[-1] for row in categories.rows] == ["out of memory", "ok"]
    assert any("less than the run needs" in note for note in categories.notes)
    _, categories = memory_tables([entry(), entry(context_length=512)])
    assert not any("less than the run needs" in note for note in categories.notes)


@pytest.mark.usefixtures("no_pictures")
def test_the_first_step_is_compared_with_nothing_that_came_later(tmp_path) -> None:
    """The measured first step of xl at context 512 in fp32 peaked at 30.18 GiB on one H200, later ones at 41.72."""
    config = make_config("xl", 512, profiler=Profiler.MEMORY, warmup_steps=0, measured_steps=1)
    steady = make_record(make_config("xl", 512), (0.7,), peak_bytes=round(41.72 * 2**30))
    write_memory([MemoryEntry(config=config, profile=make_memory(), plain=steady)], tmp_path)
    (row,) = read(tmp_path, "peaks")
    assert row["plain_peak_allocated_bytes"] == ""
    assert int(row["predicted_peak_allocated_bytes"]) / 2**30 == pytest.approx(30.18, abs=0.005)
    assert "0 warm-up steps, 1 measured step" in (tmp_path / "peaks.md").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_pages_of_bars_hold_whole_sizes_as_far_as_there_is_room(tmp_path, monkeypatch) -> None:
    runs = [entry(size=size, context_length=context) for size in ("small", "medium") for context in (128, 256, 512)]
    monkeypatch.setattr(peak_bars, "MAX_BARS", 4)
    assert [len(page) for page in peak_bars._pages([(str(i), run) for i, run in enumerate(runs)])] == [3, 3]
    monkeypatch.setattr(peak_bars, "MAX_BARS", 2)
    assert [len(page) for page in peak_bars._pages([(str(i), run) for i, run in enumerate(runs)])] == [2, 1, 2, 1]
    monkeypatch.setattr(peak_bars, "MAX_BARS", 6)
    write_memory(runs, tmp_path)
    assert (tmp_path / "plots" / "peaks.png").is_file()
    assert not (tmp_path / "plots" / "peaks2.png").exists()


def test_no_entries_no_files(tmp_path) -> None:
    assert write_memory([], tmp_path / "nothing") == []
    assert not (tmp_path / "nothing").exists()
    assert memory_tables([]) == []


def test_hostile_names_are_inert_in_every_file(tmp_path) -> None:
    name = HOSTILE + "x" * 8000
    like = make_like(1, name=name, explanation=HOSTILE)
    write_memory([entry(make_memory(source=name, largest=(like,), notes=(name,)), size=HOSTILE)], tmp_path)
    for ending in ("md", "tex", "typ"):
        text = (tmp_path / f"largest.{ending}").read_text()
        assert not any(character in text for character in "\r\t\0\x1b")
    assert "<" not in (tmp_path / "largest.md").read_text()
    assert r"\input{" not in (tmp_path / "largest.tex").read_text()
    assert all(row["name"].startswith("'=HYPERLINK") for row in read(tmp_path, "largest"))
