"""Which signals a command ignores, whoever has started the tests and whichever of them are ignored there."""

import signal
import sys

import pytest

from cs336_systems.process import STOP_SIGNALS

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
