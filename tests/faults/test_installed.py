"""The program as pip installs it, run in the root of a student's project, which has a package of
the same name.
"""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "--device cpu --vocab-size 11 --d-model 8 --num-heads 2 --num-layers 1 --warmup-steps 2 "
    "--measured-steps 2"
)
THEIRS = {
    "cs336_systems/__init__.py": (
        "raise RuntimeError('the package of the project has been imported')\n"
    ),
    "cs336_systems/cli.py": "raise RuntimeError('the module of the project has been imported')\n",
    "multiprocessing.py": "raise RuntimeError('the module of the project has been imported')\n",
    "cs336_systems/their_model.py": (
        "import os\nfrom torch import nn\nassert 'PYTHONSAFEPATH' not in os.environ, 'which is "
        "for our processes and not for theirs'\ndef fail(vocab_size, d_model, num_layers, "
        "num_heads):\n    raise ArithmeticError\ndef make(vocab_size, d_model, num_layers, "
        "num_heads):\n    return nn.Sequential(nn.Embedding(vocab_size, d_model), "
        "nn.Linear(d_model, vocab_size))\n"
    ),
    "cs336_basics/__init__.py": "",
    "cs336_basics/model.py": "from cs336_systems.their_model import make\n",
}


@pytest.fixture
def cs336(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The command in an environment of its own, into which the package is copied and which sees
    our dependencies.
    """
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
    shutil.copytree(ROOT / "cs336_systems", Path(paths["purelib"], "cs336_systems"))
    Path(paths["purelib"], "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    command = Path(paths["scripts"], "cs336")
    text = (
        "import sys\nfrom cs336_systems.start import main\nif __name__ == '__main__':\n    "
        "sys.exit(main())\n"
    )
    command.write_text(text)
    # whose first line could not name an interpreter with a space
    return [Path(paths["scripts"], "python"), command]


@pytest.fixture
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("project")
    for name, text in THEIRS.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


FAILING = f"benchmark {SMALL} --context-length 4 --model cs336_systems.their_model:fail"
SWEEP = (
    f"sweep {SMALL} --context-length 4 --model cs336_basics.model:make --profile --parallel "
    "none ddp-overlap --ranks 2"
)


def test_every_process_runs_the_program_and_not_the_project(
    cs336: list[Path], project: Path
) -> None:
    """Those that measure, alone and on ranks, that explain and that read; and the project's own
    model is found.
    """
    for command, files in ((SWEEP, "none"), ("kernels", "data/*/*/kernels/*_r0.json")):
        done = run([*cs336, *command.split(), *sorted(project.glob(files))[:1]], project)
        assert "of the project has been imported" not in done.stdout + done.stderr
        assert done.returncode == 0, done.stderr
    failed = run([*cs336, *FAILING.split()], project)
    assert failed.returncode == 1
    assert 'File "./cs336_systems/their_model.py", line 5' in failed.stdout


def run(words: list[str | Path], project: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        words, cwd=project, env=environment, capture_output=True, text=True, timeout=200
    )
