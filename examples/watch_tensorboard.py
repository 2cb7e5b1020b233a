"""Logs a watched loop to TensorBoard: python examples/watch_tensorboard.py"""

from typing import Any

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from cs336 import watch


def train(steps: int = 200, every: int = 20, logs: str = "runs", **options: Any) -> None:
    """Train a small model on random tokens; `options` are those of `watch`."""
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))
    optimizer = torch.optim.AdamW(model.parameters())
    watched = watch(model, optimizer, **options)
    with SummaryWriter(logs) as writer:
        for step in range(steps):
            tokens = torch.randint(1000, (8, 128))
            with watched.step():
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if step % every == every - 1:
                # the means of the steps since the last call; empty in the warm-up
                for name, value in watched.metrics().items():
                    writer.add_scalar(name, value, step)
    watched.report()


if __name__ == "__main__":
    train()
