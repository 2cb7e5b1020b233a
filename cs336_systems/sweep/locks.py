"""Locks: one sweep at a time on a directory and on a GPU; sweeps that share a CPU detect each other.

The kernel releases a lock when its holder ends, so no lock is ever stale.
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

from cs336_systems.text import LONGEST_PART, shorten


class LockedError(RuntimeError):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` during the context; raise LockedError, which names the holder, if it is taken."""
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another process"
            raise LockedError(f"{what} is in use by {shorten(holder, LONGEST_PART)}; wait for it or end it") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}: {shlex.join(sys.argv)}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def at_work(path: Path | None) -> Iterator[Callable[[], bool]]:
    """Share the lock file `path` during the context; yield a function that says whether others share it now.

    The function says False if `path` is None or this user may not open the file.
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
    """Whether other processes hold the lock; this process holds it afterwards in any case.

    A POSIX record lock, unlike one of flock, is kept when the request for an exclusive one is refused.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError):  # another process holds it exclusively for a moment, to look for others
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
    return False


def _open(path: Path) -> int:
    """Open the lock file, which every user may lock, because users share GPUs and may share directories.

    O_CREAT is only used if the file is missing: in a shared directory such as /tmp, Linux refuses it for another
    user's file.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor


def gpu_lock_path(uuid: str) -> Path:
    """Lock file of a GPU, the same for all users of this machine. Older drivers put slashes into UUIDs of slices."""
    return Path(tempfile.gettempdir()) / f"cs336-systems-{uuid.replace('/', '-')}.lock"


def cpu_lock_path() -> Path:
    """Lock file shared by all processes that measure this machine's CPU."""
    return Path(tempfile.gettempdir()) / "cs336-systems-cpu.lock"
