"""Models that go wrong on one of their ranks: `--model parallel_models:killed`, a name that a
link gives this file.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

FAULTY_RANK = 1
FAULTY_CALL = 4
"""Which forward goes wrong: the one that finds the vocabulary and two steps of warm-up are good."""

SLEEP_S = 0.2
SPIN_CYCLES = 40_000_000
"""Some 20 ms on a GPU, a hundred times as long as the all-reduce of what it hides."""


class Faulty(nn.Module):
    def __init__(self, fault, vocab_size):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
        self.fault, self.calls = fault, 0

    def forward(self, tokens):
        self.calls += 1
        if self.calls == FAULTY_CALL and dist.get_rank() == FAULTY_RANK:
            self.fault()
        return self.head(self.embedding(tokens))


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _hang():
    Path("hangs").touch()
    time.sleep(1000)


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def _ask_for_a_pebibyte():
    torch.empty(2**50, dtype=torch.uint8, device="cuda" if dist.get_backend() == "nccl" else "cpu")


class Slow(Faulty):
    def forward(self, tokens):
        time.sleep(SLEEP_S * (dist.get_rank() == FAULTY_RANK))
        return super().forward(tokens)


class Spinning(Faulty):
    """Its large gradients are there before backward keeps the GPU busy for SPIN_CYCLES.

    Forward begins with as long a wait, so that the host has launched all of backward before the GPU
    comes to it.
    """

    def __init__(self, vocab_size):
        super().__init__(lambda: None, vocab_size)
        self.wide = nn.Linear(8, 1_000_000)

    def forward(self, tokens):
        torch.cuda._sleep(SPIN_CYCLES)
        x = self.embedding(tokens)
        if x.requires_grad:
            x.register_hook(lambda _gradient: torch.cuda._sleep(SPIN_CYCLES))
        return self.head(x) + self.wide(x).mean(-1, keepdim=True)


def spinning(vocab_size: int) -> nn.Module:
    return Spinning(vocab_size)


def slow(vocab_size: int) -> nn.Module:
    return Slow(lambda: None, vocab_size)


def good(vocab_size: int) -> nn.Module:
    return Faulty(lambda: None, vocab_size)


def killed(vocab_size: int) -> nn.Module:
    return Faulty(_kill, vocab_size)


def hangs(vocab_size: int) -> nn.Module:
    return Faulty(_hang, vocab_size)


def stops(vocab_size: int) -> nn.Module:
    return Faulty(_stop, vocab_size)


def out_of_memory(vocab_size: int) -> nn.Module:
    return Faulty(_ask_for_a_pebibyte, vocab_size)
