"""Whatever the analysis of a profile dies of, the run keeps its record and its raw profile, and
is explained later.
"""

import shutil
import sys

import pytest

from cs336 import cli
from cs336.analysis.kernels.step_profile import decode_profile
from cs336.config import Profiler
from cs336.record import Status, load_records
from cs336.sweep import isolation, keep, run
from cs336.sweep.store import explanation_path, raw_profile_path
from tests.faults import analyses
from tests.faults.analyses import HANGING, NOTES
from tests.faults.harness import (
    ROOT,
    Witness,
    command,
    config,
    contents,
    lay_out_models,
    sweep,
    time_is_up,
)

pytestmark = pytest.mark.usefixtures("no_pictures")

WATCHED = config(profiler=Profiler.KINETO)


@pytest.fixture(scope="module")
def unexplained(tmp_path_factory, preloaded):
    """What a sweep of one profiled run leaves whose analysis has a defect."""
    directory = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        lay_out_models(directory)
        patch.setattr(keep, "explain_in_worker", analyses.raises)
        outcome = sweep(directory / "sweep", WATCHED)
    assert outcome.unexplained == (WATCHED,)
    return directory / "sweep"


@pytest.fixture
def measured(unexplained, place):
    """The same, in the test's own directory."""
    return shutil.copytree(unexplained, place / "sweep", copy_function=shutil.copy2)


def explanation(directory):
    return explanation_path(WATCHED, directory / "runs")


def raw(directory):
    return raw_profile_path(WATCHED, directory / "runs")


def kept(directory):
    """What no explanation may change."""
    return contents(directory / "runs"), contents(raw(directory).parent)


def explained(directory):
    return decode_profile(explanation(directory).read_bytes())


def assert_explained(directory):
    assert explained(directory).num_steps == WATCHED.measured_steps


@pytest.mark.parametrize("is_damaged", [False, True])
def test_where_no_process_can_be_forked_the_report_explains_by_itself(
    measured, monkeypatch, is_damaged, capsys
):
    monkeypatch.setattr(run, "IS_POSIX", False)
    monkeypatch.setattr(isolation, "Worker", None)
    if is_damaged:
        raw(measured).write_bytes(b"no trace")
    assert cli.main(["report", str(measured)]) == int(is_damaged)
    assert explanation(measured).exists() != is_damaged
    assert (raw(measured).name in capsys.readouterr().err) == is_damaged
    if not is_damaged:
        assert_explained(measured)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", r"KeyError: 'no such lane\n\x1b' (analyses.py:"),
        ("segfault", "died of SIGSEGV"),
        ("takes_all_memory", "out of memory"),
        ("cannot_write", "Is a directory"),
        ("hangs", "not done within"),
    ],
)
def test_whatever_the_analysis_dies_of_the_next_sweep_explains_without_measuring(
    measured, monkeypatch, fault, words
):
    before = kept(measured)
    witness = Witness()
    with monkeypatch.context() as patch, time_is_up(lambda _: HANGING.exists()):
        patch.setattr(keep, "explain_in_worker", getattr(analyses, fault))
        outcome = sweep(measured, WATCHED, witness=witness)
    assert (witness.runs, witness.explaining_runs, outcome.unexplained) == (
        [],
        [WATCHED],
        (WATCHED,),
    )
    ((_, failure),) = witness.explanations
    assert words in failure
    assert failure.isprintable()
    assert f"cs336 report {measured}" in failure
    assert kept(measured) == before
    HANGING.unlink(missing_ok=True)
    if explanation(measured).is_dir():
        explanation(measured).rmdir()
    witness = Witness()
    outcome = sweep(measured, WATCHED, witness=witness)
    assert (witness.runs, witness.explanations, outcome.unexplained) == ([], [(WATCHED, None)], ())
    assert kept(measured) == before
    assert_explained(measured)


def report(monkeypatch, analysis, directory, *words):
    """`cs336 report` in a process of its own, whose workers explain by `analysis`."""
    code = (
        "import sys; from cs336 import cli; from cs336.sweep import keep; from "
        f"tests.faults import analyses; keep.explain_in_worker = analyses.{analysis}; "
        "sys.exit(cli.main())"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return [sys.executable, "-c", code, "report", str(directory), *words]


def test_a_report_with_rules_explains_traces_again_by_them(measured):
    rules = measured / "rules.toml"
    rules.write_text("'^aten::mm$' = \"other\"\n")
    assert cli.main(["report", str(measured)]) == 0
    assert "matrix product" in {row.kind for row in explained(measured).classes}
    assert cli.main(["report", str(measured), "--rules", str(rules)]) == 0
    kinds = {row.name: row.kind for row in explained(measured).kernels}
    assert kinds["aten::mm"] == "other"


def test_a_report_explains_what_is_missing_and_says_so(measured, launch, monkeypatch):
    """Neither it nor its workers import torch: no CUDA context is made, and no second is spent."""
    before = kept(measured)
    done = launch(report(monkeypatch, "notes_its_modules", measured))
    assert done.wait() == 0, done.stderr
    assert f"explaining the profile of {WATCHED.label}" in done.stderr
    assert "torch" not in NOTES.read_text().split()
    assert kept(measured) == before
    assert_explained(measured)
    assert (measured / "phases.csv").is_file()


def test_a_damaged_raw_profile_is_named_and_kept(measured, capsys):
    raw(measured).write_bytes(raw(measured).read_bytes()[:1000])
    before = kept(measured)
    assert cli.main(["report", str(measured)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not explained" in line]
    assert raw(measured).name in line
    witness = Witness()
    assert sweep(measured, WATCHED, witness=witness).unexplained == (WATCHED,)
    assert witness.runs == []
    assert kept(measured) == before


def test_a_profiled_sweep_that_cannot_be_explained_ends_with_status_1_and_its_tables(
    place, monkeypatch, capsys
):
    words = [*command("good", contexts=(4,))[2:], "--profile"]
    folder = place / "data" / "kineto_profiles" / "faulty"
    with monkeypatch.context() as patch:
        patch.setattr(keep, "explain_in_worker", analyses.raises)
        assert cli.sweep(words) == 1
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if "not explained" in line]
    assert "no such lane" in line
    assert {record.status for record in load_records(folder / "runs")[0]} == {Status.OK}
    assert len((folder / "results.csv").read_text().splitlines()) == 2
    before = contents(folder / "runs")
    assert cli.sweep(words) == 0
    assert "not explained" not in capsys.readouterr().err
    (explained,) = (folder / "kernels").iterdir()
    tables = contents(folder)["phases.csv"][0]
    # without the raw profile there is nothing to explain again: that is said, and costs neither a
    # run nor the tables
    (trace,) = (folder / "traces").iterdir()
    explained.unlink()
    trace.unlink()
    assert cli.sweep(words) == 1
    said = capsys.readouterr().err
    assert "no kernel profile" in said
    assert (
        "the profiles of 1 of 1 runs that ended well are missing, and the tables of profiles stay"
        in said
    )
    assert contents(folder)["phases.csv"][0] == tables
    assert contents(folder / "runs") == before
