"""Steps that are drawn, to score forecasts on shapes for which nothing was chosen.

`python -m tests.gpu.drawn_steps draw SEED COUNT > FILE` draws them, which needs no GPU, and
`measure FILE DIRECTORY` measures them on this machine. The file is committed before, and none of
its steps is left out.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from cs336.config import SIZES, Attention, Device, Mode, OptimizerKind, Precision, RunConfig
from cs336.costs.accounting import step_flops
from cs336.costs.memory import predicted_peak_bytes
from cs336.files import encode_json
from cs336.sweep.run import run_sweep
from tests.faults.harness import Witness

GIB = 2**30
MOST_BYTES = 60 * GIB
"""A step that needs more is drawn again, so that all fit on an H100."""
ROUGHLY_FLOPS_PER_S = {Precision.FP32: 40e12, Precision.TF32: 250e12, Precision.BF16: 450e12}
SHORTEST_S, LONGEST_S = 5e-3, 0.6
"""Bounds of FLOPs over that rate, so that forty steps take minutes."""


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """A number from `low` to `high` whose logarithm is evenly distributed."""
    return low * (high / low) ** rng.random()


def draw(rng: random.Random) -> RunConfig:
    """A step of any width, length, batch, precision and mode, with as many layers as a preset."""
    size = rng.choice(["small", "medium", "large", "2.7B"])
    d_head = rng.choice([64, 80, 96, 128])
    heads = max(4, round(log_uniform(rng, 512, 4096) / d_head))
    d_model = heads * d_head
    d_ff = 64 * round(log_uniform(rng, 2, 4.5) * d_model / 64)
    context_length = round(log_uniform(rng, 128, 4096))
    if rng.random() < 0.75:
        context_length -= context_length % 8
    model = replace(
        SIZES[size],
        d_model=d_model,
        num_heads=heads,
        d_ff=d_ff,
        context_length=context_length,
        vocab_size=rng.choice([10_000, 32_000, 50_257]),
        attention=rng.choice([*Attention]),
    )
    return RunConfig(
        size=size,
        model=model,
        device=Device.CUDA,
        batch_size=round(log_uniform(rng, 1, 32)),
        mode=rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.TRAIN, Mode.INFERENCE]),
        precision=rng.choice([*ROUGHLY_FLOPS_PER_S]),
        optimizer=rng.choice([OptimizerKind.ADAMW, OptimizerKind.FUSED]),
        warmup_steps=3,
        measured_steps=7,
    )


def steps(seed: int, count: int) -> Iterator[RunConfig]:
    """`count` drawn steps that fit, and that take neither too short nor too long."""
    rng = random.Random(seed)
    kept = 0
    while kept < count:
        config = draw(rng)
        flops, peak_bytes = step_flops(config), predicted_peak_bytes(config)
        if flops is None or peak_bytes is None or peak_bytes > MOST_BYTES:
            continue
        if SHORTEST_S <= flops / ROUGHLY_FLOPS_PER_S[config.precision] <= LONGEST_S:
            kept += 1
            yield config


def main(verb: str, *words: str) -> None:
    """Draw steps into standard output, or measure those of a file; see the module."""
    if verb == "draw":
        seed, count = map(int, words)
        sys.stdout.buffer.write(encode_json(list(steps(seed, count))))
        return
    file, directory = map(Path, words)
    configs = msgspec.json.decode(file.read_bytes(), type=list[RunConfig])
    outcome = run_sweep(configs, directory, Witness(), timeout_s=60)
    for record in outcome.records:
        print(record.config.label, record.status, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
