"""The published results, which are under version control. Tests read no other results of the
checkout.
"""

from functools import cache
from pathlib import Path

from cs336.commands.rebuild import results_below

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data" / "published"


@cache
def committed_directories() -> tuple[Path, ...]:
    """The published results directories."""
    return tuple(results_below(DATA))


def committed_runs() -> list[Path]:
    """The folders of records in these directories."""
    return [path / "runs" for path in committed_directories() if (path / "runs").is_dir()]
