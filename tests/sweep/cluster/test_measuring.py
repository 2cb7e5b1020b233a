"""An agent and the process that measures for it, on the CPU of this machine: what profilers leave comes from there."""

import hashlib
import importlib.util
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cs336_systems.analysis.kernels.explain import explain
from cs336_systems.config import Device, Parallel, Profiler
from cs336_systems.record import Status
from cs336_systems.sweep.cluster.agent import Agent
from cs336_systems.sweep.cluster.measurer import Reply, Request
from cs336_systems.sweep.store import raw_profile_path, raw_profile_paths
from tests.faults.harness import eventually
from tests.sweep.cluster.simulated import grid

pytestmark = [
    pytest.mark.cluster,  # for its seconds: it has no need of Ray
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='needs Ray: pip install "ray[default]"'),
]
ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "fake_nsys.py"


@pytest.fixture
def agent(monkeypatch, tmp_path):
    """An agent whose processes find an nsys, and write to a directory whose name is short enough for their sockets."""
    (tmp_path / "bin").mkdir()
    with tempfile.TemporaryDirectory(prefix="cs336-") as scratch:
        yield from _agent(monkeypatch, tmp_path, Path(scratch))


def _agent(monkeypatch, tmp_path, scratch):
    fake = tmp_path / "bin" / "nsys"
    fake.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {SCRIPT} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(Agent, "_end_unless_renewed", lambda _: None)
    monkeypatch.setattr("cs336_systems.sweep.cluster.agent.when_it_ends", lambda *_: None)
    started = []
    start = Agent._started
    monkeypatch.setattr(Agent, "_started", lambda own: started.append(start(own)) or started[-1])
    made = Agent("cpu", ("torch._dynamo",), 60.0)
    made.describe()
    assert list(scratch.glob("pymp-*"))
    yield made
    for process in started:
        process.kill()
        process.communicate()
    assert eventually(lambda: not list(scratch.glob("pymp-*")))


def fetched(agent, config, runs):
    """Measure the run, and bring what it has left."""
    reply = msgspec.json.decode(agent.measure(msgspec.json.encode(Request(config, 60.0))), type=Reply)
    assert reply.record.status is Status.OK, reply.record.failure
    assert eventually(lambda: not Path(reply.folder).exists())
    for path in raw_profile_paths(config, runs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(agent.fetch(config.key, path.name, 0))
    found = {(p.name, p.stat().st_size, hashlib.sha256(p.read_bytes()).hexdigest()) for p in path.parent.iterdir()}
    assert found == {(file.name, file.num_bytes, file.sha256) for file in reply.files}
    agent.release(config.key)


def test_profiles_of_two_ranks_and_of_nsys(agent, tmp_path):
    plain = grid(1)[0]
    shared = replace(plain, profiler=Profiler.KINETO, parallel=Parallel.DDP_FLAT, ranks=2)
    under_nsys = replace(plain, profiler=Profiler.NSYS, device=Device.CUDA)
    runs = tmp_path / "out" / "runs"
    for config in (shared, under_nsys):
        fetched(agent, config, runs)
    assert [own.rank for own in explain(raw_profile_path(shared, runs), shared).ranks] == [0, 1]
    assert explain(raw_profile_path(under_nsys, runs), under_nsys).num_kernels > 0
