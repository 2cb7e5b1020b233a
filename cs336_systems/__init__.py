"""Where do the time and the memory of a Transformer training step go?"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cs336_systems.watched import watch as watch

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "watch":  # which needs torch, and commands that need none shall start quickly
        from cs336_systems.watched import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def find_modules_of_the_user() -> None:
    """Let imports find modules in the current directory, after all others.

    Modules `cs336_systems.X` that this package does not have are those of another package of this
    name on the path, such as that of a clone of the course's assignment.
    """
    import pkgutil  # takes longer to import than all else here, and Ctrl-C is not handled yet

    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 (pathlib is not needed here otherwise)
        sys.path.append(here)
    __path__[:] = pkgutil.extend_path(__path__, __name__)
