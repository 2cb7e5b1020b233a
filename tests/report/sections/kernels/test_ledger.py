"""The ledger of a hand-made profile: limits between what ceilings and the data sheet allow, and
rows that add up to the step.
"""

from dataclasses import replace

import pytest

from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import LedgerTimes, Part
from cs336.config import Precision
from cs336.costs.hardware import find_device
from cs336.costs.tape import Form
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.ledger import NO_KERNEL, ledger_section
from cs336.report.sections.kernels.sums import wall_s
from tests.report.making import H200
from tests.report.sections.kernels.profiles import make_profile

SIDES = 16_384, 4096, 4096


def line(part: Part, total_s: float, **fields: object) -> LedgerTimes:
    given = {
        "phase": LaunchPhase.FORWARD,
        "names": ("a", "b"),
        "form": None,
        "sides": (0, 0, 0),
        "batch": 1,
        "element_bytes": None,
        "calls": 2,
        "count": 2,
        "flops": None,
        "bytes": None,
    }
    return LedgerTimes(part=part, total_s=total_s, **given | fields)


def rows_of(*ledger: LedgerTimes) -> list[dict[str, object]]:
    profile = replace(make_profile(), ledger=ledger, device_names=(H200,))
    return ledger_section(Explained(profile=profile)).rows


def least_s(times: LedgerTimes) -> float:
    """The limit of this line, over both steps of the profile."""
    (row,) = [row for row in rows_of(times) if row["what"] != NO_KERNEL]
    assert row["lost_ms_per_step"] == pytest.approx(row["ms_per_step"] - row["limit_ms_per_step"])
    return 2e-3 * row["limit_ms_per_step"]


@pytest.mark.parametrize(("element_bytes", "promise"), [(2, 1), (1, 2)])
def test_the_limit_of_matmuls_is_a_measured_rate_below_the_promised_one(
    element_bytes: int, promise: int
) -> None:
    flops = 10**15
    times = line(
        Part.MATMUL,
        10.0,
        form=Form.FORWARD,
        sides=SIDES,
        element_bytes=element_bytes,
        flops=flops,
        bytes=1,
    )
    peak = promise * find_device(H200).peak_flops_per_s[Precision.BF16]
    assert 0.6 * peak < flops / least_s(times) < peak


def test_the_limit_of_attention_is_below_that_of_matmuls() -> None:
    flops = 10**15
    fields = {"sides": (4096, 64, 4096), "element_bytes": 2, "flops": flops, "bytes": 1}
    attention = line(Part.ATTENTION, 10.0, form=Form.ATTENTION, **fields)
    matmul = line(Part.MATMUL, 10.0, form=Form.FORWARD, **fields)
    assert least_s(attention) > least_s(matmul)


def test_the_limit_between_matmuls_is_that_of_memory_and_no_longer_than_the_time() -> None:
    count = 10**12
    bandwidth = find_device(H200).memory_bandwidth_bytes_per_s
    assert 0.8 * bandwidth < count / least_s(line(Part.BETWEEN, 10.0, bytes=count)) < bandwidth
    # what caches hold is faster than memory
    assert least_s(line(Part.BETWEEN, 0.1, bytes=count)) == pytest.approx(0.1)
    assert least_s(line(Part.BETWEEN, 0.1)) == 0


def test_all_rows_add_up_to_the_step() -> None:
    rows = rows_of(line(Part.BETWEEN, 0.013), line(Part.COMMUNICATION, 0.9, beside_others_s=0.893))
    profile = make_profile()
    whole_ms = wall_s(profile) / profile.num_steps * 1e3
    assert sum(row["ms_per_step"] for row in rows) == pytest.approx(whole_ms, rel=1e-12)
    assert len({tuple(row) for row in rows}) == 1, "all rows have the same columns"
    (idle,) = [row for row in rows if row["what"] == NO_KERNEL]
    assert idle["lost_ms_per_step"] == pytest.approx(whole_ms - 10.0)


def test_a_profile_without_a_ledger_has_no_section() -> None:
    assert ledger_section(Explained(profile=make_profile())).tables == ()
