"""Sweeps on a real Ray cluster of which nodes are killed, hang or join, and runs fail: no run is lost or doubled."""

import re
import signal
from dataclasses import replace

from cs336_systems.record import Status, load_records
from tests.faults.harness import contents, eventually, runs, sweep
from tests.faults.models import PAUSED, RELEASED
from tests.faults.on_ray import CONTEXTS, ON_RAY, family, random_moment, send

pytestmark = ON_RAY


def kinds(records):
    """What repeats have in common."""
    return {
        (replace(r.config, repeat=0), r.status, r.environment.identity, tuple(m.phase for m in r.measurements))
        for r in records
    }


def test_a_grid_on_three_nodes_of_which_one_is_killed_and_one_hangs_is_that_of_a_local_sweep(
    start, place, ray_cluster, chance
):
    ray_cluster.ensure(3)
    words = {"fault": "takes_a_while", "contexts": CONTEXTS}
    running = start("--repeats", "2", **words)
    killed, hanging = chance.sample(ray_cluster.raylets[1:], 2)
    stopped = chance.choice([family(hanging), [hanging]])
    faults = [lambda: send(family(killed), signal.SIGKILL), lambda: send(stopped, signal.SIGSTOP)]
    chance.shuffle(faults)
    for fault, most in zip(faults, (4, 9), strict=True):
        random_moment(running, place, chance, most)
        fault()
    assert running.wait(300) == 0, running.stderr  # the rest of the runs, one node after the other, on a busy machine
    send(family(hanging), signal.SIGKILL)
    assert "Traceback" not in running.stderr
    assert "ray" not in running.stdout.lower()
    measured, problems = load_records(runs(place))
    assert (len(measured), problems) == (2 * len(CONTEXTS), [])
    local = sweep(place / "local", *(record.config for record in measured if not record.config.repeat))
    assert kinds(measured) == kinds(local.measured)
    again, before = start("--repeats", "2", **words), contents(runs(place))
    assert again.wait() == 0
    assert contents(runs(place)) == before


def test_what_fails_on_nodes_and_nodes_with_another_pytorch_of_which_one_joins_late(start, place, ray_cluster, chance):
    ray_cluster.ensure(2)  # most have the same PyTorch
    metadata = place / "fake" / "torch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    others = [ray_cluster.add(place / "fake")]
    looked = start("--dry-run")
    assert looked.wait() == 0, looked.stderr
    machines = re.findall(r"PyTorch (\S+): (used|not used: .*)", looked.stdout)
    refused = [use.removeprefix("not used: ") for version, use in machines if version == "9.9"]
    assert len(machines) > len(refused) == 1
    contexts, released = (4, 8, 12, 16, 20, 24), ray_cluster.directory / RELEASED
    running = start(fault="fails_by_context", contexts=chance.sample(contexts, len(contexts)))
    random_moment(running, place, chance)
    others.append(ray_cluster.add(place / "fake"))
    assert eventually(lambda: len([*runs(place).glob("*.json")]) == 5), running.stderr
    released.touch()
    assert running.wait() == 1, running.stderr
    released.unlink()
    for other in others:
        send(family(other), signal.SIGKILL)
    assert f"is not used: {refused[0]}" in running.stderr
    assert " is lost" not in running.stderr
    records = {record.config.model.context_length: record for record in load_records(runs(place))[0]}
    assert {length: record.status for length, record in records.items()} == {
        4: Status.OK, 8: Status.CRASHED, 12: Status.OOM, 16: Status.KILLED, 20: Status.OK, 24: Status.KILLED,
    }  # fmt: skip
    assert "9.9" not in {record.environment.identity.torch for record in records.values() if record.environment}
    assert records[8].failure.signal == "SIGSEGV"
    assert "3 times" in records[24].failure.message
    assert len((ray_cluster.directory / "notes").read_text()) == 3


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
