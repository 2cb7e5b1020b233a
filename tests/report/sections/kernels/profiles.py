"""Hand-made step profiles, small enough to work out by hand; all times here are milliseconds over
both steps.

make_profile, a training step on a GPU (50 kernels, 40 ms of kernels, 52 ms of wall time in two
steps):

    forward    14 kernels 10 ms: 8 gemm_a 6 ms, 4 mul 3 ms, 2 softmax 1 ms;                 16 ms
    wall,  6.0 ms idle backward   16 kernels 20 ms: 8 gemm_a 8 ms, 4 gemm_b 8 ms, 2 softmax 2 ms, 2
    fill 2 ms; 24 ms wall,  3.8 ms idle optimizer  20 kernels 10 ms: 16 mul 8 ms, 4 of an unknown
    kernel 2 ms;                  12 ms wall,  2.0 ms idle
"""

import dataclasses
from dataclasses import replace
from functools import partial

from cs336.analysis.kernels.classes import KernelClass, classify_kernel
from cs336.analysis.kernels.phases import LaunchPhase, PhaseSource
from cs336.analysis.kernels.short_names import short_name
from cs336.analysis.kernels.step_profile import (
    AttentionPart,
    AttentionTimes,
    ClassTimes,
    CommunicationTimes,
    Gap,
    HostCalls,
    IdleCause,
    IdleTimes,
    KernelTimes,
    Left,
    ModuleTimes,
    PhaseTimes,
    PicturedStep,
    Piece,
    RankTimes,
    StepProfile,
    Timed,
    Window,
    Work,
)
from cs336.config import Profiler
from cs336.costs.communication import Collective
from cs336.report.sections.kernels.entry import Explained
from tests.report.making import H200, make_config, make_record
from tests.report.reading import csv_rows

DATA, FORWARD, BACKWARD, OPTIMIZER, UNATTRIBUTED = (
    LaunchPhase.DATA,
    LaunchPhase.FORWARD,
    LaunchPhase.BACKWARD,
    LaunchPhase.OPTIMIZER,
    LaunchPhase.UNATTRIBUTED,
)

GEMM_A = "ampere_sgemm_128x64_tn"
GEMM_B = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)"
GEMM_BF16 = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN"
MUL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float>>, std::array<char *, 3>>(int, T2, T3)"
)
FILL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
    "std::array<char *, 1>>(int)"
)
SOFTMAX = (
    "void cunn_SoftMaxForward<4, float, float, float, SoftMaxForwardEpilogue>(float *, const "
    "float *, int)"
)
SOFTMAX_BACKWARD = (
    "void softmax_warp_backward<float, float, float, 9, false, false>(float *, const float *, int)"
)
UNKNOWN = "mystery_of_mine"

NAMES = {
    FORWARD: ((GEMM_A, 8, 6), (MUL, 4, 3), (SOFTMAX, 2, 1)),
    BACKWARD: ((GEMM_A, 8, 8), (GEMM_B, 4, 8), (SOFTMAX_BACKWARD, 2, 2), (FILL, 2, 2)),
    OPTIMIZER: ((MUL, 16, 8), (UNKNOWN, 4, 2)),
}
"""Name, count and milliseconds of the kernels of each phase."""


def seconds(*times_ms):
    return tuple(time_ms / 1e3 for time_ms in times_ms)


def make(kind, *values, **fields):
    """A part of a profile by its fields in their order, count and time after the two that tell
    parts apart; of those, times are in milliseconds.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    if issubclass(kind, Timed):
        names = [*names[2:4], *names[:2], *names[4:]]
    given = dict(zip(names, values, strict=False))
    for name in (name for name in given if name.endswith("_s")):
        given[name] = seconds(*given[name]) if isinstance(given[name], tuple) else given[name] / 1e3
    return kind(**given, **fields)


make_attention, make_module, make_idle, make_times, make_window = (
    partial(make, kind)
    for kind in (AttentionTimes, ModuleTimes, IdleTimes, CommunicationTimes, Window)
)
make_call = partial(make, HostCalls, is_launch=False, is_wait=False)


def make_phase(phase, launches, kernel_ms, wall_ms, host_ms, **fields):
    """Of two steps: pairs of numbers."""
    none = (0.0,) * len(launches)
    return PhaseTimes(
        **{
            "phase": phase,
            "launches": launches,
            "kernel_s": seconds(*kernel_ms),
            "busy_s": seconds(*kernel_ms),
            "wall_s": seconds(*wall_ms),
            "host_s": seconds(*host_ms),
            "recomputed_s": none,
            "copies": (0,) * len(launches),
            "copy_s": none,
            **fields,
        }
    )


def make_kernel(name, count, total_ms, phase=None, **fields):
    """Median 0.9, least 0.5, most 2, deviation 0.1 of the mean."""
    mean_s = total_ms / count / 1e3
    return KernelTimes(
        **{
            "name": name,
            "short_name": short_name(name),
            "kind": classify_kernel(name),
            "phase": phase,
            "count": count,
            "total_s": total_ms / 1e3,
            "mean_s": mean_s,
            "median_s": 0.9 * mean_s,
            "min_s": 0.5 * mean_s,
            "max_s": 2 * mean_s,
            "stdev_s": 0.1 * mean_s,
            **fields,
        }
    )


def make_kernels(names):
    """Those of the whole step, then those of each phase, each by time."""
    whole = {}
    for found in names.values():
        for name, count, total_ms in found:
            before = whole.get(name, (0, 0))
            whole[name] = (before[0] + count, before[1] + total_ms)
    groups = [(None, [(name, *sums) for name, sums in whole.items()]), *names.items()]
    return tuple(
        make_kernel(name, count, total_ms, phase)
        for phase, found in groups
        for name, count, total_ms in sorted(found, key=lambda kernel: -kernel[2])
    )


def make_classes(names):
    sums = {}
    for phase, found in names.items():
        for name, *own in found:
            kind = classify_kernel(name)
            sums[kind, phase] = [
                sum(both) for both in zip(sums.get((kind, phase), (0, 0)), own, strict=True)
            ]
    return tuple(make(ClassTimes, *key, *own) for key, own in sums.items())


make_gap = partial(
    make, Gap, before=short_name(MUL), after=short_name(GEMM_A), module=(), host_call=""
)


def make_piece(kind, start_ms, end_ms, stream=7):
    start_s, end_s = start_ms / 1e3, end_ms / 1e3
    return Piece(stream=stream, kind=kind, start_s=start_s, end_s=end_s, busy_s=end_s - start_s)


def make_profile(**changes):
    """A training step on a GPU: two blocks, one kernel of unknown class, three kinds of idle
    time.
    """
    return StepProfile(
        **{
            "source": "small.nsys-rep",
            "work": Work.KERNELS,
            "device_names": (H200,),
            "phases_from": (PhaseSource.RANGES,),
            "num_steps": 2,
            "is_whole_trace": False,
            "is_warmup": False,
            "num_kernels": 77,
            "kernel_s": 0.0615,
            "left": Left(
                warmup=25,
                warmup_s=0.020,
                outside=1,
                outside_s=0.001,
                no_launch=1,
                no_launch_s=0.0005,
            ),
            "step_s": seconds(25, 27),
            "phases": (
                make_phase(FORWARD, (7, 7), (4.9, 5.1), (8, 8), (7, 7)),
                make_phase(
                    BACKWARD,
                    (8, 8),
                    (10, 10),
                    (12, 12),
                    (11, 11),
                    busy_s=seconds(10.1, 10.1),
                    copies=(1, 1),
                    copy_s=seconds(0.1, 0.1),
                ),
                make_phase(OPTIMIZER, (10, 10), (5, 5), (5, 7), (4, 4)),
            ),
            "kernels": make_kernels(NAMES),
            "classes": make_classes(NAMES),
            "attention": (
                make_attention(AttentionPart.SCORES, FORWARD, 4, 2.5, 2, 1.5, 3_000_000_000),
                make_attention(AttentionPart.SOFTMAX, FORWARD, 2, 1, 0, 0, 150_000_000),
                make_attention(AttentionPart.VALUES, FORWARD, 2, 1.5, 2, 1.5, 3_000_000_000),
                make_attention(AttentionPart.SCORES, BACKWARD, 4, 4, 4, 4, 6_000_000_000),
                make_attention(AttentionPart.SOFTMAX, BACKWARD, 2, 2, 0, 0, 120_000_000),
                make_attention(AttentionPart.VALUES, BACKWARD, 4, 4, 4, 4, 6_000_000_000),
            ),
            "modules": (
                make_module((), OPTIMIZER, 20, 10),
                make_module(("block.0", "attention"), BACKWARD, 10, 10),
                make_module(("block.1", "ffn"), BACKWARD, 2, 5),
                make_module(("block.0", "ffn"), BACKWARD, 2, 3),
                make_module(("block.0", "attention", "attention.scores"), FORWARD, 4, 2.5),
                make_module(("block.1", "ffn"), FORWARD, 2, 2),
                make_module(("block.1", "norm"), FORWARD, 2, 2),
                make_module((), BACKWARD, 2, 2),
                make_module(("block.0", "attention", "attention.values"), FORWARD, 2, 1.5),
                make_module(("block.0", "attention", "attention.softmax"), FORWARD, 2, 1),
                make_module(("block.0", "ffn"), FORWARD, 2, 1),
            ),
            "idle": (
                make_idle(FORWARD, IdleCause.LATE_LAUNCH, 10, 5),
                make_idle(BACKWARD, IdleCause.HOST_WAITED, 2, 3),
                make_idle(OPTIMIZER, IdleCause.LATE_LAUNCH, 4, 1.5),
                make_idle(FORWARD, IdleCause.HOST_PAUSE, 1, 1),
                make_idle(BACKWARD, IdleCause.BETWEEN_KERNELS, 8, 0.8),
                make_idle(OPTIMIZER, IdleCause.END_OF_STEP, 2, 0.5),
            ),
            "gaps": (
                make_gap(
                    0,
                    14,
                    1.6,
                    BACKWARD,
                    IdleCause.HOST_WAITED,
                    module=("block.0", "ffn"),
                    host_call="cudaStreamSynchronize",
                ),
                make_gap(
                    1, 14, 1.4, BACKWARD, IdleCause.HOST_WAITED, host_call="cudaStreamSynchronize"
                ),
                make_gap(1, 3, 1, FORWARD, IdleCause.HOST_PAUSE, module=("block.1", "ffn")),
                make_gap(
                    0,
                    24.75,
                    0.25,
                    OPTIMIZER,
                    IdleCause.END_OF_STEP,
                    after="",
                    host_call="cudaDeviceSynchronize",
                ),
            ),
            "host_calls": (
                make_call("cudaStreamSynchronize", BACKWARD, 2, 3, is_wait=True),
                make_call("cudaDeviceSynchronize", UNATTRIBUTED, 2, 1, is_wait=True),
                make_call("cudaLaunchKernel", OPTIMIZER, 20, 0.1, is_launch=True),
                make_call("cudaLaunchKernel", BACKWARD, 16, 0.08, is_launch=True),
                make_call("cudaLaunchKernel", FORWARD, 14, 0.07, is_launch=True),
                make_call("cudaMemcpyAsync", BACKWARD, 2, 0.02, is_launch=True, is_wait=True),
                make_call("cudaGetDevice", FORWARD, 4, 0.002),
            ),
            "pictured": PicturedStep(
                step=0,
                wall_s=0.025,
                windows=(
                    make_window(FORWARD, 0, 7, 0, 8),
                    make_window(BACKWARD, 7, 18, 8, 20),
                    make_window(OPTIMIZER, 18, 22, 20, 25),
                ),
                pieces=(
                    make_piece(KernelClass.MATMUL, 0.5, 3.4),
                    make_piece(KernelClass.ELEMENT_WISE, 4, 5.5),
                    make_piece(KernelClass.SOFTMAX, 7.5, 8),
                    make_piece(KernelClass.MATMUL, 8, 14),
                    make_piece(KernelClass.MATMUL, 15.6, 17.6),
                    make_piece(KernelClass.SOFTMAX, 17.6, 18.6),
                    make_piece(KernelClass.COPY_AND_FILL, 18.6, 19.6),
                    make_piece(KernelClass.ELEMENT_WISE, 20, 24),
                    make_piece(KernelClass.OTHER, 23.75, 24.75, stream=20),
                ),
            ),
            "notes": (),
            **changes,
        }
    )


def make_shared(**changes) -> StepProfile:
    """Per step 9 ms of collectives: 2 in forward, 1 of them exposed, 5 in backward, 2, and 2 in
    communication, both.
    """
    made = make_profile()
    return replace(
        made,
        phases=(
            *made.phases[:2],
            make_phase(LaunchPhase.COMMUNICATION, (0, 0), (0, 0), (2, 2), (1, 1)),
            *made.phases[2:],
        ),
        communication=(
            make_times(FORWARD, Collective.ALL_GATHER, (2, 2), (3, 1), (1, 1)),
            make_times(FORWARD, None, (2, 2), (3, 1), (1, 1)),
            make_times(BACKWARD, Collective.ALL_GATHER, (1, 1), (2, 2), (0, 0)),
            make_times(BACKWARD, Collective.REDUCE_SCATTER, (1, 1), (4, 4), (3, 1)),
            make_times(BACKWARD, None, (2, 2), (5, 5), (3, 1)),
            make_times(
                LaunchPhase.COMMUNICATION, Collective.REDUCE_SCATTER, (1, 0), (2, 2), (2, 2)
            ),
            make_times(LaunchPhase.COMMUNICATION, None, (1, 0), (2, 2), (2, 2)),
        ),
        **changes,
    )


def make_ranks(*waited_ms) -> tuple[RankTimes, ...]:
    made = make_shared()
    return tuple(
        RankTimes(
            rank=rank,
            step_s=made.step_s,
            phases=made.phases,
            communication=made.communication,
            waited_s=None if own is None else seconds(*own),
        )
        for rank, own in enumerate(waited_ms)
    )


OPERATORS = {
    FORWARD: (("aten::mm", 6, 12), ("aten::_softmax", 2, 4), ("aten::mul", 8, 4)),
    BACKWARD: (("aten::mm", 12, 24), ("aten::mul", 8, 8)),
    OPTIMIZER: (("aten::mul", 20, 6), ("aten::unheard_of", 2, 2)),
}
"""Name, count and milliseconds of the operators of each phase."""


def make_cpu_profile(**changes):
    """A training step on a CPU: 58 operators, 60 ms of them, 64 ms of wall time in two steps; no
    attention ranges.
    """
    left = Left(warmup=0, warmup_s=0.0, outside=0, outside_s=0.0, no_launch=0, no_launch_s=0.0)
    whole = make_profile(
        source="tiny.json",
        work=Work.OPERATORS,
        device_names=("a CPU",),
        num_kernels=58,
        kernel_s=0.060,
        left=left,
        step_s=seconds(32, 32),
        phases=(
            make_phase(FORWARD, (8, 8), (10, 10), (11, 11), (11, 11)),
            make_phase(BACKWARD, (10, 10), (16, 16), (17, 17), (17, 17)),
            make_phase(OPTIMIZER, (11, 11), (4, 4), (4, 4), (4, 4)),
        ),
        kernels=make_kernels(OPERATORS),
        classes=make_classes(OPERATORS),
        attention=(),
        modules=tuple(
            make_module(
                (),
                phase,
                sum(count for _, count, _ in found),
                sum(time_ms for *_, time_ms in found),
            )
            for phase, found in OPERATORS.items()
        ),
        idle=(),
        gaps=(),
        host_calls=(),
        pictured=None,
    )
    return replace(whole, **changes)


def make_entry(profile=None, step_s=(0.030, 0.032), plain_s=(0.024, 0.026), size="small", **fields):
    """A run under nsys; the forward of a plain run takes a quarter of its step."""
    config = make_config(size, profiler=Profiler.NSYS, **fields)
    plain = None if plain_s is None else make_record(config.unprofiled, plain_s)
    profiled = make_record(config, step_s)
    return Explained(profile=profile or make_profile(), plain=plain, profiled=profiled)


def headings(table):
    return [heading.name for heading in table.headings]


def numbers(section, name, **chosen):
    return [float(row[name]) for row in csv_rows(section, **chosen)]
