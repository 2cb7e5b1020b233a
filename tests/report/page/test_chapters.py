"""The pages of results directories, and of all below a directory: what they hold, and how large they are."""

import csv
import re
import shutil
from pathlib import Path

import pytest

from cs336_systems import cli
from cs336_systems.commands.rebuild import load
from cs336_systems.commands.results import show_results
from cs336_systems.record import load_records
from cs336_systems.report.compared import Sides, compare_sides
from cs336_systems.report.page.chapters import SELF, Climbed, Collection, block_id, collection_page
from cs336_systems.report.page.write import to_html, write_page
from cs336_systems.report.progress import StatusLine
from cs336_systems.report.results import Results, StudyResults
from cs336_systems.report.sections.ladder import ladder_rows
from cs336_systems.studies.operators import Implementation, Version
from cs336_systems.studies.precision_records import PrecisionStudy
from cs336_systems.studies.records import read_study
from tests.committed import DATA
from tests.report import ceilings
from tests.report.ladders import make_ladder, make_records, shifted
from tests.report.making import make_config, make_failure, make_record
from tests.report.page.pages import HOSTILE_TEXTS
from tests.report.page.parsed import Parsed
from tests.report.page.test_write import Parsed as Tags
from tests.report.sections.kernels.profiles import make_entry, make_profile
from tests.report.studies import make_cell, make_failed, make_fusion, make_lost_row, make_result, make_row, make_study

MOST_S, MOST_BYTES = 2.0, 1.5e6
"""Processor time and size of the page of the grid of 30 runs."""


def tiny(name="a"):
    """One directory of each kind, all of this name."""
    records = [make_record(make_config(), (0.1, 0.2, 0.3)), make_failure(make_config(context_length=256))]
    repeats = [make_record(make_config(repeat=repeat), (0.1 + 0.01 * repeat, 0.1)) for repeat in range(6)]
    entry = make_entry(make_profile())
    return Collection(
        root=Path("data"),
        sweeps={
            Path("e2e_benchmark") / name: Results(records=records),
            Path("nsys_profiles") / name: Results(records=[entry.profiled], kernels=[entry]),
        },
        comparisons={
            Path("comparisons") / name: compare_sides(
                Sides(a="a", b="b"), [repeats[::2], repeats[1::2]], are_alternate=True
            )
        },
        ladders={Path("ladder") / name: climbed()},
        studies={
            Path(kind) / name: StudyResults(study)
            for kind, study in {
                "ceilings": ceilings.make_whole(),
                "attention": make_study(make_result(make_cell())),
                "fusion": make_fusion(make_row(), make_lost_row(op="softmax")),
                "precision": read_study(DATA / "precision/precision.json", PrecisionStudy),
            }.items()
        },
        unreadable={Path("attention/broken"): "attention.json: not a study"},
    )


def climbed():
    """0.8 s for the first rung and 0.05 s for the last; `compile` is off by half of the fall."""
    rungs = make_ladder()
    records = make_records(rungs, losses={"compile": shifted(0.5)})
    return Climbed(results=Results(records=records), rows=tuple(ladder_rows(rungs, records, [])))


def attention():
    """Flash takes half of naive's time, which has no memory for twice the context."""
    flash = make_result(make_cell(Implementation.FLASH), forward_s=(0.0009, 0.001, 0.0011))
    return make_study(make_result(make_cell()), flash, make_failed(make_cell(context_length=2048)))


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


def test_a_hostile_name_of_a_directory_adds_no_tag() -> None:
    texts = "".join((*HOSTILE_TEXTS[:3], "%2e a b#c?d&e"))
    name = texts.translate({ord("/"): "|", 0: None, 0xD800: 0xDC9B})  # what the name of a file can be
    made = to_html(collection_page(tiny(name)))
    assert Tags(made).tags == Tags(to_html(collection_page(tiny()))).tags


def test_the_page_of_one_directory_has_no_prefix_and_is_open() -> None:
    text = to_html(collection_page(Collection(root=Path("x/mine"), studies={SELF: StudyResults(attention())})))
    assert "results.0.0" in Parsed(text).cells
    assert "Attention alone: mine" in text
    assert '<details class="chapter"' not in text


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        ("ladders", climbed, [["fused", "16.0"], ["Not credited", "compile"]]),
        ("studies", attention, [["as fast as naive", "flash 2.0"], ["naive runs out of memory", "context 2048"]]),
        ("studies", ceilings.make_whole, [["FLOPs per byte", "fp32", "bf16"]]),
        ("studies", lambda: make_fusion(make_row(), make_row(version=Version.FUSED, times_s=(0.0005,))),
         [["gelu", "fused", "4.00"]]),
    ],
)  # fmt: skip
def test_what_stands_out_comes_first_and_once(kind, make, words) -> None:
    made = make() if kind == "ladders" else StudyResults(make())
    page = collection_page(Collection(root=Path("mine"), **{kind: {SELF: made}}))
    first, text = page.chapters[0], to_html(page)
    assert first.title == "Findings"
    told = [sentence for block in first.blocks for sentence in block.paragraphs]
    for each in words:
        (sentence,) = [sentence for sentence in told if all(word in sentence for word in each)]
        assert text.count(re.sub("[<>&'\"].*", "", sentence)) == 1


def test_runs_name_their_record_and_what_opens_their_raw_profile_and_say_how_they_failed() -> None:
    entry, failed = make_entry(make_profile()), make_failure(make_config(), message="no memory for it")
    results = Results(records=[entry.profiled, failed], kernels=[entry])
    text = to_html(collection_page(Collection(root=Path("x"), sweeps={SELF: results})))
    rows = {row["record"][0]: row for row in Parsed(text).rows("runs-table")}
    key = entry.config.key
    assert rows[f"runs/{key}.json"]["opens in"][0] == "nsys-ui"
    assert rows[f"runs/{key}.json"]["raw profile"][0] == f"reports/{key}.nsys-rep"
    assert rows[f"runs/{failed.key}.json"]["status"][0] == "out of memory"
    assert "no memory for it</pre>" in text


def test_profiles_that_were_not_kept_are_counted() -> None:
    entry, other = make_entry(make_profile()), make_entry(make_profile(), context_length=512)
    results = Results(records=[entry.profiled, other.profiled], kernels=[entry])
    first, *_ = collection_page(Collection(root=Path("x"), sweeps={SELF: results})).chapters
    (said,) = (text for block in first.blocks for text in block.paragraphs if "still have" in text)
    assert said.startswith("Of 2 runs under a profiler, 1 still")


def test_the_page_of_the_grid_is_small_and_made_at_once(grid_page) -> None:
    page, took_s = grid_page
    print(f"the page of 30 runs: {took_s:.2f} s of processor time, {len(page) / 1e6:.2f} MB")
    assert took_s < MOST_S
    assert len(page) < MOST_BYTES


def test_report_writes_the_page_and_names_it(tmp_path, capsys, monkeypatch, no_pictures) -> None:
    sweep = tmp_path / "a"
    shutil.copytree(DATA / "e2e_benchmark/out_of_memory/runs", sweep / "runs")
    assert cli.main(["report", str(sweep)]) == 0
    page = sweep / "index.html"
    assert str(page) in capsys.readouterr().out.splitlines()[-1]
    whole = page.read_bytes()
    assert b"out of memory" in whole

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cs336_systems.report.page.write.to_html", interrupted)
    results = Results(records=load_records(sweep / "runs")[0])
    with pytest.raises(KeyboardInterrupt):
        write_page(collection_page(Collection(root=sweep, sweeps={SELF: results})), page)
    assert page.read_bytes() == whole
    assert sorted(path.name for path in sweep.iterdir() if path.name.startswith(".")) == []


def test_a_sweep_that_was_stopped_before_its_first_record_has_no_page(tmp_path, capsys) -> None:
    with StatusLine() as status:
        show_results({tmp_path: []}, tmp_path, status)
    assert not (tmp_path / "index.html").exists()
    assert "index.html" not in capsys.readouterr().out


PUBLISHED = {
    "ladder/gpt2": ("ladder", "ladder.csv", "step", "step_mean_ms"),
    "ceilings/NVIDIA-H200": ("bandwidth", "bandwidth.csv", "rate", "gb_per_s"),
    "e2e_benchmark/warmup": ("results", "results.csv", "step", "step_mean_ms"),
}
"""Of some published directories: a table, its file, one of its headings, and the column of the file."""


@pytest.fixture(scope="module")
def published():
    """The page of these directories as text."""
    return to_html(collection_page(Collection.together(DATA, [load(DATA / path, DATA) for path in PUBLISHED])))


def test_a_page_of_published_results_names_no_place_of_the_machine(published) -> None:
    assert str(DATA.parent) not in published


@pytest.mark.parametrize("directory", PUBLISHED)
def test_values_are_those_of_the_committed_files(published, directory) -> None:
    table, file, heading, key = PUBLISHED[directory]
    tables, block = Parsed(published), block_id(Path(directory), table)
    headings = [" ".join(own.split()) for (own,) in tables.headings[block]]
    place = next(number for number, own in enumerate(headings) if own.startswith(heading))
    pattern = re.compile(rf"{re.escape(block)}\.\d+\.{place}")
    shown = [float(order) for name, (_, order) in tables.cells.items() if pattern.fullmatch(name) and order]
    with (DATA / directory / file).open(newline="") as lines:
        wanted = [float(row[key]) for row in csv.DictReader(lines) if row[key]]
    assert shown
    assert all(any(abs(value - one) <= 1e-4 * one for one in wanted) for value in shown), (shown, wanted)
