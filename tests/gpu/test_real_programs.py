"""What is said of real programs on a GPU, against what they counted and what events measured."""

from pathlib import Path

import pytest

from cs336.analysis.kernels.explain import explain
from tests.analysis.kernels.drawn_plans import Part
from tests.analysis.kernels.real_programs import draw_real, run_real
from tests.analysis.kernels.test_real_programs import check
from tests.analysis.kernels.tracing import ns

PROGRAMS = 40
EVENT_NS = 10_000
"""How much earlier than its predecessor's end, or later than its own work, an event may be seen."""


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(1000, 1000 + PROGRAMS))
def test_nothing_false_is_said_of_a_real_program_on_a_gpu(seed: int, tmp_path: Path) -> None:
    """Besides, the kernels of a phase run between the two events around it, on one stream."""
    plan = draw_real(seed)
    truth = run_real(plan, tmp_path / "trace.json", "cuda")
    profile = explain(tmp_path / "trace.json")
    check(profile, plan, truth)
    for times in profile.phases:
        measured = truth.device_ns.get(times.phase.value, [])
        if times.phase.value in (Part.FORWARD, Part.LOSS, Part.BACKWARD, Part.OPTIMIZER):
            kernels = sum(ns(time) for time in times.kernel_s)
            assert kernels <= sum(measured) + EVENT_NS * len(measured)
