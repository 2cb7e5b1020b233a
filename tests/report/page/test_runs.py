"""Every run on the page: its facts and its figure are those of its JSON, and nothing of the record is left out."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.config import Profiler
from cs336_systems.record import Failure, Status, load_records
from cs336_systems.report.page.runs import runs_chapter, times_picture
from cs336_systems.report.page.write import Page, to_html
from tests.report.making import make_config, make_failure, make_record
from tests.report.page.grid import GRID
from tests.report.page.pages import HOSTILE_TEXTS

DATA = Path(__file__).parents[3] / "data" / "published"


def runs_of(directory):
    """Each run of the page with its JSON."""
    chapter = runs_chapter(load_records(directory / "runs")[0], lambda _: directory)
    blocks = {json.loads(dict(block.texts)["Record"])["started_at"]: block for block in chapter.blocks}
    found = [json.loads(path.read_text()) for path in (directory / "runs").glob("*.json")]
    assert len(found) == len(chapter.blocks)
    return [(blocks[run["started_at"]], run) for run in found]


@pytest.fixture(scope="module")
def grid():
    return runs_of(GRID)


def times_of(run):
    """All times of a run in ms, by what they are, in the order of its steps."""
    measured = {own["phase"]: own["times_s"] for own in run["measurements"]}
    every = {"warm-up": run["warmup_times_s"], **measured, "host, to launch a step": run["host_times_s"]}
    return {name: [1e3 * time_s for time_s in times_s] for name, times_s in every.items()}


def test_the_record_of_a_run_is_whole(grid):
    for block, run in grid:
        record = json.loads(dict(block.texts)["Record"])
        assert fields_of(run, record) == run


def fields_of(older, record):
    """The fields of `record` that a record written before others were added has, which `older` is."""
    return {
        name: fields_of(old, record[name]) if isinstance(old, dict) else record[name] for name, old in older.items()
    }


def test_the_figure_of_a_run_has_every_step_in_order_after_its_warm_up(grid):
    for block, run in grid:
        (figure,) = block.blocks
        wanted, num_warmup = times_of(run), len(run["warmup_times_s"])
        drawn = {line["name"]: line for line in figure.spec["data"]}
        assert drawn.keys() == wanted.keys()
        for name, line in drawn.items():
            assert line["y"] == pytest.approx(wanted[name], rel=1e-9)
            begin = 0 if name == "warm-up" else num_warmup
            assert line["x"] == [begin + number for number in range(1, len(wanted[name]) + 1)]
        (shade,) = figure.spec["layout"]["shapes"]
        assert (shade["x0"], shade["x1"]) == (0.5, num_warmup + 0.5)
        assert drawn["warm-up"]["line"]["color"] not in {
            drawn[own["phase"]]["line"]["color"] for own in run["measurements"]
        }


def test_the_times_of_a_run_can_be_read_without_the_figure(grid):
    for block, run in grid:
        lines = dict(line.split(": ") for line in dict(block.texts)["Times in order (ms)"].splitlines())
        assert lines.keys() == times_of(run).keys()
        for name, times_ms in times_of(run).items():
            assert [float(word) for word in lines[name].split(", ")] == pytest.approx(times_ms, abs=1e-4)


def test_the_facts_of_a_run_are_those_of_its_json(grid):
    for block, run in grid:
        facts, step = dict(block.facts), times_of(run)["step"]
        shown = facts["Step"].split(" ms")[0].replace(",", "").split(" ± ")
        for word, value in zip(shown, (statistics.fmean(step), statistics.stdev(step)), strict=True):
            assert float(word) == pytest.approx(value, abs=0.501 * 10.0 ** -len(word.partition(".")[2]))
        assert f"{run['memory']['peak_allocated_bytes'] / 2**30:.2f} GiB allocated" in facts["Peak of memory"]
        assert facts["Device"].startswith(run["environment"]["identity"]["device_name"])
        for name, own in (("before", run["telemetry"]["before"]), ("after", run["telemetry"]["after"])):
            (line,) = (line for line in facts["GPU"].splitlines() if f" {name} " in line)
            assert f"{own['temperature_c']} °C, {own['power_w']:.0f} W" in line
            assert f"SM clock {own['sm_clock_hz'] // 10**6:,} of" in line
            assert all(reason in line for reason in own["throttle_reasons"])
        assert [line.split(": ")[0] for line in facts.get("Warnings", "").splitlines()] == [
            w["code"] for w in run["warnings"]
        ]
        assert all(warning["message"] in facts["Warnings"] for warning in run["warnings"])
        assert run["environment"]["git_commit"] in facts["Code"]
        assert run["environment"]["identity"]["code"] in facts["Code"]
        assert run["started_at"][:19] in facts["Measured"]
        assert Path(facts["Record"]).is_file()
        assert not block.failed


def test_a_run_out_of_memory_is_told_with_its_traceback_and_has_no_figure():
    ((block, run),) = ((b, r) for b, r in runs_of(DATA / "e2e_benchmark/out_of_memory") if r["status"] != "ok")
    assert block.failed
    assert not block.blocks
    assert run["failure"]["message"] in dict(block.facts)["Status"]
    assert run["failure"]["where"] in dict(block.facts)["Status"]
    assert dict(block.texts)["Traceback"] == run["failure"]["traceback"].rstrip()


@pytest.mark.parametrize(
    ("profiler", "viewer"),
    [(Profiler.NSYS, "nsys-ui"), (Profiler.KINETO, "ui.perfetto.dev"), (Profiler.MEMORY, "pytorch.org/memory_viz")],
)
def test_a_profiled_run_says_where_its_raw_profile_opens(profiler, viewer, tmp_path):
    record = make_record(make_config(profiler=profiler), (0.02, 0.03))
    (block,) = runs_chapter([record], lambda _: tmp_path).blocks
    raw = dict(block.facts)["Raw profile"]
    path = Path(raw.partition(" (")[0])
    assert path.parents[1] == tmp_path
    assert "not there" in raw
    assert viewer in raw
    path.parent.mkdir()
    path.touch()
    (block,) = runs_chapter([record], lambda _: tmp_path).blocks
    assert "not there" not in dict(block.facts)["Raw profile"]


@pytest.mark.parametrize("text", [text for text in HOSTILE_TEXTS if text.isascii()])
def test_a_failure_of_hostile_words_is_one_line_and_a_traceback_keeps_its_lines(text, tmp_path):
    failure = Failure(message=text, where=text, traceback=f"first\n{text}\nlast", log_tail=text)
    record = replace(make_failure(make_config(), Status.CRASHED), failure=failure)
    chapter = runs_chapter([record], lambda _: tmp_path)
    (block,) = chapter.blocks
    assert "\n" not in dict(block.facts)["Status"]
    first, *_, last = dict(block.texts)["Traceback"].split("\n")
    assert (first, last) == ("first", "last")
    assert times_picture(record) is None
    assert "<script>window" not in to_html(Page(title="runs", chapters=[chapter]))
