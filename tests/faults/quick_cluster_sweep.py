"""The command of a sweep that waits for less long for the machines of its cluster, without its tables and pictures."""

import sys
from unittest.mock import patch

from cs336_systems import cli
from cs336_systems.sweep.cluster.patience import Patience

QUICK = Patience(look_s=1.0, head_s=5.0, lease_s=6.0, back_s=1.0, again_s=3.0)

if __name__ == "__main__":
    with (
        patch("cs336_systems.commands.sweep.show_results"),
        patch("cs336_systems.sweep.cluster.ray_nodes.PATIENCE", QUICK),
    ):
        sys.exit(cli.sweep())
