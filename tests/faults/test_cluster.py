"""Sweeps on a real Ray cluster, several nodes on this machine, of which parts are killed: nothing is lost or left."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from cs336_systems.record import Status, load_records
from tests.faults.harness import ROOT, command, contents, eventually, lay_out_models, runs, sweep
from tests.faults.models import PAUSED, RELEASED

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='needs Ray: pip install "ray[default]"'),
]
END_S = 15
"""How long processes on the nodes may outlive the sweep."""


class RayCluster:
    """A head that is a node too, and more nodes, all in `directory`. It is in the session of these tests: a sweep in
    this process ends children in others."""

    def __init__(self, directory, num_nodes):
        lay_out_models(directory)
        self.directory = directory
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/faults/ray_cluster.py")],
            cwd=directory, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(directory / "stderr").open("w"),
        )  # fmt: skip
        found = self._reply()
        self.address, self.head = found["address"], found["head"]
        for _ in range(num_nodes - 1):
            self.add()

    def _reply(self):
        return json.loads(next(line for line in self.process.stdout if line.startswith("{")))

    def add(self, **environment):
        """The process of the raylet of a new node."""
        self.process.stdin.write(json.dumps(environment) + "\n")
        self.process.stdin.flush()
        return self._reply()["raylet"]

    def measurers(self):
        """Processes of this cluster's sweeps that measure, and what they have started."""
        words = "cs336_systems.sweep.cluster.measurer"
        found = []
        for process in psutil.process_iter(["cwd", "cmdline"]):
            if process.info["cwd"] == str(self.directory) and words in (process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [process, *process.children(recursive=True)]
        return found

    def raylet_at_work(self):
        """The raylet of the node on which a worker waits."""
        for process in self.measurers():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if "-m" in words and len(process.children(recursive=True)) > 2:
                    agent = words[words.index("-m") + 2]
                    return psutil.Process(int(agent)).parent()
        return None

    def forget(self):
        for note in (PAUSED, RELEASED):
            (self.directory / note).unlink(missing_ok=True)

    def close(self):
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory):
    made = RayCluster(tmp_path_factory.mktemp("cluster"), num_nodes=3)
    yield made
    made.close()


@pytest.fixture
def start(launch, ray_cluster):
    """Start a sweep on the cluster; at the end no process of it is left on the nodes."""
    ray_cluster.forget()
    yield lambda *words, cluster=ray_cluster, **options: launch(
        [*command(**options), "--cluster", cluster.address, *words]
    )
    assert eventually(lambda: not ray_cluster.measurers(), END_S), ray_cluster.measurers()


def paused(running, cluster):
    running.wait_for(cluster.directory / PAUSED)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_no_cluster_there(launch, place, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    running = launch([*command(), "--cluster", address])
    assert running.wait() == 1
    said = running.stderr.splitlines()[-1]
    assert said.startswith(f"error: no connection to the Ray cluster {address}: ")
    assert re.search(r"nothing listens at \S+:1 ", said)


def test_a_grid_on_three_nodes_is_that_of_a_local_sweep(start, place):
    running = start("--repeats", "3", contexts=range(1, 9))
    assert running.wait() == 0, running.stderr
    assert running.stderr.count(" joins: ") == 3
    assert "ray" not in running.stdout.lower()
    measured, problems = load_records(runs(place))
    assert (len(measured), problems) == (24, [])
    configs = [record.config for record in measured]
    local = sweep(place / "local", *configs).measured
    kinds = [
        {(r.config, r.status, r.environment.identity, tuple(m.phase for m in r.measurements)) for r in records}
        for records in (measured, local)
    ]
    assert kinds[0] == kinds[1]
    again = start("--repeats", "3", contexts=range(1, 9))
    before = contents(runs(place))
    assert again.wait() == 0
    assert contents(runs(place)) == before


def test_a_node_that_dies_in_a_run(start, place, ray_cluster):
    ray_cluster.add()
    running = start(fault="pauses_once", contexts=(4, 8, 12, 16))
    paused(running, ray_cluster)
    assert eventually(lambda: len(load_records(runs(place))[0]) == 3)
    ray_cluster.raylet_at_work().kill()
    assert running.wait() == 0, running.stderr
    records, _ = load_records(runs(place))
    assert [record.status for record in records] == 4 * [Status.OK]
    assert [len(record.lost_tries) for record in records if record.config.model.context_length == 8] == [1]
    assert running.stderr.count(" is lost: ") == 1


def test_the_driver_killed_and_the_same_command_again(start, place, ray_cluster):
    running = start(fault="pauses_once")
    paused(running, ray_cluster)
    assert eventually(lambda: len(load_records(runs(place))[0]) == 2)
    earlier = contents(runs(place))
    running.process.kill()
    running.wait()
    assert eventually(lambda: not ray_cluster.measurers(), END_S), ray_cluster.measurers()
    again = start(fault="pauses_once")
    assert again.wait() == 0, again.stderr
    assert len(load_records(runs(place))[0]) == 3
    assert contents(runs(place)).items() >= earlier.items()


def test_ctrl_c(start, place, ray_cluster):
    running = start(fault="pauses_once")
    paused(running, ray_cluster)
    assert eventually(lambda: len(load_records(runs(place))[0]) == 2)
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.stderr
    assert "the same command goes on from here" in running.stderr
    assert "Traceback" not in running.stderr
    assert len(load_records(runs(place))[0]) == 2


def test_a_worker_that_crashes_and_a_node_with_another_pytorch(start, place, ray_cluster):
    fake = ray_cluster.directory / "fake"
    (fake / "torch-9.9.dist-info").mkdir(parents=True)
    (fake / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    raylet = ray_cluster.add(PYTHONPATH=str(fake))
    words = [sys.executable, "-m", "cs336_systems", "cluster", ray_cluster.address, "--json"]
    looked = subprocess.run(words, capture_output=True, text=True, check=True)
    running = start(fault="fails_where_context_is_8")
    assert running.wait() == 1, running.stderr
    psutil.Process(raylet).kill()
    assert "is not used: torch is 9.9, needed" in running.stderr
    machines = json.loads(looked.stdout)["machines"]
    refused = [machine["refused"] for machine in machines if machine["torch"] == "9.9"]
    assert len(machines) > len(refused) == 1
    assert f"is not used: {refused[0]}" in running.stderr
    statuses = {record.config.model.context_length: record for record in load_records(runs(place))[0]}
    assert {length: record.status for length, record in statuses.items()} == {
        4: Status.OK, 8: Status.CRASHED, 16: Status.OK,
    }  # fmt: skip
    assert statuses[8].failure.signal == "SIGSEGV"


def test_the_head_dies(start, place, tmp_path_factory):
    cluster = RayCluster(tmp_path_factory.mktemp("head"), num_nodes=2)
    try:
        running = start(cluster=cluster, fault="pauses_until_released")
        paused(running, cluster)
        assert eventually(lambda: len(load_records(runs(place))[0]) == 2)
        for process in cluster.head:
            psutil.Process(process).kill()
        assert running.wait() == 1
        assert running.stderr.splitlines()[-1].startswith("error: no connection to the Ray cluster")
        assert "Traceback" not in running.stderr
        assert len(load_records(runs(place))[0]) == 2
        assert eventually(lambda: not cluster.measurers(), END_S), cluster.measurers()
    finally:
        cluster.process.kill()
        for process in psutil.process_iter(["cwd"]):
            if process.info["cwd"] == str(cluster.directory):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
