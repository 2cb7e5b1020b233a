"""Opens token files; the command line does so too, to refuse a wrong file before the run."""

from pathlib import Path

import numpy as np
from numpy.lib import format as npy


def open_tokens(path: Path, context_length: int) -> np.ndarray:
    """Map a token file, reading its header alone: .npy, one axis, integers of any type, longer than
    `context_length`.

    Raises ValueError, which names the file, what was needed, what it holds, and, where nothing is
    lost or misread by it, a line of Python that converts it.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; --tokens needs a .npy file of integers")
    try:
        tokens = npy.open_memmap(path, mode="r")
    # a damaged header makes numpy's parser and mmap raise nearly anything
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        advice = ""
        if _may_be_raw(path):
            line = f"numpy.save({f'{path}.npy'!r}, numpy.fromfile({str(path)!r}, 'uint16'))"
            advice = f"; raw 16-bit tokens are converted by {line}"
        raise ValueError(f"{path}: not a .npy file of numbers ({reason}){advice}") from error
    is_integer = np.issubdtype(tokens.dtype, np.integer)
    if tokens.ndim != 1 or not is_integer:
        advice = ""
        if is_integer:
            line = f"numpy.save({f'{path}.npy'!r}, numpy.load({str(path)!r}).ravel())"
            advice = f"; converted by {line}"
        came = f"{tokens.ndim} axes of {tokens.dtype}"
        raise ValueError(f"{path}: needed one axis of integers, found {came}{advice}")
    if len(tokens) <= context_length:
        raise ValueError(
            f"{path}: needed more than context_length = {context_length} tokens, found "
            f"{len(tokens)}"
        )
    return tokens


def _may_be_raw(path: Path) -> bool:
    """Whether a file that numpy cannot read may be 16-bit numbers: a whole number of them, and no
    text, archive or damaged .npy file, which begin otherwise.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(4096)
    # a character may be cut off at the end
    is_text = b"\0" not in begin and len(begin.decode(errors="ignore").encode()) > len(begin) - 4
    is_known = begin.startswith((npy.MAGIC_PREFIX, b"PK", b"\x1f\x8b"))
    return size_bytes > 0 and size_bytes % 2 == 0 and not is_text and not is_known
