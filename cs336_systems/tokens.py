"""Token files: one check of them for the command line, which refuses early, and for the run, which reads them."""

from pathlib import Path

import numpy as np
from numpy.lib import format as npy

TOKEN_TYPES = (np.dtype(np.uint16), np.dtype(np.int32))


def open_tokens(path: Path, context_length: int) -> np.ndarray:
    """Map a token file, reading its header alone: .npy, one axis, uint16 or int32, longer than `context_length`.

    Raises ValueError naming the file, what was needed and what it holds.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; --tokens needs a .npy file of uint16 or int32 tokens")
    with path.open("rb") as file:
        head = file.read(len(npy.MAGIC_PREFIX))
    if head != npy.MAGIC_PREFIX:
        found = f"begins with {head!r}" if head else "is empty"
        raise ValueError(f"{path}: not a .npy file, it {found}; write it with numpy.save")
    try:
        tokens = npy.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header makes numpy's parser and mmap raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise ValueError(f"{path}: not a .npy file of numbers ({reason}); write it with numpy.save") from error
    if tokens.ndim != 1 or tokens.dtype not in TOKEN_TYPES:
        found = f"{tokens.ndim} axes of {tokens.dtype}"
        raise ValueError(f"{path}: needed one axis of uint16 or int32 tokens, found {found}")
    if len(tokens) <= context_length:
        raise ValueError(f"{path}: needed more than context_length = {context_length} tokens, found {len(tokens)}")
    return tokens
