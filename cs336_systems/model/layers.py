"""The layers that a Transformer is put together from: linear ones, the embedding, the head, the norms."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor, nn

from cs336_systems.model.annotate import annotate
from cs336_systems.model.fast.fp8 import fp8_linear
from cs336_systems.model.fast.fused_blocks import add_norm
from cs336_systems.model.fast.lookup import lookup
from cs336_systems.ranges import Range


class Pending(NamedTuple):
    """A residual stream, and what whoever reads it has to add first: a branch and, where it has one, its bias."""

    stream: Float[Tensor, "batch seq d_model"]
    branch: Float[Tensor, "batch seq d_model"]
    bias: Float[Tensor, " d_model"] | None


class Embedding(nn.Module):
    """A vector for each token, plus one for each position where `context_length` is given."""

    range: str = Range.EMBEDDING

    def __init__(self, vocab_size: int, d_model: int, context_length: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.positions = None if context_length is None else nn.Parameter(torch.empty(context_length, d_model))
        self.has_fused_backward = False
        """Whether gradients are added to their rows in one pass (model/fast/lookup.py)."""

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq d_model"]:
        with annotate(self.range):
            x = lookup(self.weight, tokens) if self.has_fused_backward else F.embedding(tokens, self.weight)
            return x if self.positions is None else x + self.positions[: tokens.shape[1]]


class Copies(NamedTuple):
    """A weight and, where there is one, a bias, in low precision."""

    weight: Tensor
    bias: Tensor | None
    in_fp8: bool = False
    """Whether the product casts both its factors to fp8."""
    is_bias_due: bool = False
    """Whether the bias is left to whoever reads the product."""

    def product(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        """x W^T, plus the bias unless that is left to others."""
        return (fp8_linear if self.in_fp8 else F.linear)(x, self.weight, None if self.is_bias_due else self.bias)


class Linear(nn.Module):
    """x W^T, plus a bias where asked for."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None
        self.copies: Copies | None = None
        """Copies of both, to be read in their place (model/fast/weights.py)."""

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        return F.linear(x, self.weight, self.bias) if self.copies is None else self.copies.product(x)

    @property
    def bias_due(self) -> Float[Tensor, " d_out"] | None:
        """The bias that whoever reads the product has to add; None where it is in it, or there is none."""
        return self.copies.bias if self.copies is not None and self.copies.is_bias_due else None


class LMHead(Linear):
    """Logits from the residual stream."""

    range: str = Range.LM_HEAD
    multiple: int = 1
    """Of which the product computes logits, with weights of 0 for the surplus, which is returned only if asked for."""

    def forward(self, x: Float[Tensor, "... d_model"], *, with_surplus: bool = False) -> Float[Tensor, "... vocab"]:
        logits = self._padded(x)
        return logits if with_surplus or logits.shape[-1] == len(self.weight) else logits[..., : len(self.weight)]

    def _padded(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... padded"]:
        with annotate(self.range):
            if self.copies is not None:
                return self.copies.product(x)
            if surplus := -len(self.weight) % self.multiple:
                return F.linear(x, F.pad(to_autocast_dtype(self.weight), (0, 0, 0, surplus)))
            return F.linear(x, self.weight)


class Norm(nn.Module):
    """A norm with a learned gain: with a bias LayerNorm, without one RMSNorm."""

    range: str = Range.NORM
    bias: nn.Parameter | None

    def __init__(self, d_model: int, eps: float = 1e-5, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None
        self.eps = eps

    def forward(
        self, x: Float[Tensor, "... d_model"] | Pending
    ) -> Float[Tensor, "... d_model"] | tuple[Tensor, Tensor]:
        """The norm of x; of a Pending, the stream with all added, and the norm of that."""
        with annotate(self.range):
            if isinstance(x, Pending):
                return add_norm(*x, self.weight, self.bias, self.eps)
            if self.bias is None:
                return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(Norm):
    """x over its root mean square, times a learned gain (Zhang and Sennrich 2019)."""


class LayerNorm(Norm):
    """x less its mean, over its standard deviation, times a learned gain, plus a bias (Ba et al. 2016)."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__(d_model, eps, bias=True)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in autocast's type, where it is on: by itself it makes, and keeps for backward, a copy for each product."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
