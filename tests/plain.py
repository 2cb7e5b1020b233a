"""The model without the shape checks of conftest, which the compiler cannot trace."""

import functools
import importlib.util
import sys
from types import ModuleType
from unittest.mock import patch

from cs336_systems.model import layers
from cs336_systems.model import transformer as model


@functools.cache
def plain_model() -> ModuleType:
    """The module `model` loaded once more, with layers that are loaded once more too."""
    with patch.dict(sys.modules, {layers.__name__: _loaded(layers)}):
        found = _loaded(model)
    sys.modules[found.__name__] = found  # where the compiler looks for a function's globals
    return found


def _loaded(module: ModuleType) -> ModuleType:
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"plain_{module.__name__.rpartition('.')[2]}", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found
