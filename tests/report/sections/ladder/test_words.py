"""Digits of a speed-up: by hand, and as a property of any interval."""

import math

import numpy as np
import pytest

from cs336_systems.report.columns import column
from cs336_systems.report.numbers import interval_text


def ratio_text(low, high, ratio=None):
    """The speed-up in the middle of the interval, as a table says it."""
    ratio = math.sqrt(low * high) if ratio is None else ratio
    values = {"": ratio, "_ci95_low": low, "_ci95_high": high, "_std": None, "_is_doubted": False}
    return column("speed_up_over_last").cell({f"speed_up_over_last{ending}": value for ending, value in values.items()})


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
def test_digits_by_hand(low, high, ratio, interval):
    assert (ratio_text(low, high), interval_text(low, high)) == (ratio, interval)


def test_without_an_interval_there_are_three_digits():
    assert (ratio_text(None, None, 11.2866), interval_text(None, None)) == ("11.3", "")


def test_a_width_that_five_digits_hold_always_shows():
    generator = np.random.default_rng(0)
    lows = 10 ** generator.uniform(-1, 3, size=2000)
    widths = lows * 10 ** generator.uniform(-2.8, 0, size=2000)  # 5 digits tell a part in 1e4 apart, or finer
    for low, high in zip(lows, lows + widths, strict=True):
        texts = interval_text(low, high).split(" to ")
        assert texts[0] != texts[1]
        assert all(len(text.replace(",", "").replace(".", "").lstrip("0")) <= 5 for text in texts)
