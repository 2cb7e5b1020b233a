"""The published results, which are under version control. Tests read no other results of the
checkout.
"""

from functools import cache
from pathlib import Path

from cs336.commands.rebuild import results_below
from cs336.record import RUNS, published_runs

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data" / "published"


@cache
def committed_directories() -> tuple[Path, ...]:
    """The published results directories."""
    return tuple(results_below(DATA))


def committed_runs() -> list[Path]:
    """The places of their records, for `load_records`."""
    places = (path / RUNS for path in committed_directories())
    return [runs for runs in places if published_runs(runs).is_file()]
