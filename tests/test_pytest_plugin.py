"""The plugin in processes of pytest as a user starts them: what it loads, keeps and says."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cs336.analysis.limits import OverBudgetError
from cs336.config import RunConfig
from cs336.costs.step_costs import KeptCosts, read_costs
from cs336.record import RunRecord
from cs336.report.growth import QUANTITIES, growths
from cs336.tested_step import GrownError, TestedStep, config_of

from .report.making import make_record

ROOT = Path(__file__).parents[1]
STEP = """
import torch
from torch import nn

print("the code of the user says something")
LEFT = []

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def make(batch_size):
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(torch.randn(batch_size, 64, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    LEFT.append(model)
    assert len(LEFT) == 1  # each trace loads this module anew
    return step
"""
TESTS = """
import sys

import pytest
import yaml

from cs336.analysis.limits import OverBudgetError


@pytest.mark.parametrize("batch_size", [16, 32])
def test_step(cs336_step, batch_size):
    step = cs336_step("mine:make", batch_size=batch_size)
    step.check()
    # input, 3 hidden layers and their gradients' products: 3 forward, 5 backward
    assert step.flops == 8 * 2 * batch_size * 64 * 64
    assert step.kept_nodes == 0
    assert 0 < step.saved_gib < step.peak_gib("H100") < 1
    step.budget(peak_gib=1, flops=step.flops, step_ms=1e-6)
    with pytest.raises(OverBudgetError):
        step.budget(operations=step.operations - 1)
    assert "torch" not in sys.modules


def test_what_is_unknown(cs336_step):
    with pytest.raises(ValueError, match="no_such"):
        cs336_step("mine:make", no_such=3)
    with pytest.raises(ValueError, match="precision"):
        cs336_step("mine:make", precision="bf17")
    # settings that would do nothing in a trace, or say which model it is
    for name in ("own_optimizer", "profiler", "device", "size", "seed"):
        with pytest.raises(ValueError, match=f"{name}' is no setting"):
            cs336_step("mine:make", **{name: "cpu"})
    with pytest.raises(ValueError, match="precision would do nothing"):
        cs336_step("mine:make", batch_size=16, precision="bf16").check()
    with pytest.raises(ValueError, match="no_gpu"):
        cs336_step("mine:make", batch_size=16).peak_gib("no_gpu")
"""
CONFTEST = """
import sys

def pytest_unconfigure():
    assert "torch" not in sys.modules and "pandas" not in sys.modules
"""


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of pytest in the directory, with the plugin."""
    (directory / "conftest.py").write_text(CONFTEST)
    code = f"import sys; sys.path.append({str(ROOT)!r}); import pytest; sys.exit(pytest.main())"
    options = ["-q", "-p", "cs336.pytest_plugin", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        [sys.executable, "-c", code, *options],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_collecting_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    done = run(tmp_path, "--co")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_step" in done.stdout


def test_what_grows_is_told_with_its_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STEP)
    (tmp_path / "test_mine.py").write_text(TESTS)
    first = run(tmp_path, "--cs336-update")
    assert first.returncode == 0, first.stdout + first.stderr
    kept = read_costs(tmp_path / "cs336_steps.json").steps
    assert {"mine:make batch_size=16", "mine:make batch_size=32"} <= kept.keys()
    (tmp_path / "mine.py").write_text(STEP.replace("layer(x))", "layer(x.clone()))"))
    second = run(tmp_path, "--cs336-table", "table.md", "-k", "16")
    assert second.returncode == 1, second.stdout + second.stderr
    assert "3 operations more" in second.stdout, second.stdout
    table = (tmp_path / "table.md").read_text()
    assert "operations" in table
    assert "batch\\_size=16" in table


@pytest.mark.long
def test_processes_of_xdist_keep_their_steps_together(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STEP)
    (tmp_path / "test_mine.py").write_text(TESTS)
    done = run(tmp_path, "--cs336-update", "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = read_costs(tmp_path / "cs336_steps.json").steps
    assert {"mine:make batch_size=16", "mine:make batch_size=32"} <= kept.keys()


def step_of(times_ms: list[float], monkeypatch: pytest.MonkeyPatch) -> TestedStep:
    """A step on a GPU whose fresh processes take these times; another step takes 10 ms."""

    def measured(configs: list[RunConfig]) -> list[list[RunRecord]]:
        sides = [[10.0] * len(times_ms), times_ms][2 - len(configs) :]
        return [
            [
                make_record(replace(config, repeat=len(configs) * repeat + side), [time_ms / 1e3])
                for repeat, time_ms in enumerate(times)
            ]
            for side, (config, times) in enumerate(zip(configs, sides, strict=True))
        ]

    monkeypatch.setattr("cs336.tested_step.first_gpu", lambda: "a GPU")
    monkeypatch.setattr("cs336.tested_step._measured", measured)
    config = config_of("tests.own_models:bigram", {})
    return TestedStep(name="step", config=config, kept=KeptCosts(), seen={})


def test_a_limit_on_time_is_told_by_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of 9 to 11 ms is 10 +- 2.5: t is 4.3 for 3 processes, whose error is 0.58."""
    step = step_of([9, 10, 11], monkeypatch)
    assert [verdict.is_kept for verdict in step.budget(step_ms=10.5)] == [None]
    assert [verdict.is_kept for verdict in step.budget(step_ms=13)] == [True]
    with pytest.raises(OverBudgetError):
        step.budget(step_ms=7)


def test_only_a_step_that_is_surely_slower_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "tests.own_models:bigram"
    with pytest.raises(OverBudgetError):
        step_of([12, 12.1, 11.9, 12, 12.1], monkeypatch).check_time(other)
    for times_ms in ([9, 12, 8, 13, 10], [8, 8.1, 8, 7.9, 8]):
        compared = step_of(times_ms, monkeypatch).check_time(other)
        assert compared is not None
    monkeypatch.setattr("cs336.tested_step.first_gpu", lambda: None)
    step = TestedStep(name="step", config=config_of(other, {}), kept=KeptCosts(), seen={})
    assert step.check_time(other) is None
    assert [verdict.is_kept for verdict in step.budget(step_ms=1e-6)] == [None]


@pytest.mark.parametrize("seed", range(5))
def test_a_quantity_that_is_not_kept_has_not_grown_from_nothing(seed: int) -> None:
    """Drawn files, in which earlier versions kept fewer quantities: what is not kept is said."""
    rng = random.Random(seed)
    costs = {name: {"a: x": rng.randint(1, 9)} for name in QUANTITIES}
    gone = set(rng.sample([*QUANTITIES], rng.randint(0, len(QUANTITIES))))
    before = {name: parts for name, parts in costs.items() if name not in gone}
    assert growths(before, costs) == []
    step = TestedStep(
        name="s",
        config=config_of("tests.own_models:bigram", {}),
        kept=KeptCosts(steps={"s": before}),
        seen={},
    )
    step.__dict__["costs"] = costs
    if gone:
        with pytest.raises(GrownError, match=r"^(no \w+|nothing) is kept of s: "):
            step.check()
    else:
        step.check()


GH = """#!/bin/bash
echo "$@" >> calls
case "$*" in *--jq*) cat earlier;; esac
"""


@pytest.mark.parametrize("earlier", ["", "17\n18\n"])
def test_the_action_keeps_one_comment(earlier: str, tmp_path: Path) -> None:
    action = yaml.safe_load((ROOT / ".github/actions/step-costs/action.yml").read_text())
    _, comment = action["runs"]["steps"]
    gh = tmp_path / "gh"
    gh.write_text(GH)
    gh.chmod(0o755)
    (tmp_path / "earlier").write_text(earlier)
    (tmp_path / "table.md").write_text("| a table |\n")
    names = {"TABLE": "table.md", "NUMBER": "5", "REPOSITORY": "o/r", "GITHUB_STEP_SUMMARY": "page"}
    names["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", "-eo", "pipefail", "-c", comment["run"]]
    subprocess.run(command, cwd=tmp_path, env=names, check=True)
    *_, last = (tmp_path / "calls").read_text().splitlines()
    way, where = ("PATCH", "comments/17") if earlier else ("POST", "5/comments")
    assert way in last
    assert where in last
    assert "| a table |" in (tmp_path / "table.md.comment").read_text()
    assert (tmp_path / "page").read_text() == "| a table |\n"
