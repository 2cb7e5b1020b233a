"""Batches for a training step: random tokens, or slices of a memory-mapped token file."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..config import Device, RunConfig
from .tokens import open_tokens

Batch = tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]
"""Tokens, and the tokens to predict, which are the next ones; int64."""


def random_batches(config: RunConfig, rank: int = 0) -> Callable[[], Batch]:
    """The same uniformly random tokens in every step, on the device from the start; each call
    returns the next micro-batch of the step.

    All ranks draw the same tokens, and each takes its part.
    """
    generator = torch.Generator().manual_seed(config.seed)
    sequences = config.accumulate_steps * config.batch_size
    size = (config.ranks * sequences, config.model.context_length + 1)
    drawn = torch.randint(config.model.vocab_size, size, generator=generator)
    tokens = drawn[rank * sequences : (rank + 1) * sequences].to(config.device.value)
    batches = []
    for part in tokens.split(config.batch_size):
        batches.append((part[:, :-1].contiguous(), part[:, 1:].contiguous()))
    return partial(next, cycle(batches))


class FileBatches:
    """Random slices of a token file, checked against the vocabulary, through pinned memory to the
    device.

    All ranks draw the same places in the file, and each reads its part of them.
    """

    def __init__(self, config: RunConfig, rank: int = 0) -> None:
        """Open the configuration's token file, and allocate a staging buffer of (batch, context +
        1) tokens, in pinned memory for a GPU. `rank` chooses this rank's part of every batch.
        """
        assert config.tokens is not None
        self._config = config
        self._part = _part(config, rank)
        self._tokens = open_tokens(Path(config.tokens), config.model.context_length)
        self._generator = np.random.default_rng(config.seed)
        on_gpu = config.device is Device.CUDA
        self._staging = torch.empty(
            (config.batch_size, config.model.context_length + 1),
            dtype=torch.int64,
            pin_memory=on_gpu,
        )
        self._copied = torch.cuda.Event() if on_gpu else None

    def __call__(self) -> Batch:
        """The next batch; raise ValueError for a token outside the vocabulary."""
        length = self._config.model.context_length
        if self._copied is not None:
            self._copied.synchronize()
        count = self._config.ranks * self._config.batch_size
        starts = self._generator.integers(len(self._tokens) - length, size=count)[self._part]
        rows = np.stack([self._tokens[start : start + length + 1] for start in starts])
        vocab_size = self._config.model.vocab_size
        if rows.min() < 0 or rows.max() >= vocab_size:
            advice = "; pass the tokenizer's --vocab-size" if rows.min() >= 0 else ""
            raise ValueError(
                f"{self._config.tokens}: tokens must be from 0 to vocab_size - 1 = "
                f"{vocab_size - 1}, found {rows.min()} to {rows.max()}{advice}"
            )
        self._staging.copy_(torch.from_numpy(rows.astype(np.int64)))
        on_device = self._staging.to(self._config.device.value, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return on_device[:, :-1].contiguous(), on_device[:, 1:].contiguous()


def make_batches(config: RunConfig, rank: int = 0) -> Callable[[], Batch]:
    """The source of batches that the configuration names, for one of its ranks."""
    return random_batches(config, rank) if config.tokens is None else FileBatches(config, rank)


def _part(config: RunConfig, rank: int) -> slice:
    """The rows of a global batch that this rank trains on; all ranks have equal, contiguous parts
    of the batch.
    """
    return slice(rank * config.batch_size, (rank + 1) * config.batch_size)
