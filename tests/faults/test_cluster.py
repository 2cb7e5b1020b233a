"""Sweeps on a real Ray cluster: no run is lost or doubled where nodes are killed, hang or join,
runs fail, the head hangs, and the driver is killed or interrupted. The tests share one cluster, in
an order that starts few nodes.
"""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest

from cs336 import cli
from cs336.record import Status, load_records
from tests.faults.harness import ROOT, command, contents, eventually, runs, sweep
from tests.faults.models import PAUSED
from tests.faults.on_ray import CONTEXTS, END_S, LOOPBACK, family, random_moment, send

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install ray"),
]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_no_cluster_there(place, monkeypatch, capsys, address):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert cli.sweep([*command()[2:], "--cluster", address]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: no connection to the Ray cluster ")
    assert re.search(r"nothing listens at \S+:1 ", said)


@pytest.mark.parametrize("talks", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_listens_there_is_not_ray(place, capsys, talks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(
            target=lambda: server.accept()[0].sendall(talks) or time.sleep(END_S), daemon=True
        ).start()
        assert cli.sweep([*command()[2:], "--cluster", f"127.0.0.1:{server.getsockname()[1]}"]) == 1
    assert "does not answer as Ray does" in capsys.readouterr().err.splitlines()[-1]


def test_a_driver_without_the_token_nodes_with_another_pytorch_and_ctrl_c_fail(
    start, place, ray_cluster, chance
):
    words = [*command(), "--cluster", ray_cluster.address, "--dry-run"]
    env = os.environ | LOOPBACK | {"PYTHONPATH": str(ROOT)}
    # Ray tries for long meanwhile
    tokenless = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
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
    contexts = (4, 8, 12, 16, 20, 24)
    running = start(fault="fails_by_context", contexts=chance.sample(contexts, len(contexts)))
    random_moment(running, place, chance)
    others.append(ray_cluster.add(place / "fake"))
    running.wait_for(ray_cluster.directory / PAUSED)
    assert eventually(lambda: len([*runs(place).glob("*.json")]) == 5), running.stderr
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.stderr
    for other in others:
        send(family(other), signal.SIGKILL)
    assert "the same command goes on from here" in running.stderr
    assert "Traceback" not in running.stderr
    assert f"is not used: {refused[0]}" in running.stderr
    assert " is lost" not in running.stderr
    records = {
        record.config.model.context_length: record for record in load_records(runs(place))[0]
    }
    assert {length: record.status for length, record in records.items()} == {
        4: Status.OK,
        8: Status.CRASHED,
        12: Status.OOM,
        16: Status.KILLED,
        24: Status.KILLED,
    }
    assert "9.9" not in {
        record.environment.identity.torch for record in records.values() if record.environment
    }
    assert records[8].failure.signal == "SIGSEGV"
    assert "3 times" in records[24].failure.message
    assert len((ray_cluster.directory / "notes").read_text()) == 3
    assert "RAY_AUTH_TOKEN" in tokenless.communicate()[1].splitlines()[-1]
    assert tokenless.returncode == 1


def kinds(records):
    """What repeats have in common."""
    return {
        (
            replace(r.config, repeat=0),
            r.status,
            r.environment.identity,
            tuple(m.phase for m in r.measurements),
        )
        for r in records
    }


def test_a_grid_is_that_of_a_local_sweep_although_processes_are_killed_and_a_node_hangs(
    start, place, ray_cluster, chance, monkeypatch
):
    ray_cluster.ensure(2)
    words = {"fault": "takes_a_while", "contexts": CONTEXTS}
    running = start("--repeats", "2", **words)
    assert eventually(lambda: ray_cluster.workers() or running.process.poll() is not None)
    random_moment(running, place, chance, 2)
    send(ray_cluster.workers(), signal.SIGKILL)
    random_moment(running, place, chance, 2)
    assert running.process.poll() is None, running.stderr
    assert "Traceback" not in running.stderr
    running.process.kill()
    running.wait()
    assert eventually(lambda: not ray_cluster.left(), END_S), ray_cluster.left()
    earlier = contents(runs(place)) if runs(place).exists() else {}
    finished = {name: content for name, content in earlier.items() if name.endswith(".json")}
    ray_cluster.ensure(3)
    running = start("--repeats", "2", **words)
    killed, hanging = chance.sample(ray_cluster.raylets[1:], 2)
    stopped = chance.choice([family(hanging), [hanging]])
    faults = [lambda: send(family(killed), signal.SIGKILL), lambda: send(stopped, signal.SIGSTOP)]
    chance.shuffle(faults)
    assert eventually(lambda: ray_cluster.workers() or running.process.poll() is not None)
    for fault in faults:
        random_moment(running, place, chance, 3)
        fault()
    # the rest of the runs, one node after the other, on a busy machine
    assert running.wait(300) == 0, running.stderr
    send(family(hanging), signal.SIGKILL)
    assert "Traceback" not in running.stderr
    assert "ray" not in running.stdout.lower()
    measured, problems = load_records(runs(place))
    assert (len(measured), problems) == (2 * len(CONTEXTS), [])
    before = contents(runs(place))
    assert before.keys() == {f"{record.key}.json" for record in measured}
    assert before.items() >= finished.items()
    # in a pipe not every run is
    reported = re.findall(r"custom ctx (\d+) .* steps 2( #1)? .* ms", running.stderr)
    assert len(reported) == len({*reported}) <= len(measured) - len(finished)
    local = sweep(
        place / "local", *(record.config for record in measured if not record.config.repeat)
    )
    assert kinds(measured) == kinds(local.measured)
    monkeypatch.setattr("cs336.commands.measuring.show_results", lambda *_: None)
    assert (
        cli.sweep([*command(**words)[2:], "--repeats", "2", "--cluster", ray_cluster.address]) == 0
    )
    assert contents(runs(place)) == before


@pytest.mark.parametrize("part", [0, 1])  # last, because for Ray a node that has hung may be dead
def test_the_head_hangs_or_ray_hangs_where_the_driver_is(
    start, place, ray_cluster, chance, part, monkeypatch
):
    monkeypatch.setenv("HEAD_S", "1.5")
    # the run with 20 waits for ever
    running = start(fault="fails_by_context", contexts=(*CONTEXTS, 20))
    assert eventually(lambda: " joins: " in running.stderr)
    random_moment(running, place, chance)
    send([ray_cluster.head[part]], signal.SIGSTOP)
    try:
        assert running.process.poll() is None, running.stderr
        assert running.wait(30) == 1, running.stderr
        assert running.stderr.splitlines()[-1].startswith("error: no connection to the Ray cluster")
        assert "Traceback" not in running.stderr
    finally:
        send([ray_cluster.head[part]], signal.SIGCONT)
