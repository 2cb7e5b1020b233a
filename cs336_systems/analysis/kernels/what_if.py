"""Predicted time of a profiled step with each way to make it shorter, by changing its queue and replaying it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cs336_systems.analysis.advice import OF_PRECISION, Remedy
from cs336_systems.analysis.kernels.changes import (
    FUSABLE,
    with_fused_adamw,
    with_fused_attention,
    with_fused_neighbours,
    without_exposed_communication,
    without_launches,
)
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.other_precision import at_precision
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.replay import Queue, queue_of
from cs336_systems.analysis.kernels.step_profile import KernelTimes, StepProfile, Work
from cs336_systems.config import Attention, Precision, RunConfig
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.hardware import faster_precisions, find_device
from cs336_systems.costs.time import Limit

MAX_REPLAY_ERROR = 0.02
"""Largest relative error of the unchanged replay up to which replays with changes are used."""
_FULL_PRECISION = re.compile(r"sgemm|f32f32_f32f32_f32")
"""Part of the names of fp32 products of cuBLAS and CUTLASS: ampere_sgemm_, simt_sgemm, xmma_gemm_f32f32_f32f32_f32_."""
_HAS_TF32 = re.compile(r"ampere|hopper|blackwell|(sm|cutlass_?|cutlass_sm)(8|9|1\d)\d")
"""Part of the names of kernels that need at least an Ampere GPU, whose tensor cores have TF32 and bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """The profiled step with one change, predicted."""

    remedy: Remedy
    step_s: float | None
    """None if the profile does not allow a prediction."""
    limit: Limit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Replayed time of a step as it is, and with each change that is open to the run."""

    step_s: float | None
    """None if the profile keeps no single kernels, or if their replay does not give the measured time."""
    limit: Limit | None
    is_host_of_profiler: bool
    """Whether launches take as long as under the profiler, because their time without it is not known."""
    changed: tuple[Counterfactual, ...]
    """The largest gain first, then those that are not known."""

    def gain_s(self, found: Counterfactual) -> float | None:
        """How much shorter the changed step is, to the nanosecond; never -0."""
        return None if self.step_s is None or found.step_s is None else round(self.step_s - found.step_s, 9) + 0.0


def what_if(
    profile: StepProfile,
    config: RunConfig | None = None,
    curves: Curves | None = None,
    launch_s: float | None = None,
) -> WhatIf:
    """Replay the pictured step as it is and with each change.

    `config` is that of the run, `curves` are those of its device, and `launch_s` is the time that the host needs to
    launch a step without a profiler, if it is known.
    """
    plain = None if config is None else config.unprofiled
    queue = _replayable(profile)
    if queue is not None and launch_s is not None:
        queue = queue.with_host(launch_s)
    found = [_changed(remedy, queue, plain, curves) for remedy in _open(profile, plain)]
    as_it_is = None if queue is None else queue.run()
    return WhatIf(
        step_s=None if as_it_is is None else as_it_is.step_s,
        limit=None if as_it_is is None else as_it_is.limit,
        is_host_of_profiler=launch_s is None,
        changed=tuple(sorted(found, key=lambda each: (each.step_s is None, each.step_s or 0.0))),
    )


def unknown_gains(profile: StepProfile, config: RunConfig | None = None) -> WhatIf:
    """The changes that are open to the run, where it is not known how much they would gain."""
    changed = (Counterfactual(remedy=remedy, step_s=None, limit=None) for remedy in _open(profile, config))
    return WhatIf(step_s=None, limit=None, is_host_of_profiler=True, changed=tuple(changed))


def _replayable(profile: StepProfile) -> Queue | None:
    """The queue of the pictured step, if its replay takes the measured time (MAX_REPLAY_ERROR)."""
    queue = queue_of(profile)
    if queue is None or profile.pictured is None:
        return None
    error_s = abs(queue.run().step_s - profile.pictured.wall_s)
    return queue if error_s <= MAX_REPLAY_ERROR * profile.pictured.wall_s else None


def _changed(remedy: Remedy, queue: Queue | None, config: RunConfig | None, curves: Curves | None) -> Counterfactual:
    changed = None if queue is None else _queue_with(remedy, queue, config, curves)
    found = None if changed is None else changed.run()
    return Counterfactual(
        remedy=remedy,
        step_s=None if found is None else found.step_s,
        limit=None if found is None else found.limit,
    )


def _queue_with(remedy: Remedy, queue: Queue, config: RunConfig | None, curves: Curves | None) -> Queue | None:
    optimizer = None if config is None else config.optimizer
    other = None if config is None else remedy.applied_to(config)
    if remedy is Remedy.GRAPHS:
        needs_fused = config is not None and Remedy.OPTIMIZER.is_open_to(config)  # graphs need fused AdamW
        return without_launches((with_fused_adamw(queue, optimizer) if needs_fused else None) or queue)
    if remedy is Remedy.COMPILE:
        return with_fused_neighbours(queue)
    if remedy is Remedy.ATTENTION:
        return with_fused_attention(queue, other, curves)
    if remedy is Remedy.OPTIMIZER:
        return with_fused_adamw(queue, optimizer)
    if remedy is Remedy.OVERLAP:
        return without_exposed_communication(queue)
    if config is None or other is None or curves is None:
        return None
    return at_precision(queue, config, other, curves)


def _open(profile: StepProfile, config: RunConfig | None) -> Iterator[Remedy]:
    """The ways that are open to the run and that would change its kernels."""
    is_on_device = profile.work is Work.KERNELS
    kinds = {row.kind for row in profile.classes if row.phase is not LaunchPhase.OPTIMIZER}
    used = {
        Remedy.GRAPHS: is_on_device,
        Remedy.COMPILE: not kinds.isdisjoint(FUSABLE),
        Remedy.ATTENTION: bool(profile.attention) or (config is not None and config.model.attention is Attention.NAIVE),
        Remedy.OPTIMIZER: is_written_out(profile),
        Remedy.OVERLAP: any(sum(row.exposed_s) for row in profile.communication),
        **dict.fromkeys(map(OF_PRECISION.__getitem__, faster_than_now(profile, config)), is_on_device),
    }
    yield from (remedy for remedy in Remedy if used.get(remedy) and remedy.is_open_to(config))


def is_written_out(profile: StepProfile) -> bool:
    """Whether the optimizer's kernels are mostly those of single operations on tensors."""
    own = [row for row in profile.classes if row.phase is LaunchPhase.OPTIMIZER]
    fused_s = sum(row.total_s for row in own if row.kind is KernelClass.OPTIMIZER)
    return fused_s < sum(row.total_s for row in own) / 2


def full_precision_kernels(profile: StepProfile) -> list[KernelTimes]:
    """The matmuls in true fp32, over all phases together."""
    return [
        row
        for row in profile.kernels
        if row.phase is None
        and row.kind is KernelClass.MATMUL
        and _FULL_PRECISION.search(row.name) is not None
        and "tf32" not in row.name
    ]


def faster_than_now(profile: StepProfile, config: RunConfig | None) -> tuple[Precision, ...]:
    """Precisions with tensor cores on the device, if the matmuls run in a slower precision; empty otherwise."""
    rows = full_precision_kernels(profile)
    device = next(filter(None, map(find_device, profile.device_names)), None)
    is_full = config is None or config.precision is Precision.FP32
    if is_full and not rows:
        return ()
    if device is not None:
        return faster_precisions(device)
    return (Precision.TF32, Precision.BF16) if any(_HAS_TF32.search(row.name) for row in rows) else ()
