"""Memory that creeps is found with its slope, its first step and what holds it; memory that only
varies is not.
"""

import random

import pytest
import torch

from cs336 import watch
from cs336.watched.growth import MOST_KEPT, Growth

STEPS, SINCE, LEAK = 3000, 1000, 300_000


def watched_memory(leak_of, *, steps=STEPS, noise=0, period=1):
    """A growth that has seen these steps of a made-up allocator."""
    generator = random.Random(steps)
    allocated = [0]
    growth = Growth(lambda: allocated[0], spacing_s=0)
    kept = 10**9
    for number in range(-5, steps):
        kept += leak_of(number)
        is_high = number % period != 0
        allocated[0] = kept + generator.randint(0, noise) + 10**7 * is_high
        growth.step_ended(number)
    return growth


@pytest.mark.parametrize("noise", [0, 20_000_000])
def test_a_leak_is_found_with_its_slope_and_first_step(noise):
    growth = watched_memory(lambda number: LEAK * (number >= SINCE), noise=noise).growth(0)
    # noise moves the slope by itself over half of the steps, and the start by itself over the leak
    assert growth.bytes_per_step == pytest.approx(LEAK, abs=noise / (STEPS - SINCE) * 2 + 1)
    # at least half of the readings that may be kept are, and a part is an eighth of them
    stride = STEPS / (MOST_KEPT / 2)
    assert abs(growth.since_step - SINCE) <= noise / LEAK + STEPS / 8 + stride
    assert growth.to_step > STEPS - stride


@pytest.mark.parametrize("period", [1, 4, 7])
def test_memory_that_varies_does_not_rise(period):
    assert watched_memory(lambda _: 0, noise=50_000_000, period=period).growth(0) is None


def test_what_is_allocated_once_is_no_growth():
    assert watched_memory(lambda number: 10**8 * (number == 500)).growth(0) is None


def test_a_loss_that_is_kept_with_its_graph_is_named():
    weights = torch.ones(3, requires_grad=True)
    losses = [(weights * number).sum() for number in range(200)]
    growth = watched_memory(lambda _: LEAK, steps=200).growth(0)
    assert any("graphs" in holder for holder in growth.holders)
    assert str(len(losses)) in growth.holders[0]


def test_on_a_cpu_memory_is_not_seen(tmp_path):
    layer, kept = torch.nn.Linear(2, 2), []
    watched = watch(layer, warmup_steps=0, output=tmp_path, every=0)
    for _ in range(40):
        with watched.step():
            kept.append(layer(torch.ones(2**15, 2)))
    assert watched.record().seen.growth is None
    watched.remove()
