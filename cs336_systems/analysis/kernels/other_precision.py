"""The change of a step's queue to another precision: its matmuls, and the casts and passes between them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from cs336_systems.analysis.kernels.changes import joined
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.matmuls import is_matmul_itself
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.replay import Job, Queue
from cs336_systems.config import Phase, Precision, RunConfig
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.forecast.tape import Kind, Operation
from cs336_systems.costs.memory import is_predictable
from cs336_systems.costs.time import kernel_time_s, operations

T = TypeVar("T")
_PHASES = {
    LaunchPhase.FORWARD: Phase.FORWARD,
    LaunchPhase.LOSS: Phase.FORWARD,
    LaunchPhase.BACKWARD: Phase.BACKWARD,
}


def at_precision(queue: Queue, config: RunConfig, other: RunConfig, curves: Curves) -> Queue | None:
    """The queue with matmuls at the precision of `other`, and with its casts and narrower passes between them.

    The matmuls of the queue are matched in order with those of the forecast. None if their numbers differ, as for a
    compiled model, and if the precision or the configuration is not forecast.
    """
    if not (is_predictable(config) and is_predictable(other) and curves.matmuls.get(other.precision)):
        return None
    before, after = operations(config), operations(other)
    jobs: list[Job] = []
    for phase, own in groupby(queue.jobs, lambda job: _PHASES.get(job.phase)):
        found = list(own)
        if phase is None:
            jobs += found
            continue
        changed = _at_precision(found, before.get(phase, []), after.get(phase, []), other, curves)
        if changed is None:
            return None
        now, then = (
            sum(each.views + each.calls * each.launches for each in part.get(phase, [])) for part in (before, after)
        )
        jobs += _launched_in(changed, sum(job.host_s for job in found) * then / max(now, 1))
    return queue.with_jobs(jobs)


def _launched_in(jobs: Sequence[Job], host_s: float) -> list[Job]:
    """The jobs, with host times scaled so that their sum is `host_s`."""
    now_s = sum(job.host_s for job in jobs)
    return [replace(job, host_s=job.host_s * host_s / now_s) for job in jobs] if now_s else list(jobs)


def _at_precision(
    jobs: Sequence[Job], before: Sequence[Operation], after: Sequence[Operation], other: RunConfig, curves: Curves
) -> list[Job] | None:
    """The jobs of one phase, with the matmuls of `after` and with passes changed as from `before` to `after`."""
    products, passes = _segments(_with_whole_attention(jobs), _is_product)
    operations_of, passes_before = _segments(before, _multiplies)
    others_of, passes_after = _segments(after, _multiplies)
    if not len(products) == len(operations_of) == len(others_of):
        return None
    made: list[Job] = []
    for place, between in enumerate(passes):
        usual = products[min(place, len(products) - 1)] if products else jobs[0]
        made += _as_passes(between, usual, passes_before[place], passes_after[place], other.precision, curves)
        if place < len(products):
            made.append(replace(products[place], kernel_s=kernel_time_s(others_of[place], other.precision, curves)))
    return made


def _segments(items: Iterable[T], divides: Callable[[T], bool]) -> tuple[list[T], list[list[T]]]:
    """The items that divide, and the others before, between and after them."""
    dividing: list[T] = []
    others: list[list[T]] = [[]]
    for item in items:
        if divides(item):
            dividing.append(item)
            others.append([])
        else:
            others[-1].append(item)
    return dividing, others


def _is_product(job: Job) -> bool:
    return job.kind is KernelClass.ATTENTION or is_matmul_itself(job.name)


def _multiplies(operation: Operation) -> bool:
    return operation.kind in (Kind.MATMUL, Kind.ATTENTION)


def _with_whole_attention(jobs: Sequence[Job]) -> Iterator[Job]:
    """The jobs, with consecutive kernels of fused attention joined into one."""
    for is_attention, own in groupby(jobs, lambda job: job.kind is KernelClass.ATTENTION):
        run = list(own)
        yield from [joined(run, sum(job.kernel_s for job in run))] if is_attention else run


def _as_passes(
    jobs: Sequence[Job],
    usual: Job,
    before: Sequence[Operation],
    after: Sequence[Operation],
    precision: Precision,
    curves: Curves,
) -> Iterator[Job]:
    """The jobs between two matmuls, changed in number and total time as the passes are from `before` to `after`.

    Helpers of matmuls are left out, because measured times of matmuls include them. If there is no job yet, new ones
    have the launch time of `usual`.
    """
    yield from (job for job in jobs if job.kind is None)
    kernels = [job for job in jobs if job.kind not in (None, KernelClass.MATMUL)]
    counts, times_s = zip(*(_passes(found, precision, curves) for found in (before, after)), strict=True)
    count = len(kernels) + counts[1] - counts[0]
    if count <= 0:
        return
    now_s = sum(job.kernel_s for job in kernels)
    whole_s = now_s * times_s[1] / times_s[0] if kernels and times_s[0] else now_s + times_s[1]
    first = joined(kernels or [usual], whole_s / count, KernelClass.ELEMENT_WISE)
    yield first
    for _ in range(count - 1):
        yield replace(first, wait_s=0.0, exposed_s=0.0, pause_s=0.0, is_after_wait=False)


def _passes(found: Iterable[Operation], precision: Precision, curves: Curves) -> tuple[int, float]:
    """Number and time of the passes over memory among operations."""
    passes = [each for each in found if each.kind is Kind.PASS]
    return sum(each.launches for each in passes), sum(
        each.launches * kernel_time_s(each, precision, curves) for each in passes
    )
