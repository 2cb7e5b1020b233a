"""Process conventions that a sweep and its workers share. The functions do their work on Linux
only.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import select
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from ..interrupt import STOP_SIGNALS

RECORD_NOT_WRITTEN = 74
"""Exit status (EX_IOERR) of a worker that could not write its record: the disk failed, not the
run.
"""
NOT_EXPLAINED = 65
"""Exit status (EX_DATAERR) of a worker that could not explain a profile; the last line of its
output says why.
"""
FORKER_VARIABLE = "CS336_FORKER"
"""Environment variable that tells a fork server which process started it."""
_SAFE_PATH = "set by cs336"
"""Any value has the same effect."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_forker(signal_number: int) -> None:
    """Ask the kernel to send `signal_number` to this process when the process that forked it
    ends.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def begin_worker(log: Connection, gpu_uuids: Sequence[str] = ()) -> None:
    """Turn this forked process into a worker: its own session and process group, its output into
    `log`.

    The signals that the fork server ignores have their default effect again, and the worker is
    killed as soon as the sweep ends. It sees the GPUs in `gpu_uuids`, or those that the sweep sees
    if that is empty. Its garbage collections leave out what the fork server has imported.
    """
    gc.freeze()
    gc.enable()
    if gpu_uuids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_uuids)
    os.setsid()
    die_with_parent()
    adopt_orphans()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log.fileno(), 1), (log.fileno(), 2)):
        os.dup2(source, target)
    log.close()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def die_with_parent() -> None:
    """Have the kernel kill this process when the fork server ends, which it does when the sweep
    ends.

    If the sweep has ended already, end this process now.
    """
    die_with_forker(signal.SIGKILL)
    sweep = multiprocessing.parent_process()
    if sweep is not None and not sweep.is_alive():
        os._exit(1)


def when_it_ends(process: int, then: Callable[[], None]) -> None:
    """Call `then` in a thread once the process has ended. The thread waits in the kernel. Linux
    only.
    """
    if sys.platform != "linux":
        return
    try:
        alive = os.pidfd_open(process)
    except ProcessLookupError:
        then()
        return

    def wait() -> None:
        """Block until the other process has ended, then act."""
        select.select([alive], [], [])
        then()

    threading.Thread(target=wait, daemon=True).start()


def die_with(supervisor: int) -> None:
    """End this process, and all others that the process `supervisor` has started, as soon as
    `supervisor` ends.

    For a process whose parent is not the supervisor and may outlive it, as under nsys. Linux only.
    """
    if sys.platform != "linux":
        return
    try:
        relatives = psutil.Process(supervisor).children(recursive=True)
    except psutil.NoSuchProcess:
        os._exit(1)

    def end() -> None:
        """Kill the relatives that still run, other than this process, and then this process."""
        for relative in relatives:
            if relative.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    relative.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    when_it_ends(supervisor, end)


def child_environment() -> dict[str, str]:
    """This process's environment, changed so that a child imports the package from the same place.

    A child that Python starts by -c or -m would import a package of this name in the current
    directory otherwise.
    """
    environment = {"PYTHONSAFEPATH": _SAFE_PATH} | os.environ
    root = str(Path(__file__).parents[2])
    if root != sysconfig.get_path("purelib"):
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [root, environment.get("PYTHONPATH")])
        )
    return environment


def forget_safe_path() -> None:
    """Remove the environment variable by which `child_environment` kept this process from importing
    modules of its current directory; else Python started by a user's model would inherit it.
    """
    if os.environ.get("PYTHONSAFEPATH") == _SAFE_PATH:
        del os.environ["PYTHONSAFEPATH"]


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, so that they can still be
    found and killed.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Call prctl(2), which only Linux has; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
