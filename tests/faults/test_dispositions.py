"""Which signals a command ignores, whoever has started the tests and whichever of them are ignored there."""

import contextlib
import fcntl
import os
import pty
import signal
import sys
import termios

import pytest

from cs336_systems.record import Status, load_records
from cs336_systems.sweep.process import STOP_SIGNALS
from tests.faults.harness import command, eventually, runs
from tests.faults.models import PAUSED, RELEASED

DISPOSITIONS = f"""
import signal
for number in {[int(number) for number in STOP_SIGNALS]}:
    print(signal.getsignal(number) is signal.SIG_IGN)
"""


@pytest.fixture
def ignored_here():
    """As where the tests run under nohup, or in the background of a shell script."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_command_of_the_tests_ignores_no_signal_that_the_tests_ignore(launch, ignored_here):
    started = launch([sys.executable, "-c", DISPOSITIONS])
    assert started.wait() == 0
    assert started.stdout.split() == ["False"] * len(STOP_SIGNALS)


def test_a_command_ignores_what_its_test_lets_it_ignore(launch):
    started = launch(
        [sys.executable, "-c", DISPOSITIONS], preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert started.wait() == 0
    assert started.stdout.split() == [str(number == signal.SIGHUP) for number in STOP_SIGNALS]


def test_a_sweep_that_ignores_sighup_outlives_its_terminal(launch, place):
    """As under nohup: the signal is not heard, and what is still printed has nowhere to go."""
    ours, theirs = pty.openpty()

    def take_the_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    words = command("pauses_until_released", contexts=[4, 8])
    running = launch(words, stdout=theirs, stderr=theirs, preexec_fn=take_the_terminal, pass_fds=[theirs])
    os.close(theirs)
    os.set_blocking(ours, False)

    def read_until_paused():
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 2**16)
        return PAUSED.exists()

    assert eventually(read_until_paused)
    os.close(ours)
    running.signal(signal.SIGHUP)
    RELEASED.touch()
    assert running.wait() == 0
    assert [record.status for record in load_records(runs(place))[0]] == [Status.OK, Status.OK]
