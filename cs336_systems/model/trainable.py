"""A model as a training step uses it: its loss and its optimizer; and the model that a configuration names."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cs336_systems.config import CompileMode, LossKind, RunConfig
from cs336_systems.model.annotate import annotate
from cs336_systems.model.optimizer import make_optimizer
from cs336_systems.model.own import (
    Loss,
    call_factory,
    check_logits,
    checkpoint_each_block,
    load_factory,
    own_loss,
    own_optimizer,
)
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.ranges import Range

Criterion = Callable[[Tensor, Tensor, int], Tensor]
"""The mean loss, from logits, targets and the size of the vocabulary; logits beyond that size are padding."""


class Trainable:
    """A model, unchanged, with PyTorch's cross-entropy; `FastTrainable` in `model/fast` computes faster."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.model, self.config = model, config
        if config.checkpoint_blocks and config.model_factory is not None:
            checkpoint_each_block(model)
        self.criterion: Criterion = cross_entropy
        self.loss = self._compiled(own_loss(model) if config.loss is LossKind.MODEL else self._loss)
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
        if config.own_optimizer is not None:
            return own_optimizer(config.own_optimizer, self.model.parameters(), config.learning_rate)
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


def make_model(config: RunConfig) -> nn.Module:
    """The model of the configuration, made and initialised on its device."""
    with torch.device(config.device.value):
        if config.model_factory is None:
            return TransformerLM(config.model)
        return call_factory(load_factory(config.model_factory), config.model).to(config.device.value)
