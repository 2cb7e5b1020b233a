"""Sections and checks of another distribution are seen in the terminal, the files and the page."""

import re
from pathlib import Path

import pytest

from cs336.analysis.kernels.step_profile import encode_profile
from cs336.analysis.memory.profile import encode_memory_profile
from cs336.cli import main
from cs336.commands.measuring import show_results
from cs336.config import Profiler
from cs336.record import write_record
from cs336.report.page.chapters import page_of
from cs336.report.page.directory import Directory
from cs336.report.page.html import to_html
from cs336.report.progress import StatusLine
from cs336.report.results import Results
from cs336.report.sections import plugged
from cs336.report.sections.memory.entry import MemoryEntry
from tests.plugins import install
from tests.report.making import make_config, make_record
from tests.report.sections.kernels.profiles import make_entry, make_profile
from tests.report.sections.memory.profiles import make_memory

pytestmark = pytest.mark.usefixtures("no_pictures")

SOURCE = """
from cs336.report.columns import Column
from cs336.report.section import Section, make_table
from cs336.report.sections.plugged import AddedCheck, AddedSection
from {module} import {of}

def make(subject):
    rows = [{{"tail": 4711}}]
    table = make_table("Tails", [Column("tail", key="tail", write=str)], rows)
    return Section(name="tails", tables=(table,), rows=rows)

SECTION = AddedSection(of={of}, make=make)
CHECK = AddedCheck(of={of}, find=lambda subject: "A rule of others says 0.815.")
"""
OF_KERNELS = SOURCE.format(module="cs336.report.sections.kernels.entry", of="Explained")
OF_MEMORY = SOURCE.format(module="cs336.report.sections.memory.entry", of="MemoryEntry")
OF_RESULTS = SOURCE.format(module="cs336.report.results", of="Results")
FILES = Path(__file__).parents[3] / "docs/FILES.md"
SECTION, CHECK = "4711", "A rule of others says 0.815."


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a plug-in of this source."""

    def added(source: str, section: str = "SECTION", check: str = "CHECK") -> None:
        plugins = tmp_path / "plugins"
        plugins.mkdir()
        points = {plugged.SECTIONS: section, plugged.CHECKS: check}
        install(monkeypatch, plugins, source, points)

    plugged._loaded.cache_clear()
    yield added
    plugged._loaded.cache_clear()


def page_text(**parts: object) -> str:
    return to_html(page_of(Directory(path=Path("a"), results=Results(**parts))))


@pytest.mark.parametrize("command", ["kernels", "memory"])
def test_a_plugin_adds_to_explained_files(
    command: str, add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(OF_KERNELS if command == "kernels" else OF_MEMORY)
    entry, file, output = make_entry(make_profile()), tmp_path / "profile.json", tmp_path / "out"
    if command == "kernels":
        file.write_bytes(encode_profile(entry.profile))
        page = page_text(records=[entry.profiled], kernels=[entry])
    else:
        file.write_bytes(encode_memory_profile(make_memory()))
        config = make_config(profiler=Profiler.MEMORY)
        memory = MemoryEntry(profile=make_memory(), subject=config)
        page = page_text(records=[make_record(config, (0.1, 0.1))], memory=[memory])
    assert main([command, str(file), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert SECTION in printed
    assert CHECK in printed
    assert SECTION in (output / "plugin_tails.csv").read_text()
    assert CHECK in (output / "findings.md").read_text().replace("\\", "")
    assert SECTION in page
    assert CHECK in page


def test_a_plugin_adds_to_the_results_of_a_sweep(
    add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(OF_RESULTS)
    record = make_record(make_config(), (0.1, 0.2, 0.3))
    (tmp_path / "runs").mkdir()
    write_record(record, tmp_path / "runs")
    with StatusLine() as status:
        show_results([record], tmp_path, status, ())
    printed = capsys.readouterr().out
    page = (tmp_path / "index.html").read_text()
    for text, name in ((SECTION, "plugin_tails.csv"), (CHECK, "plugin_findings.csv")):
        assert text in printed
        assert text in page
        assert text in (tmp_path / name).read_text()


def test_a_plugin_that_fails_costs_a_warning_and_no_table(
    add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(OF_KERNELS.replace("rows = ", "rows = 1 / 0 or "))
    (tmp_path / "profile.json").write_bytes(encode_profile(make_profile()))
    assert main(["kernels", str(tmp_path / "profile.json")]) == 0
    printed = capsys.readouterr()
    assert "Phases of a step" in printed.out
    assert "plug-in some_plugin.make failed" in printed.err
    assert "division by zero" in printed.err


def test_the_plugin_in_the_documentation_works(
    add, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall("```python\n(.*?)```", FILES.read_text(), re.DOTALL)
    add(example, "TAILS", "BUSY")
    (tmp_path / "profile.json").write_bytes(encode_profile(make_profile()))
    assert main(["kernels", str(tmp_path / "profile.json")]) == 0
    printed = capsys.readouterr()
    assert "Shortest kernels" in printed.out
    assert "warning" not in printed.err
