"""Known causes in hand-made profiles (see profiles.py), each named with its numbers, and nothing else named."""

from dataclasses import replace

import numpy as np
import pytest

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import IdleCause
from cs336_systems.config import SIZES, Attention, CompileMode, Device, OptimizerKind, RunConfig
from cs336_systems.report.sections.kernels.facts import is_launch_bound
from cs336_systems.report.sections.kernels.findings import findings
from tests.report.making import H200
from tests.report.sections.kernels.profiles import (
    BACKWARD,
    DATA,
    FILL,
    FORWARD,
    GEMM_A,
    GEMM_B,
    GEMM_BF16,
    MUL,
    NAMES,
    OPTIMIZER,
    UNATTRIBUTED,
    UNKNOWN,
    make_call,
    make_classes,
    make_cpu_profile,
    make_gap,
    make_idle,
    make_kernel,
    make_kernels,
    make_phase,
    make_profile,
    seconds,
)

CPU_IS_THE_LIMIT = "The CPU is the limit"


def quiet(**changes):
    """A step of 50 ms wall time in two steps that nothing is wrong with: no idle time, no call but launches."""
    names = {FORWARD: ((GEMM_BF16, 8, 20),), BACKWARD: ((GEMM_BF16, 8, 27),), OPTIMIZER: ((MUL, 2, 3),)}
    return make_profile(**{
        "phases": (
            make_phase(FORWARD, (4, 4), (10, 10), (10, 10), (5, 5)),
            make_phase(BACKWARD, (4, 4), (13.5, 13.5), (13.5, 13.5), (5, 5)),
            make_phase(OPTIMIZER, (1, 1), (1.5, 1.5), (1.5, 1.5), (1, 1)),
        ),
        "kernels": make_kernels(names), "classes": make_classes(names), "idle": (), "gaps": (),
        "host_calls": (make_call("cudaLaunchKernel", FORWARD, 18, 0.1, is_launch=True),), **changes,
    })  # fmt: skip


def said(profile, config=None):
    return " ".join(findings(profile, config))


PLAIN = RunConfig(size="small", model=SIZES["small"], device=Device.CUDA)
FAST = replace(PLAIN, compile=CompileMode.DEFAULT, optimizer=OptimizerKind.FUSED, cuda_graph=True,
               model=replace(PLAIN.model, attention=Attention.SDPA))  # fmt: skip


def with_all_advice():
    """The CPU is the limit, there is time between kernels, the optimizer is large and written out, much is moved."""
    names = {FORWARD: ((GEMM_BF16, 8, 20), (MUL, 8, 10)), BACKWARD: ((GEMM_BF16, 8, 20), (FILL, 8, 5)),
             OPTIMIZER: ((MUL, 2, 3),)}  # fmt: skip
    late, between = (
        make_idle(FORWARD, IdleCause.LATE_LAUNCH, 8, 20),
        make_idle(FORWARD, IdleCause.BETWEEN_KERNELS, 9, 9),
    )
    phases = (*quiet().phases[:2], make_phase(OPTIMIZER, (1, 1), (9, 9), (9, 9), (1, 1)))
    return quiet(classes=make_classes(names), idle=(late, between), phases=phases)


def proposed(profile, config=None):
    """The findings that name flags: what idle time bounds, and what may shorten the step besides."""
    return [text for text in findings(profile, config) if text.startswith(("The step would take at", "What may"))]


def test_a_plain_run_is_advised_in_flags_in_two_places() -> None:
    bounds, others = proposed(with_all_advice(), PLAIN)
    assert "10.0 ms less without waiting for launches (--cuda-graph --optimizer fused)" in bounds
    assert "4.50 ms less without idle time between kernels (--compile default)" in bounds
    assert others.endswith(": --compile default, --attention sdpa, --optimizer fused.")
    assert "--" not in said(with_all_advice(), PLAIN).replace(bounds, "").replace(others, "")


@pytest.mark.parametrize("cause", IdleCause)
def test_each_cause_of_idle_time_bounds_what_the_step_gains_without_it(cause: IdleCause) -> None:
    """3 of 50 ms in two steps; of less than a hundredth nothing is said."""
    text, *_ = proposed(quiet(idle=(make_idle(BACKWARD, cause, 4, 3),)))
    assert text.startswith("The step would take at most 1.50 ms less without ")
    assert proposed(quiet(idle=(make_idle(BACKWARD, cause, 4, 0.49),))) == []


def test_a_run_that_follows_all_advice_is_told_nothing_that_it_does() -> None:
    (bounds,) = proposed(with_all_advice(), FAST)
    assert "10.0 ms less without waiting for launches," in bounds
    assert "--" not in said(with_all_advice(), FAST)
    assert "A larger model or batch helps, a faster GPU does not." in said(with_all_advice(), FAST)


def test_of_a_run_that_is_not_known_nothing_is_taken_for_granted() -> None:
    """A trace of somebody else's program has none of our flags, and may do all of it already."""
    bounds, others = proposed(with_all_advice())
    assert "(CUDA graphs, where not in use yet)" in bounds
    assert others.endswith(": torch.compile, fused attention, a fused optimizer, where not in use yet.")
    assert "--" not in said(with_all_advice())


def test_what_stands_out_in_order_with_its_numbers() -> None:
    limit, bounds, ways, late, waits, pause, full, optimizer, unknown = findings(make_profile())
    # 40.2 of 52 ms busy, 6.5 ms late
    assert limit.startswith("The GPU is busy only 77.3 % of the step's 26.0 ms, and idle 12.5 %")
    assert bounds == (
        "The step would take at most 3.25 ms less without waiting for launches (CUDA graphs, where not in use yet), "
        "1.50 ms less without waits of the host for the device, 0.500 ms less without pauses of the host, "
        "0.400 ms less without idle time between kernels (torch.compile, where not in use yet)."
    )
    assert "TF32" in ways
    assert "a fused optimizer" in ways
    # 5 of 16 ms
    assert late.startswith("In forward the CPU is the limit: of 8.00 ms the GPU is idle 31.2 %")
    assert "7 kernels" in late
    # 2 waits and 2 copies in two steps take 3.02 ms, idle 3 ms
    assert waits.startswith(
        "The host waits for the device in backward, once a step (cudaStreamSynchronize after a copy"
    )
    assert "1.51 ms a step" in waits
    assert "idles 1.50 ms" in waits
    assert pause.startswith(
        "The GPU idles 0.500 ms in forward while the host pauses; the longest time, 1.00 ms, before"
    )
    assert "in block.1 > ffn." in pause
    # 22 of 40 ms of kernels
    assert full.startswith("Matrix products in true fp32 take 55.0 % of the GPU time, 11.0 ms")
    # 12 of 52 ms; 2 of 40 ms of kernels
    assert optimizer.startswith("The optimizer takes 6.00 ms, 23.1 % of the step, in 10 kernels.")
    assert unknown == (
        f"The kernel {UNKNOWN}, of a kind that no rule knows, takes 5.00 % of the GPU time: 1.00 ms in 2 launches."
    )


def test_nothing_stands_out_where_nothing_is_wrong() -> None:
    (limit,) = findings(quiet())
    assert limit.startswith("The GPU is the limit: it is busy 100 % of the step's 25.0 ms, and idle 0 %")


@pytest.mark.parametrize(("late_ms", "is_limit"), [(9.9, False), (10.1, True)])
def test_the_cpu_is_the_limit_from_a_fifth_of_the_time(late_ms: float, is_limit: bool) -> None:
    profile = quiet(idle=(make_idle(FORWARD, IdleCause.LATE_LAUNCH, 8, late_ms),))
    assert is_launch_bound(profile) is is_limit
    assert (CPU_IS_THE_LIMIT in said(profile)) is is_limit


def test_the_cpu_is_the_limit_with_the_time_of_a_launch_and_of_a_kernel() -> None:
    """44 ms of the host for 52 launches, whose calls take 0.27 ms; median over all 50 kernels."""
    profile = make_profile()
    profile = replace(profile, idle=(*profile.idle, make_idle(FORWARD, IdleCause.LATE_LAUNCH, 4, 7)))
    text = findings(profile)[0]
    kernels = [kernel for kernel in profile.kernels if kernel.phase is None]
    median_s = np.median(np.repeat([k.median_s for k in kernels], [k.count for k in kernels]))
    assert text.startswith("The CPU is the limit: the GPU is busy 77.3 % of the step's 26.0 ms, and idle 26.0 %")
    assert "takes 846 µs per launch, 5.19 µs of it" in text
    assert f"the median of 25 kernels runs {median_s * 1e6:.0f} µs" in text
    assert "In forward the CPU" not in said(profile), "the phase is no news where the step is limited"


def test_synchronisations_around_the_step_are_no_finding() -> None:
    calls = tuple(make_call("cudaDeviceSynchronize", phase, 2, 20, is_wait=True) for phase in (DATA, UNATTRIBUTED))
    assert len(findings(quiet(host_calls=calls))) == 1


def test_a_phase_without_kernels_has_no_finding() -> None:
    """As in a benchmark without an optimizer, where what comes after backward looks like one."""
    calls = (make_call("cudaStreamSynchronize", OPTIMIZER, 2, 4, is_wait=True),)
    profile = quiet(host_calls=calls)
    assert len(findings(profile)) == 2
    phases = tuple(replace(row, launches=(0, 0)) if row.phase is OPTIMIZER else row for row in profile.phases)
    assert len(findings(replace(profile, phases=phases))) == 1


def test_a_synchronisation_is_called_no_item() -> None:
    for name, asked in (("cudaDeviceSynchronize", "torch.cuda.synchronize()"), ("cudaStreamSynchronize", ".item()")):
        _, text = findings(quiet(host_calls=(make_call(name, BACKWARD, 2, 4, is_wait=True),)))
        assert [word in text for word in ("torch.cuda.synchronize()", ".item()")].count(True) == 1
        assert asked in text


def test_an_item_for_each_parameter_is_named() -> None:
    calls = (
        make_call("cudaStreamSynchronize", OPTIMIZER, 222, 4, is_wait=True),
        make_call("cudaMemcpyAsync", OPTIMIZER, 222, 1, is_launch=True, is_wait=True),
    )
    _, text = findings(quiet(host_calls=calls, idle=(make_idle(OPTIMIZER, IdleCause.HOST_WAITED, 222, 0.4),)))
    assert text.startswith("The host waits for the device in the optimizer, 111 times a step (cudaStreamSynchronize")
    assert "2.50 ms a step" in text
    assert "idles 0.200 ms" in text


def test_a_copy_that_waits_itself_counts() -> None:
    call = make_call("cudaMemcpy", BACKWARD, 6, 4, is_launch=True, is_wait=True)
    _, text = findings(quiet(host_calls=(call,)))
    assert "in backward, 3 times a step (cudaMemcpy):" in text


def test_a_sleep_is_named_by_its_milliseconds() -> None:
    gap = make_gap(0, 3, 30.4, FORWARD, IdleCause.HOST_PAUSE)
    _, _, text = findings(quiet(idle=(make_idle(FORWARD, IdleCause.HOST_PAUSE, 2, 60.6),), gaps=(gap,)))
    assert "idles 30 ms in forward" in text
    assert f"the longest time, 30 ms, before {GEMM_A}." in text


def test_a_hiccup_is_no_finding() -> None:
    assert len(findings(quiet(idle=(make_idle(FORWARD, IdleCause.HOST_PAUSE, 1, 0.4),)))) == 1


def test_kernels_in_no_phase() -> None:
    profile = quiet()
    stray = make_phase(UNATTRIBUTED, (3, 3), (2, 2), (0, 0), (0, 0))
    text = findings(replace(profile, phases=(*profile.phases, stray)))[1]
    # 4 of 54 ms
    assert text.startswith("7.41 % of the GPU time, 2.00 ms in 3 kernels, was launched in no phase")


def test_recomputation() -> None:
    profile = quiet()
    forward, backward, optimizer = profile.phases
    _, text = findings(replace(profile, phases=(forward, replace(backward, recomputed_s=seconds(5, 5)), optimizer)))
    assert text.startswith("Backward does 5.00 ms of forward's work again (checkpointing), 20.0 % of")


def test_communication() -> None:
    names = {**NAMES, BACKWARD: (*NAMES[BACKWARD], ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2, 4))}
    (text,) = [text for text in findings(make_profile(classes=make_classes(names))) if "Communication" in text]
    assert text.startswith("Communication takes 2.00 ms, 10.0 % of the GPU time")


def test_work_that_a_compiler_fuses() -> None:
    """15 of 55 ms in forward and backward."""
    names = {FORWARD: ((GEMM_A, 8, 20), (MUL, 8, 10)), BACKWARD: ((GEMM_A, 8, 20), (FILL, 8, 5)), OPTIMIZER: ()}
    _, ways, text = findings(quiet(classes=make_classes(names)))
    assert "torch.compile" in ways
    assert text.startswith("In forward and backward, 27.3 % of the GPU time, 7.50 ms, goes to")


def test_a_fused_optimizer_is_not_told_to_be_fused() -> None:
    profile = make_profile()
    kinds = {KernelClass.ELEMENT_WISE: KernelClass.OPTIMIZER}
    fused = tuple(replace(row, kind=kinds.get(row.kind, row.kind)) for row in profile.classes)
    assert "a fused optimizer" in said(profile)
    assert "a fused optimizer" not in said(replace(profile, classes=fused))


# Products in true fp32


def with_products(*names, device_names=(H200,)):
    """All of forward and backward by these kernels, in equal parts."""
    each = {FORWARD: tuple((name, 8, 20 / len(names)) for name in names), BACKWARD: (), OPTIMIZER: ((MUL, 2, 3),)}
    return quiet(kernels=make_kernels(each), classes=make_classes(each), device_names=device_names)


FFMA = (
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_execute_kernel__5x_cublas"
)
TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel"
TENSOR = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(T1::Params)"
FULL = "in true fp32"


@pytest.mark.parametrize(
    ("names", "told"),
    [((GEMM_A,), True), ((GEMM_B,), True), ((FFMA,), True), ((TF32,), False), ((TENSOR,), False),
     ((GEMM_BF16,), False), ((GEMM_BF16,) * 5 + (GEMM_A,), False)],
)  # fmt: skip
def test_products_in_true_fp32_are_told_by_their_kernels(names, told) -> None:
    """The last: a sixth of the products."""
    assert (FULL in said(with_products(*names))) is told


@pytest.mark.parametrize(
    ("device_names", "advised"),
    [
        (("NVIDIA A100-SXM4-40GB",), ("TF32", "bf16")),
        (("Tesla V100-SXM2-16GB",), ("fp16",)),
        (("NVIDIA GeForce RTX 3090",), ("bf16",)),  # TF32 is no faster there
        (("NVIDIA GeForce RTX 4070",), ("TF32", "bf16")),  # its kernels are of Ampere's generation or a later one
        ((), ("TF32", "bf16")),
    ],
)
def test_what_the_tensor_cores_of_the_device_have_is_advised(device_names, advised) -> None:
    text = " ".join(
        text
        for text in findings(with_products(GEMM_A, device_names=device_names))
        if FULL in text or text.startswith("What may")
    )
    assert all(words in text for words in advised)
    assert ("TF32" in text) is ("TF32" in advised)


def test_a_device_that_may_have_no_tensor_cores_is_advised_nothing() -> None:
    """A GTX 1660 runs Volta's kernels, and has none."""
    assert FULL not in said(with_products("volta_sgemm_128x64_tn", device_names=("NVIDIA GeForce GTX 1660",)))


@pytest.mark.parametrize(("precision", "told"), [("fp32", True), ("tf32", False), ("bf16", False), ("fp16", False)])
def test_a_run_that_has_tensor_cores_on_is_not_advised_to(precision, told) -> None:
    text = said(with_products(GEMM_A), replace(PLAIN, precision=precision))
    assert (FULL in text) is told
    assert ("--precision tf32, --mixed-precision" in text) is told


# First calls


def with_a_first_call(times=2, **changes):
    """Of 20 calls of mul in forward, 0.1 ms each, the first took 30.1 ms, or all four of the first step did."""
    names = {FORWARD: ((GEMM_BF16, 8, 20),), BACKWARD: ((GEMM_BF16, 8, 27),), OPTIMIZER: ((MUL, 2, 3),)}
    calls = make_kernel(MUL, 20, 2 + 30 * times, FORWARD, median_s=1e-4, max_s=30.1e-3)
    classes = {**names, FORWARD: (*names[FORWARD], (MUL, 20, 2 + 30 * times))}
    return quiet(
        phases=(
            make_phase(FORWARD, (4, 4), (11 + 30, 11 + 30 * (times - 1)), (41, 11 + 30 * (times - 1)), (5, 5)),
            *quiet().phases[1:],
        ),
        kernels=(replace(calls, phase=None), calls, *make_kernels(names)),
        classes=make_classes(classes),
        **changes,
    )


def test_a_first_call_is_told_as_one_and_not_as_element_wise_work() -> None:
    """32 of 110 ms of kernels, of which 2 are left without it; 30 of 112 ms of the wall."""
    found = findings(with_a_first_call(times=1))
    assert found[0].startswith("vectorized_elementwise_kernel<mul> took 30.0 ms more in forward of step 0")
    assert "30.1 ms" in found[0]
    assert "0.100 ms" in found[0]
    assert f"{100 * 30 / (52 + 27 + 3):.1f} % of the time" in found[0]
    assert "element-wise work" not in said(with_a_first_call(times=1))


def test_a_long_call_of_every_step_is_no_first_one() -> None:
    """As an optimizer has that goes over parameters of all sizes."""
    assert "one-off" not in said(with_a_first_call(times=2))
    assert "element-wise work" in said(with_a_first_call(times=2))


def test_what_runs_in_one_step_alone_is_told() -> None:
    """A kernel of 40 ms in one of two steps that take 10 ms without it."""
    once = make_kernel(UNKNOWN, 1, 40, FORWARD, median_s=40e-3, max_s=40e-3)
    forward = make_phase(FORWARD, (5, 4), (50, 10), (50, 10), (5, 5))
    profile = quiet()
    changed = replace(
        profile, kernels=(*profile.kernels, replace(once, phase=None), once), phases=(forward, *profile.phases[1:]),
        classes=make_classes({FORWARD: ((GEMM_BF16, 8, 20), (UNKNOWN, 1, 40)), BACKWARD: ((GEMM_BF16, 8, 27),)}),
    )  # fmt: skip
    assert "mystery_of_mine took" in findings(changed)[0]
    assert "no rule knows" not in said(changed)


def test_in_a_single_step_nothing_can_be_told_from_the_usual() -> None:
    profile = with_a_first_call(times=1)
    one = tuple(
        replace(phase, kernel_s=(sum(phase.kernel_s),), wall_s=(sum(phase.wall_s),)) for phase in profile.phases
    )
    assert "one-off" not in said(replace(profile, phases=one, num_steps=1))


# A CPU


def test_the_operators_that_take_the_time_of_a_cpu_are_named() -> None:
    """aten::mm has 36 of 60 ms, in 18 calls in two steps; aten::mul 18 in 36; no other has a quarter."""
    product, moving, *rest = findings(make_cpu_profile())
    assert product.startswith("The operator aten::mm (matrix product) takes 60.0 % of the CPU time, 18.0 ms in 9 calls")
    assert moving.startswith("The operator aten::mul (element-wise) takes 30.0 % of the CPU time, 9.00 ms in 18 calls")
    assert not any("softmax" in text for text in rest)
    even = {FORWARD: tuple((f"aten::{name}", 2, 12) for name in ("mm", "mul", "_softmax", "add", "sum"))}
    assert "aten::mm" not in said(make_cpu_profile(kernels=make_kernels(even), classes=make_classes(even)))


def test_a_trace_of_a_cpu_has_no_gpu_to_speak_of() -> None:
    text = said(make_cpu_profile())
    assert "GPU" not in text
    # 2 of 60 ms, twice in two steps
    assert (
        "The operator aten::unheard_of, of a kind that no rule knows, takes 3.33 % of the CPU time: 1.00 ms in 1 call."
        in text
    )


def test_a_profile_of_nothing_says_nothing() -> None:
    empty = make_profile(phases=(), kernels=(), classes=(), idle=(), gaps=(), host_calls=())
    assert findings(empty) == ()
