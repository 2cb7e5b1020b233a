"""A sweep that is asked to end, or is killed, ends with all it has, and the same command goes on from there."""

import contextlib
import csv
import fcntl
import os
import pty
import signal
import sys
import termios
import time

import psutil

from tests.faults.harness import ROOT, command, contents, eventually, processes_in, results, runs
from tests.faults.models import PAUSED

DEBOUNCE_S = 0.5
"""Longer than the time in which two signals count as one."""


def rows(directory):
    with (results(directory) / "results.csv").open() as file:
        return [(int(row["context_length"]), row["status"]) for row in csv.DictReader(file)]


def reach_the_second_run(launch, place, fault="pauses_once", **options):
    """Start a sweep of three runs whose second waits; return it with the records it has by then."""
    sweep = launch(command(fault), **options)
    sweep.wait_for(PAUSED)
    earlier = contents(runs(place))
    assert len(earlier) == 1
    return sweep, earlier


def resume(launch, place, earlier, fault="pauses_once"):
    """Run the same command again; the records that were finished stay as they were, to the byte and the second."""
    again = launch(command(fault))
    assert again.wait() == 0, again.stderr
    assert "1 records kept, 2 runs to go" in again.stderr
    now = contents(runs(place))
    assert len(now) == 3
    assert {name: now[name] for name in earlier} == earlier
    assert rows(place) == [(4, "ok"), (8, "ok"), (16, "ok")]
    return again


def assert_ended_with_tables(sweep, place, earlier):
    assert sweep.wait() == 130, sweep.stderr
    assert "the same command goes on from here" in sweep.stderr
    assert "Traceback" not in sweep.stderr
    assert contents(runs(place)) == earlier
    assert rows(place) == [(4, "ok")]
    assert eventually(lambda: not processes_in(place), patience_s=5)


def test_ctrl_c_and_the_same_command_again(launch, place):
    sweep, earlier = reach_the_second_run(launch, place, "pauses_with_family")
    sweep.signal(signal.SIGINT)
    assert_ended_with_tables(sweep, place, earlier)
    again = resume(launch, place, earlier, "pauses_with_family")
    assert "per run were neither warm-up nor measured steps" in again.stdout


def test_sigterm(launch, place):
    sweep, earlier = reach_the_second_run(launch, place)
    for process in processes_in(place):  # as systemd does: to every process there is
        process.send_signal(signal.SIGTERM)
    assert_ended_with_tables(sweep, place, earlier)


def test_sighup_twice_at_once_as_a_closing_shell_sends_it(launch, place):
    sweep, earlier = reach_the_second_run(launch, place)
    sweep.signal(signal.SIGHUP)
    time.sleep(0.05)
    sweep.signal(signal.SIGHUP)
    assert_ended_with_tables(sweep, place, earlier)


def test_a_terminal_that_closes(launch, place):
    ours, theirs = pty.openpty()

    def take_the_terminal():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    words = command("pauses_once")
    sweep = launch(words, stdout=theirs, stderr=theirs, preexec_fn=take_the_terminal, pass_fds=[theirs])
    os.close(theirs)
    os.set_blocking(ours, False)

    def read_until_paused():
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 2**16)
        return PAUSED.exists()

    assert eventually(read_until_paused)
    earlier = contents(runs(place))
    os.close(ours)
    assert sweep.wait() == 130
    assert contents(runs(place)) == earlier
    assert rows(place) == [(4, "ok")]


def test_nohup_is_heeded(launch, place):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    sweep, _ = reach_the_second_run(launch, place, preexec_fn=ignore)
    sweep.signal(signal.SIGHUP)
    time.sleep(DEBOUNCE_S)
    assert sweep.process.poll() is None
    sweep.process.kill()


def fork_servers(sweep):
    children = psutil.Process(sweep.process.pid).children()
    return [child for child in children if "multiprocessing.forkserver" in " ".join(child.cmdline())]


def assert_ended_by_the_second(sweep, number):
    """The first signal is heard, but what it needs to end does not come; the second does without."""
    sweep.signal(number)
    time.sleep(DEBOUNCE_S)
    assert sweep.process.poll() is None
    started = time.monotonic()
    sweep.signal(number)
    assert sweep.wait() == 130
    assert time.monotonic() - started < 2
    assert "Traceback" not in sweep.stderr


def test_ctrl_c_twice_before_the_first_run(launch, place):
    sweep = launch(command())
    assert eventually(lambda: fork_servers(sweep))
    (fork_server,) = fork_servers(sweep)
    fork_server.suspend()
    assert_ended_by_the_second(sweep, signal.SIGINT)
    fork_server.resume()
    assert list(runs(place).glob("*.json")) == []


def test_sigterm_twice_in_a_run_with_descendants(launch, place):
    sweep, earlier = reach_the_second_run(launch, place, "pauses_with_family")
    (fork_server,) = fork_servers(sweep)
    fork_server.suspend()
    assert_ended_by_the_second(sweep, signal.SIGTERM)
    fork_server.resume()
    assert contents(runs(place)) == earlier
    assert eventually(lambda: not processes_in(place), patience_s=5)


def test_ctrl_c_while_the_fork_server_starts(launch, place):
    sweep = launch(command("good"))
    assert eventually(lambda: fork_servers(sweep))
    sweep.signal(signal.SIGINT)
    assert sweep.wait() == 130
    assert "Traceback" not in sweep.stderr


def test_death_of_the_fork_server_while_it_starts(launch, place):
    sweep = launch(command("good"))
    assert eventually(lambda: fork_servers(sweep))
    fork_servers(sweep)[0].kill()
    assert sweep.wait() == 1
    assert "run the same command again" in sweep.stderr
    assert "Traceback" not in sweep.stderr


def test_sigkill_of_the_sweep_and_the_same_command_again(launch, place):
    sweep, earlier = reach_the_second_run(launch, place)
    (fork_server,) = fork_servers(sweep)
    assert any("libtorch" in mapping.path for mapping in fork_server.memory_maps())  # wherever the sweep was started
    sweep.process.kill()
    assert sweep.wait() == -signal.SIGKILL
    assert eventually(lambda: not processes_in(place), patience_s=5)
    assert contents(runs(place)) == earlier
    resume(launch, place, earlier)


def test_a_crash_is_exit_status_1_and_a_row_and_the_parent_never_imports_torch(launch, place):
    check = (
        "import sys; from cs336_systems.cli import sweep; status = sweep(sys.argv[1:]);"
        "print('torch imported:', 'torch' in sys.modules); sys.exit(status)"
    )
    words = command("fails_where_context_is_8")
    sweep = launch([sys.executable, "-c", check, *words[2:]], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert sweep.wait() == 1
    assert "torch imported: False" in sweep.stdout
    assert "SIGSEGV" in sweep.stdout
    assert rows(place) == [(4, "ok"), (8, "crashed"), (16, "ok")]
