"""Columns turn values to text."""

import math

import numpy as np
import pytest

from cs336.report.columns import COLUMNS, Column, column
from cs336.report.quantities import Gain
from cs336.report.words import interval_text


def test_a_value_is_scaled_and_unknown_is_empty() -> None:
    time = Column("time", "µs", key="time_s", scale=1e6)
    assert [time.cell({"time_s": value}) for value in (0.0123456, None)] == ["12,346", ""]
    assert Column("time", "ms", key="time_s", scale=1e3, std="std_s").cell(
        {"time_s": 0.066312, "std_s": 0.000123}
    ) == ("66.31 ± 0.12")


def test_every_column_says_what_it_is() -> None:
    assert [key for key, found in COLUMNS.items() if not found.about.endswith(".")] == []


def test_a_time_in_doubt_is_marked_and_so_is_what_is_computed_from_it() -> None:
    """By hand: 3400 ms over 200 ± 40 ms is 17 ± 3.4, and a deviation has one digit unless that
    is a 1.
    """
    steady = {"median_ms": 200.0, "std_ms": 40.0, "is_doubted": False, "ended": "out of memory"}
    time = column("median_ms")
    assert [
        time.cell(steady | change) for change in ({}, {"is_doubted": True}, {"median_ms": None})
    ] == ["200 ± 40", "200 ± 40 ?", "out of memory"]
    gain = {"speed_up": 17.0, "speed_up_std": 3.4, "speed_up_is_doubted": False}
    assert [
        column("speed_up").cell(gain | change) for change in ({}, {"speed_up_is_doubted": True})
    ] == ["17.0", "17 ± 3 ?"]


@pytest.mark.parametrize(
    ("low", "high", "ratio", "interval"),
    [
        pytest.param(8.086, 8.874, "8.47", "8.09 to 8.87", id="wide"),
        pytest.param(2.42632, 2.43268, "2.429", "2.426 to 2.433", id="four digits"),
        pytest.param(10.488, 10.520, "10.50", "10.49 to 10.52", id="over ten"),
        pytest.param(0.985, 1.048, "1.02", "0.985 to 1.05", id="across one"),
        pytest.param(2.42951, 2.42954, "2.4295", "2.4295 to 2.4295", id="five digits at most"),
        pytest.param(2.0, 2.0, "2.0000", "2.0000 to 2.0000", id="no width"),
    ],
)
def test_digits_of_a_speed_up_by_hand(low: float, high: float, ratio: str, interval: str) -> None:
    assert (Gain(math.sqrt(low * high), low=low, high=high).text(), interval_text(low, high)) == (
        ratio,
        interval,
    )


def test_a_width_that_five_digits_hold_always_shows() -> None:
    generator = np.random.default_rng(0)
    lows = 10 ** generator.uniform(-1, 3, size=2000)
    # 5 digits tell a part in 1e4 apart, or finer
    widths = lows * 10 ** generator.uniform(-2.8, 0, size=2000)
    for low, high in zip(lows, lows + widths, strict=True):
        texts = interval_text(low, high).split(" to ")
        assert texts[0] != texts[1]
        assert all(len(text.replace(",", "").replace(".", "").lstrip("0")) <= 5 for text in texts)
