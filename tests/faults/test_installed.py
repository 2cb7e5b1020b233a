"""The program as pip installs it, beside a project with the layout of the course's repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cs336_systems"
SMALL = (
    "--device cpu --vocab-size 11 --d-model 8 --num-heads 2 --num-layers 1 --warmup-steps 2 "
    "--measured-steps 2"
)
MODEL = """
import os
from torch import nn

assert "PYTHONSAFEPATH" not in os.environ, "it is meant for our processes and not for theirs"

def make(vocab_size, d_model, num_layers, num_heads):
    return nn.Sequential(nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size))
"""
FLASH = """
import torch

class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

def fail(vocab_size, d_model, num_layers, num_heads):
    raise ArithmeticError
"""
THEIRS = {
    "cs336_systems/__init__.py": "",
    "cs336_systems/flash.py": FLASH,
    "cs336_systems/benchmark.py": (
        "from cs336 import watch\n"
        "from cs336_basics.model import make\n"
        "from cs336_systems.flash import FlashAttention\n"
        "print('their script has run', watch.__module__)\n"
    ),
    "cs336-basics/cs336_basics/__init__.py": "",
    "cs336-basics/cs336_basics/model.py": MODEL,
    "tests/__init__.py": "",
    "tests/adapters.py": "from cs336_systems.flash import FlashAttention\n",
    "tests/test_attention.py": (
        "from cs336_basics.model import make\n"
        "from .adapters import FlashAttention\n"
        "def test_it():\n    assert FlashAttention.__module__ == 'cs336_systems.flash'\n"
    ),
}
"""Files of a student's project. `uv sync` installs both of its packages by .pth files."""
SHADOWS = ("cs336_systems/cli.py", "multiprocessing.py", "config.py")


def ours(environment: Path, hook: Callable[[str], str], builds: Path) -> None:
    """Install the wheel that setuptools' `hook` builds, and a script for the command."""
    build = f"from setuptools import build_meta; print(build_meta.{hook}({str(builds)!r}))"
    source = copy_of_the_source(builds) if hook == "build_wheel" else ROOT
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(builds / done.stdout.split()[-1]) as wheel:
        wheel.extractall(site_packages(environment))
    script = Path(environment, "bin", "cs336")
    script.write_text(
        "import sys\n"
        "from cs336.start import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )


def copy_of_the_source(place: Path) -> Path:
    """What setuptools needs; it leaves files in the directory where it builds."""
    source = place / "source"
    shutil.copytree(FOLDER, source / FOLDER.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    return source


def theirs(environment: Path, project: Path) -> None:
    for name, text in THEIRS.items():
        (project / name).parent.mkdir(exist_ok=True, parents=True)
        (project / name).write_text(text)
    for name, place in (("cs336_systems", project), ("cs336_basics", project / "cs336-basics")):
        Path(site_packages(environment), f"{name}.pth").write_text(f"{place}\n")


def site_packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": environment, "platbase": environment}))


def new_environment(place: Path, *, without: tuple[str, ...] = ()) -> Path:
    """An environment that sees the packages of this one, but not its installed program and not
    those that are left out by the beginning of their names.
    """
    venv.create(place, symlinks=True)
    dependencies = place / "dependencies"
    dependencies.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "cs336_systems" not in path.name and not path.name.startswith(without or ("-",)):
            (dependencies / path.name).symlink_to(path)
    (site_packages(place) / "zz_dependencies.pth").write_text(f"{dependencies}\n")
    return place


@pytest.fixture(params=["build_wheel", "build_editable"])
def hook(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("is_ours_first", [True, False])
def test_both_can_be_installed_in_either_order(
    hook: str, is_ours_first: bool, tmp_path: Path
) -> None:
    environment, project = new_environment(tmp_path / "environment"), tmp_path / "project"
    installing = [lambda: ours(environment, hook, tmp_path), lambda: theirs(environment, project)]
    for install in installing if is_ours_first else reversed(installing):
        install()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    python = environment / "bin" / "python"
    script = project / "cs336_systems" / "benchmark.py"
    for words, place in (([script], project), (["-m", "cs336_systems.benchmark"], elsewhere)):
        assert "their script has run cs336.watched" in run([python, *words], place).stdout
    assert "1 passed" in run([python, "-m", "pytest", "-q", "tests"], project).stdout
    command = [python, environment / "bin" / "cs336", "benchmark", *SMALL.split()]
    model = ["--context-length", "4", "--model", "cs336_basics.model:make"]
    done = run([*command, *model], elsewhere)
    assert done.returncode == 0, done.stderr


def test_every_process_runs_the_program_and_not_the_project(hook: str, tmp_path: Path) -> None:
    """Those that measure, alone and on ranks, that explain and that read."""
    environment, project = new_environment(tmp_path / "environment"), tmp_path / "project"
    ours(environment, hook, tmp_path)
    theirs(environment, project)
    for name in SHADOWS:
        (project / name).write_text("raise RuntimeError('imported in place of ours')\n")
    command = [environment / "bin" / "python", environment / "bin" / "cs336"]
    sweep = (
        f"sweep {SMALL} --context-length 4 --model cs336_basics.model:make --profile --parallel "
        "none ddp-overlap --ranks 2"
    )
    attention = (
        "attention --device cpu --own cs336_systems.flash:FlashAttention --implementations sdpa "
        "--d-heads 8 --context-lengths 16 --batch-size 1"
    )
    for words, files in (
        (sweep, "none"),
        ("kernels", "data/*/*/kernels/*_r0.json"),
        (attention, "none"),
    ):
        done = run([*command, *words.split(), *sorted(project.glob(files))[:1]], project)
        assert "in place of ours" not in done.stdout + done.stderr
        assert done.returncode == 0, done.stderr
    failing = f"benchmark {SMALL} --context-length 4 --model cs336_systems.flash:fail"
    failed = run([*command, *failing.split()], project)
    assert failed.returncode == 1
    assert 'File "cs336_systems/flash.py", line 10' in failed.stdout


def test_the_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    """So the packages that pyproject.toml lists are the folders that there are."""
    environment = new_environment(tmp_path / "environment")
    ours(environment, "build_wheel", tmp_path)

    def files(place: Path) -> set[Path]:
        return {
            path.relative_to(place)
            for path in place.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    assert files(site_packages(environment) / "cs336") == files(FOLDER)
    assert not (site_packages(environment) / "cs336_systems").exists()


def test_a_script_of_the_checkout_and_a_model_that_imports_cs336_share_one_copy(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "from collections import Counter\n"
        "import cs336\n"
        "import cs336.watched\n"
        "from cs336.model.transformer import TransformerLM\n"
        "def make(vocab_size, d_model, num_layers, num_heads):\n"
        "    from torch import nn\n"
        f"    folder = {str(FOLDER)!r}\n"
        "    files = [getattr(each, '__file__', None) or '' for each in sys.modules.values()]\n"
        "    copies = Counter(path for path in files if path.startswith(folder))\n"
        "    assert len(copies) > 10, copies\n"
        "    assert set(copies.values()) == {1}, copies\n"
        "    assert cs336.watch is cs336.watched.watch\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, d_model), "
        "nn.Linear(d_model, vocab_size))\n"
    )
    words = f"{SMALL} --context-length 4 --model mine:make"
    done = run([Path(sys.executable), ROOT / "benchmark.py", *words.split()], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def run(words: list[str | Path], place: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        words, cwd=place, env=environment, capture_output=True, text=True, timeout=200
    )
