"""In a checkout where nothing is installed, the folder cs336_systems is the package cs336.

Python finds this file on the path, and it puts the package in its own place. It is not installed.
"""

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).with_name("cs336_systems")
_SPEC = importlib.util.spec_from_file_location(
    "cs336", _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
)
assert _SPEC is not None
assert _SPEC.loader is not None
sys.modules["cs336"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules["cs336"])

if __name__ == "__main__":
    from cs336.start import main

    sys.exit(main())
