"""Sweeps on a real Ray cluster of which the driver is killed or the head hangs: no run is lost or doubled."""

import os
import re
import signal
import socket
import threading
import time

import pytest

from cs336_systems.record import Status, load_records
from tests.faults.harness import ROOT, command, contents, eventually, runs
from tests.faults.on_ray import CONTEXTS, END_S, LOOPBACK, ON_RAY, random_moment, send

pytestmark = ON_RAY


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_no_cluster_there(launch, place, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    running = launch([*command(), "--cluster", address])
    assert running.wait() == 1
    said = running.stderr.splitlines()[-1]
    assert said.startswith("error: no connection to the Ray cluster ")
    assert re.search(r"nothing listens at \S+:1 ", said)


@pytest.mark.parametrize("talks", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_listens_there_is_not_ray(launch, place, talks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(talks) or time.sleep(END_S), daemon=True).start()
        running = launch([*command(), "--cluster", f"127.0.0.1:{server.getsockname()[1]}"])
        assert running.wait() == 1
    assert "does not answer as Ray does" in running.stderr.splitlines()[-1]


def test_without_the_token_the_line_says_what_to_set(launch, place, ray_cluster):
    env = os.environ | LOOPBACK | {"PYTHONPATH": str(ROOT)}
    running = launch([*command(), "--cluster", ray_cluster.address], env=env)
    assert running.wait() == 1
    assert "RAY_AUTH_TOKEN" in running.stderr.splitlines()[-1]


def test_the_driver_is_killed_and_then_ray_s_process_under_the_same_command(start, place, ray_cluster, chance):
    ray_cluster.ensure(2)
    running = start(fault="takes_a_while", contexts=CONTEXTS)
    random_moment(running, place, chance)
    running.process.kill()
    running.wait()
    assert eventually(lambda: not ray_cluster.left(), END_S), ray_cluster.left()
    earlier = contents(runs(place)) if runs(place).exists() else {}
    finished = {name: content for name, content in earlier.items() if name.endswith(".json")}
    running = start(fault="takes_a_while", contexts=CONTEXTS)
    assert eventually(lambda: ray_cluster.workers() or running.process.poll() is not None)
    random_moment(running, place, chance)
    send(ray_cluster.workers(), signal.SIGKILL)
    assert running.wait() == 0, running.stderr
    assert "Traceback" not in running.stderr
    records, problems = load_records(runs(place))
    assert problems == []
    assert sorted(record.config.model.context_length for record in records) == [*CONTEXTS]
    assert {record.status for record in records} == {Status.OK}
    after = contents(runs(place))
    assert after.keys() == {f"{record.key}.json" for record in records}
    assert after.items() >= finished.items()
    reported = re.findall(r"custom ctx (\d+) .* ms", running.stderr)  # in a pipe not every run is
    assert len(reported) == len({*reported}) <= len(CONTEXTS) - len(finished)


@pytest.mark.parametrize("part", [0, 1])
def test_the_head_hangs_or_ray_hangs_where_the_driver_is(start, place, ray_cluster, chance, part):
    """Last, because of the second nothing can be done with its cluster afterwards."""
    ray_cluster.ensure(2)
    running = start(fault="pauses_until_released", contexts=CONTEXTS)  # one run does not end before that is noticed
    assert eventually(lambda: " joins: " in running.stderr)
    random_moment(running, place, chance)
    send([ray_cluster.head[part]], signal.SIGSTOP)
    try:
        assert running.wait(30) == 1, running.stderr
        assert running.stderr.splitlines()[-1].startswith("error: no connection to the Ray cluster")
        assert "Traceback" not in running.stderr
    finally:
        if part == 0:
            send([ray_cluster.head[part]], signal.SIGCONT)
        else:
            send([*ray_cluster.head, *ray_cluster.raylets], signal.SIGKILL)
