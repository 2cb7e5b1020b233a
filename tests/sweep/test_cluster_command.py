"""The flags of a sweep on a cluster, where no Ray is needed, and what it prints of the cluster's
machines.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from cs336 import cli
from cs336.commands.parse import parse
from cs336.commands.sweep import SweepArguments
from cs336.measure import nvml
from tests.committed import ROOT
from tests.sweep.records import IDENTITY

SMALL = ["--device", "cpu", "--sizes", "tiny", "--context-lengths", "4"]


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_without_ray_it_says_what_to_install(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    assert cli.sweep([*SMALL, "--cluster", "auto", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert 'pip install "cs336-systems-benchmark[cluster]"' in said[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--cluster", "ray://head:10001"], "HOST:PORT"),
        (["--cluster", "head"], "HOST:PORT"),
        (["--cluster", "auto", "--wait-nodes-s", "nan"], "--wait-nodes-s"),
        (["--require-device", "H200"], "--cluster"),
    ],
)
def test_what_cannot_be(words, what, capsys):
    assert cli.sweep([*SMALL, *words]) == 2
    assert what in capsys.readouterr().err


def test_a_dry_run_on_this_machine_imports_neither_ray_nor_numpy(here):
    code = (
        "import sys; sys.modules |= dict(ray=None, numpy=None); from cs336.cli import "
        "main; sys.exit(main())"
    )
    words = [sys.executable, "-c", code, "sweep", *SMALL, "--dry-run"]
    at = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=at, cwd=here)
    assert done.returncode == 0, done.stderr


def test_gpus_of_a_cluster_need_not_be_in_this_machine(monkeypatch):
    monkeypatch.setattr(nvml, "_initialised", lambda: False)
    words = ["--device", "cuda", *SMALL[2:], "--parallel", "ddp", "--ranks", "8"]
    with pytest.raises(ValueError, match="--device cuda"):
        parse(SweepArguments, "sweep", words).plan()
    sweep = parse(SweepArguments, "sweep", [*words, "--cluster", "auto"])
    assert {(str(config.device), config.ranks) for config in sweep.plan().configs} == {("cuda", 8)}
    assert sweep.directory().name.endswith("_gpu")


def test_a_dry_run_shows_the_machines_and_fails_if_none_is_used(monkeypatch, capsys):
    pytest.importorskip("ray", reason="needs Ray: pip install ray")
    from cs336.sweep.cluster import connection, machines, task

    def machine(number, refused):
        node = task.Node(replace(IDENTITY, torch=f"2.{number}"), has_nsys=True)
        return machines.Machine(
            id=str(number), host=f"host-{number}", address="a", count=8, node=node, refused=refused
        )

    monkeypatch.setattr(connection, "connected", lambda _: contextlib.nullcontext())
    seen = [machine(1, None), machine(2, "torch is 2.2,\nneeded 2.1")]
    monkeypatch.setattr(machines, "look", lambda *_, **__: (seen, None))
    words = [*SMALL, "--cluster", "auto", "--dry-run"]
    assert cli.sweep(words) == 0
    *_, used, refused, all_of_them = capsys.readouterr().out.splitlines()
    assert used.endswith("used")
    assert "not used: torch is 2.2," in refused
    assert "1 rank at a time" in all_of_them
    del seen[0]
    assert cli.sweep(words) == 1
