"""Logs a watched loop to Weights & Biases: python examples/watch_wandb.py"""

from typing import Any

import torch
import wandb
from torch import nn

from cs336 import watch


def train(steps: int = 200, every: int = 20, project: str = "watched", **options: Any) -> None:
    """Train a small model on random tokens; `options` are those of `watch`."""
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))
    optimizer = torch.optim.AdamW(model.parameters())
    watched = watch(model, optimizer, **options)
    with wandb.init(project=project) as run:
        for step in range(steps):
            tokens = torch.randint(1000, (8, 128))
            with watched.step():
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if step % every == every - 1:
                # the means of the steps since the last call; empty in the warm-up
                run.log(watched.metrics(), step=step)
    watched.report()


if __name__ == "__main__":
    train()
