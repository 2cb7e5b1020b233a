"""Two sides compared: the verdict on each configuration, and what is refused."""

import csv
import itertools
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats

from cs336.config import Mode, Phase
from cs336.record import Status, WarningCode
from cs336.report.compared import Sides, compare_sides
from cs336.report.formats import csv_of, texts_of
from tests.report.making import H200, make_config, make_failure, make_record


def section_of(a, b, **options):
    return compare_sides(Sides(a="old", b="new"), (a, b), **options).section


def by_config(section):
    return {(row["size"], row["context_length"]): row for row in section.rows}


def test_every_configuration_has_a_row_with_its_verdict() -> None:
    """fp32 against bf16; by hand: 100 to 50 ms is half, 100 to 100.1 ms is too close."""
    steady = (1.001, 0.999)
    a = [
        make_record(make_config(size, 128), [0.1 * each for each in steady])
        for size in ("small", "medium", "xl")
    ]
    a += [
        make_record(make_config("large", 128), (0.3, 0.3)),
        make_record(make_config("small", 256), (0.2, 0.2)),
    ]
    b = [
        make_record(make_config(size, 128, precision="bf16"), [step_s * each for each in steady])
        for size, step_s in (("small", 0.05), ("medium", 0.1001), ("xl", 0.2))
    ]
    b.append(make_failure(make_config("large", 128, precision="bf16")))
    b.append(make_record(make_config("2.7B", 128, precision="bf16"), (1, 1)))
    section = section_of(a, b)
    found = by_config(section)
    verdicts = {key: row["verdict"] for key, row in found.items()}
    assert verdicts == {
        ("small", 128): "faster",
        ("medium", 128): "cannot tell",
        ("xl", 128): "slower",
        ("large", 128): "not compared",
        ("small", 256): "only in A",
        ("2.7B", 128): "only in B",
    }
    assert found["small", 128]["ratio"] == pytest.approx(0.5)
    assert found["large", 128]["ratio"] is None
    assert found["large", 128]["b_status"] == "oom"
    assert {(row["precision_a"], row["precision_b"]) for row in section.rows} >= {
        ("fp32", "bf16"),
        ("fp32", None),
    }
    (table,) = section.tables
    text = texts_of(section)["comparison.md"]
    assert "precision (fp32, bf16)" in text
    sizes = [row["size"] for row in section.rows]
    assert "out of memory" in table.rows[sizes.index("large")]
    assert len(list(csv.DictReader(csv_of(section).splitlines()))) == 6


def test_the_interval_is_of_processes_where_both_sides_have_three() -> None:
    """Three processes that differ by 5 % tell nothing of 4 %, however little the steps of each
    scatter.
    """
    a = [
        make_record(make_config(repeat=i), [mean_s] * 10)
        for i, mean_s in enumerate((0.095, 0.1, 0.105))
    ]
    b = [
        make_record(make_config(repeat=i, seed=1), [mean_s] * 10)
        for i, mean_s in enumerate((0.099, 0.104, 0.109))
    ]
    (of_three,) = section_of(a, b).rows
    assert (of_three["verdict"], of_three["a_processes"]) == ("cannot tell", 3)
    (of_one,) = section_of(a[1:2], b[1:2]).rows
    assert of_one["verdict"] == "cannot tell", "one process each tells less than three"
    a = [replace(record, config=replace(record.config, repeat=2 * i)) for i, record in enumerate(a)]
    b = [
        replace(record, config=replace(record.config, repeat=2 * i + 1))
        for i, record in enumerate(reversed(b))
    ]
    logs = [np.log([record.measurement(Phase.STEP).mean_s for record in side]) for side in (b, a)]
    interval = scipy.stats.ttest_rel(*logs).confidence_interval(0.95)
    shown = 100 * math.expm1((interval.high - interval.low) / 2)
    answer = section_of(a, b, are_alternate=True).tables[0].findings[0]
    assert answer.startswith(f"Cannot tell: a difference below {shown:.2g} % would not show")


@pytest.mark.parametrize("seed", range(8))
def test_steps_of_unequal_work_are_compared_by_tokens_per_second(seed) -> None:
    """Drawn batches, contexts and ranks: the side that does more tokens in a second is the
    faster one.
    """
    rng = random.Random(seed)
    rates = [rng.choice([1e4, 2e4]) for _ in "AB"]
    sides, tokens = [], []
    for rate in rates:
        ranks, context, batch_size = (
            rng.choice([1, 2, 4]),
            rng.choice([128, 256, 512]),
            rng.randint(1, 8),
        )
        config = make_config("small", context, batch_size=batch_size, ranks=ranks, parallel="ddp")
        tokens.append(ranks * batch_size * context)
        steps_s = [tokens[-1] / rate * rng.uniform(0.999, 1.001) for _ in range(5)]
        sides.append([make_record(replace(config, repeat=repeat), steps_s) for repeat in range(3)])
    section = section_of(*sides)
    (row,) = section.rows
    assert row["verdict"] == {0.5: "slower", 1: "cannot tell", 2: "faster"}[rates[1] / rates[0]]
    assert row["ratio"] == pytest.approx(rates[0] / rates[1], rel=0.001)
    assert (row["a_tokens_per_s"], row["b_tokens_per_s"]) == pytest.approx(tuple(rates), rel=0.001)
    told = " ".join(section.tables[0].notes)
    assert all(f"{count:,} tokens" in told for count in tokens) is (tokens[0] != tokens[1])


@pytest.mark.parametrize(("mode_a", "mode_b"), [*itertools.product(Mode, Mode)])
def test_only_modes_that_compute_the_same_are_compared(mode_a, mode_b) -> None:
    sides = [[make_record(make_config(mode=mode), (0.1, 0.1))] for mode in (mode_a, mode_b)]
    if mode_a is mode_b or {mode_a, mode_b} == {Mode.INFERENCE, Mode.FORWARD}:
        assert len(section_of(*sides).rows) == 1
        return
    with pytest.raises(ValueError, match=f"A is of mode {mode_a} and B of mode {mode_b}, "):
        section_of(*sides)


@pytest.mark.parametrize("seed", range(6))
def test_processes_that_failed_beside_others_are_told(seed) -> None:
    """Drawn failures: their number stands in the notes, and only of sides that have a time too."""
    rng = random.Random(seed)
    sides, counts = [], []
    for _ in "AB":
        statuses = [rng.choice([Status.OK, Status.OOM, Status.CRASHED]) for _ in range(4)]
        side = []
        for repeat, status in enumerate([Status.OK, *statuses]):
            config = make_config(repeat=repeat)
            failed = make_failure(config, status, device_name=H200)
            side.append(make_record(config, (0.1, 0.1)) if status is Status.OK else failed)
        sides.append(side)
        counts.append(sum(status is not Status.OK for status in statuses))
    notes = section_of(*sides).tables[0].notes
    for name, count in zip("AB", counts, strict=True):
        told = [note for note in notes if note.startswith(f"Left out of {name}: of 5 processes ")]
        assert sum(int(n) for note in told for n in re.findall(r"\d+", note)[1:]) == count


def test_a_ratio_of_times_in_doubt_is_marked() -> None:
    a, b = (
        [make_record(make_config(precision=precision), (step_s, step_s), codes=codes)]
        for precision, step_s, codes in (("fp32", 0.1, ()), ("bf16", 0.2, (WarningCode.UNSTABLE,)))
    )
    (table,) = section_of(a, b).tables
    assert "2.00 ?" in table.rows[0]
    assert any(note.endswith("in doubt: unstable.") for note in table.notes)


def test_another_warm_up_is_refused_unless_allowed() -> None:
    a, b = ([make_record(make_config(warmup_steps=steps), (0.1, 0.1))] for steps in (5, 2))
    with pytest.raises(ValueError, match="A had 5 warm-up steps and B had 2"):
        section_of(a, b)
    assert len(section_of(a, b, allow_mixed=True).rows) == 1
    both = [*a, *b]
    assert [row["ratio"] for row in section_of(both, both).rows] == [1, 1], "a study of warm-up"


def test_one_configuration_on_two_devices_and_sweeps_without_a_common_one_are_refused() -> None:
    two = [
        make_record(make_config(), (0.1, 0.1), device_name=name)
        for name in ("NVIDIA H200", "NVIDIA A100")
    ]
    with pytest.raises(ValueError, match="several devices"):
        section_of(two, two, allow_mixed=True)
    sizes = ("small", "xl"), ("medium", "large")
    a, b = ([make_record(make_config(size, 128), (0.1, 0.1)) for size in own] for own in sizes)
    with pytest.raises(ValueError, match="no configuration of A is in B"):
        section_of(a, b)
