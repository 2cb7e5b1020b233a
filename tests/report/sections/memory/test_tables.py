"""Tables and files of hand-made memory profiles (see profiles.py)."""

from dataclasses import replace

import pytest

from cs336.analysis.memory.profile import Category, read_memory_profile
from cs336.config import Mode, Precision, Profiler
from cs336.report.sections.memory.entry import MemoryEntry
from cs336.report.sections.memory.tables import blocks, boundaries, largest, peaks, write_memory
from cs336.report.sections.memory.words import size
from tests.report.making import make_config
from tests.report.reading import column, csv_rows
from tests.report.sections.memory.profiles import (
    LOGITS,
    MIB,
    MOMENTS,
    OPTIONAL,
    WEIGHTS,
    make_bare,
    make_inference,
    make_like,
    make_memory,
    make_moment,
    make_oom,
)

NAMES = {category.replace(" ", "_") for category in Category if category not in OPTIONAL}
MAKERS = (make_memory, make_inference, make_bare, make_oom)


def alone(profile):
    return [MemoryEntry(profile=profile)]


def entry(profile=None, size="small", context_length=128, **fields):
    config = make_config(size, context_length, profiler=Profiler.MEMORY, **fields)
    return MemoryEntry(subject=config, profile=profile or make_memory())


def mixed_profile():
    """Half of 780 MiB: 390, of which 190 are saved activations and 20 held throughout."""
    return make_memory(
        peak=make_moment(
            "backward", 13, 900, counted=False, parameters=100, gradients=80, saved=190, held=20
        )
    )


def grid():
    """Inference and training at two contexts; training runs out of memory at the longer one, but
    not in bf16.
    """
    return [
        entry(make_inference(), mode=Mode.INFERENCE),
        entry(),
        entry(mixed_profile(), precision=Precision.BF16),
        entry(make_inference(), context_length=512, mode=Mode.INFERENCE),
        entry(make_oom(), context_length=512),
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1536, "1.50 KiB"),
        (6553600, "6.25 MiB"),
        (104857600, "100.0 MiB"),
        (20229390336, "18.84 GiB"),
        (3 * 2**40, "3,072.0 GiB"),
    ],
)
def test_sizes_in_sentences(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_the_largest_allocations_with_their_code() -> None:
    odd = make_like(2, requested_bytes=2 * MIB - 1000)
    section = largest([entry(make_memory(largest=(LOGITS, WEIGHTS, odd)))], 2)
    (table,) = section.tables
    assert column(table, "asked for") == ["52,428,800", "20,971,520"]
    assert column(table, "asked for", 1) == ["50.00", "20.00"]
    assert column(table, "count") == ["2", "24"]
    assert column(table, "place") == ["", "cs336_systems/model.py:77 softmax"]
    every = csv_rows(section)
    assert [row["requested_bytes"] for row in every] == ["52428800", "20971520"]
    assert every[1]["places"].endswith("model.py:77 softmax < project/benchmark.py:3 <module>")


def test_what_the_peak_consists_of_by_bytes_together() -> None:
    """20 x 10, 10 x 20 and 1 x 50 of 780 MiB; the moments' blocks may be larger than the
    moments.
    """
    rounded = replace(MOMENTS, requested_bytes=MOMENTS.requested_bytes - MIB)
    section = largest(alone(make_memory(largest=(LOGITS,), at_peak=(rounded, WEIGHTS, LOGITS))), 10)
    (table,) = section.tables
    assert column(table, "each") == ["9.00", "20.00", "50.00"]
    assert column(table, "together") == ["200.00", "200.00", "50.00"]
    assert column(table, "share") == ["25.6", "25.6", "6.4"]
    assert "Shown are 57.7 % of the peak." in table.notes[0]
    assert [int(row["bytes_at_peak"]) // MIB for row in csv_rows(section)] == [200, 200, 50], (
        "each is there once"
    )


def test_what_a_block_saves_over_blocks_and_within_one() -> None:
    """Three blocks save 20 + 18 + 12 + 6 + 3 + 1 MiB, the first one more."""
    (within,) = blocks(make_memory()).tables
    assert within.title == "Largest tensors that block.1 saves for backward"
    assert column(within, "size") == ["20.00", "18.00", "12.00", "6.00", "3.00"]
    assert column(within, "share") == ["33.3", "30.0", "20.0", "10.0", "5.0"]
    assert within.notes[0].startswith(
        "Of 60.00 MiB in 6 tensors, as much as in 3 of 4 blocks; parameters 10.00 MiB"
    )
    assert [row["saved_bytes"] for row in csv_rows(blocks(make_memory()))] == [
        str(61 * MIB),
        *[str(60 * MIB)] * 3,
    ]
    assert blocks(make_inference()).tables == ()


def test_peaks_of_every_run() -> None:
    found = csv_rows(peaks(grid()))
    assert [
        (row["context_length"], row["mode"], row["precision"], row["status"]) for row in found
    ] == [
        ("128", "inference", "fp32", "ok"),
        ("128", "train", "fp32", "ok"),
        ("128", "train", "bf16", "ok"),
        ("512", "inference", "fp32", "ok"),
        ("512", "train", "fp32", "oom"),
    ]
    assert [int(row["peak_allocated_bytes"]) / MIB for row in found] == [160, 780, 390, 160, 780]
    predicted = [int(row["predicted_peak_allocated_bytes"]) / 2**30 for row in found]
    # what plain runs took on one H200 (data/e2e_benchmark)
    assert predicted == pytest.approx([0.5509, 2.0677, 2.1201, 0.6648, 3.9967], rel=0.01)
    assert found[1]["block_saved_bytes"] == str(60 * MIB)
    assert found[0]["block_saved_bytes"] == ""
    width = make_config().model.d_model
    assert [int(row["residual_stream_bytes"]) for row in found] == [
        4 * int(row["context_length"]) * width * 4 for row in found
    ]


def test_categories_add_up_in_every_row() -> None:
    for row in csv_rows(peaks(grid())):
        assert sum(
            float(value) for name, value in row.items() if name.endswith("_share")
        ) == pytest.approx(1)
        parts = [int(value) for name, value in row.items() if name.removesuffix("_bytes") in NAMES]
        assert sum(parts) == int(row["peak_allocated_bytes"])


def test_every_boundary_is_beside_the_allocators_count() -> None:
    """Of make_memory: 8 boundaries, each what profiles.py says; make_oom has 5."""
    section = boundaries([entry(), entry(make_oom(), context_length=512)])
    rows, (table,) = csv_rows(section), section.tables
    assert [row["moment"] for row in rows[:4]] == [
        "start",
        "end of forward",
        "end of backward",
        "end of optimizer",
    ]
    step = [310, 710, 410, 310]
    assert [int(row["allocated_bytes"]) // MIB for row in rows] == [*step, *step, *step, 310]
    for row in rows:
        parts = sum(
            int(value) for name, value in row.items() if name.removesuffix("_bytes") in NAMES
        )
        assert parts == int(row["allocated_bytes"]) == int(row["counted_bytes"])
        requested = [int(row[f"{name}_requested_bytes"]) for name in NAMES]
        assert sum(requested) == int(row["requested_bytes"]) == int(row["counted_requested_bytes"])
        assert row["difference_bytes"] == "0"
        peaks_of = {
            "start": "",
            "end of forward": 710,
            "end of backward": 780,
            "end of optimizer": 415,
        }
        assert row["phase_peak_bytes"] == str(
            peaks_of[row["moment"]] and peaks_of[row["moment"]] * MIB
        )
    assert len(table.rows) == 4 + 1, "of the last step of each"
    assert not any("Check" in note for note in table.notes)
    first, *others = make_memory().boundaries
    wrong = make_memory(
        boundaries=(replace(first, counted_bytes=first.allocated_bytes + 512), *others)
    )
    (table,) = boundaries(alone(wrong)).tables
    assert "Check failed: at 1 of 8 boundaries" in table.notes[0]
    assert "by -512 bytes at most" in table.notes[0]
    assert boundaries(alone(make_bare())).tables == ()


def test_a_single_snapshot_has_the_same_tables_without_settings() -> None:
    """900 reserved and 780 allocated leave 120; 777 were asked for."""
    section = peaks(alone(make_memory()))
    (row,) = csv_rows(section)
    names = ("peak_allocated", "rounding", "peak_requested", "fragmentation", "outside")
    assert [int(row[f"{name}_bytes"]) // MIB for name in names] == [780, 3, 777, 120, 700]
    assert row["residual_stream_bytes"] == ""
    assert sum(int(row[f"{name}_blocks"]) for name in NAMES) == 11 + 22 + 4 + 38 + 5 + 1
    assert [table.headings[0].name for table in section.tables] == ["peak", "parameters"]
    assert column(section.tables[0], "peak") == ["780.00"]


@pytest.mark.parametrize("make", MAKERS)
def test_every_file_of_a_snapshot_is_written_and_read_again(make, tmp_path, no_pictures) -> None:
    write_memory(make_memory(), tmp_path, 10)
    assert (tmp_path / "blocks.md").exists()
    paths = write_memory(make(), tmp_path, 10)
    assert len(paths) == len(set(paths))
    assert all(path.stat().st_size for path in paths)
    assert read_memory_profile(tmp_path / "memory.json") == make()
    assert {path.name for path in paths} >= {
        "memory.json",
        "findings.md",
        "peaks.md",
        "timeline.png",
    }
    assert (tmp_path / "blocks.md").exists() == bool(make().blocks), (
        "files of another profile are removed"
    )
