"""`precision.py` prints what was observed, and writes nothing unless asked."""

import csv
from pathlib import Path

import pytest

from cs336_systems.cli import precision as main
from cs336_systems.studies.precision import accumulation_study

FORMATS = ("csv", "md", "tex", "typ")


def test_nothing_is_written_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--device", "cpu"]) == 0
    assert "9.9531" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert main(["--device", "cpu", "--output", "deep/er"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["results: deep/er", "page: deep/er/index.html"]
    written = {path.name for path in (tmp_path / "deep" / "er").iterdir()}
    tables = {f"{name}.{ending}" for name in ("accumulation", "layer_norm", "dtypes") for ending in FORMATS}
    assert written == {*tables, "precision.json", "index.html"}
    with (tmp_path / "deep/er/accumulation.csv").open(newline="") as file:
        totals = [float(row["total"]) for row in csv.DictReader(file)]
    assert totals == pytest.approx([row.total for row in accumulation_study()])
