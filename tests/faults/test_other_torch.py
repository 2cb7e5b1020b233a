"""Environments whose PyTorch is not ours to choose: without any, and with an old one."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cs336.torch_needed import LEAST
from tests.faults.test_installed import new_environment, ours, run

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "data" / "published"
TRACE = ROOT / "tests" / "analysis" / "kernels" / "two_gpus" / "rank1_ddp.json.gz"
WITHOUT_TORCH = ("torch", "functorch", "triton", "transformers", "accelerate", "lightning")
"""PyTorch and what imports it."""
OF_WATCH = ["tests/test_watched.py"]
OF_WATCH += [f"tests/watched/test_{name}.py" for name in ("drawn_loops", "leaving", "reading")]
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
        "account plan"
    )
    done = run_all(
        python,
        tmp_path,
        ["--help"],
        *([command, "--help-all"] for command in commands.split()),
        ["kernels", str(kernels)],
        ["memory", str(memory)],
        ["report", str(kernels)],
        ["report", str(memory)],
        ["report", str(TRACE)],
        ["report", "data"],
        ["compare", a, b],
        ["account", "--size", "gpt2-xl", "--mixed-precision", "--attention", "sdpa"],
        ["account", "--size", "10B", "--fit", "--device-name", "H200"],
        ["plan", "--gpus", "8xH100"],
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
        "fusion",
        "compare --size=tiny --size=small",
        "plan --gpus 8xH100 --d-model 528 --num-heads 4",
        "account --num-layers 7",
        "account --size xl --batch-size 1 --fit --memory-gib 80",
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
    assert not (tmp_path / "data").exists()


def device(words: str) -> list[str]:
    return (
        [] if words.startswith(("account", "compare", "precision", "plan")) else ["--device", "cpu"]
    )


def test_watch_names_what_it_needs(python: Path, tmp_path: Path) -> None:
    done = run([python, "-c", "from cs336 import watch"], tmp_path)
    assert "PyTorch 2.6 or newer" in done.stderr.splitlines()[-1]


def run_all(python: Path, place: Path, *commands: list[str]) -> subprocess.CompletedProcess[str]:
    return run([python, "-c", IN_ONE_PROCESS, json.dumps(commands)], place)


def test_the_extra_asks_for_the_version_that_steps_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = LEAST
    assert project["optional-dependencies"]["torch"] == [f"torch>={major}.{minor}"]
    assert not [name for name in project["dependencies"] if name.startswith("torch")]


@pytest.mark.old_torch
@pytest.mark.timeout(900)
def test_torch_2_6_suffices_to_watch(tmp_path: Path) -> None:
    """All tests of `watch` pass with it; a step of the tool's own names the version it needs."""
    environment = new_environment(tmp_path / "environment", without=WITHOUT_TORCH)
    ours(environment, "build_wheel", tmp_path)
    python, uv = environment / "bin" / "python", Path(sys.executable).with_name("uv")
    install = [uv, "pip", "install", "-q", "--python", python, "torch==2.6.0"]
    installed = subprocess.run(install, env=os.environ, capture_output=True, text=True, timeout=600)
    if installed.returncode:
        pytest.skip(f"PyTorch 2.6 cannot be installed here: {installed.stderr[-300:]}")
    watched = run(
        [python, "-m", "pytest", "-n", "0", "-q", "tests/test_watched.py", *OF_WATCH], ROOT
    )
    assert watched.returncode == 0, watched.stdout
    refused = run([python, "-m", "cs336", "benchmark", "--device", "cpu"], tmp_path)
    assert refused.returncode == 2
    assert NAMES_TORCH in refused.stderr
    assert "2.6.0" in refused.stderr
