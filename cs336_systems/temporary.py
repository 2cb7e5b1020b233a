"""Temporary directories, and programs that run for this process: both end with it, however it ends.

A process that is killed can tidy nothing, so shells that outlive it do: each waits until a pipe is
closed whose other end this process alone has. What is left where the shell was killed too is
removed by the next process that makes such a directory: those in use are locked, and the kernel
releases a lock when its holder ends.

Windows has neither that shell nor these locks: there a directory is removed when this process ends
by itself.
"""

import atexit
import contextlib
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .posix_needed import IS_POSIX

if IS_POSIX:
    import fcntl

PREFIX = "cs336_tmp-"


@contextlib.contextmanager
def temporary_directory(where: Path | None = None) -> Iterator[Path]:
    """Make a directory in `where`, by default in the one that this process shares with its
    children; remove it at the end of the context, or when this process ends.
    """
    directory = tempfile.mkdtemp(dir=shared_directory()) if where is None else _make_in(where)
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def shared_directory() -> str:
    """The temporary directory of this process and of those that multiprocessing starts for it,
    sockets included; it is made on first use.

    A process that is killed would leave the directory that multiprocessing makes by itself.
    """
    process: Any = multiprocessing.current_process()
    settings: dict[str, str] = process._config
    if settings.get("tempdir") is None:
        settings["tempdir"] = _make_in(Path(tempfile.gettempdir()))
    return settings["tempdir"]


def _make_in(where: Path) -> str:
    """Make a directory in `where`, which is removed once this process has ended."""
    if IS_POSIX:
        return _make_watched(where)
    directory = tempfile.mkdtemp(prefix=PREFIX, dir=where)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _make_watched(where: Path) -> str:
    """Make a directory in `where`, which a shell removes once this process has ended.

    The shell is no child of this process, because Ray kills the children of a process that it ends.
    """
    _remove_leftovers(where)
    directory = ""
    # another process may remove it before it is locked
    while not directory or not Path(directory).is_dir():
        directory = tempfile.mkdtemp(prefix=PREFIX, dir=where)
        with contextlib.suppress(OSError):  # raised by file systems without locks
            fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_EX)
    # the other end is closed when this process ends, and no process that it starts has it
    reader, _ = os.pipe()
    script = 'exec 3<&0; (trap "" INT TERM HUP; read -r _ <&3; rm -rf -- "$0") &'
    null = subprocess.DEVNULL
    words = ["/bin/sh", "-c", script, directory]
    subprocess.run(
        words, stdin=reader, stdout=null, stderr=null, cwd="/", process_group=0, check=True
    )
    os.close(reader)
    return directory


def _remove_leftovers(where: Path) -> None:
    """Remove the directories of processes that were killed together with their shell."""
    for leftover in where.glob(f"{PREFIX}*"):
        # raised if it is in use, belongs to another user, or was removed by another process
        with contextlib.suppress(OSError):
            descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover)
            finally:
                os.close(descriptor)


def run_for_this_process(command: Sequence[str], output: Path) -> int:
    """Run the program with its output in a file, and return its exit status; all that it has
    started ends with it.

    Program and descendants end when this process does too. They are a process group of their own,
    in which a shell waits for that. The shell is the program's parent, as a program may wait for
    every child that it has. On Windows the program goes on when this process is killed.
    """
    if not IS_POSIX:
        with output.open("wb") as file:
            null, both = subprocess.DEVNULL, subprocess.STDOUT
            return subprocess.run(command, stdin=null, stdout=file, stderr=both).returncode
    script = 'exec 3<&0 </dev/null; (read -r _ <&3; kill -9 0) >/dev/null 2>&1 & "$@" 3<&-; exit $?'
    reader, writer = os.pipe()
    with output.open("wb") as file:
        words = ["/bin/sh", "-c", script, "sh", *command]
        program = subprocess.Popen(
            words, stdin=reader, stdout=file, stderr=subprocess.STDOUT, process_group=0
        )
    os.close(reader)
    try:
        return program.wait()
    finally:
        os.close(writer)
        program.wait()
