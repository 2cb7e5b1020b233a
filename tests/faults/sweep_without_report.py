"""The command of a sweep without its tables and pictures, which take longer than the runs and are
beside the point.

On a cluster, its patience with processes of Ray that hang is shorter.
"""

import os
import sys
from unittest.mock import patch

from cs336 import cli

if __name__ == "__main__":
    if "--cluster" in sys.argv:
        from cs336.sweep.cluster import connection

        connection.HEAD_S, connection.RAY_S = float(os.environ.get("HEAD_S", "4")), 8.0
    with (
        patch("cs336.commands.measuring.show_results"),
        patch("cs336.commands.measuring.StatusLine.importing"),
    ):
        sys.exit(cli.sweep())
