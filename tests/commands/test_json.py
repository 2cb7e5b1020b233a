"""`--json` in every command that prints a result: JSON alone on standard output, its quantities in SI units."""

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import cs336_systems.sweep.run
from cs336_systems import cli
from cs336_systems.analysis.kernels.step_profile import write_profile
from cs336_systems.analysis.memory.profile import write_memory_profile
from cs336_systems.commands.account import AccountArguments
from cs336_systems.commands.benchmark import statistics_of
from cs336_systems.config import Profiler
from cs336_systems.costs.accounting import component_flops, mfu
from cs336_systems.costs.memory import largest_batch, predict_memory
from cs336_systems.record import write_record
from cs336_systems.report.terminal import print_run
from cs336_systems.studies.ceilings_files import shipped
from cs336_systems.sweep.run import Outcome
from cs336_systems.sweep.store import kernel_profile_path
from tests.report.making import H200, make_config, make_failure, make_record
from tests.report.sections.kernels.profiles import make_profile
from tests.report.sections.memory.profiles import make_memory

pytestmark = pytest.mark.usefixtures("no_pictures")

SCALED = re.compile(r"(_(ms|us|ns|kib|mib|gib|kb|mb|gb|percent|pct)|tflops(_per_s)?|gb_per_s)$")
GIB = 2**30


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def results(capsys: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """What a command prints with --json, after a look at the names in it."""

    def run(*words: object, command: Callable[..., int] = cli.main) -> object:
        assert command([*map(str, words), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [name for name in names(found) if SCALED.search(name) and name != "bucket_mib"] == [], "but for a flag"
        return found

    return run


def names(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from names(part)


def sweep_of(directory: Path, *step_times_s: float, **changes: object) -> Path:
    """A sweep whose one configuration took so long in each of its processes."""
    (directory / "runs").mkdir(parents=True)
    for repeat, step_s in enumerate(step_times_s):
        write_record(make_record(make_config(repeat=repeat, **changes), (step_s,) * 3), directory / "runs")
    return directory


def test_a_report_has_the_rows_of_its_csv_in_si_units(results: Callable[..., dict], here: Path) -> None:
    sweep = sweep_of(here / "sweep", 0.5, 0.25, 0.75)
    failed, profiled = make_config("xl"), make_config(profiler=Profiler.KINETO)
    write_record(make_failure(failed), sweep / "runs")
    write_record(make_record(profiled, (9.0,)), sweep / "runs")
    kernel_profile_path(profiled, sweep / "runs").parent.mkdir()
    write_profile(make_profile(), kernel_profile_path(profiled, sweep / "runs"))
    found = results("report", "sweep")
    assert found["directory"] == "sweep"
    ok, oom = found["results"]
    assert (ok["size"], ok["status"], ok["processes"], ok["error"]) == ("small", "ok", 3, None)
    assert ok["step_mean_s"] == pytest.approx(0.5)
    assert ok["step_ci95_low_s"] < 0.5 < ok["step_ci95_high_s"]
    assert ok["peak_allocated_bytes"] == GIB
    assert ok["predicted_peak_bytes"] == predict_memory(make_config()).peak.allocated_bytes
    flops = sum(part.step for part in component_flops(make_config()))
    assert ok["model_flops_per_s"] == pytest.approx(flops / 0.5)
    assert ok["mfu"] == pytest.approx(mfu(flops / 0.5, H200, make_config().precision))
    assert (oom["size"], oom["status"], oom["step_mean_s"]) == ("xl", "oom", None)
    (explained,) = found["kernels"]
    assert explained["key"] == profiled.key
    assert explained["profile"]["num_steps"] == make_profile().num_steps
    assert found["memory"] == []


def test_a_sweep_prints_what_its_report_does(
    results: Callable[..., dict], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(configs, directory, listener, **_):
        (directory / "runs").mkdir(parents=True)
        records = [make_record(config, (0.5,)) for config in configs]
        for record in records:
            write_record(record, directory / "runs")
        print("some library has its say")
        return Outcome(records=records, measured=records, interrupted=False)

    monkeypatch.setattr(cs336_systems.sweep.run, "run_sweep", measure)
    flags = ("--device", "cpu", "--name", "x")
    planned = results(*flags, "--dry-run", command=cli.sweep)
    assert [run["model"]["context_length"] for run in planned["runs"]] == [64, 128, 256]
    measured = results(*flags, command=cli.sweep)
    assert [row["step_mean_s"] for row in measured["results"]] == [0.5] * 3
    assert results("report", "data/e2e_benchmark/x") == measured


def test_a_comparison_is_its_ratio_and_what_it_rests_on(results: Callable[..., dict], here: Path) -> None:
    a, b = sweep_of(here / "a", 0.10, 0.11, 0.12), sweep_of(here / "b", 0.20, 0.22, 0.24)
    (row,) = results("compare", a, b)["results"]
    assert (row["verdict"], row["a_processes"]) == ("slower", 3)
    assert (row["a_step_mean_s"], row["b_step_mean_s"]) == (pytest.approx(0.11), pytest.approx(0.22))
    assert row["ratio"] == pytest.approx(2)


def test_a_ladder_names_its_rungs(results: Callable[..., dict]) -> None:
    planned = results("ladder", "--device", "cpu", "--dry-run")
    assert [rung["name"] for rung in planned["rungs"]][:2] == ["fp32", "bf16"]


def shipped_best(device_name: str, precision: str) -> float:
    """The highest rate among all products of this precision in the studies that come with the program."""
    cells = [cell for study in shipped(device_name) for cell in study.products if cell.precision == precision]
    return max(cell.shape.flops / statistics.median(cell.timing.loops.times_s) * cell.timing.loops.count
               for cell in cells if cell.timing.loops)  # fmt: skip


def test_an_account_has_every_number_of_its_tables(results: Callable[..., dict]) -> None:
    words = ("--size", "small", "--context-length", "128")
    config = AccountArguments(size="small", context_length=128).config()
    found = results("account", *words, "--fit", "--memory-gib", "40", "--step-ms", "20", "--device-name", "H200")
    flops = sum(part.step for part in component_flops(config))
    assert found["parts"][-1]["component"] == "all"
    assert found["parts"][-1]["step_flops"] == flops
    assert found["rates"]["mfu"] == pytest.approx(mfu(flops / 0.02, H200, config.precision))
    ceiling = shipped_best(H200, config.precision)
    assert found["rates"]["ceiling_share"] == pytest.approx(flops / 0.02 / ceiling)
    assert found["memory"]["peak"]["allocated_bytes"] == predict_memory(config).peak.allocated_bytes
    assert found["fit"]["memory_bytes"] == 40 * GIB
    assert found["fit"]["largest_batch_size"] == largest_batch(config, 40 * GIB)
    assert results("account", *words)["fit"] is None, "nobody asked"


def test_a_number_of_parameters_has_seconds_and_parameters(results: Callable[..., dict]) -> None:
    found = results(
        *("account", "--parameters", "1e9", "--tokens", "1e12"),
        *("--peak-tflops", "1000", "--count", "2", "--memory-gib", "80"),
    )
    assert found["training"]["training_s"] == pytest.approx(6e21 / (2 * 1e15 * 0.5))
    assert found["training"]["peak_flops_per_s"] == pytest.approx(1e15)
    assert found["largest_model"]["parameters"] == pytest.approx(2 * 80 * GIB / 16)


def test_profiles_are_what_their_files_hold(results: Callable[..., dict], here: Path) -> None:
    write_profile(make_profile(), here / "kernels.json")
    assert results("kernels", "kernels.json") == json.loads((here / "kernels.json").read_text())
    write_memory_profile(make_memory(), here / "memory.json")
    assert results("memory", "memory.json") == json.loads((here / "memory.json").read_text())


def test_a_run_has_statistics_beside_its_raw_times(capsys: pytest.CaptureFixture[str]) -> None:
    times_s = (0.1, 0.4, 0.2, 0.7)
    record = make_record(make_config(), times_s)
    found = statistics_of(record)["step"]
    expected = [np.mean(times_s), np.median(times_s), np.std(times_s, ddof=1), min(times_s), max(times_s)]
    assert [*found] == ["mean_s", "median_s", "stdev_s", "min_s", "max_s"]
    assert [*found.values()] == pytest.approx(expected)
    print_run(record)
    assert "Minimum 100.0, median 300.0, maximum 700.0 ms in 4 steps" in capsys.readouterr().out


def test_nothing_of_a_library_or_a_child_process_is_among_the_json(capfd: pytest.CaptureFixture[str]) -> None:
    """They write to the descriptor itself, which a replacement of sys.stdout does not reach."""
    import os

    from cs336_systems.commands.outcome import json_alone

    with json_alone(True) as print_json:
        os.system("echo from a child")
        os.write(1, b"from C\n")
        print_json(b"{}\n")
    os.write(1, b"later\n")
    out, err = capfd.readouterr()
    assert out == "{}\nlater\n"
    assert err == "from a child\nfrom C\n"
