"""What watching costs, counted in calls of its functions, which no other program makes more."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import cs336.watched
from cs336 import watch
from cs336.watched.steps import MOST_PENDING

OURS = str(Path(cs336.watched.__file__).parent)
AROUND, PER_MARK, PER_HOOK, PER_PASS, PER_READING = 18, 2, 2, 13, 24
"""Most calls around a step without its marks, and of a mark, a hook, a forward pass, and of
computing the times of a step later.
"""

BY_TIME = ("Pauses.collects", "Pauses.begins", "Pauses.ends", "Pauses._add", "Pauses.take")
"""Beginnings of the names of functions that garbage collections call, and readings, which come by
time.
"""


def calls_in(run):
    """Calls of functions of `watch` by their names, without those within which it computes times
    that were marked, and these.
    """
    marking, reading, depth = Counter(), Counter(), [0]

    def see(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or code.co_qualname.startswith(BY_TIME):
            return
        is_reading = code.co_name == "read"
        if event == "return":
            depth[0] -= is_reading
        elif event == "call":
            depth[0] += is_reading
            (reading if depth[0] else marking)[code.co_qualname] += 1

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return marking, reading


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_makes_as_many_calls_as_its_hooks_and_marks_need(micro_batches, tmp_path):
    """Of a step with M micro-batches, hooks run before and after each forward pass, before each
    look-up of the embedding, and before and after the optimizer: 3 M + 2; the wrapper of backward
    stands for two more each. Marks are at both ends of the step, of each forward and backward pass
    and of the optimizer: 4 M + 4. Each hook is called, and calls one method; a mark is a phase that
    begins or ends and the reading of the clock; a forward pass is described by its shapes, and is
    told when backward reaches its result. The type of the matmuls is not looked at any more. Names
    of functions that garbage collection calls do not count, and computing times is bounded for each
    step, not for each mark.
    """
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, warmup_steps=5, output=tmp_path, every=0)
    tokens = torch.zeros(2, 8, dtype=torch.int64)

    def run(steps=2 * MOST_PENDING):
        for _ in range(steps):
            with watched.step():
                for _ in range(micro_batches):
                    model(tokens).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    run()
    marking, reading = calls_in(run)
    watched.remove()
    hooks, marks = 5 * micro_batches + 2, 4 * micro_batches + 4
    most = AROUND + PER_HOOK * hooks + PER_MARK * marks + PER_PASS * micro_batches
    steps = 2 * MOST_PENDING
    assert marking.total() / steps <= most, marking.most_common(60)
    most = PER_READING + PER_PASS * (micro_batches - 1)
    assert reading.total() / steps <= most, reading.most_common(40)
