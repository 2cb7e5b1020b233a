"""Which of several ranks a watched loop runs on, how long the rank computes by itself, and how
often the ranks average their gradients.

No collective is called: under `if rank == 0` it would hang.
"""

import contextlib
import itertools
import statistics
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from ..config import Phase
from ..loop_record import LoopRank
from .marks import WatchedStep
from .observer import Observer
from .slow_steps import SlowSteps

WAITING = frozenset({Phase.BACKWARD, Phase.OPTIMIZER})
"""Phases in which a rank may wait for the others: DistributedDataParallel averages in backward."""
LOOPS = itertools.count()
"""Numbers the loops of this process, alike on all ranks that make the same loops."""
IS_SYNCED = "require_backward_grad_sync"
"""Attribute of DistributedDataParallel: whether backward averages the gradients."""


class Syncs(Observer):
    """Counts, by update, the forward passes whose backward pass averages the gradients over the
    ranks, as the wrapper itself says before each (`no_sync` unsets it).
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._model = weakref.ref(models[0])
        # of several models, a pass is not known to be of this one
        self.sees_model = len(models) == 1 and hasattr(models[0], IS_SYNCED)
        self._synced = 0
        self.per_update: int | None = None
        """The least number in an update; None where none was seen."""

    def phase_begins(self, phase: Phase | None) -> None:
        """Count a forward pass, or end an update."""
        if phase is Phase.FORWARD:
            self._synced += bool(getattr(self._model(), IS_SYNCED, False))
        elif phase is Phase.OPTIMIZER:
            if self._synced:
                self.per_update = min(self._synced, self.per_update or self._synced)
            self._synced = 0


class Ranks(Observer):
    """Learns the rank, and a name that all ranks of the loop share, from the group's store."""

    def __init__(self, name: str, models: Sequence[nn.Module], slow_steps: SlowSteps) -> None:
        self._slow_steps = slow_steps
        self._models = tuple(map(weakref.ref, models))
        self._key = f"watched/{name}/{next(LOOPS)}"
        self._has_own = False
        self._rank, self._world_size, self._run = 0, 1, ""

    def step_begins(self, number: int) -> None:
        """Ask at steps 0, 1, 2, 4, 8, ..., until the first rank has named the run."""
        if self._run or number < 0 or number & (number - 1):
            return
        self._see_group()
        if self._world_size < 2 or not dist.is_initialized():
            return
        self._has_own = all(_waits_in_backward(model()) for model in self._models)
        # a store that has ended with its process is no reason to end the loop
        with contextlib.suppress(RuntimeError, ValueError):
            store = dist.distributed_c10d._get_default_store()
            if self._rank == 0:
                store.set(self._key, uuid.uuid4().hex)
            if store.check([self._key]):
                self._run = store.get(self._key).decode()

    def steps_read(self, *_: object) -> None:
        """Learn the rank of a process that has joined a group, which may end before the loop."""
        self._see_group()

    def _see_group(self) -> None:
        if dist.is_available() and dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, or the only one."""
        return self._rank == 0

    def rank(self, steps: Sequence[WatchedStep]) -> LoopRank | None:
        """This rank of the loop with these measured steps; None for one process."""
        if self._world_size < 2:
            return None
        rank = LoopRank(rank=self._rank, world_size=self._world_size, run=self._run)
        if not self._has_own:
            return rank
        without_waits = list(map(_without_waits, steps))
        return replace(
            rank,
            own_s=statistics.median([step.interval_s for step in without_waits]),
            first_step=self._slow_steps.num_read - len(steps),
            late_steps=self._slow_steps.slow_steps((), without_waits),
        )


def _without_waits(step: WatchedStep) -> WatchedStep:
    """The step with 0 seconds in the phases in which it may wait for another rank."""
    phases_s = dict(step.times.phases_s)
    for phase in WAITING & phases_s.keys():
        phases_s[phase] = 0.0
    times = replace(step.times, step_s=sum(phases_s.values()), phases_s=phases_s)
    return replace(step, times=times)


def _waits_in_backward(model: nn.Module | None) -> bool:
    """Whether the model's first collective in a step is in backward: it is wrapped in
    DistributedDataParallel, has no buffers that are broadcast before forward, and no norm that
    averages over the ranks in forward.
    """
    if model is None or not hasattr(model, IS_SYNCED):
        return False
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return False
    broadcasts = getattr(model, "broadcast_buffers", True)
    return not (broadcasts and any(True for _ in model.buffers()))
