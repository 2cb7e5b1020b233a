"""The fast model as a training step uses it: its loss, and the optimizer that writes the copies of its weights."""

import torch
from torch import Tensor

from cs336_systems.config import RunConfig
from cs336_systems.model.annotate import annotate
from cs336_systems.model.fast.cross_entropy import fused_cross_entropy
from cs336_systems.model.fast.master_adamw import MasterAdamW, moments_type
from cs336_systems.model.fast.model import FastLM
from cs336_systems.model.own import Loss
from cs336_systems.model.trainable import Trainable, cross_entropy, mode_of
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.ranges import Range


class FastTrainable(Trainable):
    """The fast model with the parameters of `reference`."""

    def __init__(self, reference: TransformerLM, config: RunConfig) -> None:
        self._fast = FastLM(reference, config)
        super().__init__(self._fast, config)
        if config.fused_loss:
            self.criterion = fused_cross_entropy
        elif config.compile_blocks:
            self.criterion = torch.compile(cross_entropy)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.config.loss_chunks > 1:
            return self._fast.chunked_loss(tokens, targets)
        logits = self._fast.padded_logits(tokens)
        with annotate(Range.LOSS):
            return self.criterion(logits, targets, self.config.model.vocab_size)

    def _compiled(self, loss: Loss) -> Loss:
        if not self.config.compile_blocks:
            return super()._compiled(loss)
        for block in self._fast.layers:
            block.compile(mode=mode_of(self.config.compile))
        return loss

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The configuration's optimizer, or one that updates the parameters and writes their copies."""
        if not self._fast.weights:
            return super().make_optimizer()
        return MasterAdamW(
            self._fast.weights,
            self.config.learning_rate,
            moments=moments_type(self.config),
            splits=self.config.split_masters,
        )
