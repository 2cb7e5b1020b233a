"""`cs336 kernels` from end to end: what it prints and writes, and what it says of a file that is
no profile.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336.analysis.kernels.step_profile import decode_profile, write_profile
from cs336.cli import main
from cs336.config import SIZES, OptimizerKind, RunConfig
from cs336.record import RunRecord, Status, write_record
from tests.analysis.kernels.tracing import Recording, training, write_export
from tests.publish import publish
from tests.report.sections.kernels.profiles import make_profile

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Three steps of a training loop by nsys."""
    return write_export(tmp_path / "t.sqlite", training(3))


def kernels(*words: object) -> int:
    return main(["kernels", *map(str, words)])


def test_a_file_is_explained_in_tables(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels(export) == 0
    said = capsys.readouterr().out
    for words in ("The GPU is", "Phases of a step", "Classes of kernels", "forward"):
        assert words in said


def test_what_is_written_is_read_again(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernels(export, "--output", tmp_path / "out", "--typ") == 0
    printed = capsys.readouterr().out
    assert str(tmp_path / "out") in printed, "where the files are"
    assert decode_profile((tmp_path / "out" / "profile.json").read_bytes()).source == "t.sqlite"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "phases.csv",
        "phases.md",
        "phases.typ",
        "kernels.csv",
        "profile.json",
        "plots",
    } <= names
    assert kernels(tmp_path / "out" / "profile.json") == 0
    again, _, page = capsys.readouterr().out.rpartition("page: ")
    assert printed.startswith(again)
    assert Path(page.strip()).is_file()


def test_a_trace_of_no_length_has_its_tables(tmp_path: Path) -> None:
    """Its step and all that is in it take no time, of which nothing is a share."""
    assert (
        kernels(write_export(tmp_path / "t.sqlite", Recording()), "--output", tmp_path / "out") == 0
    )
    assert not list((tmp_path / "out").glob("plots/*"))
    assert kernels(tmp_path / "out" / "profile.json") == 0


def test_a_range_that_the_file_has_not_is_refused(
    export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Silently all kernels, those of the warm-up too, would be of no phase."""
    for words in (("--forward", "fward"), ("--step", "iteration")):
        assert kernels(export, *words) == 2
        said = capsys.readouterr().err
        assert (
            f"no range has the name '{words[1]}' that was given for {words[0][2:]}; the names are: "
            in said
        )
        assert "backward" in said, "what there is to choose from"
    assert kernels(export, "--forward", "x", "--backward", "x") == 2
    assert "range name of its own" in capsys.readouterr().err
    assert kernels(export, "--forward", "forward") == 0


def test_the_record_of_the_run_gives_attention_its_flops(export: Path, tmp_path: Path) -> None:
    from cs336.commands.explain import KernelsArguments

    (tmp_path / "reports").mkdir()
    (tmp_path / "runs").mkdir()
    config = RunConfig(size="tiny", model=SIZES["tiny"])
    record = RunRecord(config=config, status=Status.OOM, started_at="2026-11-21T00:00:00+00:00")
    path = write_record(record, tmp_path / "runs")
    assert KernelsArguments(file=export).record_and_others() == (None, [])
    given = KernelsArguments(file=export, record=path)
    in_reports = KernelsArguments(file=tmp_path / "reports" / f"{config.key}.nsys-rep")
    in_traces = KernelsArguments(file=tmp_path / "traces" / f"{config.key}.json.gz")
    for arguments in (given, in_reports, in_traces):
        assert arguments.record_and_others() == (record, [record])
    publish(tmp_path)
    for arguments in (in_reports, in_traces):
        assert arguments.record_and_others() == (record, [record])


def test_the_record_says_which_advice_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An optimizer of a quarter of the step: what is advised depends on the run, here and in
    findings.md.
    """
    profile, run = tmp_path / "profile.json", RunConfig(size="tiny", model=SIZES["tiny"])
    write_profile(make_profile(), profile)
    said = {}
    for kind in (OptimizerKind.ADAMW, OptimizerKind.FOREACH, OptimizerKind.FUSED):
        record = RunRecord(
            config=replace(run, optimizer=kind),
            status=Status.OOM,
            started_at="2026-11-21T00:00:00Z",
        )
        path = write_record(record, tmp_path)
        assert kernels(profile, "--record", path, "--output", tmp_path / kind) == 0
        said[kind] = "--optimizer fused" in capsys.readouterr().out
        assert ("--optimizer fused" in (tmp_path / kind / "findings.md").read_text()) is said[kind]
    assert said == {
        OptimizerKind.ADAMW: True,
        OptimizerKind.FOREACH: True,
        OptimizerKind.FUSED: False,
    }


def test_a_damaged_profile_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f").write_bytes(b'{"source": 1, "work": 2, "phases_from": 3}')
    assert kernels(tmp_path / "f", "--output", tmp_path / "out") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "f") in said
    assert "not a step profile" in said
    assert not (tmp_path / "out").exists()


def test_a_report_without_nsys_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "r.nsys-rep").write_bytes(b"x")
    assert kernels(tmp_path / "r.nsys-rep") == 1
    assert "install" in capsys.readouterr().err
