"""Models as users bring them, good and bad: `--model tests.own_models:BasicsTransformerLM`."""

import sys
from typing import ClassVar

import torch
from torch import Tensor, nn


class BasicsTransformerLM(nn.Module):
    """A stand-in for the course's own model: its signature, and a small causal Transformer behind it."""

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
        block = nn.TransformerEncoderLayer(d_model, num_heads, d_ff, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        frequencies = rope_theta ** (-torch.arange(0, d_model, 2) / d_model)
        angles = torch.outer(torch.arange(context_length), frequencies)
        self.register_buffer("positions", torch.cat((angles.sin(), angles.cos()), -1)[:, :d_model], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        x = self.token_embeddings(tokens) + self.positions[:seq]
        future = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).triu(1)
        return self.lm_head(self.layers(x, mask=future, is_causal=True))


def talkative(vocab_size: int, d_model: int) -> nn.Module:
    """Prints while it is made."""
    print("hello from the factory")
    return nn.Sequential(nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size))


class _Logits(nn.Module):
    """A model of transformers, less what its output holds besides the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def gpt2(vocab_size: int, context_length: int, d_model: int, num_layers: int, num_heads: int, d_ff: int) -> nn.Module:
    """GPT-2 of Hugging Face's transformers, without dropout, at the shape asked for."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(
        vocab_size=vocab_size, n_positions=context_length, n_embd=d_model, n_layer=num_layers, n_head=num_heads,
        n_inner=d_ff, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _Logits(GPT2LMHeadModel(shape))


def bigram(vocab_size: int, **others: object) -> nn.Module:
    """The smallest model there is: a table of logits."""
    assert not others, "only what the signature names is passed"
    return nn.Embedding(vocab_size, vocab_size)


def needs_dropout(vocab_size: int, dropout: float, experts: int, bias: bool = False) -> nn.Module:
    raise AssertionError("must not be called without dropout and experts")


def not_a_module(vocab_size: int) -> list[int]:
    return [vocab_size]


def one_logit_too_many(vocab_size: int) -> nn.Module:
    return nn.Embedding(vocab_size, vocab_size + 1)


class ReturnsATuple(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.table(tokens), None


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


def ends_the_process(vocab_size: int) -> nn.Module:
    """As a module does that parses its own arguments when it is imported."""
    sys.exit(0)


def out_of_memory(vocab_size: int) -> nn.Module:
    raise MemoryError


def interrupted(vocab_size: int) -> nn.Module:
    raise KeyboardInterrupt


not_callable = 3
