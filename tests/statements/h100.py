"""The figures about the H100, each computed from a committed file; those of the H200 beside them
too.
"""

import math
import statistics
from collections.abc import Sequence

from cs336.costs.hardware import find_device
from tests.statements.documents import Value, claim, linked, one, some, table
from tests.statements.results import H100, H200, RESULTS, number, records

EAGER, FAST, SDPA = (
    f"e2e_benchmark/{name}" for name in ("h100_train", "h100_train_fast", "h100_sdpa")
)
STEPS = "ceilings/NVIDIA-H100"
SIZES = ("small", "medium", "large", "xl", "2.7B")
WAYS = {
    "fp32": (EAGER, "e2e_benchmark/train", "fp32"),
    "bf16": (EAGER, "e2e_benchmark/train", "bf16"),
    "`--fast`": (FAST, "e2e_benchmark/train_fast", "bf16"),
}
"""Of each way of a step: the sweep on the H100, that on the H200, and the precision."""


def step_ms(directory: str, device: str, size: str, precision: str) -> float:
    """The mean step at context 512 of a sweep, which is of this device."""
    row = one(table(f"{directory}/results.csv"), size=size, context_length=512, precision=precision)
    assert row["device_name"] == device
    return number(row, "step_mean_ms")


@claim
def steps_on_both() -> Sequence[dict[str, Value]]:
    assert linked(RESULTS, f"{EAGER}/results.csv")
    assert linked(RESULTS, f"{FAST}/results.csv")
    rows = []
    for size in SIZES:
        row: dict[str, Value] = {"size": size}
        for way, (on_h100, on_h200, precision) in WAYS.items():
            row[f"{way}, H100"] = step_ms(on_h100, H100, size, precision)
            row[f"{way}, H200"] = step_ms(on_h200, H200, size, precision)
        rows.append(row)
    return rows


def times_as_long(way: str) -> tuple[float, float]:
    """The least and the largest of the ratios of a step on the H100 to that on the H200."""
    ratios = [float(row[f"{way}, H100"]) / float(row[f"{way}, H200"]) for row in steps_on_both()]
    return min(ratios), max(ratios)


@claim
def longer_on_the_h100() -> Sequence[Value]:
    assert {(run.config.split_masters, run.config.fused_activations) for run in records(FAST)} == {
        (True, True)
    }
    on_h200 = {run.config for run in records("e2e_benchmark/train_fast")}
    assert not any(config.split_masters or config.fused_activations for config in on_h200)
    rows = some(table(f"{EAGER}/results.csv"), context_length=512, precision="bf16")
    limited = [row for row in rows if "launch-bound" in row["warnings"]]
    assert len(limited) > len(rows) / 2
    assert all("unstable" in row["warnings"] for row in limited)
    return *times_as_long("fp32"), *times_as_long("`--fast`")


@claim
def data_sheets() -> Sequence[Value]:
    h100, h200 = (find_device(name) for name in (H100, H200))
    assert h100 is not None
    assert h200 is not None
    assert h100.peak_flops_per_s == h200.peak_flops_per_s
    return [device.memory_bandwidth_bytes_per_s / 1e9 for device in (h100, h200)]


def errors_of(limit: str, *shapes: str, **values: str) -> list[float]:
    """How far forecasts of steps with this limit and matmuls of these shapes are off (%), the
    least first: of eager steps and --fast, unless compiled ones are asked for.
    """
    wanted = {"compiled": "False"} | values
    rows = [
        row
        for row in some(table("forecast/errors.csv"), limit=limit, **wanted)
        if row["shapes"] in shapes
    ]
    return sorted(abs(number(row, "step_error")) for row in rows)


def of_nine_in_ten(sizes: Sequence[float]) -> float:
    return sizes[math.ceil(0.9 * len(sizes)) - 1]


@claim
def forecasts_in_short() -> Sequence[Value]:
    assert linked(RESULTS, f"{STEPS}/results.csv")
    unmeasured, measured = (
        errors_of("device", shapes, device_name=H100) for shapes in ("unmeasured", "measured")
    )
    of_launches = errors_of("launches", "measured", "unmeasured", device_name=H100)
    device = len(unmeasured), statistics.median(unmeasured), of_nine_in_ten(unmeasured)
    looked_up = statistics.median(measured), of_nine_in_ten(measured)
    return (
        *device,
        *looked_up,
        len(of_launches),
        statistics.median(of_launches),
        of_nine_in_ten(of_launches),
    )


@claim
def forecasts_of_unmeasured_shapes() -> Sequence[Value]:
    return (statistics.median(errors_of("device", "unmeasured")),)


@claim
def forecasts_of_all() -> Sequence[Value]:
    unmeasured, measured = (errors_of("device", shapes) for shapes in ("unmeasured", "measured"))
    of_launches = errors_of("launches", "measured", "unmeasured")
    device = statistics.median(unmeasured), len(unmeasured), of_nine_in_ten(unmeasured)
    return *device, statistics.median(measured), len(of_launches), statistics.median(of_launches)


@claim
def forecasts_of_compiled() -> Sequence[Value]:
    sizes = errors_of("device", "unmeasured", compiled="True")
    assert not errors_of("launches", "measured", "unmeasured", compiled="True")
    return len(sizes), statistics.median(sizes), sizes[-1]
