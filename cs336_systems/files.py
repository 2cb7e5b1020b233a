"""JSON files that this project writes and reads: typed, versioned, bounded in size, written whole
or not at all.

Also the messages for errors of the operating system.
"""

import contextlib
import errno
import os
import traceback
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TypeVar

import msgspec

from .text import inert_line

T = TypeVar("T")

RECORD = "a record of a run"
KERNEL_PROFILE = "a kernel profile"
MEMORY_PROFILE = "a memory profile"
MEMORY_NOTES = "notes on a memory snapshot"
CEILINGS = "a study of ceilings"
LADDER = "the rungs of a ladder"
_KINDS: Mapping[str, tuple[frozenset[str], str]] = {
    RECORD: (
        frozenset({"config", "status", "started_at"}),
        "`cs336 report DIR` shows with the others of its sweep",
    ),
    KERNEL_PROFILE: (frozenset({"source", "phases_from", "num_kernels"}), "`cs336 kernels` shows"),
    MEMORY_PROFILE: (frozenset({"source", "boundaries", "at_peak"}), "`cs336 memory` shows"),
    CEILINGS: (frozenset({"grid", "streams", "launches"}), "`cs336 report DIR` shows"),
    LADDER: (frozenset({"rungs", "format_version"}), "`cs336 report DIR` shows"),
    "a trace of torch.profiler": (frozenset({"traceEvents"}), "`cs336 kernels` explains"),
    MEMORY_NOTES: (
        frozenset({"marks", "sightings"}),
        "`cs336 memory` reads with the snapshot beside",
    ),
}
"""Each kind of JSON file: field names that identify it, and the command that reads it."""

MAX_BYTES = 64 * 2**20
"""Largest file that is read whole, unless its kind allows more."""


class FileError(ValueError):
    """The file `path` does not hold what it should."""

    def __init__(self, path: Path, problem: str, *, is_newer: bool = False) -> None:
        """`problem` says what is wrong with the file at `path`."""
        super().__init__(inert_line(f"{path}: {problem}"))
        self.path = path
        self.is_newer = is_newer
        """Whether a later version of this program wrote the file, in which case the file is not
        damaged.
        """


def user_cache() -> Path:
    """The user's cache directory for files that this program can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cs336"


def encode_json(value: object, indent: int = 2) -> bytes:
    """The value as indented JSON, which people can read too."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n"


def read_json(
    path: Path,
    kind: type[T],
    what: str,
    *,
    version: int,
    error: type[FileError],
    max_bytes: int = MAX_BYTES,
    if_older: str | None = None,
    data: bytes | None = None,
) -> T:
    """Read a JSON file that has a `format_version`, and decode it as `kind`.

    Raise `error`, which names the first thing wrong in the file. `what` names the expected content
    in that message, with an article. `version` is the newest format version that can be read; files
    of earlier versions are read too, unless `if_older` says what the user should do instead. `data`
    is the content, if the caller has it already.
    """
    if data is None:
        problem = why_no_file(path)
        if problem is not None:
            raise error(path, f"{problem}; needed {what}, in JSON")
        size = path.stat().st_size
    else:
        size = len(data)
    if size > max_bytes:
        raise error(path, f"{size} bytes are more than {what} ever has ({max_bytes})")
    if data is None:
        data = path.read_bytes()
    try:
        file_version = msgspec.json.decode(data, type=_Versioned).format_version
        if file_version != version:
            # each kind of file counts its own versions: another version may mean another kind
            refuse_another_kind(path, data, what, error)
        if file_version > version:
            newer = f"format version {file_version} is newer than this program's {version}"
            raise error(path, f"{newer}; update it", is_newer=True)
        if file_version < version and if_older is not None:
            # another program's file may have a version too
            fields, _ = _KINDS[what]
            if fields <= _field_names(data):
                needed = f"needed format version {version}, got {file_version}"
                raise error(path, f"{needed}: {if_older}")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as reason:
        refuse_another_kind(path, data, what, error)
        raise error(path, f"not {what}: {reason}") from reason


def refuse_another_kind(
    path: Path, data: bytes | bytearray, needed: str, error: type[FileError]
) -> None:
    """Raise `error` if the data is another kind of this program's files; the message says which
    command reads it.
    """
    names = _field_names(data)
    for kind, (fields, reader) in _KINDS.items():
        if fields <= names and kind != needed:
            raise error(path, f"this is {kind}, which {reader}; needed {needed}")


def _field_names(data: bytes | bytearray) -> Set[str]:
    """The names of the fields of the object in the JSON; none if it holds something else."""
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return frozenset()


def why_no_file(path: Path) -> str | None:
    """Why the path is not a regular file, in words; None if it is one."""
    try:
        if path.is_file():
            return None
    except OSError as error:  # a name that is too long
        return error.strerror
    if path.is_dir():
        return "a directory, not a file"
    # reading a pipe could wait for ever
    return "no regular file" if path.exists() else "No such file"


class _Versioned(msgspec.Struct):
    """What every JSON file of this program has."""

    format_version: int


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Replace the file so that readers see either the old bytes or the new ones, even after a
    crash.

    An OSError that this raises names `path`, not the temporary file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
            error.filename2 = None
        raise


def _sync(directory: Path) -> None:
    """Flush the directory's entries to the disk, so that a new file survives a crash.

    Where the system does not let a directory be opened, as Windows does not, it flushes them by
    itself.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "stay within the quota, or have it raised",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "change the permissions",
    errno.EPERM: "change the permissions",
    errno.ENOENT: "put back what was moved or removed",
    errno.ENOTDIR: "move away the file that stands in the place of a directory",
    errno.EEXIST: "move away the file that stands in the place of a directory",
    errno.ESTALE: "put back what was moved or removed",
    errno.EIO: "check the disk and its connection",
}


def remedy(error: OSError) -> str | None:
    """What the user can do about the error; None if that is not known."""
    return None if error.errno is None else _REMEDIES.get(error.errno)


def error_in_words(error: OSError) -> str:
    """One line: the file, the error, and what the user can do."""
    what = error.strerror or str(error)
    named = f"{error.filename}: {what}" if error.filename is not None else what
    known = remedy(error)
    return named if known is None else f"{named}; {known} and run the same command again"


def in_one_line(error: Exception) -> str:
    """The error in one line; where this program has not foreseen it, with its place in the
    source.
    """
    if type(error).__module__.startswith(f"{__package__}."):
        return str(error)
    if isinstance(error, OSError):
        return error_in_words(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return (
        ": ".join(filter(None, [what, str(error)])) + f" ({Path(last.filename).name}:{last.lineno})"
    )
