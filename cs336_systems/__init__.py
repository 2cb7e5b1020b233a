"""Where do the time and the memory of a Transformer training step go?"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .watched import watch as watch

__version__ = "0.1.0"

_FOLDER = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120


def __getattr__(name: str) -> object:
    """Import `watch` on first use, because it needs torch, which other parts of the package do
    without.
    """
    if name == "watch":  # which needs torch, and commands that need none shall start quickly
        from .torch_needed import LEAST_TO_WATCH, require_torch

        require_torch("watch", LEAST_TO_WATCH)
        from .watched import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def find_modules_of_the_user() -> None:
    """Let imports find modules in the current directory, after all others."""
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 (pathlib is not needed here otherwise)
        sys.path.append(here)


def places_of(name: str) -> list[str]:
    """Places where a module of this name may lie: sys.path, and then the current directory.

    A place where this package's own folder has the name is left out.
    """
    places = []
    for place in (*sys.path, os.getcwd()):  # noqa: PTH109
        folder = os.path.join(place, name)  # noqa: PTH118
        if os.path.realpath(folder) != _FOLDER:
            places.append(place)
    return places


def _load_package_of_the_course(name: str) -> None:
    """Load the package of this name that lies elsewhere on the path, in the place of this folder.

    The folder of a checkout has the name of a package that every student of the course has. Whoever
    imports that name means theirs.
    """
    import importlib.util
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec(name, places_of(name))
    if spec is None or spec.loader is None:
        raise ImportError(f"{_FOLDER} is imported as cs336: from cs336 import watch")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


if __name__ == "cs336_systems":
    _load_package_of_the_course(__name__)
