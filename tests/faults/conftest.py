"""Every test of a fault has a directory of its own to be in, and must leave no process there."""

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from cs336.sweep.isolation import ensure_fork_server
from tests.faults.harness import ROOT, Command, command, eventually, lay_out_models, processes_in
from tests.faults.models import PAUSED
from tests.faults.on_ray import END_S, LOOPBACK, TOKEN, RayCluster, is_alive


@pytest.fixture(scope="session")
def preloaded():
    """The fork server starts in a directory that belongs to no test, and its workers need not
    import pytest.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(sys.modules["__main__"], "__file__", raising=False)
        ensure_fork_server()
        yield


@pytest.fixture
def place(tmp_path, monkeypatch, preloaded):
    """The current directory, of this process and of all that the test starts."""
    monkeypatch.chdir(tmp_path)
    lay_out_models(tmp_path)
    yield tmp_path
    assert eventually(lambda: not processes_in(tmp_path)), processes_in(tmp_path)


@pytest.fixture
def launch(place):
    """Start a command in `place`; whatever comes of it is ended with the test."""
    commands = []

    def start(words, **options):
        commands.append(Command(place, words, **options))
        return commands[-1]

    yield start
    ended = eventually(lambda: not processes_in(place))
    left = processes_in(place)
    for each in commands:
        each.close()
    assert ended, left


@pytest.fixture
def chance(request):
    return random.Random(f"{os.environ.get('CS336_FAULT_SEED', '6')} {request.node.name}")


@pytest.fixture(scope="module")
def clusters():
    """Those of this file's tests: another one is made where the head of the last has died."""
    made = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def ray_cluster(clusters, tmp_path_factory):
    """A head that waits for a sweep, and as many nodes as earlier tests have left; at the end no
    process of a sweep.
    """
    if not clusters or not all(map(is_alive, clusters[-1].head)):
        clusters.append(RayCluster(tmp_path_factory.mktemp("cluster")))
    cluster = clusters[-1]
    (cluster.directory / PAUSED).unlink(missing_ok=True)
    yield cluster
    assert eventually(lambda: not cluster.left(), END_S), cluster.left()


@pytest.fixture
def start(launch, ray_cluster):
    """Start a sweep on the cluster."""
    return lambda *words, **options: launch(
        [*command(**options), "--cluster", ray_cluster.address, *words],
        env=os.environ | LOOPBACK | TOKEN | {"PYTHONPATH": str(ROOT)},
    )
