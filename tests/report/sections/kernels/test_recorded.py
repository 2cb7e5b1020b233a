"""What is said about counters, beside the model's FLOPs."""

from dataclasses import replace

import pytest

from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import CounterMean, StepProfile
from cs336.config import SIZES, Device, Precision, RunConfig
from cs336.costs.hardware import find_device
from cs336.report.section import Finding
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.findings import findings
from tests.report.sections.kernels.profiles import make_kernel, make_profile, make_record

CONFIG = RunConfig(size="small", model=SIZES["small"], device=Device.CUDA)
SGEMM = "cutlass_80_simt_sgemm_256x128_8x4_nt_align1"


def activity(share: float) -> tuple[CounterMean, ...]:
    forward = CounterMean(
        counter="Tensor Active", phase=LaunchPhase.FORWARD, count=40, share=share / 2
    )
    return (forward, replace(forward, phase=None, count=100, share=share))


def finding_of(profile: StepProfile, config: RunConfig | None = None) -> Finding | None:
    entry = Explained(profile=profile, profiled=config and make_record(config, (0.1,)))
    return next((said for said in findings(entry) if said.code == "activity"), None)


def test_activity_stands_beside_the_use_of_flops_under_the_profiler() -> None:
    profile = make_profile(counters=activity(0.3))
    said = finding_of(profile, CONFIG)
    assert said is not None
    model, tokens = CONFIG.model, CONFIG.batch_size * CONFIG.model.context_length
    of_block = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
    weights = model.num_layers * of_block + model.d_model * model.vocab_size
    attention = 12 * model.num_layers * model.context_length * model.d_model
    step_s = sum(sum(times.wall_s) for times in profile.phases) / profile.num_steps
    device = find_device(make_record(CONFIG, (0.1,)).device_name)
    assert device is not None
    per_s = (6 * weights + attention) * tokens / step_s
    assert said.numbers["mfu"] == pytest.approx(per_s / device.peak_flops_per_s[Precision.FP32])
    assert said.numbers["activity"] == 0.3
    assert said.numbers["samples"] == 100


def test_nothing_is_said_of_what_is_not_seen() -> None:
    assert finding_of(make_profile(), CONFIG) is None
    without_record = finding_of(make_profile(counters=activity(0.3)))
    assert without_record is not None
    assert "mfu" not in without_record.numbers
    whole_file = finding_of(make_profile(counters=activity(0.3), is_whole_trace=True), CONFIG)
    assert whole_file is not None
    assert "mfu" not in whole_file.numbers


def test_a_difference_has_the_reason_that_the_file_shows() -> None:
    def text(**changes: object) -> str:
        said = finding_of(make_profile(counters=activity(0.3), **changes), CONFIG)
        assert said is not None
        return said.text

    profile = make_profile()
    plain = text(kernels=())
    # two steps of 3.5 ms each
    assert "3.50 ms" in text(kernels=(make_kernel(SGEMM, 2, 7.0),))
    again = [
        replace(times, recomputed_s=(0.0042,) * 2) if times.phase is LaunchPhase.BACKWARD else times
        for times in profile.phases
    ]
    assert "4.20 ms" in text(kernels=(), phases=tuple(again))
    assert "3.50" not in plain
    assert "4.20" not in plain
