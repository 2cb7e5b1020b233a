"""The flags of a sweep on a cluster, where no Ray is needed."""

import importlib.util
import subprocess
import sys

import pytest

from cs336_systems import cli

SMALL = ["--device", "cpu", "--sizes", "tiny", "--context-lengths", "4"]


def test_without_ray_it_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    assert cli.sweep([*SMALL, "--cluster", "auto"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert 'pip install "cs336-systems[cluster]"' in said[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--cluster", "ray://head:10001"], "HOST:PORT"),
        (["--cluster", "head"], "HOST:PORT"),
        (["--cluster", "auto", "--profile"], "profile"),
        (["--cluster", "auto", "--wait-nodes-s", "nan"], "--wait-nodes-s"),
        (["--require-device", "H200"], "--cluster"),
    ],
)
def test_what_cannot_be(words, what, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.sweep([*SMALL, *words])
    assert ended.value.code == 2
    assert what in capsys.readouterr().err


def test_help_and_a_local_sweep_import_no_ray():
    code = "import sys; sys.modules['ray'] = None; from cs336_systems.cli import sweep; sweep(sys.argv[1:])"
    words = [*SMALL, "--dry-run"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
