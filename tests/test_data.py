"""Every row of a published table is what the code makes of the published records, to the byte."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from cs336_systems.commands.rebuild import FOLDER, load, score_forecast, write
from cs336_systems.report.page.chapters import Directory
from cs336_systems.report.progress import StatusLine
from cs336_systems.studies.ceilings_files import load_ceilings
from tests.committed import DATA, committed_directories

pytestmark = pytest.mark.usefixtures("no_pictures")

Load = Callable[[Path], Directory]
INPUTS = ("runs", "kernels", "memory", "examples")
"""Folders of what was measured and explained; JSON files are such too."""
COMMITTED = (".csv", ".md")
OF_OTHERS = ("nvtx_kern_sum_small_ctx512.csv", "by_hand_or_traced.csv")
"""Tables of another program, and of an earlier version of this one."""


def outputs(directory: Path) -> dict[str, bytes]:
    """The tables of a results directory that are published, by name."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix in COMMITTED and path.name not in OF_OTHERS
    }


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Reads a copy of a results directory once; the copies of all of them, without tables, are beside each other."""
    data = tmp_path_factory.mktemp("published") / "data"
    for path in (path for directory in committed_directories() for path in directory.iterdir()):
        made = data / path.relative_to(DATA)
        made.parent.mkdir(parents=True, exist_ok=True)
        if path.name in INPUTS:
            made.symlink_to(path)
        elif path.suffix == ".json":
            shutil.copy(path, made)
    ceilings_at = cache(load_ceilings)
    return cache(lambda directory: load(data / directory.relative_to(DATA), ceilings_at))


@pytest.mark.parametrize("directory", committed_directories(), ids=lambda path: str(path.relative_to(DATA)))
def test_committed_tables_are_those_of_the_committed_records(directory: Path, loaded: Load) -> None:
    own = loaded(directory)
    given = {path.name: path.read_bytes() for path in own.path.glob("*.json")}
    with StatusLine() as status:
        write(own, status)
    assert {path.name: path.read_bytes() for path in own.path.glob("*.json")} == given
    committed, made = outputs(directory), outputs(own.path)
    assert sorted(made) == sorted(committed)
    assert [name for name, text in made.items() if text != committed[name]] == []


def test_committed_errors_of_the_forecast_are_those_of_all_committed_records(loaded: Load) -> None:
    first, *_ = committed_directories()
    root = loaded(first).path.parents[len(first.relative_to(DATA).parts) - 1]
    with StatusLine() as status:
        score_forecast([*map(loaded, committed_directories())], root, status)
    assert outputs(root / FOLDER) == outputs(DATA / FOLDER)
