"""The agent of a machine with several GPUs, whose processes that measure only say which GPUs they were given."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cs336_systems.config import Device, Parallel
from cs336_systems.sweep.cluster.agent import Agent
from cs336_systems.sweep.cluster.measurer import Description, Request, describe
from tests.faults.harness import eventually
from tests.sweep.cluster.simulated import grid

UUIDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
MEASURER = f"""
import json, sys, time
print(json.dumps({{"host": "h", "has_nsys": False, "gpus": {list(UUIDS)}, "identity": {{
    "device_name": "H200", "driver": "1", "torch": "2", "code": "0"}}}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    began = time.monotonic()
    time.sleep(0.05)
    print(json.dumps({{"gpus": asked["gpus"], "began": began, "ended": time.monotonic()}}), flush=True)
"""


def measurer(script):
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def made(monkeypatch, script):
    started = []
    monkeypatch.setattr(Agent, "_started", lambda _: started.append(measurer(script)) or started[-1])
    # an agent ends its process where nothing renews it, which here is that of the tests
    monkeypatch.setattr(Agent, "_end_unless_renewed", lambda _: None)
    monkeypatch.setattr("cs336_systems.sweep.cluster.agent.when_it_ends", lambda *_: None)
    return Agent("cuda", (), 60.0), started


def end(started):
    for process in started:
        process.kill()
        process.communicate()


def test_runs_at_the_same_time_have_gpus_of_their_own(monkeypatch):
    agent, started = made(monkeypatch, MEASURER)
    try:
        agent.describe()
        assert len(started) == len(UUIDS)
        widths = [2, 1, 1, 2, 2, 4, 1, 1, 1, 1, 4, 3]
        requests = [
            msgspec.json.encode(
                Request(replace(config, device=Device.CUDA, parallel=Parallel.DDP, ranks=width), 60.0)
                if width > 1
                else Request(replace(config, device=Device.CUDA), 60.0)
            )
            for config, width in zip(grid(12), widths, strict=True)
        ]
        answers = []
        for group in ((0, 1, 2), (3, 4), (5,), (6, 7, 8, 9), (10,), (11,)):  # as the driver starts them
            with ThreadPoolExecutor(4) as pool:
                answers += pool.map(lambda index: msgspec.json.decode(agent.measure(requests[index])), group)
        assert [len(answer["gpus"]) for answer in answers] == widths
        for one in answers:
            for other in answers:
                overlap = one["began"] < other["ended"] and other["began"] < one["ended"]
                assert one is other or not overlap or not set(one["gpus"]) & set(other["gpus"])
        assert set().union(*(answer["gpus"] for answer in answers)) == set(UUIDS)
    finally:
        end(started)


LEAVER = """
import json, os, sys, tempfile
print(json.dumps({"host": "h", "has_nsys": False, "gpus": ["GPU-a"], "identity": {
    "device_name": "H200", "driver": "1", "torch": "2", "code": "0"}}), flush=True)
for line in sys.stdin:
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        open(folder + "/a", "wb").write(bytes(range(256)) * 6000)
        open(folder + "/b", "wb").write(b"")
        files = [{"name": "a", "num_bytes": 1536000, "sha256": ""}, {"name": "b", "num_bytes": 0, "sha256": ""}]
        print(json.dumps({"record": 1, "files": files, "folder": folder}), flush=True)
        assert sys.stdin.readline() == "\\n"
"""


def test_raw_profiles_have_no_name_and_are_sent_in_parts(monkeypatch, tmp_path):
    script = LEAVER.replace("sys.argv[1]", repr(str(tmp_path)))
    agent, started = made(monkeypatch, script)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    try:
        agent.describe()
        keys = []
        for config in grid(2):
            agent.measure(msgspec.json.encode(Request(config, 60.0)))
            keys.append(config.key)
        assert eventually(lambda: not list(tmp_path.iterdir()))
        whole = bytes(range(256)) * 6000
        for key in keys:
            first = agent.fetch(key, "a", 0)
            assert 0 < len(first) < len(whole)
            assert first + agent.fetch(key, "a", len(first)) == whole
            assert agent.fetch(key, "b", 0) == agent.fetch(key, "a", len(whole)) == b""
        agent.release(keys[0])
        assert agent.fetch(keys[0], "a", 0) == b""
        assert agent.fetch(keys[1], "a", 0) == first
        agent.release(keys[1])
        agent.release("never measured")
    finally:
        end(started)
    assert len(list(Path("/proc/self/fd").iterdir())) <= opened


def test_a_process_that_measures_and_dies_is_an_error_of_the_machine(monkeypatch):
    agent, started = made(monkeypatch, MEASURER.replace("asked = json.loads(line)", "sys.exit(3)"))
    try:
        agent.describe()
        for _ in range(5):
            reply = msgspec.json.decode(agent.measure(msgspec.json.encode(Request(grid(1)[0], 60.0))))
            assert "the process that measures" in reply["error"]
    finally:
        end(started)


def test_an_agent_that_is_not_renewed_ends():
    script = """
import os, sys, time
from cs336_systems.sweep.cluster import agent
made = agent.Agent("cpu", (), 1.0)
began = time.monotonic()
while time.monotonic() - began < 1.5:
    made.renew()
    time.sleep(0.02)
print("renewed", flush=True)
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.returncode) == ("renewed\n", 1), done.stderr


@pytest.mark.parametrize("has_nsys", [False, True])
def test_a_machine_says_whether_it_has_nsys(monkeypatch, tmp_path, has_nsys):
    program = tmp_path / "nsys"
    program.touch()
    program.chmod(0o755 if has_nsys else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert msgspec.json.decode(describe("cpu"), type=Description).has_nsys is has_nsys
