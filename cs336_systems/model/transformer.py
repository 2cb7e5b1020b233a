"""A decoder-only Transformer language model of either architecture, with named ranges in place.

This model is measured and explained, so it is kept plain; `model/fast` computes the same from the
same parameters. The host needs 4 to 5 us to launch a kernel, so rotations and mask are computed
once, and no line launches a kernel that is not needed. A module's `range` names its range in
backward too (annotate.backward_ranges).
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F  # noqa: N812
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import Arch, Attention, ModelConfig, SdpaBackend
from ..ranges import Range, block_range
from .annotate import annotate

Rotations = Float[Tensor, "seq pairs 2"]
"""Cosine and sine of the angle by which RoPE rotates each pair of features at each position."""
Mask = Bool[Tensor, "queries keys"]
"""True if the query attends to the key."""

NORM_EPS = 1e-5
"""What norms add to the mean square or the variance before they take its root."""


class TransformerLM(nn.Module):
    """Language model, built and initialised on the default device: `with torch.device("cuda"):
    TransformerLM(config)`.

    The state dict of architecture cs336 has the keys of the course's own model. Parameters are
    fp32; only autocast lowers the precision of computations.
    """

    rotations: Tensor | None
    mask: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        """Build and initialise the model; layers share one table of RoPE rotations and one causal
        mask, where the configuration needs them.
        """
        super().__init__()
        self.config = config
        gpt2 = config.arch is Arch.GPT2
        positions = config.context_length if gpt2 else None
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, positions)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.ln_final = _norm(config)
        self.lm_head = LMHead(config.d_model, config.vocab_size)
        rotations = mask = None
        length = config.context_length
        if not gpt2:
            rotations = rope_rotations(length, config.d_head, config.rope_theta)
        if config.attention is Attention.NAIVE:
            mask = torch.ones(length, length, dtype=torch.bool).tril()
        # all layers share these tables, which are not saved in the state dict
        self.register_buffer("rotations", rotations, persistent=False)
        self.register_buffer("mask", mask, persistent=False)
        if gpt2:
            self.lm_head.weight = self.token_embeddings.weight
            _initialise_gpt2(self, config.num_layers)
        else:
            _initialise_cs336(self)

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Logits of the token after each of `tokens`; raise ValueError for more tokens than the
        context holds.
        """
        rotations, mask = self.tables(tokens.shape[1])
        x: Tensor = self.token_embeddings(tokens)
        # entered once for all layers, because entering takes the host 20 us
        with attention_backend(self.config.sdpa_backend):
            for index, block in enumerate(self.layers):
                with annotate(block_range(index)):
                    x = block(x, rotations, mask)
        x = self.ln_final(x)
        logits: Tensor = self.lm_head(x)
        return logits

    def tables(self, seq: int) -> tuple[Rotations | None, Mask | None]:
        """Rotations and mask for `seq` positions; raise ValueError if that is more than the
        context holds.
        """
        if seq > self.config.context_length:
            raise ValueError(
                f"tokens: needed at most context_length = {self.config.context_length} a row, got "
                f"{seq}"
            )
        rotations = None if self.rotations is None else self.rotations[:seq]
        return rotations, None if self.mask is None else self.mask[:seq, :seq]


class Block(nn.Module):
    """Pre-norm Transformer block: attention, then the feed-forward network, each added to the
    residual stream.

    The caller opens its range, so that a block which is compiled on its own has one too.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.range = block_range(index)
        self.ln1 = _norm(config)
        self.attn = SelfAttention(config)
        self.ln2 = _norm(config)
        feed_forward = SwiGLU if config.arch is Arch.CS336 else GeluMLP
        self.ffn = feed_forward(config.d_model, config.d_ff)

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], rotations: Rotations | None, mask: Mask | None
    ) -> Float[Tensor, "batch seq d_model"]:
        """The residual stream after the block."""
        x = x + self.attn(self.ln1(x), rotations, mask)
        output: Tensor = x + self.ffn(self.ln2(x))
        return output


class SelfAttention(nn.Module):
    """Causal multi-head self-attention, with RoPE if `rotations` are given.

    With a `mask` it is computed by `naive_attention`, without one by PyTorch's fused attention,
    which is causal itself.
    """

    range: str = Range.ATTENTION

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.d_head = config.num_heads, config.d_head
        self.is_grouped = config.num_kv_heads > 0
        self.backend = config.sdpa_backend
        bias = config.arch is Arch.GPT2
        self.q_proj = Linear(config.d_model, config.d_model, bias=bias)
        self.k_proj = Linear(config.d_model, config.kv_width, bias=bias)
        self.v_proj = Linear(config.d_model, config.kv_width, bias=bias)
        self.output_proj = Linear(config.d_model, config.d_model, bias=bias)

    def forward(
        self, x: Float[Tensor, "batch seq d_model"], rotations: Rotations | None, mask: Mask | None
    ) -> Float[Tensor, "batch seq d_model"]:
        """Causal self-attention of x.

        Without a `mask`, PyTorch's fused attention is used; with one, attention is computed step by
        step.
        """
        with annotate(self.range):
            x = to_autocast_dtype(x)
            q, k, v = self.heads(x, rotations)
            # heads before positions
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            takes_groups = mask is None and self.is_grouped and _takes_groups(q, self.backend)
            if self.is_grouped and not takes_groups:
                group = self.num_heads // k.shape[1]
                k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            if mask is None:
                values = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=takes_groups
                )
            else:
                values = naive_attention(q, k, v, mask)
            output: Tensor = self.output_proj(
                rearrange(values, "batch heads seq d_head -> batch seq (heads d_head)")
            )
            return output

    def heads(
        self, x: Float[Tensor, "batch seq d_model"], rotations: Rotations | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head, as (batch, seq, heads, d_head); grouped queries
        have fewer heads of keys and values.
        """
        q, k, v = (
            rearrange(
                projection(x),
                "batch seq (heads d_head) -> batch seq heads d_head",
                d_head=self.d_head,
            )
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        # rotated together: half as many kernels
        if rotations is not None and self.is_grouped:
            rotated = rotate_pairs(torch.cat((q, k), dim=2), rotations)
            q, k = rotated.split((q.shape[2], k.shape[2]), dim=2)
        elif rotations is not None:
            q, k = rotate_pairs(torch.cat((q, k)), rotations).chunk(2)
        return q, k, v


def _takes_groups(q: Tensor, backend: SdpaBackend) -> bool:
    """Whether PyTorch's fused attention takes fewer heads of keys and values than of queries: its
    memory-efficient kernel, which it has for fp32, does not.
    """
    return q.dtype in (torch.bfloat16, torch.float16) and backend is not SdpaBackend.EFFICIENT


def naive_attention(
    q: Float[Tensor, "... queries d_k"],
    k: Float[Tensor, "... keys d_k"],
    v: Float[Tensor, "... keys d_v"],
    mask: Mask,
) -> Float[Tensor, "... queries d_v"]:
    """Attend to the keys that `mask` allows, one operation at a time (Vaswani et al. 2017, eq. 1).

    Each call inverts the mask, which takes one small kernel.
    """
    with annotate(Range.SCORES):
        # scaled queries are fewer elements than scaled scores; a matmul would copy the keys anyway,
        # and more slowly
        scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.contiguous().transpose(-2, -1)
        # detached, or autograd would save ~mask in every layer; the softmax gives masked scores a
        # gradient of 0 anyway
        scores.detach().masked_fill_(~mask, -math.inf)
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

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """W2 (silu(W1 x) * W3 x), position by position."""
        with annotate(self.range):
            x = to_autocast_dtype(x)
            output: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
            return output


class GeluMLP(nn.Module):
    """GPT-2's feed-forward network: w2 gelu(w1 x), with biases and the tanh approximation of
    GELU.
    """

    range: str = Range.FFN

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, bias=True)
        self.w2 = Linear(d_ff, d_model, bias=True)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """W2 gelu(W1 x + b1) + b2, position by position, with the tanh approximation of GELU."""
        with annotate(self.range):
            preactivations = self.w1(x)
            activations = F.gelu(preactivations, approximate="tanh")
            output: Tensor = self.w2(activations)
            return output


class Linear(nn.Module):
    """x W^T, plus a bias if asked for."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        """x W^T, plus the bias if the layer has one."""
        return F.linear(x, self.weight, self.bias)


class LMHead(Linear):
    """Logits from the residual stream."""

    range: str = Range.LM_HEAD

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """Logits of the vocabulary for each position."""
        with annotate(self.range):
            return super().forward(x)


class Embedding(nn.Module):
    """A vector for each token, plus one for each position if `context_length` is given."""

    range: str = Range.EMBEDDING

    def __init__(self, vocab_size: int, d_model: int, context_length: int | None = None) -> None:
        """Allocate the table of tokens and, if `context_length` is given, a table of positions."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.positions = (
            None if context_length is None else nn.Parameter(torch.empty(context_length, d_model))
        )

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_model"]:
        """Embeddings of the tokens, plus those of their positions if positions are learned."""
        with annotate(self.range):
            x = F.embedding(tokens, self.weight)
            return x if self.positions is None else x + self.positions[: tokens.shape[1]]


class RMSNorm(nn.Module):
    """x over its root mean square, times a learned gain (Zhang and Sennrich 2019)."""

    range: str = Range.NORM

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """Divide each vector by its root mean square, and multiply by the weight."""
        with annotate(self.range):
            return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


class LayerNorm(nn.Module):
    """x less its mean, over its standard deviation, times a learned gain, plus a bias (Ba et al.
    2016).
    """

    range: str = Range.NORM

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """Normalise each vector to mean 0 and variance 1, then multiply by the weight and add the
        bias.
        """
        with annotate(self.range):
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, NORM_EPS)


def _norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The normalisation layer of the architecture: LayerNorm for GPT-2, else RMSNorm."""
    return RMSNorm(config.d_model) if config.arch is Arch.CS336 else LayerNorm(config.d_model)


def rope_rotations(
    context_length: int, d_head: int, theta: float
) -> Float[Tensor, "context_length pairs 2"]:
    """Cosine and sine of position x theta^(-2 pair / d_head), in fp32 (Su et al. 2021, eq. 15)."""
    frequencies = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


def rotate_pairs(
    x: Float[Tensor, "batch seq heads d_head"], rotations: Rotations
) -> Float[Tensor, "batch seq heads d_head"]:
    """Rotate each pair of features (2i, 2i + 1) by the angle of its position, in fp32 for any
    type of `x`.
    """
    pairs = rearrange(x.float(), "batch seq heads (pairs two) -> batch seq heads pairs two", two=2)
    rotations = rotations.unsqueeze(1)
    if torch.compiler.is_compiling():
        # Inductor generates no code for complex numbers, and fuses these
        (even, odd), (cos, sin) = pairs.unbind(-1), rotations.unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        # complex numbers need one kernel
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(rotations)
        rotated = torch.view_as_real(turned)
    return rotated.flatten(-2).to(x.dtype)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x, cast once to autocast's type if autocast is on. Autocast itself casts and saves a copy
    for each matmul.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


_BACKENDS = {
    SdpaBackend.FLASH: SDPBackend.FLASH_ATTENTION,
    SdpaBackend.CUDNN: SDPBackend.CUDNN_ATTENTION,
    SdpaBackend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    SdpaBackend.MATH: SDPBackend.MATH,
}


def attention_backend(backend: SdpaBackend) -> AbstractContextManager[object]:
    """While open, PyTorch's fused attention uses this backend alone."""
    return nullcontext() if backend is SdpaBackend.AUTO else sdpa_kernel(_BACKENDS[backend])


def _initialise_cs336(model: nn.Module) -> None:
    """The course's: normal with variance 2 / (d_in + d_out), 1 for embeddings, cut at 3 standard
    deviations.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 1.0 if name == "token_embeddings.weight" else math.sqrt(2 / sum(parameter.shape))
            nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std)


def _initialise_gpt2(model: nn.Module, num_layers: int) -> None:
    """GPT-2's: normal with standard deviation 0.02, over sqrt(2 num_layers) in layers that add to
    the residual stream.

    Biases are 0.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("output_proj.weight", "ffn.w2.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
