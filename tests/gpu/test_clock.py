"""What a number must stand on before anybody believes it, on a real GPU."""

import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from cs336.analysis.compare import Verdict, compare_in_turn, measured_steps
from cs336.analysis.kernels.classes import KernelClass, classify_kernel
from cs336.analysis.warnings import judged, launch_bound_phases
from cs336.config import SIZES, Device, OptimizerKind, Phase, Precision, RunConfig
from cs336.measure.precision import apply_math_mode
from cs336.measure.run import measure
from cs336.model.transformer import TransformerLM
from cs336.record import Status, WarningCode, load_records

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SLEEP_CYCLES = 400_000_000
TENSOR_CORES = re.compile("tf32|bf16|tensorop", re.IGNORECASE)
"""In names of cuBLAS's and CUTLASS's kernels of products that tensor cores compute."""


def config_of(size, context_length=512, **changes):
    model = replace(SIZES[size], context_length=context_length)
    return RunConfig(size=size, model=model, device=Device.CUDA, **changes)


def run_in_fresh_process(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def product_kernels(precision):
    """Names of the kernels of matrix products in a step of this process."""
    apply_math_mode(precision)
    with torch.device("cuda"):
        model = TransformerLM(replace(SIZES["small"], num_layers=1, context_length=128))
        tokens = torch.zeros(4, 128, dtype=torch.long)
    model(tokens).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        model(tokens).sum().backward()
        torch.cuda.synchronize()
    names = {
        event.name
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    }
    return {name for name in names if classify_kernel(name) is KernelClass.MATMUL}


def test_fp32_runs_launch_no_tensor_core_kernel():
    """In fresh processes: torch.profiler slows the launches of its own for good."""
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        fp32, tf32 = processes.map(product_kernels, (Precision.FP32, Precision.TF32))
    print(*sorted(fp32), *sorted(tf32), sep="\n")
    assert fp32
    assert not [name for name in fp32 if TENSOR_CORES.search(name)]
    assert [name for name in tf32 if TENSOR_CORES.search(name)]


class Sleep:
    """A sleep of so many cycles, and how long it took: the clock of a GPU at work is not always
    the same.
    """

    def __init__(self):
        self._events = []

    def __call__(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(SLEEP_CYCLES)
        end.record()
        self._events.append((start, end))

    def median_s(self, last):
        """Of the last ones, by events around each alone."""
        torch.cuda.synchronize()
        return statistics.median(
            start.elapsed_time(end) / 1e3 for start, end in self._events[-last:]
        )


class SleepAfter(nn.Module):
    """The model with a sleep at the very end of its forward."""

    def __init__(self, model, sleep):
        super().__init__()
        self.model = model
        self.sleep = sleep

    def forward(self, tokens):
        logits = self.model(tokens)
        self.sleep()
        return logits


def sleeping_record(phase, sync_phases):
    with torch.device("cuda"):
        model = TransformerLM(SIZES["medium"])
    sleep = Sleep()
    if phase is Phase.FORWARD:
        model = SleepAfter(model, sleep)
    if phase is Phase.BACKWARD:
        # The embedding's gradient is the last one made.
        model.token_embeddings.weight.register_post_accumulate_grad_hook(lambda _: sleep())
    hook = register_optimizer_step_post_hook(
        lambda *_: sleep() if phase is Phase.OPTIMIZER else None
    )
    try:
        # fused: written out, the optimizer waits for the host, which is not the same each time
        config = config_of(
            "medium", measured_steps=5, sync_phases=sync_phases, optimizer=OptimizerKind.FUSED
        )
        record = measure(config, model)
    finally:
        hook.remove()
    assert record.status is Status.OK, record.failure
    return record, sleep


@pytest.mark.alone
@pytest.mark.parametrize("sync_phases", [False, True])
def test_a_sleep_is_found_in_the_phase_it_was_put_into(sync_phases):
    plain, _ = sleeping_record(None, sync_phases)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        slept, sleep = sleeping_record(phase, sync_phases)
        delay = sleep.median_s(last=5)
        for other in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            added = slept.measurement(other).median_s - plain.measurement(other).median_s
            print(
                f"sync_phases={sync_phases} sleep of {delay * 1e3:.2f} ms in {phase}: {other} "
                f"{added * 1e3:+.3f} ms"
            )
            if other is phase:
                assert added == pytest.approx(delay, rel=0.02)
            else:  # the sleep may hide launches of the next phase, but adds nothing to it
                assert added < 0.02 * delay


@pytest.mark.alone
@pytest.mark.parametrize("is_delayed", [True, False])
def test_a_phase_whose_launches_the_host_delays_is_the_one_that_waits_for_it(is_delayed):
    """The device sleeps for tens of milliseconds in forward, and after the optimizer's kernels.

    Forward waits for the host if the host is busy for longer than the first sleep, and else is
    still asleep at its end.
    """

    def sleep_and_be_busy():
        torch.cuda._sleep(60_000_000)
        until_s = perf_counter() + 0.3 * is_delayed
        while perf_counter() < until_s:
            pass

    with torch.device("cuda"):
        model = SleepAfter(TransformerLM(SIZES["tiny"]), sleep_and_be_busy)
    hook = register_optimizer_step_post_hook(lambda *_: torch.cuda._sleep(60_000_000))
    try:
        record = judged(
            measure(config_of("tiny", measured_steps=5, optimizer=OptimizerKind.FUSED), model)
        )
    finally:
        hook.remove()
    assert record.status is Status.OK, record.failure
    launched = launch_bound_phases(record.measurements, record.host_phases)
    print(f"is_delayed={is_delayed}", record.measurements, record.host_phases, launched, sep="\n")
    assert (Phase.FORWARD in launched) is is_delayed
    assert Phase.OPTIMIZER not in launched
    assert (WarningCode.LAUNCH_BOUND in {warning.code for warning in record.warnings}) is is_delayed


@pytest.mark.alone
@pytest.mark.parametrize(
    ("size", "precision"), [("large", Precision.FP32), ("large", Precision.BF16)]
)
def test_the_phases_sum_to_the_step(size, precision):
    """In the median step: the host may be held up between its reading of the clock and the first
    or last event.
    """
    record = measure(config_of(size, 128, precision=precision))
    phases = zip(
        *(record.measurement(phase).times_s for phase in record.config.phases), strict=True
    )
    steps = record.measurement(Phase.STEP).times_s
    shares = [sum(times) / step for times, step in zip(phases, steps, strict=True)]
    assert 0.99 < statistics.median(shares) <= 1


@pytest.mark.alone
def test_a_steady_step_varies_by_less_than_one_percent():
    record = measure(config_of("medium"))
    assert record.measurement(Phase.STEP).cv < 0.01
    codes = {warning.code for warning in record.warnings}
    assert not codes & {WarningCode.ALLOCATOR_GREW, WarningCode.GPU_SHARED, WarningCode.NOT_FINITE}


@pytest.mark.alone
def test_a_against_a_cannot_be_told(tmp_path):
    flags = "--size small --context-length 256"
    code = "import sys; from cs336.cli import main; sys.exit(main())"
    print(
        run_in_fresh_process(
            "-c",
            code,
            "compare",
            flags,
            flags,
            "--a-against-a",
            "--repeats",
            "4",
            "--output",
            str(tmp_path),
        ).splitlines()[-1]
    )
    (runs,) = tmp_path.glob("e2e_benchmark/*/runs")
    records, _ = load_records(runs)
    a, b = (
        measured_steps((r for r in records if r.config.repeat % 2 == side), sides=2)
        for side in (0, 1)
    )
    assert len(a) == len(b) == 4
    assert compare_in_turn(a, b).verdict is Verdict.CANNOT_TELL


def test_the_first_step_s_memory_is_not_the_steady_state_s():
    """The peak is in backward, where the first step lacks AdamW's moments: 8 bytes a parameter.

    Up to 4 % more: the workspace of backward's products (32 MiB), made after the first peak unless
    an earlier run in this process made it, and remainders of blocks that the allocator does not
    split.
    """
    record = measure(config_of("small", 512))
    steady, first = (
        record.memory.peak_allocated_bytes,
        record.memory.first_step_peak_allocated_bytes,
    )
    assert 8 * record.num_parameters <= steady - first <= 1.04 * 8 * record.num_parameters


@pytest.mark.alone
def test_energy_and_clocks_are_recorded():
    telemetry = measure(config_of("small")).telemetry
    assert 0 < telemetry.after.sm_clock_hz <= telemetry.after.max_sm_clock_hz
    assert telemetry.energy_per_step_j > 0
