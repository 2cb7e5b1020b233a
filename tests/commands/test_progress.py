"""Every command that may take longer than two seconds says on standard error what it does."""

import re
from pathlib import Path

import pytest

import cs336_systems.report.results
import cs336_systems.report.sections.ceilings
import cs336_systems.report.sections.ladder
import cs336_systems.report.sections.operators
import cs336_systems.studies.runner
import cs336_systems.sweep.run
from cs336_systems import cli
from cs336_systems.analysis.kernels.step_profile import write_profile
from cs336_systems.analysis.memory.profile import write_memory_profile
from cs336_systems.record import Failure, Status, write_record
from cs336_systems.report import progress
from cs336_systems.sweep.ladder import write_ladder
from cs336_systems.sweep.run import Outcome
from tests.report.ladders import make_ladder, make_records
from tests.report.making import make_config, make_environment, make_record
from tests.report.sections.kernels.profiles import make_profile
from tests.report.sections.memory.profiles import make_memory

pytestmark = pytest.mark.usefixtures("no_pictures")

TINY = "--device cpu --vocab-size 11 --d-model 8 --d-ff 12 --num-layers 1 --num-heads 2 --measured-steps 2"
COMMANDS = {
    "benchmark": (f"{TINY} --context-length 8 --warmup-steps 2", "PyTorch", "making", "warm-up", "timed steps: 2"),
    "sweep": (f"{TINY} --context-lengths 4 8 --warmup-steps 2", "PyTorch", "1 of 2: ", "2 of 2: ", "writing"),
    "compare": (f"'{TINY} --context-length 4' '{TINY} --context-length 8' --repeats 3", "PyTorch", "6 of 6: "),
    "precision": ("--device cpu", "PyTorch", "adding up", "autocast"),
    "fusion": ("--device cpu", "PyTorch", "1 of 12: gelu eager fp32", "12 of 12: ", "writing"),
    "attention": ("--device cpu", "PyTorch", "1 of 12: naive", "12 of 12: ", "writing"),
    "ceilings": (
        "--device cpu --sizes 16 32 --presets --step-presets --precisions fp32 --memory-mib 1 --loops 2 --loop-s 0.001",
        *("PyTorch", "1 of 12: fp32 product 16 x 16 x 16", "6 of 12: launches", "12 of 12: launches", "writing"),
    ),
    "ladder": ("--device cpu --no-reasons", "reading", "writing"),
    "report": ("sweep", "reading", "writing"),
    "kernels": ("kernels.json", "reading kernels.json"),
    "memory": ("memory.json", "reading memory.json"),
}
"""What to run, and what is said meanwhile, in this order."""
QUICK = {"account", "scale"}


def do_not(*_):
    """Draw, which takes its time."""


def make_files() -> None:
    write_profile(make_profile(), Path("kernels.json"))
    write_memory_profile(make_memory(), Path("memory.json"))
    for name, records in (("ladder", make_records(make_ladder())), ("sweep", [make_record(make_config(), (0.1,))])):
        Path(name, "runs").mkdir(parents=True)
        for record in records:
            write_record(record, Path(name, "runs"))
    write_ladder(make_ladder(), Path("ladder", "ladder.json"))


def fake_sweep(configs, directory, listener, **_):
    (directory / "runs").mkdir(parents=True)
    records = [make_record(config, (0.1, 0.2)) for config in configs]
    listener.planned([], configs, [])
    for record in records:
        listener.started(record.config, None)
        write_record(record, directory / "runs")
        listener.finished(record)
    return Outcome(records=records, measured=records, interrupted=False)


def fake_study(grid, announce, on_progress=do_not):
    """The runner, but for the measuring."""
    cells = [cell for group in grid.groups() for cell in group]
    announce("importing PyTorch", 0, 0)
    for done, cell in enumerate(cells):
        announce(cell.label, done, len(cells))
    rows = tuple(row for cell in cells for row in cell.failed(Status.OOM, Failure(message="fake")))
    study = grid.study(rows, make_environment("a CPU"))
    on_progress(study)
    return study


@pytest.mark.parametrize("name", COMMANDS)
def test_what_takes_longer_says_what_it_does(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "LARGE_BYTES", 0)
    monkeypatch.setattr(progress, "LEAST_APART_S", 0.0)
    for module, function, fake in (
        (cs336_systems.sweep.run, "run_sweep", fake_sweep),
        (cs336_systems.studies.runner, "run_study", fake_study),
        (cs336_systems.report.sections.ladder, "write_ladder_report", do_not),
        (cs336_systems.report.results, "write_files", do_not),
    ):
        monkeypatch.setattr(module, function, fake)
    make_files()
    words, *said = COMMANDS[name]
    argv = [part.strip("'") for part in re.findall(r"'[^']*'|\S+", words)]
    assert cli.main([name, *argv]) == 0
    out, err = capsys.readouterr()
    lines = re.findall(r"^\[ *\d+\.\d s\] (.+)$", err, re.MULTILINE)
    found = [next((i for i, line in enumerate(lines) if part in line), None) for part in said]
    assert None not in found, lines
    assert found == sorted(found)
    assert not re.search(r"^\[ *\d+\.\d s\]", out, re.MULTILINE)
    assert (out + err).count("results: ") <= 1, "where the results are is said once"


def test_no_command_is_left_out() -> None:
    assert COMMANDS.keys() | QUICK == {*cli.COMMANDS}
