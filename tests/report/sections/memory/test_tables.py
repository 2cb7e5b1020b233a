"""Tables and files of hand-made memory profiles (see profiles.py)."""

from dataclasses import replace

import pytest

from cs336_systems.analysis.memory.profile import Category, read_memory_profile
from cs336_systems.report.sections.memory.allocations import blocks, largest
from cs336_systems.report.sections.memory.compare import compare_memory
from cs336_systems.report.sections.memory.entries import Snapshot
from cs336_systems.report.sections.memory.files import write_memory
from cs336_systems.report.sections.memory.tables import boundaries, peaks, phases
from cs336_systems.report.sections.memory.words import (
    MemoryUnit,
    fragmentation_bytes,
    moment_ms,
    peak_words,
    place_text,
    size,
    typical,
    unit_for,
)
from tests.report.reading import column, csv_rows
from tests.report.sections.memory.profiles import (
    GRADIENTS,
    LOGITS,
    MIB,
    MOMENTS,
    SAVED,
    WEIGHTS,
    make_bare,
    make_block,
    make_inference,
    make_like,
    make_memory,
    make_moment,
    make_oom,
)

pytestmark = pytest.mark.usefixtures("no_pictures")

MAKERS = (make_memory, make_inference, make_bare, make_oom)


def alone(profile):
    return [Snapshot(profile=profile)]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (1023, "1,023 bytes"), (1536, "1.50 KiB"), (6553600, "6.25 MiB"),
     (104857600, "100.0 MiB"), (20229390336, "18.84 GiB"), (3 * 2**40, "3,072.0 GiB")],
)  # fmt: skip
def test_sizes_in_sentences(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_cells_of_one_unit() -> None:
    assert (unit_for(2**30 - 1).name, unit_for(2**30).name) == ("MiB", "GiB")
    unit = MemoryUnit("GiB", 2**30, 3)
    assert [unit.cell(n) for n in (0, 512, 2**20, 3 * 2**29)] == ["0", "< 0.001", "0.001", "1.500"]


def test_a_place_keeps_the_end_of_its_path() -> None:
    assert place_text(WEIGHTS.places[0]) == "cs336_systems/model.py:77 softmax"
    windows = replace(WEIGHTS.places[0], file=r"C:\Users\me\code\model.py")
    assert place_text(windows) == "code/model.py:77 softmax"


def test_crumbs_are_left_out_of_sentences() -> None:
    moment = make_moment("forward", 0, 900, saved=999.5, gradients=0.5)
    assert peak_words(make_memory(peak=moment)).endswith(" saved activations 999.5 MiB (100.0 %).")


def test_the_peak_and_what_it_needs_beside() -> None:
    """900 reserved and 780 allocated leave 120; 777 as asked for, 778 with what was held throughout in blocks."""
    values = {row["quantity"]: row["value"] for row in csv_rows(peaks(alone(make_memory())))}
    names = ("peak allocated", "rounding", "peak asked for", "peak recorded", "fragmentation", "outside of PyTorch")
    assert [int(values[name]) // MIB for name in names] == [780, 3, 777, 778, 120, 700]
    assert fragmentation_bytes(make_memory()) == 120 * MIB
    assert int(values["residual stream"]) == 4 * 512 * 800 * 4
    assert (int(values["device"]), int(values["steps"])) == (0, 2)
    table, *_ = peaks(alone(make_memory())).tables
    assert column(table, "value")[0] == "780.0 MiB"
    assert table.notes[-1] == "two blocks were joined"


def test_what_is_not_known_of_a_peak_is_empty() -> None:
    section = peaks(alone(make_bare()))
    table, *_ = section.tables
    values = {row["quantity"]: row["value"] for row in csv_rows(section)}
    assert values["residual stream"] == ""
    assert dict(zip(column(table, "quantity"), column(table, "value"), strict=True))["residual stream"] == "unknown"


@pytest.mark.parametrize(("time_s", "text"), [(0, "0.00"), (0.00438, "4.38"), (0.0157, "15.7"), (3.7189, "3,718.9")])
def test_times_have_a_tenth_of_a_millisecond(time_s: float, text: str) -> None:
    assert moment_ms(time_s) == text


def test_boundaries_in_time_with_the_peak_among_them() -> None:
    section = boundaries(alone(make_memory()))
    table = section.tables[0]
    assert column(table, "moment") == [
        "start", "end of forward", "peak, in backward", "end of backward", "end of optimizer",
        "start", "end of forward", "end of backward", "end of optimizer",
    ]  # fmt: skip
    assert column(table, "step") == ["0"] * 5 + ["1"] * 4
    assert column(table, "saved activations")[:4] == ["0", "400.00", "380.00", "0"]
    assert column(table, "allocated")[:5] == ["310.00", "710.00", "780.00", "410.00", "310.00"]
    assert column(table, "PyTorch's count")[:4] == ["310.00", "710.00", "", "410.00"]
    assert "buffers" not in [heading.name for heading in table.headings], "there are none"
    for row in csv_rows(section):
        parts = [int(value) for name, value in row.items() if name.endswith("_bytes") and name.split("_bytes")[0] in (
            "parameters", "buffers", "gradients", "optimizer_state", "autocast_copies", "saved_activations",
            "temporary", "held_throughout", "held_until_later")]  # fmt: skip
        assert len(parts) == len(Category)
        assert sum(parts) == int(row["allocated_bytes"])
        requested = [int(value) for name, value in row.items() if name.endswith("_requested_bytes")
                     and name != "counted_requested_bytes"]  # fmt: skip
        assert len(requested) == len(Category)
        assert sum(requested) == int(row["requested_bytes"])
    peak = csv_rows(section)[2]
    assert (int(peak["temporary_bytes"]), int(peak["temporary_requested_bytes"])) == (50 * MIB, 47 * MIB)
    assert peak["counted_requested_bytes"] == ""


def test_rounding_that_shows_is_told() -> None:
    """20 of 100 MiB of gradients, and 3 of 47 temporary; of 400 MiB saved only 1, which no cell shows."""
    whole = make_memory()
    (table,) = boundaries(alone(whole)).tables
    assert table.notes[1].endswith(": temporary 50.00 MiB for 47.00 MiB.")
    start, _, _, *others = whole.boundaries
    rounded = make_moment("backward", 20, 900, rounding={"gradients": 20}, parameters=100, optimizer_state=200,
                          gradients=100, held=10)  # fmt: skip
    saved = make_moment(
        "forward", 10, 900, rounding={"saved": 1}, parameters=100, optimizer_state=200, saved=400, held=10
    )
    changed = replace(whole, boundaries=(start, saved, rounded, *others))
    words = ": gradients 100.0 MiB for 80.00 MiB, temporary 50.00 MiB for 47.00 MiB."
    assert boundaries(alone(changed)).tables[0].notes[1].endswith(words)


def test_each_phase_has_its_own_peak() -> None:
    section = phases(alone(make_memory()))
    (table,) = section.tables
    assert column(table, "phase") == ["forward", "backward", "optimizer"] * 2
    assert column(table, "peak") == ["710.00", "780.00", "415.00"] * 2
    assert column(table, "peak at") == ["10.0", "13.0", "25.0", "40.0", "43.0", "55.0"]
    assert column(table, "takes") == ["10.0"] * 6
    assert column(table, "at its end")[:3] == ["710.00", "410.00", "310.00"]
    assert [row["status"] for row in csv_rows(section)] == ["ok"] * 6
    assert phases(alone(make_bare())).tables == ()


def test_a_phase_that_ran_out_of_memory_stands_out() -> None:
    section = phases(alone(make_oom()))
    (table,) = section.tables
    assert table.failed == {3}
    assert column(table, "status")[2:] == ["ok", "out of memory"]
    assert (csv_rows(section)[3]["status"], int(csv_rows(section)[3]["end_bytes"])) == ("oom", 530 * MIB)


def test_the_check_tells_of_agreement_and_of_none() -> None:
    def note(profile):
        return boundaries(alone(profile)).tables[0].notes[0]

    whole = make_memory()
    assert note(whole).startswith(
        "Check: at all 8 boundaries the categories add up to what PyTorch's allocator counted"
    )
    first, second, *others = whole.boundaries
    wrong = (replace(first, counted_bytes=first.allocated_bytes + 512), second, *others)
    assert "Check failed: at 1 of 8 boundaries" in note(replace(whole, boundaries=wrong))
    assert "by -512 bytes at most" in note(replace(whole, boundaries=wrong))
    assert "to the byte" not in note(make_bare())
    (bare,) = boundaries(alone(make_bare())).tables
    assert not {"step", "PyTorch's count"} & {heading.name for heading in bare.headings}, "nothing is known of these"


def test_categories_at_the_peak_add_up() -> None:
    section = peaks(alone(make_memory()))
    _, table, _ = section.tables
    assert dict(zip(column(table, "category"), column(table, "share"), strict=True)) == {
        "parameters": "12.8", "gradients": "5.1", "optimizer state": "25.6", "saved activations": "48.7",
        "temporary": "6.4", "held throughout": "1.3", "allocated": "100.0",
    }  # fmt: skip
    *parts, whole = [row for row in csv_rows(section) if row["quantity"].endswith(" at the peak") and row["share"]]
    assert sum(int(row["value"]) for row in parts) == int(whole["value"]) == 780 * MIB
    assert sum(int(row["blocks"]) for row in parts) == int(whole["blocks"]) == 11 + 22 + 4 + 38 + 5 + 1
    assert column(table, "asked for") == ["100.00", "40.00", "200.00", "380.00", "47.00", "10.00", "777.00"]
    assert sum(int(row["requested_bytes"]) for row in parts) == int(whole["requested_bytes"]) == 777 * MIB


def test_the_largest_allocations_with_their_code() -> None:
    odd = make_like(2, requested_bytes=2 * MIB - 1000)
    section = largest(alone(make_memory(largest=(LOGITS, WEIGHTS, odd), at_peak=(WEIGHTS,))), 2)
    _, table = section.tables
    assert column(table, "asked for") == ["52,428,800", "20,971,520"]
    assert column(table, "asked for", 1) == ["50.00", "20.00"]
    assert column(table, "count") == ["2", "24"]
    assert column(table, "place") == ["", "cs336_systems/model.py:77 softmax"]
    assert "Shown are 2 of 3 such rows." in table.notes
    every = csv_rows(section)
    assert [row["requested_bytes"] for row in every] == ["52428800", "20971520", "2096152"]
    assert every[1]["places"].endswith("model.py:77 softmax < /home/someone/project/benchmark.py:3 <module>")


def test_what_the_peak_consists_of_by_bytes_together() -> None:
    """20 x 10, 10 x 20 and 1 x 50 of 780 MiB; the moments' blocks may be larger than the moments."""
    rounded = replace(MOMENTS, requested_bytes=MOMENTS.requested_bytes - MIB)
    section = largest(alone(make_memory(largest=(LOGITS,), at_peak=(rounded, WEIGHTS, LOGITS))), 10)
    table, _ = section.tables
    assert column(table, "each") == ["9.00", "20.00", "50.00"]
    assert column(table, "together") == ["200.00", "200.00", "50.00"]
    assert column(table, "share") == ["25.6", "25.6", "6.4"]
    assert table.notes[1] == "Shown are 57.7 % of the peak."
    assert [int(row["bytes_at_peak"]) // MIB for row in csv_rows(section)] == [50, 200, 200], "each is there once"


def test_what_a_block_saves_over_blocks_and_within_one() -> None:
    """Three blocks save 20 + 18 + 12 + 6 + 3 + 1 MiB, the first one more."""
    over, within = blocks(make_memory()).tables
    assert over.rows[0] == ("saved for backward", "60.00", "60.00", "61.00", "241.00")
    assert over.rows[2] == ("gradients", "10.00", "10.00", "10.00", "40.00")
    assert within.title == "Largest tensors that block.1 saves for backward"
    assert column(within, "size") == ["20.00", "18.00", "12.00", "6.00", "3.00"]
    assert column(within, "share") == ["33.3", "30.0", "20.0", "10.0", "5.0"]
    assert within.notes[0].startswith("Of 60.00 MiB in 6 tensors, the same in 3 of 4 blocks.")
    assert [row["saved_bytes"] for row in csv_rows(blocks(make_memory()))] == [str(61 * MIB), *[str(60 * MIB)] * 3]
    assert blocks(make_inference()).tables == ()


def test_what_blocks_save_only_in_backward_is_told() -> None:
    """The largest tensor of each of two blocks."""
    first, *others = make_block(0).saved
    block = replace(make_block(0), saved=(replace(first, is_recomputed=True), *others))
    section = blocks(make_memory(blocks=(block, block)))
    assert section.tables[0].notes[1] == (
        "Of what is saved, 40.00 MiB are not kept from forward on: backward computes them again."
    )
    assert [row["recomputed_bytes"] for row in csv_rows(section)] == [str(20 * MIB)] * 2
    assert len(blocks(make_memory()).tables[0].notes) == 1


@pytest.mark.parametrize(
    ("weights", "name"),
    [((5, 6, 7), "block.1"), ((9, 6, 6, 7), "block.1"), ((8, 9, 6, 7), "block.3"), ((5,), "block.0")],
)
def test_a_typical_block_saves_the_median(weights: tuple[int, ...], name: str) -> None:
    """Of an even number the lower of the middle two, and the first of those that save as much."""
    assert typical([make_block(index, weight) for index, weight in enumerate(weights)]).name == name


def test_no_block_is_typical_of_none() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        typical([])


def test_running_out_of_memory_is_in_the_allocator_s_table() -> None:
    values = {row["quantity"]: row["value"] for row in csv_rows(peaks(alone(make_oom())))}
    assert (values["out of memory"], values["asked for"], values["free then"]) == ("2", str(300 * MIB), str(120 * MIB))
    assert (values["allocated then"], values["reserved then"]) == (str(530 * MIB), str(900 * MIB))
    assert values["events before it"] == "1999"
    *_, table = peaks(alone(make_oom())).tables
    assert "35.0 ms after the first event, in forward of step 1, at cs336_systems/model.py:77" in table.notes[0]
    assert "asked for" not in {row["quantity"] for row in csv_rows(peaks(alone(make_memory())))}


@pytest.mark.parametrize("make", MAKERS)
def test_every_file_is_written_and_read_again(make, tmp_path) -> None:
    paths = write_memory(alone(make()), tmp_path / "out")
    assert len(paths) == len(set(paths))
    assert all(path.stat().st_size for path in paths)
    assert read_memory_profile(tmp_path / "out" / "memory.json") == make()
    assert {path.name for path in paths} >= {"memory.json", "findings.md", "peak.md", "timeline.png"}


def test_files_of_another_profile_are_removed(tmp_path) -> None:
    write_memory(alone(make_memory()), tmp_path)
    assert (tmp_path / "blocks.md").exists()
    write_memory(alone(make_inference()), tmp_path)
    assert not list(tmp_path.glob("blocks.*"))


def test_what_grew_by_category_and_by_place() -> None:
    """Saved activations halve, gradients are new by 30, logits are elsewhere."""
    before = make_memory(at_peak=(WEIGHTS, LOGITS))
    peak = make_moment("backward", 13, 900, counted=False, parameters=100, optimizer_state=200, gradients=70,
                       saved=190, temporary=50, held=10)  # fmt: skip
    after = make_memory(peak=peak, source="b.pickle", at_peak=(
        replace(WEIGHTS, bytes_at_peak=100 * MIB), LOGITS, make_like(30, category=GRADIENTS, name="lm_head.weight"),
    ))  # fmt: skip
    categories, places = compare_memory(before, after)
    grown = dict(zip(column(categories, "category"), column(categories, "grown by"), strict=True))
    assert grown == {"parameters": "0", "gradients": "+30.00", "optimizer state": "0", "saved activations": "-190.00",
                     "temporary": "0", "held throughout": "0", "allocated": "-160.00",
                     "reserved at most": "0"}  # fmt: skip
    assert column(categories, "grown by", 1) == ["0", "+75.0", "0", "-50.0", "0", "0", "-20.5", "0"]
    assert column(places, "grown by", 1) == ["-50.0", "new"]
    assert categories.notes[1] == "The peak shrank by 160.0 MiB."
    assert [row[0] for row in places.rows] == [
        f"{SAVED}, block.* > attention > attention.softmax", "gradients, lm_head.weight",
    ]  # fmt: skip
    assert column(places, "grown by") == ["-100.00", "+30.00"]
    assert column(places, "place") == ["cs336_systems/model.py:77 softmax", ""]
    same, none = compare_memory(before, before)
    assert same.notes[1] == "The peaks are the same, to the byte."
    assert none.rows == ()
