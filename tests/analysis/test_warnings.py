import math
from dataclasses import replace

import numpy as np
import pytest

from cs336.analysis.remedies import Remedy
from cs336.analysis.warnings import (
    in_doubt,
    launch_bound_phases,
    may_be_in_doubt,
    throttled,
    timing_warnings,
)
from cs336.config import (
    SIZES,
    Attention,
    CompileMode,
    Device,
    Mode,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    RunConfig,
)
from cs336.record import GpuState, Measurement, Telemetry, WarningCode


def noisy(seed: int, n: int = 10, noise: float = 0.003) -> np.ndarray:
    return 0.05 * (1 + noise * np.random.default_rng(seed).standard_normal(n))


def warnings_of(times, **launched_s: float) -> dict[WarningCode, str]:
    """Of these steps, with the phases that wait for launches."""
    launched = {Phase(phase): time_s for phase, time_s in launched_s.items()}
    return {warning.code: warning.message for warning in timing_warnings(list(times), launched)}


@pytest.mark.parametrize("seed", range(5))
def test_a_clean_run_has_no_warning(seed) -> None:
    times = noisy(seed)
    assert warnings_of(times, forward=0.02) == {}


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: generator.standard_normal(10),
        lambda generator: generator.standard_t(3, 10),
        lambda generator: generator.exponential(size=10),
        lambda generator: generator.uniform(-1, 1, 10),
    ],
    ids=["normal", "heavy tails", "skewed", "flat"],
)
def test_independent_noise_is_seldom_said_to_drift(draw) -> None:
    generator = np.random.default_rng(0)
    trials = 1500
    alarms = 0
    for _ in range(trials):
        # 1 %, a noisy machine: quieter ones stay under the least drift
        times = 0.05 * (1 + 0.01 * draw(generator))
        alarms += WarningCode.DRIFT in warnings_of(times)
    assert alarms / trials < 0.01


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("change", [0.03, -0.03])
def test_a_ramp_is_drift(seed, change) -> None:
    message = warnings_of(noisy(seed) * np.linspace(1, 1 + change, 10))[WarningCode.DRIFT]
    assert "steadily by +" in message if change > 0 else "steadily by -" in message
    assert "--warmup-steps" in message


@pytest.mark.parametrize("seed", range(5))
def test_a_change_of_level_halfway_is_drift(seed) -> None:
    assert WarningCode.DRIFT in warnings_of(noisy(seed) * np.repeat([1, 1.03], 5))


@pytest.mark.parametrize("seed", range(5))
def test_slow_waves_are_drift(seed) -> None:
    """No slope, equal halves: only the correlation of neighbours shows them."""
    times = noisy(seed, n=40) * (1 + 0.03 * np.sin(np.arange(40) * 2 * math.pi / 20))
    message = warnings_of(times)[WarningCode.DRIFT]
    assert "lag-1 autocorrelation 0." in message


@pytest.mark.parametrize("seed", range(5))
def test_a_drift_below_one_percent_is_ignored(seed) -> None:
    assert warnings_of(noisy(seed, noise=0.0001) * np.linspace(1, 1.009, 10)) == {}


@pytest.mark.parametrize("position", range(10))
def test_a_spike_is_an_outlier_and_not_a_drift(position) -> None:
    times = noisy(position)
    times[position] *= 1.1
    warned = warnings_of(times)
    assert list(warned) == [WarningCode.OUTLIERS]
    assert f"(step {position + 1} +" in warned[WarningCode.OUTLIERS]
    assert ("--warmup-steps" in warned[WarningCode.OUTLIERS]) == (position == 0)


def test_alternating_times_are_unstable_and_do_not_drift() -> None:
    warned = warnings_of([0.1, 0.12] * 5)
    assert list(warned) == [WarningCode.UNSTABLE]
    assert "9.6 % of the mean step" in warned[WarningCode.UNSTABLE]
    assert warnings_of([0.1, 0.108] * 5) == {}


def test_the_cpu_is_the_limit_if_most_of_a_step_waits_for_it() -> None:
    warned = warnings_of([0.02] * 10, forward=0.0051, backward=0.0055)
    assert list(warned) == [WarningCode.LAUNCH_BOUND]
    assert "53.0 % of the step (forward, backward)" in warned[WarningCode.LAUNCH_BOUND]
    assert warnings_of([0.02] * 10, forward=0.0051, optimizer=0.0045) == {}


def test_the_phases_that_wait_are_those_of_most_steps() -> None:
    """The host holds up forward in two of three steps and backward in one, and launches the
    optimizer at once.
    """
    device = {
        Phase.FORWARD: (0.1, 0.1, 0.1),
        Phase.BACKWARD: (0.2, 0.25, 0.2),
        Phase.OPTIMIZER: (0.04, 0.04, 0.04),
    }
    host = {
        Phase.FORWARD: (0.1, 0.1, 0.08),
        Phase.BACKWARD: (0.1, 0.25, 0.1),
        Phase.OPTIMIZER: (0.001, 0.001, 0.001),
    }
    step = Measurement(Phase.STEP, tuple(map(sum, zip(*device.values(), strict=True))))
    on_device, on_host = ([Measurement(*each) for each in own.items()] for own in (device, host))
    assert launch_bound_phases([*on_device, step], on_host) == {Phase.FORWARD: pytest.approx(0.1)}
    assert launch_bound_phases([*on_device, step], []) == {}


def launch_bound(config: RunConfig | None) -> str:
    """What is said of ten steps of 20 ms of which 19.6 wait for the host."""
    (warning,) = timing_warnings([0.02] * 10, {Phase.FORWARD: 0.0196}, config)
    assert warning.code is WarningCode.LAUNCH_BOUND
    return warning.message


PLAIN = RunConfig(size="small", model=SIZES["small"], device=Device.CUDA)


def test_a_run_is_not_advised_what_it_does_already() -> None:
    end, flags = (
        "use a larger model or batch",
        "fewer kernels (--compile default, --attention sdpa, --optimizer fused)",
    )
    assert launch_bound(PLAIN).endswith(
        f"{end}, {flags}, or CUDA graphs (--cuda-graph --optimizer fused)"
    )
    model = replace(PLAIN.model, attention=Attention.SDPA)
    graphs = replace(PLAIN, optimizer=OptimizerKind.FUSED, model=model, cuda_graph=True)
    assert launch_bound(graphs).endswith(f"{end}, or fewer kernels (--compile default)")
    assert launch_bound(replace(graphs, compile=CompileMode.DEFAULT)).endswith(end)
    inference = replace(PLAIN, mode=Mode.INFERENCE, compile=CompileMode.REDUCE_OVERHEAD)
    assert launch_bound(inference).endswith(f"{end}, or fewer kernels (--attention sdpa)")
    own = launch_bound(replace(PLAIN, model_factory="a:b"))
    assert "(--compile default, --optimizer fused)" in own, "its attention is not known"
    assert "--" not in launch_bound(None)


@pytest.mark.parametrize(
    ("remedy", "changes", "flags"),
    [
        (Remedy.COMPILE, {}, "--compile default"),
        (Remedy.ATTENTION, {}, "--attention sdpa"),
        (Remedy.OPTIMIZER, {}, "--optimizer fused"),
        (Remedy.GRAPHS, {}, "--cuda-graph --optimizer fused"),
        (
            Remedy.GRAPHS,
            {"optimizer": OptimizerKind.FUSED, "warmup_steps": 1},
            "--cuda-graph --warmup-steps 4",
        ),
        (Remedy.TF32, {}, "--precision tf32"),
        (Remedy.BF16, {"precision": Precision.TF32}, "--mixed-precision"),
        (Remedy.OVERLAP, {"parallel": Parallel.DDP_FLAT, "ranks": 2}, "--parallel ddp-overlap"),
    ],
)
def test_flags_of_a_change_make_a_valid_run_that_has_it(
    remedy: Remedy, changes: dict, flags: str
) -> None:
    config = replace(PLAIN, **changes)
    assert remedy.named_for(config) == flags
    other = remedy.applied_to(config)
    assert other is not None
    assert other != config
    assert remedy is Remedy.OVERLAP or not remedy.is_open_to(other)


def test_what_a_run_cannot_have_is_not_open_to_it() -> None:
    assert not Remedy.GRAPHS.is_open_to(replace(PLAIN, precision=Precision.FP16))
    assert not Remedy.ATTENTION.is_open_to(
        replace(PLAIN, model=replace(PLAIN.model, attention=Attention.SDPA))
    )
    assert not Remedy.OVERLAP.is_open_to(PLAIN)


@pytest.mark.parametrize(
    ("clocks_mhz", "reasons", "share"),
    [
        ((1980, 1980), ("power cap",), None),
        ((1980, 1500), (), None),
        ((1980, 1485), ("power cap",), "75%"),
        ((990, 1980), ("power cap",), "50%"),
    ],
)
def test_a_gpu_at_its_full_clock_is_not_throttled(
    clocks_mhz: tuple[int, int], reasons: tuple[str, ...], share: str | None
) -> None:
    """The driver names reasons for clocks that are the highest too; a clock without a reason is
    that of an idle GPU.
    """
    before, after = (
        GpuState(
            sm_clock_hz=clock * 10**6,
            max_sm_clock_hz=1980 * 10**6,
            memory_clock_hz=1,
            power_w=700.0,
            temperature_c=60,
            throttle_reasons=reasons,
            other_processes=0,
        )
        for clock in clocks_mhz
    )
    warned = throttled(Telemetry(before=before, after=after))
    assert (warned is None) == (share is None)
    assert share is None or share in (warned or "")


def test_times_that_cannot_be_in_doubt_are_not() -> None:
    """Of drawn times, quiet and noisy, few and many, by the warnings themselves."""
    generator = np.random.default_rng(3)
    answers = set()
    for _ in range(400):
        noise = 10 ** generator.uniform(-4, -0.7)
        times = 1 + noise * generator.standard_t(3, int(generator.integers(1, 14)))
        times = np.abs(times) + 1e-3
        is_doubted = in_doubt(warnings_of(times))
        answers.add((is_doubted, may_be_in_doubt(times)))
    assert answers == {(False, False), (False, True), (True, True)}
