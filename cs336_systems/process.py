"""What a sweep and its workers agree on as processes. Linux alone offers what the functions do; elsewhere, nothing."""

import ctypes
import os
import select
import signal
import sys

RECORD_NOT_WRITTEN = 74
"""Exit status of a worker that could not write its record (EX_IOERR): the disk, not the run, has failed."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a person, the system and a closing terminal send to end a sweep, often to its whole process group."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_forker(signal_number: int) -> None:
    """Have the kernel send this process `signal_number` when the process that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none of them gets away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_closed_outputs() -> None:
    """Let standard output and error go nowhere if nobody can read them any more, where writing would fail."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
