"""`cs336 compare`: files, exit statuses, refusals, and the order of what it measures."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from cs336 import cli
from cs336.commands import compare as command
from cs336.config import Profiler, RunConfig
from cs336.record import RunRecord, write_record
from cs336.report.compared import COMPARISON_FILE
from tests.report.making import make_config, make_record

pytestmark = pytest.mark.usefixtures("no_pictures", "here")
DATA = Path(__file__).parents[2] / "data" / "published"
ONE = "--device cpu --size tiny --context-length 8"


def compare(*argv: object) -> int:
    return cli.main(["compare", *map(str, argv)])


def sweep(name: str, *steps_s: float, **fields: object) -> Path:
    """A directory of one process for each context length from 128 on."""
    runs = Path(name) / "runs"
    runs.mkdir(parents=True)
    for i, step_s in enumerate(steps_s):
        write_record(make_record(make_config("small", 128 * 2**i, **fields), [step_s] * 5), runs)
    return Path(name)


def test_sweeps_on_disk_are_compared_and_nothing_is_written(here, capsys) -> None:
    a, b = sweep("a", 0.1, 0.2), sweep("b", 0.2, 0.2, 0.3)
    before = sorted(here.rglob("*"))
    assert compare(a, b) == 0
    assert sorted(here.rglob("*")) == before
    assert re.findall(r"slower|cannot tell|only in B", capsys.readouterr().out)[:3] == [
        "slower",
        "cannot tell",
        "only in B",
    ]


def test_records_of_other_conditions_are_refused_in_one_line_unless_allowed(here, capsys) -> None:
    profiled = make_record(make_config("small", profiler=Profiler.KINETO), [0.1] * 5)
    a, b = sweep("a", 0.1, 0.2), sweep("b", 0.2, 0.3)
    write_record(profiled, a / "runs")  # is left out, about which a refusal says nothing
    for path in (b / "runs").iterdir():
        path.write_text(path.read_text().replace(f'"{profiled.device_name}"', '"another"'))
    assert compare(a, b) == 2
    assert re.fullmatch(r"error: [^\n]*another[^\n]*\n", capsys.readouterr().err)
    assert compare(a, b, "--allow-mixed") == 0
    assert "note: 1 run under a profiler" in capsys.readouterr().err


@pytest.mark.parametrize("side", ["attention/bf16", "nowhere", "README.md"])
def test_what_holds_no_sweep_is_refused_in_one_line(side, capsys) -> None:
    assert compare(DATA / side, sweep("a", 0.1)) == 2
    assert re.fullmatch(
        rf"error: [^\n]*{re.escape(str(DATA / side))}[^\n]*\n", capsys.readouterr().err
    )


def test_equal_sides_are_refused_in_one_line_unless_asked_for(measured, capsys) -> None:
    a = sweep("a", 0.1)
    for sides in ((a, "./a"), (ONE, f" {ONE} --seed 0")):
        assert compare(*sides) == 2
        assert re.fullmatch(r"error: [^\n]*--a-against-a[^\n]*\n", capsys.readouterr().err)
        assert compare(*sides, "--a-against-a") == 0
        capsys.readouterr()


class Measured:
    """Stands in for the sweep: writes records, and keeps the order in which they were asked for."""

    def __init__(self) -> None:
        self.order: list[RunConfig] = []

    def __call__(self, configs: Sequence[RunConfig], directory: Path, *_: object) -> int:
        (directory / "runs").mkdir(parents=True, exist_ok=True)
        for config in configs:
            write_record(self.record(config), directory / "runs")
        self.order = list(configs)
        return 0

    @staticmethod
    def record(config: RunConfig) -> RunRecord:
        """A step that takes twice as long with another seed."""
        step_s = (
            config.model.context_length * (0.02 if config.seed else 0.01) + config.repeat * 1e-6
        )
        return make_record(config, [step_s] * 5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found = Measured()
    monkeypatch.setattr(command, "measure_all", found)
    return found


def test_the_runs_of_two_configurations_alternate(measured, here) -> None:
    assert compare(ONE, f"{ONE} --seed 1", "--repeats", "4") == 0
    assert "".join("AB"[config.seed] for config in measured.order) == "ABBAABBA"
    (directory,) = (here / "data/e2e_benchmark").iterdir()
    with (directory / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["verdict"], row["a_processes"], row["b_processes"]) for row in rows] == [
        ("slower", "4", "4")
    ]
    page = (directory / "index.html").read_text()
    assert (
        0 < page.index('id="findings"') < page.index('id="comparison"') < page.index('id="results"')
    )
    before = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    for path in directory.glob("comparison.[cmt]*"):
        path.unlink()
    assert {path.name for path in directory.glob("comparison.*")} == {COMPARISON_FILE}
    assert cli.main(["report", str(directory.parent)]) == 0
    assert {name: (directory / name).read_bytes() for name in before} == before


def test_a_baseline_is_kept_once_and_compared_with_later(here, capsys) -> None:
    """The results change from 100 to 50 ms: B is twice as fast, give or take what one process
    each can tell.
    """
    a = sweep("a", 0.1)
    assert compare(a, "--baseline", "before") == 0
    for path in (a / "runs").iterdir():
        path.unlink()
    write_record(make_record(make_config("small", 128), [0.05] * 5), a / "runs")
    capsys.readouterr()
    assert compare(a, "--baseline", "before") == 0
    assert re.fullmatch(
        r"B is 2\.0 ± 0\.3 times as fast as A .*", capsys.readouterr().out.splitlines()[-1]
    )
    assert len([*(here / "data/baselines/before/runs").iterdir()]) == 1
    named = ("--baseline", "x")
    for wrong in ((a,), (a, a, *named), (ONE, *named), (a, "--baseline", "/")):
        assert compare(*wrong) == 2
        assert "--baseline" in capsys.readouterr().err
