"""What is said of loops in which something is not there to be seen, against what the loop does."""

import random

import pytest
import torch
from torch import nn

from cs336 import watch
from cs336.analysis.loop_times import loop_sentences
from cs336.config import Mode, Phase
from cs336.record import WarningCode

SEEDS = 20
TOKENS = torch.zeros(2, 4, dtype=torch.int64)
CALLS = ("trains", "no_grad", "inference_mode", "evaluation mode", "around the hooks")
UPDATES = ("optimizer", "written out", "none")


class Loop:
    """A loop that is drawn: how it calls its model, how it updates, and in which steps."""

    def __init__(self, seed, folder):
        draw = random.Random(seed)
        self.call = draw.choice((*CALLS, "trains", "trains"))
        self.update = draw.choice(UPDATES)
        self.num_steps, self.period = draw.randint(3, 8), draw.randint(1, 3)
        self.validates = draw.random() < 0.3
        self.model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.watched = watch(self.model, self.optimizer, warmup_steps=0, output=folder, every=0)
        self.num_updates = 0

    def run(self):
        """Run the loop, and return its record."""
        for number in range(self.num_steps):
            if self.validates:
                with torch.no_grad():
                    self.model(TOKENS)
            with self.watched.step():
                self.compute()
                if self.call == "trains" and number % self.period == 0:
                    self.change()
        self.watched.remove()
        return self.watched.record()

    def compute(self):
        if self.call == "trains":
            self.model(TOKENS).sum().backward()
        elif self.call == "around the hooks":
            self.model.forward(TOKENS).sum().backward()
        elif self.call == "evaluation mode":
            self.model.eval()(TOKENS)
        else:
            with getattr(torch, self.call)():
                self.model(TOKENS)

    def change(self):
        if self.update == "optimizer":
            self.optimizer.step()
            self.num_updates += 1
        elif self.update == "written out":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_not_seen_is_told_as_it_is(seed, tmp_path):
    loop = Loop(seed, tmp_path)
    record = loop.run()
    warnings = record.warnings
    unseen = " ".join(w.message for w in warnings if w.code == WarningCode.NOT_SEEN)
    if loop.call == "trains":
        assert not unseen
    elif loop.call == "around the hooks" and not loop.validates:
        assert "no call of the model was seen" in unseen
    else:
        assert "all calls of the model that were seen ran without gradients" in unseen
    assert record.subject.mode is (Mode.TRAIN if loop.num_updates else None)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_steps_of_the_optimizer_are_counted(seed, tmp_path):
    loop = Loop(seed, tmp_path)
    record = loop.run()
    told = [sentence for sentence in loop_sentences(record) if "the optimizer ran in" in sentence]
    if 0 < loop.num_updates < loop.num_steps:
        assert told == [
            f"the optimizer ran in {loop.num_updates} of {loop.num_steps} steps, and its time is "
            "the mean of those"
        ]
        assert len(record.measurement(Phase.OPTIMIZER).times_s) == loop.num_updates
    else:
        assert not told
