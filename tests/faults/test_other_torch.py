"""Environments whose PyTorch is not ours to choose: without any, and with an old one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.test_installed import new_environment, ours, run

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "data" / "published"
WITHOUT_TORCH = ("torch", "functorch", "triton", "transformers", "accelerate", "lightning")
"""PyTorch and what imports it."""
NAMES_TORCH = "PyTorch 2.11"
IN_ONE_PROCESS = """
import json, sys
from cs336 import cli

statuses = []
for words in json.loads(sys.argv[1]):
    print("$", *words, file=sys.stderr)
    try:
        statuses.append(cli.main(words))
    except SystemExit as end:  # as --help does
        statuses.append(end.code or 0)
assert "torch" not in sys.modules
json.dump(statuses, open("statuses.json", "w"))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the installed program and without PyTorch."""
    environment = new_environment(
        tmp_path_factory.mktemp("without") / "environment", without=WITHOUT_TORCH
    )
    ours(environment, "build_wheel", tmp_path_factory.mktemp("builds"))
    return environment / "bin" / "python"


def test_what_needs_no_torch_works_without_it(python: Path, tmp_path: Path) -> None:
    kernels = next(
        (PUBLISHED / "nsys_profiles" / "train" / "kernels").glob("small_ctx128*_r0.json")
    )
    memory = next((PUBLISHED / "memory_profiles").glob("*/memory/*.json"))
    sweep = PUBLISHED / "e2e_benchmark" / "split_xl"
    for name in ("a", "b"):
        shutil.copytree(sweep, tmp_path / "data" / "e2e_benchmark" / name)
    a, b = "data/e2e_benchmark/a", "data/e2e_benchmark/b"
    commands = (
        "benchmark sweep compare ladder attention fusion precision ceilings kernels memory report "
        "account scale"
    )
    done = run_all(
        python,
        tmp_path,
        ["--help"],
        *([command, "--help-all"] for command in commands.split()),
        ["kernels", str(kernels)],
        ["memory", str(memory)],
        ["report", "data"],
        ["compare", a, b],
        ["account", "--size", "gpt2-xl", "--mixed-precision", "--attention", "sdpa"],
        ["account", "--size", "10B", "--fit", "--device-name", "H200"],
        ["scale", "--device-name", "H100"],
    )
    assert set(json.loads((tmp_path / "statuses.json").read_text())) == {0}, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "benchmark",
        "sweep",
        "ladder",
        "precision",
        "attention",
        "ceilings",
        "account --num-layers 7",
        "account --model mine:make",
    ],
)
def test_what_needs_torch_says_so_in_one_line(python: Path, tmp_path: Path, words: str) -> None:
    (tmp_path / "mine.py").write_text("def make(): pass\n")
    done = run([python, "-m", "cs336", *words.split(), *device(words)], tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert NAMES_TORCH in line
    assert "Traceback" not in done.stderr


def device(words: str) -> list[str]:
    return [] if words.startswith(("account", "precision")) else ["--device", "cpu"]


def test_watch_names_what_it_needs(python: Path, tmp_path: Path) -> None:
    done = run([python, "-c", "from cs336 import watch"], tmp_path)
    assert "PyTorch 2.6 or newer" in done.stderr.splitlines()[-1]


def run_all(python: Path, place: Path, *commands: list[str]) -> subprocess.CompletedProcess[str]:
    return run([python, "-c", IN_ONE_PROCESS, json.dumps(commands)], place)


LOOP = """
import torch
from cs336 import watch

model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))
optimizer = torch.optim.AdamW(model.parameters())
watched = watch(model, optimizer, warmup_steps=2, profile={profile})
for _ in range(12):
    with watched.step():
        tokens = torch.randint(0, 11, (4, 16))
        logits = model(tokens).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
watched.report()
"""


@pytest.mark.old_torch
@pytest.mark.timeout(900)
def test_torch_2_6_suffices_to_watch(tmp_path: Path) -> None:
    environment = new_environment(tmp_path / "environment", without=WITHOUT_TORCH)
    ours(environment, "build_wheel", tmp_path)
    python, uv = environment / "bin" / "python", Path(sys.executable).with_name("uv")
    install = [uv, "pip", "install", "-q", "--python", python, "torch==2.6.0"]
    installed = subprocess.run(install, env=os.environ, capture_output=True, text=True, timeout=600)
    if installed.returncode:
        pytest.skip(f"PyTorch 2.6 cannot be installed here: {installed.stderr[-300:]}")
    for profile in (False, True):
        watched = run([python, "-c", LOOP.format(profile=profile)], tmp_path)
        assert watched.returncode == 0, watched.stderr
        assert "backward" in watched.stdout
    refused = run([python, "-m", "cs336", "benchmark", "--device", "cpu"], tmp_path)
    assert refused.returncode == 2
    assert NAMES_TORCH in refused.stderr
    assert "2.6.0" in refused.stderr
