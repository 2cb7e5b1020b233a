"""Known causes in hand-made profiles (see profiles.py), each named with its numbers, and nothing
else named.
"""

import random
import re
from dataclasses import dataclass, replace

import pytest

from cs336.analysis.kernels.classes import KernelClass
from cs336.analysis.kernels.step_profile import Awaited, IdleCause, StepProfile
from cs336.config import (
    SIZES,
    Attention,
    CompileMode,
    Device,
    OptimizerKind,
    Parallel,
    Profiler,
    RunConfig,
)
from cs336.record import WarningCode
from cs336.report.sections.kernels import findings as of_kernels
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.limits import Limit, limit_of
from tests.report.making import H200, make_config, make_record
from tests.report.sections.kernels.profiles import (
    BACKWARD,
    FILL,
    FORWARD,
    GEMM_A,
    GEMM_B,
    GEMM_BF16,
    MUL,
    OPTIMIZER,
    UNATTRIBUTED,
    UNKNOWN,
    make_call,
    make_classes,
    make_cpu_profile,
    make_idle,
    make_kernels,
    make_phase,
    make_profile,
    make_ranks,
    make_shared,
    make_times,
)


def quiet(**changes):
    """A step of 50 ms wall time in two steps that nothing is wrong with: no idle time, no call
    but launches.
    """
    names = {
        FORWARD: ((GEMM_BF16, 8, 20),),
        BACKWARD: ((GEMM_BF16, 8, 27),),
        OPTIMIZER: ((MUL, 2, 3),),
    }
    return make_profile(
        **{
            "phases": (
                make_phase(FORWARD, (4, 4), (10, 10), (10, 10), (5, 5)),
                make_phase(BACKWARD, (4, 4), (13.5, 13.5), (13.5, 13.5), (5, 5)),
                make_phase(OPTIMIZER, (1, 1), (1.5, 1.5), (1.5, 1.5), (1, 1)),
            ),
            "kernels": make_kernels(names),
            "classes": make_classes(names),
            "idle": (),
            "gaps": (),
            "host_calls": (make_call("cudaLaunchKernel", FORWARD, 18, 0.1, is_launch=True),),
            **changes,
        }
    )


def findings(profile, config=None):
    """Of a trace without a record, or with that of its run."""
    entry = Explained(profile=profile, profiled=config and make_record(config, (0.1,)))
    return [finding.text for finding in of_kernels.findings(entry)]


def said(profile, config=None):
    return " ".join(findings(profile, config))


PLAIN = RunConfig(size="small", model=SIZES["small"], device=Device.CUDA)
FAST = replace(
    PLAIN,
    compile=CompileMode.DEFAULT,
    optimizer=OptimizerKind.FUSED,
    cuda_graph=True,
    model=replace(PLAIN.model, attention=Attention.SDPA),
)


def with_all_advice():
    """The CPU is the limit, there is time between kernels, the optimizer is large and written
    out, much is moved.
    """
    names = {
        FORWARD: ((GEMM_BF16, 8, 20), (MUL, 8, 10)),
        BACKWARD: ((GEMM_BF16, 8, 20), (FILL, 8, 5)),
        OPTIMIZER: ((MUL, 2, 3),),
    }
    late, between = (
        make_idle(FORWARD, IdleCause.LATE_LAUNCH, 8, 20),
        make_idle(FORWARD, IdleCause.BETWEEN_KERNELS, 9, 9),
    )
    phases = (
        make_phase(FORWARD, (4, 4), (10, 10), (24.5, 24.5), (5, 5)),
        quiet().phases[1],
        make_phase(OPTIMIZER, (1, 1), (9, 9), (9, 9), (1, 1)),
    )
    return quiet(classes=make_classes(names), idle=(late, between), phases=phases)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            PLAIN,
            (
                "14.5 ms less without waiting for launches (--cuda-graph --optimizer fused)",
                "fewer kernels (--compile default, --attention sdpa, --optimizer fused)",
                "19.1 % of the step, in 1 kernel (--optimizer fused: at most 10.0 ms less).",
                "more than they compute (--compile default: at most 22.0 ms less).",
            ),
        ),
        (FAST, ("14.5 ms less without waiting for launches,", "use a larger model or batch.")),
        (None, ("(CUDA graphs)", "(torch.compile, a fused optimizer)")),
    ],
)
def test_a_run_is_advised_what_it_does_not_do_already(
    config: RunConfig | None, told: tuple[str, ...]
) -> None:
    """In flags; a trace of somebody else's program has none of them, and may do all of it
    already.
    """
    text = said(with_all_advice(), config)
    assert [words for words in told if words not in text] == []
    assert ("--" in text) is (config is PLAIN)


def test_what_stands_out_in_order_with_its_numbers() -> None:
    limit, bounds, full, optimizer, waits, unknown, pause = findings(make_profile())
    # 40.2 of 52 ms busy, 6.5 ms late
    assert limit.startswith("The GPU is busy only 77.3 % of the step's 26.0 ms, and idle 12.5 %")
    # 5.9 ms without work; waits of 2.01 ms; 0.4 ms between kernels
    assert [float(ms) for ms in re.findall(r"([\d.]+) ms less", bounds)] == [5.9, 2.01, 0.4, 5.9]
    # 2 waits and 2 copies in two steps take 3.02 ms, idle 3 ms
    assert "in backward, 1 time a step (cudaStreamSynchronize after a copy" in waits
    assert "1.51 ms a step" in waits
    assert "idles 1.50 ms" in waits
    assert (
        "idles 0.500 ms before kernels of forward while the host makes no call to the device; "
        "the longest time, 1.00 ms, before" in pause
    )
    assert "in block.1 > ffn:" in pause
    # 22 of 40 ms of kernels
    assert full.startswith(
        "Matrix multiplications in true fp32 take 55.0 % of the GPU time, 11.0 ms"
    )
    assert "TF32" in full
    # 12 of 52 ms; 2 of 40 ms of kernels
    assert optimizer.startswith(
        "The optimizer takes 6.00 ms, 23.1 % of the step, in 10 kernels (a fused optimizer"
    )
    assert (
        f"{UNKNOWN}, of a kind that no rule knows, takes 5.00 % of the GPU time: 1.00 ms in 2 "
        "launches"
    ) in unknown


def test_nothing_stands_out_where_nothing_is_wrong() -> None:
    (limit,) = findings(quiet())
    assert re.findall(r"[\d.]+ (?:%|ms)", limit) == ["100 %", "25.0 ms"]


def test_the_cpu_is_the_limit_with_the_time_of_a_launch_and_of_a_kernel() -> None:
    """44 ms of the host for 52 launches, whose calls take 0.27 ms, and 40 ms of 50 kernels."""
    profile = make_profile()
    profile = replace(
        profile, idle=(*profile.idle, make_idle(FORWARD, IdleCause.LATE_LAUNCH, 4, 7))
    )
    text = findings(profile)[0]
    assert text.startswith(
        "The CPU is the limit: the GPU is busy 77.3 % of the step's 26.0 ms, and idle 26.0 %"
    )
    assert "takes 846 µs per launch, 5.19 µs of it" in text
    assert "a kernel runs 800 µs on average" in text
    assert "In forward the CPU" not in said(profile), (
        "the phase is no news where the step is limited"
    )


def test_a_phase_without_kernels_has_no_finding() -> None:
    """As in a benchmark without an optimizer, where what comes after backward looks like one."""
    calls = (make_call("cudaStreamSynchronize", OPTIMIZER, 2, 4, is_wait=True),)
    profile = quiet(host_calls=calls)
    assert len(findings(profile)) == 2
    phases = tuple(
        replace(row, launches=(0, 0)) if row.phase is OPTIMIZER else row for row in profile.phases
    )
    assert len(findings(replace(profile, phases=phases))) == 1


@pytest.mark.parametrize(
    ("calls", "awaited", "asked", "words"),
    [
        ((("cudaDeviceSynchronize", 2, False),), Awaited.UNKNOWN, "torch.cuda.synchronize()", ()),
        ((("cudaStreamSynchronize", 2, False),), Awaited.UNKNOWN, "", ()),
        ((("cudaStreamSynchronize", 2, False),), Awaited.TO_HOST, ".item()", ()),
        ((("cudaStreamSynchronize", 2, False),), Awaited.TO_DEVICE, ".to(device)", ()),
        # waits itself
        ((("cudaMemcpy", 6, True),), Awaited.TO_HOST, ".item()", ("3 times a step (cudaMemcpy):",)),
        (
            (("cudaStreamSynchronize", 222, False), ("cudaMemcpyAsync", 222, True)),
            Awaited.TO_HOST,
            ".item()",
            (
                "111 times a step (cudaStreamSynchronize after a copy",
                "4.00 ms a step",
                "idles 0.200 ms",
            ),
        ),
    ],
)
def test_waits_are_counted_and_their_cause_is_asked_for(calls, awaited, asked, words) -> None:
    """Only what the file shows to be waited for is asked for."""
    waits = []
    for name, count, copies in calls:
        call = make_call(name, BACKWARD, count, 4, is_launch=copies, is_wait=True)
        waits.append(replace(call, awaited=awaited))
    _, text = findings(
        quiet(host_calls=tuple(waits), idle=(make_idle(BACKWARD, IdleCause.HOST_WAITED, 222, 0.4),))
    )
    assert all(word in text for word in words)
    causes = ("torch.cuda.synchronize()", ".item()", ".to(device)")
    assert [cause for cause in causes if cause in text] == ([asked] if asked else [])
    assert ("Is there" in text) is bool(asked)


def test_kernels_in_no_phase() -> None:
    profile = quiet()
    stray = make_phase(UNATTRIBUTED, (3, 3), (2, 2), (0, 0), (0, 0))
    text = findings(replace(profile, phases=(*profile.phases, stray)))[1]
    # 4 of 54 ms
    assert text.startswith("7.41 % of the GPU time, 2.00 ms, was launched in no phase")


def test_work_that_a_compiler_fuses() -> None:
    """15 of 55 ms in forward and backward."""
    names = {
        FORWARD: ((GEMM_A, 8, 20), (MUL, 8, 10)),
        BACKWARD: ((GEMM_A, 8, 20), (FILL, 8, 5)),
        OPTIMIZER: (),
    }
    _, text = findings(quiet(classes=make_classes(names)))
    assert "torch.compile" in text
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
    each = {
        FORWARD: tuple((name, 8, 20 / len(names)) for name in names),
        BACKWARD: (),
        OPTIMIZER: ((MUL, 2, 3),),
    }
    return quiet(kernels=make_kernels(each), classes=make_classes(each), device_names=device_names)


FFMA = (
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_e"
    "xecute_kernel__5x_cublas"
)
TF32 = (
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8"
    "x8_kernel"
)
TENSOR = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(T1::Params)"
FULL = "in true fp32"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ((GEMM_A,), True),
        ((GEMM_B,), True),
        ((FFMA,), True),
        ((TF32,), False),
        ((TENSOR,), False),
        ((GEMM_BF16,), False),
        ((GEMM_BF16,) * 5 + (GEMM_A,), False),
    ],
)
def test_products_in_true_fp32_are_told_by_their_kernels(names, told) -> None:
    """The last: a sixth of the products."""
    assert (FULL in said(with_products(*names))) is told


@pytest.mark.parametrize(
    ("device_names", "advised"),
    [
        (("NVIDIA A100-SXM4-40GB",), ("TF32", "bf16")),
        (("Tesla V100-SXM2-16GB",), ("fp16",)),
        (("NVIDIA GeForce RTX 3090",), ("bf16",)),  # TF32 is no faster there
        # its kernels are of Ampere's generation or a later one
        (("NVIDIA GeForce RTX 4070",), ("TF32", "bf16")),
        ((), ("TF32", "bf16")),
    ],
)
def test_what_the_tensor_cores_of_the_device_have_is_advised(device_names, advised) -> None:
    (text,) = [
        text for text in findings(with_products(GEMM_A, device_names=device_names)) if FULL in text
    ]
    assert all(words in text for words in advised)
    assert ("TF32" in text) is ("TF32" in advised)


def test_a_device_that_may_have_no_tensor_cores_is_advised_nothing() -> None:
    """A GTX 1660 runs Volta's kernels, and has none."""
    assert FULL not in said(
        with_products("volta_sgemm_128x64_tn", device_names=("NVIDIA GeForce GTX 1660",))
    )


@pytest.mark.parametrize(
    ("precision", "told"), [("fp32", True), ("tf32", False), ("bf16", False), ("fp16", False)]
)
def test_a_run_that_has_tensor_cores_on_is_not_advised_to(precision, told) -> None:
    text = said(with_products(GEMM_A), replace(PLAIN, precision=precision))
    assert (FULL in text) is told
    # 20 ms of products in 47 ms of forward and backward, in two steps
    advice = "(--precision tf32: at most 10.0 ms less, --mixed-precision: at most 23.5 ms less"
    assert (advice in text) is told


# Communication


def told(profile: StepProfile, config: RunConfig | None = None) -> str:
    (text,) = [text for text in findings(profile, config) if "Communication" in text]
    return text


def test_exposed_communication_is_told_with_what_hides_it() -> None:
    assert told(make_shared()).startswith(
        "Communication, with waiting for other ranks, takes 9.00 ms, and for 5.00 ms of that, "
        "17.9 % of the step,"
    )
    for way, advice in (
        (Parallel.DDP_FLAT, "--parallel ddp-overlap: at most 5.00 ms less"),
        (Parallel.DDP_OVERLAP, "a larger --batch-size"),
    ):
        assert f"nothing ({advice})." in told(
            make_shared(), make_config("small", parallel=way, ranks=2)
        )
    hidden = tuple(
        replace(row, exposed_s=(0.0, 0.0005))
        for row in make_shared().communication
        if row.phase is BACKWARD
    )
    flat = make_config("small", parallel=Parallel.DDP_FLAT, ranks=2)
    assert "--" not in told(replace(make_shared(), communication=hidden), flat)


def test_a_rank_for_which_the_others_wait_is_named_if_it_is_always_the_same() -> None:
    text = told(make_shared(ranks=make_ranks((0, 0), (1, 3))))
    assert "wait for rank 0 in 2 of 2 steps, up to 2.00 ms" in text
    assert "in 2 of 2 steps" not in told(make_shared(ranks=make_ranks((0, 3), (1, 0))))
    # where other ranks are not here, waiting for them is not told apart
    unknown = tuple(replace(times, waited_s=None) for times in make_ranks((0, 0), (1, 3)))
    assert told(make_shared(ranks=unknown)).startswith("Communication, with waiting for other")
    # 2 % of the exposed time
    assert "rank" not in told(make_shared(ranks=make_ranks((0, 0), (0.1, 0.1))))


@pytest.mark.parametrize(
    ("kernel_ms", "exposed_ms", "limit"),
    [
        (9, 0.5, "The GPU is the limit"),
        (9, 5, "Communication is a limit"),
        (5, 0.5, "The GPU is the limit"),
    ],
)
def test_a_gpu_that_waits_in_collectives_or_copies_is_busy_and_not_the_limit(
    kernel_ms, exposed_ms, limit
) -> None:
    """Busy for 9 of the 10 ms of a phase, without idle times that another cause would explain."""
    kernels = (kernel_ms, kernel_ms)
    phase = make_phase(BACKWARD, (8, 8), kernels, (10, 10), (9, 9), busy_s=(9e-3, 9e-3))
    sent = make_times(BACKWARD, None, (1, 1), (6, 6), (exposed_ms, exposed_ms))
    profile = make_profile(phases=(phase,), communication=(sent,), idle=())
    assert findings(profile)[0].startswith(limit)


# A CPU


def test_the_operator_that_takes_the_time_of_a_cpu_is_named() -> None:
    """aten::mm has 36 of 60 ms, in 18 calls in two steps."""
    first = findings(make_cpu_profile())[0]
    assert first == (
        "The operator aten::mm (matrix product) takes 60.0 % of the CPU time, 18.0 ms in 9 calls."
    )
    assert "GPU" not in said(make_cpu_profile())


# Profiles of steps that a clock timed too


@dataclass(frozen=True)
class Drawn:
    """Two steps of which all is known, in milliseconds: how long the GPU works and idles, with and
    without a profiler.

    The host needs `launching` for its launches, and a profiler makes that `slowdown` times as much.
    The GPU waits for what the host needs longer than the GPU works.
    """

    busy: float
    launching: float
    slowdown: float
    others: dict[IdleCause, float]
    is_named: bool
    """The record of the run without a profiler says that it was launch-bound."""

    def late(self, slowdown: float = 1.0) -> float:
        return max(slowdown * self.launching - self.busy, 0.0)

    def whole(self, slowdown: float = 1.0) -> float:
        return self.busy + self.late(slowdown) + sum(self.others.values())

    @property
    def limit(self) -> Limit:
        """What limits the step without a profiler."""
        late_share, busy_share = self.late() / self.whole(), self.busy / self.whole()
        data_share = self.others.get(IdleCause.DATA, 0) / self.whole()
        if data_share >= max(0.2, late_share):
            return Limit.DATA
        if late_share >= 0.2 or (self.is_named and busy_share < 0.8):
            return Limit.LAUNCHES
        if self.is_named:
            return Limit.DOUBT
        return Limit.GPU if busy_share >= 0.8 else Limit.IDLE

    def entry(self, config: RunConfig = PLAIN) -> Explained:
        late = {IdleCause.LATE_LAUNCH: self.late(self.slowdown)}
        idle = tuple(
            make_idle(BACKWARD, cause, 2, 2 * time_ms)
            for cause, time_ms in (late | self.others).items()
        )
        names = {BACKWARD: ((GEMM_BF16, 8, 2 * self.busy),)}
        wall_ms = self.whole(self.slowdown)
        phase = make_phase(BACKWARD, (4, 4), (self.busy,) * 2, (wall_ms,) * 2, (wall_ms,) * 2)
        waited_ms = 2 * self.others.get(IdleCause.HOST_WAITED, 0)
        allocated_ms = 2 * self.others.get(IdleCause.ALLOCATION, 0)
        calls = (
            make_call("cudaDeviceSynchronize", BACKWARD, 2, waited_ms, is_wait=True),
            make_call("cudaMalloc", BACKWARD, 2, allocated_ms),
        )
        profile = quiet(
            phases=(phase,),
            idle=idle,
            kernels=make_kernels(names),
            classes=make_classes(names),
            host_calls=calls,
        )
        codes = (WarningCode.LAUNCH_BOUND,) if self.is_named else ()
        plain = make_record(config, (self.whole() / 1e3,) * 3, codes=codes)
        profiled = make_record(replace(config, profiler=Profiler.NSYS), (wall_ms / 1e3,) * 3)
        return Explained(profile=profile, plain=plain, profiled=profiled)


def draw(rng: random.Random) -> Drawn:
    causes = rng.sample(
        [cause for cause in IdleCause if cause is not IdleCause.LATE_LAUNCH], rng.randrange(5)
    )
    busy = rng.uniform(1, 100)
    others = {cause: busy * rng.choice((0.001, 0.03, 0.1, 0.3)) * rng.random() for cause in causes}
    return Drawn(busy, busy * rng.uniform(0.2, 2), rng.uniform(1, 3), others, rng.random() < 0.2)


def test_verdict_share_and_gains_are_those_of_the_step_without_a_profiler() -> None:
    """300 drawn steps. All numbers have three digits, so that half a percent is allowed."""
    rng = random.Random(58)
    for drawn in (draw(rng) for _ in range(300)):
        entry = drawn.entry()
        verdict, *others = (finding.text for finding in of_kernels.findings(entry))
        assert limit_of(entry) is drawn.limit, (drawn, verdict)
        if drawn.limit is Limit.DATA:
            wait_ms, step_ms = re.findall(r"for ([\d.]+) ms of ([\d.]+) ms", verdict)[0]
            true_ms = drawn.others[IdleCause.DATA]
            assert float(wait_ms) == pytest.approx(true_ms, rel=5e-3)
        else:
            words = r"busy (?:only )?([\d.]+) % of the step's ([\d.]+) ms"
            share, step_ms = re.findall(words, verdict)[0]
            assert float(share) == pytest.approx(100 * drawn.busy / drawn.whole(), rel=5e-3)
        assert float(step_ms) == pytest.approx(drawn.whole(), rel=5e-3)
        most = 1.005 * (drawn.whole() - drawn.busy)
        told = next((text for text in others if "at most" in text), "")
        for cause, true_ms in ({IdleCause.LATE_LAUNCH: drawn.late()} | drawn.others).items():
            if cause not in of_kernels._BOUNDS:
                continue
            words = f"less without {of_kernels._BOUNDS[cause]}"
            said = [float(ms) for ms in re.findall(rf"([\d.]+) ms {words}", told)]
            assert all(0 <= ms <= most and ms >= 0.995 * true_ms for ms in said), (drawn, told)
            assert said or true_ms <= 0.01 * drawn.whole(), (drawn, told)
        assert all(float(ms) <= most for ms in re.findall(r"([\d.]+) ms less", told)), (drawn, told)
