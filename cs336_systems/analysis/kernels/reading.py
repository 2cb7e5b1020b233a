"""Reads a profile of nsys or of torch.profiler."""

from pathlib import Path

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.files import GZIP_MAGIC, SQLITE_MAGIC, read_head, what_it_is
from cs336_systems.analysis.kernels.events import NEEDED as KINETO_FILE
from cs336_systems.analysis.kernels.kineto import read_kineto
from cs336_systems.analysis.kernels.nsys import NEEDED as NSYS_FILE
from cs336_systems.analysis.kernels.nsys import read_nsys
from cs336_systems.analysis.kernels.trace import Trace

HEAD_BYTES = 100


def read_trace(path: Path) -> Trace:
    """Read a file of nsys or torch.profiler, recognised by its first bytes; raise ProfileError for other files."""
    needed = f"{NSYS_FILE}, or {KINETO_FILE}"
    head = read_head(path, HEAD_BYTES, needed)
    if head.startswith(SQLITE_MAGIC):
        return read_nsys(path)
    if head.startswith(GZIP_MAGIC) or head.lstrip()[:1] in (b"{", b"["):
        return read_kineto(path)
    raise ProfileError(path, f"needed {needed}, but {what_it_is(path, head)}")
