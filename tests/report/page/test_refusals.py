"""`cs336 report A B --output C` of records that cannot be compared: each stands apart, and the page says why."""

import base64
import gzip
import json
import re
from dataclasses import replace

import pytest

from cs336_systems import cli
from cs336_systems.analysis.memory.profile import encode_memory_profile
from cs336_systems.config import Phase, Precision, Profiler
from cs336_systems.record import Measurement, load_records, write_record
from cs336_systems.report.page.contents import sweep_page
from cs336_systems.report.page.write import TableBlock
from cs336_systems.report.results import Results
from cs336_systems.sweep.store import memory_profile_path
from tests.report.making import make_config, make_record
from tests.report.page.parsed import Parsed
from tests.report.sections.memory.profiles import make_memory

CONTEXTS = (128, 256)


def under(record, **identity):
    """The record as if measured under other conditions."""
    environment = record.environment
    return replace(record, environment=replace(environment, identity=replace(environment.identity, **identity)))


def write_runs(records, directory):
    (directory / "runs").mkdir(parents=True)
    for record in records:
        write_record(record, directory / "runs")


def grid(*sizes, step_s=0.02, **fields):
    return [
        make_record(make_config(size, context, **fields), (step_s, step_s)) for size in sizes for context in CONTEXTS
    ]


def packed(page, name):
    found = re.search(f'id="packed-{name}">(.*?)<', page)
    return json.loads(gzip.decompress(base64.b64decode(found[1]))) if found else {}


@pytest.fixture
def report(tmp_path, no_pictures):
    """A function that writes records into two directories and reports both: the page, its tables and its refusals."""

    def write(*several):
        names = [str(tmp_path / "abc"[number]) for number in range(len(several))]
        for name, records in zip(names, several, strict=True):
            write_runs(records, tmp_path / name)
        assert cli.main(["report", *names, "--output", str(tmp_path / "both")]) == 0
        page = (tmp_path / "both/index.html").read_text()
        sentences = re.search(r"<h3>What is not side by side, and why</h3>(.*?)</div>", page, re.DOTALL)
        return page, Parsed(page), re.sub("<.*?>", "", sentences[1]) if sentences else ""

    return write


def steps(found):
    """The size and context of each row, by table of steps."""
    return {
        name: [(row["size"][0], row["context"][0]) for row in found.rows(name)]
        for name in found.headings
        if name.startswith("results")
    }


def keys(*sizes):
    return [(size, str(context)) for size in sizes for context in CONTEXTS]


def figures(page):
    """The texts of each figure of several runs."""
    return [json.dumps(spec) for name, spec in packed(page, "figures").items() if not name.startswith("run-")]


def test_what_can_be_compared_stands_in_one_table_and_nothing_is_refused(report):
    page, found, refused = report(grid("small"), grid("medium", step_s=0.04))
    assert steps(found) == {"results": keys("small", "medium")}
    assert refused == ""
    assert any("small" in text and "medium" in text for text in figures(page))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("device_name", "NVIDIA A100", "hardware"),
        ("code", "c0de", "measuring code"),
        ("torch", "2.12.0", "PyTorch"),
        ("driver", "999", "driver"),
    ],
)
def test_other_hardware_and_other_code_stand_apart(report, field, value, words):
    others = [under(record, **{field: value}) for record in grid("medium", step_s=0.04, precision=Precision.BF16)]
    page, found, refused = report(grid("small", "medium"), others)
    assert steps(found) == {"results-1": keys("small", "medium"), "results-2": keys("medium")}
    assert not any("speed-up vs fp32" in row for name in steps(found) for row in found.rows(name))
    assert f"different {words}" in refused
    assert value in refused
    for name, own in (("results-1", "/a;"), ("results-2", "/b;")):
        source = re.search(rf'id="{name}".*?class="source">(.*?)<', page, re.DOTALL)[1]
        assert own in source
        assert (value in source) == (name == "results-2")
    titles = re.findall(r'id="time-\d">\s*<h2>(.*?)</h2>', page)
    assert [value in title for title in titles] == [False, True]
    sentences = re.findall("<p>.*?</p>", page, re.DOTALL)
    assert any("#results-1." in text for text in sentences)
    assert not any("#results-1." in text and "#results-2." in text for text in sentences)
    contexts = [text for text in figures(page) if '"log"' in text]
    assert [text.count('"name": "medium"') for text in contexts] == [1, 1], "a figure for each device or code"


def test_runs_of_one_second_on_two_devices_keep_their_directories(report):
    first = grid("small")
    page, _, _ = report(first, [under(record, device_name="NVIDIA A100") for record in first])
    sources = re.findall(r'id="results-\d".*?class="source">(.*?)<', page, re.DOTALL)
    assert [("/a;" in source, "/b;" in source) for source in sources] == [(True, False), (False, True)]


def test_another_warm_up_stands_apart(report):
    page, found, refused = report(grid("small", "medium"), grid("large", "xl", warmup_steps=1))
    assert steps(found) == {"results": keys("small", "medium"), "results-warmup-1": keys("large", "xl")}
    assert "4 runs after 5" in refused
    assert "4 runs after 1" in refused
    assert figures(page)
    assert not any("small" in text and "large" in text for text in figures(page))


def test_low_precision_after_another_warm_up_has_no_speed_up(report):
    _, found, _ = report(grid("small"), grid("small", step_s=0.01, precision=Precision.BF16, warmup_steps=1))
    assert {name: len(rows) for name, rows in steps(found).items()} == {"results": 2, "results-warmup-1": 2}
    assert not any("speed-up vs fp32" in row for name in steps(found) for row in found.rows(name))


def test_a_profiled_time_is_not_beside_a_plain_one(report):
    page, found, refused = report(grid("small"), grid("medium", step_s=0.123, profiler=Profiler.KINETO))
    assert steps(found) == {"results": keys("small")}
    assert "2 runs under a profiler" in refused
    assert not any("123" in cell for cell, _ in found.cells.values())
    assert not any("medium" in text for text in figures(page))


def of_parts(record, part):
    """The record with a part that is larger than its whole."""
    memory, environment = record.memory, record.environment
    return {
        "phases": lambda: replace(
            record, measurements=(Measurement(Phase.FORWARD, (0.777, 0.777)), record.measurement(Phase.STEP))
        ),
        "host": lambda: replace(record, host_times_s=(0.777, 0.777)),
        "allocated": lambda: replace(record, memory=replace(memory, peak_allocated_bytes=777 * 2**30)),
        "reserved": lambda: replace(
            record,
            memory=replace(memory, peak_reserved_bytes=777 * 2**30),
            environment=replace(environment, device_memory_bytes=80 * 2**30),
        ),
    }[part]()


@pytest.mark.parametrize(
    ("part", "shown", "column"),
    [("phases", "777 ms", "forward ms"), ("host", "777 ms", ""),
     ("allocated", f"{777 * 2**30:,} bytes", "peak GiB"), ("reserved", f"{777 * 2**30:,} bytes", "peak GiB")],
)  # fmt: skip
def test_a_part_that_is_larger_than_its_whole_is_not_shown_as_its_part(report, part, shown, column):
    wrong = of_parts(grid("small")[0], part)
    _, found, refused = report([wrong], grid("medium"))
    assert shown in refused
    assert wrong.config.label in refused
    row, *others = found.rows("results")
    assert row["step ms"][0] == "20.00 ± 0", "what is not in doubt stays"
    if column:
        assert row[column][0] == ""
        assert all(other[column][0] for other in others)


def test_recorded_memory_of_other_code_is_not_beside_its_own(tmp_path):
    """The same configuration, recorded with two versions of the measuring code."""
    config = make_config(profiler=Profiler.MEMORY)
    several = {}
    for name, peak in (("a", 3), ("b", 5)):
        record, directory = under(make_record(config, (0.02,)), code=name), tmp_path / name
        write_runs([record], directory)
        path = memory_profile_path(config, directory / "runs")
        path.parent.mkdir()
        profile = make_memory()
        path.write_bytes(encode_memory_profile(replace(profile, peak_reserved_bytes=peak * 2**30)))
        several[directory] = load_records(directory / "runs")[0]
    together = Results.together(Results.load(own, directory) for directory, own in several.items())
    page = sweep_page(together, tmp_path, found_in=several)
    chapters = [chapter for chapter in page.chapters if chapter.id.startswith("memory")]
    assert len(chapters) == 2
    for chapter, name, peak in zip(chapters, "ab", (3, 5), strict=True):
        tables = [block for block in chapter.blocks if isinstance(block, TableBlock)]
        peaks = {
            row["peak_reserved_bytes"] for block in tables for row in block.table.values if "peak_reserved_bytes" in row
        }
        assert peaks == {peak * 2**30}
        assert all(f"/{name}" in block.source for block in tables)


def test_the_page_names_directories_as_they_were_typed(tmp_path, monkeypatch, no_pictures):
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", "small"), ("b", "medium")):
        write_runs(grid(size), tmp_path / name)
    assert cli.main(["report", "a", "b", "--output", "both"]) == 0
    page = (tmp_path / "both/index.html").read_text()
    every = page + json.dumps([packed(page, name) for name in ("figures", "runs", "copies")])
    assert str(tmp_path) not in every
    assert f"a/runs/{grid('small')[0].key}.json" in every
