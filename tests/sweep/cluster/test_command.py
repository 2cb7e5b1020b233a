"""The flags of a sweep on a cluster, where no Ray is needed."""

import importlib.util
import json
import subprocess
import sys

import pytest

from cs336_systems import cli
from cs336_systems.config import Device
from cs336_systems.measure import nvml
from cs336_systems.sweep.cluster import ray_nodes
from cs336_systems.sweep.cluster.nodes import Look
from cs336_systems.sweep.store import SweepError
from tests.sweep.cluster.simulated import machine, node

SMALL = ["--device", "cpu", "--sizes", "tiny", "--context-lengths", "4"]


@pytest.mark.parametrize("words", [["sweep", *SMALL, "--cluster", "auto"], ["cluster"]], ids=["sweep", "cluster"])
def test_without_ray_it_says_what_to_install(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    assert cli.main(words) == 2
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
        (["--same-node"], "--same-node"),
        (["--share-nodes"], "--share-nodes"),
    ],
)
def test_what_cannot_be(words, what, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.sweep([*SMALL, *words])
    assert ended.value.code == 2
    assert what in capsys.readouterr().err


def test_help_and_a_local_sweep_import_no_ray():
    code = "import sys; sys.modules['ray'] = None; from cs336_systems.cli import main; main(sys.argv[1:])"
    for words in (["sweep", *SMALL, "--dry-run"], ["cluster", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_gpus_of_a_cluster_need_not_be_in_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(nvml, "_initialised", lambda: False)
    words = [*SMALL, "--parallel", "ddp", "--ranks", "8", "--dry-run", "--json"]
    words[1] = "cuda"
    assert cli.sweep(words) == 2
    assert cli.sweep([*words, "--cluster", "auto"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(run["device"], run["ranks"]) for run in found["runs"]} == {("cuda", 8)}
    assert found["directory"].endswith("_gpu")


@pytest.fixture
def looked(monkeypatch):
    """Have `cs336 cluster` see these machines."""
    monkeypatch.setattr(ray_nodes, "is_installed", lambda: True)
    return lambda *machines, device=Device.CUDA: monkeypatch.setattr(
        ray_nodes, "look", lambda *_: Look(device=device, machines=machines)
    )


def test_the_machines_of_a_cluster(looked, capsys):
    fine, other, busy = node(0, slots=4), node(1, slots=2, driver="535.2"), node(2, slots=4)
    looked(machine(fine), machine(other), machine(busy, held=3), machine(node(3), failure="it has no NVIDIA GPU"))
    assert cli.main(["cluster", "--json"]) == 0
    found = {each["host"]: each for each in json.loads(capsys.readouterr().out)["machines"]}
    assert [each["refused"] is None for each in found.values()] == [True, False, False, False]
    assert "driver is 535.2, needed 570.1" in found["host-1"]["refused"]
    assert "3 of its 4 GPUs" in found["host-2"]["refused"]
    assert found["host-3"]["refused"] == "it has no NVIDIA GPU"
    assert [each["free"] for each in found.values()] == [4, 2, 1, 1]
    looked(machine(fine, count=8), machine(busy, held=5, count=8), machine(node(4), count=0), device=Device.CPU)
    assert cli.main(["cluster", "--json"]) == 0
    idle, held, head = (each["refused"] for each in json.loads(capsys.readouterr().out)["machines"])
    assert idle is None
    assert "5 of its 8 cores" in held
    assert "none of its cores" in head
    assert cli.main(["cluster", "h:1", "--require-device", "A100"]) == 1
    assert "uses 0 of 3 machines" in capsys.readouterr().out


def test_machines_without_nsys_are_refused_for_a_sweep_that_needs_it(looked, capsys):
    looked(machine(node(0, slots=4, has_nsys=False)), machine(node(1)))
    for words, refused in (([], [False, False]), (["--nsys"], [True, False])):
        assert cli.main(["cluster", "--json", *words]) == 0
        found = json.loads(capsys.readouterr().out)["machines"]
        assert [each["nsys"] for each in found] == [False, True]
        assert [each["refused"] is not None for each in found] == refused
        assert [each["host"] for each in found if "nsys" in (each["refused"] or "")] == ["host-0"] * sum(refused)


def test_a_cluster_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(ray_nodes, "is_installed", lambda: True)
    assert cli.main(["cluster", "ray://h:1"]) == 2
    monkeypatch.setattr(ray_nodes, "look", lambda *_: (_ for _ in ()).throw(SweepError("nothing\nlistens")))
    assert cli.main(["cluster"]) == 1
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]) == 2
