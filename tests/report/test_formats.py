import csv
import html
import io
import re

import pytest
import rich.console

from cs336.report.columns import Column
from cs336.report.formats import to_csv, to_latex, to_markdown, to_typst, write_files
from cs336.report.section import Table, make_table
from cs336.report.terminal import to_rich
from cs336.report.words import mean_and_std, significant
from cs336.text import inert_line
from tests.report.making import HOSTILE

PUNCTUATION = "".join(chr(code) for code in range(32, 127) if not chr(code).isalnum())


def one_cell(text):
    return Table(
        title="title", headings=(Column("a"), Column("b", numeric=False)), rows=((text, "end"),)
    )


def rendered(table, width=100):
    console = rich.console.Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(to_rich(table, width))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (66.312, 4, "66.31"),
        (0.0123456, 3, "0.0123"),
        (9.9996, 4, "10.00"),
        (1166.4, 3, "1,166"),
        (0, 3, "0.00"),
        (1234567.8, 2, "1,234,568"),
        (-2.34, 2, "-2.3"),
        (float("inf"), 3, "inf"),
    ],
)
def test_significant_digits(value, digits, text):
    assert significant(value, digits) == text


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (66.312, 0.123, "66.31 ± 0.12"),
        (66.312, 0.43, "66.3 ± 0.4"),
        (1166.4, 13.2, "1,166 ± 13"),
        (1166.4, 132, "1,166 ± 132"),
        (5.0008, 0.0996, "5.00 ± 0.10"),
        (66.312, None, "66.31"),
        (66.312, 0.0, "66.31 ± 0"),
        (5.2, 1.96, "5 ± 2"),
        (5.2, 1.94, "5.2 ± 1.9"),
        (24.3, 25.4, "24 ± 25"),
        (0.0721, 32.66, "0.072 ± 33"),
    ],
)
def test_mean_is_given_as_far_as_its_deviation_reaches(mean, std, text):
    assert mean_and_std(mean, std) == text


@pytest.mark.parametrize("start", ["=", "+", "-", "@", " =", "\N{FULLWIDTH EQUALS SIGN}"])
def test_csv_text_that_a_spreadsheet_would_run_is_quoted(start):
    text = to_csv(["name"], [[f"{start}1+1"]])
    ((_,), (cell,)) = csv.reader(io.StringIO(text, newline=""))
    assert cell.startswith("'")


def test_csv_comes_back_as_it_was():
    values = [
        'a "quoted", text',
        "tw\\o",
        "\N{SNOWMAN}",
        "",
        "plain -1",
        -1.5,
        0.1 + 0.2,
        -3,
        None,
        float("nan"),
    ]
    (row,) = csv.reader(io.StringIO(to_csv([], [values]).partition("\n")[2], newline=""))
    assert row == [*values[:5], "-1.5", "0.3", "-3", "", ""]
    ((cell,),) = csv.reader(
        io.StringIO(to_csv(["x"], [["\t=a\0b\r\nc\x1b[2J"]]).partition("\n")[2], newline="")
    )
    assert cell == r"\t=a\x00b\r\nc\x1b[2J"


def markdown_cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]]


@pytest.mark.parametrize("text", [HOSTILE, PUNCTUATION, *PUNCTUATION])
def test_markdown_cells_hold_any_text(text):
    table = Table(
        title=text, headings=(Column(text), Column("b")), rows=((text, "end"),), notes=(text,)
    )
    title, _, header, rules, row, _, *_ = to_markdown(table).split("\n")
    assert [len(markdown_cells(line)) for line in (header, rules, row)] == [2, 2, 2]
    cell = markdown_cells(row)[0]
    assert not re.search(r"(?<!\\)[`*_\[\]|~$]|[<>]", re.sub(r"\\\\", "", cell))
    assert html.unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell)) == inert_line(text).strip()
    assert title.startswith("### ")


def test_markdown_note_starts_no_list():
    assert "\n\\- x\n" in to_markdown(
        Table(title="t", headings=(Column("a"),), rows=(), notes=("- x",))
    )


LATEX = {
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "±": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
}


@pytest.mark.parametrize("character", [*PUNCTUATION, "±", "\N{MULTIPLICATION SIGN}", "\n"])
def test_latex_writes_every_character_as_itself(character):
    row = to_latex(one_cell(f"x{character}y")).split("\n")[8]
    assert row == f"x{''.join(LATEX.get(c, c) for c in inert_line(character))}y & end \\\\"


def test_latex_of_hostile_text_has_no_command_in_it():
    text = to_latex(
        Table(title=HOSTILE, headings=(Column(HOSTILE),), rows=((HOSTILE,),), notes=(HOSTILE,))
    )
    assert r"\input" not in text
    assert text.count("\n") == 12
    unescaped = re.sub(r"\\[{}&%$#_\\]", "", text)
    assert unescaped.count("{") == unescaped.count("}")


@pytest.mark.parametrize("character", [*PUNCTUATION, "\n", "±"])
def test_typst_texts_are_string_literals(character):
    row = next(
        line for line in to_typst(one_cell(f"x{character}y")).split("\n") if line.endswith('"end",')
    )
    escaped = "".join({'"': '\\"', "\\": "\\\\"}.get(c, c) for c in inert_line(character))
    assert row == f'    "x{escaped}y", "end",'


def test_typst_has_nothing_of_a_hostile_text_outside_literals():
    quiet, loud = (
        to_typst(Table(title=text, headings=(Column(text),), rows=((text,),), notes=(text,)))
        for text in ("x", HOSTILE)
    )
    literal = re.compile(r'"(?:[^"\\\n]|\\.)*"')
    assert literal.sub("", quiet) == literal.sub("", loud)


def test_numbers_stand_to_the_right_in_every_format():
    table = Table(
        title="t", headings=(Column("n", "ms"), Column("s", numeric=False)), rows=(("1", "x"),)
    )
    assert "| ---: | :--- |" in to_markdown(table)
    assert r"\begin{tabular}{rl}" in to_latex(table)
    assert "align: (right, left,)," in to_typst(table)
    assert [column.justify for column in to_rich(table).renderables[1].columns] == ["right", "left"]
    assert all("n (ms)" in write(table) for write in (to_markdown, to_latex, to_typst))


def test_rich_reads_no_markup_and_passes_no_control_characters():
    text = rendered(one_cell("[red]x[/red] [link=y]z \x1b[31m"), 120)
    assert r"[red]x[/red] [link=y]z \x1b[31m" in text
    assert "\x1b" not in text


def test_failed_rows_stand_out_on_a_terminal():
    table = make_table(
        "t", [Column("n", key="n")], [{"n": 1}, {"n": 2}], failed=lambda row: row["n"] == 2
    )
    assert table.failed == {1}
    assert [row.style for row in to_rich(table).renderables[1].rows] == [None, "dim red"]


def test_formats_on_request_are_written_then_and_never_left_stale(tmp_path):
    def written(text, *formats):
        files = {"a.csv": text, "b/a.tex": text, "a.typ": text}
        paths = write_files(files, tmp_path, formats)
        assert {path.read_text() for path in paths} == {text}
        return {path.relative_to(tmp_path).as_posix() for path in paths}

    assert written("1") == {"a.csv"}
    assert written("2", "tex") == {"a.csv", "b/a.tex"}
    assert written("3", "typ") == {"a.csv", "b/a.tex", "a.typ"}, "as the earlier one would differ"
    assert write_files({"b/a.tex": ""}, tmp_path) == []
    assert written("4") == {"a.csv", "a.typ"}, "as it was removed"
