"""The JSON in a file of torch.profiler, which may be compressed."""

import gzip
import io
import zipfile
import zlib
from pathlib import Path
from typing import IO, cast

from ..columns import GZIP_MAGIC, ZIP_MAGIC, ProfileError, read_head, what_it_is

MAX_TRACE_BYTES = 8 * 2**30
"""Largest decompressed JSON that is read: some thirty million events."""
MAX_FILES = 3
TORCH_TRACE = "a trace of torch.profiler (JSON, in gzip, or alone in a .zip)"


def read_content(path: Path) -> bytes | bytearray:
    """The JSON in the file, decompressed."""
    head = read_head(path, len(ZIP_MAGIC), TORCH_TRACE)
    content: bytes | bytearray = b""
    try:
        if head.startswith(ZIP_MAGIC):
            content = _unzip(path)
        elif head.startswith(GZIP_MAGIC):
            with gzip.open(path) as file:
                content = _decompress(cast("IO[bytes]", file))
        elif path.stat().st_size <= MAX_TRACE_BYTES:
            content = path.read_bytes()
    except (
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise ProfileError(
            path, f"not a whole compressed file ({error}): copy it again or export it again"
        ) from error
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    if max(len(content), path.stat().st_size) > MAX_TRACE_BYTES:
        raise ProfileError(
            path, f"needed at most {MAX_TRACE_BYTES} bytes, got more: record fewer steps"
        )
    if content[:100].lstrip()[:1] not in (b"{", b"["):
        raise ProfileError(
            path, f"needed {TORCH_TRACE}, but {what_it_is(path, bytes(content[:100]))}"
        )
    return content


def _decompress(file: IO[bytes]) -> bytearray:
    """The content up to just above MAX_TRACE_BYTES, so that a small file cannot fill the memory."""
    content = bytearray()
    while len(content) <= MAX_TRACE_BYTES and (part := file.read(2**20)):
        content += part
    return content


def _unzip(path: Path) -> bytes | bytearray:
    """The one file in the archive, decompressed twice if it is in gzip."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            listed = ", ".join(names[:MAX_FILES]) or "none"
            raise ProfileError(
                path,
                f"needed a .zip with one trace, got {len(names)} files ({listed}): unpack it first",
            )
        with archive.open(names[0]) as file:
            content = _decompress(file)
    if not content.startswith(GZIP_MAGIC):
        return content
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as unpacked:
        return _decompress(cast("IO[bytes]", unpacked))
