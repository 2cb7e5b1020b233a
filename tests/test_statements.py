"""Published tables are, to the byte, what the code makes of the records; documents say what both
have, README what is printed. The forecasts of the published runs are made once for all.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from cs336.commands.rebuild import FORECAST_FOLDER, load, score_forecast, write
from cs336.report.page.directory import Directory
from cs336.report.page.glance import headline_of, times_of
from cs336.report.progress import StatusLine
from cs336.report.words import status_text
from cs336.studies.ceilings_files import load_ceilings
from tests.committed import DATA, committed_directories
from tests.report.reading import has_extremes, numbers
from tests.statements import h100 as h100  # whose claims are registered with its import
from tests.statements import parallel as parallel
from tests.statements.documents import CLAIMS, ROOT, Mark, marks, read, some, table, unclaimed
from tests.statements.results import README, RESULTS

Load = Callable[[Path], Directory]
MOST_CHARACTERS = 180
"""Of a headline: two lines of a window of 1,280 pixels."""
INPUTS = ("runs.jsonl", "kernels", "memory", "examples")
"""What was measured and explained, besides JSON files."""
COMMITTED = (".csv", ".md")
OF_OTHERS = (
    "nvtx_kern_sum_small_ctx512.csv",
    "public_training_rows.csv",
    "public_rows.csv",
    "simumax.csv",
    "drawn.csv",
    "files.csv",
    "out_of_memory.csv",
)
"""Tables of another program, of others' measurements, and those that scripts have made."""


def outputs(directory: Path) -> dict[str, bytes]:
    """The tables of a results directory that are published, by name."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix in COMMITTED and path.name not in OF_OTHERS
    }


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Reads a copy of a results directory once; the copies of all of them, without tables, are
    beside each other.
    """
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


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "directory", committed_directories(), ids=lambda path: str(path.relative_to(DATA))
)
def test_committed_tables_are_those_of_the_committed_records(directory: Path, loaded: Load) -> None:
    own = loaded(directory)
    given = {path.name: path.read_bytes() for path in own.path.glob("*.json")}
    with StatusLine() as status:
        write(own, status)
    assert {path.name: path.read_bytes() for path in own.path.glob("*.json")} == given
    committed, made = outputs(directory), outputs(own.path)
    assert sorted(made) == sorted(committed)
    assert [name for name, text in made.items() if text != committed[name]] == []


@pytest.mark.usefixtures("no_pictures")
def test_committed_errors_of_the_forecast_are_those_of_all_committed_records(loaded: Load) -> None:
    first, *_ = committed_directories()
    root = loaded(first).path.parents[len(first.relative_to(DATA).parts) - 1]
    with StatusLine() as status:
        score_forecast([*map(loaded, committed_directories())], root, status)
    assert outputs(root / FORECAST_FOLDER) == outputs(DATA / FORECAST_FOLDER)


Rows = Sequence[Mapping[str, str]]


def groups_of(rows: Rows, directory: Path) -> tuple[str, list[Rows]]:
    """The column that answers the question of the directory's command, and the rows among which
    extremes are named.
    """
    if "gate" in rows[0]:
        passed = [row for row in rows if row["gate"] == "passed"]
        return "step_mean_ms", [[min(passed, key=lambda row: float(row["step_mean_ms"]))]]
    if "speed_up" in rows[0]:
        return "speed_up", [[row for row in rows if row["version"] != "eager"]]
    if "measured" in rows[0]:
        words = {row["ceiling"].split()[-1] for row in rows if row["unit"] != "µs"}
        return "measured", [
            [row for row in rows if row["ceiling"].endswith(word)] for word in words
        ]
    if "together_mean_ms" in rows[0]:
        shapes: dict[str, list[Mapping[str, str]]] = {}
        by_shape = sorted(rows, key=lambda row: (int(row["context_length"]), int(row["d_head"])))
        for row in (row for row in by_shape if row["together_mean_ms"]):
            alike = shapes.setdefault(row["precision"], [])
            if alike and any(alike[0][key] != row[key] for key in ("context_length", "d_head")):
                alike.clear()
            alike.append(row)
        return "together_mean_ms", [*shapes.values()]
    return "peak_allocated_gib" if "memory_profiles" in directory.parts else "step_mean_ms", [rows]


def busy_by_clock(directory: Path, runs: Rows) -> list[tuple[float, bool]]:
    """Of each profiled step the busy time over the clock's step, and whether the clock's run was
    launch-bound.
    """
    found = []
    for profiled in some(table(f"{directory.relative_to(DATA)}/phases.csv"), phase="step"):
        (run,) = [
            row
            for row in runs
            if all(row[key] == profiled[key] for key in row.keys() & profiled.keys())
        ]
        share = float(profiled["busy_mean_ms"]) / float(run["step_mean_ms"])
        found.append((share, "launch-bound" in run["warnings"]))
    return found


@pytest.mark.parametrize(
    "directory", committed_directories(), ids=lambda path: str(path.relative_to(DATA))
)
def test_a_headline_says_what_the_published_tables_have(directory: Path, loaded: Load) -> None:
    """Both extremes of all rows, how many failed and how, and what limits profiled steps, by the
    CSV files alone.
    """
    own = loaded(directory)
    text, more = headline_of(own, [] if own.results is None else times_of(own.results))
    assert len(text) <= MOST_CHARACTERS
    if (directory / "dtypes.csv").exists():
        rows = table(f"{directory.relative_to(DATA)}/dtypes.csv")
        others = {row["quantity"] for row in rows if row["dtype"] != "fp32"}
        in_fp32 = dict.fromkeys(row["quantity"] for row in rows if row["quantity"] not in others)
        assert text.partition(": ")[2].rstrip(".").split(", ") == [*in_fp32]
        return
    if own.compared is not None:
        (row,) = table(f"{directory.relative_to(DATA)}/comparison.csv")
        is_told = row["verdict"] != "cannot tell"
        assert is_told == (pytest.approx(1 / float(row["ratio"]), rel=5e-3) in numbers(text)), text
        return
    name = "ladder" if own.rungs else "results"
    rows = table(f"{directory.relative_to(DATA)}/{name}.csv")
    key, groups = groups_of(rows, directory)
    for group in groups:
        assert has_extremes(f"{text} {more}", [float(row[key]) for row in group if row[key]]), (
            text,
            more,
        )
    for status, count in Counter(
        row["status"] for row in rows if row.get("status", "ok") != "ok"
    ).items():
        assert f"{status_text(status)} in {count} of {len(rows)}" in text
    if (directory / "phases.csv").exists():
        shares = busy_by_clock(directory, rows)
        number = sum(share >= 0.8 and not is_named for share, is_named in shares)
        assert len(shares) == 1 or f"the GPU in {number} of {len(shares)}" in text
        assert has_extremes(more, [100 * share for share, _ in shares]), more


DOCUMENTS = (README, "docs/START.md", "docs/OUTPUT.md", RESULTS)
"""Documents whose figures all have a claim."""
SITE = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), DATA / "README.md")
)
"""The documents of the site, without published tables."""

MARKS = [mark for document in DOCUMENTS for mark in marks(document)]


@pytest.mark.parametrize("mark", MARKS, ids=[mark.name for mark in MARKS])
def test_the_document_says_what_the_file_has(mark: Mark) -> None:
    assert list(mark.problems(read(mark.document))) == []


def test_every_claim_is_marked_in_a_document() -> None:
    assert {mark.name for mark in MARKS} == CLAIMS.keys()


WORDS = {README: 1200, "docs/METHOD.md data/published/README.md": 3000, "docs/CLUSTER.md": 500}
FIRST_WORDS, USERS = 400, ("docs/LOOP.md", "docs/PLAN.md", "docs/COURSE.md")
"""Whoever has a slow step, wants to know whether it fits, or has the assignment to do is told where
to go within so many words.
"""


@pytest.mark.parametrize("documents", WORDS)
def test_a_document_is_read_in_one_breath(documents: str) -> None:
    words = [word for name in documents.split() for word in (ROOT / name).read_text().split()]
    assert len(words) <= WORDS[documents]


def test_readme_serves_three_users_at_once() -> None:
    first = " ".join((ROOT / README).read_text().split()[:FIRST_WORDS])
    assert [name for name in USERS if name not in first] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_figure_has_a_source(document: str) -> None:
    assert unclaimed(document) == []
