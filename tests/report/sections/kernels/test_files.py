"""Tables for a terminal and files of one trace and of several."""

import csv
import io
import re
from dataclasses import replace

import pytest
from matplotlib.image import imread

from cs336_systems.analysis.kernels.step_profile import decode_profile
from cs336_systems.report.formats import WRITERS, csv_of
from cs336_systems.report.sections.kernels import files as kernel_files
from cs336_systems.report.sections.kernels.details import details
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.files import SUBJECTS, tables_of, tables_of_one, write_kernels
from cs336_systems.report.words import MAX_LABEL
from tests.report.making import HOSTILE
from tests.report.sections.kernels.profiles import (
    FORWARD,
    make_cpu_profile,
    make_entry,
    make_inference,
    make_kernels,
    make_profile,
    with_names,
)

ALL_PROFILES = (make_profile, make_inference, make_cpu_profile)


def of_file(make=make_profile, **changes):
    return Explained(profile=make(**changes))


@pytest.mark.usefixtures("no_pictures")
def test_findings_are_numbered_in_their_order(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_files, "findings", lambda *_: ("first", "second"))
    table = tables_of_one(of_file(), 3)[0]
    assert (table.title, table.rows) == ("Findings", (("1", "first"), ("2", "second")))
    monkeypatch.setattr(kernel_files, "findings", lambda *_: ())
    assert tables_of_one(of_file(), 3)[0].title == "Phases of a step"
    write_kernels([of_file()], tmp_path, 3)
    assert "Nothing stands out." in (tmp_path / "findings.md").read_text()


def test_tables_for_a_terminal_say_once_what_they_are_of():
    tables = tables_of_one(of_file(), 3)
    assert tables[0].notes[0] == "small.nsys-rep, NVIDIA H200, 2 steps."
    assert sum("small.nsys-rep" in note for table in tables for note in table.notes) == 1


def test_no_entries_no_files(tmp_path):
    assert write_kernels([], tmp_path / "nothing") == []
    assert not (tmp_path / "nothing").exists()
    assert tables_of([]) == []


@pytest.mark.parametrize("make", ALL_PROFILES)
def test_share_columns_to_read_add_up(make):
    for table in tables_of_one(of_file(make), 100):
        for index, heading in enumerate(table.headings):
            cells = [row[index] for row in table.rows]
            if heading.name == "share":
                parts = cells[:-1] if "step" in table.rows[-1] else cells
                assert sum(map(float, parts)) == pytest.approx(100, abs=0.06 * len(parts))


READABLE = ("csv", *WRITERS)
OF_ANY = {f"{name}.{ending}" for name in ("phases", "classes", "attention")
          for ending in READABLE}  # fmt: skip
OF_ONE = {f"{name}.{ending}" for name in ("kernels", "modules", "idle", "host_calls") for ending in READABLE}
OF_ONE |= {"findings.md", "profile.json", "plots/timeline.png"}
NOT_OF_A_CPU = ("idle", "host_calls", "attention", "plots/timeline")
"""A CPU is its own host, and this trace has no ranges."""


def names(directory):
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("no_pictures")
def test_files_of_one_trace(tmp_path):
    directory = tmp_path / "new" / "kernels"
    paths = write_kernels([of_file()], directory, 3)
    assert {path.relative_to(directory).as_posix() for path in paths} == names(directory) == OF_ANY | OF_ONE
    assert decode_profile((directory / "profile.json").read_bytes()) == make_profile()
    for path in directory.glob("*.[mt][dey]*"):
        assert "small.nsys-rep" in path.read_text(), path
    write_kernels([of_file(make_cpu_profile)], directory, 3)
    kept = {name for name in OF_ANY | OF_ONE if not name.startswith(NOT_OF_A_CPU)}
    assert names(directory) == kept, "files of the trace before are removed"
    assert "operators" in (directory / "kernels.tex").read_text()


def test_files_of_several_traces(tmp_path):
    paths = write_kernels([make_entry(), make_entry(context_length=512)], tmp_path)
    expected = OF_ANY | {f"top_kernels.{ending}" for ending in READABLE} | {"plots/configurations.png"}
    expected |= {f"plots/small_ctx_{context}_timeline.png" for context in (128, 512)}
    assert {path.relative_to(tmp_path).as_posix() for path in paths} == names(tmp_path) == expected
    assert imread(tmp_path / "plots" / "configurations.png").ndim == 3
    write_kernels([make_entry(make_profile(attention=()))], tmp_path)
    assert not list(tmp_path.glob("attention.*"))


EVIL = (HOSTILE, "</script><img onerror=x>", "$x$ \\input{x}", "a\nb|c", "=1+1", "x" * 8000, "`" * 5, " ")


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.usefixtures("no_pictures")
def test_names_are_inert_in_every_format(text, tmp_path):
    def sections(name):
        profile = with_names(make_profile, name)
        return [*(make([Explained(profile=profile)]) for make in SUBJECTS), *details(profile, 10)]

    literal = re.compile(r'"(?:[^"\\\n]|\\.)*"')
    for found, harmless in zip(sections(text), sections("quiet"), strict=True):
        for table, other in zip(found.tables, harmless.tables, strict=True):
            written = {ending: write(table) for ending, write in WRITERS.items()}
            assert not re.search(r"<(?:img|/script)", written["md"])
            assert not re.search(r"(?<!\\)\$|\\input", written["tex"].replace(r"$\pm$", ""))
            assert written["tex"].count("\n") == WRITERS["tex"](other).count("\n")
            assert literal.sub("", written["typ"]) == literal.sub("", WRITERS["typ"](other))
            assert all(len(cell) <= 5 * MAX_LABEL for row in table.rows for cell in row)
        parsed = list(csv.reader(io.StringIO(csv_of(found), newline="")))
        assert len({len(row) for row in parsed}) <= 1
        assert not any(cell.startswith("=") for row in parsed for cell in row)
    profile = replace(with_names(make_profile, text), device_names=(text[:99],))
    assert write_kernels([Explained(profile=profile)], tmp_path, 10)


@pytest.mark.usefixtures("no_pictures")
def test_hostile_names_are_inert_in_every_file_of_a_sweep(tmp_path):
    kernels = make_kernels({FORWARD: ((HOSTILE + "x" * 8000, 2, 10),)})
    write_kernels([make_entry(make_profile(kernels=kernels, source=HOSTILE), size=HOSTILE)], tmp_path)
    for ending in ("md", "tex", "typ"):
        text = (tmp_path / f"top_kernels.{ending}").read_text()
        assert not any(character in text for character in "\r\t\0\x1b")
    assert "<" not in (tmp_path / "top_kernels.md").read_text()
    assert r"\input{" not in (tmp_path / "top_kernels.tex").read_text()
    with (tmp_path / "top_kernels.csv").open(newline="") as file:
        assert all(found["name"].startswith("'=HYPERLINK") for found in csv.DictReader(file))
