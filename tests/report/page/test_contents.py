"""The page shows what the records hold, and refuses to put side by side what cannot be compared."""

import shlex
import shutil
from dataclasses import replace

import pytest

from cs336_systems import cli
from cs336_systems.commands.benchmark import BenchmarkArguments
from cs336_systems.commands.flags import parse
from cs336_systems.commands.results import show_results
from cs336_systems.config import Device, Parallel, Profiler
from cs336_systems.record import load_records
from cs336_systems.report.page.commands import command_of
from cs336_systems.report.page.contents import sweep_chapters, sweep_page
from cs336_systems.report.page.refusals import without_contradictions
from cs336_systems.report.page.write import Page, TableBlock, to_html, write_page
from cs336_systems.report.results import Results
from cs336_systems.report.status_line import StatusLine
from tests.committed import DATA, committed_runs
from tests.report.making import make_config, make_record
from tests.report.sections.kernels.profiles import make_entry

MOST_S = 3.0
"""Of processor time, for the page of the grid."""


def test_the_page_of_the_grid_takes_three_seconds_at_most(grid_page):
    page, took_s = grid_page
    print(f"the page of 30 runs: {took_s:.2f} s of processor time, {len(page) / 1e6:.2f} MB")
    assert took_s < MOST_S
    assert len(page) < 6e6


@pytest.mark.parametrize("runs", committed_runs(), ids=lambda path: str(path.parent.relative_to(DATA)))
def test_the_command_line_of_a_run_makes_its_configuration_again(runs, two_gpus, monkeypatch):
    monkeypatch.setattr("cs336_systems.commands.benchmark.resolve_device", lambda asked: Device(asked))
    monkeypatch.setattr("cs336_systems.model.fast.choose.is_installed", lambda _: True)
    for record in load_records(runs)[0]:
        argv = shlex.split(command_of(record.config))
        begin = argv.index("benchmark.py") + 1
        again = parse(BenchmarkArguments, "benchmark.py", argv[begin:]).config()
        under_nsys = record.config.profiler is Profiler.NSYS
        assert (argv[0] == "nsys") == under_nsys
        if under_nsys:
            again = replace(again, profiler=Profiler.NSYS)
        assert again == record.config.configuration


def test_the_command_line_of_one_rank_that_exchanges_with_itself_says_so():
    config = replace(make_config(parallel=Parallel.DDP_FLAT), device=Device.CPU)
    again = parse(BenchmarkArguments, "benchmark.py", shlex.split(command_of(config))[2:]).config()
    assert again == config


# What cannot be compared


def steps_of(page):
    """The rows of each table of steps, by what is in them of size and context."""
    blocks = [block for chapter in page.chapters for block in chapter.blocks if isinstance(block, TableBlock)]
    return [[row[0] for row in block.table.rows] for block in blocks if block.table.title.startswith("Time of a step")]


def refused(page):
    return " ".join(
        text
        for block in page.chapters[0].blocks
        if getattr(block, "heading", "") == "What is not side by side, and why"
        for text, _ in block.paragraphs
    )


def measured(size="small", step_s=(0.02, 0.02), **identity):
    record = make_record(make_config(size), step_s)
    environment = record.environment
    return replace(record, environment=replace(environment, identity=replace(environment.identity, **identity)))


def test_a_page_holds_the_chapters_of_several_sweeps(tmp_path):
    """Each with a prefix of its own, as a page whose parts share an identifier is not written."""
    apart = Results(records=[measured("small", code="abc"), measured("medium", code="def")])
    chapters = [each for name in ("a-", "b-") for each in sweep_chapters(apart, tmp_path, prefix=name)]
    to_html(Page(title="two sweeps", chapters=chapters))
    with pytest.raises(ValueError, match="identifier"):
        to_html(Page(title="two sweeps", chapters=[*sweep_chapters(apart, tmp_path), *sweep_chapters(apart, tmp_path)]))


def test_a_slowdown_by_the_profiler_is_not_given_against_a_run_under_other_conditions(tmp_path):
    entry = make_entry()
    other = replace(entry.plain.environment, identity=replace(entry.plain.environment.identity, code="other"))
    plain = replace(entry.plain, environment=other)

    def kernel_cells(plain_run):
        own = replace(entry, plain=plain_run)
        page = sweep_page(Results(records=[plain_run, own.profiled], kernels=[own]), tmp_path)
        to_html(page)
        tables = [b.table for c in page.chapters if c.id.startswith("kernels") for b in c.blocks if b.kind == "table"]
        return {cell for table in tables for row in table.rows for cell in row}, refused(page)

    plain_ms = "25.00"  # mean of 24 and 26
    cells, _ = kernel_cells(entry.plain)
    assert plain_ms in cells
    cells, reasons = kernel_cells(plain)
    assert cells
    assert plain_ms not in cells
    assert entry.config.label in reasons


def test_no_committed_sweep_contradicts_itself():
    for runs in committed_runs():
        for record in load_records(runs)[0]:
            assert without_contradictions(record) == (record, [])


# The command


def test_report_writes_the_page_and_names_it(tmp_path, capsys, monkeypatch, no_pictures):
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
    with pytest.raises(KeyboardInterrupt):
        write_page(sweep_page(Results(records=load_records(sweep / "runs")[0]), sweep), page)
    assert page.read_bytes() == whole
    assert sorted(path.name for path in sweep.iterdir() if path.name.startswith(".")) == []


def test_a_sweep_that_was_stopped_before_its_first_record_has_no_page(tmp_path, capsys):
    with StatusLine() as status:
        show_results({tmp_path: []}, tmp_path, status)
    assert not (tmp_path / "index.html").exists()
    assert "index.html" not in capsys.readouterr().out


def test_the_page_of_one_sweep_has_its_command(tmp_path):
    """Of several sweeps put together there is no one command."""
    records = [make_record(make_config(size, 256), [0.1]) for size in ("small", "large")]
    page = sweep_page(Results(records=records), tmp_path / "mine")
    words = shlex.split(page.source.partition("Repeat it with: ")[2])
    assert words[:2] == ["python", "benchmark_sweep.py"]
    arguments = parse(cli._arguments("sweep"), "sweep", words[2:])
    assert (arguments.sizes, arguments.context_lengths, arguments.name) == (("small", "large"), (256,), "mine")
    both = {tmp_path / name: [record] for name, record in zip("ab", records, strict=True)}
    assert "Repeat" not in sweep_page(Results(records=records), tmp_path, found_in=both).source
