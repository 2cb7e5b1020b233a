"""Sweeps on a real Ray cluster, several nodes on this machine, of which parts are killed: nothing is lost or left.

Faults come at a random moment, which is always the same unless CS336_FAULT_SEED says otherwise. To repeat one of them:

for seed in {1..10}; do CS336_FAULT_SEED=$seed python -m pytest -q tests/faults/test_cluster.py -k killed; done
"""

import contextlib
import importlib.util
import json
import os
import random
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

from cs336_systems.analysis.kernels.step_profile import decode_profile
from cs336_systems.record import Status, load_records
from tests.faults.harness import NAME, ROOT, command, contents, eventually, lay_out_models, memory_cgroup, runs, sweep
from tests.faults.models import PAUSED, RELEASED

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray"),
]
END_S = 15
"""How long processes on the nodes may outlive the sweep."""
SHORT = ROOT / "tests/faults/sweep_without_report.py"
CONTEXTS = range(1, 13)
HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""With these, Ray takes a node for dead that is silent for about 10 s, not a minute."""


class RayCluster:
    """A head that is a node too, and more nodes, all in `directory`. It is in the session of these tests: a sweep in
    this process ends children in others.

    Nodes other than the head have a version of this program that does not work: the driver must send its own.
    """

    def __init__(self, directory, num_nodes):
        lay_out_models(directory)
        self.directory = directory
        other_version = directory / "other" / "cs336_systems"
        other_version.mkdir(parents=True)
        (other_version / "__init__.py").write_text("raise ImportError('another version')\n")
        self.temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # the names of sockets must be short
        environment = os.environ | HEALTH | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/faults/ray_cluster.py")],
            cwd=directory, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(directory / "stderr").open("w"),
        )  # fmt: skip
        found = self._reply()
        self.address, self.head = found["address"], [psutil.Process(each) for each in found["head"]]
        self._raylets = [psutil.Process(found["raylet"])]
        self.ensure(num_nodes)

    def _reply(self):
        return json.loads(next(line for line in self.process.stdout if line.startswith("{")))

    @property
    def raylets(self):
        """The nodes that are there, the head first."""
        return [*filter(is_alive, self._raylets)]

    def ensure(self, num_nodes):
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


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    """The cluster of these tests. The head of the first may die."""
    made = []

    def get():
        if not made or not all(map(is_alive, made[-1].head)):
            made.append(RayCluster(tmp_path_factory.mktemp("cluster"), 3))
        return made[-1]

    yield get
    for each in made:
        each.close()


@pytest.fixture
def ray_cluster(whole_file):
    """At least two nodes that wait for a sweep; at the end no process of one is left on them."""
    cluster = whole_file()
    cluster.ensure(2)
    (cluster.directory / PAUSED).unlink(missing_ok=True)
    yield cluster
    assert eventually(lambda: not cluster.left(), END_S), cluster.left()


@pytest.fixture
def start(launch, ray_cluster):
    return lambda *words, script=SHORT, **options: launch(
        [*command(script=script, **options), "--cluster", ray_cluster.address, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def chance(request):
    return random.Random(f"{os.environ.get('CS336_FAULT_SEED', '6')} {request.node.name}")


def random_moment(running, place, chance):
    """Wait until a moment before the nodes have joined, or after some runs."""
    wanted = chance.randrange(-3, len(CONTEXTS) - 3)
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
    return records


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_no_cluster_there(launch, place, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    running = launch([*command(), "--cluster", address])
    assert running.wait() == 1
    said = running.stderr.splitlines()[-1]
    assert said.startswith(f"error: no connection to the Ray cluster {address}: ")
    assert re.search(r"nothing listens at \S+:1 ", said)


def test_a_grid_on_three_nodes_is_that_of_a_local_sweep(start, place, ray_cluster):
    ray_cluster.ensure(3)
    running = start("--repeats", "3", contexts=range(1, 9), script=ROOT / "benchmark_sweep.py")
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


def test_nodes_that_hang(start, place, ray_cluster, chance):
    """One whole node, and of another either what Ray has there or what this program has there: it is cut off."""
    ray_cluster.ensure(3)
    running = start(fault="takes_a_while", contexts=CONTEXTS)
    random_moment(running, place, chance)
    whole, part = chance.sample(ray_cluster.raylets[1:], 2)
    agents = [process for process in part.children() if process in ray_cluster.agents()]
    hanging = family(whole) + (agents if agents and chance.random() < 0.5 else [part])
    send(hanging, signal.SIGSTOP)
    try:
        check_all_there(running, place)
    finally:
        send(hanging, signal.SIGCONT)
    assert eventually(lambda: not ray_cluster.left(), END_S), ray_cluster.left()
    send([*family(whole), *family(part)], signal.SIGKILL)


def test_a_node_that_is_killed(start, place, ray_cluster, chance):
    running = start(fault="takes_a_while", contexts=CONTEXTS)
    random_moment(running, place, chance)
    send(family(chance.choice(ray_cluster.raylets[1:])), signal.SIGKILL)
    records = check_all_there(running, place)
    assert sum(len(record.lost_tries) for record in records) <= 1


def test_profiles_are_those_of_a_local_sweep_and_none_stays_on_a_node_that_is_killed(
    start, place, launch, ray_cluster, chance
):
    words = {"fault": "takes_a_while", "script": ROOT / "benchmark_sweep.py"}
    running = start("--profile", **words)
    ours, theirs = (place / output / "kineto_profiles" / NAME for output in ("data", "local"))
    wanted = chance.randrange(0, 5)
    assert eventually(lambda: len([*ours.glob("runs/*.json")]) >= wanted and len(ray_cluster.scratch()) >= 2)
    scratch = ray_cluster.scratch()
    time.sleep(chance.uniform(0, 0.4))
    raylet = chance.choice(ray_cluster.raylets[1:])
    send([raylet, *raylet.children()], signal.SIGKILL)
    assert running.wait() == 0, running.stderr
    assert eventually(lambda: not any(path.exists() for path in scratch), END_S), scratch
    local = launch([*command(**words), "--profile", "--output", "local"])
    assert local.wait() == 0, local.stderr
    names = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (ours, theirs)]
    assert names[0] == names[1]
    for path in (ours / "kernels").iterdir():
        here, there = (decode_profile((folder / "kernels" / path.name).read_bytes()) for folder in (ours, theirs))
        assert (here.source, here.num_steps, here.num_kernels) == (there.source, there.num_steps, there.num_kernels)


def test_agents_that_are_killed_are_replaced(start, place, ray_cluster, chance):
    """As Ray does where the memory of a machine is used up."""
    running = start(fault="takes_a_while", contexts=CONTEXTS)
    assert eventually(lambda: len(ray_cluster.agents()) == len(ray_cluster.raylets))
    random_moment(running, place, chance)
    send(ray_cluster.agents(), signal.SIGKILL)
    check_all_there(running, place)


def test_the_driver_killed_and_the_same_command_again(start, place, ray_cluster, chance):
    running = start(fault="takes_a_while", contexts=CONTEXTS)
    random_moment(running, place, chance)
    running.process.kill()
    running.wait()
    assert eventually(lambda: not ray_cluster.left(), END_S), ray_cluster.left()
    earlier = contents(runs(place)) if runs(place).exists() else {}
    finished = {name: content for name, content in earlier.items() if name.endswith(".json")}
    check_all_there(start(fault="takes_a_while", contexts=CONTEXTS), place, finished)


def test_ctrl_c(start, place, ray_cluster):
    running = start(fault="pauses_once")
    running.wait_for(ray_cluster.directory / PAUSED)
    assert eventually(lambda: len(load_records(runs(place))[0]) == 2)
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.stderr
    assert "the same command goes on from here" in running.stderr
    assert "Traceback" not in running.stderr
    assert len(load_records(runs(place))[0]) == 2


def another_pytorch(place):
    """A directory in which a node finds that PyTorch 9.9 is installed."""
    metadata = place / "fake" / "torch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    return place / "fake"


def test_workers_that_fail_and_a_node_with_another_pytorch(start, place, ray_cluster, chance):
    other = ray_cluster.add(another_pytorch(place))
    words = [sys.executable, "-m", "cs336_systems", "cluster", ray_cluster.address, "--json"]
    looked = subprocess.run(words, capture_output=True, text=True, check=True)
    contexts = (4, 8, 12, 16, 20)
    with memory_cgroup(ray_cluster.directory) as group:
        running = start(fault="fails_by_context", contexts=chance.sample(contexts, len(contexts)))
        assert running.wait() == 1, running.stderr
    send(family(other), signal.SIGKILL)
    assert "is not used: torch is 9.9, needed" in running.stderr
    machines = json.loads(looked.stdout)["machines"]
    refused = [machine["refused"] for machine in machines if machine["torch"] == "9.9"]
    assert len(machines) > len(refused) == 1
    assert f"is not used: {refused[0]}" in running.stderr
    assert running.stderr.count(" joins: ") == len(ray_cluster.raylets)
    assert " is lost: " not in running.stderr
    records = {record.config.model.context_length: record for record in load_records(runs(place))[0]}
    assert {length: record.status for length, record in records.items()} == {
        4: Status.OK, 8: Status.CRASHED, 12: Status.OOM, 16: Status.KILLED, 20: Status.OK,
    }  # fmt: skip
    assert records[8].failure.signal == "SIGSEGV"
    assert group is None or "memory" in records[16].failure.message


def test_a_node_that_was_another_and_is_like_the_others_again(start, place, ray_cluster):
    fake = another_pytorch(place)
    other = ray_cluster.add(fake)
    running = start(fault="pauses_until_released")
    running.wait_for(ray_cluster.directory / PAUSED)
    assert eventually(lambda: "is not used: torch is 9.9" in running.stderr), running.stderr
    shutil.rmtree(fake)
    num_nodes = len(ray_cluster.raylets) + 1
    assert eventually(lambda: running.stderr.count(" joins: ") == num_nodes, 60), running.stderr
    released = ray_cluster.directory / RELEASED
    released.touch()
    assert running.wait() == 0, running.stderr
    released.unlink()
    send(family(other), signal.SIGKILL)


def test_the_head_dies(start, place, ray_cluster, chance):
    running = start(fault="pauses_until_released", contexts=CONTEXTS)  # one run does not end before that is noticed
    random_moment(running, place, chance)
    send(ray_cluster.head, signal.SIGKILL)
    check_that_it_gives_up(running, ray_cluster)


def test_ray_dies_where_the_driver_is(start, place, ray_cluster, chance):
    running = start(fault="pauses_until_released", contexts=CONTEXTS)
    assert eventually(lambda: " joins: " in running.stderr)  # before, it would be connected through another node here
    random_moment(running, place, chance)
    send(ray_cluster.raylets[:1], signal.SIGKILL)
    check_that_it_gives_up(running, ray_cluster)


def check_that_it_gives_up(running, cluster):
    assert running.wait() == 1, running.stderr
    assert running.stderr.splitlines()[-1].startswith("error: no connection to the Ray cluster")
    assert "Traceback" not in running.stderr
    assert eventually(lambda: not cluster.left(), END_S), cluster.left()
