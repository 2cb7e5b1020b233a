"""Sentences below the tables: each is there by a cause that is put in, and gone without it."""

from dataclasses import replace

import pytest

from cs336_systems.config import OptimizerKind
from cs336_systems.costs.traffic import traffic
from cs336_systems.record import WarningCode
from cs336_systems.report.sections.ladder.notes import count_notes, reason_notes, speed_notes
from cs336_systems.report.sections.ladder.rows import ladder_rows
from cs336_systems.studies.ceilings_files import NO_CEILINGS
from tests.report.ladders import STEPS_S, make_entry, make_ladder, make_process, make_records, shifted
from tests.report.sections.kernels.profiles import seconds


@pytest.fixture
def ladder():
    return make_ladder()


def warned(ladder, codes):
    """One process of each rung, with the warnings of that name."""
    return ladder_rows(
        ladder, [make_process(rung, STEPS_S[rung.name], codes=codes.get(rung.name, ())) for rung in ladder], []
    )


def make_plain(ladder):
    return [make_process(rung, 0.1) for rung in ladder]


def starting(notes, words):
    return [note for note in notes if note.startswith(words)]


def test_warnings_are_told_and_their_rows_are_counted(ladder):
    codes = {"bf16": (WarningCode.THROTTLED,), "fused": (WarningCode.THROTTLED, WarningCode.DRIFT)}
    assert starting(speed_notes(warned(ladder, codes)), "Warnings") == [
        "Warnings, named by row in the CSV: throttled in 2 of 4 rungs, drift in 1 of 4 rungs."
    ]
    assert not starting(speed_notes(warned(ladder, {})), "Warnings")


def test_rungs_on_another_gpu_than_the_one_before_are_named(ladder):
    """The second and the third rung ran on GPU B, the others on GPU A."""

    def on(uuids):
        records = make_plain(ladder)
        placed = [
            replace(record, environment=replace(record.environment, device_uuid=uuid))
            for record, uuid in zip(records, uuids, strict=False)
        ]
        return starting(speed_notes(ladder_rows(ladder, placed, [])), "Measured on another GPU")

    [note] = on(["A", "B", "B", "A"])
    assert note.split(".")[0].endswith(": bf16, fused")
    assert not on(["A"] * 4)
    assert not on([None] * 4)
    assert not on(["A", "A"])


@pytest.mark.parametrize(
    ("names", "doubt"),
    [
        ((), ""),
        (("bf16", "compile"), ""),
        (("fused",), ", by times in doubt of fused"),
        (("fp32",), ", by times in doubt of fp32"),
        (("fp32", "compile", "fused"), ", by times in doubt of fp32 and fused"),
    ],
    ids=["none", "others", "the fastest", "the reference", "both"],
)
def test_times_in_doubt_are_told_with_the_fastest(ladder, names, doubt):
    rows = warned(ladder, dict.fromkeys(names, (WarningCode.DRIFT, WarningCode.UNSTABLE)))
    gain = "16 ± 3 ?" if doubt else "16.0"  # each step's deviation is sqrt(2) / 10 of its mean, together 1 / 5
    assert starting(speed_notes(rows), "The fastest") == [
        f"The fastest is fused: 50.00 ms, {gain} times as fast as fp32{doubt}."
    ]


def test_a_lone_credited_rung_is_named_once_where_it_is_in_doubt(ladder):
    records = make_records(ladder, repeats=1, losses={rung.name: shifted(0.5) for rung in ladder[1:]})
    records[0] = make_process(ladder[0], 0.8, codes=(WarningCode.UNSTABLE,))
    assert starting(speed_notes(ladder_rows(ladder, records, [])), "The fastest") == [
        "The fastest is fp32: 800.0 ms, by times in doubt of fp32."
    ]


class Ceiling:
    """In place of studies: 1e14 FLOP/s, whatever the device."""

    def flops_per_s(self, device_name, precision):
        return 1e14

    def curves(self, device_name):
        return None


def test_shares_are_defined_as_far_as_they_are_known(ladder):
    rows = ladder_rows(ladder, make_records(ladder), [], NO_CEILINGS)
    each = "Each is over that of the rung's own precision, and falls where that is higher"
    flops = "FLOPs are the model's, with attention in full."
    assert starting(speed_notes(rows), "MFU") == [f"MFU: of the promised dense peak. {each}. {flops}"]
    both = ladder_rows(ladder, make_records(ladder), [], Ceiling())
    assert starting(speed_notes(both), "MFU") == [
        "MFU: of the promised dense peak. Of ceiling: of the highest rate that matrix products were measured to reach. "
        f"{each}. {flops}"
    ]
    unknown = [make_process(rung, 0.1, device_name="a GPU unheard of") for rung in ladder]
    assert not [note for note in speed_notes(ladder_rows(ladder, unknown, [])) if "MFU" in note or "ceiling" in note]


@pytest.mark.parametrize("names", [("bf16", "fused"), ("bf16", "fused", "fp8")], ids=["without", "with"])
def test_fp8_is_told_to_be_over_the_peak_of_bf16_and_to_have_no_least_bytes(names):
    rungs = make_ladder("gpt2-xl", names)
    is_told = [rung.config.fp8 for rung in rungs] == [False, False, False, True]
    assert is_told is ("fp8" in names)
    rows = ladder_rows(rungs, make_plain(rungs), [])
    assert any("; fp8 is over bf16's. " in note for note in speed_notes(rows)) is is_told
    bytes_note = "Least bytes are not counted for fp8, whose casts and copies have no closed form here."
    assert (bytes_note in count_notes(rows)) is is_told


def test_rungs_without_a_profile_are_named(ladder):
    rest = "no counts, no busy time, no class times."
    for profiled, said in (
        (ladder, []),
        (ladder[:2], [f"There is no profile of compile, fused: {rest}"]),
        ([], [f"There is no profile of any rung: {rest}"]),
    ):
        rows = ladder_rows(ladder, make_records(ladder), [make_entry(rung) for rung in profiled])
        assert starting(count_notes(rows), "There is no profile") == said


def test_a_rung_that_did_not_run_is_not_said_to_lack_a_profile(ladder):
    rows = ladder_rows(ladder, make_plain(ladder[:2]), [make_entry(rung) for rung in ladder[:2]])
    assert not starting(count_notes(rows), "There is no profile")


def test_the_bytes_of_foreach_are_told_where_it_is_used(ladder):
    """One parameter more costs foreach AdamW what the note says: it has no other bytes."""
    rows = ladder_rows(ladder, make_records(ladder), [])
    (note,) = starting(count_notes(rows), "Least bytes are read")
    per_parameter = traffic(ladder[0].config).optimizer / 128_625_408  # DESIGN's small
    assert f"(foreach: {per_parameter:.0f} bytes a parameter, " in note
    fused = [replace(rung, config=replace(rung.config, optimizer=OptimizerKind.FUSED)) for rung in ladder]
    (note,) = starting(count_notes(ladder_rows(fused, make_plain(fused), [])), "Least bytes are read")
    assert "foreach" not in note


def test_slowed_profiles_are_named_with_how_much(ladder):
    """The plain steps take 100 and 50 ms, the profiled ones 109 and 57."""
    entries = [make_entry(ladder[2], step_s=seconds(108, 110)), make_entry(ladder[3], step_s=seconds(56, 58))]
    rows = ladder_rows(ladder, make_records(ladder), entries)
    assert [row["slowdown"] for row in rows] == [None, None, pytest.approx(0.09), pytest.approx(0.14)]
    assert starting(reason_notes(rows), "Where the profiled step") == [
        "Where the profiled step took over 10% longer than the plain one, class times are left out, of the rung's "
        "reason and of that of the rung compared with it: fused (14.0%)."
    ]
    assert not starting(reason_notes(rows[:3]), "Where the profiled step")
    assert "Class times are those of the profiled run." in reason_notes(rows)
