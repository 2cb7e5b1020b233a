"""The pages of results directories, and of all below a directory: what they hold, and how large
they are.
"""

import re
from functools import cache
from pathlib import Path

import pytest
from markupsafe import escape

from cs336.commands.measuring import show_results
from cs336.commands.rebuild import load
from cs336.config import Profiler
from cs336.record import Status
from cs336.report.compared import Sides, compare_sides
from cs336.report.page.chapters import list_of, page_of
from cs336.report.page.directory import Directory
from cs336.report.page.glance import glance_at
from cs336.report.page.html import to_html
from cs336.report.progress import StatusLine
from cs336.report.results import Results, StudyResults
from cs336.report.sections.ladder import ladder_results
from cs336.report.sections.memory.entry import MemoryEntry
from cs336.report.words import status_text
from cs336.studies.operators import Implementation, Version
from cs336.studies.records import PrecisionStudy, read_study
from tests.committed import DATA
from tests.report import ceilings
from tests.report.ladders import make_ladder, make_records, shifted
from tests.report.making import make_config, make_failure, make_record
from tests.report.page.grid import GRID, grid_runs, grid_values
from tests.report.page.parsed import Parsed, as_written
from tests.report.sections.kernels.profiles import make_entry, make_profile
from tests.report.sections.memory.profiles import make_memory
from tests.report.studies import (
    make_cell,
    make_failed,
    make_fusion,
    make_lost_row,
    make_result,
    make_row,
    make_study,
)

MOST_S, MOST_BYTES = 2.0, 1.5e6
"""Processor time and size of the page of the grid of 30 runs."""
MOST_PROFILED_BYTES = 1e6


def tiny(name="a"):
    """One directory of each kind, all of this name."""
    records = [
        make_record(make_config(), (0.1, 0.2, 0.3)),
        make_failure(make_config(context_length=256)),
    ]
    repeats = [
        make_record(make_config(repeat=repeat), (0.1 + 0.01 * repeat, 0.1)) for repeat in range(6)
    ]
    entry, memory = make_entry(make_profile()), make_config(profiler=Profiler.MEMORY)
    studies = {
        "ceilings": ceilings.make_whole(),
        "attention": make_study(make_result(make_cell())),
        "fusion": make_fusion(make_row(), make_lost_row(op="softmax")),
        "precision": read_study(DATA / "precision/precision.json", PrecisionStudy),
    }
    made = {
        "e2e_benchmark": {"results": Results(records=records)},
        "nsys_profiles": {"results": Results(records=[entry.profiled], kernels=[entry])},
        "memory_profiles": {
            "results": Results(
                records=[make_record(memory, (0.1, 0.1))],
                memory=[MemoryEntry(profile=make_memory(), subject=memory)],
            )
        },
        "comparisons": {
            "compared": compare_sides(
                Sides(a="a", b="b"), [repeats[::2], repeats[1::2]], are_alternate=True
            )
        },
        "ladder": climbed(),
        **{kind: {"study": StudyResults(study)} for kind, study in studies.items()},
    }
    return {kind: Directory(path=Path(kind, name), **own) for kind, own in made.items()}


@cache
def pages():
    return {kind: page_of(directory) for kind, directory in tiny().items()}


def climbed():
    """0.8 s for the first rung and 0.05 s for the last; `compile` is off by half of the fall."""
    rungs = make_ladder()
    records = make_records(rungs, losses={"compile": shifted(0.5)})
    return {"results": Results(records=records), "rungs": ladder_results(rungs, records, [])}


def attention():
    """Flash takes half of naive's time, which has no memory for twice the context."""
    flash = make_result(make_cell(Implementation.FLASH), forward_s=(0.0009, 0.001, 0.0011))
    return make_study(make_result(make_cell()), flash, make_failed(make_cell(context_length=2048)))


FIRST_TABLES = {
    "e2e_benchmark": "results",
    "nsys_profiles": "phases",
    "memory_profiles": "memory-peaks",
    "comparisons": "comparison",
    "ladder": "ladder",
    "ceilings": "products",
    "attention": "results",
    "fusion": "results",
    "precision": "dtypes",
}


@pytest.mark.parametrize(("kind", "table"), FIRST_TABLES.items())
def test_each_kind_of_results_has_a_page_with_its_answer_and_its_tables(kind, table) -> None:
    made = to_html(pages()[kind])
    assert f"{table}.0.0" in Parsed(made).cells
    assert (kind == "precision") or '<p class="answer">' in made
    assert made == to_html(page_of(tiny()[kind]))


def test_the_list_links_to_each_page_with_a_thumbnail_and_names_what_cannot_be_read() -> None:
    found = {own.path: pages()[kind] for kind, own in tiny().items()}
    text = to_html(
        list_of(Path("data"), found, {Path("attention/broken"): "attention.json: not a study"})
    )
    pattern = (
        r'<a class="entry" href="(.*?)">\s*<span class="thumbnail".*?>(.*?)</span>\s*<span><b>'
    )
    links = re.findall(pattern, text, re.DOTALL)
    assert {link for link, _ in links} == {f"{kind}/a/index.html" for kind in FIRST_TABLES}
    without = {link.partition("/")[0] for link, thumbnail in links if "<figure" not in thumbnail}
    assert without == {"precision", "comparisons", "attention", "fusion", "ceilings"}, (
        "these have no picture"
    )
    assert "attention/broken: attention.json: not a study" in text


def test_the_list_names_the_device_and_the_days_of_each_page() -> None:
    runs = grid_runs().values()
    days = sorted({run["started_at"][:10] for run in runs})
    (device,) = {run["environment"]["identity"]["device_name"] for run in runs}
    page = page_of(load(GRID))
    assert device in page.source
    assert {days[0], days[-1]} <= set(re.findall(r"[\d-]{10}", page.source))
    listed = to_html(list_of(Path("data"), {Path("train"): page}, {}))
    assert f'<span class="source">{page.source}</span>' in listed


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        ("ladder", climbed, [["fused", "16.0"], ["Not credited", "compile"]]),
        (
            "study",
            attention,
            [
                ["Forward", "as fast as naive", "flash 2.0"],
                ["naive runs out of memory", "context 2048"],
            ],
        ),
        ("study", ceilings.make_whole, [["FLOPs per byte", "fp32", "bf16"]]),
        (
            "study",
            lambda: make_fusion(make_row(), make_row(version=Version.FUSED, times_s=(0.0005,))),
            [["Fused operations are", "4.00"]],
        ),
    ],
)
def test_what_stands_out_comes_first_and_once(kind, make, words) -> None:
    content = make()
    if kind != "ladder":
        content = {"study": StudyResults(content)}
    page = page_of(Directory(path=Path("mine"), **content))
    text = as_written(to_html(page))
    sentences = [page.glance.answer]
    for block in page.chapters[0].blocks:
        sentences += getattr(block, "paragraphs", ())
    for each in words:
        (sentence,) = [said for said in sentences if all(word in said for word in each)]
        assert text.count(re.sub("[<>&'\"].*", "", sentence)) == 1


def test_a_finding_that_is_the_headline_of_a_profile_stands_once() -> None:
    page = pages()["nsys_profiles"]
    assert as_written(to_html(page)).count(escape(page.glance.answer)) == 1


def test_runs_name_their_record_and_what_opens_their_raw_profile_and_say_how_they_failed() -> None:
    entry, failed = (
        make_entry(make_profile()),
        make_failure(make_config(), message="no memory for it"),
    )
    results = Results(records=[entry.profiled, failed], kernels=[entry])
    text = to_html(page_of(Directory(path=Path("x"), results=results)))
    rows = {row["record"][0]: row for row in Parsed(text).rows("runs-table")}
    key = entry.config.key
    assert rows[f"runs/{key}.json"]["opens in"][0] == "nsys-ui"
    assert rows[f"runs/{key}.json"]["raw profile"][0] == f"reports/{key}.nsys-rep"
    assert rows[f"runs/{failed.key}.json"]["status"][0] == "out of memory"
    assert "no memory for it</pre>" in text


@pytest.mark.parametrize("profiler", Profiler)
@pytest.mark.parametrize("status", [Status.OOM, Status.CRASHED, Status.TIMEOUT])
def test_a_first_screen_says_how_runs_failed_and_has_no_unknown_value(profiler, status) -> None:
    """All runs failed, one, or only the one under a profiler."""
    failed = [
        make_failure(make_config(profiler=profiler, context_length=length), status)
        for length in (64, 128)
    ]
    for records in (failed, failed[:1], [make_record(make_config(), (0.1, 0.2)), failed[0]]):
        glance = glance_at(Directory(path=Path("mine"), results=Results(records=records)))
        assert status_text(status) in " ".join([glance.answer, *glance.doubts])
        assert all(re.search(r"\d", tile.value) for tile in glance.tiles)
        if profiler is Profiler.MEMORY:
            assert "peak" in glance.answer


def test_the_page_of_the_grid_is_small(grid_page) -> None:
    assert len(grid_page[0]) < MOST_BYTES


@pytest.mark.speed
def test_the_page_of_the_grid_is_made_at_once(grid_page) -> None:
    print(f"the page of 30 runs: {grid_page[1]:.2f} s of processor time")
    assert grid_page[1] < MOST_S


@pytest.mark.parametrize(
    "directory", ["kineto_profiles/train", "nsys_profiles/train", "memory_profiles/h200"]
)
def test_the_page_of_a_profiled_run_is_small(directory) -> None:
    assert len(to_html(page_of(load(DATA / directory)))) < MOST_PROFILED_BYTES


def test_the_first_screen_of_the_grid_has_the_ranges_of_its_runs(grid_page) -> None:
    tiles = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", grid_page[0]))
    for name, heading, scale in (
        ("step", "step ms", 1),
        ("tokens/s", "tokens/s", 1),
        ("MFU", "MFU %", 100),
        ("peak of memory", "peak GiB", 1),
    ):
        values = [row[heading] * scale for row in grid_values().values()]
        low, high = (float(found.replace(",", "")) for found in re.findall(r"[\d.,]+", tiles[name]))
        assert (low, high) == pytest.approx((min(values), max(values)), rel=5e-3)


def test_a_sweep_that_was_stopped_before_its_first_record_has_no_page(tmp_path, capsys) -> None:
    with StatusLine() as status:
        show_results([], tmp_path, status, ())
    assert not (tmp_path / "index.html").exists()
    assert "index.html" not in capsys.readouterr().out
