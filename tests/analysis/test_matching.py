"""Rows of two sweeps belong together by what the sweeps do not differ in throughout; unlike records are refused."""

import itertools
from dataclasses import replace

import pytest

from cs336_systems.analysis.matching import match, refuse_unlike, without_profiled
from cs336_systems.config import Profiler
from cs336_systems.record import Identity, Input
from tests.report.making import make_config, make_record


def grid(**values):
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def names_of(found, a, b):
    """The matched rows as pairs of a size and a context, and what only one side has."""
    short = [[(row["size"], row["context"]) for row in side] for side in (a, b)]
    pairs = [(short[0][i], short[1][j]) for i, j in found.pairs]
    return pairs, [short[0][i] for i in found.only_a], [short[1][j] for j in found.only_b]


def test_sweeps_that_differ_in_precision_alone_match_row_by_row() -> None:
    a = grid(size=["small", "medium"], context=[128, 256], precision=["fp32"])
    b = grid(size=["medium", "small"], context=[256, 512], precision=["bf16"])
    found = match(a, b)
    same = [("small", 256), ("medium", 256)]
    assert found.differing == ("precision",)
    assert names_of(found, a, b) == (
        [(each, each) for each in same],
        [("small", 128), ("medium", 128)],
        [("medium", 512), ("small", 512)],
    )


def test_a_setting_with_a_value_on_both_sides_takes_part() -> None:
    a = grid(size=["small"], context=[128], precision=["fp32", "bf16"])
    b = grid(size=["small"], context=[128], precision=["bf16"])
    found = match(a, b)
    assert (found.pairs, found.only_a, found.only_b, found.differing) == (((1, 0),), (0,), (), ())


def test_a_setting_that_follows_from_others_on_one_side_is_left_out() -> None:
    """--fast chooses the compile mode by the size."""
    a = [{"size": size, "context": 128, "compile": "none"} for size in ("small", "large")]
    b = [{"size": size, "context": 128, "compile": mode} for size, mode in (("small", "default"), ("large", "max"))]
    found = match(a, b)
    assert found.differing == ("compile",)
    assert found.pairs == ((0, 0), (1, 1))


def test_two_sizes_are_not_matched_with_two_others() -> None:
    a, b = (grid(size=sizes, context=[128]) for sizes in (["small", "medium"], ["large", "xl"]))
    found = match(a, b)
    assert (found.pairs, found.only_a, found.only_b) == ((), (0, 1), (0, 1))


IDENTITY = {"device_name": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "code": "abc"}


@pytest.mark.parametrize("name", IDENTITY)
def test_records_of_unlike_conditions_are_refused_by_name_unless_allowed(name) -> None:
    a = make_record(make_config(), (0.1, 0.1))
    other = replace(a.environment, identity=Identity(**IDENTITY | {name: "another\n"}))
    sides = [a], [replace(a, environment=other)]
    with pytest.raises(ValueError, match=rf"{name.replace('_', ' ')} \S.*another.*--allow-mixed") as caught:
        refuse_unlike(sides, allow_mixed=False)
    assert "\n" not in str(caught.value)
    refuse_unlike(sides, allow_mixed=True)
    refuse_unlike(([a], [a]), allow_mixed=False)


def test_versions_of_an_input_within_a_side_are_refused_and_those_of_both_sides_are_what_is_compared() -> None:
    old, new = (
        replace(make_record(make_config("small", context), (0.1, 0.1)), inputs=(Input(name="model.py", state=state),))
        for context, state in ((128, "1"), (256, "2"))
    )
    with pytest.raises(ValueError, match="versions of a model's source"):
        refuse_unlike(([old, new], [old]), allow_mixed=False)
    refuse_unlike(([old, new], [old]), allow_mixed=True)
    refuse_unlike(([old], [new]), allow_mixed=False)


@pytest.mark.parametrize("allow_mixed", [True, False])
def test_a_profiled_time_never_stands_beside_a_plain_one(allow_mixed) -> None:
    plain = make_record(make_config(), (0.1, 0.1))
    profiled = make_record(make_config(profiler=Profiler.KINETO), (0.2, 0.2))
    assert without_profiled([plain, profiled]) == [plain]
    with pytest.raises(ValueError, match="B has times under a profiler"):
        refuse_unlike(([plain], without_profiled([profiled])), allow_mixed)
