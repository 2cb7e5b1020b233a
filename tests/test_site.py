"""What the documents of the site say can be done: links lead somewhere, commands run, output is
what they print, and the pages of the gallery have the figures of their tables.

`make docs` builds the site; these tests need nothing of it.
"""

import csv
import gzip
import json
import re
import runpy
import shlex
import statistics
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
import torch
from torch import nn

from cs336 import cli
from cs336.commands.benchmark import BenchmarkArguments
from cs336.commands.configure import config_of, one_precision
from cs336.commands.parse import parse
from cs336.commands.sweep import SweepArguments
from cs336.config import Device
from cs336.record import WarningCode, load_records
from cs336.report.terminal import print_run
from cs336.studies.ceilings_files import load_ceilings
from tests.committed import DATA, ROOT
from tests.gallery import GALLERY, PAGES, STRANGER

SITE = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), DATA / "README.md"]
"""The documents of the site, without published tables."""
CHANGES = ROOT / "CHANGELOG.md"
"""It may name commands of earlier versions."""
COMMANDED = [path for path in SITE if path != CHANGES]
MARKDOWN_LINK = r"\]\(([^)\s]+)\)"
HTML_LINK = r'<a href="([^"]+)"'
ABROAD = re.compile(r"[a-z]+:")
MOST_BYTES = 10**6


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", text)


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and the site name them."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"<!--.*?-->", "", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", SITE, ids=name_of)
def test_what_is_linked_is_there(document: Path) -> None:
    text = without_code(document.read_text())
    for link in re.findall(f"{MARKDOWN_LINK}|{HTML_LINK}", text):
        target, _, anchor = "".join(link).partition("#")
        if not ABROAD.match(target):
            path = (document.parent / target).resolve() if target else document
            # the site has no listings of directories
            assert path.is_file(), target
            assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize("document", SITE, ids=name_of)
def test_no_comment_ends_a_paragraph(document: Path) -> None:
    """A line that begins with a comment is HTML, in which Markdown is not read."""
    text = re.sub(r"(?ms)^```.*?^```", "", document.read_text())
    assert re.findall(r"(?m)^\s*<!--.*?-->.+$", text) == []


@pytest.mark.parametrize("page", sorted(GALLERY.glob("*.html")), ids=name_of)
def test_what_a_page_of_the_gallery_links_is_there(page: Path) -> None:
    text = page.read_text()
    names = {*re.findall(r'\bid="([^"]+)"', text)}
    for link in re.findall(r'<a[^>]* href="([^"]+)"', text):
        target, _, anchor = unescape(link).partition("#")
        assert ABROAD.match(target) or (page.parent / target).exists(), link
        assert target or unquote(anchor) in names, link


def test_every_document_of_docs_is_in_the_navigation() -> None:
    contents = runpy.run_path(str(ROOT / "docs" / "conf.py"))["CONTENTS"]
    listed = [f"{document}.md" for part in contents.values() for document in part.values()]
    assert len({*listed}) == len(listed)
    assert {name_of(path) for path in ROOT.glob("docs/*.md")} < {*listed}
    assert [name for name in listed if not (ROOT / name).is_file()] == []


def test_every_warning_is_explained() -> None:
    told = (ROOT / "docs" / "METHOD.md").read_text()
    # no run is warned of other programs on the CPU any more
    codes = {*WarningCode} - {WarningCode.CPU_SHARED}
    assert [code for code in codes if f"`{code}`" not in told] == []


# Commands

SCRIPTS = {
    "python benchmark.py": "benchmark",
    "python benchmark_sweep.py": "sweep",
    "python precision.py": "precision",
    "sweep": "sweep",
}
"""How documents call some commands besides `cs336 COMMAND`."""
PUBLISHED, RANKS = DATA / "README.md", ("--ranks", "2")
"""A document that says once, above a table, what all of its commands have."""
NAMES = "|".join(map(re.escape, SCRIPTS))
COMMAND = re.compile(rf"(?m)(?:^|`|\$ )(({NAMES}|cs336 (?!\.)[a-z]+)(?: [^`#\n]*)?)(?:`|#|$)")
PLACEHOLDER = "NAME"
OF_READERS = ("--model", "--own", "--own-ddp", "--own-optimizer")
"""Flags whose values are files of whoever reads the document."""


def commands_of(document: Path) -> Iterator[tuple[str, list[str]]]:
    """The name and the arguments of each command in a document."""
    for text, script in COMMAND.findall(document.read_text()):
        words = text.removeprefix(script).split("|")[0]
        if "..." not in words and words.strip() not in ("--help", "--help-all"):
            yield SCRIPTS.get(script, script.removeprefix("cs336 ")), shlex.split(words)


@pytest.mark.parametrize("document", COMMANDED, ids=name_of)
def test_commands_are_understood(document: Path) -> None:
    """Each command names one of the program, and its flags are parsed; runs are configured as on a
    machine with a GPU.
    """
    for name, words in commands_of(document):
        assert name in cli.COMMANDS, name
        if not words:
            continue
        if document == PUBLISHED and "--parallel" in words and "--ranks" not in words:
            words = [*words, *RANKS]
        if name == "compare":
            words = cli._sides_apart([name, *words])[1:]
        parsed = parse(cli._arguments(name), f"cs336 {name}", words)  # exits where it cannot
        if isinstance(parsed, BenchmarkArguments | SweepArguments):
            configure(parsed, words)


def configure(arguments: BenchmarkArguments | SweepArguments, words: list[str]) -> None:
    """Make the configurations of these arguments; raise ValueError for one that contradicts
    itself.
    """
    if arguments.fast or {*words} & {*OF_READERS}:
        return  # which asks for this machine's GPU, or imports what is not here
    given = arguments.given()
    if isinstance(arguments, SweepArguments):
        for point in arguments._grid(on_gpu=True):
            config_of(Device.CUDA, given, point, fast=False, many=True)
        return
    precision = one_precision(arguments.precision, arguments.mixed_precision)
    point = {"size": given.get("size", "small"), "precision": precision}
    config_of(Device.CUDA, given, point, fast=False)


SHOWN = [
    pytest.param(command, shown, id=f"{name_of(document)}: {command}")
    for document in COMMANDED
    for command, shown in re.findall(r"(?s)```console\n\$ ([^\n]*)\n(.*?)```", document.read_text())
]
"""Commands with what they print."""


@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_a_command_prints_what_is_shown(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line `…` stands for any lines."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(ROOT)
    if command.startswith("cs336 benchmark "):
        print_committed_run(command)
    else:
        program, *argv = shlex.split(command)
        assert (program, cli.main(argv)) == ("cs336", 0)
    printed = "\n" + "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    parts = f"\n{shown.rstrip()}".split("\n…")
    assert re.search(r"\n(?:.*\n)*?.*".join(map(re.escape, parts)), printed), printed


def foretelling() -> set[str]:
    """The commands that nothing but this computer's CPU is needed for, but those that are shown
    with what they print.
    """
    shown = {" ".join(shlex.split(param.values[0])[1:]) for param in SHOWN}
    commands = {
        shlex.join([name, *words])
        for document in COMMANDED
        for name, words in commands_of(document)
        if name in ("account", "plan") and words and not {*words} & {*OF_READERS, PLACEHOLDER}
    }
    return commands - shown


@pytest.mark.parametrize("command", sorted(foretelling()))
def test_a_forecast_that_is_named_is_made(command: str, here: Path) -> None:
    assert cli.main(shlex.split(command)) == 0


def print_committed_run(command: str) -> None:
    """What `cs336 benchmark` printed of the run of this command, which the document links to."""
    directory = DATA / "e2e_benchmark" / "train"
    (record,) = (
        record
        for record in load_records(directory / "runs")[0]
        if command
        == f"cs336 benchmark --size {record.config.size} --context-length "
        f"{record.config.model.context_length} --mixed-precision"
        and record.config.precision == "bf16"
    )
    print_run(record, directory / "runs" / f"{record.key}.json", load_ceilings(DATA / "ceilings"))


# Programs


def programs(document: str) -> list[str]:
    return re.findall(r"(?s)```python\n(.*?)```", (ROOT / document).read_text())


class Called(nn.Module):
    """A model that returns an object with its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.head(batch).square().mean())


def test_the_loop_that_is_shown_reports_its_steps(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cs336.watched.loop._written_page", lambda _: None)  # which takes seconds
    (program,) = programs("docs/LOOP.md")
    model = Called()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(14, 4), batch_size=2)
    exec(program, {"model": model, "optimizer": optimizer, "loader": loader})
    (record,), problems = load_records(here / "data/e2e_benchmark/mine/runs")
    assert not problems
    # of seven batches the first five are the warm-up
    assert len(record.times_s["step"]) == 2
    assert "backward" in capsys.readouterr().out


def test_the_model_that_is_shown_makes_logits_of_tokens() -> None:
    (program,) = programs("docs/MODEL.md")
    names: dict[str, object] = {}
    exec(program, names)
    model = names["make"](vocab_size=11, d_model=16)
    assert model(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, 11)


def test_a_tested_step_has_what_is_named() -> None:
    tested = pytest.importorskip("cs336.tested_step").TestedStep
    (program,) = programs("docs/TESTS.md")
    rows = re.findall(r"(?m)^\| (`.*?) \|", (ROOT / "docs/TESTS.md").read_text())
    names = re.findall(r"\bstep\.(\w+)", program) + re.findall(r"`(\w+)", " ".join(rows))
    assert [name for name in names if not hasattr(tested, name)] == []


@pytest.mark.parametrize("program", programs("docs/API.md"))
def test_a_program_that_is_shown_prints(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(program, {})
    assert capsys.readouterr().out


# The gallery


@cache
def words_of(page: Path) -> str:
    """What a page says, without its program, its style and its pictures."""
    text = re.sub(r"(?s)<(script|style|svg)\b.*?</\1>", "", page.read_text(encoding="utf-8"))
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)))


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rounds(said: str, value: str) -> bool:
    """Whether the figure is the value, rounded to as many digits as the figure has."""
    unit = 10.0 ** -len(said.partition(".")[2])
    # half a unit, and what floating point may add to it
    return abs(float(said.replace(",", "")) - float(value)) <= 0.5 * unit * (1 + 1e-9)


def has_three_digits(figure: str) -> bool:
    """Whether a figure is as exact as a page says peaks: one that is rounded more is any value."""
    return len(re.sub(r"\D", "", figure).lstrip("0")) >= 3


NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
TIME, DEVIATION, PEAK = "step_mean_ms", "step_std_ms", "peak_allocated_gib"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_gallery_has_the_times_and_peaks_of_its_table(name: str) -> None:
    text = words_of(GALLERY / f"{name}.html")
    times = re.findall(f"{NUMBER} ± {NUMBER}", text)
    figures = [figure for figure in re.findall(NUMBER, text) if has_three_digits(figure)]
    rows = [row for row in rows_of(DATA / PAGES[name] / "results.csv") if row["status"] == "ok"]
    assert rows
    for row in rows:
        assert any(
            rounds(mean, row[TIME]) and rounds(deviation, row[DEVIATION])
            for mean, deviation in times
        ), row[TIME]
        assert any(rounds(figure, row[PEAK]) for figure in figures), row[PEAK]


def test_the_page_of_a_strangers_trace_has_the_times_of_the_trace() -> None:
    """The kernels of the first rank and its steps by the host's clock, added up here."""
    with gzip.open(STRANGER / "rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    of_host = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [e["dur"] / 1e3 for e in of_host if e["name"].startswith("ProfilerStep#")]
    kernels = [e["dur"] / 1e3 for e in events if e.get("cat") == "kernel"]
    text = words_of(GALLERY / "stranger.html")
    said = [mean for mean, _ in re.findall(f"{NUMBER} ± {NUMBER}", text)]
    for time_ms in (statistics.mean(steps), sum(kernels) / len(steps)):
        assert any(rounds(mean, str(time_ms)) for mean in said if has_three_digits(mean)), time_ms


@pytest.mark.parametrize("page", sorted(GALLERY.glob("*.html")), ids=lambda path: path.name)
def test_a_page_of_the_gallery_stands_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < MOST_BYTES
    assert str(ROOT) not in text
    assert "/tmp/" not in text
    assert f'href="gallery/{page.name}"' in (ROOT / "docs" / "GALLERY.md").read_text()
    links = re.findall(r'(?:href|src)="([^"#]+)"', words_without_program(text))
    assert [link for link in links if not link.startswith(("data:", "https:"))] == []


def words_without_program(text: str) -> str:
    return re.sub(r"(?s)<script\b.*?</script>", "", text)
