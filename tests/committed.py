"""The results in data/ that are committed, without those that somebody measured in this checkout."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

from cs336_systems.commands.rebuild import load, results_below
from cs336_systems.report.page.collection import Collection

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data"


@cache
def committed_directories() -> tuple[Path, ...]:
    """The results directories that hold a file that git tracks; all of them where this is no checkout."""
    found = results_below(DATA)
    listed = shutil.which("git") and subprocess.run(
        ["git", "ls-files", "-z", "data"], cwd=ROOT, capture_output=True, text=True
    )
    tracked = {
        parent for name in (listed.stdout if listed else "").split("\0") if name for parent in Path(name).parents
    }
    return tuple(path for path in found if path.relative_to(ROOT) in tracked or not tracked)


def committed_runs() -> list[Path]:
    """The folders of records in these directories."""
    return [path / "runs" for path in committed_directories() if (path / "runs").is_dir()]


def load_committed(data: Path) -> Collection:
    """The results in these directories, which `data` links to as they lie in data/."""
    for path in committed_directories():
        link = data / path.relative_to(DATA)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    return Collection.together(data, [load(path, data) for path in results_below(data)])
