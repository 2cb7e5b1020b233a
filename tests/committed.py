"""The published results, which are under version control. Tests read no other results of the checkout."""

from functools import cache
from pathlib import Path

from cs336_systems.commands.rebuild import load, results_below
from cs336_systems.report.page.chapters import Directory

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data" / "published"


@cache
def committed_directories() -> tuple[Path, ...]:
    """The published results directories."""
    return tuple(results_below(DATA))


def committed_runs() -> list[Path]:
    """The folders of records in these directories."""
    return [path / "runs" for path in committed_directories() if (path / "runs").is_dir()]


def load_committed() -> list[Directory]:
    """All published results."""
    return [load(path) for path in committed_directories()]
