"""Watches the steps of a Hugging Face Trainer: Trainer(..., callbacks=[Watched()])."""

from contextlib import AbstractContextManager
from typing import Any

from transformers import TrainerCallback

from cs336 import watch


class Watched(TrainerCallback):  # type: ignore[misc]
    """A step is what lies between the Trainer's own beginning and end of it; `options` are those
    of `watch`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        """Hook the model and the optimizer."""
        self.watched = watch(model, optimizer, **self.options)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin a step."""
        self.step: AbstractContextManager[None] = self.watched.step()
        self.step.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End the step, after the optimizer."""
        self.step.__exit__(None, None, None)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Print the table and keep the record."""
        self.watched.report()
