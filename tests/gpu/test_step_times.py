"""Times of a step in a test, by fresh processes in turn on a real GPU."""

from pathlib import Path

import pytest

from cs336.analysis.limits import OverBudgetError
from cs336.costs.step_costs import KeptCosts
from cs336.tested_step import TestedStep, config_of

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, width), nn.Linear(width, 100)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(8)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def small():
    return Model(1024)


def large():
    return Model(2048)
"""


def test_a_slower_step_fails_and_an_equal_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matmuls of twice the width take four times as long."""
    (tmp_path / "widths.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    settings = {"batch_size": 16, "context_length": 512}
    small, large = (
        TestedStep(
            name=name, config=config_of(f"widths:{name}", settings), kept=KeptCosts(), seen={}
        )
        for name in ("small", "large")
    )
    assert small.check_time("widths:large", **settings) is not None
    assert small.check_time("widths:small", **settings) is not None
    with pytest.raises(OverBudgetError):
        large.check_time("widths:small", **settings)
    with pytest.raises(OverBudgetError):
        large.budget(step_ms=0.01)
