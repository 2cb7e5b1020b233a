"""Every row of a table in data/ is what the code makes of the committed records, to the byte; pictures are made too."""

import csv
import shutil
from pathlib import Path

import pytest

from cs336_systems.commands.rebuild import load, write
from cs336_systems.record import load_records
from cs336_systems.report.sections.forecast import FOLDER, write_forecast
from cs336_systems.report.sections.memory.entries import load_memory
from cs336_systems.report.sections.memory.files import write_memory
from cs336_systems.report.status_line import StatusLine
from tests.committed import DATA, committed_directories, load_committed

pytestmark = pytest.mark.usefixtures("no_pictures")

INPUTS = ("runs", "kernels", "memory", "examples")
"""Folders of what was measured and explained; JSON files are such too."""
OF_ANOTHER_PROGRAM = {"nvtx_kern_sum_small_ctx512.csv"}
PARTLY_KEPT = DATA / "memory_profiles/h200"
"""Of 48 recorded runs ten kept their explained profile: its tables of memory are those of the commit that measured.

In these `boundaries` has a row for each run, with the peaks and ends of its phases; now `phases` and `boundaries` have
a row for each phase and each boundary of the last step.
"""
MEMORY = ("peaks", "categories", "boundaries", "largest")


def outputs(directory: Path) -> dict[str, bytes]:
    """The tables and pictures of a results directory, by their path in it."""
    found = {path.relative_to(directory): path for path in directory.rglob("*.*") if path.is_file()}
    return {
        str(name): rows_of(path)
        for name, path in found.items()
        if name.parts[0] not in INPUTS and path.suffix in (".csv", ".md", ".png")
        and name.name not in OF_ANOTHER_PROGRAM | {"answers.md"}
    }  # fmt: skip


def rows_of(path: Path) -> bytes:
    """All of a CSV file, of Markdown the rows without the sentences around them; nothing of a picture."""
    begin = {".csv": b"", ".md": b"|"}.get(path.suffix)
    lines = [] if begin is None else path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if line.startswith(begin or b""))


def inputs_alone(directory: Path, data: Path) -> Path:
    """A copy of the results directory without its tables and pictures, below `data`, which has all others too."""
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
        write(load(made, made), status)
    assert {path.name: path.read_bytes() for path in made.glob("*.json")} == given
    committed = outputs(directory)
    if directory == PARTLY_KEPT:
        committed = {name: text for name, text in committed.items() if not is_of_memory(name)}
    assert sorted(outputs(made)) == sorted(committed)
    assert [name for name, text in outputs(made).items() if text != committed[name]] == []


def is_of_memory(name: str) -> bool:
    return name.startswith((*(f"{stem}." for stem in MEMORY), "plots/peaks")) or "_timeline" in name


@pytest.mark.parametrize("name", MEMORY)
def test_of_a_sweep_that_kept_some_profiles_their_rows_are_in_its_tables(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = tmp_path_factory.getbasetemp() / PARTLY_KEPT.name
    if not made.exists():
        write_memory(load_memory(load_records(PARTLY_KEPT / "runs")[0], PARTLY_KEPT), made)
    rows, all_rows = table(made / f"{name}.csv"), table(PARTLY_KEPT / f"{name}.csv")
    shared = all_rows[0].keys() & rows[0].keys()
    committed = [{key: row[key] for key in shared} for row in all_rows]
    assert len({(row["size"], row["context_length"], row["mode"], row["precision"]) for row in rows}) == 10
    assert [row for row in rows if {key: row[key] for key in shared} not in committed] == []


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_committed_errors_of_the_forecast_are_those_of_all_committed_records(tmp_path: Path) -> None:
    found = load_committed(tmp_path)
    sweeps = {path: results.published for path, results in found.sweeps.items()}
    assert write_forecast(sweeps, found.ceilings_of, tmp_path) == tmp_path / FOLDER
    assert outputs(tmp_path / FOLDER) == outputs(DATA / FOLDER)
