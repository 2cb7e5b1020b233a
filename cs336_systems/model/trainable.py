"""The model that a configuration names, this project's or a user's own, with its loss and its optimizer."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cs336_systems import find_modules_of_the_user
from cs336_systems.config import CompileMode, ModelConfig, RunConfig
from cs336_systems.model.annotate import annotate
from cs336_systems.model.optimizer import make_optimizer
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.ranges import Range

Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of a batch, from its tokens and its targets."""
Criterion = Callable[[Tensor, Tensor, int], Tensor]
"""The mean loss, from logits, targets and the size of the vocabulary; logits beyond that size are padding."""


class Trainable:
    """A model, unchanged, with PyTorch's cross-entropy; `FastTrainable` in `model/fast` computes faster."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.model, self.config = model, config
        self.criterion: Criterion = cross_entropy
        self.loss = self._compiled(self._loss)
        """Mean cross-entropy of a batch, compiled as the configuration says."""

    # no shapes are declared below, because the compiler cannot trace the checks of them that tests install
    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        vocab_size = self.config.model.vocab_size
        logits = check_logits(self.model(tokens), targets, vocab_size)
        with annotate(Range.LOSS):
            return self.criterion(logits, targets, vocab_size)

    def _compiled(self, loss: Loss) -> Loss:
        mode = self.config.compile
        return loss if mode is CompileMode.NONE else cast("Loss", torch.compile(loss, mode=mode_of(mode)))

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The configuration's optimizer, for all parameters."""
        config = self.config
        return make_optimizer(
            config.optimizer, self.model.parameters(), lr=config.learning_rate, capturable=config.cuda_graph
        )


def mode_of(mode: CompileMode) -> str | None:
    """The mode as torch.compile has it."""
    return None if mode is CompileMode.DEFAULT else mode.value


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean over all targets; logits from `vocab_size` on are left out."""
    if logits.shape[-1] > vocab_size:
        logits = logits[..., :vocab_size]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_logits(logits: object, targets: Tensor, vocab_size: int) -> Tensor:
    """The logits; raise ValueError if a user's own model returned something else."""
    if not isinstance(logits, Tensor) or logits.shape != (*targets.shape, vocab_size):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"the model must return logits of shape {(*targets.shape, vocab_size)}, got {found}")
    return logits


def make_model(config: RunConfig) -> nn.Module:
    """The model of the configuration, made and initialised on its device."""
    with torch.device(config.device.value):
        if config.model_factory is None:
            return TransformerLM(config.model)
        return call_factory(load_factory(config.model_factory), config.model).to(config.device.value)


def load_factory(name: str) -> Callable[..., nn.Module]:
    """The factory that --model names; raise ValueError where it is not there."""
    return load_callable(name, "--model", "a callable that makes a model")


def load_callable(name: str, flag: str, needed: str) -> Callable[..., Any]:
    """Import `package.module:name`, looking in the current directory too; raise ValueError where it is not there.

    Messages name the flag, and say what was needed.
    """
    module_name, _, attribute = name.partition(":")
    find_modules_of_the_user()
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{flag} {name}: {error}") from error
    if not callable(found):
        raise ValueError(f"{flag} {name}: needed {needed}, got {type(found).__name__}")
    return found


def call_factory(factory: Callable[..., nn.Module], model: ModelConfig) -> nn.Module:
    """Call the factory with the fields of `model` that its signature names."""
    known = {field.name: getattr(model, field.name) for field in fields(model)}
    parameters = inspect.signature(factory).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in required if p.name not in known]
    if missing:
        raise ValueError(f"the model factory needs {', '.join(missing)}; it can have: {', '.join(known)}")
    made = factory(**{p.name: known[p.name] for p in parameters if p.name in known})
    if not isinstance(made, nn.Module):
        raise ValueError(f"the model factory must return a torch.nn.Module, got {type(made).__name__}")
    return made
