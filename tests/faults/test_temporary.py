"""Temporary directories and programs end with the process that has them, and no start of workers
waits for ever.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.harness import ROOT, eventually

NSYS = """#!/bin/sh
for last; do :; done
[ -e "$last.fails" ] && { echo "cannot read it"; exit 3; }
sleep 300 &
echo $$ $! > "$last.pids"
for word; do case $word in --output=*) head -c 100000 /dev/zero > "${word#--output=}";; esac; done
touch "$last.begun"
wait
"""
"""Writes an export, and goes on with a child of its own."""
CHANCE = random.Random(os.environ.get("CS336_FAULT_SEED", "6"))
SIGNALS = (signal.SIGKILL, CHANCE.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A report, the program that exports it, and an empty directory for temporary files."""
    (programs := tmp_path / "programs").mkdir()
    (programs / "nsys").write_text(NSYS)
    (programs / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    (temporary := tmp_path / ("a long name " * 8)).mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (made := tmp_path / "a.nsys-rep").write_bytes(b"a report")
    return made


def explain(report: Path, **options: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "cs336", "kernels", str(report)]
    return subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )


def is_tidy(report: Path) -> bool:
    pids = map(int, report.with_name("a.nsys-rep.pids").read_text().split())
    alive = [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]
    return not alive and not [*Path(os.environ["TMPDIR"]).iterdir()]


@pytest.mark.parametrize("number", SIGNALS)
def test_an_export_ends_with_its_command_and_leaves_nothing(report: Path, number: int) -> None:
    command = explain(
        report, preexec_fn=lambda: number == signal.SIGKILL or signal.signal(number, signal.SIG_DFL)
    )
    assert eventually(report.with_name("a.nsys-rep.begun").exists)
    assert not is_tidy(report)
    time.sleep(CHANCE.uniform(0, 0.1))
    command.send_signal(number)
    assert command.wait(100) == (-number if number == signal.SIGKILL else 130)
    assert eventually(lambda: is_tidy(report), 20)


def test_what_is_left_where_the_shell_was_killed_too_is_removed_by_the_next_command(
    report: Path,
) -> None:
    command = explain(report)
    assert eventually(report.with_name("a.nsys-rep.begun").exists)
    temporary = Path(os.environ["TMPDIR"])
    for each in psutil.process_iter(["cmdline"]):
        words = each.info["cmdline"] or [""]
        if words[0] == "/bin/sh" and words[-1].startswith(str(temporary)) and "rm -rf" in words[2]:
            each.kill()
    report.with_name("a.nsys-rep.fails").touch()
    assert explain(report).wait(100) == 1
    # what is in use stays; what the second one had goes soon after its end
    assert eventually(lambda: len([*temporary.iterdir()]) == 1, 20)
    command.kill()
    command.wait(100)
    failed = explain(report)
    assert "status 3: cannot read it" in failed.communicate(timeout=100)[1]
    assert eventually(lambda: is_tidy(report), 20)


START = """
import os, random, signal, sys, threading, time
from multiprocessing import forkserver

from cs336.sweep import isolation, process
from cs336.sweep.store import SweepError

def end(log):
    process.begin_worker(log)

if __name__ == "__main__":
    number, delay_s = int(sys.argv[1]), float(sys.argv[2])
    process.adopt_orphans()
    isolation._LEAST_START_S = 2.0 if number or "FAULT" in os.environ else 100.0
    isolation.fork_server().set_forkserver_preload(["cs336.sweep.server"])

    def strike():
        while (server := forkserver._forkserver._forkserver_pid) is None:
            time.sleep(0.001)
        time.sleep(delay_s)
        os.kill(server, number)

    if number:
        threading.Thread(target=strike, daemon=True).start()
    try:
        isolation.WorkerProcess(end, timeout_s=0.1).reap()
    except SweepError as error:
        sys.exit(f"error: {error}")
"""
IN_SERVER = """
import os, signal, sys, time
fault = os.environ.get("FAULT")
if fault and "forkserver" in " ".join(sys.orig_argv):
    from multiprocessing import forkserver
    if fault == "hangs":
        time.sleep(600)
    if fault == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "garbage":
        forkserver.write_signed = lambda fd, _: os.write(fd, os.urandom(8))
    if fault == "closes":
        forkserver.write_signed = lambda fd, _: None
        forkserver.os.fork = lambda: os._exit(3)
"""
"""A module that every Python imports first; in the fork server it goes wrong."""


def test_the_start_of_a_worker_ends_whatever_happens_to_the_fork_server(tmp_path: Path) -> None:
    """By itself, or by a signal at a drawn moment. The name of the temporary directory is long,
    too.
    """
    (tmp_path / "start.py").write_text(START)
    (tmp_path / "sitecustomize.py").write_text(IN_SERVER)
    (temporary := tmp_path / ("y" * 76)).mkdir()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(temporary)}
    strikes = [
        (CHANCE.choice([signal.SIGSTOP, signal.SIGKILL]), CHANCE.uniform(0, 0.5)) for _ in range(3)
    ]
    cases = [("", 0, 0.0), *((fault, 0, 0.0) for fault in ("hangs", "stops", "garbage", "closes"))]
    cases += [("", number, delay_s) for number, delay_s in strikes]
    ends = []
    for fault, number, delay_s in cases:
        words = [sys.executable, str(tmp_path / "start.py"), str(int(number)), str(delay_s)]
        own = environment | ({"FAULT": fault} if fault else {})
        ends.append(
            subprocess.Popen(words, env=own, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        )
    for case, end in zip(cases, ends, strict=True):
        said = end.communicate(timeout=100)[1]
        assert end.returncode in (0, 1), (case, said)
        assert (end.returncode == 1) == said.startswith(
            "error: the process that starts the workers"
        ), (case, said)
        assert said.count("\n") == end.returncode, (case, said)
        if case[0] or not case[1]:
            assert end.returncode == bool(case[0]), (case, said)
    assert eventually(lambda: not [*temporary.iterdir()], 20)
