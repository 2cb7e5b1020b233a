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
    copy = _loaded(transformer)
    sys.modules[copy.__name__] = copy  # where the compiler looks for a function's globals
    return copy


@functools.cache
def plain_blocks() -> ModuleType:
    """The module of the fast model's blocks loaded once more, with classes derived from those of
    `plain_model`.
    """
    with patch.dict(sys.modules, {transformer.__name__: plain_model()}):
        copy = _loaded(blocks)
    sys.modules[copy.__name__] = copy  # where the compiler looks for a function's globals
    return copy


def _loaded(module: ModuleType) -> ModuleType:
    """A second copy of a module, in the same package, so that its relative imports work."""
    assert module.__file__ is not None
    parent, _, name = module.__name__.rpartition(".")
    spec = importlib.util.spec_from_file_location(f"{parent}.plain_{name}", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    spec.loader.exec_module(copy)
    return copy
