"""The program as pip installs it, run in the root of a student's project, which has a package of the same name."""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--device cpu --vocab-size 11 --d-model 8 --num-heads 2 --num-layers 1 --warmup-steps 2 --measured-steps 2"
THEIRS = {
    "cs336_systems/__init__.py": "raise RuntimeError('the package of the project has been imported')\n",
    "cs336_systems/cli.py": "raise RuntimeError('the module of the project has been imported')\n",
    "multiprocessing.py": "raise RuntimeError('the module of the project has been imported')\n",
    "cs336_systems/their_model.py": (
        "import os\n"
        "from torch import nn\n"
        "assert 'PYTHONSAFEPATH' not in os.environ, 'which is for our processes and not for theirs'\n"
        "def fail(vocab_size, d_model, num_layers, num_heads):\n"
        "    raise ArithmeticError\n"
        "def make(vocab_size, d_model, num_layers, num_heads):\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size))\n"
        "def attend(q, k, v, is_causal):\n"
        "    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)\n"
    ),
    "cs336_basics/__init__.py": "",
    "cs336_basics/model.py": "from cs336_systems.their_model import make\n",
}


@pytest.fixture(scope="module")
def cs336(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment of its own, into which the package is copied and which sees our dependencies."""
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
    shutil.copytree(ROOT / "cs336_systems", Path(paths["purelib"], "cs336_systems"))
    Path(paths["purelib"], "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    command = Path(paths["scripts"], "cs336")
    text = "import sys\nfrom cs336_systems.start import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    command.write_text(f"#!{paths['scripts']}/python\n{text}")
    command.chmod(0o755)
    return command


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("project")
    for name, text in THEIRS.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


@pytest.mark.parametrize(
    "words",
    [
        f"sweep {SMALL} --context-lengths 4 8 --model cs336_basics.model:make",
        f"benchmark {SMALL} --context-length 4 --parallel ddp-overlap --ranks 2",
        f"benchmark {SMALL} --context-length 4 --profile",
        f"benchmark {SMALL} --context-length 4 --model cs336_basics.model:make",
        f"benchmark {SMALL} --context-length 4 --model cs336_systems.their_model:make",
        "attention --own cs336_systems.their_model:attend --device cpu --d-heads 4 --context-lengths 8 --passes 1",
        "account --size xl",
    ],
    ids=lambda words: " ".join([words.split()[0], *words.split()[-1:]]),
)
def test_every_process_runs_the_program_and_not_the_project(cs336: Path, project: Path, words: str) -> None:
    done = run([cs336, *words.split()], project)
    assert (done.returncode, "of the project has been imported" in done.stdout + done.stderr) == (0, False), done.stderr


def test_results_are_read_there_too(cs336: Path, project: Path) -> None:
    done = run([cs336, *f"sweep {SMALL} --context-lengths 4 --profile --name read".split()], project)
    assert done.returncode == 0, done.stderr
    directory = project / "data/kineto_profiles/read"
    (trace,) = directory.glob("traces/*")
    for words in (["report", directory], ["compare", directory, directory], ["kernels", trace]):
        done = run([cs336, *words], project)
        assert done.returncode == 0, done.stderr


def test_the_line_that_fails_in_the_projects_package_is_shown(cs336: Path, project: Path) -> None:
    done = run(
        [cs336, *f"benchmark {SMALL} --context-length 4 --model cs336_systems.their_model:fail".split()], project
    )
    assert done.returncode == 1
    assert 'File "./cs336_systems/their_model.py", line 5' in done.stdout


def run(words: list[str | Path], project: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True, timeout=200)
