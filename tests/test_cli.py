"""Hostile and mistaken command lines end at once, in one clear line; the others do what they say and no more."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tyro

import cs336_systems
from cs336_systems import cli
from cs336_systems.analysis.kernels.step_profile import write_profile
from cs336_systems.analysis.memory.profile import write_memory_profile
from cs336_systems.commands import compare as compare_command
from cs336_systems.config import SIZES, Device, OptimizerKind, Profiler, RunConfig
from cs336_systems.record import (
    Durations,
    Environment,
    Failure,
    Identity,
    Measurement,
    RunRecord,
    Status,
    read_record,
    write_record,
)
from cs336_systems.report.sections.memory.entries import load_memory
from cs336_systems.sweep.store import kernel_profile_path, memory_profile_path
from tests.report.sections.kernels.profiles import make_profile
from tests.report.sections.memory.profiles import make_memory

pytestmark = pytest.mark.usefixtures("no_pictures")

ROOT = Path(__file__).parents[1]
STEP = [
    "--device", "cpu", "--vocab-size", "11", "--batch-size", "1", "--measured-steps", "2", "--warmup-steps", "2",
]  # fmt: skip
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
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100, **options)


# What cannot be meant


INTEGERS = (
    "--batch-size", "--measured-steps", "--vocab-size", "--d-model", "--d-ff", "--num-layers", "--num-heads", "--seed",
    "--context-length", "--warmup-steps",
)  # fmt: skip
BAD_BENCHMARK = [[flag, "-1"] for flag in INTEGERS] + [
    ["--batch-size", "0"],
    ["--batch-size", str(10**18)],
    ["--seed", str(2**63)],
    ["--size", "../../x"],
    ["--size", ""],
    ["--size", "tiny\n\x1b[2J"],
    ["--size", "tiny", "--num-heads", "3"],
    ["--size", "small", "--d-model", "12"],
    ["--rope-theta", "nan"],
    ["--rope-theta", "-inf"],
    ["--sdpa-backend", "flash"],
    ["--compile-blocks"],
    ["--compile", "default", "--compile-blocks", "--model", "a:b\n"],
    ["--precision", "tf32", "--device", "cpu"],
    ["--mixed-precision", "--precision", "fp16"],
    ["--model", "os.system('true')"],
    ["--model", "../x:y"],
    ["--model", "no_such_module:make"],
    ["--model", "tests.own_models:no_such_factory"],
    ["--tokens", "caf\udce9.npy"],
]  # fmt: skip
BAD_NAMES = ["../../x", "nul\0", "", "caf\udce9"]
LINE, BOX = r"error: [^\n\x1b\0]{10,300}\n\Z", r"(?s)\s*\S"
BAD_SWEEP = [
    *([flag, "-1"] for flag in ("--batch-size", "--context-lengths", "--warmup-steps", "--repeats")),
    *(["--name=" + name] for name in BAD_NAMES),
    ["--context-lengths", "64", "--sizes", "tiny", "smal"],
    ["--context-lengths", "64", "0"],
    ["--modes", "train", "--precisions", "tf32", "--device", "cpu"],
    ["--model", "tests.no_such_module:make"],
    ["--mixed-precision", "--precisions", "fp16"],
    ["--timeout-s", "0"],
    ["--timeout-s", "nan"],
    ["--sizes"],
    ["--context-lengths", "64", "0", "--dry-run"],
]  # fmt: skip
BY_PARSER = ("--sizes", "--repeats", "--timeout-s")
BAD_COMPARE = [
    ["compare", "--size 'tiny", "--size tiny"],
    ["compare", "--size tiny", "--size ../../x"],
    ["compare", "--size tiny", "--d-model 0"],
    ["compare", "--size tiny", "--model no_such_module:make"],
    ["compare", "--size tiny", "--batch-size " + str(10**18)],
    ["compare", "--size tiny", "--no-such-flag 1"],
    ["compare", "--size tiny", "not/a/path"],
    ["compare", "--size tiny", "/"],
    ["compare", "not/a/path", "/"],
    ["compare", "--no-such-flag", "--ranges"],
    ["compare", "--size tiny " * 100, "--size ../../x"],
    ["compare", "--size tiny", "--size tiny", "--repeats", "0"],
    ["compare", "--size tiny", "--size tiny", "--repeats", "1"],
    ["compare", "--size tiny", "--size tiny", "--repeats", str(10**18)],
    ["compare", "--size tiny", "--size tiny", "--timeout-s", "-1"],
    *(["compare", "--size tiny", "--size tiny", "--name=" + name] for name in BAD_NAMES),
]
BAD_REPORT = [
    ["report"],
    ["report", "nothing here"],
    ["report", "nul\0"],
    ["report", ".", ".."],
    ["no-such-command"],
    [],
]
BAD_SYNTAX = [
    ["--batch-size", "abc"], ["--batch-size", "1.5"], ["--batch-size", "1e3"], ["--batch-size", "9" * 5000],
    ["--batch-size"], ["--mode", "sideways"], ["--precision", "fp64"], ["--no-such-flag"], ["--siz", "tiny"], ["tiny"],
    ["--rope-theta", "pi"],
]  # fmt: skip


ASK = """
import contextlib, io, json, sys
from cs336_systems import cli
answers = []
for command, argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = getattr(cli, command)(argv)
        except SystemExit as error:
            status = error.code
    answers.append((status, out.getvalue(), err.getvalue()))
json.dump(answers, sys.stdout)
assert "torch" not in sys.modules
import psutil
assert not psutil.Process().children()
"""


def test_what_cannot_be_meant_is_refused_before_torch_is_imported_or_a_process_started(empty_directory: Path) -> None:
    """All in one fresh process, as soon as the shell prompt should be back; the parser draws a box around its words."""
    lines = [("benchmark", argv, LINE) for argv in BAD_BENCHMARK]
    lines += [("sweep", argv, BOX if argv[0] in BY_PARSER else LINE) for argv in BAD_SWEEP]
    lines += [("main", argv, BOX) for argv in BAD_COMPARE + BAD_REPORT]
    lines += [("benchmark", argv, rf"(?s).*{re.escape(argv[0])}") for argv in BAD_SYNTAX]
    done = run("-c", ASK, input=json.dumps([line[:2] for line in lines]))
    assert done.returncode == 0, done.stderr[-2000:]
    for (command, argv, pattern), (status, out, err) in zip(lines, json.loads(done.stdout), strict=True):
        assert (status, out) == (2, ""), (command, argv)
        assert re.match(pattern, err), (command, argv, err)
        assert "Traceback" not in err, (command, argv)
    assert not list(empty_directory.iterdir())


@pytest.mark.parametrize("command", [cli.benchmark, cli.sweep, cli.precision, cli.main])
def test_help_is_for_people(command: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(command, ["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: ")
    assert "None" not in text
    assert "cs336_systems" not in text


def test_every_command_is_listed_and_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """The modules of commands/ that have a function to run are the commands."""
    files = (ROOT / "cs336_systems" / "commands").glob("*.py")
    commands = {path.stem for path in files if "\ndef run(" in path.read_text()}
    assert status_of(cli.main, ["--help"]) == 0
    (listed,) = re.findall(r"^usage: [^{]*\{([^}]*)\}", capsys.readouterr().out)
    assert set(re.findall(r"\w+", listed)) == commands


@pytest.mark.parametrize(
    ("name", "argv"),
    [("benchmark", ["--size", "tiny"]), ("sweep", ["--sizes", "tiny", "--dry-run"]), ("precision", ["--json"])],
)
@pytest.mark.parametrize("status", [cli.OK, cli.FAILED])
def test_a_subcommand_does_what_the_script_of_its_name_does(
    name: str, argv: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    monkeypatch.setattr(cli._module(name), "run", lambda arguments: given.append(arguments) or status)
    script = {"benchmark": cli.benchmark, "sweep": cli.sweep, "precision": cli.precision}[name]
    assert [script(argv), cli.main([name, *argv])] == [status, status]
    by_script, by_subcommand = given
    assert by_script == by_subcommand


@pytest.mark.parametrize("command", [cli.benchmark, cli.sweep, cli.precision, cli.main])
def test_the_version_is_that_of_the_package(
    command: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(command, ["--version"]) == 0
    assert capsys.readouterr().out.split()[-1] == cs336_systems.__version__


# Dry runs


def test_a_dry_run_says_what_would_run_and_does_nothing(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    flags = ["--sizes", "tiny", "small", "--context-lengths", "64", "128", "--device", "cpu", "--dry-run"]
    assert cli.sweep(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("tiny_ctx64_b4_train_fp32_")
    assert lines[0].endswith(": tiny ctx 64 train fp32, 5 + 10 steps")
    assert lines[4] == "4 runs into data/e2e_benchmark/train_fp32_sizes-tiny-small_context-lengths-64-128_cpu"
    assert not list(empty_directory.iterdir())


@pytest.mark.parametrize("value", ["0", str(10**18)])
def test_any_seed_is_meant(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.sweep(["--seed", value, "--device", "cpu", "--dry-run"]) == 0
    assert "3 runs into" in capsys.readouterr().out


# One run


def test_json_is_the_record_and_nothing_else(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    assert cli.benchmark([*ONE, "--json"]) == 0
    text = capsys.readouterr().out
    record = msgspec.json.decode(text, type=RunRecord)
    assert record.status is Status.OK
    [path] = empty_directory.rglob("*.json")
    assert path == empty_directory / "data/e2e_benchmark/single/runs" / f"{record.key}.json"
    assert path.read_text() == text


def test_json_is_alone_though_the_model_prints(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    assert cli.benchmark([*ONE_OF_OWN, "tests.own_models:talkative", "--json"]) == 0
    printed = capsys.readouterr()
    assert msgspec.json.decode(printed.out, type=RunRecord).status is Status.OK
    assert "hello from the factory" in printed.err


def test_without_json_a_table_says_where_the_record_is(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    assert cli.benchmark([*ONE, "--output", "elsewhere"]) == 0
    [path] = empty_directory.rglob("*.json")
    text = capsys.readouterr().out
    assert f"record: {path.relative_to(empty_directory)}\n" in text
    assert re.search(r"^custom +8 +fp32 .*±", text, re.MULTILINE)
    for phase in ("forward", "backward", "optimizer", "step"):
        assert phase in text


def test_the_same_run_again_keeps_the_earlier_one(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    """Record, trace and explanation stay together where reports read them; another run's files are left alone.

    The trace is named, with what opens it.
    """
    single = empty_directory / "data/kineto_profiles/single"
    (single / "runs").mkdir(parents=True)
    other = write_record(record(0.1), single / "runs")
    assert cli.benchmark([*ONE, "--profile"]) == 0
    out, err = capsys.readouterr()
    assert "kept in" not in err
    assert "https://ui.perfetto.dev" in out.splitlines()[-1]
    assert str(next(single.glob("traces/*")).relative_to(empty_directory)) in out.splitlines()[-1]
    first = {path.relative_to(single): path.read_bytes() for path in single.rglob("*") if path.is_file()}
    del first[other.relative_to(single)]
    assert {path.parts[0] for path in first} == {"runs", "traces", "kernels"}
    assert cli.benchmark([*ONE, "--profile"]) == 0
    (kept,) = single.glob("before-*")
    assert str(kept.relative_to(empty_directory)) in capsys.readouterr().err
    assert {path.relative_to(kept): path.read_bytes() for path in kept.rglob("*") if path.is_file()} == first
    present = {path.relative_to(single) for path in single.glob("[!b]*/*")}
    assert present == {*first, other.relative_to(single)}
    assert cli.main(["report", str(kept)]) == 0


@pytest.mark.parametrize(
    ("factory", "status", "record_status"),
    [("out_of_memory", 0, "oom"), ("ends_the_process", 1, "crashed"), ("interrupted", 130, None)],
)
def test_the_exit_status_says_how_it_ended(
    factory: str, status: int, record_status: str | None, empty_directory: Path, ctrl_c_is_heard: None
) -> None:
    assert cli.benchmark([*ONE_OF_OWN, f"tests.own_models:{factory}"]) == status
    statuses = [json.loads(path.read_text())["status"] for path in empty_directory.rglob("*.json")]
    assert statuses == ([record_status] if record_status else [])


def test_a_step_that_the_machine_cannot_hold_is_refused_and_a_grid_goes_on(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    """The scores of half a million tokens need 4 TiB in each head of one block; nothing of them may be made."""
    assert cli.benchmark([*SMALL, "--context-length", str(2**19)]) == 2
    needed = r"error: this step needs at least \d{4,}\.\d GiB of memory, and this machine has .* GiB.*\n"
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
    assert "cs336_systems" not in shown
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
        (cli.main, ["compare", "--size tiny", "--size tiny"]),
    ):
        assert command([*flags, "--output", "file"]) == 1
        said = capsys.readouterr()
        assert re.fullmatch(
            r"error: file/e2e_benchmark/.*cannot write there .*choose another --output", said.err.strip()
        )
        assert said.out == ""
    assert [path.name for path in empty_directory.rglob("*")] == ["file"]


# Finished records


IDENTITY = Identity(device_name="a CPU", driver=None, torch="2.13.0", code="0123456789abcdef")
ENVIRONMENT = Environment(
    identity=IDENTITY, python="3.11", platform="Linux", host="h", cpu="a CPU", cpu_count=2, torch_threads=1,
    float32_matmul_precision="highest", package_version="0",
)  # fmt: skip


def record(step_s: float, repeat: int = 0, **changes: object) -> RunRecord:
    config = RunConfig(size="tiny", model=replace(SIZES["tiny"], context_length=128), repeat=repeat, **changes)
    return RunRecord(
        config=config, status=Status.OK, started_at="2026-01-01T00:00:00+00:00", environment=ENVIRONMENT,
        measurements=(Measurement(config.phases[0], (step_s / 2,) * 3), Measurement("step", (step_s,) * 3)),
        losses=(9.0,), num_parameters=1, durations=Durations(setup_s=0, warmup_s=0, measured_s=1, total_s=1),
    )  # fmt: skip


def directory_of(path: Path, records: Sequence[RunRecord]) -> Path:
    (path / "runs").mkdir(parents=True)
    for each in records:
        write_record(each, path / "runs")
    return path


def test_a_report_needs_no_torch_and_imports_no_model_that_a_record_names(empty_directory: Path) -> None:
    (empty_directory / "trap.py").write_text("open('sprung', 'w')\ndef model(vocab_size): pass\n")
    failed = replace(
        record(1.0, seed=1), status=Status.OOM, measurements=(), failure=Failure(message="no memory", where="step 1")
    )
    sweep = directory_of(
        empty_directory / "sweep",
        [record(0.125), replace(failed, environment=None), record(0.5, model_factory="trap:model")],
    )
    (sweep / "runs" / "broken.json").write_text("{")
    code = """
import sys
class WithoutTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(name)
sys.meta_path.insert(0, WithoutTorch())
from cs336_systems.cli import main
sys.exit(main())
"""
    done = run("-c", code, "report", "sweep")
    assert done.returncode == 1, done.stderr
    assert re.match(r"warning: sweep/runs/broken\.json: not a record of a run: .*\n", done.stderr)
    with (sweep / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    means = sorted((row["status"], row["step_mean_ms"] and float(row["step_mean_ms"])) for row in rows)
    assert means == [("ok", 125), ("ok", 500), ("oom", "")]
    assert {path.suffix for path in sweep.glob("results.*")} == {".csv", ".md", ".tex", ".typ"}
    assert not (empty_directory / "sprung").exists()
    assert (sweep / "runs" / "broken.json").read_text() == "{", "a report leaves the records alone"


def test_records_of_graphs_get_their_tables_and_twins(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    """A graph needs steps before it, which no other way to name the run may take away. Here each has a recorded one."""
    fast = {"optimizer": OptimizerKind.FUSED, "cuda_graph": True}
    plain = [record(0.125, device=Device.CUDA, **fast), record(0.25, device=Device.CUDA, optimizer=OptimizerKind.FUSED)]
    recorded = record(0.5, profiler=Profiler.MEMORY, device=Device.CUDA, optimizer=OptimizerKind.FUSED)
    sweep = directory_of(empty_directory / "sweep", [*plain, recorded])
    write_profile_of(recorded, sweep / "runs")
    assert cli.main(["report", "sweep"]) == 0
    with (sweep / "results.csv").open(newline="") as file:
        steps = sorted(float(row["step_mean_ms"]) for row in csv.DictReader(file))
    assert steps == [125, 250], "what recorded its memory has no times"
    (entry,) = load_memory([*plain, recorded], sweep)
    assert entry.plain == plain[1], "the graph's memory is another"
    assert load_memory([plain[0], recorded], sweep)[0].plain is None
    assert "Traceback" not in capsys.readouterr().err


def write_profile_of(run: RunRecord, runs: Path) -> Path:
    """A profile where its sweep would keep it."""
    is_memory = run.config.profiler is Profiler.MEMORY
    path = (memory_profile_path if is_memory else kernel_profile_path)(run.config, runs)
    path.parent.mkdir(exist_ok=True)
    if is_memory:
        write_memory_profile(make_memory(), path)
    else:
        write_profile(make_profile(), path)
    return path


def files_in(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("profiler", "table"), [(Profiler.MEMORY, "peaks.csv"), (Profiler.KINETO, "phases.csv")])
def test_a_report_does_not_write_over_tables_of_more_runs(
    profiler: Profiler, table: str, capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    """Three runs that ended well and one that ran out of memory, which need not have left a profile."""
    runs = [record(0.125, seed=seed, profiler=profiler, device=Device.CUDA) for seed in range(4)]
    runs[3] = replace(runs[3], status=Status.OOM, measurements=(), failure=Failure(message="no memory"))
    sweep = directory_of(empty_directory / "sweep", runs)
    profiles = [write_profile_of(each, sweep / "runs") for each in runs[:3]]
    assert cli.main(["report", "sweep"]) == 0
    assert "are missing" not in capsys.readouterr().err
    profiles[0].unlink()
    profiles[1].write_text("{")
    before = files_in(sweep)
    for words in ([], ["--output", "sweep"], ["--output", str(sweep)]):
        assert cli.main(["report", "sweep", *words]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: sweep: the profiles of 2 of 3 runs that ended well are missing")
        assert last.endswith("--output")
        assert files_in(sweep) == before
    assert cli.main(["report", "sweep", "--output", "elsewhere"]) == 0
    assert "warning: sweep: the profiles of 2 of 3 runs" in capsys.readouterr().err
    whole, rest = ((place / table).read_text().splitlines() for place in (sweep, empty_directory / "elsewhere"))
    assert len(whole) - 1 == 3 * (len(rest) - 1) > 0


READS = {
    "kernels": ("x.json", "kernels x.json"),
    "kernels, record": ("x.json", "kernels kernels.json --record x.json"),
    "memory": ("x.pickle", "memory x.pickle"),
    "memory, profile": ("x.json", "memory x.json"),
    "memory, record": ("x.json", "memory memory.json --record x.json"),
    "report": ("x", "report x"),
    "ceilings, measured": ("x.json", "ceilings --device cpu --measured x.json"),
    "ceilings, profile": ("x.json", "ceilings --device cpu --profile x.json"),
    "ceilings, record": ("x.json", "ceilings --device cpu --profile kernels.json --record x.json"),
    "account": ("x/ceilings.json", "account --ceilings x"),
    "scale": ("x/ceilings.json", "scale --ceilings x"),
    "ladder": ("x", "ladder --report x"),
    "ladder, tokens": ("x.npy", "ladder --device cpu --tokens x.npy"),
    "ladder, model": ("x.py", "ladder --device cpu --model x:make"),
    "compare": ("x.json", "compare x.json x.json"),
    "compare, tokens": ("x.npy", "compare '--tokens x.npy --device cpu' '--device cpu'"),
    "compare, model": ("x.py", "compare '--device cpu' '--model x:make --device cpu'"),
    "benchmark, tokens": ("x.npy", "benchmark --device cpu --tokens x.npy"),
    "benchmark, model": ("x.py", "benchmark --device cpu --model x:make"),
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


def test_two_directories_of_records_are_compared(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    fast = directory_of(empty_directory / "fast", [record(0.100 + i / 1e4, i) for i in range(5)])
    slow = directory_of(empty_directory / "slow", [record(0.200 + i / 1e4, i) for i in range(5)])
    before = sorted(empty_directory.rglob("*"))
    for a, b, verdict in (
        (fast, slow, "B is slower than A"),
        (slow, fast, "B is faster than A"),
        (fast, fast, "Cannot tell"),
    ):
        assert compare(a, b) == 0
        assert verdict in " ".join(capsys.readouterr().out.split())
    assert compare(fast / "runs", slow) == 0
    assert sorted(empty_directory.rglob("*")) == before, "nothing is written"


def test_a_side_that_is_no_directory_is_named(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    directory_of(empty_directory / "there", [record(0.1, i) for i in range(2)])
    assert compare("there", "their") == 2
    assert capsys.readouterr().err.startswith("error: their: no such directory or record")
    assert compare("there", "--size tiny") == 2
    assert "both be directories" in capsys.readouterr().err


def test_a_broken_record_among_others_is_said(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    directory_of(empty_directory / "side", [record(0.1, i) for i in range(2)])
    (empty_directory / "side" / "runs" / "broken.json").write_text("{")
    assert compare("side", "side") == 0
    assert capsys.readouterr().err.count("warning: side/runs/broken.json: not a record of a run") == 2


def test_a_side_without_any_time_is_said_to_have_none(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    fine = directory_of(empty_directory / "fine", [record(0.1, i) for i in range(2)])
    failed = [
        replace(record(0.1, i), status=Status.OOM, measurements=(), failure=Failure(message="no memory"))
        for i in range(2)
    ]
    assert compare(fine, directory_of(empty_directory / "failed", failed)) == 1
    printed, said = capsys.readouterr()
    assert "out of memory" in printed
    assert said == "error: no configuration ended well on both sides, so nothing could be compared\n"


@pytest.mark.parametrize("sides", [("", "--no-ranges"), ("--sync-phases", ""), ("--precision=bf16", "--size tiny")])
def test_a_side_may_be_one_flag_or_none(
    sides: tuple[str, str], monkeypatch: pytest.MonkeyPatch, empty_directory: Path
) -> None:
    asked: list[RunConfig] = []
    monkeypatch.setattr(compare_command, "measure_all", lambda configs, *_, **__: asked.extend(configs) or cli.FAILED)
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

    def measure_nothing(configs: Sequence[RunConfig], directory: Path, *_: object) -> int:
        (directory / "runs").mkdir(parents=True, exist_ok=True)
        for config in configs:
            write_record(replace(record(0.1 + 0.001 * config.repeat), config=config), directory / "runs")
        directories.append(directory)
        return 0

    monkeypatch.setattr(compare_command, "measure_all", measure_nothing)
    baseline, first, second = "--device cpu", "--device cpu --no-ranges", "--device cpu --sync-phases"
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--profile", "a profiler makes a run slower"),
        ("--json", "leave out --json"),
        ("--output x", "leave out --output"),
    ],
)
def test_a_side_is_a_plain_run_and_no_more(
    flags: str, said: str, capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    assert compare("--device cpu", f"--device cpu {flags}") == 2
    assert said in capsys.readouterr().err
    assert not list(empty_directory.iterdir())


def test_a_report_does_not_write_over_tables_of_records_that_it_cannot_read(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    sweep = directory_of(
        empty_directory / "sweep", [record(0.1, precision=precision) for precision in ("fp32", "bf16")]
    )
    assert cli.main(["report", "sweep"]) == 0
    before = files_in(sweep)
    min((sweep / "runs").iterdir()).write_text("{")
    damaged = files_in(sweep)
    assert cli.main(["report", "sweep"]) == 2
    assert "1 record cannot be read, and the tables there would lose them" in capsys.readouterr().err
    assert files_in(sweep) == damaged != before
    assert cli.main(["report", "sweep", "--output", "elsewhere"]) == 1, "a file is damaged"
    assert len((empty_directory / "elsewhere" / "results.csv").read_text().splitlines()) == 2


def test_a_report_of_records_made_under_other_conditions_says_so(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    other = replace(ENVIRONMENT, identity=replace(IDENTITY, torch="2.12.0"))
    elsewhere = replace(ENVIRONMENT, identity=replace(IDENTITY, device_name="another CPU"))
    directory_of(empty_directory / "a", [record(0.1)])
    directory_of(empty_directory / "b", [replace(record(0.1, precision="bf16"), environment=other)])
    directory_of(empty_directory / "c", [replace(record(0.1), environment=elsewhere)])
    assert cli.main(["report", "a", "b", "--output", "ab"]) == 0
    assert "warning: the records come from different drivers, torch or code" in capsys.readouterr().err
    assert cli.main(["report", "a", "c", "--output", "ac"]) == 0
    assert "warning" not in capsys.readouterr().err, "a device has rows of its own"


def test_unlike_records_are_not_compared_unless_told(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
    other = replace(ENVIRONMENT, identity=replace(IDENTITY, torch="2.12.0"))
    a = directory_of(empty_directory / "a", [record(0.1, i) for i in range(2)])
    b = directory_of(empty_directory / "b", [replace(record(0.1, i), environment=other) for i in range(2)])
    assert compare(a, b) == 2
    assert "--allow-mixed" in capsys.readouterr().err
    assert compare(a, b, "--allow-mixed") == 0
    mixed = directory_of(empty_directory / "mixed", [record(0.1, 0), record(0.1, 0, seed=1)])
    capsys.readouterr()
    assert compare(a, mixed, "--allow-mixed") == 0
    assert "only in B" in capsys.readouterr().out, "two configurations are a sweep"


# Real processes


def test_a_against_a_runs_every_process_and_writes_the_verdict(
    capsys: pytest.CaptureFixture[str], empty_directory: Path
) -> None:
    """Four processes of one configuration, two of a side."""
    flags = " ".join(ONE)
    assert compare(flags, flags, "--repeats", "2") == 0
    (base,) = (empty_directory / "data/e2e_benchmark").iterdir()
    records = [json.loads(path.read_text()) for path in sorted((base / "runs").iterdir())]
    assert sorted(r["config"]["repeat"] for r in records) == [0, 1, 2, 3]
    assert len({json.dumps(r["config"] | {"repeat": 0}) for r in records}) == 1
    by_start = {r["config"]["repeat"]: r for r in records}
    step_ms = [
        1e3 * np.mean([next(m["times_s"] for m in by_start[repeat]["measurements"] if m["phase"] == "step")
                       for repeat in (side, side + 2)])
        for side in (0, 1)
    ]  # fmt: skip
    with (base / "comparison.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert [float(row[f"{side}_step_mean_ms"]) for side in "ab"] == pytest.approx(step_ms), "even repeats are A, odd B"
    assert (row["a_processes"], row["b_processes"]) == ("2", "2")
    assert "A against B" in capsys.readouterr().out


def test_a_sweep_measures_what_its_dry_run_promised(capsys: pytest.CaptureFixture[str], empty_directory: Path) -> None:
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
    assert "2 runs in" in capsys.readouterr().out


def test_a_reader_who_has_read_enough_is_no_error() -> None:
    """`cs336 --help | head`: the pipe is closed before anything is written."""
    command = subprocess.Popen(
        [sys.executable, "-m", "cs336_systems", "--help"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.stderr is not None
    assert command.stderr.read() == b""
    assert command.wait(timeout=60) == 0
