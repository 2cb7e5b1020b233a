"""What a sweep is expected to take: against sums, every schedule of a few runs, and sweeps that were measured."""

import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from itertools import pairwise, product
from pathlib import Path

import pytest

from cs336_systems.config import Device, Parallel, Precision, Profiler, RunConfig
from cs336_systems.costs.duration import Expected, expect
from cs336_systems.costs.time import step_time
from cs336_systems.record import Status, load_records
from cs336_systems.studies.ceilings_files import load_ceilings
from tests.costs.test_time import RUN, curves

DATA = Path(__file__).parents[2] / "data" / "published"
MOST_OFF = 0.2
"""By which the expected time of a sweep may differ from the measured one."""


def runs(count: int) -> list[RunConfig]:
    return [replace(RUN, repeat=number) for number in range(count)]


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
def test_each_gpu_takes_the_next_run_when_it_is_free(num_gpus: int) -> None:
    """The first runs go to one GPU each; of the next, the earliest of all places that are free in order."""
    configs, times_s = runs(5), (3.0, 1.0, 4.0, 1.0, 5.0)
    expected = Expected(steps_s={}, runs_s=dict(zip(configs, times_s, strict=True)), num_gpus=num_gpus)
    found = {
        gpus: ends
        for gpus in product(range(num_gpus), repeat=5)
        if (ends := in_order(gpus, times_s, num_gpus)) is not None
    }
    assert {expected.total_s(configs)} == set(found.values())


def in_order(gpus: tuple[int, ...], times_s: tuple[float, ...], num_gpus: int) -> float | None:
    """When the last run ends on these GPUs; None if a run begins on one that is not the first to be free."""
    free_s = [0.0] * num_gpus
    for gpu, time_s in zip(gpus, times_s, strict=True):
        if free_s[gpu] > min(free_s):
            return None
        free_s[gpu] += time_s
    return max(free_s)


def test_a_run_on_two_ranks_waits_for_two_gpus() -> None:
    """The second run has the other GPU from the start, and the third both, 3 s after it; the fourth the first free."""
    one, other, last = runs(3)
    shared = replace(RUN, parallel=Parallel.DDP, ranks=2)
    times_s = {one: 3.0, other: 1.0, shared: 4.0, last: 2.0}
    expected = Expected(steps_s={}, runs_s=times_s, num_gpus=2)
    assert expected.total_s([one, other, shared]) == 7
    assert expected.total_s([one, other, shared, last]) == 9
    assert expected.total_s([one, other, last]) == 3


def test_a_run_takes_its_steps_and_the_same_besides() -> None:
    """Twice as many steps take as many predicted ones longer."""
    known = curves(rate=1e6)
    short, long = replace(RUN, warmup_steps=5, measured_steps=10), replace(RUN, warmup_steps=10, measured_steps=20)
    found = expect([short, long], [], known)
    predicted = step_time(RUN, known)
    assert predicted is not None
    assert found.steps_s == {short: predicted.step_s, long: predicted.step_s}
    assert found.runs_s[long] - found.runs_s[short] == pytest.approx(15 * predicted.step_s)


def test_what_is_not_known_of_one_run_is_not_known_of_the_sweep() -> None:
    known = [RUN, replace(RUN, precision=Precision.FP16), replace(RUN, profiler=Profiler.NSYS)]
    found = expect(known, [], curves())
    assert [*found.runs_s] == [*found.steps_s] == [RUN]
    assert found.total_s(known) is found.sweep_s(known) is None
    assert found.total_s([RUN]) == found.runs_s[RUN]


def test_a_run_that_does_not_fit_has_no_step() -> None:
    large = replace(RUN, batch_size=2**20)
    found = expect([RUN, large], [large], curves(rate=1e6))
    assert large not in found.steps_s
    assert 0 < found.runs_s[large] < found.runs_s[RUN]


def test_a_sweep_imports_pytorch_once() -> None:
    """Which a fresh interpreter of this machine does, too, in a time of that order; nothing to measure takes none."""
    found = expect(runs(3), [], curves(rate=1e6))
    code = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
    import_s = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    beside_s = [found.sweep_s(some) - sum(found.runs_s[run] for run in some) for some in (runs(1), runs(3))]
    assert beside_s[0] == pytest.approx(beside_s[1])
    assert import_s / 10 < beside_s[0] < 10 * import_s
    assert found.sweep_s([]) == 0


@pytest.mark.parametrize("name", ["train", "inference", "sdpa", "h100_train", "h100_sdpa"])
def test_committed_sweeps_took_what_is_expected(name: str) -> None:
    """From the start of the first run to that of the last, on one GPU."""
    records, _ = load_records(DATA / "e2e_benchmark" / name / "runs")
    (device,) = {record.device_name for record in records}
    assert device is not None
    found = load_ceilings(DATA / "ceilings").curves(device)
    assert found is not None
    started = sorted((datetime.fromisoformat(record.started_at), record.key, record) for record in records)
    took_s = sum((after[0] - before[0]).total_seconds() for before, after in pairwise(started))
    configs = [record.config for *_, record in started[:-1] if record.status is Status.OK]
    assert len(configs) == len(records) - 1
    assert all(config.device is Device.CUDA for config in configs)
    assert expect(configs, [], found).total_s(configs) == pytest.approx(took_s, rel=MOST_OFF)
