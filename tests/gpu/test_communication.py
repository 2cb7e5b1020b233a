"""Exposed and overlapped communication on two GPUs, found where they were put, and alike by both
profilers.
"""

import contextlib
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import decode_profile
from cs336.config import (
    SIZES,
    Attention,
    Device,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    Profiler,
    RunConfig,
)
from cs336.measure.nvml import visible_gpus
from cs336.model.fast.choose import fastest
from cs336.record import Status
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.findings import findings
from cs336.sweep.keep import Listener
from cs336.sweep.run import run_sweep
from cs336.sweep.store import explanation_path
from tests.parallel.models import FAULTY_RANK, SLEEP_S
from tests.parallel.test_runs import SHARED

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(540)]
WATCHED = replace(
    SHARED,
    device=Device.CUDA,
    profiler=Profiler.KINETO,
    parallel=Parallel.DDP_OVERLAP,
    measured_steps=4,
)
STEADY = RunConfig(
    size="large",
    model=replace(SIZES["large"], context_length=512),
    device=Device.CUDA,
    precision=Precision.BF16,
    batch_size=2,
    parallel=Parallel.DDP_FLAT,
    ranks=2,
    warmup_steps=20,
    measured_steps=20,
)
"""In graphs (`fastest`) the GPUs limit this step, and it needs too little power to lower their
clocks, so that two runs of it take about the same time.
"""

LEAST_S = 50e-6
"""Shortest time that the exchange of the large gradients can take."""


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    if len(visible_gpus()) < 2:
        pytest.skip("needs two GPUs")


def profiled(tmp_path, *configs):
    """The runs, each with its explained profile."""
    (tmp_path / "parallel_models.py").symlink_to(
        Path(__file__).parents[1] / "parallel" / "models.py"
    )
    with contextlib.chdir(tmp_path):
        outcome = run_sweep(configs, tmp_path, Listener(), timeout_s=250)
    records = {record.config: record for record in outcome.records}
    assert [records[config].status for config in configs] == [Status.OK] * len(configs), (
        outcome.records
    )
    assert outcome.unexplained == ()
    return [
        (records[config], decode_profile(explanation_path(config, tmp_path / "runs").read_bytes()))
        for config in configs
    ]


def sent_s(rank, which):
    """Time of collectives in each step, all of it or what is exposed."""
    rows = [getattr(row, which) for row in rank.communication if row.collective is None]
    return [sum(times) for times in zip(*rows, strict=True)]


def computing_s(rank, phase):
    """Time of a phase's kernels in each step, without collectives, which wait for the other
    rank.
    """
    sent = [
        row.total_s
        for row in rank.communication
        if row.collective is None and row.phase is phase.phase
    ]
    return [kernels - sum(of_step) for kernels, *of_step in zip(phase.kernel_s, *sent, strict=True)]


def test_a_sleep_on_one_rank_is_exposed_communication_of_the_other(tmp_path):
    slow = replace(WATCHED, model_factory="parallel_models:slow")
    (record, profile), (_, usual) = profiled(
        tmp_path, slow, replace(WATCHED, model_factory="parallel_models:good")
    )
    quick, sleeper = sorted(profile.ranks, key=lambda rank: rank.rank == FAULTY_RANK)
    longer = statistics.median(sent_s(quick, "exposed_s")) - statistics.median(
        sent_s(usual.ranks[0], "exposed_s")
    )
    assert longer == pytest.approx(SLEEP_S, rel=0.05)
    assert statistics.median(sent_s(sleeper, "exposed_s")) < SLEEP_S / 20
    assert statistics.median(quick.waited_s) == pytest.approx(SLEEP_S, rel=0.05)
    entry = Explained(profile=profile, profiled=record)
    (text,) = [finding.text for finding in findings(entry) if finding.code == "communication"]
    assert f"wait for rank {FAULTY_RANK} in 4 of 4 steps" in text


def test_what_runs_beside_backward_is_overlapped_and_what_is_late_is_exposed(tmp_path):
    """36 MB of gradients are averaged while backward keeps the GPU busy, and after it; what is left
    is small.

    The link of two H200 would need 80 us for them. Ranks that end backward apart from each other
    wait, exposed.
    """
    early = replace(WATCHED, model_factory="parallel_models:spinning")
    late = replace(early, parallel=Parallel.DDP_FLAT)
    (_, hidden), (_, shown) = profiled(tmp_path, early, late)
    for rank in hidden.ranks:
        both = zip(sent_s(rank, "total_s"), sent_s(rank, "exposed_s"), strict=True)
        assert all(total - exposed > LEAST_S for total, exposed in both)
    for rank in shown.ranks:
        assert sum(sent_s(rank, "exposed_s")) > 0.95 * sum(sent_s(rank, "total_s"))
        phases = {
            row.phase: sum(row.exposed_s) for row in rank.communication if row.collective is None
        }
        assert phases[LaunchPhase.COMMUNICATION] > 0.95 * sum(phases.values())


def test_phases_of_each_rank_are_those_of_its_clock(tmp_path):
    """Eager, so that communication has a range of its own; each step against the events recorded
    in it.
    """
    eager = replace(
        STEADY, model=replace(STEADY.model, attention=Attention.SDPA), optimizer=OptimizerKind.FUSED
    )
    watched = replace(eager, profiler=Profiler.KINETO, parallel=Parallel.DDP_OVERLAP)
    ((record, profile),) = profiled(tmp_path, watched)
    for rank, clocked in zip(profile.ranks, record.ranks, strict=True):
        walls = {phase.phase.value: phase.wall_s for phase in rank.phases}
        for measured in clocked.measurements:
            if measured.phase is not Phase.STEP:
                assert walls[measured.phase.value] == pytest.approx(
                    measured.times_s, rel=0.02, abs=2e-4
                )


def test_both_profilers_tell_the_same_of_each_rank(tmp_path):
    """A phase takes longer where a rank waits for the other one, and forward where the host
    launches its graph late.
    """
    if shutil.which("nsys") is None:
        pytest.skip("nsys is not installed")
    fast = fastest(STEADY, torch.cuda.get_device_name())
    both = [replace(fast, profiler=profiler) for profiler in (Profiler.NSYS, Profiler.KINETO)]
    (_, of_nsys), (_, of_kineto) = profiled(tmp_path, *both)
    assert (
        [rank.rank for rank in of_nsys.ranks] == [rank.rank for rank in of_kineto.ranks] == [0, 1]
    )
    for one, other in zip(of_nsys.ranks, of_kineto.ranks, strict=True):
        for phase, same in zip(one.phases, other.phases, strict=True):
            print(
                f"rank {one.rank} {phase.phase}: {statistics.median(phase.wall_s) * 1e3:.3f} ms "
                f"by nsys, {statistics.median(same.wall_s) * 1e3:.3f} by torch.profiler; kernels "
                f"without collectives {statistics.median(computing_s(one, phase)) * 1e3:.3f} and "
                f"{statistics.median(computing_s(other, same)) * 1e3:.3f} ms"
            )
    for one, other in zip(of_nsys.ranks, of_kineto.ranks, strict=True):
        for phase, same in zip(one.phases, other.phases, strict=True):
            assert phase.phase is same.phase
            assert set(phase.launches) == set(same.launches)
            if phase.phase in (LaunchPhase.DATA, LaunchPhase.UNATTRIBUTED):
                continue  # the host's time, which a profiler lengthens
            kernels = statistics.median(computing_s(one, phase))
            assert kernels > 1e-3
            assert kernels == pytest.approx(statistics.median(computing_s(other, same)), rel=0.02)
            assert statistics.median(phase.wall_s) == pytest.approx(
                statistics.median(same.wall_s), rel=0.02, abs=1e-3
            )
    # what the collectives take where no rank waits: the shorter one of the two ranks' kernels
    shortest = [
        min(
            statistics.median(sent_s(rank, "total_s")) - statistics.median(rank.waited_s)
            for rank in profile.ranks
        )
        for profile in (of_nsys, of_kineto)
    ]
    print("collectives in s, without waits:", shortest)
    assert shortest[0] == pytest.approx(shortest[1], rel=0.02)
