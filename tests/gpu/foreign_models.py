"""Models that nobody here wrote, in shapes that nobody published: `--model
tests.gpu.foreign_models:llama`.

Their contexts, batches and vocabularies are in data/published/forecast/foreign.json.
"""

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def gpt2(context_length: int, vocab_size: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=1024,
            n_layer=12,
            n_head=16,
            n_positions=context_length,
            vocab_size=vocab_size,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def llama(context_length: int, vocab_size: int) -> nn.Module:
    """Four heads share one of keys and values."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=1280,
            intermediate_size=3456,
            num_hidden_layers=12,
            num_attention_heads=20,
            num_key_value_heads=5,
            max_position_embeddings=context_length,
            vocab_size=vocab_size,
            use_cache=False,
        )
    )


def llama_eager(context_length: int, vocab_size: int) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=10,
            num_attention_heads=12,
            vocab_size=vocab_size,
            max_position_embeddings=context_length,
            use_cache=False,
            attn_implementation="eager",
        )
    )


def qwen3(context_length: int, vocab_size: int) -> nn.Module:
    """Heads of 128 beside a width of 64 for each, and norms of queries and keys."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=10,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=context_length,
            vocab_size=vocab_size,
            use_cache=False,
        )
    )


class Encoder(nn.Module):
    """A language model of PyTorch's own encoder layers, with a causal mask."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, 1024), nn.Linear(1024, vocab_size)
        layer = nn.TransformerEncoderLayer(
            1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 10, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


def encoder(vocab_size: int) -> nn.Module:
    return Encoder(vocab_size)


class NanoGPT(nn.Module):
    """nanoGPT's interface and blocks: one projection for queries, keys and values, GELU, a tied
    head.
    """

    def __init__(self, context_length: int, vocab_size: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, 1152), nn.Embedding(context_length, 1152)
        self.h = nn.ModuleList(NanoBlock() for _ in range(9))
        self.ln_f, self.lm_head = nn.LayerNorm(1152), nn.Linear(1152, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        )


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.c_attn, self.c_proj = (
            nn.LayerNorm(1152),
            nn.Linear(1152, 3456),
            nn.Linear(1152, 1152),
        )
        self.ln_2, self.mlp = (
            nn.LayerNorm(1152),
            nn.Sequential(nn.Linear(1152, 4608), nn.GELU(), nn.Linear(4608, 1152)),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (18, 64)).transpose(1, 2) for part in parts)
        x = x + self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.ln_2(x))
