"""Tables, answers and files over several recorded runs, made of hand-made profiles."""

import csv

import pytest
from matplotlib.image import imread

from cs336_systems.config import Mode, Precision, Profiler
from cs336_systems.report.formats import WRITERS
from cs336_systems.report.memory.sweep import MemoryEntry, memory_sweep_tables, write_memory_sweep
from tests.report.making import HOSTILE, make_config, make_record
from tests.report.memory.profiles import MIB, make_inference, make_like, make_memory, make_moment, make_oom

TABLES = ("peaks", "categories", "largest")


def entry(profile=None, size="small", context_length=128, plain_bytes=None, **fields):
    config = make_config(size, context_length, profiler=Profiler.MEMORY, **fields)
    plain = None if plain_bytes is None else make_record(config.unprofiled, (0.03,), peak_bytes=plain_bytes)
    return MemoryEntry(config=config, profile=profile or make_memory(), plain=plain)


def mixed_profile():
    """Half of 780 MiB: 390, of which 190 are saved activations and 20 autocast copies."""
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
    paths = write_memory_sweep(grid(), tmp_path / "sweep")
    names = {path.relative_to(tmp_path / "sweep").as_posix() for path in paths}
    timelines = {f"plots/{one.config.key}_timeline.png" for one in grid()}
    tables = {f"{name}.{ending}" for name in TABLES for ending in ("csv", *WRITERS)}
    assert names == tables | timelines | {"answers.md", "plots/peaks.png"}
    assert imread(tmp_path / "sweep" / "plots" / "peaks.png").ndim == 3


def test_peaks_of_every_run(tmp_path) -> None:
    write_memory_sweep(grid(), tmp_path)
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
    by_mode, every, categories = memory_sweep_tables(grid())
    assert [heading.name for heading in by_mode.headings] == ["size", "context", "precision", "inference", "train"]
    assert by_mode.rows == (
        ("small", "128", "fp32", "0.16", "0.76"),
        ("small", "128", "bf16", "", "0.38"),
        ("small", "512", "fp32", "0.16", "above 0.76"),
    )
    assert [row[-1] for row in every.rows] == ["ok"] * 4 + ["out of memory"]
    assert every.failed == {4}
    assert len(categories.rows) == 5
    assert len(memory_sweep_tables([entry()])) == 2, "one mode needs no table by mode"


def test_categories_add_up_in_every_row(tmp_path) -> None:
    write_memory_sweep(grid(), tmp_path)
    for row in read(tmp_path, "categories"):
        assert sum(float(value) for name, value in row.items() if name.endswith("_share")) == pytest.approx(1)
        parts = [
            int(value) for name, value in row.items() if name.endswith("_bytes") and name != "peak_allocated_bytes"
        ]
        assert sum(parts) == int(row["peak_allocated_bytes"])


def test_answers_of_each_configuration_below_what_they_share(tmp_path) -> None:
    write_memory_sweep(grid(), tmp_path)
    text = (tmp_path / "answers.md").read_text()
    assert text.count("\n## ") == 6
    assert text.count("\n**small ctx 128 train fp32**: ") == 6
    assert (
        "small fp32: inference 160.0 MiB at context 128, 160.0 MiB at context 512; train 780.0 MiB at context 128, "
        "out of memory after 780.0 MiB at context 512."
    ) in text
    assert (
        "small ctx 128 train bf16 peaks at 0.500 times fp32, 390.0 MiB for 780.0 MiB: saved activations 190.0 MiB for "
        "380.0 MiB, autocast copies 0 bytes for 0 bytes."
    ) in text
    assert "small ctx 512 train bf16 peaks" not in text


def test_a_single_run_needs_no_summary(tmp_path) -> None:
    write_memory_sweep([entry()], tmp_path)
    assert "A picture of each" not in (tmp_path / "answers.md").read_text()


def test_no_entries_no_files(tmp_path) -> None:
    assert write_memory_sweep([], tmp_path / "nothing") == []
    assert not (tmp_path / "nothing").exists()
    assert memory_sweep_tables([]) == []


def test_hostile_names_are_inert_in_every_file(tmp_path) -> None:
    name = HOSTILE + "x" * 8000
    like = make_like(1, name=name, explanation=HOSTILE)
    write_memory_sweep([entry(make_memory(source=name, largest=(like,), notes=(name,)), size=HOSTILE)], tmp_path)
    for ending in ("md", "tex", "typ"):
        text = (tmp_path / f"largest.{ending}").read_text()
        assert not any(character in text for character in "\r\t\0\x1b")
    assert "<" not in (tmp_path / "largest.md").read_text() + (tmp_path / "answers.md").read_text()
    assert r"\input{" not in (tmp_path / "largest.tex").read_text()
    assert all(row["name"].startswith("'=HYPERLINK") for row in read(tmp_path, "largest"))
