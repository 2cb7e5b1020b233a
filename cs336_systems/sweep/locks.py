"""Locks: one sweep at a time on a directory and on a GPU.

The kernel releases a lock when its holder ends, so no lock is ever stale.
"""

import contextlib
import fcntl
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator
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
