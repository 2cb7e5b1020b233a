"""Changes of a queue: closed forms on steps made by hand, and the forecast's own operations at two precisions."""

from dataclasses import replace

import pytest

from cs336_systems.analysis.kernels.changes import (
    with_fused_adamw,
    with_fused_attention,
    with_fused_neighbours,
    without_launches,
)
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.other_precision import at_precision
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.replay import Job, Queue
from cs336_systems.config import (
    Arch,
    Attention,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Phase,
    Precision,
    RunConfig,
)
from cs336_systems.costs.curves import Curves, Matmul
from cs336_systems.costs.forecast.tape import Form, Kind
from cs336_systems.costs.time import operations, step_time
from cs336_systems.ranges import Range

MODEL = ModelConfig(vocab_size=80, context_length=16, d_model=48, d_ff=96, num_layers=3, num_heads=4)
RUN = RunConfig(size="custom", model=MODEL, batch_size=2, device=Device.CUDA)
GEMM = "ampere_sgemm_128x64_tn"
FORWARD, BACKWARD, OPTIMIZER = LaunchPhase.FORWARD, LaunchPhase.BACKWARD, LaunchPhase.OPTIMIZER
KINDS = {
    "mm": (KernelClass.MATMUL, GEMM),
    "reduce": (KernelClass.MATMUL, "splitKreduce_kernel"),
    "add": (KernelClass.ELEMENT_WISE, "add"),
    "copy": (KernelClass.COPY_AND_FILL, "copy"),
    "norm": (KernelClass.NORMALISATION, "norm"),
    "softmax": (KernelClass.SOFTMAX, "softmax"),
    "flash": (KernelClass.ATTENTION, "flash"),
    "memset": (None, "memset"),
}


def job(what: str, us: float, phase: LaunchPhase = FORWARD, path: tuple[str, ...] = (), **changes: float) -> Job:
    kind, name = KINDS[what]
    values = {"host_s": 1e-6} | changes
    return Job(kernel_s=us / 1e6, kind=kind, name=name, phase=phase, path=path, **values)  # type: ignore[arg-type]


def queue(*jobs: Job) -> Queue:
    return Queue(jobs=jobs, latency_s=0.0, gap_s=0.0, tail_s=0.0)


def times(found: Queue | None) -> list[float]:
    """Microseconds of each kernel."""
    assert found is not None
    return [round(each.kernel_s * 1e6, 6) for each in found.jobs]


def test_neighbours_are_one_kernel_as_long_as_the_longest_up_to_a_matmul_and_to_the_end_of_the_phase() -> None:
    found = with_fused_neighbours(
        queue(
            job("norm", 5), job("mm", 50), job("add", 3), job("copy", 7), job("norm", 4), job("memset", 1),
            job("mm", 60), job("softmax", 9), job("add", 8, BACKWARD), job("copy", 2, BACKWARD),
            job("add", 6, OPTIMIZER), job("add", 6, OPTIMIZER),
        )
    )  # fmt: skip
    assert times(found) == [5, 50, 7, 1, 60, 9, 8, 6, 6]
    assert found.host_s == pytest.approx(9e-6)


def test_what_fused_neighbours_wait_for_is_kept() -> None:
    found = with_fused_neighbours(queue(job("add", 3, wait_s=1e-5), job("copy", 7, wait_s=2e-5, pause_s=1e-3)))
    assert (found.jobs[0].wait_s, found.jobs[0].pause_s) == (pytest.approx(3e-5), pytest.approx(1e-3))


def attention(us: tuple[float, ...]) -> list[Job]:
    """Projection, scores with a copy before, mask, softmax, values, a copy of the heads, projection."""
    around = ("block.0", "attention")
    parts = [Range.SCORES, Range.SCORES, Range.SCORES, Range.SOFTMAX, Range.VALUES]
    paths = [around, *((*around, part) for part in parts), around, around]
    kinds = ["mm", "copy", "mm", "add", "softmax", "mm", "copy", "mm"]
    return [job(kind, time, path=path) for kind, time, path in zip(kinds, us, paths, strict=True)]


FUSED = 0.85 / 0.73 / 1.75
"""Of the time of attention's matmuls in forward, by what FlashAttention-2 says of its rates and of causal masks."""


def test_fused_attention_takes_a_share_of_the_time_of_its_matmuls_and_leaves_copies_out() -> None:
    forward = attention((50, 2, 20, 7, 8, 30, 3, 60))
    assert times(with_fused_attention(queue(*forward))) == pytest.approx([50, 50 * FUSED, 60])


def test_in_backward_attention_is_found_by_the_matmuls_of_forward_in_reverse() -> None:
    """Of two blocks; backward has no ranges of attention's parts. It computes five matmuls where there were four."""
    forward = [*attention((50, 2, 20, 7, 8, 30, 3, 60)), *attention((51, 2, 20, 7, 8, 30, 3, 61))]
    one = [("mm", 60), ("mm", 61), ("copy", 4), ("mm", 30), ("mm", 31), ("add", 6), ("softmax", 9), ("mm", 20),
           ("mm", 21), ("add", 5), ("mm", 50), ("reduce", 2), ("mm", 51)]  # fmt: skip
    backward = [job(kind, time, BACKWARD, ("block.0", "attention")) for kind, time in [*one, *one]]
    found = times(with_fused_attention(queue(*forward, *backward)))
    fused = 5 / 4 * 0.85 / 0.63 / 1.75 * (30 + 31 + 20 + 21)
    forward_s = [50, 50 * FUSED, 60, 51, 50 * FUSED, 61]
    assert found == pytest.approx([*forward_s, *[60, 61, fused, 5, 50, 2, 51] * 2])


def test_fused_attention_is_not_told_without_ranges_or_with_another_number_of_matmuls() -> None:
    plain = [replace(each, path=()) for each in attention((50, 2, 20, 7, 8, 30, 3, 60))]
    assert with_fused_attention(queue(*plain)) is None
    odd = [*attention((50, 2, 20, 7, 8, 30, 3, 60)), job("mm", 60, BACKWARD)]
    assert with_fused_attention(queue(*odd)) is None


def test_fused_attention_takes_the_measured_time_where_there_is_one() -> None:
    fused = replace(RUN, mode=Mode.INFERENCE, model=replace(MODEL, attention=Attention.SDPA))
    sides = {"rows": 16, "inner": 12, "columns": 16, "batch": 8}
    known = Matmul(**sides, form=Form.ATTENTION, time_s=33e-6)  # type: ignore[arg-type]
    measured = replace(curves(), matmuls={Precision.FP32: (*curves().matmuls[Precision.FP32], known)})
    forward = queue(*attention((50, 2, 20, 7, 8, 30, 3, 60)))
    assert times(with_fused_attention(forward, fused, measured)) == [50, 33, 60]
    assert times(with_fused_attention(forward, fused, curves())) == pytest.approx([50, 50 * FUSED, 60])


@pytest.mark.parametrize(
    ("kind", "share"), [(OptimizerKind.ADAMW, 28 / 72), (None, 28 / 72), (OptimizerKind.FOREACH, 28 / 80)]
)
def test_fused_adamw_is_one_kernel_of_the_least_bytes(kind: OptimizerKind | None, share: float) -> None:
    found = with_fused_adamw(queue(job("mm", 50), *[job("add", 9, OPTIMIZER)] * 8), kind)
    assert times(found) == pytest.approx([50, 72 * share])
    assert found is not None
    assert found.host_s == pytest.approx(2e-6)
    assert with_fused_adamw(queue(job("mm", 50)), kind) is None


def test_free_launches_leave_kernels_and_pauses() -> None:
    found = without_launches(queue(job("mm", 50, pause_s=1e-3), job("add", 4)))
    assert found.run().step_s == pytest.approx(1e-3 + 54e-6)


# another precision


def curves() -> Curves:
    """A device with matmuls of 1 TFLOP/s in fp32 and 4 in bf16, and passes of 1 GB/s."""
    rates = {Precision.FP32: 1e12, Precision.TF32: 2e12, Precision.BF16: 4e12}
    matmuls = {
        precision: tuple(Matmul(rows=side, inner=side, columns=side, time_s=2 * side**3 / rate) for side in (16, 256))
        for precision, rate in rates.items()
    }
    passes = {1: 1e-9, 2**30: 2**30 / 1e9}
    return Curves(matmuls=matmuls, copies=passes, adamw=passes, launch_s=1e-6, kernel_s=0.0)


def forecast_queue(config: RunConfig) -> Queue:
    """The forecast's operations as jobs, each with its own time and the calls of the host that lead to it."""
    phases = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD, Phase.OPTIMIZER: OPTIMIZER}
    jobs: list[Job] = []
    for phase, found in operations(config).items():
        for each in found:
            what = {Kind.MATMUL: "mm", Kind.ATTENTION: "flash"}.get(each.kind, "add")
            if each.kind in (Kind.MATMUL, Kind.ATTENTION):
                time_s = curves().matmul_s(
                    config.precision, *each.sides, batch=each.batch, form=each.form, moved_bytes=each.moved_bytes
                )
            else:
                time_s = curves().pass_s(each.moved_bytes, each.how)
            assert time_s is not None
            jobs += [job(what, time_s * 1e6, phases[phase], host_s=(each.views + each.calls) * 1e-6)] * each.launches
    return queue(*jobs)


@pytest.mark.parametrize("precision", [Precision.TF32, Precision.BF16])
@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("arch", Arch)
def test_the_forecasts_own_step_becomes_its_step_at_the_other_precision(
    precision: Precision, attention: Attention, arch: Arch
) -> None:
    config = replace(RUN, model=replace(MODEL, attention=attention, arch=arch))
    other = replace(config, precision=precision)
    before, after = forecast_queue(config), forecast_queue(other)
    found = at_precision(before, config, other, curves())
    assert found is not None
    expected = step_time(other, curves())
    assert expected is not None
    assert sum(each.kernel_s for each in after.jobs) == pytest.approx(sum(expected.kernels_s.values()))
    for phase in (FORWARD, BACKWARD, OPTIMIZER):
        made, wanted = ([each for each in own.jobs if each.phase is phase] for own in (found, after))
        assert len(made) == len(wanted)
        assert sum(each.kernel_s for each in made) == pytest.approx(sum(each.kernel_s for each in wanted))
    assert found.host_s == pytest.approx(after.host_s, rel=0.02)


def test_another_precision_is_not_told_of_other_matmuls_or_without_a_measured_rate() -> None:
    other = replace(RUN, precision=Precision.BF16)
    made = forecast_queue(RUN)
    assert at_precision(made.with_jobs(made.jobs[5:]), RUN, other, curves()) is None
    assert at_precision(made, RUN, replace(RUN, precision=Precision.FP16), curves()) is None
    assert at_precision(queue(job("add", 5)), RUN, other, curves()) is None
    inference = replace(RUN, mode=Mode.INFERENCE)
    assert at_precision(made, inference, replace(inference, precision=Precision.BF16), curves()) is None
    stray = queue(*[each for each in made.jobs if each.phase is FORWARD], job("add", 5, BACKWARD))
    kept = at_precision(stray, inference, replace(inference, precision=Precision.BF16), curves())
    assert times(kept)[-1] == 5
    own = replace(RUN, model_factory="a:b")
    assert at_precision(made, own, replace(own, precision=Precision.BF16), curves()) is None


def test_helpers_of_matmuls_are_part_of_their_measured_times() -> None:
    made = forecast_queue(RUN)
    helped = made.with_jobs([each for own in made.jobs for each in ((own, job("reduce", 9)) if own.name == GEMM
                                                                    and own.phase is FORWARD else (own,))])  # fmt: skip
    other = replace(RUN, precision=Precision.BF16)
    found, plain = (at_precision(own, RUN, other, curves()) for own in (helped, made))
    assert times(found) == pytest.approx(times(plain))
