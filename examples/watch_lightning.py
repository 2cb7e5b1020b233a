"""Watches the steps of a Lightning Trainer: Trainer(..., callbacks=[Watched("model")])."""

from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Callback

from cs336 import watch


class Watched(Callback):  # type: ignore[misc]
    """`model` is the attribute of the LightningModule that its `training_step` calls; `options`
    go to `watch`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.model, self.options = model, options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook the model and the optimizers."""
        self.watched = watch(getattr(pl_module, self.model), trainer.optimizers, **self.options)

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Begin a step."""
        self.step: AbstractContextManager[None] = self.watched.step()
        self.step.__enter__()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """End the step, after the optimizer."""
        self.step.__exit__(None, None, None)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Print the table and keep the record."""
        self.watched.report()
