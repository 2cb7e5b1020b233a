"""A sweep on a real Ray cluster whose autoscaler has ordered a machine that is not there yet."""

import re
from contextlib import closing

import pytest

from cs336_systems.record import Status, load_records
from tests.faults.harness import eventually, runs
from tests.faults.models import RELEASED
from tests.faults.on_ray import END_S, MARKS, RayCluster

pytestmark = MARKS


@pytest.fixture
def ray_cluster(tmp_path_factory):
    with closing(RayCluster(tmp_path_factory.mktemp("cluster"), ordered=True)) as cluster:
        yield cluster
        assert eventually(lambda: not cluster.left(), END_S), cluster.left()


def test_a_machine_that_is_ordered_is_waited_for(start, place, ray_cluster):
    running = start(contexts=[4])
    waits = re.compile(r"\] waiting .* 0 machines and 1 pending$", re.MULTILINE)
    assert eventually(lambda: waits.search(running.stderr) or running.process.poll() is not None)
    assert waits.search(running.stderr), running.stderr
    (ray_cluster.directory / RELEASED).touch()
    (head,) = ray_cluster.raylets
    assert eventually(ray_cluster.agents), running.stderr
    assert head.pid not in {agent.ppid() for agent in ray_cluster.agents()}
    assert running.wait() == 0, running.stderr
    assert running.stderr.count(" joins: ") == 1
    assert [record.status for record in load_records(runs(place))[0]] == [Status.OK]
