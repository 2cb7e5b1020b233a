"""`cs336 ladder`: what its flags mean, what it runs and in which order, what it writes, and what
it refuses.
"""

import contextlib
import csv
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import cs336.sweep.run
from cs336.cli import main
from cs336.commands import configure, machine
from cs336.commands import ladder as command
from cs336.commands.ladder import LadderArguments
from cs336.config import Profiler, RunConfig
from cs336.record import RunRecord, Status, load_records, write_record
from cs336.sweep.keep import Listener
from cs336.sweep.ladder import reason_run
from cs336.sweep.run import Outcome
from cs336.sweep.store import exclusive
from tests.report.ladders import FALLING
from tests.report.making import make_failure, make_record

pytestmark = pytest.mark.usefixtures("no_pictures", "here")

CPU = ["--device", "cpu"]
SMALL = [
    *CPU,
    "--context-length",
    "64",
    "--batch-size",
    "4",
    "--vocab-size",
    "503",
    "--d-model",
    "64",
    "--d-ff",
    "128",
    "--num-layers",
    "2",
    "--num-heads",
    "2",
]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H200, as far as the command looks."""
    for module in (configure, machine, command):
        monkeypatch.setattr(module, "visible_gpus", lambda: (SimpleNamespace(name="NVIDIA H200"),))


def ladder(*words: str) -> int:
    return main(["ladder", *words])


# What the flags mean


def test_defaults_on_a_gpu(h200: None) -> None:
    """Karpathy's: gpt2, batch 16, context 1024."""
    arguments = LadderArguments()
    base, runs = arguments.base(), arguments.runs(arguments.ladder())
    assert (base.size, base.batch_size, base.model.context_length) == ("gpt2", 16, 1024)
    assert (base.warmup_steps, base.measured_steps) == (10, 10)
    assert base.learning_rate == pytest.approx(0.005 / 768)
    assert arguments.directory() == Path("data/ladder/gpt2_ctx1024_b16_NVIDIA-H200")
    assert len(arguments.ladder()) == 17
    assert len(runs) == 3 * 17 + 17


def test_defaults_on_a_cpu() -> None:
    arguments = LadderArguments(device="cpu")
    base = arguments.base()
    assert (base.size, base.batch_size, base.model.context_length) == ("tiny", 4, 128)
    assert [rung.name for rung in arguments.ladder()] == [
        "fp32",
        "bf16",
        "compile",
        "attention",
        "fused",
        "blocks",
    ]
    assert arguments.directory() == Path("data/ladder/tiny_ctx128_b4_cpu")


def test_runs_go_up_the_ladder_and_down_again_then_the_profiles() -> None:
    arguments = LadderArguments(device="cpu", rungs=("bf16", "fused"), repeats=2)
    rungs = arguments.ladder()
    runs = arguments.runs(rungs)
    low, middle, high = (rung.config for rung in rungs)
    assert runs[:6] == (
        low,
        middle,
        high,
        *(replace(config, repeat=1) for config in (high, middle, low)),
    )
    assert runs[6:] == tuple(map(reason_run, rungs))


def test_a_dry_run_names_the_rungs_and_makes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ladder(*CPU, "--dry-run", "--rungs", "bf16", "fused", "--name", "x") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said[:3]] == ["fp32", "bf16", "fused"]
    assert said[3] == "6 runs into data/ladder/x"
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    "words", [["--rungs", "fp8"], ["--warmup-steps", "30", "--measured-steps", "0"]], ids=" ".join
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(words: list[str], here: Path) -> None:
    with contextlib.suppress(SystemExit):  # the parser's
        assert ladder(*CPU, *words) == 2
    assert not list(here.iterdir())


# What it does with what the sweep gives, which is made up here


class FakeSweep:
    """Takes the place of the sweep: writes a record for each run; the first rung may fail in it."""

    def __init__(self, first_fails: Status | None = None, interrupted: bool = False) -> None:
        self.calls: list[tuple[RunConfig, ...]] = []
        self.first_fails = first_fails
        self.interrupted = interrupted

    def __call__(
        self, configs: tuple[RunConfig, ...], directory: Path, listener: Listener, **options: object
    ) -> Outcome:
        self.calls.append(tuple(configs))
        (directory / "runs").mkdir(exist_ok=True)
        for config in configs:
            if config.profiler is Profiler.NONE:
                write_record(self._record(config, configs[0]), directory / "runs")
        for config in configs:
            listener.finished(self._record(config, configs[0]))
        records, _ = load_records(directory / "runs")
        return Outcome(
            records=tuple(records), measured=tuple(records), interrupted=self.interrupted
        )

    def _record(self, config: RunConfig, first: RunConfig) -> RunRecord:
        if self.first_fails and config.configuration == first:
            return make_failure(config, self.first_fails)
        return replace(make_record(config, (0.1, 0.1)), losses=FALLING)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSweep:
    sweep = FakeSweep()
    monkeypatch.setattr(cs336.sweep.run, "run_sweep", sweep)
    return sweep


def gates(directory: Path) -> dict[str, str]:
    with (directory / "ladder.csv").open() as file:
        return {row["rung"]: row["gate"] for row in csv.DictReader(file)}


def test_a_crash_of_the_first_rung_calls_for_another_try_and_not_for_another_run(
    fake: FakeSweep,
) -> None:
    fake.first_fails = Status.CRASHED
    assert ladder(*SMALL, "--no-reasons", "--name", "x", "--rungs", "bf16") == 1
    assert len(fake.calls) == 1
    assert gates(Path("data/ladder/x")) == {"fp32": "", "bf16": "no verdict"}


def test_an_interrupted_ladder_is_reported_as_far_as_it_is(
    fake: FakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.interrupted = True
    assert ladder(*SMALL, "--no-reasons", "--name", "x", "--rungs", "bf16") == 130
    assert "goes on from here" in capsys.readouterr().err
    assert set(gates(Path("data/ladder/x"))) == {"fp32", "bf16"}


def test_another_ladder_does_not_write_over_the_tables(
    fake: FakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--no-reasons", "--name", "x", "--rungs", "bf16"]
    assert ladder(*words) == 0
    before = Path("data/ladder/x/ladder.md").read_bytes()
    assert ladder(*words, "--seed", "7") == 2
    assert "holds the ladder of another step" in capsys.readouterr().err
    assert Path("data/ladder/x/ladder.md").read_bytes() == before
    assert ladder(*words) == 0, "the same one goes on"
    assert ladder(*words, "--seed", "7", "--fresh") == 0


def test_a_second_ladder_in_the_directory_of_one_that_runs_changes_nothing(fake: FakeSweep) -> None:
    words = [*SMALL, "--no-reasons", "--name", "x", "--rungs"]
    assert ladder(*words, "bf16") == 0
    before = Path("data/ladder/x/ladder.json").read_bytes()
    with exclusive(Path("data/ladder/x/.lock"), "the first"):
        assert ladder(*words, "fused") == 1
    assert Path("data/ladder/x/ladder.json").read_bytes() == before


# The whole of it


def test_the_command_measures_judges_and_explains(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ladder(*SMALL, "--rungs", "bf16", "--repeats", "2", "--name", "x") == 0
    directory = here / "data" / "ladder" / "x"
    with (directory / "ladder.csv").open() as file:
        first, second = csv.DictReader(file)
    assert [row["rung"] for row in (first, second)] == ["fp32", "bf16"]
    for row in (first, second):
        assert (row["status"], row["processes"], row["gate"]) == ("ok", "2", "passed")
        assert float(row["tokens_per_s"]) == pytest.approx(
            4 * 64 / float(row["step_mean_ms"]) * 1e3, rel=1e-6
        )
        assert float(row["launches_per_step"]) > 100
        assert row["compile_s"] == ""
    runs = [json.loads(path.read_text()) for path in directory.glob("runs/*.json")]
    means_s: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for run in runs:
        by_phase = {measured["phase"]: measured["times_s"] for measured in run["measurements"]}
        if run["config"]["profiler"] == "none":
            means_s[run["config"]["precision"]].append(statistics.fmean(by_phase["step"]))
    fp32, bf16 = map(statistics.geometric_mean, means_s.values())
    assert float(second["speed_up_over_last"]) == pytest.approx(fp32 / bf16, rel=1e-6)
    assert second["speed_up_over_last_ci95_low"] == "", "two processes give no interval"
    assert float(first["distance_largest"]) == 0, "the same on the same machine, to the bit"
    assert 0 < float(second["distance_largest"]) < float(second["bound"])
    assert {"environment.json", "ladder.json", "ladder.md", "plots", "runs"} <= {
        path.name for path in directory.iterdir()
    }
    assert "From the slow way to the fast way" in capsys.readouterr().out
