"""What the records do not show is not said: drawn results whose truth is known from the draw."""

import math
import random
import re
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from cs336.config import Attention, Device, Mode, Phase, Precision
from cs336.loop_record import LoopRecord
from cs336.record import Measurement, RunRecord, Status, WarningCode
from cs336.report.compared import Sides, compare_sides
from cs336.report.configurations import step_results
from cs336.report.identity import settings_of, shared_settings
from cs336.report.page.directory import Directory
from cs336.report.page.glance import _tiles as tiles
from cs336.report.page.glance import headline_of, of_ladder, of_steps
from cs336.report.results import StudyResults
from cs336.report.sections.ceilings import ceilings_sections
from cs336.report.sections.ladder import ladder_results, ladder_section
from cs336.report.sections.operators import fusion_section
from cs336.report.sections.steps import phase_bars, results_table, step_answer, step_findings
from cs336.report.words import STATUS_WORDS
from cs336.studies.ceilings_rows import Stream
from cs336.studies.operators import PHASES, Version
from cs336.subject import WatchedLoop
from tests.report.ceilings import make_ceilings, product_at, square, stream_at
from tests.report.ladders import FALLING, STEPS_S, make_ladder, make_process
from tests.report.making import H200, make_config, make_environment, make_failure, make_record
from tests.report.studies import make_cell, make_fusion, make_result, make_row, make_study

FAILURES = (Status.OOM, Status.CRASHED, Status.TIMEOUT, Status.CUDA_ERROR)
SOFTWARE = {"torch": ("2.11.0", "2.9.0"), "driver": ("580", "590"), "code": ("abc", "def")}


def make_loop(repeat: int = 0, step_s: float = 0.1, **fields) -> RunRecord:
    """A process of a watched loop."""
    loop = WatchedLoop(
        name="mine", device=Device.CUDA, warmup_steps=1, measured_steps=2, repeat=repeat, **fields
    )
    return RunRecord(
        loop=loop,
        status=Status.OK,
        started_at="2026-01-01T00:00:00Z",
        measurements=(Measurement(Phase.STEP, (0.99 * step_s, 1.01 * step_s)),),
        environment=make_environment(),
    )


def draw_processes(rng: random.Random, context_length: int) -> list[RunRecord]:
    """One to four processes of a configuration, each of which may fail in its own way."""
    processes = []
    for repeat in range(rng.randint(1, 4)):
        config = make_config("tiny", context_length, repeat=repeat)
        if rng.random() < 0.5:
            processes.append(make_record(config, (rng.uniform(0.1, 1), rng.uniform(0.1, 1))))
        else:
            processes.append(make_failure(config, rng.choice(FAILURES), device_name=H200))
    return processes


def expected_end(processes: list[RunRecord]) -> str:
    """How the processes ended: one word where all ended alike."""
    counts = Counter(record.status for record in processes)
    if len(counts) == 1:
        return STATUS_WORDS[processes[0].status]
    failed = (
        f"{number} {STATUS_WORDS[status]}" for status, number in counts.items() if status != "ok"
    )
    return f"of {len(processes)} processes {', '.join(failed)}"


@pytest.mark.parametrize("seed", range(40))
def test_a_configuration_with_a_time_has_not_failed_as_a_whole(seed: int) -> None:
    rng = random.Random(seed)
    groups = [draw_processes(rng, 32 * (1 + index)) for index in range(rng.choice((1, 2, 3)))]
    results = step_results([record for group in groups for record in group])
    ends = [expected_end(group) for group in groups]
    headline, _ = of_steps(results)
    failed = Counter(end for end in ends if end != "ok")
    assert headline.count(";") == len(failed)
    for end, number in failed.items():
        many = f" in {number} of {len(groups)}" if len(groups) > 1 else ""
        assert f"; {end}{many}" in headline
    findings = " ".join(step_findings(results))
    table = results_table(results)
    statuses = [heading.name for heading in table.headings]
    for row, result, bar, end in zip(table.rows, results, phase_bars(results), ends, strict=True):
        assert not failed or row[statuses.index("status")] == end
        assert bool(bar.failure) is not bool(bar.figures)
        assert bool(bar.figures) is any(record.measurements for record in result.records)
        if len(groups) > 1 and end != "ok":
            assert f"{end[0].upper()}{end[1:]}: " in findings


@pytest.mark.parametrize("seed", range(20))
def test_unlike_conditions_are_named_wherever_records_are_joined(seed: int) -> None:
    rng = random.Random(seed)
    records, seen = [], {name: set() for name in SOFTWARE}
    for repeat in range(3):
        record = make_record(make_config(repeat=repeat), (0.1, 0.11 + 0.01 * repeat))
        drawn = {name: rng.choice(values) for name, values in SOFTWARE.items()}
        for name, value in drawn.items():
            seen[name].add(value)
        identity = replace(record.environment.identity, **drawn)
        records.append(replace(record, environment=replace(record.environment, identity=identity)))
    apart = [f"{name} {' and '.join(sorted(seen[name]))}" for name in seen if len(seen[name]) > 1]
    table = results_table(step_results(records))
    ladder = make_ladder()[:1]
    rungs = [
        replace(record, config=replace(ladder[0].config, repeat=record.config.repeat))
        for record in records
    ]
    compared = compare_sides(Sides(a="a", b="b"), (records, records), allow_mixed=True)
    for notes in (
        table.notes,
        ladder_section(ladder_results(ladder, rungs, [])).tables[0].notes,
        compared.section.tables[0].notes,
    ):
        told = [note for note in notes if "unlike hardware or software" in note]
        assert len(told) == bool(apart)
        assert all(part in told[0] for part in apart)


@pytest.mark.parametrize("seed", range(30))
def test_what_was_not_seen_of_a_loop_is_not_shared(seed: int) -> None:
    """Of runs beside a watched loop, only what the loop has too is a setting of all."""
    rng = random.Random(seed)
    config = make_config(mode=rng.choice(list(Mode)), precision=rng.choice(list(Precision)))
    loop = make_loop(
        mode=rng.choice((None, config.mode)), precision=rng.choice((None, config.precision))
    ).loop
    assert loop is not None
    told = shared_settings([(config, H200), (loop, H200)])
    words = told.split(", ")
    assert words[0] == H200
    both = {name: settings_of(loop)[name] for name in ("mode", "precision")}
    expected = [str(value) for value in both.values() if value is not None]
    # of other settings a loop knows only how many steps it had
    known = [word for word in words[1:] if "step" not in word]
    assert sorted(known) == sorted(expected)


@pytest.mark.parametrize("seed", range(12))
def test_what_was_not_seen_of_a_users_model_is_not_shared(seed: int) -> None:
    """Beside a run of this project's model: of a user's neither width nor attention is known."""
    rng = random.Random(seed)
    attention = rng.choice([*Attention])
    ours = make_config(precision=rng.choice([*Precision]), model={"attention": attention})
    theirs = replace(ours, model_factory="mine:make", size="own")
    told = shared_settings([(run, H200) for run in rng.sample([ours, theirs], 2)])
    assert "attention" not in told
    assert str(ours.precision) in told.split(", ")
    assert "attention" in shared_settings([(ours, H200), (replace(ours, seed=1), H200)])
    sides = [[make_record(config, (0.1, 0.1))] for config in (ours, theirs)]
    notes = compare_sides(Sides(a="a", b="b"), sides).section.tables[0].notes
    assert any(f"attention ({attention}, not seen)" in note for note in notes)


@pytest.mark.parametrize("unseen", "AB")
def test_steps_without_tokens_are_not_compared_with_steps_of_tokens(unseen: str) -> None:
    with_tokens = [make_loop(repeat, context_length=8, tokens_per_step=64) for repeat in range(3)]
    without = [make_loop(repeat) for repeat in range(3)]
    sides = (without, with_tokens) if unseen == "A" else (with_tokens, without)
    with pytest.raises(ValueError, match=f"no tokens were seen in the steps of {unseen}"):
        compare_sides(Sides(a="a", b="b"), sides)
    both = compare_sides(Sides(a="a", b="b"), (without, without)).section
    assert both.rows[0]["ratio"] == pytest.approx(1)


@pytest.mark.parametrize("seed", range(30))
def test_the_note_on_an_interval_is_of_the_interval_that_is_shown(seed: int) -> None:
    """Drawn repeats of each side: Student's t where at least three neighbours of both ended well
    and differ, else Welch's.
    """
    rng = random.Random(seed)
    is_equal = rng.random() < 0.3
    repeats = [sorted(rng.sample(range(5), rng.randint(1, 5))) for _ in "AB"]
    records = []
    for side, blocks in enumerate(repeats):
        for block in blocks:
            step_s = 0.1 if is_equal else rng.uniform(0.1, 0.12)
            config = make_config(repeat=2 * block + side)
            records.append(make_record(config, (0.99 * step_s, 1.01 * step_s)))
    sides = [[r for r in records if r.config.repeat % 2 == side] for side in (0, 1)]
    compared = compare_sides(Sides(a="a", b="b"), sides, are_alternate=True)
    (table,) = compared.section.tables
    in_turn = len(set(repeats[0]) & set(repeats[1])) >= 3 and not is_equal
    assert any("Student's t" in note for note in table.notes) is in_turn
    assert any("Welch's" in note for note in table.notes) is not in_turn
    is_assumed = not in_turn and (is_equal or min(map(len, repeats)) < 3)
    assert any("or equal ones" in note for note in table.notes) is is_assumed
    assert ("assumed to scatter" in compared.answer) is is_assumed or "below" in compared.answer
    if is_equal:
        assert compared.section.rows[0]["verdict"] == "cannot tell"


def test_a_tile_says_of_how_many_rows_it_is() -> None:
    """Three configurations have a time, one of them a utilisation and two a peak."""
    records = [
        make_record(make_config(), (0.1, 0.11)),
        make_record(make_config(context_length=256), (0.2, 0.21), device_name="one"),
        make_record(make_config("medium"), (0.3, 0.3), device_name="two", peak_bytes=None),
    ]
    notes = {tile.name: tile.note for tile in tiles(step_results(records), "")}
    assert notes["step"] == "3 of 3 configurations"
    assert notes["MFU"].endswith(", of 1 of 3")
    assert notes["peak of memory"].endswith(", of 2 of 3")
    assert notes["tokens/s"] == "in a step over its time"


def test_a_ladder_without_a_reference_has_not_failed_its_gate() -> None:
    ladder = make_ladder()
    records = [make_process(rung, STEPS_S[rung.name], losses=FALLING) for rung in ladder]
    for reference in (make_failure(ladder[0].config), replace(records[0], losses=())):
        rungs = ladder_results(ladder, [reference, *records[1:]], [])
        headline, _ = of_ladder(rungs)
        assert headline.startswith("The gate judged no rung: the reference has no 20 finite losses")
    shift = [replace(record, losses=tuple(2 * loss for loss in FALLING)) for record in records]
    rungs = ladder_results(ladder[1:], [records[0], *shift[1:]], [])
    assert not of_ladder(rungs)[0].startswith("The gate judged no rung")


def test_rungs_of_unlike_devices_have_no_speed_up() -> None:
    ladder = make_ladder()
    records = [
        make_process(rung, STEPS_S[rung.name], device_name=name)
        for rung, name in zip(ladder, ("one", "one", "two", "two"), strict=True)
    ]
    rungs = ladder_results(ladder, records, [])
    assert [rung.over_last.ratio for rung in rungs] == [
        None,
        pytest.approx(STEPS_S["fp32"] / STEPS_S["bf16"]),
        None,
        pytest.approx(STEPS_S["compile"] / STEPS_S["fused"]),
    ]
    assert [rung.over_first.ratio is None for rung in rungs] == [True, False, True, True]
    table = ladder_section(rungs).tables[0]
    assert any(note.endswith(", one, two.") for note in table.notes)
    assert any(note.startswith("The fastest rung is fused: 50.00 ms; ") for note in table.notes)


def test_between_steps_of_which_no_data_was_seen_are_not_split() -> None:
    seen = LoopRecord()
    (result,) = step_results([replace(make_loop(), between_s=(0.1, 0.1), seen=seen)])
    assert of_steps([result]) == ("A step takes 100.0 ms.", "Between steps: 100 ms.")
    whole = replace(seen, between_data_s=(0.0, 0.02))
    (result,) = step_results([replace(make_loop(), between_s=(0.1, 0.1), seen=whole)])
    assert "data 10 and other 90 ms" in of_steps([result])[1]


def test_an_interrupted_study_says_so() -> None:
    """The grid has a version at least of one operation, forward and backward of each."""
    whole = 2 * len(Version)
    rows = [make_row(version=version, phase=phase) for version in Version for phase in PHASES]
    for number in (1, whole - 1, whole):
        section = fusion_section(make_fusion(*rows[:number]))
        told = {note for table in section.tables for note in table.notes if "Only" in note}
        expected = f"Only {number} of the grid's {whole} cells were measured: the study was"
        assert told == ({f"{expected} interrupted."} if number < whole else set())


@pytest.mark.parametrize("seed", range(20))
def test_the_headline_of_a_study_counts_what_was_not_measured(seed: int) -> None:
    """Of drawn products and passes over memory a part was measured."""
    rng = random.Random(seed)
    sides, sizes = (range(8, 8 + 8 * rng.randint(1, 3), 8) for _ in range(2))
    products = [product_at(square(side), 1.0) for side in sides]
    streams = [
        stream_at(100, num_bytes=2**20 * size, stream=stream) for size in sizes for stream in Stream
    ]
    study = make_ceilings(products, streams)
    left = (rng.randint(0, len(products)), rng.randint(1, len(streams)))
    part = replace(study, products=study.products[: left[0]], streams=study.streams[: left[1]])
    wanted = len(products) + len(streams)
    note = f"Only {sum(left)} of the grid's {wanted} cells were measured"
    for told in (
        headline_of(Directory(path=Path(), study=StudyResults(part)), ())[1],
        " ".join(ceilings_sections(part)[0].tables[0].notes),
    ):
        assert (note in told) is (sum(left) < wanted)
    titles = [table.title for table in ceilings_sections(part)[1].tables]
    assert len(titles) == bool(left[0]), "a precision without products has no table"


@pytest.mark.parametrize("seed", range(20))
def test_a_speed_up_that_processes_do_not_show_may_be_chance(seed: int) -> None:
    """Three to five processes of each: Welch's interval with a session's 2 %, by scipy."""
    rng = random.Random(seed)
    speed_up, scatter = rng.choice((1.01, 1.05, 1.5)), rng.choice((0.001, 0.05))
    logs: dict[str, list[float]] = {"fp32": [], "bf16": []}
    records = []
    for precision, of_process in logs.items():
        mean_s = 0.1 / (speed_up if precision == "bf16" else 1)
        for repeat in range(rng.randint(3, 5)):
            step_s = mean_s * math.exp(rng.gauss(0, scatter))
            of_process.append(math.log(step_s))
            config = make_config(precision=Precision(precision), repeat=repeat)
            records.append(make_record(config, (step_s, step_s)))
    parts = [(statistics.variance(of) / len(of), len(of) - 1) for of in logs.values()]
    total = 0.02**2 + sum(variance for variance, _ in parts)
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in parts)
    half = scipy.stats.t.ppf(0.975, freedom) * math.sqrt(total)
    difference = statistics.fmean(logs["fp32"]) - statistics.fmean(logs["bf16"])
    ends = [difference - half, difference + half]
    is_small = max(map(abs, (math.expm1(end) for end in ends))) <= 0.005
    may_be_chance = bool(ends[0] <= 0 <= ends[1] or is_small)
    (finding,) = step_findings(step_results(records))
    assert finding.endswith("; 1 of 1 may be chance.") is may_be_chance


@pytest.mark.parametrize(
    ("times", "codes", "expected"),
    [
        ((0.1,), (), "A single step does not show how the times scatter."),
        ((0.1, 0.1), (), "No warning puts the times in doubt."),
        ((0.1,), (WarningCode.DRIFT,), "The times are in doubt: drift."),
        ((0.1, 0.1), (WarningCode.NO_TELEMETRY,), "No warning puts the times in doubt."),
    ],
)
def test_the_last_sentence_on_a_run_is_of_its_warnings_alone(times, codes, expected) -> None:
    record = make_record(make_config(), times, codes=codes)
    (result,) = step_results([record])
    assert step_answer(result, record)[2] == expected


@pytest.mark.parametrize("seed", range(20))
def test_phases_that_some_steps_lack_are_parts_of_all_steps(seed: int) -> None:
    """Loops that accumulate gradients: the optimizer runs in one of several steps, or more
    processes in unlike many. Its part of the mean step is that of the sums.
    """
    rng = np.random.default_rng(seed)
    records, parts = [], []
    for repeat in range(rng.integers(1, 4)):
        forward = rng.uniform(0.1, 0.2, 12)
        update = rng.uniform(0.1, 0.2, 12) * (np.arange(12) % rng.integers(1, 5) == 0)
        parts.append([forward.mean(), update.mean(), (forward + update).mean()])
        times = {Phase.FORWARD: forward, Phase.OPTIMIZER: update[update > 0]}
        times[Phase.STEP] = forward + update
        measured = [Measurement(phase, tuple(of.tolist())) for phase, of in times.items()]
        records.append(replace(make_loop(repeat), measurements=tuple(measured)))
    forward_s, update_s, step_s = np.mean(parts, axis=0)
    (result,) = step_results(records)
    headline, _ = of_steps([result])
    shares = [100 * part / step_s for part in (forward_s, update_s)]
    told = [float(text) for text in re.findall(r"([\d.]+) %", headline)]
    assert told == pytest.approx(shares, rel=5e-3)
    (bar,) = phase_bars([result])
    assert bar.parts == pytest.approx({"forward": 1e3 * forward_s, "optimizer": 1e3 * update_s})


@pytest.mark.parametrize("seed", range(10))
def test_no_process_is_left_out_of_a_comparison(seed: int) -> None:
    """The ratio is that of the processes that the table counts; runs of one repeat are refused."""
    rng = random.Random(seed)
    sides = []
    for seed_of_side in (0, 1):
        repeats = [rng.randrange(6) for _ in range(rng.randint(1, 4))]
        sides.append(
            [
                make_record(
                    make_config(repeat=repeat, seed=seed_of_side), (rng.uniform(0.1, 0.2),) * 2
                )
                for repeat in repeats
            ]
        )
    numbers = [[record.config.repeat for record in side] for side in sides]
    if any(len(set(repeats)) < len(repeats) for repeats in numbers):
        with pytest.raises(ValueError, match="several runs of one repeat"):
            compare_sides(Sides(a="a", b="b"), sides)
        return
    (row,) = compare_sides(Sides(a="a", b="b"), sides).section.rows
    means = [
        np.log([record.measurement(Phase.STEP).mean_s for record in side]).mean() for side in sides
    ]
    assert row["ratio"] == pytest.approx(np.exp(means[1] - means[0]))
    assert [row["a_processes"], row["b_processes"]] == list(map(len, sides))


def test_cells_of_unlike_conditions_are_told_of_each_study() -> None:
    other = make_environment("Other GPU")
    ceilings = make_ceilings([product_at(square(8), 1.0)], [stream_at(100)])
    fusion = make_fusion(*(make_row(phase=phase) for phase in PHASES))
    attention = make_study(make_result(make_cell()))
    for study in (ceilings, fusion, attention):
        for others, is_told in (((other,), True), ((), False)):
            results = StudyResults(replace(study, other_environments=others))
            notes = results.sections[0].tables[0].notes
            for told in (
                " ".join(notes),
                headline_of(Directory(path=Path(), study=results), ())[1],
            ):
                assert ("device name NVIDIA H200 and Other GPU" in told) is is_told
