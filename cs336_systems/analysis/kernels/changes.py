"""Changes of a step's queue: what each way to make the step shorter does to its launches and kernels.

A change returns None if its effect cannot be concluded from the queue.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.matmuls import is_matmul_itself
from cs336_systems.analysis.kernels.parts import NO_PART, AttentionNames
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.replay import Job, Queue
from cs336_systems.config import OptimizerKind, RunConfig
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.forecast.tape import MATMULS_OF, Form, Kind
from cs336_systems.costs.memory import is_predictable
from cs336_systems.costs.time import kernel_time_s, operations
from cs336_systems.costs.traffic import OPTIMIZER_BYTES

FUSABLE = (
    KernelClass.ELEMENT_WISE,
    KernelClass.COPY_AND_FILL,
    KernelClass.NORMALISATION,
    KernelClass.REDUCTION,
    KernelClass.SOFTMAX,
)
"""Classes of kernels that a compiler fuses with their neighbours."""
_COMPILED = (LaunchPhase.FORWARD, LaunchPhase.LOSS, LaunchPhase.BACKWARD)
CAUSAL_SPEED_UP = 1.75
"""Speed-up of fused attention by a causal mask, whose fully masked blocks it skips: 1.7 to 1.8 (Dao 2023,
FlashAttention-2, section 3.1)."""
MATMUL_SHARE = 0.85
FUSED_SHARES = {Form.ATTENTION: 0.73, Form.ATTENTION_BACKWARD: 0.63}
"""Shares of the peak that fused attention reaches; matmuls reach 80 to 90 % (FlashAttention-2, section 4.1)."""
WRITTEN_OUT_MATMULS = {Form.ATTENTION: 2, Form.ATTENTION_BACKWARD: 4}
"""Number of matmuls in written-out attention; fused backward has one more, which recomputes the scores."""


def without_launches(queue: Queue) -> Queue:
    """The queue with launches that take the host no time, as in a CUDA graph; its pauses and waits stay."""
    return replace(queue, host_share=0.0)


def with_fused_neighbours(queue: Queue) -> Queue:
    """The queue with fusable kernels between two matmuls as one kernel, which takes as long as the longest of them.

    The fused kernel keeps intermediate results in registers; the longest kernel moves most of the bytes that remain.
    """
    jobs: list[Job] = []
    for is_fused, own in groupby(queue.jobs, lambda job: (job.kind in FUSABLE and job.phase in _COMPILED, job.phase)):
        run = list(own)
        jobs += [joined(run, max(job.kernel_s for job in run))] if is_fused[0] else run
    return queue.with_jobs(jobs)


def joined(jobs: Sequence[Job], kernel_s: float, kind: KernelClass | None = None) -> Job:
    """One job that replaces these; the host needs the mean of their launch times for it."""
    launched = [job.host_s for job in jobs if job.kind is not None] or [0.0]
    return replace(
        jobs[0],
        host_s=fmean(launched),
        kernel_s=kernel_s,
        wait_s=sum(job.wait_s for job in jobs),
        exposed_s=sum(job.exposed_s for job in jobs),
        pause_s=sum(job.pause_s for job in jobs),
        is_after_wait=any(job.is_after_wait for job in jobs),
        kind=kind or jobs[0].kind,
    )


def with_fused_attention(
    queue: Queue, config: RunConfig | None = None, curves: Curves | None = None, names: AttentionNames | None = None
) -> Queue | None:
    """The queue with scores, softmax and values as one kernel, without the copies next to it, which permute heads.

    The kernel's time is that of `config`, the run with fused attention, if the curves have such kernels. Otherwise it
    follows from the time of the present matmuls and the rates above, with a causal mask.

    None unless ranges delimit the parts of attention, and backward has two matmuls for each of forward.
    """
    cores = _cores(queue.jobs, names or AttentionNames())
    if not cores:
        return None
    known_s = _fused_attention_s(config, curves)
    jobs, done = [], 0
    for start, end, form in cores:
        core = queue.jobs[start:end]
        matmuls_s = sum(job.kernel_s for job in core if job.kind is KernelClass.MATMUL)
        fused_s = known_s.get(form, matmuls_s * _fused_over_written_out(form))
        start, end = _with_copies(queue.jobs, start, end)
        jobs += [*queue.jobs[done:start], joined(queue.jobs[start:end], fused_s, KernelClass.ATTENTION)]
        done = end
    return queue.with_jobs([*jobs, *queue.jobs[done:]])


def _fused_over_written_out(form: Form) -> float:
    """Time of a fused kernel over that of the matmuls of written-out attention."""
    return MATMULS_OF[form] / WRITTEN_OUT_MATMULS[form] * MATMUL_SHARE / FUSED_SHARES[form] / CAUSAL_SPEED_UP


def _fused_attention_s(config: RunConfig | None, curves: Curves | None) -> dict[Form, float]:
    """Time of each kernel of fused attention, if the curves have measured times of such kernels."""
    forms = FUSED_SHARES if config is not None and curves is not None and is_predictable(config) else ()
    if (
        config is None
        or curves is None
        or not any(curves.has_form(config.precision, form, is_batched=True) for form in forms)
    ):
        return {}
    found: dict[Form, float] = {}
    for each in (own for phase in operations(config).values() for own in phase):
        is_known = curves.has_form(config.precision, each.form, is_batched=each.batch > 1)
        if each.kind is Kind.ATTENTION and is_known and each.form not in found:
            found[each.form] = kernel_time_s(each, config.precision, curves)
    return found


def _with_copies(jobs: Sequence[Job], start: int, end: int) -> tuple[int, int]:
    """The range of jobs with the copies that are next to it."""
    while start and jobs[start - 1].kind is KernelClass.COPY_AND_FILL:
        start -= 1
    while end < len(jobs) and jobs[end].kind is KernelClass.COPY_AND_FILL:
        end += 1
    return start, end


def _cores(jobs: Sequence[Job], names: AttentionNames) -> list[tuple[int, int, Form]]:
    """Begin and end of the jobs that a fused attention kernel replaces, and which kernel that is.

    In forward these are the jobs within the ranges of attention's parts. In backward they reach from the first to the
    last matmul that differentiates one of these: eager autograd runs in the reverse of forward's order.
    """
    around = [_around(job.path, names) for job in jobs]
    cores, number = [], 0
    for path, own in groupby(around):
        end = number + len(list(own))
        if path is not None:
            cores.append((number, end, Form.ATTENTION))
        number = end
    matmuls = [index for index, job in enumerate(jobs) if is_matmul_itself(job.name)]
    forward = [index for index in matmuls if jobs[index].phase is LaunchPhase.FORWARD]
    backward = [
        index for index in matmuls if jobs[index].phase is LaunchPhase.BACKWARD and not _is_recomputed(jobs[index])
    ]
    if not backward:
        return cores
    if len(backward) != 2 * len(forward):
        return []
    mirrored = [(index, around[forward[-1 - place // 2]] is not None) for place, index in enumerate(backward)]
    for is_attention, pairs in groupby(mirrored, lambda pair: pair[1]):
        if is_attention:
            found = [index for index, _ in pairs]
            cores.append((found[0], found[-1] + 1, Form.ATTENTION_BACKWARD))
    return sorted(cores)


def _around(path: tuple[str, ...], names: AttentionNames) -> tuple[str, ...] | None:
    """The ranges around the part of attention that this path is in; None for none."""
    depth = next((depth for depth, name in enumerate(path) if names.part(name) != NO_PART), None)
    return None if depth is None else path[:depth]


def _is_recomputed(job: Job) -> bool:
    return LaunchPhase.FORWARD in job.path


def with_fused_adamw(queue: Queue, kind: OptimizerKind | None) -> Queue | None:
    """The queue with the optimizer as one kernel, which moves fused AdamW's bytes at the rate of the present kernels.

    An unknown optimizer (None) counts as written out.
    """
    factor = OPTIMIZER_BYTES[OptimizerKind.FUSED] / OPTIMIZER_BYTES[kind or OptimizerKind.ADAMW]
    jobs: list[Job] = []
    for is_update, own in groupby(queue.jobs, _updates):
        found = list(own)
        jobs += [joined(found, factor * sum(job.kernel_s for job in found))] if is_update else found
    return queue.with_jobs(jobs) if any(map(_updates, queue.jobs)) else None


def _updates(job: Job) -> bool:
    return job.phase is LaunchPhase.OPTIMIZER and job.kind is not None


def without_exposed_communication(queue: Queue) -> Queue | None:
    """The queue in which neither a kernel nor the end of the step waits for a collective."""
    if not queue.exposed_tail_s and not any(job.exposed_s for job in queue.jobs):
        return None
    jobs = [replace(job, wait_s=max(0.0, job.wait_s - job.exposed_s), exposed_s=0.0) for job in queue.jobs]
    return replace(queue, jobs=jobs, tail_s=max(0.0, queue.tail_s - queue.exposed_tail_s), exposed_tail_s=0.0)
