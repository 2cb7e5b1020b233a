"""Memory of a training step with fused blocks in closed form, to choose checkpoints by.

`memory.py` simulates eager steps tensor by tensor. This module adds up only what decides whether a
step fits: what is held throughout, what forward saves, and what the fullest moments of backward
need in addition.
"""

from dataclasses import replace

from ..config import Arch, Attention, Device, Mode, Profiler, RunConfig
from .accounting import Component, parameters_by_component
from .fit import CUDA_CONTEXT_BYTES
from .shards import FP32_BYTES, HALF_BYTES

LOSS_TOKENS = 8192
"""Tokens whose logits are computed at once if memory is scarce. Every part of the tokens reads and
writes the head's gradient, so smaller parts would cost more traffic.
"""
USABLE, USABLE_FIXED = 0.92, 0.85
"""Shares of the memory beside the CUDA context that tensors may take, in expandable segments and in
fixed ones.

NCCL and workspaces need 1 to 2 GiB. The rest is lost to fragmentation: the 8B step with selective
checkpoints, replayed on the simulated allocator (allocator.py), loses 6 GiB in expandable segments,
and 16 GiB in fixed ones. With fixed segments that step fits an H200 neither in the simulation nor
when it was tried.
"""


def with_checkpoints(
    config: RunConfig, memory_bytes: int, *, keeps_graph: bool = False
) -> RunConfig:
    """The configuration with the checkpoints that cost least time among those with which the step
    fits.

    The choices are: no checkpoints; selective ones, of which as many as fit keep their hidden
    activations; or one per block, even if that does not fit either. If the step does not fit as it
    is, the loss is computed in parts, which costs next to nothing. With checkpoints, segments are
    expandable because memory is scarce; on several ranks there are then no graphs, or, with
    `keeps_graph`, segments stay fixed. Configurations that the forecast does not cover or that
    already have checkpoints are returned unchanged.
    """
    if (
        not config.fused_blocks
        or config.checkpoint_blocks
        or config.mode not in (Mode.FORWARD_BACKWARD, Mode.TRAIN)
    ):
        return config
    # ranks that write to each other's memory open it by handles of fixed segments
    is_fixed = config.profiler is Profiler.MEMORY or config.parallel.writes_to_others
    # NCCL registers the buffers of graphs, which fails in expandable segments; steps this large
    # need no graphs
    is_fixed = is_fixed or (keeps_graph and config.is_shared)
    expands = config.device is Device.CUDA and not is_fixed
    graph = config.cuda_graph and not (expands and config.is_shared)
    chunks = (
        max(config.loss_chunks, -(-_tokens(config) // LOSS_TOKENS))
        if config.fused_loss
        else config.loss_chunks
    )
    chunked = replace(config, loss_chunks=chunks)
    whole = replace(chunked, checkpoint_blocks=1, expandable_segments=expands, cuda_graph=graph)
    choices = [config, chunked]
    if config.model.attention is Attention.SDPA:
        selective = replace(whole, selective_checkpoints=True, fused_activations=False)
        choices += [
            replace(selective, keep_hidden=kept) for kept in range(config.model.num_layers, -1, -1)
        ]
    usable_bytes = (USABLE_FIXED if is_fixed else USABLE) * (memory_bytes - CUDA_CONTEXT_BYTES)
    return next((choice for choice in choices if peak_bytes(choice) <= usable_bytes), whole)


def peak_bytes(config: RunConfig) -> int:
    """The most memory of a step with fused blocks and fused loss, without the allocator's
    rounding.
    """
    model, tokens = config.model, _tokens(config)
    saved, ends, of_head = saved_bytes(config), _saved_at_ends(config), _of_head(config)
    # at three moments: backward of the head (the logits hold their gradients), of the last block,
    # end of backward
    beside = of_head if config.loss_chunks == 1 else _logits(config)
    return held_bytes(config) + max(
        saved + beside + tokens * HALF_BYTES * model.d_model,
        saved - ends + of_head + _more_in_backward(config),
        gradient_bytes(config) + _more_in_backward(config),
    )


def saved_bytes(config: RunConfig) -> int:
    """Bytes that forward saves for backward, each tensor once: activations, and casts of weights
    to fp8.
    """
    model = config.model
    groups = (
        -(-model.num_layers // config.checkpoint_blocks)
        if config.checkpoint_blocks
        else model.num_layers
    )
    kept = _tokens(config) * config.keep_hidden * _hidden(config)
    return groups * _saved_of_group(config) + kept + _saved_at_ends(config)


def _saved_of_group(config: RunConfig) -> int:
    """Bytes that a block, or a group of blocks between checkpoints, saves."""
    casts = 0 if config.checkpoint_blocks else _more_in_fp8(config)
    return _tokens(config) * _saved_per_token(config) + casts


def _saved_per_token(config: RunConfig) -> int:
    """Bytes per token that a block, or a group of blocks between checkpoints, saves, if no layer
    is in fp8.
    """
    d_model = config.model.d_model
    stream, narrow = FP32_BYTES * d_model, HALF_BYTES * d_model
    if config.checkpoint_blocks and not config.selective_checkpoints:
        return stream + narrow  # the residual stream, and the branch that the next norm adds to it
    # q, k, v, the result, and its log-sum-exp
    attention = 4 * narrow + FP32_BYTES * config.model.num_heads
    if config.selective_checkpoints:
        return stream + attention
    return stream + _statistics(config) + narrow + attention + _between(config)


def _between(config: RunConfig) -> int:
    """Bytes per token that a block saves after attention: residual stream, its norm, and the
    hidden activations.
    """
    activations = HALF_BYTES * config.model.d_ff
    return (
        (FP32_BYTES + HALF_BYTES) * config.model.d_model
        + _statistics(config)
        + _hidden(config)
        + activations
    )


def _hidden(config: RunConfig) -> int:
    """Bytes for each token of the result of the feed-forward network's first matmul, which has
    SwiGLU's two factors.
    """
    return (2 if config.model.arch is Arch.CS336 else 1) * HALF_BYTES * config.model.d_ff


def _more_in_fp8(config: RunConfig) -> int:
    """Bytes that a block saves with fp8 less those that it saves with bf16; may be negative.

    fp8 casts of the weights and of attention's result are saved in addition. The inputs of the
    other linear layers are saved in fp8 instead of bf16, one byte less per element.
    """
    if not config.fp8:
        return 0
    return _of_one_block(config) - _tokens(config) * (config.model.d_model + config.model.d_ff)


def _more_in_backward(config: RunConfig) -> int:
    """Bytes that a block's backward needs beside what forward saved: gradients of what `_between`
    counts, and activations that are computed again.

    Computed again are, with checkpoints, those of the whole group; with selective ones, those that
    `_between` counts; without checkpoints none.
    """
    gradients = _tokens(config) * _between(config)
    if not config.checkpoint_blocks:
        return gradients
    if config.selective_checkpoints:
        return gradients + gradients + _more_in_fp8(config)  # as much is computed again
    group = config.checkpoint_blocks * _saved_of_group(replace(config, checkpoint_blocks=0))
    return group + gradients


def _saved_at_ends(config: RunConfig) -> int:
    """Bytes saved outside of the blocks: the last norm's input and result, the logits, and the
    tokens themselves.

    If the loss is computed in parts, the gradients of the last norm's result and of the head's
    weight take the place of that result and of the logits.
    """
    d_model = config.model.d_model
    normed = (FP32_BYTES + HALF_BYTES) * d_model + _statistics(config)
    return _tokens(config) * (normed + 8) + (
        _logits(config) if config.loss_chunks == 1 else _of_head(config)
    )


def _logits(config: RunConfig) -> int:
    """Bytes of the logits that are in memory at once."""
    return HALF_BYTES * _padded_vocabulary(config) * -(-_tokens(config) // config.loss_chunks)


def _of_head(config: RunConfig) -> int:
    """Bytes of the head's gradient."""
    return HALF_BYTES * _padded_vocabulary(config) * config.model.d_model


def _statistics(config: RunConfig) -> int:
    """Bytes that a norm saves for each token beside its sum: 1 / deviation, and LayerNorm's
    mean.
    """
    return FP32_BYTES * (1 if config.model.arch is Arch.CS336 else 2)


def held_bytes(config: RunConfig) -> int:
    """Bytes of masters, copies and AdamW's moments; of split masters, those of their remainders.

    With a sharded optimizer, a rank has its part of moments and masters, but whole copies, and
    whole masters where the model reads those. Fully sharded, a rank has its part of everything, the
    copies that are currently gathered, and as much again for gradients in transit. Gradients that
    other ranks push have memory of their own.
    """
    parts = parameters_by_component(config.model)
    linear, read, every = _with_copies(config), _read(config), sum(parts.values())
    masters = (HALF_BYTES if config.split_masters else FP32_BYTES) * (every - read)
    moment_bytes = HALF_BYTES if config.bf16_moments else FP32_BYTES
    moments = 2 * moment_bytes * every if config.mode is Mode.TRAIN else 0
    if config.parallel.shards_parameters:
        gathered = 2 * (
            parts[Component.HEAD]
            + (config.parallel.exchange.units_ahead + 1) * _of_one_block(config)
        )
        received = (
            (HALF_BYTES * linear + FP32_BYTES * read)
            * (config.ranks - 1)
            * config.parallel.writes_to_others
        )
        part = (
            masters + FP32_BYTES * read + moments + HALF_BYTES * linear + received
        ) // config.ranks
        return part + HALF_BYTES * gathered
    shards = config.ranks if config.shard_optimizer else 1
    pushed = gradient_bytes(config) * (config.ranks - 1) if config.parallel.writes_to_others else 0
    return (masters + moments + pushed) // shards + FP32_BYTES * read + HALF_BYTES * linear


def gradient_bytes(config: RunConfig) -> int:
    """Bytes of all gradients at the end of backward, whole on every rank unless parameters are
    sharded.
    """
    gradients = HALF_BYTES * _with_copies(config) + FP32_BYTES * _read(config)
    if config.parallel.shards_parameters:
        return gradients // config.ranks + HALF_BYTES * _of_one_block(config)
    return gradients


def _of_one_block(config: RunConfig) -> int:
    """Parameters of the linear layers of one block."""
    parts = parameters_by_component(config.model)
    return (
        sum(parts[part] for part in (Component.QKV, Component.OUTPUT, Component.FFN))
        // config.model.num_layers
    )


def _with_copies(config: RunConfig) -> int:
    """Parameters of the linear layers, with the rows that pad the vocabulary."""
    parts = parameters_by_component(config.model)
    surplus = (_padded_vocabulary(config) - config.model.vocab_size) * config.model.d_model
    return sum(parts.values()) - parts[Component.EMBEDDING] - parts[Component.NORMS] + surplus


def _read(config: RunConfig) -> int:
    """Parameters that the model reads in fp32: the embedding, which may be the head's table too,
    and the norms.

    Of all others `cast_once` reads the copies only.
    """
    parts = parameters_by_component(config.model)
    table = parts[Component.HEAD] if config.model.arch is Arch.GPT2 else 0
    return parts[Component.EMBEDDING] + parts[Component.NORMS] + table


def _padded_vocabulary(config: RunConfig) -> int:
    return -(-config.model.vocab_size // config.pad_vocabulary) * config.pad_vocabulary


def _tokens(config: RunConfig) -> int:
    return config.batch_size * config.model.context_length
