"""Tables for a terminal and files of one trace and of several."""

import pytest
from matplotlib.image import imread

from cs336_systems.analysis.kernels.step_profile import decode_profile
from cs336_systems.report.formats import WRITERS
from cs336_systems.report.progress import StatusLine
from cs336_systems.report.results import Results
from cs336_systems.report.sections.kernels import files as kernel_files
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.files import sections_of, tables_of, tables_of_one, write_kernels
from tests.report.sections.kernels.profiles import make_cpu_profile, make_entry, make_profile

READABLE = ("csv", *WRITERS)
OF_ANY = {f"{name}.{ending}" for name in ("phases", "classes", "attention") for ending in READABLE}
OF_ONE = {f"{name}.{ending}" for name in ("kernels", "modules", "idle", "host_calls") for ending in READABLE}
OF_ONE |= {"findings.md", "profile.json", "plots/timeline.png"}
NOT_OF_A_CPU = ("idle", "host_calls", "attention", "plots/timeline")
"""A CPU is its own host, and this trace has no ranges."""


def of_file(make=make_profile, **changes):
    return Explained(profile=make(**changes))


def names(directory):
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("no_pictures")
def test_findings_are_numbered_in_their_order(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_files, "findings", lambda *_: ("first", "second"))
    table = tables_of_one(of_file(), 3)[0]
    assert (table.title, table.rows) == ("Findings", (("1", "first"), ("2", "second")))
    monkeypatch.setattr(kernel_files, "findings", lambda *_: ())
    assert tables_of_one(of_file(), 3)[0].title == "Phases of a step"
    write_kernels(of_file(), tmp_path, 3)
    assert "Nothing stands out." in (tmp_path / "findings.md").read_text()


def test_tables_for_a_terminal_say_once_what_they_are_of():
    tables = tables_of_one(of_file(), 3)
    assert tables[0].notes[0] == "small.nsys-rep, NVIDIA H200, 2 steps."
    assert sum("small.nsys-rep" in note for table in tables for note in table.notes) == 1
    assert tables_of([]) == []


@pytest.mark.parametrize("make", [make_profile, make_cpu_profile])
def test_share_columns_to_read_add_up(make):
    for table in tables_of_one(of_file(make), 100):
        for index, heading in enumerate(table.headings):
            cells = [row[index] for row in table.rows]
            if heading.name == "share":
                parts = cells[:-1] if "step" in table.rows[-1] else cells
                assert sum(map(float, parts)) == pytest.approx(100, abs=0.06 * len(parts))


@pytest.mark.usefixtures("no_pictures")
def test_files_of_one_trace(tmp_path):
    directory = tmp_path / "new" / "kernels"
    paths = write_kernels(of_file(), directory, 3)
    assert {path.relative_to(directory).as_posix() for path in paths} == names(directory) == OF_ANY | OF_ONE
    assert decode_profile((directory / "profile.json").read_bytes()) == make_profile()
    for path in directory.glob("*.[mt][dey]*"):
        assert "small.nsys-rep" in path.read_text(), path
    write_kernels(of_file(make_cpu_profile), directory, 3)
    kept = {name for name in OF_ANY | OF_ONE if not name.startswith(NOT_OF_A_CPU)}
    assert names(directory) == kept, "files of the trace before are removed"
    assert "operators" in (directory / "kernels.tex").read_text()


def test_sections_of_several_traces(tmp_path):
    entries = [make_entry(), make_entry(context_length=512)]
    sections = sections_of(entries)
    assert [section.name for section in sections if section.tables] == ["phases", "classes", "attention", "top_kernels"]
    expected = ["configurations", *(f"small_ctx_{context}_timeline" for context in (128, 512))]
    assert [picture.name for section in sections for picture in section.pictures] == expected
    Results(records=[], kernels=entries[:1]).write(tmp_path, StatusLine())
    assert imread(tmp_path / "plots" / "small_ctx_128_timeline.png").ndim == 3
