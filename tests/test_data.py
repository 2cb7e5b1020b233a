"""Every row of a published table is what the code makes of the published records, to the byte."""

import shutil
from pathlib import Path

import pytest

from cs336_systems.commands.rebuild import load, write
from cs336_systems.report.progress import StatusLine
from cs336_systems.report.sections.forecast import FOLDER, write_forecast
from tests.committed import DATA, committed_directories, load_committed

pytestmark = pytest.mark.usefixtures("no_pictures")

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


def inputs_alone(directory: Path, data: Path) -> Path:
    """A copy of the results directory without its tables, below `data`, which has all others too."""
    made = data / directory.relative_to(DATA)
    made.mkdir(parents=True)
    for path in directory.iterdir():
        if path.name in INPUTS:
            (made / path.name).symlink_to(path)
        elif path.suffix == ".json":
            shutil.copy(path, made)
    for kind in DATA.iterdir():
        if kind.is_dir() and not (data / kind.name).exists():
            (data / kind.name).symlink_to(kind)
    return made


@pytest.mark.parametrize("directory", committed_directories(), ids=lambda path: str(path.relative_to(DATA)))
def test_committed_tables_are_those_of_the_committed_records(directory: Path, tmp_path: Path) -> None:
    made = inputs_alone(directory, tmp_path / "data")
    given = {path.name: path.read_bytes() for path in made.glob("*.json")}
    with StatusLine() as status:
        write(load(made), status)
    assert {path.name: path.read_bytes() for path in made.glob("*.json")} == given
    committed = outputs(directory)
    assert sorted(outputs(made)) == sorted(committed)
    assert [name for name, text in outputs(made).items() if text != committed[name]] == []


def test_committed_errors_of_the_forecast_are_those_of_all_committed_records(tmp_path: Path) -> None:
    found = load_committed()
    measured = {own.path.relative_to(DATA): own.results for own in found if own.results is not None}
    sweeps = {path: results.published for path, results in measured.items()}
    assert write_forecast(sweeps, lambda path: measured[path].ceilings, tmp_path) == tmp_path / FOLDER
    assert outputs(tmp_path / FOLDER) == outputs(DATA / FOLDER)
