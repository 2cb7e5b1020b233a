"""Opens token files; the command line does so too, to refuse a wrong file before the run."""

from pathlib import Path

import numpy as np
from numpy.lib import format as npy


def open_tokens(path: Path, context_length: int) -> np.ndarray:
    """Map a token file, reading its header alone: .npy, one axis, integers of any type, longer than
    `context_length`.

    Raises ValueError, which names the file, what was needed, what it holds, and a line of Python
    that converts it.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; --tokens needs a .npy file of integers")
    try:
        tokens = npy.open_memmap(path, mode="r")
    # a damaged header makes numpy's parser and mmap raise nearly anything
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        line = f"numpy.save({f'{path}.npy'!r}, numpy.fromfile({str(path)!r}, 'uint16'))"
        problem = (
            f"not a .npy file of numbers ({reason}); raw 16-bit tokens are converted by {line}"
        )
        raise ValueError(f"{path}: {problem}") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        converted = f"{path.with_suffix('')}-int32.npy"
        line = f"numpy.save({converted!r}, numpy.load({str(path)!r}).ravel().astype('int32'))"
        came = f"{tokens.ndim} axes of {tokens.dtype}"
        raise ValueError(f"{path}: needed one axis of integers, found {came}; converted by {line}")
    if len(tokens) <= context_length:
        raise ValueError(
            f"{path}: needed more than context_length = {context_length} tokens, found "
            f"{len(tokens)}"
        )
    return tokens
