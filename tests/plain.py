"""The model without the shape checks of conftest, which the compiler cannot trace."""

import functools
import importlib.util
import sys
from types import ModuleType
from unittest.mock import patch

from cs336.model import transformer
from cs336.model.fast import blocks


@functools.cache
def plain_model() -> ModuleType:
    """The reference's module loaded once more."""
    found = _loaded(transformer)
    sys.modules[found.__name__] = found  # where the compiler looks for a function's globals
    return found


@functools.cache
def plain_blocks() -> ModuleType:
    """The module of the fast model's blocks loaded once more, with classes derived from those of
    `plain_model`.
    """
    with patch.dict(sys.modules, {transformer.__name__: plain_model()}):
        found = _loaded(blocks)
    sys.modules[found.__name__] = found  # where the compiler looks for a function's globals
    return found


def _loaded(module: ModuleType) -> ModuleType:
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(
        f"plain_{module.__name__.rpartition('.')[2]}", module.__file__
    )
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found
