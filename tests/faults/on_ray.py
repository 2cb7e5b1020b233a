"""A Ray cluster, several nodes on this machine, and sweeps on it, of which parts are killed.

Faults come at a random moment, which is always the same unless CS336_FAULT_SEED says otherwise. To
repeat one of them:

for seed in {1..10}; do CS336_FAULT_SEED=$seed python -m pytest -q tests/faults -m cluster -k
killed; done
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.faults.harness import ROOT, eventually, lay_out_models, runs

CONTEXTS = range(1, 7)
END_S = 20
"""How long processes on the nodes may outlive the sweep."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray then takes 127.0.0.1 for this machine's address, here and in its drivers."""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
"""Ray asks for it, as docs/CLUSTER.md recommends: others on this machine can reach its ports
too.
"""
HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""With these, Ray takes a node for dead that is silent for about 10 s, not a minute."""
SPARING = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
}
"""No processes in advance, which sweeps do not use."""


class RayCluster:
    """A head that is a node too, and the nodes that tests add, all in `directory`. It is in the
    session of these tests: a sweep in this process ends children in others.

    Nodes other than the head have a version of this program that does not work: the driver must
    send its own.
    """

    def __init__(self, directory):
        lay_out_models(directory)
        self.directory = directory
        other_version = directory / "other" / "cs336"
        other_version.mkdir(parents=True)
        (other_version / "__init__.py").write_text("raise ImportError('another version')\n")
        # the names of sockets must be short
        self.temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/faults/ray_cluster.py")],
            cwd=directory,
            env=os.environ | HEALTH | SPARING | LOOPBACK | TOKEN | own,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(directory / "stderr").open("w"),
        )
        found = self._reply()
        self.address, self.head = found["address"], [psutil.Process(each) for each in found["head"]]
        self._raylets = self.head[1:]

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

    def workers(self):
        """Ray's processes that measure, or have measured, for a sweep."""
        return [
            each
            for each in self._processes()
            if each.info["cmdline"][0] in ("ray::measure", "ray::IDLE")
        ]

    def left(self):
        """Processes of sweeps on the nodes: Ray's, fork servers, and the workers that these have
        started.
        """
        forked = [
            each
            for each in self._processes()
            if "multiprocessing" in " ".join(each.info["cmdline"])
        ]
        return [*self.workers(), *forked]

    def _processes(self):
        found = psutil.process_iter(["cwd", "cmdline"])
        return [
            each
            for each in found
            if each.info["cwd"] == str(self.directory) and each.info["cmdline"]
        ]

    def close(self):
        """Kill all of it: in order, it would wait for a head that may be dead, and for processes
        that may hang.
        """
        self.process.kill()
        send(self._processes(), signal.SIGKILL)
        self.process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def family(process):
    return [process, *process.children(recursive=True)]


def send(processes, number):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def random_moment(running, place, chance, most=4):
    """Wait until a moment before another run has ended, or after fewer than `most` more runs."""
    wanted = chance.randrange(-3, most)
    if wanted >= 0:
        wanted += len([*runs(place).glob("*.json")])
        eventually(
            lambda: (
                len([*runs(place).glob("*.json")]) >= wanted or running.process.poll() is not None
            )
        )
    time.sleep(chance.uniform(0, 4 if wanted < 0 else 0.4))
    print(
        f"the fault comes after {len([*runs(place).glob('*.json')])} runs; so far: {running.stderr}"
    )
