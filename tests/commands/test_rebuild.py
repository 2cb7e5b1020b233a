"""One command writes the tables of all results below a directory again, each by what it was
measured with.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs336 import cli
from cs336.commands.rebuild import results_below
from cs336.report import results

pytestmark = pytest.mark.usefixtures("no_pictures")

DATA = Path(__file__).parents[2] / "data" / "published"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A comparison, with runs set aside beside; a study; a sweep with a damaged record, and one
    without any.
    """
    sweep = tmp_path / "data/e2e_benchmark/a"
    (sweep / "before-2026").mkdir(parents=True)
    shutil.copy(DATA / "e2e_benchmark/a_against_a/comparison.json", sweep)
    for place in (sweep, sweep / "before-2026"):
        shutil.copy(DATA / "e2e_benchmark/a_against_a/runs.jsonl", place)
    study = tmp_path / "data/precision"
    study.mkdir()
    shutil.copy(DATA / "precision/precision.json", study)
    made = shutil.ignore_patterns("index.html")
    shutil.copytree(
        DATA / "e2e_benchmark/out_of_memory", tmp_path / "data/e2e_benchmark/damaged", ignore=made
    )
    with (tmp_path / "data/e2e_benchmark/damaged/runs.jsonl").open("a") as file:
        file.write("{")
    (tmp_path / "data/e2e_benchmark/interrupted/runs").mkdir(parents=True)
    return tmp_path / "data"


def written(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*.*")
        if path.is_file()
    }


def test_what_can_be_rebuilt_is_and_what_cannot_is_left(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(tree / "e2e_benchmark/damaged")
    assert cli.main(["report", str(tree)]) == 1
    out, err = capsys.readouterr()
    *rebuilt, scored, _, named = out.splitlines()
    assert scored.startswith(str(tree / "forecast")), (
        "the runs are of an H200, whose ceilings come with the program"
    )
    assert [line.partition(":")[0] for line in rebuilt] == [
        str(tree / "e2e_benchmark/a"),
        str(tree / "precision"),
    ]
    assert named == f"page: {tree / 'index.html'}"
    assert f"error: {tree / 'e2e_benchmark/damaged'}" in err
    assert written(tree / "e2e_benchmark/damaged") == before
    for name in ("results.csv", "comparison.md"):
        made, committed = tree / "e2e_benchmark/a" / name, DATA / "e2e_benchmark/a_against_a" / name
        assert len(made.read_text().splitlines()) == len(committed.read_text().splitlines())
    assert not (tree / "e2e_benchmark/a/before-2026/results.csv").exists()
    assert {path.suffix for path in (tree / "precision").glob("dtypes.*")} == {".csv", ".md"}
    pages = [tree / path / "index.html" for path in ("e2e_benchmark/a", ".", "precision")]
    assert sorted(tree.rglob("*.html")) == pages


def test_files_that_lack_what_they_need_are_named_and_the_others_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Valid JSON of the right types: a study without rows, one without a row's counterpart,
    times that none can be.
    """

    def changed(source: str, name: str, change: Callable[[Any], None]) -> None:
        shutil.copytree(
            DATA / source, tmp_path / name, ignore=shutil.ignore_patterns("*.png", "*.html")
        )
        (path,) = (
            path
            for pattern in ("*.json", "runs.jsonl")
            for path in (tmp_path / name).glob(pattern)
            if path.name != "environment.json"
        )
        text = path.read_text()
        # a study is the whole of its file, and a record a line
        end = text.index("\n") if path.suffix == ".jsonl" else len(text)
        found = json.loads(text[:end])
        change(found)
        path.write_text(json.dumps(found) + text[end:])

    changed("precision", "precision", lambda found: found["accumulation"].clear())
    changed("fusion/bf16", "fusion/empty", lambda found: found["rows"].clear())
    changed("fusion/bf16", "fusion/no-eager", lambda found: found["rows"].pop(0))
    changed(
        "e2e_benchmark/out_of_memory",
        "sweeps/negative",
        lambda found: found.update(host_times_s=[-1.0]),
    )
    changed(
        "e2e_benchmark/out_of_memory",
        "sweeps/endless",
        lambda found: found.update(warmup_times_s=[1e298]),
    )
    changed("e2e_benchmark/out_of_memory", "sweeps/good", lambda found: None)
    assert cli.main(["report", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    named = re.findall(rf"^error: {tmp_path}/(\S+) is not rebuilt: \S", err, re.MULTILINE)
    assert named == [
        "fusion/empty",
        "fusion/no-eager",
        "precision",
        "sweeps/endless",
        "sweeps/negative",
    ]
    assert "Traceback" not in err
    assert f"{tmp_path / 'sweeps/good'}: written" in out


def test_results_of_the_repository_are_left_alone_unless_they_are_named(tree: Path) -> None:
    shutil.copytree(tree / "precision", tree / "published/precision")
    before = written(tree / "published")
    cli.main(["report", str(tree)])
    assert written(tree / "published") == before
    assert (tree / "precision/dtypes.md").is_file()
    assert cli.main(["report", str(tree / "published")]) == 0
    assert (tree / "published/precision/dtypes.md").is_file()


def test_the_page_of_all_names_what_cannot_be_read_and_no_place_of_the_machine(tree: Path) -> None:
    assert cli.main(["report", str(tree)]) == 1
    made = (tree / "index.html").read_text()
    assert "e2e_benchmark/damaged/runs.jsonl:" in made
    assert str(tree) not in made
    (tree.parent / "b").mkdir()
    moved = tree.rename(tree.parent / "b/data")
    assert cli.main(["report", str(moved)]) == 1
    assert (moved / "index.html").read_text() == made, "the same records give the same bytes"


def test_of_interrupted_work_the_old_page_is_left(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tree / "index.html").write_text("old")
    monkeypatch.setattr(results.StudyResults, "write", interrupted)
    assert cli.main(["report", str(tree)]) == 130
    assert (tree / "index.html").read_text() == "old"
    assert sorted(tree.rglob("*.tmp")) == []


def test_results_lie_at_most_three_folders_deep(tmp_path: Path) -> None:
    for place in (
        "one",
        "e2e_benchmark/two",
        "group/e2e_benchmark/three",
        "far/too/deep/four",
        "one/of/its/own",
    ):
        (tmp_path / place / "runs").mkdir(parents=True)
        (tmp_path / place / "runs/a.json").touch()
    assert results_below(tmp_path) == [
        tmp_path / place for place in ("e2e_benchmark/two", "group/e2e_benchmark/three", "one")
    ]
    assert results_below(DATA / "e2e_benchmark/train") == [DATA / "e2e_benchmark/train"]
    assert {path.parent.name for path in results_below(DATA)} == {
        "published",
        "e2e_benchmark",
        "nsys_profiles",
        "kineto_profiles",
        "memory_profiles",
        "ladder",
        "attention",
        "fusion",
        "ceilings",
    }
    assert results_below(DATA.parent / "tests") == []
