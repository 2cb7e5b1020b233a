"""A model as a training step uses it, with its loss and its optimizer."""

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import CompileMode, LossKind, RunConfig
from ..ranges import Range
from .annotate import annotate
from .blocks import blocks_of
from .optimizer import make_optimizer
from .transformer import TransformerLM
from .user_code import (
    Loss,
    call_factory,
    check_logits,
    checked_module,
    load_factory,
    own_loss,
    own_optimizer,
)


def checkpoint_each_block(model: nn.Module) -> None:
    """Let each block save its inputs alone, and compute the rest again in backward; raise
    ValueError without blocks.
    """
    blocks = list(blocks_of(model))
    if not blocks:
        raise ValueError(
            "--checkpoint-blocks needs blocks in a torch.nn.ModuleList, and the model has none; "
            "leave the flag out"
        )
    for block in blocks:
        block.forward = functools.partial(_checkpointed, block.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Call a block under an activation checkpoint, and without its key-value cache for generating:
    the recomputation in backward would append to the cache a second time.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is not None:

        def without_cache(value: object) -> object:
            """The argument of the block, or None in place of a key-value cache of transformers."""
            return None if isinstance(value, caches.Cache) else value

        args = tuple(map(without_cache, args))
        kwargs = {name: without_cache(value) for name, value in kwargs.items()}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return checkpoint(forward, *args, **kwargs, use_reentrant=False)


Criterion = Callable[[Tensor, Tensor, int], Tensor]
"""The mean loss, from logits, targets and the size of the vocabulary; logits beyond that size
are padding.
"""


class Trainable:
    """A model, unchanged, with PyTorch's cross-entropy; `FastTrainable` in `model/fast` computes
    faster.
    """

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        """Wrap `model` with activation checkpoints, its loss and compilation, as `config` says."""
        self.model, self.config = model, config
        if config.checkpoint_blocks and config.model_factory is not None:
            checkpoint_each_block(model)
        self.criterion: Criterion = cross_entropy
        self.loss = self._compiled(own_loss(model) if config.loss is LossKind.MODEL else self._loss)
        """Mean cross-entropy of a batch, compiled as the configuration says."""

    # no shapes are declared below, because the compiler cannot trace the checks of them that tests
    # install
    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the model's logits for `tokens` against `targets`, both (batch,
        seq).
        """
        vocab_size = self.config.model.vocab_size
        logits = check_logits(self.model(tokens), targets, vocab_size)
        with annotate(Range.LOSS):
            return self.criterion(logits, targets, vocab_size)

    def _compiled(self, loss: Loss) -> Loss:
        """The loss function, compiled by torch.compile in the configured mode, or as it is without
        one.
        """
        mode = self.config.compile
        if mode is CompileMode.NONE:
            return loss
        # to name the default mode imports the whole compiler at once
        name = None if mode is CompileMode.DEFAULT else mode.value
        return cast("Loss", torch.compile(loss, mode=name))

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The configuration's optimizer, for all parameters."""
        config = self.config
        if config.own_optimizer is not None:
            return own_optimizer(
                config.own_optimizer, self.model.parameters(), config.learning_rate
            )
        return make_optimizer(
            config.optimizer,
            self.model.parameters(),
            lr=config.learning_rate,
            capturable=config.cuda_graph,
        )


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
        model = checked_module(make_of_user(config, config.model_factory))
        return model.to(config.device.value)


def make_of_user(config: RunConfig, factory: str) -> nn.Module | Callable[[], object]:
    """What a user's factory makes on the device of the configuration: a model or a step."""
    with torch.device(config.device.value):
        return call_factory(load_factory(factory), config.model, batch_size=config.batch_size)
