"""A process that a stranger has started ends with the one that asked for it, and takes the strangers along."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cs336_systems.sweep.process import FORKER_VARIABLE

ROOT = Path(__file__).parents[2]

# As nsys does: what watches, in a session of its own, and what is watched, with another process in between.
SUPERVISOR = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"], start_new_session=True)
watched = "import sys, time; from cs336_systems.sweep.process import die_with; die_with(int(sys.argv[1]));"
watched += "print('on'); sys.stdout.flush(); time.sleep(300)"
subprocess.Popen(["sh", "-c", '"$0" -c "$1" "$2"; sleep 300', sys.executable, watched, str(os.getpid())],
                 start_new_session=True)
time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of the end of any process")
def test_what_a_killed_process_has_started_dies_with_it() -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout
    assert supervisor.stdout.readline() == "on\n"
    started = psutil.Process(supervisor.pid).children(recursive=True)
    assert len(started) >= 3
    supervisor.kill()
    supervisor.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_process_that_comes_too_late_ends_at_once() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    code = f"from cs336_systems.sweep.process import die_with; die_with({dead.pid}); import time; time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert done.returncode == 1


def test_a_fork_server_that_comes_too_late_ends_before_it_imports_torch() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    code = "import cs336_systems.sweep.server; print('on')"  # the first module that it imports
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {FORKER_VARIABLE: str(dead.pid)},
        stdout=subprocess.PIPE,
    )
    assert (done.returncode, done.stdout) == (1, b"")
