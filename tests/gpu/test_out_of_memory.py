"""Loops for which memory does not suffice: the batch that is advised fits, and one more does not.

`pytest -m gpu tests/gpu/test_out_of_memory.py -s` prints a table; OUT_OF_MEMORY_CSV=FILE keeps it.
"""

import contextlib
import csv
import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336 import watch
from cs336.config import SIZES, Attention
from cs336.measure.failure import classify
from cs336.model.transformer import TransformerLM
from cs336.record import Status

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(600)]
GIB, STEPS, VOCABULARY = 2**30, 3, 8192


class Encoder(nn.Module):
    """A language model of PyTorch's own encoder layers."""

    def __init__(self, width=512, layers=6):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


class Recurrent(nn.Module):
    """A language model of two layers of LSTM."""

    def __init__(self, width=768):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


class ConvBlock(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(8, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1)

    def forward(self, x):
        return self.skip(x) + self.conv(F.silu(self.norm(x)))


class UNet(nn.Module):
    """Images in, images out, with what goes down kept for the way up."""

    def __init__(self, width=64, levels=3):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        sizes = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(ConvBlock(a, b) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(ConvBlock(2 * b, a) for a, b in reversed([*pairwise(sizes)]))

    def forward(self, x):
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], dim=1))
        return self.last(x)


class ViTBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class ViT(nn.Module):
    """Classes of images, which the model compares with labels itself."""

    def __init__(self, width=512, layers=8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.positions = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.Sequential(*(ViTBlock(width) for _ in range(layers)))
        self.head = nn.Linear(width, 1000)

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits = self.head(self.blocks(x).mean(dim=1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Perceptron(nn.Module):
    """Layers within checkpoints of their own."""

    def __init__(self, width=1024, layers=12):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


class Experts(nn.Module):
    """A mixture of four experts, of which each token weighs all."""

    def __init__(self, width=512, layers=4):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.layers = nn.ModuleList(ExpertLayer(width) for _ in range(layers))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ExpertLayer(nn.Module):
    def __init__(self, width, experts=4):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        y = self.norm(x)
        weights = self.router(y).softmax(dim=-1)
        for number, expert in enumerate(self.experts):
            x = x + weights[..., number, None] * expert(y)
        return x


# batches, and what the loops do with them


def tokens(length, batch):
    return torch.randint(VOCABULARY, (batch, length), device="cuda")


def images(size, batch):
    return torch.randn(batch, 3, size, size, device="cuda")


def rows(width, batch):
    return torch.randn(batch, 512, width, device="cuda")


def next_tokens(model, batch):
    logits = model(batch)
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


def next_tokens_without_names(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def same_again(model, batch):
    return F.mse_loss(model(batch), batch)


def own_loss(model, batch):
    labels = torch.zeros(len(batch), dtype=torch.int64, device="cuda")
    return model(batch, labels=labels)["loss"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loop, and the room that it gets."""

    name: str
    make: object
    batch: object
    loss: object
    optimizer: object = torch.optim.AdamW
    room_gib: float = 4.0
    asked: int = 512
    autocast: bool = False


def ours(size, **changes):
    length = changes.pop("context_length", 256)
    shape = replace(SIZES[size], vocab_size=VOCABULARY, context_length=length, **changes)
    return partial(TransformerLM, shape), partial(tokens, length)


def case(name, made, loss, **more):
    return Case(name=name, make=made[0], batch=made[1], loss=loss, **more)


WRONG_WITH_CHECKPOINTS = {"encoder"}
"""Models whose advised batch with checkpoints is known not to fit: of this one an H200 reserves
4.004 GiB where 3.984 are foretold and 4 are there.
"""
SGD = partial(torch.optim.SGD, lr=0.001, momentum=0.9)
FUSED = partial(torch.optim.AdamW, fused=True)
SDPA = Attention.SDPA
CASES = [
    case("ours tiny", ours("tiny", context_length=512), next_tokens, room_gib=3.0),
    case("ours small", ours("small"), next_tokens, room_gib=5.0),
    case("ours small, bf16", ours("small"), next_tokens, room_gib=5.0, autocast=True),
    case(
        "ours small, sdpa", ours("small", attention=SDPA), next_tokens_without_names, room_gib=5.0
    ),
    case(
        "ours medium, sdpa, bf16, fused",
        ours("medium", attention=SDPA, context_length=512),
        next_tokens,
        optimizer=FUSED,
        room_gib=14.0,
        autocast=True,
    ),
    case(
        "ours gpt2, SGD",
        ours("gpt2", context_length=512),
        next_tokens_without_names,
        optimizer=SGD,
        room_gib=6.0,
    ),
    case("encoder", (Encoder, partial(tokens, 256)), next_tokens),
    case("LSTM", (Recurrent, partial(tokens, 128)), next_tokens),
    case("UNet", (UNet, partial(images, 128)), same_again, optimizer=SGD),
    case("ViT, own loss", (ViT, partial(images, 224)), own_loss, autocast=True),
    case("MLP with checkpoints", (Perceptron, partial(rows, 1024)), same_again),
    case("experts", (Experts, partial(tokens, 256)), next_tokens_without_names, optimizer=FUSED),
]


@contextlib.contextmanager
def room(gib):
    """Let PyTorch's allocator have so much, and nothing before it."""
    empty()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        empty()


def empty():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def train(case, batch_size, watched=None, wrap=None, steps=STEPS):
    """Train for some steps with batches of one size."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = case.make()
    optimizer = case.optimizer(model.parameters())
    if wrap is not None:
        wrap(model)
    watching = None if watched is None else watched(model, optimizer)
    try:
        for _ in range(steps):
            with contextlib.nullcontext() if watching is None else watching.step():
                batch = case.batch(batch_size)
                with torch.autocast("cuda", torch.bfloat16, enabled=case.autocast):
                    loss = case.loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if watching is not None:
            watching.remove()
    torch.cuda.synchronize()


def with_checkpoints(model):
    """Put each block into a checkpoint, as a user would who reads the advice."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) and len({*map(type, child)}) == 1:
            for block in child:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        else:
            with_checkpoints(child)


def outcome(case, batch_size, wrap=None):
    """Whether the steps fit, and the peaks of allocated and reserved memory (GiB)."""
    with room(case.room_gib):
        fits = True
        try:
            train(case, batch_size, wrap=wrap)
        except RuntimeError as error:
            # cuBLAS and cuDNN raise their own errors
            if classify(error) is not Status.OOM and "ALLOC_FAILED" not in str(error):
                raise
            fits = False
        peaks = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    return fits, *peaks


def explained(case, folder):
    """What the record says of a loop for which memory does not suffice, after how many seconds, and
    what the explanation has left on the GPU.
    """
    made = []

    def watched(model, optimizer):
        made.append(watch(model, optimizer, warmup_steps=0, output=folder))
        return made[0]

    with room(case.room_gib):
        before = torch.cuda.memory_allocated()
        begun = perf_counter()
        # the traceback holds the step's memory until the error is gone
        with contextlib.suppress(torch.OutOfMemoryError):
            train(case, case.asked, watched=watched)
            pytest.fail(f"{case.name}: batch {case.asked} fits {case.room_gib} GiB")
        told = made[0].record().seen.out_of_memory
        made[0].remove()
        seconds = perf_counter() - begun
        empty()
        left = torch.cuda.memory_allocated() - before
    return told, seconds, left


def alone(pool, function, *arguments, **named):
    """The result of a function in a process of its own, in which nothing was allocated before."""
    return pool.submit(function, *arguments, **named).result()


def measured(case, folder, pool):
    """The row of a case."""
    row = {"name": case.name, "asked": case.asked, "room_gib": case.room_gib}
    told, row["explained_s"], row["left"] = alone(pool, explained, case, folder)
    row |= {"doing": told.doing, "module": told.module, "why": told.not_foretold}
    held = sum(holder.held_bytes for holder in told.holders)
    rest = sum(one.held_bytes for one in told.holders if one.category.startswith("not reached"))
    row["held_is_reserved"] = held == told.reserved_bytes
    row["not_reached"] = round(rest / told.allocated_bytes, 4)
    if not told.fits or not told.fits[0].batch_size:
        return row
    plain, *checkpointed = told.fits
    row["advised"] = plain.batch_size
    row["foretold_gib"] = plain.peak_bytes / GIB
    row["foretold_reserved"] = plain.reserved_bytes / GIB
    peaks = alone(pool, outcome, case, plain.batch_size)
    row["fits"], row["peak_gib"], row["reserved_gib"] = peaks
    row |= checkpoints_too(case, checkpointed, pool)
    peaks = alone(pool, outcome, case, plain.batch_size + 1)
    more, row["more_peak"], row["more_reserved"] = peaks
    row["more_fails"] = not more
    # how far off the advice is
    for extra in (2, 4, 8):
        if more and alone(pool, outcome, case, plain.batch_size + extra)[0]:
            row["fits_too"] = plain.batch_size + extra
    return row


def checkpoints_too(case, checkpointed, pool):
    """What a row says of the advice with checkpoints."""
    row = {}
    for fit in checkpointed:
        row["checkpointed"] = fit.batch_size
        row["checkpointed_foretold"] = fit.peak_bytes / GIB
        if fit.batch_size:
            peaks = alone(pool, outcome, case, fit.batch_size, wrap=with_checkpoints)
            row["checkpointed_fits"], row["checkpointed_peak"] = peaks[:2]
            row["checkpointed_reserved"] = peaks[2]
    return row


def row_or_error(case, folder, pool):
    """The row of a case, or its error: the other cases are of use too."""
    try:
        row = measured(case, folder, pool)
    except Exception as error:
        row = {"name": case.name, "error": repr(error)[:300]}
    print(" ".join(f"{key}={shown(value)}" for key, value in row.items()), flush=True)
    return row


def shown(value):
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def test_the_advised_batch_fits_and_one_more_does_not(tmp_path, no_pictures):
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(8, context, max_tasks_per_child=1) as pool,
        ThreadPoolExecutor(8) as threads,
    ):
        table = list(threads.map(partial(row_or_error, folder=tmp_path, pool=pool), CASES))
    if path := os.environ.get("OUT_OF_MEMORY_CSV"):
        keys = list(dict.fromkeys(key for row in table for key in row))
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, keys)
            writer.writeheader()
            writer.writerows(table)
    advised = [row for row in table if "advised" in row]
    print(f"advised {len(advised)}, fit {sum(row['fits'] for row in advised)}")
    print(f"one more fails: {sum(row['more_fails'] for row in advised)}")
    assert not [row["name"] for row in table if not row.get("fits")]
    wrong = {row["name"] for row in table if row.get("checkpointed_fits") is False}
    assert wrong == WRONG_WITH_CHECKPOINTS
    assert sum(row["more_fails"] for row in advised) >= 10
    assert not [row["name"] for row in table if not row["held_is_reserved"] or row["left"]]
