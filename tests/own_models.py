"""Models as users bring them, good and bad: `--model tests.own_models:BasicsTransformerLM`."""

import contextlib
import sys
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336.model.annotate import annotate


class BasicsTransformerLM(nn.Module):
    """A look-alike of the course's own model: its signature, the keys of its state dict, its
    formulas.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float,
    ) -> None:
        super().__init__()
        self.token_embeddings = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(
            _BasicsBlock(d_model, num_heads, d_ff) for _ in range(num_layers)
        )
        self.ln_final = nn.RMSNorm(d_model, eps=1e-5)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        d_head = d_model // num_heads
        angles = torch.arange(context_length)[:, None] / rope_theta ** (
            torch.arange(0, d_head, 2) / d_head
        )
        self.register_buffer("cos_sin", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embeddings(tokens)
        cos, sin = self.cos_sin[:, : tokens.shape[1]]
        for layer in self.layers:
            x = x + layer.attn(layer.ln1(x), cos, sin)
            x = x + layer.ffn(layer.ln2(x))
        return self.lm_head(self.ln_final(x))


class _BasicsBlock(nn.Module):
    def __init__(self, d_model: int, num_heads: int, d_ff: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.RMSNorm(d_model, eps=1e-5), nn.RMSNorm(d_model, eps=1e-5)
        self.attn, self.ffn = (
            _BasicsAttention(d_model, num_heads),
            _BasicsFeedForward(d_model, d_ff),
        )


class _BasicsAttention(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.output_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rotated(pairs: Tensor) -> Tensor:
            even, odd = pairs[..., 0::2], pairs[..., 1::2]
            return torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1).flatten(-2)

        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).reshape(batch, seq, self.num_heads, -1).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = torch.einsum("bhqd,bhkd->bhqk", rotated(q), rotated(k)) / q.shape[-1] ** 0.5
        mask = torch.arange(seq, device=x.device)[:, None] >= torch.arange(seq, device=x.device)
        weights = torch.softmax(torch.where(mask, scores, -torch.inf), dim=-1)
        return self.output_proj(torch.einsum("bhqk,bhkd->bqhd", weights, v).reshape(batch, seq, -1))


class _BasicsFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w1, self.w3 = (
            nn.Linear(d_model, d_ff, bias=False),
            nn.Linear(d_model, d_ff, bias=False),
        )
        self.w2 = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))


def bigram(vocab_size: int, **others: object) -> nn.Module:
    """The smallest model there is: a table of logits."""
    assert not others, "only what the signature names is passed"
    return nn.Embedding(vocab_size, vocab_size)


def in_float64_by_default(vocab_size: int) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    return nn.Embedding(vocab_size, vocab_size)


def leaves_float64_as_default(vocab_size: int) -> nn.Module:
    made = nn.Embedding(vocab_size, vocab_size)
    torch.set_default_dtype(torch.float64)
    return made


def one_parameter_in_bf16(vocab_size: int, d_model: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(vocab_size, d_model, dtype=torch.bfloat16),
        To(torch.float32),
        nn.Linear(d_model, vocab_size),
    )


def logits_in_bf16(vocab_size: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocab_size, vocab_size), To(torch.bfloat16))


class To(nn.Module):
    """Converts what comes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class PrefersTf32(nn.Module):
    """Sets a mode of its own, as scripts do, and notes which one is in force when it runs."""

    in_force: ClassVar[set[str]] = set()

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        torch.set_float32_matmul_precision("high")
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        self.in_force.add(torch.get_float32_matmul_precision())
        return self.table(tokens)


class Ranged(nn.Module):
    """A module of somebody's model that has a range, and does what it is given to do."""

    def __init__(self, d_model: int, name: str, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.range, self.act = name, act
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        with annotate(self.range):
            return self.act(self.linear(x))


class Cut(Ranged):
    """Backward ends inside it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Uneven(nn.Module):
    """A model with what makes autograd's graph uneven: parts that nobody uses, detach, fail or
    come again.
    """

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, d_model)
        self.unused = Ranged(d_model, "unused", torch.tanh)
        self.detached = Ranged(d_model, "detached", Tensor.detach)
        self.around = Ranged(d_model, "around", Cut(d_model, "cut", torch.tanh))
        self.failing = Ranged(d_model, "failing", lambda x: x.reshape(0))
        self.twice = Ranged(d_model, "twice", torch.tanh)
        self.again = nn.Sequential(
            Ranged(d_model, "again.0", torch.sigmoid), Ranged(d_model, "again.1", torch.sigmoid)
        )
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(self.table(tokens))
        self.unused(x)
        with contextlib.suppress(RuntimeError):
            self.failing(x)
        x = x + self.detached(x) + self.around(x) + self.twice(x)
        for is_reentrant in (False, True):
            x = checkpoint(self.again, x, use_reentrant=is_reentrant)
        return self.head(x)


def ends_the_process(vocab_size: int) -> nn.Module:
    """As a module does that parses its own arguments when it is imported."""
    sys.exit(0)


def out_of_memory(vocab_size: int) -> nn.Module:
    raise MemoryError


def interrupted(vocab_size: int) -> nn.Module:
    raise KeyboardInterrupt
