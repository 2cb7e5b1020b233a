"""One sweep at a time on a directory and on a GPU. The kernel drops a lock with its holder, so none is ever stale."""

import contextlib
import fcntl
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


class LockedError(RuntimeError):
    """Another process holds what this one needs."""


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` for the time of the context; raise LockedError, naming the holder, if it is taken."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another process"
            raise LockedError(f"{what} is in use by {holder}; wait for it or end it") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}: {shlex.join(sys.argv)}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def gpu_lock_path(uuid: str) -> Path:
    """Lock file of a GPU, the same for all users of this machine."""
    return Path(tempfile.gettempdir()) / f"cs336-systems-{uuid}.lock"
