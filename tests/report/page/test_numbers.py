"""Every number in every table of the page of the 30-run grid is that of the run that its row
names.
"""

import json
import math
import re
import statistics

import pytest

from cs336.config import Phase
from cs336.record import load_records
from tests.report.page.grid import GRID, grid_runs, grid_values
from tests.report.page.parsed import Parsed

SETTINGS = ("size", "context", "precision")
DERIVED = (
    "tokens/s",
    "MFU %",
    "of ceiling %",
    "std/mean %",
    "peak GiB",
    "predicted GiB",
    "predicted ms",
    "error %",
)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
MOST_OFF = 0.01
"""Of the measured peak, by which a forecast may miss it."""


def times_s(run, phase):
    (found,) = (each["times_s"] for each in run["measurements"] if each["phase"] == phase)
    return found


def relative_spread(run):
    step_s = times_s(run, "step")
    return statistics.stdev(step_s) / statistics.fmean(step_s)


def is_doubted(run):
    """In this grid, all warnings but that of a step that waits for the host's launches."""
    return any(warning["code"] != "launch-bound" for warning in run["warnings"])


def measured_ceilings():
    """The highest rate of any matmul of each precision, over all committed studies of this
    device.
    """
    found = {}
    for path in (GRID.parents[1] / "ceilings").glob("NVIDIA-H200*/ceilings.json"):
        for cell in json.loads(path.read_text())["products"]:
            shape, loops = cell["shape"], cell["timing"]["loops"]
            if loops is None:  # this precision has no kernel
                continue
            flops = 2 * shape["rows"] * shape["inner"] * shape["columns"] * loops["count"]
            rate = flops / statistics.median(loops["times_s"])
            found[cell["precision"]] = max(rate, found.get(cell["precision"], 0.0))
    return found


def wanted(key, heading):
    """The numbers that a cell shows, as they are scaled there, and the mark behind them."""
    run, value = grid_runs()[key], grid_values()[key][heading]
    if heading == "speed-up vs fp32":
        fp32 = grid_runs()[*key[:2], "fp32"]
        if run is fp32 or key[2] == "fp32":
            return (), ""
        if not (is_doubted(run) or is_doubted(fp32)):
            return (value,), ""
        return (value, value * math.hypot(relative_spread(run), relative_spread(fp32))), "?"
    if heading.removesuffix(" ms") in ("step", "forward", "backward", "optimizer"):
        return (value, 1e3 * statistics.stdev(times_s(run, heading.removesuffix(" ms")))), ""
    assert heading in DERIVED, "a column without an oracle"
    return (value * (100 if heading.endswith("%") else 1),), ""


def check(text, numbers, mark, where):
    """The text has these numbers, each rounded to the digits that are shown, and no others."""
    shown = [found.replace(",", "") for found in NUMBER.findall(text)]
    assert len(shown) == len(numbers), (where, text, numbers)
    assert "".join(NUMBER.sub("", text).replace("±", "").split()) == mark, (where, text)
    for digits, number in zip(shown, numbers, strict=True):
        unit = 10.0 ** -len(digits.partition(".")[2])
        assert float(digits) == pytest.approx(number, abs=0.5001 * unit), (where, text, numbers)


def test_every_number_of_every_table_is_that_of_its_run(grid_page):
    page = Parsed(grid_page[0])
    assert list(page.headings) == ["results", "runs-table"], "a further table needs an oracle here"
    rows, ceilings = page.rows("results"), measured_ceilings()
    seen = set()
    for row in rows:
        key = tuple(row[name][0] for name in SETTINGS)
        seen.add(key)
        run = grid_runs()[key]
        assert row.keys() == grid_values()[key].keys()
        rate = grid_values()[key]["MFU %"] * {"fp32": 67e12, "bf16": 989.5e12}[key[2]]
        for heading, (text, order) in row.items():
            if heading in SETTINGS:
                continue
            numbers, mark = wanted(key, heading)
            if heading == "of ceiling %":
                numbers = (100 * rate / ceilings[key[2]],)
            check(text, numbers, mark, (key, heading))
            if not numbers:
                assert (order or "") == "", (key, heading)
            else:
                number = numbers[0] / (100 if heading.endswith("%") else 1)
                # an error of nearly nothing is a difference of numbers with nine digits
                assert float(order) == pytest.approx(number, rel=1e-6, abs=1e-8), (key, heading)
        forecast, peak = (
            float(row["predicted GiB"][1]),
            run["memory"]["peak_allocated_bytes"] / 2**30,
        )
        assert forecast == pytest.approx(peak, rel=MOST_OFF)
    assert seen == set(grid_runs())
    assert len(rows) == len(seen) == 30
    of_runs = {row["record"][0]: float(row["step ms"][1]) for row in page.rows("runs-table")}
    for record in load_records(GRID / "runs")[0]:
        step_s = record.measurement(Phase.STEP).times_s
        step_ms = of_runs.pop(f"{record.key} in runs.jsonl")
        assert step_ms == pytest.approx(1e3 * statistics.fmean(step_s))
    assert not of_runs
