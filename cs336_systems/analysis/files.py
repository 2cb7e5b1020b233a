"""Recognises the kind of a file by its first bytes."""

import stat
from pathlib import Path

from cs336_systems.analysis.columns import ProfileError

SQLITE_MAGIC = b"SQLite format 3\0"
GZIP_MAGIC = b"\x1f\x8b"
_COMPRESSED = {
    b"\xfd7zXZ\0": "it is compressed with xz: decompress it first, with `xz -dk`",
    GZIP_MAGIC: "it is compressed with gzip: decompress it first, with `gzip -dk`",
    b"\x28\xb5\x2f\xfd": "it is compressed with zstd: decompress it first, with `zstd -dk`",
}


def read_head(path: Path, num_bytes: int, needed: str) -> bytes:
    """The first bytes of a regular file; raise ProfileError, which says what was `needed`, for anything else."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            raise ProfileError(path, f"needed {needed}, got {kind}")
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise error if isinstance(error, ProfileError) else ProfileError(path, f"no name of a file: {error}") from error


def what_it_is(path: Path, head: bytes) -> str:
    """What kind of file this is, in words, and what to do with it if that is known; for a file of the wrong kind."""
    if path.suffix == ".nsys-rep":
        return f"it is the report itself: export it with `nsys export --type=sqlite {path.name}`"
    compressed = [problem for magic, problem in _COMPRESSED.items() if head.startswith(magic)]
    if compressed:
        return compressed[0]
    if head[:1] == b"\x80":
        return "it is a pickle, as PyTorch's memory snapshots are: `cs336 memory` explains those"
    return "it is something else" if head else "it is empty"
