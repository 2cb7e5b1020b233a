"""One sweep at a time on a directory and on a GPU; those on a CPU know of each other.

The kernel drops a lock with its holder, so none is ever stale.
"""

import contextlib
import fcntl
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cs336_systems.text import LONGEST_PART, inert_line


class LockedError(RuntimeError):
    """Another process holds what this one needs."""


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` for the time of the context; raise LockedError, naming the holder, if it is taken."""
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another process"
            raise LockedError(
                f"{what} is in use by {inert_line(holder, LONGEST_PART)}; wait for it or end it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}: {shlex.join(sys.argv)}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def at_work(path: Path | None) -> Iterator[Callable[[], bool]]:
    """Share the lock file `path` with others for the time of the context; yields what says if there are others now.

    Nobody is known of without a path, or where it is no file that this user may open.
    """
    try:
        descriptor = None if path is None else _open(path)
    except OSError:
        descriptor = None
    if descriptor is None:
        yield lambda: False
        return
    try:
        _are_others(descriptor)
        yield lambda: _are_others(descriptor)
    finally:
        os.close(descriptor)


def _are_others(descriptor: int) -> bool:
    """Whether other processes hold the lock; hold it with them in any case.

    A record lock of POSIX, unlike flock's, is kept while a stronger one is refused.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError):  # who has it alone looks for others, for a moment
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
    return False


def _open(path: Path) -> int:
    """A descriptor of the lock file, which all users may lock: a directory can be shared, and a GPU is.

    Linux lets nobody open another user's file in a shared directory such as /tmp "to create it if need be".
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor


def gpu_lock_path(uuid: str) -> Path:
    """Lock file of a GPU, the same for all users of this machine; older drivers give slices UUIDs with slashes."""
    return Path(tempfile.gettempdir()) / f"cs336-systems-{uuid.replace('/', '-')}.lock"


def cpu_lock_path() -> Path:
    """Lock file that all who measure on this machine's CPU share."""
    return Path(tempfile.gettempdir()) / "cs336-systems-cpu.lock"
