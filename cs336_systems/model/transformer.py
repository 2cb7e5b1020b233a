"""A decoder-only Transformer language model, composed from its config and annotated in place.

Written for the host's sake, which launches a kernel in 4-5 us: few kernels, tables computed once, no shape juggling.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from cs336_systems.config import Arch, Attention, ModelConfig, SdpaBackend
from cs336_systems.model.annotate import annotate
from cs336_systems.model.fast.fused_blocks import bias_gelu
from cs336_systems.model.fast.joint import cut_heads, rope_heads, swiglu
from cs336_systems.model.layers import Copies, Embedding, LayerNorm, Linear, LMHead, Pending, RMSNorm, to_autocast_dtype
from cs336_systems.model.rope import rope_rotations, rotate_pairs
from cs336_systems.ranges import Range, block_range

_SDPA_BACKENDS = {
    SdpaBackend.FLASH: SDPBackend.FLASH_ATTENTION,
    SdpaBackend.CUDNN: SDPBackend.CUDNN_ATTENTION,
    SdpaBackend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    SdpaBackend.MATH: SDPBackend.MATH,
}


class TransformerLM(nn.Module):
    """Language model of either architecture, built and initialised on the default device.

    `with torch.device("cuda"): TransformerLM(config)` puts it on the GPU without a detour over the host. The state dict
    of architecture cs336 has the keys of the course's own model. Parameters are fp32; lower precision is autocast's
    business.
    """

    rotations: Tensor | None
    future: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = 0
        """Blocks whose inside is computed again in backward instead of kept; 0 for none."""
        self.has_fused_blocks = False
        """Whether branches are added to the residual stream by the norms that read the sum; see `fuse_blocks`."""
        gpt2 = config.arch is Arch.GPT2
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, config.context_length if gpt2 else None)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.ln_final = _norm(config)
        self.lm_head = LMHead(config.d_model, config.vocab_size)
        rotations = None if gpt2 else rope_rotations(config.context_length, config.d_head, config.rope_theta)
        naive = config.attention is Attention.NAIVE
        future = torch.ones(config.context_length, config.context_length, dtype=torch.bool).triu(1) if naive else None
        # shared by all layers, and no part of a checkpoint
        self.register_buffer("rotations", rotations, persistent=False)
        self.register_buffer("future", future, persistent=False)
        if gpt2:
            self.lm_head.weight = self.token_embeddings.weight
            _initialise_gpt2(self)
        else:
            _initialise_cs336(self)

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Logits of the token after each of `tokens`; raise ValueError for more tokens than the context holds."""
        return cast("Tensor", self.lm_head(self.hidden(tokens)))

    def hidden(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_model"]:
        """What the head reads: the residual stream at its end, normed. Raises ValueError like `forward`."""
        seq = tokens.shape[1]
        if seq > self.config.context_length:
            raise ValueError(f"tokens: needed at most context_length = {self.config.context_length} a row, got {seq}")
        rotations = None if self.rotations is None else self.rotations[:seq]
        future = None if self.future is None else self.future[:seq, :seq]
        embedded = self.token_embeddings(tokens)
        x: Tensor | Pending = self._nothing_added(embedded) if self.has_fused_blocks else embedded
        del embedded  # kept here it would be until the last block
        # around all layers, not in each: it takes 20 us, and here it is in force for blocks compiled one by one too
        with _sdpa_backend(self.config.sdpa_backend):
            blocks = list(cast("Iterable[Block]", self.layers))
            if self.checkpoint_blocks and torch.is_grad_enabled():
                for first in range(0, len(blocks), self.checkpoint_blocks):
                    group = blocks[first : first + self.checkpoint_blocks]
                    # nothing in a block is random
                    x = checkpoint(
                        _again, group, x, rotations, future, self.config.sdpa_backend,
                        use_reentrant=False, preserve_rng_state=False,
                    )  # fmt: skip
            else:  # in place: a function's argument would keep the first x until the last block
                for block in blocks:
                    with annotate(block.range):
                        x = block(x, rotations, future)
        normed = self.ln_final(x)
        return cast("Tensor", normed[1] if isinstance(x, Pending) else normed)

    def _nothing_added(self, x: Float[Tensor, "batch seq d_model"]) -> Pending:
        """A branch of zeros, like those of blocks in all else: a block is compiled once."""
        last = cast("Block", self.layers[-1]).ffn.w2
        assert last.copies is not None
        make = partial(torch.zeros, dtype=last.copies.weight.dtype, device=x.device)
        # like those of other blocks; the compiler makes no such tensor, and needs none where it sees all blocks at once
        is_traced = torch.compiler.is_compiling()
        needs_grad = torch.is_grad_enabled() and not is_traced
        bias = None if last.copies.bias is None else make(len(last.copies.bias), requires_grad=not is_traced)
        return Pending(x, make(x.shape, requires_grad=needs_grad), bias)

    def fuse_blocks(self) -> None:
        """Leave biases inside blocks, and what these add to the residual stream, to the kernels that read them next.

        For linear layers that have copies (model/fast/weights.py), by model/fast/fused_blocks.py. The embedding before
        them gets its gradient in one pass (model/fast/lookup.py).
        """
        for block in cast("Iterable[Block]", self.layers):
            for layer in (block.attn.output_proj, block.ffn.w1, block.ffn.w2):
                if layer.copies is not None and layer.copies.bias is not None:
                    layer.copies = layer.copies._replace(is_bias_due=True)
        self.has_fused_blocks = self.token_embeddings.has_fused_backward = True


def _again(
    blocks: Iterable["Block"],
    x: Float[Tensor, "batch seq d_model"] | Pending,
    rotations: Float[Tensor, "seq pairs 2"] | None,
    future: Bool[Tensor, "seq seq"] | None,
    backend: SdpaBackend,
) -> Float[Tensor, "batch seq d_model"] | Pending:
    """The blocks in a range of forward's, which tells a profiler inside backward that this is forward once more.

    There the model has long left the context that chooses the attention's kernel.
    """
    with annotate(Range.FORWARD), _sdpa_backend(backend):
        for block in blocks:
            with annotate(block.range):
                x = block(x, rotations, future)
        return x


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then the feed-forward network, each added to the residual stream.

    Its range is opened by the caller, so that it is there too when the block is compiled on its own.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.range = block_range(index)
        self.ln1 = _norm(config)
        self.attn = SelfAttention(config)
        self.ln2 = _norm(config)
        self.ffn = (
            SwiGLU(config.d_model, config.d_ff) if config.arch is Arch.CS336 else GeluMLP(config.d_model, config.d_ff)
        )

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"] | Pending,
        rotations: Float[Tensor, "seq pairs 2"] | None,
        future: Bool[Tensor, "seq seq"] | None,
    ) -> Float[Tensor, "batch seq d_model"] | Pending:
        """The residual stream with what the block adds to it, or has to be added, as in `x`."""
        if not isinstance(x, Pending):
            x = x + self.attn(self.ln1(x), rotations, future)
            return cast("Tensor", x + self.ffn(self.ln2(x)))
        stream, normed = self.ln1(x)
        branch = self.attn(normed, rotations, future)
        stream, normed = self.ln2(Pending(stream, branch, self.attn.output_proj.bias_due))
        return Pending(stream, self.ffn(normed), self.ffn.w2.bias_due)


class SelfAttention(nn.Module):
    """Causal multi-head self-attention; RoPE on queries and keys where `rotations` are given."""

    range: str = Range.ATTENTION

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        bias = config.arch is Arch.GPT2
        self.q_proj = Linear(config.d_model, config.d_model, bias=bias)
        self.k_proj = Linear(config.d_model, config.d_model, bias=bias)
        self.v_proj = Linear(config.d_model, config.d_model, bias=bias)
        self.output_proj = Linear(config.d_model, config.d_model, bias=bias)
        self.joint: Copies | None = None
        """Weights and biases of q_proj, k_proj and v_proj in one, to be read in their place (model/fast/weights.py)."""

    def forward(
        self,
        x: Float[Tensor, "batch seq d_model"],
        rotations: Float[Tensor, "seq pairs 2"] | None,
        future: Bool[Tensor, "seq seq"] | None,
    ) -> Float[Tensor, "batch seq d_model"]:
        with annotate(self.range):
            x = to_autocast_dtype(x)
            if self.joint is not None and rotations is not None:
                q, k, v = rope_heads(self.joint.product(x), rotations)
            else:
                q, k, v = self._projected(x)
                if rotations is not None:
                    # both in one tensor: half the kernels
                    q, k = rotate_pairs(torch.cat((q, k)), rotations).chunk(2)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            if future is None:
                values = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                values = naive_attention(q, k, v, future)
            return cast("Tensor", self.output_proj(values.transpose(1, 2).flatten(2)))

    def _projected(self, x: Float[Tensor, "batch seq d_model"]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v by heads, (batch, seq, heads, d_head); nobody else holds them, so that they go when turned."""
        if self.joint is not None:
            bias = self.joint.bias
            assert bias is not None, "attention without biases has rotations"
            return cut_heads(self.joint._replace(bias=bias.detach()).product(x), bias, self.num_heads)
        heads = (*x.shape[:2], self.num_heads, -1)
        return self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)


def naive_attention(
    q: Float[Tensor, "... queries d_k"],
    k: Float[Tensor, "... keys d_k"],
    v: Float[Tensor, "... keys d_v"],
    hidden: Bool[Tensor, "queries keys"],
) -> Float[Tensor, "... queries d_v"]:
    """Attend to the keys that are not `hidden`, one kernel after the other (Vaswani et al. 2017, eq. 1)."""
    with annotate(Range.SCORES):
        # to scale the queries is to scale the scores, of which there are more; keys are copied faster by rows
        scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.contiguous().transpose(-2, -1)
        scores.masked_fill_(hidden, -math.inf)
    with annotate(Range.SOFTMAX):
        weights = scores.softmax(dim=-1)
    with annotate(Range.VALUES):
        return weights @ v


class SwiGLU(nn.Module):
    """Feed-forward network with a gate: w2(silu(w1 x) * w3 x) (Shazeer 2020)."""

    range: str = Range.FFN

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)
        self.joint: Copies | None = None
        """Weights of w1 and w3 in one, to be read in their place (model/fast/weights.py)."""

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        with annotate(self.range):
            x = to_autocast_dtype(x)
            if self.joint is None:
                return cast("Tensor", self.w2(F.silu(self.w1(x)) * self.w3(x)))
            return cast("Tensor", self.w2(swiglu(self.joint.product(x))))


class GeluMLP(nn.Module):
    """GPT-2's feed-forward network: w2 gelu(w1 x), with biases and the tanh approximation of GELU."""

    range: str = Range.FFN

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, bias=True)
        self.w2 = Linear(d_ff, d_model, bias=True)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        with annotate(self.range):
            hidden, bias = self.w1(x), self.w1.bias_due
            activated = F.gelu(hidden, approximate="tanh") if bias is None else bias_gelu(hidden, bias)
            return cast("Tensor", self.w2(activated))


def num_parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    return RMSNorm(config.d_model) if config.arch is Arch.CS336 else LayerNorm(config.d_model)


def _sdpa_backend(backend: SdpaBackend) -> AbstractContextManager[object]:
    return nullcontext() if backend is SdpaBackend.AUTO else sdpa_kernel(_SDPA_BACKENDS[backend])


def _initialise_cs336(model: nn.Module) -> None:
    """The course's: normal, cut at 3 standard deviations, which are sqrt(2 / (d_in + d_out)), and 1 for embeddings."""
    for module in model.modules():
        if isinstance(module, Linear):
            std = math.sqrt(2 / sum(module.weight.shape))
            nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
        elif isinstance(module, Embedding):
            nn.init.trunc_normal_(module.weight, std=1, a=-3, b=3)


def _initialise_gpt2(model: TransformerLM) -> None:
    """GPT-2's: normal of 0.02, biases 0; what adds to the residual stream is divided by sqrt(2 num_layers)."""
    residual_std = 0.02 / math.sqrt(2 * model.config.num_layers)
    for name, parameter in model.named_parameters():
        if name.endswith(("output_proj.weight", "ffn.w2.weight")):
            nn.init.normal_(parameter, std=residual_std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
