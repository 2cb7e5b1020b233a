"""A training loop of a plain PyTorch model, watched: python examples/loop.py"""

from typing import Any

import torch
from torch import Tensor, nn

from cs336 import watch

VOCABULARY = 10_000
SHAPES = {"cuda": (16, 512, 1024, 12), "cpu": (4, 128, 128, 2)}
"""Sequences, tokens of each, width and layers: what a GPU does in seconds, and a laptop."""


class LanguageModel(nn.Module):
    """PyTorch's own encoder layers under a causal mask."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, sequence, vocabulary) of tokens (batch, sequence)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return logits


def train(steps: int = 30, **options: Any) -> None:  # noqa: ANN401
    """Train on random tokens; `options` are those of `watch`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, context, width, layers = SHAPES[device]
    model = LanguageModel(width, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    watched = watch(model, optimizer, name="loop", **options)
    for number in range(1, steps + 1):
        tokens = torch.randint(VOCABULARY, (batch, context + 1), device=device)
        with watched.step():
            # few CPUs are faster in bf16, and many far slower
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 10 == 0:
            print(f"step {number} of {steps}: loss {loss.item():.2f}")
    watched.report()


if __name__ == "__main__":
    train()
