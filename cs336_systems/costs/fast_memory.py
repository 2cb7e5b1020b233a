"""Memory of a training step with fused blocks in closed form, to choose checkpoints by.

`memory.py` simulates eager steps tensor by tensor. This module adds up only what decides whether a
step fits: what is held throughout, what forward saves, and what the fullest moments of backward
need in addition.
"""

from dataclasses import replace

from ..config import Arch, Attention, Device, Mode, Profiler, RunConfig
from .accounting import INT64_BYTES, Component, count_parameters, parameters_by_component
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
    # ranks that write to each other's memory open it by handles of fixed segments, and NCCL
    # cannot register the buffers of graphs in expandable ones; steps this large need no graphs
    is_fixed = (
        config.profiler is Profiler.MEMORY
        or config.parallel.writes_to_others
        or (keeps_graph and config.is_shared)
    )
    expands = config.device is Device.CUDA and not is_fixed
    graph = config.cuda_graph and not (expands and config.is_shared)
    chunks = config.loss_chunks
    if config.fused_loss:
        chunks = max(chunks, -(-_tokens(config) // LOSS_TOKENS))
    chunked = replace(config, loss_chunks=chunks)
    whole = replace(chunked, checkpoint_blocks=1, expandable_segments=expands, cuda_graph=graph)
    choices = [config, chunked]
    if config.model.attention is Attention.SDPA:
        selective = replace(whole, selective_checkpoints=True, fused_activations=False)
        for kept in range(config.model.num_layers, -1, -1):
            choices.append(replace(selective, keep_hidden=kept))
    usable_bytes = (USABLE_FIXED if is_fixed else USABLE) * (memory_bytes - CUDA_CONTEXT_BYTES)
    return next((choice for choice in choices if peak_bytes(choice) <= usable_bytes), whole)


def peak_bytes(config: RunConfig) -> int:
    """The most memory of a step with fused blocks and fused loss, without the allocator's
    rounding.
    """
    saved, head_bytes = saved_bytes(config), _head_gradient_bytes(config)
    # beside what is saved: the gradient of the head, or one part of the logits
    beside_bytes = head_bytes if config.loss_chunks == 1 else _logits_bytes(config)
    stream_gradient_bytes = _tokens(config) * HALF_BYTES * config.model.d_model
    in_block_bytes = _more_in_backward(config)
    return held_bytes(config) + max(
        # backward of the head, in which the logits hold their gradients
        saved + beside_bytes + stream_gradient_bytes,
        # backward of the last block
        saved - _saved_at_ends(config) + head_bytes + in_block_bytes,
        # the end of backward
        gradient_bytes(config) + in_block_bytes,
    )


def saved_bytes(config: RunConfig) -> int:
    """Bytes that forward saves for backward, each tensor once: activations, and casts of weights
    to fp8.
    """
    groups = config.model.num_layers
    if config.checkpoint_blocks:
        groups = -(-groups // config.checkpoint_blocks)
    kept = _tokens(config) * config.keep_hidden * _hidden(config)
    return groups * _saved_of_group(config) + kept + _saved_at_ends(config)


def _saved_of_group(config: RunConfig) -> int:
    """Bytes that a block, or a group of blocks between checkpoints, saves."""
    d_model = config.model.d_model
    stream, narrow = FP32_BYTES * d_model, HALF_BYTES * d_model
    # q, k, v, the result, and its log-sum-exp
    attention = 4 * narrow + FP32_BYTES * config.model.num_heads
    if config.selective_checkpoints:
        return _tokens(config) * (stream + attention)
    if config.checkpoint_blocks:
        # the residual stream, and the branch that the next norm adds to it
        return _tokens(config) * (stream + narrow)
    of_token = stream + _statistics(config) + narrow + attention + _between(config)
    return _tokens(config) * of_token + _more_in_fp8(config)


def _between(config: RunConfig) -> int:
    """Bytes per token that a block saves after attention: residual stream, its norm, and the
    hidden activations.
    """
    activations = HALF_BYTES * config.model.d_ff
    return _normed(config) + _hidden(config) + activations


def _normed(config: RunConfig) -> int:
    """Bytes per token that a norm saves: its input in fp32, its result and its statistics."""
    return (FP32_BYTES + HALF_BYTES) * config.model.d_model + _statistics(config)


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
    of_block, _, _ = _parameters(config)
    return of_block - _tokens(config) * (config.model.d_model + config.model.d_ff)


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
    ends_bytes = _tokens(config) * (_normed(config) + INT64_BYTES)
    if config.loss_chunks == 1:
        return ends_bytes + _logits_bytes(config)
    return ends_bytes + _head_gradient_bytes(config)


def _logits_bytes(config: RunConfig) -> int:
    """Bytes of the logits that are in memory at once."""
    return HALF_BYTES * _padded_vocabulary(config) * -(-_tokens(config) // config.loss_chunks)


def _head_gradient_bytes(config: RunConfig) -> int:
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
    of_block, linear, read = _parameters(config)
    every = count_parameters(config.model)
    masters = (HALF_BYTES if config.split_masters else FP32_BYTES) * (every - read)
    moment_bytes = HALF_BYTES if config.bf16_moments else FP32_BYTES
    moments = 2 * moment_bytes * every if config.mode is Mode.TRAIN else 0
    copies, whole_masters = HALF_BYTES * linear, FP32_BYTES * read
    others = config.ranks - 1 if config.parallel.writes_to_others else 0
    if config.parallel.shards_parameters:
        units = config.parallel.exchange.units_ahead + 1
        gathered = 2 * (config.model.vocab_size * config.model.d_model + units * of_block)
        received = others * (copies + whole_masters)
        sharded = masters + whole_masters + moments + copies + received
        return sharded // config.ranks + HALF_BYTES * gathered
    shards = config.ranks if config.shard_optimizer else 1
    pushed = others * gradient_bytes(config)
    return (masters + moments + pushed) // shards + whole_masters + copies


def gradient_bytes(config: RunConfig) -> int:
    """Bytes of all gradients at the end of backward, whole on every rank unless parameters are
    sharded.
    """
    of_block, linear, read = _parameters(config)
    gradients = HALF_BYTES * linear + FP32_BYTES * read
    if config.parallel.shards_parameters:
        return gradients // config.ranks + HALF_BYTES * of_block
    return gradients


def _parameters(config: RunConfig) -> tuple[int, int, int]:
    """Parameters of the linear layers of one block; those of all linear layers, with the rows
    that pad the vocabulary; and those that the model reads in fp32.

    In fp32 it reads the embedding, which may be the head's table too, and the norms. Of all
    others `cast_once` reads the copies only.
    """
    parts = parameters_by_component(config.model)
    blocks = parts[Component.QKV] + parts[Component.OUTPUT] + parts[Component.FFN]
    head = _padded_vocabulary(config) * config.model.d_model
    read = parts[Component.EMBEDDING] + parts[Component.NORMS]
    if config.model.arch is Arch.GPT2:
        read += parts[Component.HEAD]
    return blocks // config.model.num_layers, blocks + head, read


def _padded_vocabulary(config: RunConfig) -> int:
    return -(-config.model.vocab_size // config.pad_vocabulary) * config.pad_vocabulary


def _tokens(config: RunConfig) -> int:
    return config.batch_size * config.model.context_length
