"""The `cs336` command where the package is not installed: python -m cs336_systems."""

import sys

from cs336_systems.start import main

if __name__ == "__main__":
    sys.exit(main())
