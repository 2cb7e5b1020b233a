"""What is gained at most where batches are ready, of loaders whose truth is arithmetic."""

import random

import pytest

from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import Gap, IdleCause
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.gains import data_gain_s
from tests.report.sections.kernels.profiles import FORWARD, make_idle, make_phase, make_profile

RANGE = "enumerate(DataLoader)#{}DataLoaderIter.__next__"


def entry(loader: str, data_ms: float, rest_ms: float, busy_ms: float) -> Explained:
    """Two steps in which the host takes a batch, and then launches the rest."""
    both = (data_ms, data_ms), (rest_ms, rest_ms)
    phases = (
        make_phase(LaunchPhase.DATA, (0, 0), (0, 0), both[0], both[0]),
        make_phase(FORWARD, (4, 4), (busy_ms, busy_ms), both[1], both[1]),
    )
    gap = Gap(
        step=0,
        start_s=0,
        duration_s=data_ms / 1e3,
        phase=FORWARD,
        cause=IdleCause.DATA,
        before="",
        after="",
        module=(),
        host_call="",
        host_range=RANGE.format(loader),
    )
    idle = (make_idle(FORWARD, IdleCause.DATA, 2, 2 * data_ms),)
    profile = make_profile(phases=phases, idle=idle, gaps=(gap,), host_calls=())
    return Explained(profile=profile)


def test_what_workers_gain_is_bounded_though_a_profiler_hides_a_part_of_the_wait() -> None:
    """Workers need `period` for a batch while the host launches the rest, which a profiler makes
    longer: the wait in the file is shorter than without it.
    """
    rng = random.Random(60)
    for _ in range(200):
        busy, launching = rng.uniform(0.1, 2), rng.uniform(2, 5)
        period, slowdown = rng.uniform(1, 20), rng.uniform(1, 3)
        slowed = slowdown * launching
        said = data_gain_s(entry("_MultiProcessing", max(period - slowed, 0), slowed, busy)) / 2
        assert max(period, launching) - launching <= said * 1e3 + 1e-9


def test_what_the_host_loads_itself_is_all_that_workers_can_spare_it() -> None:
    assert data_gain_s(entry("_SingleProcess", 4, 6, 3)) / 2 == pytest.approx(4e-3)
    assert data_gain_s(entry("_SingleProcess", 4, 6, 8)) / 2 == pytest.approx(2e-3)
