"""The `cs336` command of an installed package: python -m cs336."""

import sys

from .start import main

if __name__ == "__main__":
    sys.exit(main())
