"""Memory of a training step with fused blocks in closed form, to choose checkpoints by.

`memory.py` simulates eager steps tensor by tensor. This module adds up only what decides whether a
step fits: what is held throughout, what forward saves, and what the fullest moments of backward
need in addition.
"""

from dataclasses import replace

from ..config import Arch, Attention, Device, Mode, Profiler, RunConfig
from .accounting import INT64_BYTES, Component, count_parameters, parameters_by_component
from .allocator import round_up
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
    `keeps_graph`, segments stay fixed. Blocks in fp8 are not compiled with selective checkpoints.
    Configurations that the forecast does not cover or that already have checkpoints are returned
    unchanged.
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
        chunks = max(chunks, -(-FastMemory(config).tokens // LOSS_TOKENS))
    chunked = replace(config, loss_chunks=chunks)
    whole = replace(chunked, checkpoint_blocks=1, expandable_segments=expands, cuda_graph=graph)
    choices = [config, chunked]
    if config.model.attention is Attention.SDPA:
        # where blocks in fp8 are compiled, these checkpoints are refused
        eager = whole.with_defaults("compile", "compile_blocks") if config.fp8 else whole
        selective = replace(eager, selective_checkpoints=True, fused_activations=False)
        for kept in range(config.model.num_layers, -1, -1):
            choices.append(replace(selective, keep_hidden=kept))
    usable_bytes = (USABLE_FIXED if is_fixed else USABLE) * (memory_bytes - CUDA_CONTEXT_BYTES)
    for choice in choices:
        if FastMemory(choice).peak_bytes <= usable_bytes:
            return choice
    return whole


class FastMemory:
    """The memory of a step with fused blocks and fused loss in bytes, without the allocator's
    rounding.
    """

    def __init__(self, config: RunConfig) -> None:
        """Compute from the configuration how many parameters and bytes each part of the fast
        model's step has.
        """
        model, is_gpt2 = config.model, config.model.arch is Arch.GPT2
        self.config = config
        self.tokens = config.batch_size * model.context_length
        vocabulary = round_up(model.vocab_size, config.pad_vocabulary)
        self._count_parameters(vocabulary)
        # bytes for each token
        narrow = HALF_BYTES * model.d_model
        stream = narrow if config.bf16_stream else FP32_BYTES * model.d_model
        statistics = FP32_BYTES * (2 if is_gpt2 else 1)  # 1 / deviation, and LayerNorm's mean
        normed = stream + narrow + statistics
        attention = 4 * narrow + FP32_BYTES * model.num_heads  # q, k, v, result, log-sum-exp
        activations = HALF_BYTES * model.d_ff
        hidden = activations * (1 if is_gpt2 else 2)  # SwiGLU has two factors
        self.hidden_bytes = self.tokens * hidden
        """The result of the feed-forward network's first matmul."""
        self.between_bytes = self.tokens * (normed + hidden + activations)
        """What a block saves after attention: residual stream, its norm, hidden activations."""
        self.more_in_fp8_bytes = 0
        """What a block saves with fp8 less what it saves with bf16; may be negative."""
        if config.fp8:
            # in addition: casts of the weights and of attention's result; the inputs of the other
            # linear layers are saved in fp8 instead of bf16, one byte less per element
            one_byte_less = self.tokens * (model.d_model + model.d_ff)
            self.more_in_fp8_bytes = self.block_parameters - one_byte_less
        self.block_bytes = (
            self.tokens * (normed + attention) + self.between_bytes + self.more_in_fp8_bytes
        )
        """What a block saves without checkpoints."""
        # the residual stream, and the branch that the next norm adds to it
        self.checkpoint_bytes = self.tokens * (stream + narrow)
        """What a group of blocks between checkpoints saves."""
        if config.selective_checkpoints:
            self.checkpoint_bytes = self.tokens * (stream + attention)
        self.head_bytes = HALF_BYTES * vocabulary * model.d_model
        """The head's gradient."""
        self.logits_bytes = HALF_BYTES * vocabulary * -(-self.tokens // config.loss_chunks)
        """The logits that are in memory at once."""
        is_whole_loss = config.loss_chunks == 1
        self.ends_bytes = self.tokens * (normed + INT64_BYTES)
        self.ends_bytes += self.logits_bytes if is_whole_loss else self.head_bytes
        """What is saved outside of the blocks: the last norm's input and result, the logits, and
        the tokens themselves.

        If the loss is computed in parts, the gradients of the last norm's result and of the head's
        weight take the place of that result and of the logits.
        """

    def _count_parameters(self, vocabulary: int) -> None:
        """Count the model's parameters by how they are read; `vocabulary` includes padding."""
        model = self.config.model
        parts = parameters_by_component(model)
        blocks = parts[Component.QKV] + parts[Component.OUTPUT] + parts[Component.FFN]
        is_gpt2 = model.arch is Arch.GPT2
        self.block_parameters = blocks // model.num_layers
        """Parameters of the linear layers of one block."""
        self.table_parameters = model.vocab_size * model.d_model
        """Those of the embedding's table, which GPT-2 also has as its head's weight."""
        self.copied_parameters = blocks + vocabulary * model.d_model
        """Those of which the model reads the copies: all linear layers, with the rows that pad the
        vocabulary.
        """
        self.read_parameters = parts[Component.EMBEDDING] + parts[Component.NORMS]
        """Those that the model reads in fp32: the norms, GPT-2's learned positions and, unless it
        is in bf16, the embedding's table, which may be the head's too.
        """
        if is_gpt2:
            self.read_parameters += parts[Component.HEAD]
        if self.config.bf16_embedding:
            self.read_parameters -= self.table_parameters
            self.copied_parameters += 0 if is_gpt2 else self.table_parameters

    @property
    def peak_bytes(self) -> int:
        """Peak of the bytes that are allocated in a training step."""
        is_whole_loss = self.config.loss_chunks == 1
        beside_bytes = self.head_bytes if is_whole_loss else self.logits_bytes
        stream_gradient_bytes = self.tokens * HALF_BYTES * self.config.model.d_model
        # gradients of the micro-batches before
        earlier_bytes = self.gradient_bytes if self.config.accumulate_steps > 1 else 0
        saved_bytes = self.saved_bytes + earlier_bytes
        sums_bytes = FP32_BYTES * self.table_parameters if self.config.bf16_embedding else 0
        in_block_bytes = self.more_in_backward_bytes
        peaks_bytes = [
            # backward of the head, in which the logits hold their gradients
            saved_bytes + beside_bytes + stream_gradient_bytes,
            # backward of the last block
            saved_bytes - self.ends_bytes + self.head_bytes + in_block_bytes,
            # the end of the blocks' backward
            self.gradient_bytes + in_block_bytes,
            # the embedding's backward
            self.gradient_bytes + sums_bytes,
        ]
        return self.held_bytes + max(peaks_bytes)

    @property
    def saved_bytes(self) -> int:
        """What forward saves for backward, each tensor once: activations, and casts of weights to
        fp8.
        """
        blocks, group = self.config.model.num_layers, self.config.checkpoint_blocks
        of_blocks = blocks * self.block_bytes
        if group:
            of_blocks = -(-blocks // group) * self.checkpoint_bytes
        return of_blocks + self.config.keep_hidden * self.hidden_bytes + self.ends_bytes

    @property
    def more_in_backward_bytes(self) -> int:
        """What a block's backward needs beside what forward saved: gradients of what is saved
        after attention, and activations that are computed again.

        Computed again are, with checkpoints, those of the whole group; with selective ones, those
        after attention; without checkpoints none.
        """
        again_bytes = self.config.checkpoint_blocks * self.block_bytes
        if self.config.selective_checkpoints:
            again_bytes = self.between_bytes + self.more_in_fp8_bytes
        return self.between_bytes + again_bytes

    @property
    def held_bytes(self) -> int:
        """Masters, copies and AdamW's moments; of split masters, those of their remainders.

        With a sharded optimizer, a rank has its part of moments and masters, but whole copies, and
        whole masters where the model reads those. Fully sharded, a rank has its part of
        everything, the copies that are currently gathered, and as much again for gradients in
        transit. Gradients that other ranks push have memory of their own.
        """
        config, every = self.config, count_parameters(self.config.model)
        master_bytes = HALF_BYTES if config.split_masters else FP32_BYTES
        moment_bytes = HALF_BYTES if config.bf16_moments else FP32_BYTES
        of_optimizer = master_bytes * (every - self.read_parameters)
        if config.mode is Mode.TRAIN:
            of_optimizer += 2 * moment_bytes * every
        read_by_model = self._whole_gradient_bytes  # as much as their gradients
        others = config.ranks - 1 if config.parallel.writes_to_others else 0
        if config.parallel.shards_parameters:
            units = config.parallel.exchange.units_ahead + 1
            head = config.model.vocab_size * config.model.d_model
            gathered = 2 * (head + units * self.block_parameters)
            sharded = of_optimizer + (1 + others) * read_by_model
            return sharded // config.ranks + HALF_BYTES * gathered
        shards = config.ranks if config.shard_optimizer else 1
        return (of_optimizer + others * read_by_model) // shards + read_by_model

    @property
    def gradient_bytes(self) -> int:
        """All gradients at the end of backward, whole on every rank unless parameters are
        sharded.
        """
        if self.config.parallel.shards_parameters:
            of_block = HALF_BYTES * self.block_parameters
            return self._whole_gradient_bytes // self.config.ranks + of_block
        return self._whole_gradient_bytes

    @property
    def _whole_gradient_bytes(self) -> int:
        """Bytes of all gradients: 16-bit ones of the weight copies, fp32 ones of the parameters
        that the model reads itself.
        """
        return HALF_BYTES * self.copied_parameters + FP32_BYTES * self.read_parameters
