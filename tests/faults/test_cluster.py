"""Sweeps on a real Ray cluster, on which machines are killed and hang: nothing is lost or left."""

import re
import signal
import time
from dataclasses import replace

import pytest

from cs336_systems.analysis.kernels.step_profile import decode_profile
from cs336_systems.record import load_records
from tests.faults.harness import NAME, ROOT, command, contents, eventually, runs, sweep
from tests.faults.on_ray import (
    CONTEXTS,
    END_S,
    MARKS,
    check_that_it_gives_up,
    family,
    random_moment,
    send,
)

pytestmark = MARKS


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_no_cluster_there(launch, place, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    running = launch([*command(), "--cluster", address])
    assert running.wait() == 1
    said = running.stderr.splitlines()[-1]
    assert said.startswith(f"error: no connection to the Ray cluster {address}: ")
    assert re.search(r"nothing listens at \S+:1 ", said)


def kinds(records):
    """What repeats have in common."""
    return {
        (replace(r.config, repeat=0), r.status, r.environment.identity, tuple(m.phase for m in r.measurements))
        for r in records
    }


def hang(node, cluster, chance):
    """The whole node, or only what Ray or what this program has there, so that it is cut off; what has been stopped."""
    agents = [process for process in node.children() if process in cluster.agents()]
    stopped = chance.choice([family(node), [node], agents or [node]])
    send(stopped, signal.SIGSTOP)
    return stopped


def test_a_grid_on_three_nodes_of_which_one_is_killed_and_one_hangs_is_that_of_a_local_sweep(
    start, place, ray_cluster, chance
):
    ray_cluster.ensure(3)
    words = {"fault": "takes_a_while", "contexts": range(1, 9)}
    running = start("--repeats", "3", **words, script=ROOT / "benchmark_sweep.py")
    killed, hanging = chance.sample(ray_cluster.raylets[1:], 2)
    faults = [lambda: send(family(killed), signal.SIGKILL), lambda: hang(hanging, ray_cluster, chance)]
    chance.shuffle(faults)
    for fault, most in zip(faults, (9, 21), strict=True):
        random_moment(running, place, chance, most)
        fault()
    assert running.wait() == 0, running.stderr
    send(family(hanging), signal.SIGCONT)
    assert eventually(lambda: not ray_cluster.left(), END_S), ray_cluster.left()
    send(family(hanging), signal.SIGKILL)
    assert "Traceback" not in running.stderr
    assert "ray" not in running.stdout.lower()
    measured, problems = load_records(runs(place))
    assert (len(measured), problems) == (24, [])
    assert sum(len(record.lost_tries) for record in measured) <= 2
    local = sweep(place / "local", *(record.config for record in measured if not record.config.repeat))
    assert kinds(measured) == kinds(local.measured)
    again = start("--repeats", "3", **words)
    before = contents(runs(place))
    assert again.wait() == 0
    assert contents(runs(place)) == before


def test_profiles_are_those_of_a_local_sweep_and_none_stays_on_a_node_that_is_killed(start, place, ray_cluster, chance):
    ray_cluster.ensure(2)
    running = start("--profile", fault="takes_a_while")
    ours, theirs = place / "data" / "kineto_profiles" / NAME, place / "local"
    wanted = chance.randrange(0, 5)
    assert eventually(lambda: len([*ours.glob("runs/*.json")]) >= wanted and len(ray_cluster.scratch()) >= 2)
    scratch = ray_cluster.scratch()
    time.sleep(chance.uniform(0, 0.4))
    raylet = chance.choice(ray_cluster.raylets[1:])
    send([raylet, *raylet.children()], signal.SIGKILL)
    assert running.wait() == 0, running.stderr
    assert eventually(lambda: not any(path.exists() for path in scratch), END_S), scratch
    sweep(theirs, *(record.config for record in load_records(ours / "runs")[0]))
    names = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (ours, theirs)]
    assert names[0] == names[1]
    for path in (ours / "kernels").iterdir():
        here, there = (decode_profile((folder / "kernels" / path.name).read_bytes()) for folder in (ours, theirs))
        assert (here.source, here.num_steps, here.num_kernels) == (there.source, there.num_steps, there.num_kernels)


def test_the_head_dies(start, place, ray_cluster, chance):
    """Last, because nothing can be done with its cluster afterwards."""
    ray_cluster.ensure(2)
    running = start(fault="pauses_until_released", contexts=CONTEXTS)  # one run does not end before that is noticed
    random_moment(running, place, chance)
    send(ray_cluster.head, signal.SIGKILL)
    check_that_it_gives_up(running, ray_cluster)
