"""How often DistributedDataParallel averages the gradients in an update of a watched loop."""

import weakref
from collections.abc import Sequence

from torch import nn

from ..config import Phase
from .observer import Observer


class Syncs(Observer):
    """Counts, by update, the forward passes whose backward pass averages the gradients over the
    ranks, as the wrapper itself says before each (`no_sync` unsets it).
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        # of several models, a pass is not known to be of this one
        self._model = weakref.ref(models[0]) if len(models) == 1 else None
        if not hasattr(models[0], "require_backward_grad_sync"):
            self._model = None
        self.sees_model = self._model is not None
        self._synced = 0
        self.per_update: int | None = None
        """The least number in an update; None where none was seen."""

    def phase_begins(self, phase: Phase | None) -> None:
        """Count a forward pass, or end an update."""
        if self._model is None:
            return
        if phase is Phase.FORWARD:
            model = self._model()
            self._synced += bool(getattr(model, "require_backward_grad_sync", False))
        elif phase is Phase.OPTIMIZER:
            if self._synced:
                self.per_update = min(self._synced, self.per_update or self._synced)
            self._synced = 0
