"""Tables of one hand-made profile (see profiles.py) and of several, for a terminal and as files."""

import pytest
from matplotlib.image import imread

from cs336.analysis.kernels.step_profile import decode_profile
from cs336.report.formats import ON_REQUEST, WRITERS
from cs336.report.progress import StatusLine
from cs336.report.results import Results
from cs336.report.section import Finding
from cs336.report.sections.kernels import files as kernel_files
from cs336.report.sections.kernels import findings as kernel_findings
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.files import (
    MAX_MODULES,
    answer_of,
    collapsed,
    idle_section,
    kernels_section,
    modules_section,
    sections_of,
    tables_of,
    tables_of_one,
    write_kernels,
)
from tests.report.reading import column, csv_rows
from tests.report.sections.kernels.profiles import (
    FORWARD,
    GEMM_A,
    GEMM_B,
    NAMES,
    make_cpu_profile,
    make_entry,
    make_module,
    make_profile,
    numbers,
)

READABLE = ("csv", *WRITERS)
OF_ANY = {f"{name}.{ending}" for name in ("phases", "classes", "attention") for ending in READABLE}
OF_ONE = {f"{name}.{ending}" for name in ("kernels", "modules", "idle") for ending in READABLE}
OF_ONE |= {"findings.md", "profile.json", "plots/timeline.png"}
NOT_OF_A_CPU = ("idle", "attention", "plots/timeline")
"""A CPU is its own host, and this trace has no ranges."""


def of_file(make=make_profile, **changes):
    return Explained(profile=make(**changes))


def names(directory):
    return {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    }


@pytest.mark.usefixtures("no_pictures")
def test_the_answer_has_three_sentences_and_further_findings_are_lines(monkeypatch, tmp_path):
    for texts in (("1st",), ("1st", "2nd", "3rd", "4th", "5th")):
        made = tuple(Finding(code="test", text=text) for text in texts)
        for module in (kernel_files, kernel_findings):
            monkeypatch.setattr(module, "findings", lambda *_, made=made: made)
        lines = answer_of(of_file())
        assert lines[: len(texts[:3])] == list(texts[:3])
        assert all(lines[:3])
        assert lines[3:] == (["", "- 4th", "- 5th"] if len(texts) > 3 else [])
    monkeypatch.setattr(kernel_files, "findings", lambda *_: ())
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
    paths = write_kernels(of_file(), directory, 3, ON_REQUEST)
    assert (
        {path.relative_to(directory).as_posix() for path in paths}
        == names(directory)
        == OF_ANY | OF_ONE
    )
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
    assert [section.name for section in sections if section.tables] == [
        "phases",
        "classes",
        "attention",
        "top_kernels",
    ]
    expected = ["configurations", *(f"small_ctx_{context}_timeline" for context in (128, 512))]
    assert [picture.name for section in sections for picture in section.pictures] == expected
    Results(records=[], kernels=entries[:1]).write(tmp_path, StatusLine())
    assert imread(tmp_path / "plots" / "small_ctx_128_timeline.png").ndim == 3


# kernels


def test_top_kernels_by_hand():
    whole, forward, backward, optimizer = kernels_section(make_profile(), 2).tables
    assert column(whole, "kernel") == [GEMM_A, "vectorized_elementwise_kernel<mul>"]
    assert column(whole, "share") == ["35.0", "27.5"]  # 14 and 11 of 40 ms
    assert column(whole, "total") == ["7.000", "5.500"]
    assert column(whole, "count") == ["8", "10"]
    # 14 ms in 16 launches
    assert [column(whole, name)[0] for name in ("mean", "median", "min", "max", "std")] == [
        "875.0",
        "787.5",
        "437.5",
        "1,750",
        "87.50",
    ]
    assert column(whole, "class") == ["matrix product", "element-wise"]
    assert "Shown are 2 of 7 different kernels, 62.5 % of the time." in whole.notes
    assert column(forward, "total") == ["3.000", "1.500"]
    assert column(backward, "share") == ["40.0", "40.0"]  # of backward's 20 ms
    assert column(optimizer, "count") == ["8", "2"]
    assert [table.title for table in (whole, forward)] == [
        "Kernels of a whole step, by GPU time",
        "Kernels of forward, by GPU time",
    ]


def test_kernels_csv_has_all_with_their_whole_names():
    section = kernels_section(make_profile(), 1)
    assert len(csv_rows(section)) == 7 + 3 + 4 + 2
    assert {row["name"] for row in csv_rows(section)} == {
        name for found in NAMES.values() for name, *_ in found
    }
    for phase in ("step", "forward", "backward", "optimizer"):
        assert sum(numbers(section, "share", phase=phase)) == pytest.approx(1)
    assert sum(numbers(section, "total_ms_per_step", phase="step")) == pytest.approx(20)
    cutlass = [row for row in csv_rows(section) if row["name"] == GEMM_B]
    assert [(row["phase"], row["count"], row["mean_ms"]) for row in cutlass] == [
        ("step", "4", "2"),
        ("backward", "4", "2"),
    ]


# modules


def test_modules_by_hand():
    (table,) = modules_section(make_profile()).tables
    found = {row[0]: row[1:] for row in table.rows}
    # forward, backward, optimizer, share, kernels
    assert found["outside of all ranges"] == ("", "1.000", "5.000", "30.0", "11")
    assert found["block.* > ffn"] == ("1.500", "4.000", "", "27.5", "4")
    assert found["block.* > attention"] == ("", "5.000", "", "25.0", "5")
    assert found["block.* > attention > attention.scores"] == ("1.250", "", "", "6.2", "2")
    section = modules_section(make_profile())
    assert sum(numbers(section, "share")) == pytest.approx(1)
    assert sum(numbers(section, "total_ms_per_step")) == pytest.approx(20)
    assert sum(
        float(row["share"])
        for row in csv_rows(section)
        if row["module"].endswith("> attention > attention.values")
    ) == pytest.approx(0.0375)


@pytest.mark.parametrize(
    ("name", "star"),
    [
        ("block.31", "block.*"),
        ("layers.3", "layers.*"),
        ("TransformerBlock_3", "TransformerBlock_*"),
        ("h.11", "h.*"),
        ("Layer 2", "Layer *"),
        ("fc1", "fc1"),
        ("ln_2", "ln_2"),
        ("block", "block"),
        ("block.3.ffn", "block.3.ffn"),
        ("gather layers.3", "gather layers.*"),
        ("scatter lm_head", "scatter lm_head"),
        ("FSDP::all_gather (model.layers.3)", "FSDP::all_gather (model.layers.*)"),
    ],
)
def test_only_numbers_of_blocks_become_stars(name, star):
    assert collapsed(("model", name, "ffn")) == ("model", star, "ffn")


def test_many_modules_are_cut_to_read_and_kept_as_csv():
    modules = tuple(
        make_module((f"part_{chr(97 + i)}",), FORWARD, 2, 1) for i in range(MAX_MODULES + 5)
    )
    section = modules_section(make_profile(modules=modules))
    (table,) = section.tables
    assert len(table.rows) == MAX_MODULES
    assert table.notes[-1] == "Shown are 20 of 25 modules, 80.0 % of the time."
    assert len(csv_rows(section)) == 25


# idle times and the host


def test_idle_times_by_hand():
    section = idle_section(make_profile())
    (table,) = section.tables
    assert column(table, "phase")[:2] == ["forward", "backward"]
    assert column(table, "cause")[:2] == ["late launch", "host waited"]
    assert column(table, "idle") == [
        "2.500",
        "1.500",
        "0.7500",
        "0.5000",
        "0.4000",
        "0.2500",
        "5.900",
    ]
    # of 52 ms
    assert column(table, "of wall") == ["9.6", "5.8", "2.9", "1.9", "1.5", "1.0", "22.7"]
    assert column(table, "times") == ["5", "1", "2", "0.50", "4", "1", "13.50"]
    # what is not busy is idle
    assert sum(numbers(section, "share_of_wall")) == pytest.approx(1 - 40.2 / 52)
