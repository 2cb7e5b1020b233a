"""What a sweep and its workers agree on as processes. Linux alone offers what the functions do; elsewhere, nothing."""

import contextlib
import ctypes
import os
import select
import signal
import sys
import sysconfig
import threading
from pathlib import Path

import psutil

import cs336_systems

RECORD_NOT_WRITTEN = 74
"""Exit status of a worker that could not write its record (EX_IOERR): the disk, not the run, has failed."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a person, the system and a closing terminal send to end a sweep, often to its whole process group."""
FORKER_VARIABLE = "CS336_FORKER"
"""Environment variable that tells a fork server which process started it."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_forker(signal_number: int) -> None:
    """Have the kernel send this process `signal_number` when the process that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def die_with(supervisor: int) -> None:
    """End this process at once, with all else that the process `supervisor` has started, when that one is dead.

    For a process whose parent is a stranger (nsys has others between) and outlives who started it. A thread waits in
    the kernel; it costs nothing. Linux alone.
    """
    if sys.platform != "linux":
        return
    try:
        alive = os.pidfd_open(supervisor)
        relatives = psutil.Process(supervisor).children(recursive=True)
    except (ProcessLookupError, psutil.NoSuchProcess):
        os._exit(1)

    def wait() -> None:
        select.select([alive], [], [])
        for relative in relatives:
            if relative.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    relative.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def child_environment() -> dict[str, str]:
    """This process's environment, in which a fresh Python finds the package where this one found it."""
    environment = dict(os.environ)
    root = str(Path(cs336_systems.__file__).parents[1])
    if root != sysconfig.get_path("purelib"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    return environment


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none of them gets away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
