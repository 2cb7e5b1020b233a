"""The command of a sweep without its tables and pictures, which take longer than the runs and are beside the point."""

import sys
from unittest.mock import patch

from cs336_systems import cli

if __name__ == "__main__":
    with patch("cs336_systems.commands.sweep.show_results"):
        sys.exit(cli.sweep())
