"""The reference model computed faster, from the same parameters, and its loss and optimizer in a
training step.
"""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...config import RunConfig, SdpaBackend
from ...ranges import Range, block_range
from ...tried_imports import forget_answer
from ...waits import waiting_for
from ..annotate import annotate
from ..trainable import Trainable
from ..transformer import Block, Mask, Rotations, TransformerLM, attention_backend
from ..user_code import Loss
from .blocks import (
    AddNorm,
    CopiedBlock,
    Deferred,
    DeferredBlock,
    FusedEmbedding,
    PaddedHead,
    SelectiveBlock,
    checkpointed,
)
from .cross_entropy import chunked_cross_entropy, fused_cross_entropy
from .fp8 import KeptScale, update_scales
from .master_adamw import MasterAdamW, storage_of
from .packages import IMPORTED_BY, OF_PACKAGE, module_importing, package_needed
from .weights import COPY_DTYPE, CopyMaker, Weight, drop_gradients

HOPPER = (9, 0)
"""Compute capability of the GPUs for which QuACK's tiles and FlashAttention 4's were chosen."""


class FastLM(nn.Module):
    """The model `reference`, with the same parameters under the same names, computed as the
    settings say.

    These settings change how it computes: copies of weights, fused blocks, fp8, a padded
    vocabulary, checkpoints. Parts that no setting changes are taken from the reference. It cannot
    be saved or loaded: copies and split masters are no part of its state dict.
    """

    def __init__(self, reference: TransformerLM, settings: RunConfig) -> None:
        super().__init__()
        self.config, self._settings = reference.config, settings
        check_device(settings, reference.lm_head.weight.device)
        maker = CopyMaker(settings, reference) if settings.cast_once else None
        # in the reference's order, which is that of the parameters
        self.token_embeddings = reference.token_embeddings
        self.layers = nn.ModuleList(reference.layers)
        self.ln_final: nn.Module = reference.ln_final
        if maker is not None:
            blocks = [cast("Block", block) for block in reference.layers]
            self.layers = nn.ModuleList(
                _fast_block(block, maker, number) for number, block in enumerate(blocks)
            )
        head = PaddedHead(reference.lm_head, settings.pad_vocabulary, maker)
        table = reference.token_embeddings.weight
        copy = maker.table(table) if maker is not None and settings.bf16_embedding else None
        if settings.fused_blocks:
            dtype = COPY_DTYPE if settings.bf16_stream else table.dtype
            self.token_embeddings = FusedEmbedding(reference.token_embeddings, dtype, copy)
            self.ln_final = AddNorm(reference.ln_final)
        self.lm_head = head
        self.register_buffer("rotations", reference.rotations, persistent=False)
        self.register_buffer("mask", reference.mask, persistent=False)
        self.weights: tuple[Weight, ...] = ()
        """All parameters with their copies; empty if the model reads the parameters themselves."""
        self._scales: Sequence[KeptScale] = ()
        if maker is not None:
            self.weights = maker.weights(table, is_read=copy is None)
            self._scales = tuple(maker.scales)
        if settings.checkpoint_blocks:
            # else the first checkpoint imports it, within a step
            importlib.import_module("torch._dynamo")

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """The logits after each of `tokens`; ValueError for more than the context holds."""
        logits = self.padded_logits(tokens)
        vocab_size = self.config.vocab_size
        return logits if logits.shape[-1] == vocab_size else logits[..., :vocab_size]

    def padded_logits(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq padded"]:
        """Logits, followed by a 0 for each entry that pads the vocabulary."""
        return cast("Tensor", self.lm_head(self._hidden(tokens)))

    def chunked_loss(
        self, tokens: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, ""]:
        """Mean cross-entropy, with the logits of one part of the tokens in memory at a time."""
        loss_of = partial(
            chunked_cross_entropy,
            targets=targets,
            vocab_size=self.config.vocab_size,
            chunks=self._settings.loss_chunks,
            divisor=self._settings.loss_divisor,
        )
        return cast("Tensor", self.lm_head(self._hidden(tokens), loss_of))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters and copies."""
        super().zero_grad(set_to_none)
        drop_gradients(self.weights)

    def _hidden(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_model"]:
        """The normed residual stream after all blocks, which the language model's head reads."""
        # the unbound function: a bound method would keep the reference, and so the whole parameters
        # that FSDP shards
        rotations, mask = TransformerLM.tables(cast("TransformerLM", self), tokens.shape[1])
        if self._scales:
            update_scales(self._scales)
        embedded = self.token_embeddings(tokens)
        x: Tensor | Deferred = embedded
        if self._settings.fused_blocks:
            x = self._nothing_deferred(embedded)
        del embedded  # else it stays allocated through all blocks
        backend = self.config.sdpa_backend
        is_recomputed = (
            self._settings.checkpoint_blocks
            and not self._settings.selective_checkpoints
            and torch.is_grad_enabled()
        )
        with attention_backend(backend):
            if is_recomputed:
                for group in self._groups():
                    x = checkpointed(_run_again, group, x, rotations, mask, backend)
            else:
                for index, block in enumerate(self.layers):
                    with annotate(block_range(index)):
                        x = block(x, rotations, mask)
        normed = self.ln_final(x)
        return cast("Tensor", normed[1] if self._settings.fused_blocks else normed)

    def _groups(self) -> list[list[nn.Module]]:
        """The blocks in groups, each of which is one activation checkpoint."""
        blocks, size = list(self.layers), self._settings.checkpoint_blocks
        return [blocks[first : first + size] for first in range(0, len(blocks), size)]

    def _nothing_deferred(self, x: Float[Tensor, "batch seq d_model"]) -> Deferred:
        """x and a zero branch, so that all blocks have one input type and compile once."""
        last = cast("DeferredBlock", self.layers[-1]).ffn.w2
        make = partial(torch.zeros, dtype=last.copies.weight.dtype, device=x.device)
        # These tensors require gradients as later blocks' do, or the first block would be compiled
        # on its own. When the whole model is traced there is no such need, and the compiler cannot
        # create such tensors.
        is_traced = torch.compiler.is_compiling()
        needs_grad = torch.is_grad_enabled() and not is_traced
        bias = None
        if last.deferred_bias is not None:
            bias = make(len(last.deferred_bias), requires_grad=not is_traced)
        has_tag = last.copies.in_fp8 and not self._settings.selective_checkpoints
        tag = torch.zeros(1, device=x.device, requires_grad=needs_grad) if has_tag else None
        return Deferred(x, make(x.shape, requires_grad=needs_grad), bias, tag)


def check_device(settings: RunConfig, device: torch.device) -> None:
    """Raise ValueError if a setting needs another GPU, or a package that cannot be imported."""
    if device.type != "cuda":
        return
    for name, package in OF_PACKAGE.items():
        if not getattr(settings, name):
            continue
        capability = torch.cuda.get_device_capability(device)
        if capability != HOPPER:
            gpu, version = torch.cuda.get_device_name(device), ".".join(map(str, capability))
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} needs a Hopper GPU (compute capability 9.0), got {gpu} ({version})"
            )
        module = module_importing(package)
        try:
            with waiting_for("importing kernels", IMPORTED_BY[package]):
                importlib.import_module(module)
        except Exception as error:
            forget_answer(module)
            why = f"cannot be imported: {(str(error).splitlines() or [type(error).__name__])[0]}"
            raise ValueError(package_needed(name, why)) from error


def _fast_block(block: Block, maker: CopyMaker, number: int) -> nn.Module:
    """The block that computes from copies as the settings say; `number` is its place."""
    settings = maker.settings
    if settings.selective_checkpoints:
        # the last blocks keep it, because backward frees theirs first
        keeps_hidden = number >= settings.model.num_layers - settings.keep_hidden
        return SelectiveBlock(block, maker, keeps_hidden=keeps_hidden)
    return DeferredBlock(block, maker) if settings.fused_blocks else CopiedBlock(block, maker)


def _run_again(
    blocks: Sequence[nn.Module],
    x: Tensor | Deferred,
    rotations: Rotations | None,
    mask: Mask | None,
    backend: SdpaBackend,
) -> Tensor | Deferred:
    """Run the blocks of a checkpoint, in forward and again in backward.

    In backward, the range named forward marks recomputation, and attention's backend has to be
    chosen again, because the model has left the context that chose it.
    """
    with annotate(Range.FORWARD), attention_backend(backend):
        for block in blocks:
            with annotate(cast("str", block.range)):
                x = block(x, rotations, mask)
        return x


class FastTrainable(Trainable):
    """The fast model with the parameters of `reference`."""

    def __init__(self, reference: TransformerLM, config: RunConfig) -> None:
        self._fast = FastLM(reference, config)
        super().__init__(self._fast, config)
        if config.fused_loss:
            self.criterion = partial(fused_cross_entropy, divisor=config.loss_divisor)
        elif config.compile_blocks:
            self.criterion = torch.compile(self.criterion)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of a batch: in chunks of tokens if the configuration asks for that,
        else from all logits, whose padded columns the criterion ignores.
        """
        if self.config.loss_chunks > 1:
            return self._fast.chunked_loss(tokens, targets)
        logits = self._fast.padded_logits(tokens)
        with annotate(Range.LOSS):
            return self.criterion(logits, targets, self.config.model.vocab_size)

    def _compiled(self, loss: Loss) -> Loss:
        """Compile each block in place if the configuration asks for that; else the whole loss."""
        if not self.config.compile_blocks:
            return super()._compiled(loss)
        for block in self._fast.layers:
            block.compile(mode=self.config.compile.value)
        return loss

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The configuration's optimizer; for a model with copies one that writes them too."""
        if not self._fast.weights:
            return super().make_optimizer()
        return MasterAdamW(
            self._fast.weights, storage_of(self.config), lr=self.config.learning_rate
        )
