"""What the fork server imports for its workers, and when it and what it has started end."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cs336.sweep.process import FORKER_VARIABLE, child_environment


def test_a_run_finds_imported_what_it_needs_and_a_plain_one_nothing_else(tmp_path: Path) -> None:
    """In a process that imports what the fork server would, which then is its own worker."""
    code = """
import gc, sys
from pathlib import Path
from cs336.config import *
from cs336.sweep import isolation
from cs336.sweep.run import modules_of

shape = ModelConfig(vocab_size=11, context_length=8, d_model=8, d_ff=16, num_layers=1, num_heads=2)
for changes in ({}, {"checkpoint_blocks": 1}, {"profiler": Profiler.KINETO}):
    config = RunConfig(size="custom", model=shape, warmup_steps=0, measured_steps=1, **changes)
    for name in (*isolation._PRELOAD, *modules_of([config])):
        __import__(name)
    assert changes or not gc.isenabled(), "collections slow the imports"
    before = set(sys.modules)
    from cs336.sweep.worker import run_here

    record = run_here(config, Path("runs").absolute())
    assert record.status == "ok", record.failure
    own = [
        name
        for name in set(sys.modules) - before
        if name.startswith(("cs336", "torch._", "pandas"))
    ]
    assert not own, own
    others = {"tyro", "rich", "pandas", "torch._dynamo", "cs336.model.fast.model"} & set(
        sys.modules
    )
    assert changes or not others, others
    gc.disable()  # for what the next one imports
gc.freeze()  # for the end of Python, which collects
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


# As nsys does: what watches, in a session of its own, and what is watched, with another process in
# between.
SUPERVISOR = """
import os, subprocess, sys, time

subprocess.Popen(["sleep", "300"], start_new_session=True)
watched = "import sys, time; from cs336.sweep.process import die_with;"
watched += "die_with(int(sys.argv[1]));"
watched += "print('on'); sys.stdout.flush(); time.sleep(300)"
subprocess.Popen(
    ["sh", "-c", '"$0" -c "$1" "$2"; sleep 300', sys.executable, watched, str(os.getpid())],
    start_new_session=True,
)
time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of the end of any process")
def test_what_a_killed_process_has_started_dies_with_it() -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
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
    code = (
        f"from cs336.sweep.process import die_with; die_with({dead.pid}); import "
        "time; time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60)
    assert done.returncode == 1


def test_a_fork_server_that_comes_too_late_ends_before_it_imports_torch() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    code = "import cs336.sweep.server; print('on')"  # the first module that it imports
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {FORKER_VARIABLE: str(dead.pid)},
        stdout=subprocess.PIPE,
    )
    assert (done.returncode, done.stdout) == (1, b"")
