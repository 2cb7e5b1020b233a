"""Language models that a seed draws from parts that users' models have: `--model
tests.drawn_models:of_seed_3`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and parts of a model."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    shared_by: int = 1
    """Heads of queries that share one of keys and values."""
    key_width: int = 64
    value_width: int = 64
    norm: str = "weighted"
    attention: str = "causal"
    feed_forward: str = "gelu"
    cap: float = 0.0
    """Largest logit, by a tanh; 0 for none."""
    experts: int = 8
    top_k: int = 2


NORMS = ("weighted", "bare", "layer", "upcast")
ATTENTIONS = ("causal", "masked", "written", "normed")
FEED_FORWARDS = ("gelu", "squared", "powered", "gated", "grouped", "looped")


class Norm(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.weight = kind, None if kind == "bare" else nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1:]
        if self.kind == "upcast":  # as transformers has it
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * wide.to(x.dtype)
        return (
            F.layer_norm(x, size, self.weight)
            if self.kind == "layer"
            else F.rms_norm(x, size, self.weight)
        )


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, pairs = shape, shape.heads // shape.shared_by
        self.q = nn.Linear(shape.width, shape.heads * shape.key_width, bias=False)
        self.k = nn.Linear(shape.width, pairs * shape.key_width, bias=False)
        self.v = nn.Linear(shape.width, pairs * shape.value_width, bias=False)
        self.out = nn.Linear(shape.heads * shape.value_width, shape.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        shape = self.shape
        q, k = (
            part(x).unflatten(-1, (-1, shape.key_width)).transpose(1, 2)
            for part in (self.q, self.k)
        )
        v = self.v(x).unflatten(-1, (-1, shape.value_width)).transpose(1, 2)
        k, v = (
            part.repeat_interleave(shape.shared_by, dim=1) if shape.shared_by > 1 else part
            for part in (k, v)
        )
        if shape.attention == "normed":
            q, k = (F.rms_norm(part, part.shape[-1:]).to(v.dtype) for part in (q, k))
        if shape.attention == "written":
            scores = (q @ k.transpose(-2, -1) * shape.key_width**-0.5).masked_fill(
                ~mask, -torch.inf
            )
            y = scores.softmax(-1).to(v.dtype) @ v
        elif shape.attention == "masked":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind, hidden = shape.feed_forward, 4 * shape.width
        self.up = nn.Linear(shape.width, hidden * (2 if self.kind == "gated" else 1), bias=False)
        self.down = nn.Linear(hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.kind == "gated":
            gate, x = x.chunk(2, -1)
            return self.down(F.silu(gate) * x)
        acts = {
            "gelu": F.gelu,
            "squared": lambda x: F.relu(x).square(),
            "powered": lambda x: F.relu(x) ** 2,
        }
        return self.down(acts[self.kind](x))


class Experts(nn.Module):
    """Tokens sorted by expert and grouped matmuls, as in transformers 5, or a loop over the
    experts, as before.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind, self.top_k, self.count, hidden = (
            shape.feed_forward,
            shape.top_k,
            shape.experts,
            shape.width,
        )
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.up = nn.Parameter(torch.randn(shape.experts, 2 * hidden, shape.width) * 0.02)
        self.down = nn.Parameter(torch.randn(shape.experts, shape.width, hidden) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k, dim=-1)
        run = self._grouped if self.kind == "grouped" else self._looped
        return run(tokens, weights, chosen).view_as(x)

    def _grouped(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().sort().indices
        kind = torch.int32 if tokens.is_cuda else torch.float32
        counts = torch.histc(chosen.flatten().to(kind), bins=self.count, min=0, max=self.count - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = tokens[order // self.top_k].to(self.up.dtype)
        gate, up = F.grouped_mm(rows, self.up.transpose(-2, -1), offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        rows = rows * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, rows.to(tokens.dtype))

    def _looped(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(tokens)
        for expert in range(self.count):
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(tokens[token], self.up[expert]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, place, None]
            y.index_add_(0, token, rows.to(y.dtype))
        return y


class Drawn(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        self.embedding, self.head = (
            nn.Embedding(shape.vocab_size, width),
            nn.Linear(width, shape.vocab_size, bias=False),
        )
        kind: Callable[[Shape], nn.Module] = (
            Experts if shape.feed_forward in FEED_FORWARDS[-2:] else Dense
        )
        self.attention = nn.ModuleList(Attention(shape) for _ in range(shape.layers))
        self.feed_forward = nn.ModuleList(kind(shape) for _ in range(shape.layers))
        self.norms = nn.ModuleList(Norm(shape.norm, width) for _ in range(2 * shape.layers + 1))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None, None]
        x, norms = self.embedding(tokens), iter(self.norms)
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x = x + attention(next(norms)(x), mask)
            x = x + feed_forward(next(norms)(x))
        logits = self.head(next(norms)(x))
        return self.shape.cap * torch.tanh(logits / self.shape.cap) if self.shape.cap else logits


LARGE = {"vocab_size": 32_000, "width": 1024, "layers": 8, "heads": 16}
NAMED: dict[str, dict[str, Any]] = {
    "mixtral": {"norm": "upcast", "shared_by": 4, "feed_forward": "grouped"},
    "deepseek": {"norm": "upcast", "key_width": 192, "value_width": 128, "feed_forward": "grouped"},
    "block": {"norm": "bare", "feed_forward": "squared", "cap": 15.0, "attention": "normed"},
    "gemma": {
        "norm": "upcast",
        "heads": 4,
        "key_width": 256,
        "value_width": 256,
        "attention": "masked",
    },
}
"""Parts of models that exist."""


def drawn(seed: int, **sizes: int) -> Shape:
    """The shape of this seed, with these sizes."""
    choose = random.Random(seed).choice
    attention = choose(ATTENTIONS)
    widths = choose([(64, 64), (128, 128), (48, 48), (192, 128), (96, 32), (256, 256), (320, 320)])
    return Shape(
        norm=choose(NORMS),
        attention=attention,
        feed_forward=choose(FEED_FORWARDS),
        cap=choose([0.0, 15.0]),
        key_width=widths[0],
        value_width=widths[1],
        shared_by=choose([1, 2]),
        top_k=choose([1, 2, 3]),
        **sizes,
    )


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """A factory of a large model: `of_seed_N`, or a name of NAMED."""
    if name in NAMED:
        return partial(Drawn, Shape(**LARGE | NAMED[name]))
    if name.startswith("of_seed_"):
        return partial(Drawn, drawn(int(name.removeprefix("of_seed_")), **LARGE))
    raise AttributeError(name)
