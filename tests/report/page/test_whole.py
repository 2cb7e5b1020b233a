"""The page of all results below a directory: what it holds, how large it is, and what a reader does with it."""

import csv
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs336_systems import cli
from cs336_systems.commands.flags import parse
from cs336_systems.config import Device
from cs336_systems.report.compared import Sides, compare_sides
from cs336_systems.report.page.collection import Climbed, Collection, block_id
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.page.whole import SELF, collection_page
from cs336_systems.report.page.write import to_html
from cs336_systems.report.results import Results
from cs336_systems.report.sections.ladder.rows import ladder_rows
from cs336_systems.studies.precision_records import PrecisionStudy
from cs336_systems.studies.records import read_study
from tests.committed import DATA, load_committed
from tests.report import ceilings
from tests.report.ladders import make_ladder, make_records
from tests.report.making import make_config, make_failure, make_record
from tests.report.page.pages import HOSTILE_TEXTS
from tests.report.page.parsed import Parsed
from tests.report.page.test_browser import chromium  # noqa: F401 (a fixture)
from tests.report.page.test_write import Parsed as Tags
from tests.report.sections.kernels.profiles import make_entry, make_profile
from tests.report.studies import make_cell, make_fusion, make_lost_row, make_result, make_row, make_study

MOST_OPENING_MS = 3000
"""Until the page can be used, on a machine that does other things too; alone it is below 1000."""
MOST_BYTES = 10e6
MOST_S = 100.0
"""Of processor time, for reading all of data/ and making its page: twice what it takes where memory is slow, or shared
with other machines of the host."""


def tiny(name="a"):
    """One directory of each kind, all of this name."""
    config = make_config()
    records = [make_record(config, (0.1, 0.2, 0.3)), make_failure(make_config(context_length=256))]
    repeats = [make_record(make_config(repeat=repeat), (0.1 + 0.01 * repeat, 0.1)) for repeat in range(6)]
    sides = [repeats[::2], repeats[1::2]]
    entry, ladder = make_entry(make_profile()), make_ladder()
    climbed = make_records(ladder)
    return Collection(
        root=Path("data"),
        sweeps={
            Path("e2e_benchmark") / name: Results(records=records),
            Path("nsys_profiles") / name: Results(records=[entry.profiled], kernels=[entry]),
        },
        comparisons={Path("comparisons") / name: compare_sides(Sides(a="a", b="b"), sides)},
        ladders={
            Path("ladder") / name: Climbed(
                rungs=ladder, results=Results(records=climbed), rows=tuple(ladder_rows(ladder, climbed, []))
            )
        },
        ceilings={Path("ceilings") / name: ceilings.make_whole()},
        attention={Path("attention") / name: make_study(make_result(make_cell()))},
        fusion={Path("fusion") / name: make_fusion(make_row(), make_lost_row(op="softmax"))},
        precision={Path("precision") / name: read_study(DATA / "precision/precision.json", PrecisionStudy)},
        unreadable={Path("attention/broken"): "attention.json: not a study"},
    )  # fmt: skip


FIRST_TABLES = {
    "e2e_benchmark": "results", "nsys_profiles": "phases", "comparisons": "comparison", "ladder": "ladder",
    "ceilings": "products", "attention": "results", "fusion": "results", "precision": "dtypes",
}  # fmt: skip


def test_each_directory_has_its_tables_below_its_own_identifiers_and_a_link_in_the_contents() -> None:
    text = to_html(collection_page(tiny()))
    cells = Parsed(text).cells
    for kind, table in FIRST_TABLES.items():
        assert block_id(Path(kind, "a"), f"{table}.0.0") in cells
        assert f'href="#{kind}/a/all"' in text.partition("</nav>")[0]
    assert "attention/broken: attention.json: not a study" in text
    assert text == to_html(collection_page(tiny()))


def test_a_hostile_name_of_a_directory_adds_no_tag_and_its_links_resolve() -> None:
    texts = "".join((*HOSTILE_TEXTS[:3], "%2e a b#c?d&e"))
    name = texts.translate({ord("/"): "|", 0: None, 0xD800: 0xDC9B})  # what the name of a file can be
    made = to_html(collection_page(tiny(name)))
    assert Tags(made).tags == Tags(to_html(collection_page(tiny()))).tags


def test_the_page_of_one_directory_has_no_prefix_and_is_open() -> None:
    study = make_study(make_result(make_cell()))
    text = to_html(collection_page(Collection(root=Path("x/mine"), attention={SELF: study})))
    assert "results.0.0" in Parsed(text).cells
    assert "Attention alone: mine" in text
    assert '<details class="chapter"' not in text


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """All that is committed of data/, and the processor time that reading it took."""
    data = tmp_path_factory.mktemp("committed") / "data"
    begin_s = time.process_time()
    return load_committed(data), time.process_time() - begin_s


@pytest.fixture(scope="module")
def whole(read):
    """The page of data/ as text, and the processor time that reading and making it took."""
    collection, took_s = read
    begin_s = time.process_time()
    text = to_html(collection_page(collection))
    return text, took_s + time.process_time() - begin_s


@pytest.fixture(scope="module")
def tables(whole):
    return Parsed(whole[0])


def test_all_of_data_is_on_a_page_that_is_small_enough_and_made_in_time(read, whole) -> None:
    pytest.importorskip("plotly", reason="without it the page has PNGs")
    (collection, _), (text, took_s) = read, whole
    print(f"the page of data/: {took_s:.1f} s of processor time, {len(text.encode()) / 1e6:.2f} MB")
    assert len(text.encode()) < MOST_BYTES
    assert took_s < MOST_S
    assert not any(str(path) in text for path in (DATA.parent, collection.root.parent))


@pytest.mark.parametrize(
    ("directory", "table", "file", "heading", "key"),
    [
        ("ladder/gpt2", "ladder", "ladder.csv", "step", "step_mean_ms"),
        ("ceilings/NVIDIA-H200", "bandwidth", "bandwidth.csv", "rate", "gb_per_s"),
        ("e2e_benchmark/warmup", "results", "results.csv", "step", "step_mean_ms"),
    ],
)
def test_values_are_those_of_the_committed_files(tables, directory, table, file, heading, key) -> None:
    block = block_id(Path(directory), table)
    headings = [" ".join(own.split()) for (own,) in tables.headings[block]]
    place = next(number for number, own in enumerate(headings) if own.startswith(heading))
    pattern = re.compile(rf"{re.escape(block)}\.\d+\.{place}")
    shown = [float(order) for name, (_, order) in tables.cells.items() if pattern.fullmatch(name) and order]
    with (DATA / directory / file).open(newline="") as lines:
        wanted = [float(row[key]) for row in csv.DictReader(lines) if row[key]]
    assert shown
    assert all(any(abs(value - one) <= 1e-4 * one for one in wanted) for value in shown), (shown, wanted)


def test_what_is_not_kept_of_the_memory_profiles_is_said(whole) -> None:
    assert "Of 48 runs under a profiler, 10 still have their explained profile" in whole[0]


@pytest.mark.browser
def test_the_whole_page_opens_at_once_and_leads_to_a_ladder_a_run_and_a_picture(whole, chromium, tmp_path) -> None:  # noqa: F811
    path = tmp_path / "index.html"
    path.write_text(whole[0])
    said, asked = [], []
    tab = chromium.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(60_000)
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(path.as_uri())
    usable_ms = tab.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
    print(f"usable after {usable_ms:.0f} ms")
    assert usable_ms < MOST_OPENING_MS
    contents = tab.locator("nav details", has_text="From the slow step")
    link = contents.get_by_role("link", name="gpt2", exact=True)
    assert not link.is_visible()
    contents.locator("summary").click()
    link.click()
    ladder = tab.locator("[id='ladder/gpt2/ladder']")
    ladder.locator(".tools").wait_for()
    with (DATA / "ladder" / "gpt2" / "ladder.csv").open() as lines:
        first = float(next(csv.DictReader(lines))["step_mean_ms"])
    assert f"{first:.2f}" in ladder.locator("tbody tr td:nth-child(3)").first.inner_text()
    run = tab.locator("[id='ladder/gpt2/run-0']")
    run.locator("summary").click()
    run.locator("pre", has_text="started_at").wait_for()
    tab.evaluate("location.hash = 'ladder/gpt2/run-3-times'")
    tab.locator("[id='ladder/gpt2/run-3-times'] .main-svg").first.wait_for()
    tab.evaluate("location.hash = 'attention/bf16/figure-forward_bf16'")
    tab.locator("[id='attention/bf16/figure-forward_bf16'] .main-svg").first.wait_for()
    tab.set_viewport_size({"width": 400, "height": 900})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [path.as_uri()]


@pytest.mark.parametrize(
    ("directory", "grid"),
    [
        ("attention/bf16", lambda collection, path: collection.attention[path].grid),
        ("fusion/fp32", lambda collection, path: collection.fusion[path].grid),
        ("ceilings/NVIDIA-H200-x2", lambda collection, path: collection.ceilings[path].grid),
    ],
)
def test_the_command_of_a_study_asks_for_the_grid_that_was_measured(read, directory, grid, monkeypatch) -> None:
    for module in ("study", "ceilings"):
        monkeypatch.setattr(f"cs336_systems.commands.{module}.resolve_device", lambda asked: Device.CUDA)
    monkeypatch.setattr("cs336_systems.commands.ceilings.visible_gpus", lambda: (None, None))
    collection, _ = read
    program, command, *words = shlex.split(command_for(collection, Path(directory)))
    arguments = parse(cli._arguments(command), command, words)
    assert program == "cs336"
    assert arguments.grid() == grid(collection, Path(directory))
    assert arguments.directory() == Path("data") / directory


@pytest.mark.parametrize(
    ("name", "gpu", "has_split"),
    [
        ("gpt2", "NVIDIA H200", False),
        ("gpt2-xl", "NVIDIA H200", False),
        ("h100-gpt2", "NVIDIA H100 80GB HBM3", True),
        ("h100-gpt2-xl-packed", "NVIDIA H100 80GB HBM3", True),
        ("h100-gpt2-packed", "NVIDIA H100 80GB HBM3", True),
    ],
)
def test_the_command_of_a_ladder_plans_the_runs_that_its_records_are_of(
    read, name, gpu, has_split, monkeypatch
) -> None:
    """Those on an H200 were measured before there was a rung `split`, which later rungs have the change of."""
    monkeypatch.setattr("cs336_systems.commands.ladder.resolve_device", lambda asked: Device.CUDA)
    monkeypatch.setattr("cs336_systems.commands.ladder.visible_gpus", lambda: [SimpleNamespace(name=gpu)])
    collection, _ = read
    climbed = collection.ladders[Path("ladder", name)]
    monkeypatch.setattr("cs336_systems.model.fast.choose.is_installed", lambda _: name.endswith("-packed"))
    _, command, *words = shlex.split(command_for(collection, Path("ladder", name)))
    arguments = parse(cli._arguments(command), command, words)
    planned = arguments.runs(arguments.ladder())
    planned = planned if has_split else [replace(config, split_masters=False) for config in planned]
    assert {*planned} == {record.config for record in climbed.results.records}
    assert arguments.directory() == Path("data/ladder") / name
