"""What sweeps that were killed leave in the directory for temporary files is removed, and nothing else there."""

import os
import subprocess
import sys

import pytest

from tests.faults.harness import ROOT

START = """
import sys
from multiprocessing.util import get_temp_dir
from cs336_systems.sweep.isolation import fork_server
fork_server()
print(get_temp_dir(), flush=True)
sys.stdin.read()
"""
WITH_CHILD = """
import multiprocessing, sys
from multiprocessing.util import get_temp_dir
from cs336_systems.sweep.isolation import fork_server
fork_server()
fork_server.cache_clear()  # as in a process that its fork server has started
child = multiprocessing.get_context("fork").Process(target=fork_server)
child.start()
child.join()
print(get_temp_dir(), flush=True)
sys.stdin.read()
"""
INTERRUPT = """
import os, signal
from cs336_systems.sweep import interrupts
from cs336_systems.sweep import isolation
isolation.fork_server()
interrupts._ONE_REQUEST_S = 0.0
with interrupts.Interrupts():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that needs multiprocessing's temporary directory, below `tmp_path`."""
    started = []

    def begin(script):
        environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([sys.executable, "-c", script], env=environment, stdin=pipe, stdout=pipe))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_what_a_killed_sweep_leaves_is_removed_by_the_next_and_nothing_else(start, tmp_path):
    foreign = tmp_path / "pymp-foreign"
    foreign.mkdir()
    living, dead = start(START), start(START)
    kept, left = (process.stdout.readline().decode().strip() for process in (living, dead))
    dead.kill()
    dead.wait()
    assert {str(path) for path in tmp_path.iterdir()} == {str(foreign), kept, left}
    after = start(START)
    own = after.stdout.readline().decode().strip()
    assert {str(path) for path in tmp_path.iterdir()} == {str(foreign), kept, own}
    after.communicate()
    assert {str(path) for path in tmp_path.iterdir()} == {str(foreign), kept}


def test_a_process_keeps_its_directory_when_one_that_it_started_has_used_it_and_ended(start, tmp_path):
    kept = start(WITH_CHILD).stdout.readline().decode().strip()
    own = start(START).stdout.readline().decode().strip()
    assert {str(path) for path in tmp_path.iterdir()} == {kept, own}


def test_an_interrupt_at_once_leaves_nothing(start, tmp_path):
    process = start(INTERRUPT)
    process.communicate()
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
