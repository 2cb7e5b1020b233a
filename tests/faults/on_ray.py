"""A Ray cluster, several nodes on this machine, and sweeps on it, of which parts are killed.

Faults come at a random moment, which is always the same unless CS336_FAULT_SEED says otherwise. To repeat one of them:

for seed in {1..10}; do CS336_FAULT_SEED=$seed python -m pytest -q tests/faults/test_cluster.py -k killed; done
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from cs336_systems.record import Status, load_records
from tests.faults.harness import ROOT, contents, eventually, lay_out_models, runs

MARKS = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray"),
]
END_S = 15
"""How long processes on the nodes may outlive the sweep."""
QUICK = ROOT / "tests/faults/quick_cluster_sweep.py"
CONTEXTS = range(1, 13)
HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""With these, Ray takes a node for dead that is silent for about 10 s, not a minute."""
SPARING = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0", "RAY_worker_niceness": "0"}
"""No processes in advance, which sweeps do not use."""


class RayCluster:
    """A head that is a node too, and the nodes that tests add, all in `directory`. It is in the session of these tests:
    a sweep in this process ends children in others.

    Nodes other than the head have a version of this program that does not work: the driver must send its own. With a
    token, only who has it in the environment, as in `access`, can connect. With `ordered`, the head runs nothing, and
    Ray's autoscaler has ordered a node, which comes once there is a file RELEASED.
    """

    def __init__(self, directory, token=None, *, ordered=False):
        lay_out_models(directory)
        self.directory = directory
        self.access = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        other_version = directory / "other" / "cs336_systems"
        other_version.mkdir(parents=True)
        (other_version / "__init__.py").write_text("raise ImportError('another version')\n")
        self.temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # the names of sockets must be short
        own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/faults/ray_cluster.py"), *(["ordered"] if ordered else [])],
            cwd=directory, env=os.environ | HEALTH | SPARING | self.access | own, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(directory / "stderr").open("w"),
        )  # fmt: skip
        found = self._reply()
        self.address, self.head = found["address"], [psutil.Process(each) for each in found["head"]]
        self._raylets = [psutil.Process(found["raylet"])]

    def _reply(self):
        return json.loads(next(line for line in self.process.stdout if line.startswith("{")))

    @property
    def raylets(self):
        """The nodes that are there, the head first."""
        return [*filter(is_alive, self._raylets)]

    def ensure(self, num_nodes):
        """Add nodes until there are so many."""
        for _ in range(num_nodes - len(self.raylets)):
            self._raylets.append(self.add())

    def add(self, *paths):
        """The raylet of a new node that finds packages in `paths` first."""
        path = os.pathsep.join(map(str, [*paths, self.directory / "other"]))
        self.process.stdin.write(json.dumps({"PYTHONPATH": path}) + "\n")
        self.process.stdin.flush()
        return psutil.Process(self._reply()["raylet"])

    def _named(self, is_named):
        return [
            process
            for process in psutil.process_iter(["cwd", "cmdline"])
            if process.info["cwd"] == str(self.directory) and is_named(process.info["cmdline"] or [""])
        ]

    def agents(self):
        return self._named(lambda words: words[0].startswith("ray::Agent"))

    def left(self):
        """Processes of sweeps on the nodes."""
        found = [*self.agents(), *self._named(lambda words: "cs336_systems.sweep.cluster.measurer" in words)]
        for process in [*found]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.children(recursive=True)
        return found

    def scratch(self):
        """Directories for what runs write on the nodes, as those processes know them that remove them in the end."""
        found = []
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                found += [Path(process.cmdline()[-1])] if process.name() == "sh" else []
        return found

    def close(self):
        """Kill all of it: in order, it would wait for a head that may be dead, and for processes that may hang."""
        self.process.kill()
        send(in_directory(self.directory), signal.SIGKILL)
        self.process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def in_directory(directory):
    return [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(directory)]


def family(process):
    return [process, *process.children(recursive=True)]


def send(processes, number):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def random_moment(running, place, chance, most=9):
    """Wait until a moment before the nodes have joined, or after fewer than `most` runs."""
    wanted = chance.randrange(-3, most)
    if wanted >= 0:
        eventually(lambda: len([*runs(place).glob("*.json")]) >= wanted or running.process.poll() is not None)
    time.sleep(chance.uniform(0, 4 if wanted < 0 else 0.4))
    print(f"the fault comes after {len([*runs(place).glob('*.json')])} runs; so far: {running.stderr}")


def check_all_there(running, place, earlier=()):
    """Each run has one result and was reported once; those there are `earlier` are as they were."""
    assert running.wait() == 0, running.stderr
    assert "Traceback" not in running.stderr
    records, problems = load_records(runs(place))
    assert problems == []
    assert sorted(record.config.model.context_length for record in records) == [*CONTEXTS]
    assert {record.status for record in records} == {Status.OK}
    after = contents(runs(place))
    assert after.keys() == {f"{record.key}.json" for record in records}
    assert after.items() >= dict(earlier).items()
    reported = re.findall(r"^custom ctx (\d+) .* ms", running.stderr, re.MULTILINE)
    assert len(reported) == len({*reported}) == len(CONTEXTS) - len(earlier)


def check_that_it_gives_up(running, cluster):
    assert running.wait() == 1, running.stderr
    assert running.stderr.splitlines()[-1].startswith("error: no connection to the Ray cluster")
    assert "Traceback" not in running.stderr
    assert eventually(lambda: not cluster.left(), END_S), cluster.left()
