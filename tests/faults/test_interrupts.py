"""A sweep that is asked to end, or is killed, ends with all it has, and the same command goes on
from there.
"""

import contextlib
import csv
import re
import signal
import sys

import psutil

from cs336 import cli
from cs336.record import load_records
from tests.faults.harness import (
    SWEEP,
    WITHOUT_REPORT,
    command,
    config,
    contents,
    eventually,
    processes_in,
    results,
    runs,
    sweep,
)
from tests.faults.models import PAUSED

DEBOUNCE_S = 0.5
"""Longer than the time in which two signals count as one."""


def rows(directory):
    with (results(directory) / "results.csv").open() as file:
        return [(int(row["context_length"]), row["status"]) for row in csv.DictReader(file)]


def statuses(directory):
    records = sorted(
        load_records(runs(directory))[0], key=lambda record: record.config.model.context_length
    )
    return [str(record.status) for record in records]


def reach_the_second_run(launch, place, fault="pauses_once", script=WITHOUT_REPORT):
    """Start a sweep of three runs whose second waits; return it with the records it has by then."""
    running = launch(command(fault, script=script))
    running.wait_for(PAUSED)
    earlier = contents(runs(place))
    assert len(earlier) == 1
    return running, earlier


def assert_ended(running, place, earlier):
    assert running.wait() == 130, running.stderr
    assert "the same command goes on from here" in running.stderr
    assert "Traceback" not in running.stderr
    assert contents(runs(place)) == earlier
    assert eventually(lambda: not processes_in(place))


def test_ctrl_c_and_the_rest_later(launch, place):
    running, earlier = reach_the_second_run(launch, place, "pauses_with_family", SWEEP)
    running.signal(signal.SIGINT)
    assert_ended(running, place, earlier)
    assert rows(place) == [(4, "ok")]
    rest = [config("pauses_with_family", context_length=length) for length in (4, 8, 16)]
    outcome = sweep(results(place), *rest)
    assert [record.config for record in outcome.measured] == rest[1:]
    assert contents(runs(place)).items() >= earlier.items()


def test_sigterm(launch, place):
    running, earlier = reach_the_second_run(launch, place)
    for process in processes_in(place):  # as systemd does: to every process there is
        # the first signal may have ended the others
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    assert_ended(running, place, earlier)


def fork_servers(running):
    # without a command line if it has ended in the meantime
    found = psutil.process_iter(["ppid", "cmdline"])
    children = [process for process in found if process.info["ppid"] == running.process.pid]
    return [
        child
        for child in children
        if "multiprocessing.forkserver" in " ".join(child.info["cmdline"] or ())
    ]


def assert_ended_by_the_second(running, number):
    """The first signal is heard, but what the sweep needs to end does not come; the next one ends
    it without.

    Signals that a busy machine delivers late may count as one, so the next one is sent until the
    sweep has ended.
    """

    def has_ended():
        return eventually(lambda: running.process.poll() is not None, patience_s=DEBOUNCE_S)

    running.signal(number)
    assert not has_ended()

    def ends_by_another():
        running.signal(number)
        return has_ended()

    assert eventually(ends_by_another)
    assert running.wait() == 130
    assert "Traceback" not in running.stderr


def test_ctrl_c_before_the_first_run_has_started(launch, place):
    """PyTorch may take minutes to import over a network, and there is nothing to keep yet: one
    Ctrl-C is enough.
    """
    running = launch(command())
    assert eventually(lambda: fork_servers(running))
    (fork_server,) = fork_servers(running)
    fork_server.suspend()
    running.signal(signal.SIGINT)
    assert running.wait(patience_s=10) == 130
    assert running.stderr.splitlines()[-1] == "interrupted"
    with contextlib.suppress(psutil.NoSuchProcess):
        fork_server.resume()
    assert list(runs(place).glob("*.json")) == []


def test_sigterm_twice_in_a_run_with_descendants(launch, place):
    running, earlier = reach_the_second_run(launch, place, "pauses_with_family")
    (fork_server,) = fork_servers(running)
    fork_server.suspend()
    assert_ended_by_the_second(running, signal.SIGTERM)
    fork_server.resume()
    assert contents(runs(place)) == earlier
    assert eventually(lambda: not processes_in(place))


def test_sigkill_of_the_sweep_and_the_same_command_again(launch, place, no_pictures, capsys):
    running, earlier = reach_the_second_run(launch, place)
    (fork_server,) = fork_servers(running)
    # wherever it was started
    assert any("libtorch" in mapping.path for mapping in fork_server.memory_maps())
    running.process.kill()
    assert running.wait() == -signal.SIGKILL
    assert eventually(lambda: not processes_in(place))
    assert contents(runs(place)) == earlier
    assert cli.sweep(command("pauses_once")[2:]) == 0
    assert "1 record kept, 2 runs to go" in capsys.readouterr().err
    assert contents(runs(place)).items() >= earlier.items()
    assert statuses(place) == ["ok", "ok", "ok"]


IMPORTS = """
import sys
from cs336 import cli
from cs336.sweep.run import Loop
run, early = Loop.run, []
Loop.run = lambda self, todo: (early.append(set(sys.modules)), run(self, todo))
status = cli.sweep(sys.argv[1:])
slow = {"pandas", "matplotlib.figure", "jinja2", "PIL", "scipy", "torch"} & set(sys.modules)
print("imported:", *sorted(slow), "while runs went on:", *sorted(slow - early[0]))
sys.exit(status)
"""
"""The command of a sweep, and which packages that take half a second and more its process has
imported, and when.
"""


def test_a_crash_is_exit_status_1_and_a_row_and_the_parent_imports_no_torch(launch, place):
    running = launch([sys.executable, "-c", IMPORTS, *command("fails_where_context_is_8")[2:]])
    assert running.wait() == 1
    imported, late = re.search("imported:(.*) while runs went on:(.*)", running.stdout).groups()
    assert {"jinja2", "matplotlib.figure"} <= {*imported.split()}
    assert ("torch" in imported, late) == (False, "")
    assert "SIGSEGV" in running.stdout
    assert rows(place) == [(4, "ok"), (8, "crashed"), (16, "ok")]
