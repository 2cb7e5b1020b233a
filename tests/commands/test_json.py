"""`--json`: JSON alone on standard output, its quantities in SI units."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from cs336 import cli
from cs336.analysis.kernels.step_profile import write_profile
from cs336.analysis.memory.profile import write_memory_profile
from cs336.analysis.statistics import summary
from cs336.commands.account import AccountArguments
from cs336.costs.accounting import component_flops
from cs336.costs.fit import largest_batch
from cs336.costs.memory import predict_memory
from cs336.report.terminal import print_run
from tests.report.making import make_config, make_record
from tests.report.sections.kernels.profiles import make_profile
from tests.report.sections.memory.profiles import make_memory

pytestmark = pytest.mark.usefixtures("no_pictures", "here")

SCALED = re.compile(r"(_(ms|us|ns|kib|mib|gib|kb|mb|gb|percent|pct)|tflops(_per_s)?|gb_per_s)$")
GIB = 2**30


@pytest.fixture
def results(capsys: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """What a command prints with --json, after a look at the names in it."""

    def run(*words: object, command: Callable[..., int] = cli.main) -> object:
        assert command([*map(str, words), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [
            name for name in names(found) if SCALED.search(name) and name != "bucket_mib"
        ] == [], "but for a flag"
        return found

    return run


def names(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for part in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from names(part)


def test_an_account_has_every_number_of_its_tables(results: Callable[..., dict]) -> None:
    words = ("--size", "small", "--context-length", "128")
    config = AccountArguments(size="small", context_length=128).config()
    found = results("account", *words, "--fit", "--memory-gib", "40")
    flops = sum(part.step for part in component_flops(config))
    assert found["parts"][-1]["component"] == "all"
    assert found["parts"][-1]["step_flops"] == flops
    assert found["memory"]["peak"]["allocated_bytes"] == predict_memory(config).peak.allocated_bytes
    assert found["fit"]["memory_bytes"] == 40 * GIB
    assert found["fit"]["largest_batch_size"] == largest_batch(config, 40 * GIB)
    assert results("account", *words)["fit"] is None, "nobody asked"


def test_an_account_of_an_own_model_has_no_shape_that_is_not_its_own(
    results: Callable[..., dict],
) -> None:
    """The run has fields for one, which no model of this name has."""
    found = results("account", "--model", "tests.own_models:bigram", "--context-length", "8")
    shape = found["config"]["model"]
    assert shape["context_length"] == 8
    for name in ("arch", "rope_theta", "d_model", "d_ff", "num_layers", "num_heads"):
        assert shape[name] is None


def test_a_plan_has_its_training_in_si_units(results: Callable[..., dict]) -> None:
    words = (
        "plan",
        "--size",
        "small",
        "--gpus",
        "8xH100",
        "--tokens",
        "1B",
        "--global-batch",
        "512",
    )
    plan = results(*words)
    fastest = plan["front"][0]
    steps = ceil(1e9 / plan["step_tokens"])
    assert plan["step_tokens"] == 512 * plan["config"]["model"]["context_length"]
    assert plan["training_s"] == pytest.approx(steps * fastest["step_s"])
    assert plan["gpu_hours"] == pytest.approx(8 * plan["training_s"] / 3600)


def test_profiles_are_what_their_files_hold(results: Callable[..., dict], here: Path) -> None:
    write_profile(make_profile(), here / "kernels.json")
    found = results("kernels", "kernels.json")
    walls_s = found["phases"][0]["wall_s"]
    statistics = found.pop("statistics")[found["phases"][0]["phase"]]
    assert (statistics["mean_s"], statistics["median_s"]) == pytest.approx(
        (np.mean(walls_s), np.median(walls_s))
    )
    assert statistics["stdev_s"] == pytest.approx(np.std(walls_s, ddof=1))
    assert found == json.loads((here / "kernels.json").read_text())
    write_memory_profile(make_memory(), here / "memory.json")
    assert results("memory", "memory.json") == json.loads((here / "memory.json").read_text())


def test_a_run_has_statistics_beside_its_raw_times(capsys: pytest.CaptureFixture[str]) -> None:
    times_s = (0.1, 0.4, 0.2, 0.7)
    record = make_record(make_config(), times_s)
    found = summary(times_s)
    expected = [
        np.mean(times_s),
        np.median(times_s),
        np.std(times_s, ddof=1),
        min(times_s),
        max(times_s),
    ]
    assert [*found] == ["mean_s", "median_s", "stdev_s", "min_s", "max_s"]
    assert [*found.values()] == pytest.approx(expected)
    print_run(record)
    assert "Minimum 100.0, median 300.0, maximum 700.0 ms in 4 steps" in capsys.readouterr().out


def test_nothing_of_a_library_or_a_child_process_is_among_the_json(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """They write to the descriptor itself, which a replacement of sys.stdout does not reach."""
    import os

    from cs336.commands.outcome import json_alone

    with json_alone(True) as print_json:
        os.system("echo from a child")
        os.write(1, b"from C\n")
        print_json(b"{}\n")
    os.write(1, b"later\n")
    out, err = capfd.readouterr()
    assert out == "{}\nlater\n"
    assert err == "from a child\nfrom C\n"


def test_what_a_user_s_code_prints_at_the_end_is_not_among_the_json() -> None:
    code = """
import atexit
from cs336.commands.outcome import json_alone
with json_alone(True) as print_json:
    atexit.register(print, "at exit")
    print_json(b"{}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{}", "at exit\n")
