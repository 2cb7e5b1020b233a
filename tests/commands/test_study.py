"""The exit status of studies: a cell that crashed is a failure of the command, one that ran out of memory a result."""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.cli import main
from cs336_systems.record import Status
from cs336_systems.studies import runner
from cs336_systems.studies.operators import Version
from tests.report.page.parsed import Parsed
from tests.report.studies import (
    Implementation,
    make_cell,
    make_failed,
    make_fusion,
    make_lost_row,
    make_result,
    make_row,
    make_study,
)

pytestmark = pytest.mark.usefixtures("no_pictures")


def attention_of(ended: Status):
    return make_study(make_result(make_cell()), make_failed(make_cell(Implementation.FLASH), status=ended))


def fusion_of(ended: Status):
    return make_fusion(make_row(), replace(make_lost_row(version=Version.FUSED), status=ended))


@pytest.mark.parametrize(
    ("ended", "status"), [(Status.OOM, 0), (Status.UNAVAILABLE, 0), (Status.CRASHED, 1), (Status.TIMEOUT, 1)]
)
@pytest.mark.parametrize(("command", "study_of"), [("attention", attention_of), ("fusion", fusion_of)])
def test_a_cell_that_crashed_is_exit_status_1(
    command: str, study_of, ended: Status, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_study", lambda *_: study_of(ended))
    assert main([command, "--device", "cpu", "--output", str(tmp_path)]) == status


@pytest.mark.parametrize(("command", "study_of"), [("attention", attention_of), ("fusion", fusion_of)])
def test_a_study_ends_with_naming_its_page_which_has_its_tables(
    command: str, study_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "run_study", lambda *_: study_of(Status.OOM))
    assert main([command, "--device", "cpu", "--name", "mine", "--output", str(tmp_path)]) == 0
    page = tmp_path / command / "mine" / "index.html"
    assert capsys.readouterr().out.splitlines()[-1] == f"page: {page}"
    assert "results.0.0" in Parsed(page.read_text()).cells
    made = page.read_bytes()
    page.unlink()
    assert main(["report", str(page.parent)]) == 0
    assert page.read_bytes() == made
