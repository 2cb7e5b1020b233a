"""Watched loops on a GPU: an independent clock, and what watching costs."""

import contextlib
from dataclasses import replace
from statistics import median
from time import perf_counter

import pytest
import torch

from cs336_systems import watch
from cs336_systems.config import SIZES, Attention, Device, OptimizerKind, Phase, Precision, RunConfig
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.trainable import cross_entropy
from cs336_systems.model.transformer import TransformerLM

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
CONFIG = RunConfig(
    size="medium", model=replace(SIZES["medium"], attention=Attention.SDPA), batch_size=32, precision=Precision.BF16,
    optimizer=OptimizerKind.FUSED, device=Device.CUDA, measured_steps=20,
)  # fmt: skip
STEPS = 20


def train(watched, model, optimizer, batches, steps=STEPS, micro_batches=1):
    """Train as most loops do; return the seconds of a step by a clock that waits for the GPU at both ends."""
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(steps):
        with watched.step() if watched else contextlib.nullcontext():
            for _ in range(micro_batches):
                tokens, targets = batches()
                with torch.autocast("cuda", torch.bfloat16):
                    loss = cross_entropy(model(tokens), targets, CONFIG.model.vocab_size)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    return (perf_counter() - start) / steps


@pytest.fixture(scope="module")
def loop():
    torch.manual_seed(0)
    batches = TrainingStep(CONFIG).batches
    with torch.device("cuda"):
        model = TransformerLM(CONFIG.model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(None, model, optimizer, batches, 10)
    return model, optimizer, batches


def mean(record, phase):
    return record.measurement(phase).mean_s


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_steps_and_what_is_between_them_are_the_loop(loop, micro_batches):
    watched = watch(*loop[:2], warmup_steps=0)
    step_s = train(watched, *loop, micro_batches=micro_batches)
    record = watched.record()
    between_s = sum(record.between_s) / STEPS
    print(f"step {1e3 * mean(record, Phase.STEP):.3f} + between {1e3 * between_s:.3f} ms, clock {1e3 * step_s:.3f} ms")
    assert mean(record, Phase.STEP) + between_s == pytest.approx(step_s, rel=0.01)
    assert record.memory.peak_allocated_bytes > 4 * 4 * record.num_parameters
    watched.remove()


def test_watching_costs_less_than_a_hundredth(loop):
    watched = watch(*loop[:2])
    pairs = [(train(watched, *loop), train(None, *loop)) for _ in range(5)]
    watched.remove()
    cost = median(with_it / without - 1 for with_it, without in pairs)
    print(f"watching costs {100 * cost:.2f} % of {1e3 * pairs[0][1]:.2f} ms")
    assert cost < 0.01
