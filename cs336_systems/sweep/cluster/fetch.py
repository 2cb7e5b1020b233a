"""Fetches raw profiles from the machine that measured: in chunks, checked, and put in place when all have arrived."""

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from cs336_systems.config import RunConfig
from cs336_systems.files import put_in_place
from cs336_systems.sweep.store import fresh_profile_path, raw_profile_paths
from cs336_systems.text import LONGEST_PART, inert_line

CHUNK_BYTES = 2**20
"""Largest part of a file that is sent at once."""
MAX_FILE_BYTES = 8 * 2**30
"""Largest file that is fetched; none that is larger can be explained."""
_SYNC_BYTES = 32 * 2**20
"""Bytes that are written between two fsyncs, which block the driver."""


class RawFile(msgspec.Struct, frozen=True):
    """A file that a run has left on its machine."""

    name: str
    num_bytes: int
    sha256: str


class FetchError(ValueError):
    """A machine offers a file, or sends a part of one, that cannot be what the run has left."""


class Fetch:
    """The files of one run, under temporary names in their final directories until `keep` is called."""

    def __init__(self, config: RunConfig, runs: Path, files: Sequence[RawFile]) -> None:
        self._config, self._runs = config, runs
        self._paths = {path.name: path for path in raw_profile_paths(config, runs)}
        names = {file.name for file in files}
        if len(names) < len(files) or not names <= self._paths.keys():
            found = inert_line(", ".join(sorted(file.name for file in files)), LONGEST_PART)
            raise FetchError(f"needed some of {', '.join(self._paths) or 'no files'}, got {found}")
        for file in files:
            if not 0 <= file.num_bytes <= MAX_FILE_BYTES:
                raise FetchError(f"{file.name}: needed at most {MAX_FILE_BYTES} bytes, got {file.num_bytes}")
        self._left = deque(files)
        self._written: list[tuple[Path, Path]] = []
        """Temporary and final paths of the files that are complete."""
        self._output: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def next_part(self) -> tuple[str, int] | None:
        """Name of the file and offset in it that come next; None if all files are whole."""
        while self._left:
            file = self._left[0]
            if self._output is None:
                self._paths[file.name].parent.mkdir(parents=True, exist_ok=True)
                self._output = self._temporary(file).open("wb")
                self._digest = hashlib.sha256()
            if self._output.tell() < file.num_bytes:
                return file.name, self._output.tell()
            self._complete(file, self._output)
        return None

    def _temporary(self, file: RawFile) -> Path:
        return self._paths[file.name].with_name(f".{file.name}.{os.getpid()}.tmp")

    def _complete(self, file: RawFile, output: BinaryIO) -> None:
        if self._digest.hexdigest() != file.sha256:
            raise FetchError(f"{file.name} came damaged: its SHA-256 is not that of the file on the machine")
        _sync(output)
        output.close()
        self._output = None
        self._written.append((self._temporary(file), self._paths[file.name]))
        self._left.popleft()

    def take(self, name: str, offset: int, data: bytes) -> None:
        """Write the part that `next_part` asked for, or the beginning of it."""
        expected = self.next_part()
        assert expected is not None
        assert self._output is not None
        left = self._left[0].num_bytes - expected[1]
        if (name, offset) != expected or not 0 < len(data) <= min(left, CHUNK_BYTES):
            raise FetchError(f"{expected[0]}: needed the bytes from {expected[1]}, got {len(data)} of something else")
        self._output.write(data)
        self._digest.update(data)
        if self._output.tell() % _SYNC_BYTES < len(data):
            _sync(self._output)

    def keep(self) -> None:
        """Move all files to their final paths, after removing the record, profile and explanation of an earlier run."""
        (self._runs / f"{self._config.key}.json").unlink(missing_ok=True)
        fresh_profile_path(self._config, self._runs)
        while self._written:
            put_in_place(*self._written[-1])
            self._written.pop()

    def drop(self) -> None:
        """Remove the files that have not been moved to their final paths."""
        with contextlib.suppress(OSError):
            if self._output is not None:
                self._output.close()
        for temporary in [*(temporary for temporary, _ in self._written), *map(self._temporary, self._left)]:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _sync(output: BinaryIO) -> None:
    output.flush()
    os.fsync(output.fileno())
