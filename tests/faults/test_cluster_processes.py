"""Sweeps on a real Ray cluster whose processes are killed, interrupted or fail: nothing is lost or left."""

import json
import os
import shutil
import signal
import subprocess
import sys

from cs336_systems.record import Status, load_records
from tests.faults.harness import contents, eventually, memory_cgroup, runs
from tests.faults.models import PAUSED, RELEASED
from tests.faults.on_ray import (
    CONTEXTS,
    END_S,
    MARKS,
    check_all_there,
    check_that_it_gives_up,
    family,
    random_moment,
    send,
)

pytestmark = MARKS
TOKEN = "of these tests, and of no other cluster"
"""Ray asks for it, as docs/CLUSTER.md recommends."""


def another_pytorch(place):
    """A directory in which a node finds that PyTorch 9.9 is installed."""
    metadata = place / "fake" / "torch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    return place / "fake"


def test_workers_that_fail_and_a_node_with_another_pytorch_until_it_is_like_the_others(
    start, place, ray_cluster, chance
):
    """A good run waits until the node that was refused has joined."""
    ray_cluster.ensure(2)  # most have the same PyTorch
    num_nodes, fake = len(ray_cluster.raylets), another_pytorch(place)
    other, released = ray_cluster.add(fake), ray_cluster.directory / RELEASED
    words = [sys.executable, "-m", "cs336_systems", "cluster", ray_cluster.address, "--json"]
    environment = os.environ | ray_cluster.access
    looked = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    contexts = (4, 8, 12, 16, 20)
    with memory_cgroup(ray_cluster.directory) as group:
        running = start(fault="fails_by_context", contexts=chance.sample(contexts, len(contexts)))
        assert eventually(lambda: "is not used: torch is 9.9, needed" in running.stderr), running.stderr
        assert running.stderr.count(" joins: ") == num_nodes
        shutil.rmtree(fake)
        assert eventually(lambda: running.stderr.count(" joins: ") == num_nodes + 1), running.stderr
        released.touch()
        assert running.wait() == 1, running.stderr
        released.unlink()
    send(family(other), signal.SIGKILL)
    machines = json.loads(looked.stdout)["machines"]
    refused = [machine["refused"] for machine in machines if machine["torch"] == "9.9"]
    assert len(machines) > len(refused) == 1
    assert f"is not used: {refused[0]}" in running.stderr
    assert " is lost: " not in running.stderr
    records = {record.config.model.context_length: record for record in load_records(runs(place))[0]}
    assert {length: record.status for length, record in records.items()} == {
        4: Status.OK, 8: Status.CRASHED, 12: Status.OOM, 16: Status.KILLED, 20: Status.OK,
    }  # fmt: skip
    assert records[8].failure.signal == "SIGSEGV"
    assert group is None or "memory" in records[16].failure.message


def test_the_driver_killed_and_then_the_agents_of_the_same_command(start, place, ray_cluster, chance):
    """Ray kills an agent where the memory of a machine is used up; another takes its place."""
    ray_cluster.ensure(2)
    running = start(fault="takes_a_while", contexts=CONTEXTS)
    random_moment(running, place, chance)
    running.process.kill()
    running.wait()
    assert eventually(lambda: not ray_cluster.left(), END_S), ray_cluster.left()
    earlier = contents(runs(place)) if runs(place).exists() else {}
    finished = {name: content for name, content in earlier.items() if name.endswith(".json")}
    running = start(fault="takes_a_while", contexts=CONTEXTS)
    assert eventually(lambda: len(ray_cluster.agents()) == 2 or running.process.poll() is not None)
    random_moment(running, place, chance)
    send(ray_cluster.agents(), signal.SIGKILL)
    check_all_there(running, place, finished)


def test_ctrl_c(start, place, ray_cluster):
    ray_cluster.ensure(2)
    running = start(fault="pauses_once")
    running.wait_for(ray_cluster.directory / PAUSED)
    assert eventually(lambda: len(load_records(runs(place))[0]) == 2)
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.stderr
    assert "the same command goes on from here" in running.stderr
    assert "Traceback" not in running.stderr
    assert len(load_records(runs(place))[0]) == 2


def test_ray_dies_where_the_driver_is(start, place, ray_cluster, chance):
    """Last, because nothing can be done with its cluster afterwards."""
    ray_cluster.ensure(2)
    running = start(fault="pauses_until_released", contexts=CONTEXTS)
    assert eventually(lambda: " joins: " in running.stderr)  # before, it would be connected through another node here
    random_moment(running, place, chance)
    send(ray_cluster.raylets[:1], signal.SIGKILL)
    check_that_it_gives_up(running, ray_cluster)
