"""Commands do what they say and no more; what they refuse is in tests/commands/test_flags.py."""

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tyro

import cs336
from cs336 import cli
from cs336.analysis.kernels.step_profile import write_profile
from cs336.analysis.memory.profile import write_memory_profile
from cs336.commands import compare as compare_command
from cs336.commands.flags import MeasuringArguments
from cs336.commands.parse import parse
from cs336.config import Profiler, RunConfig
from cs336.record import RunRecord, Status, read_record, write_record
from cs336.sweep.store import explanation_path
from tests.report.making import make_config, make_failure, make_record
from tests.report.sections.kernels.profiles import make_profile
from tests.report.sections.memory.profiles import make_memory

pytestmark = pytest.mark.usefixtures("no_pictures")

ROOT = Path(__file__).parents[1]
STEP = [
    "--device",
    "cpu",
    "--vocab-size",
    "11",
    "--batch-size",
    "1",
    "--measured-steps",
    "2",
    "--warmup-steps",
    "2",
]
SMALL = [*STEP, "--d-model", "8", "--d-ff", "12", "--num-layers", "1", "--num-heads", "2"]
ONE, ONE_OF_OWN = [*SMALL, "--context-length", "8"], [*STEP, "--context-length", "8", "--model"]
GRID = [*SMALL, "--context-lengths", "8"]


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run, so that whatever they make is seen."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return directory


def status_of(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """What a shell would see: the parser exits by itself."""
    try:
        return command(argv)
    except SystemExit as error:
        return int(str(error.code))


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, *arguments]
    return subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=100, **options
    )


@pytest.mark.parametrize("command", [cli.benchmark, cli.sweep, cli.precision, cli.main])
def test_help_is_for_people_and_the_version_that_of_the_package(
    command: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(command, ["--version"]) == 0
    assert capsys.readouterr().out.split()[-1] == cs336.__version__
    assert status_of(command, ["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: ")
    assert "None" not in text
    assert "cs336_systems" not in text


def test_every_command_is_listed_and_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """The modules of commands/ that have a function to run are the commands."""
    files = (ROOT / "cs336_systems" / "commands").glob("*.py")
    modules = {path.stem for path in files if "\ndef run(" in path.read_text()}
    assert status_of(cli.main, ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 25, "fits a screen"
    listed = [name for name in re.findall(r"(?m)^  (\w+) ", "\n".join(lines)) if name != "cs336"]
    assert {cli.MODULES.get(name, name) for name in listed} == modules
    assert status_of(cli.main, ["Sweeps"]) == 2
    assert "did you mean sweep?" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80])
def test_the_list_of_commands_is_as_wide_as_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert status_of(cli.main, ["--help"]) == 0
    _, _, listed = capsys.readouterr().out.partition("Measure\n")
    listed, _, _ = listed.rpartition("\n\n")
    assert max(map(len, listed.splitlines())) <= width


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_help_of_a_command_begins_with_examples_that_it_takes(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert status_of(cli.main, [command, "--help"]) == 0
    usage, *lines = capsys.readouterr().out.splitlines()
    shown = [line.strip() for line in lines[1:4]]
    assert usage.startswith(f"usage: cs336 {command}")
    assert [shlex.split(line)[:2] for line in shown] == 3 * [["cs336", command]]
    assert max(map(len, lines[4:])) <= 70
    for line in shown:
        words = shlex.split(line)[1:]
        if command == "compare":
            words = cli._sides_apart(words)
        parse(cli._arguments(command), f"cs336 {command}", words[1:])


# One run


def test_a_table_says_where_the_record_is(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    assert cli.benchmark([*ONE, "--output", "elsewhere"]) == 0
    [path] = empty_directory.rglob("*.json")
    text = capsys.readouterr().out
    assert f"record: {path.relative_to(empty_directory)}\n" in text
    assert re.search(r"^custom +8 +fp32 .*±", text, re.MULTILINE)
    for phase in ("forward", "backward", "optimizer", "step"):
        assert phase in text


def test_the_same_run_again_keeps_the_earlier_one(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    """Record, trace and explanation stay together where reports read them; another run's files are
    left alone.

    The trace is named, with what opens it.
    """
    single = empty_directory / "data/kineto_profiles/single"
    (single / "runs").mkdir(parents=True)
    other = write_record(record(0.1), single / "runs")
    assert cli.benchmark([*ONE, "--profile"]) == 0
    out, err = capsys.readouterr()
    assert "kept as" not in err
    *_, trace, page = out.splitlines()
    assert "https://ui.perfetto.dev" in trace
    assert str(next(single.glob("traces/*")).relative_to(empty_directory)) in trace
    assert page == f"page: {single.relative_to(empty_directory)}/index.html"
    first = {path.relative_to(single): path.read_bytes() for path in single.glob("*/*")}
    del first[other.relative_to(single)]
    assert {path.parts[0] for path in first} == {"runs", "traces", "kernels"}
    assert cli.benchmark([*ONE, "--profile"]) == 0
    (kept,) = single.glob("runs/*.json.*Z")
    assert str(kept.relative_to(empty_directory)) in capsys.readouterr().err
    present = {path.relative_to(single): path.read_bytes() for path in single.glob("*/*")}
    stamp = kept.suffixes[-2] + kept.suffix
    assert {
        Path(str(path).removesuffix(stamp)): text
        for path, text in present.items()
        if str(path).endswith(stamp)
    } == first
    assert {path for path in present if not str(path).endswith(stamp)} == {
        *first,
        other.relative_to(single),
    }


@pytest.mark.parametrize(
    ("factory", "status", "record_status"),
    [("out_of_memory", 0, "oom"), ("ends_the_process", 1, "crashed"), ("interrupted", 130, None)],
)
def test_the_exit_status_says_how_it_ended(
    factory: str,
    status: int,
    record_status: str | None,
    empty_directory: Path,
    ctrl_c_is_heard: None,
) -> None:
    assert cli.benchmark([*ONE_OF_OWN, f"tests.own_models:{factory}"]) == status
    statuses = [json.loads(path.read_text())["status"] for path in empty_directory.rglob("*.json")]
    assert statuses == ([record_status] if record_status else [])


def test_a_step_that_the_machine_cannot_hold_is_refused_and_a_grid_goes_on(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    """The scores of half a million tokens need 0.5 TiB and more in each head of a block; none of
    them may be made.
    """
    assert cli.benchmark([*SMALL, "--context-length", str(2**19)]) == 2
    needed = (
        r"error: this step needs at least \d{4,}\.\d GiB of memory, and this machine has .* GiB.*\n"
    )
    assert re.fullmatch(needed, capsys.readouterr().err)
    assert [*empty_directory.iterdir()] == []
    grid = [*SMALL, "--context-lengths", "8", str(2**19)]
    assert cli.sweep([*grid, "--dry-run"]) == 0
    assert "will not fit: custom ctx 524288" in capsys.readouterr().out
    assert cli.sweep(grid) == 0
    records = [read_record(path) for path in empty_directory.glob("data/*/*/runs/*.json")]
    small, huge = sorted(records, key=lambda record: record.config.model.context_length)
    assert (huge.status, small.status) == (Status.OOM, Status.OK)
    assert "GiB of memory" in huge.failure.message


RAISES = """
def make(vocab_size):
    return helper(vocab_size)

def helper(vocab_size):
    raise ValueError("too small")
"""


def test_a_model_that_raises_is_shown_with_the_line_that_raised(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    (empty_directory / "raising.py").write_text(RAISES)
    assert cli.benchmark([*ONE_OF_OWN, "raising:make"]) == 1
    shown = capsys.readouterr().out
    assert 'File "raising.py", line 6, in helper\n    raise ValueError("too small")' in shown
    assert 'File "raising.py", line 3, in make' in shown
    assert 'File "cs336' not in shown
    assert str(empty_directory) not in shown
    assert cli.sweep([*STEP, "--context-lengths", "8", "--model", "raising:make"]) == 1
    assert "ValueError: too small (raising.py, line 6)" in capsys.readouterr().out


def test_a_directory_that_cannot_be_written_is_said_at_once(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    (empty_directory / "file").touch()
    for command, flags in (
        (cli.benchmark, ONE),
        (cli.sweep, GRID),
        (cli.main, ["compare", "--size tiny", "--size tiny", "--a-against-a"]),
    ):
        assert command([*flags, "--output", "file"]) == 1
        said = capsys.readouterr()
        *_, last = said.err.splitlines()
        assert re.fullmatch(
            r"error: file/e2e_benchmark/.*cannot write there .*choose another --output", last
        )
        assert said.out == ""
    assert [path.name for path in empty_directory.rglob("*")] == ["file"]


# Finished records


def record(step_s: float, repeat: int = 0, **changes: object) -> RunRecord:
    return make_record(make_config("tiny", repeat=repeat, **changes), (step_s,) * 3)


def directory_of(path: Path, records: Sequence[RunRecord]) -> Path:
    (path / "runs").mkdir(parents=True)
    for each in records:
        write_record(each, path / "runs")
    return path


def test_a_report_needs_no_torch_and_imports_no_model_that_a_record_names(
    empty_directory: Path,
) -> None:
    (empty_directory / "trap.py").write_text("open('sprung', 'w')\ndef model(vocab_size): pass\n")
    failed = make_failure(make_config("tiny", seed=1))
    sweep = directory_of(
        empty_directory / "sweep", [record(0.125), failed, record(0.5, model_factory="trap:model")]
    )
    code = """
import sys
class WithoutTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(name)
sys.meta_path.insert(0, WithoutTorch())
from cs336.cli import main
sys.exit(main())
"""
    done = run("-c", code, "report", "sweep", "--tex")
    assert done.returncode == 0, done.stderr
    with (sweep / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    means = sorted(
        (row["status"], row["step_mean_ms"] and float(row["step_mean_ms"])) for row in rows
    )
    assert means == [("ok", 125), ("ok", 500), ("oom", "")]
    assert {path.suffix for path in sweep.glob("results.*")} == {".csv", ".md", ".tex"}
    assert not (empty_directory / "sprung").exists()


def write_profile_of(run: RunRecord, runs: Path) -> Path:
    """A profile where its sweep would keep it."""
    is_memory = run.config.profiler is Profiler.MEMORY
    path = explanation_path(run.config, runs)
    path.parent.mkdir(exist_ok=True)
    if is_memory:
        write_memory_profile(make_memory(), path)
    else:
        write_profile(make_profile(), path)
    return path


def files_in(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("profiler", "table"), [(Profiler.MEMORY, "peaks.csv"), (Profiler.KINETO, "phases.csv")]
)
def test_a_report_does_not_write_over_tables_of_more_runs(
    profiler: Profiler,
    table: str,
    capsys: pytest.CaptureFixture[str],
    empty_directory: Path,
    no_pictures: None,
) -> None:
    """Three runs that ended well and one that ran out of memory, which need not have left a
    profile.
    """
    runs = [record(0.125, seed=seed, profiler=profiler) for seed in range(3)]
    runs.append(make_failure(make_config("tiny", seed=3, profiler=profiler)))
    sweep = directory_of(empty_directory / "sweep", runs)
    profiles = [write_profile_of(each, sweep / "runs") for each in runs[:3]]
    assert cli.main(["report", "sweep"]) == 0
    assert "are missing" not in capsys.readouterr().err
    profiles[0].unlink()
    profiles[1].write_text("{")
    before = (sweep / table).read_bytes()
    assert cli.main(["report", "sweep"]) == 0
    said = "warning: sweep: the profiles of 2 of 3 runs that ended well are missing, and the tables"
    assert said in capsys.readouterr().err
    assert (sweep / table).read_bytes() == before


READS = {
    "kernels": ("x.json", "kernels x.json"),
    "kernels, record": ("x.json", "kernels kernels.json --record x.json"),
    "memory": ("x.pickle", "memory x.pickle"),
    "memory, profile": ("x.json", "memory x.json"),
    "report": ("x", "report x"),
    "account": ("x/ceilings.json", "account --ceilings x"),
    "plan": ("x/ceilings.json", "plan --ceilings x"),
    "ladder, tokens": ("x.npy", "ladder --device cpu --tokens x.npy"),
    "ladder, model": ("x.py", "ladder --device cpu --model x:make"),
    "compare": ("x.json", "compare x.json x.json --a-against-a"),
    "compare, tokens": ("x.npy", "compare '--tokens x.npy --device cpu' '--device cpu'"),
    "compare, model": ("x.py", "compare '--device cpu' '--model x:make --device cpu'"),
    "benchmark, tokens": ("x.npy", "benchmark --device cpu --tokens x.npy"),
    "benchmark, model": ("x.py", "benchmark --device cpu --model x:make"),
    "kernels, rules": ("x.toml", "kernels kernels.json --rules x.toml"),
    "report, rules": ("x.toml", "report . --rules x.toml"),
    "sweep, tokens": ("x.npy", "sweep --device cpu --tokens x.npy"),
    "sweep, model": ("x.py", "sweep --device cpu --model x.y:make"),
}
"""For each file that a command reads, its name and a command line."""


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "another"])
@pytest.mark.parametrize("name", READS)
def test_a_file_that_is_missing_or_another_than_needed_is_wrong_usage(
    name: str, is_there: bool, capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    write_profile(make_profile(device_names=()), empty_directory / "kernels.json")
    write_memory_profile(make_memory(), empty_directory / "memory.json")
    file, line = READS[name]
    if is_there:
        (empty_directory / file).parent.mkdir(parents=True, exist_ok=True)
        (empty_directory / file).write_text("1")  # JSON and Python, and nothing that is needed
    before = files_in(empty_directory)
    command, *argv = shlex.split(line)
    assert cli.main([command, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]*\bx\b[^\n]*\n", err), err
    assert files_in(empty_directory) == before


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_no_file_that_a_command_reads_is_left_out_above(command: str) -> None:
    words = " ".join(line for _, line in READS.values() if line.startswith(command))
    for field in fields(cli._arguments(command)):
        is_positional = tyro.conf.Positional in getattr(field.type, "__metadata__", ())
        if "Path" in str(field.type) and field.name != "output" and not is_positional:
            assert f"--{field.name} " in words


def compare(*argv: object) -> int:
    return cli.main(["compare", *map(str, argv)])


@pytest.mark.parametrize(
    "sides", [("", "--no-ranges"), ("--sync-phases", ""), ("--precision=bf16", "--size tiny")]
)
def test_a_side_may_be_one_flag_or_none(
    sides: tuple[str, str], monkeypatch: pytest.MonkeyPatch, empty_directory: Path
) -> None:
    asked: list[RunConfig] = []
    monkeypatch.setattr(
        compare_command,
        "measure_all",
        lambda configs, *_, **__: asked.extend(configs) or cli.FAILED,
    )
    assert compare(*sides, "--repeats=2") == 1
    a, b = (next(config for config in asked if config.repeat % 2 == side) for side in (0, 1))
    assert len(asked) == 4
    assert ("--no-ranges" in sides) == (a.ranges and not b.ranges)
    assert ("--sync-phases" in sides) == (a.sync_phases and not b.sync_phases)
    assert ("--precision=bf16" in sides) == (a.precision == "bf16" and b.precision == "fp32")


def test_no_side_is_taken_from_an_earlier_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    """Its times are of another hour: alternately measured is what the verdict says and rests on."""
    directories: list[Path] = []

    def measure_nothing(
        configs: Sequence[RunConfig], directory: Path, measuring: MeasuringArguments
    ) -> int:
        if measuring.fresh:
            shutil.rmtree(directory / "runs")
        (directory / "runs").mkdir(parents=True, exist_ok=True)
        for config in configs:
            write_record(
                make_record(config, (0.1 + 0.001 * config.repeat,) * 3), directory / "runs"
            )
        directories.append(directory)
        return 0

    monkeypatch.setattr(compare_command, "measure_all", measure_nothing)
    baseline, first, second = (
        "--device cpu",
        "--device cpu --no-ranges",
        "--device cpu --sync-phases",
    )
    for b in (first, second, first):
        assert compare(baseline, b) == 0
    assert directories[0] == directories[2] != directories[1]
    assert compare(baseline, first, "--name", "mine") == 0
    assert compare(baseline, first, "--name", "mine", "--repeats", "6") == 0, "the same one goes on"
    capsys.readouterr()
    for sides in ((baseline, second), (first, baseline)):
        assert compare(*sides, "--name", "mine") == 2
        assert "mine holds another comparison" in capsys.readouterr().err
    assert len(directories) == 5, "nothing was measured"
    assert compare(baseline, second, "--name", "mine", "--fresh") == 0


# Real processes


def test_a_against_a_runs_every_process_and_writes_the_verdict(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    """Four processes of one configuration, two of a side."""
    flags = " ".join(ONE)
    assert compare(flags, flags, "--repeats", "2", "--a-against-a") == 0
    (base,) = (empty_directory / "data/e2e_benchmark").iterdir()
    records = [json.loads(path.read_text()) for path in sorted((base / "runs").iterdir())]
    assert sorted(r["config"]["repeat"] for r in records) == [0, 1, 2, 3]
    assert len({json.dumps(r["config"] | {"repeat": 0}) for r in records}) == 1
    times_s = {}
    for record in records:
        by_phase = {measured["phase"]: measured["times_s"] for measured in record["measurements"]}
        times_s[record["config"]["repeat"]] = by_phase["step"]
    step_ms = [1e3 * np.mean([times_s[0], times_s[2]]), 1e3 * np.mean([times_s[1], times_s[3]])]
    with (base / "comparison.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert [float(row[f"{side}_step_mean_ms"]) for side in "ab"] == pytest.approx(step_ms), (
        "even repeats are A, odd B"
    )
    assert (row["a_processes"], row["b_processes"]) == ("2", "2")
    assert "A against B" in capsys.readouterr().out


def test_a_sweep_measures_what_its_dry_run_promised(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    flags = [*GRID, "--modes", "train", "inference", "--name", "mine"]
    assert cli.sweep([*flags, "--dry-run"]) == 0
    promised = capsys.readouterr().out.splitlines()
    assert cli.sweep(flags) == 0
    base = empty_directory / "data/e2e_benchmark/mine"
    keys = [line.partition(":")[0] for line in promised[:-1]]
    assert promised[-1] == "2 runs into data/e2e_benchmark/mine"
    assert sorted(path.stem for path in (base / "runs").iterdir()) == sorted(keys)
    with (base / "results.csv").open(newline="") as file:
        assert sorted(row["mode"] for row in csv.DictReader(file)) == ["inference", "train"]
    assert json.loads((base / "environment.json").read_text())["identity"]["driver"] is None


def test_json_is_the_record_and_nothing_else(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    assert cli.benchmark([*ONE, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("statistics").keys() == {"step", "forward", "backward", "optimizer"}
    record = msgspec.convert(printed, type=RunRecord)
    assert record.status is Status.OK
    [path] = empty_directory.rglob("*.json")
    assert path == empty_directory / "data/e2e_benchmark/single/runs" / f"{record.key}.json"
    assert json.loads(path.read_text()) == printed
