"""Writes sections to files: tables as Markdown and, where asked, LaTeX and Typst, rows of values
as CSV.

There is one function for each format. Cells may hold any text, such as a kernel's name or an error
message: each function escapes what its format would read as markup.
"""

import csv
import io
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from ..files import write_atomically
from ..text import LONGEST_LINE, inert_line
from .section import Section, Table, with_note

FORMULA_STARTS = frozenset(
    "=+-@\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}"
    "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}"
)
"""First characters that make a spreadsheet read a text as a formula (OWASP, CSV injection)."""
CSV_DIGITS = 9
"""Significant digits of a number in a CSV file: a nanosecond in a second."""
LONGEST_CELL = 32_000
"""Longest text in a CSV file, in characters: a spreadsheet's cell holds 32,767."""
LONGEST_CAPTION = 20_000
"""Longest caption of a LaTeX or Typst table, in characters; it holds the title and all notes."""

_MARKDOWN = str.maketrans(
    {**{c: f"\\{c}" for c in "\\`*_[]#|~$"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"}
)
_LATEX = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "`": r"\textasciigrave{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "[": "{[}",  # after a line's \\ a bracket or a star would be read as its argument
        "]": "{]}",
        "*": "{*}",
        "±": r"$\pm$",
        "\N{MULTIPLICATION SIGN}": r"$\times$",
        "—": "---",
    }
)


def to_csv(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """The values as CSV. None and NaN are empty; texts that a spreadsheet would read as formulas
    begin with a quote.
    """
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_csv_text(name) for name in header])
    for row in rows:
        writer.writerow(map(_csv_cell, row))
    return buffer.getvalue()


def _csv_cell(value: object) -> str:
    """A value as the text of a CSV cell: empty for None and NaN, floats with CSV_DIGITS digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return format(value, f".{CSV_DIGITS}g")
    if isinstance(value, bool | int):
        return str(value)
    return _csv_text(str(value))


def _csv_text(text: str) -> str:
    """A text for a CSV cell, shortened; a leading quote keeps spreadsheets from reading it as a
    formula.
    """
    text = inert_line(text, LONGEST_CELL)
    return f"'{text}" if text.lstrip()[:1] in FORMULA_STARTS else text


def to_markdown(table: Table) -> str:
    """A pipe table below its title."""

    def line(cells: Iterable[str]) -> str:
        """One row of a pipe table."""
        return f"| {' | '.join(cells)} |"

    rules = ["---:" if heading.numeric else ":---" for heading in table.headings]
    header = line(_markdown(heading.label) for heading in table.headings)
    rows = [line(map(_markdown, row)) for row in table.rows]
    notes: list[str] = []
    for note in table.notes:
        notes += ["", _markdown_paragraph(note)]
    return _text_of(f"### {_markdown(table.title)}", "", header, line(rules), *rows, *notes)


def _markdown(text: str) -> str:
    """The text with everything escaped that Markdown would read as markup."""
    return inert_line(text).translate(_MARKDOWN)


def _markdown_paragraph(text: str) -> str:
    """A text as a paragraph of Markdown; a first character that would begin a list or heading is
    escaped.
    """
    escaped = _markdown(text).strip()
    return f"\\{escaped}" if escaped[:1] in ("-", "+", "=") else escaped


def to_latex(table: Table) -> str:
    """A floating booktabs table."""
    alignments = "".join("r" if heading.numeric else "l" for heading in table.headings)
    return _text_of(
        r"% needs \usepackage{booktabs}",
        r"\begin{table}[htbp]",
        r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{_latex(_caption(table), LONGEST_CAPTION)}}}",
        rf"\begin{{tabular}}{{{alignments}}}",
        r"\toprule",
        _latex_row(heading.label for heading in table.headings),
        r"\midrule",
        *map(_latex_row, table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    )


def _latex(text: str, longest: int = LONGEST_LINE) -> str:
    """A text with LaTeX's special characters escaped, cut after `longest` characters."""
    return inert_line(text, longest).translate(_LATEX)


def _latex_row(cells: Iterable[str]) -> str:
    """One row of a LaTeX table."""
    return rf"{' & '.join(map(_latex, cells))} \\"


def to_typst(table: Table) -> str:
    """A figure that holds a table. Every text is a string literal, in which no markup is read."""
    alignments = ", ".join("right" if column.numeric else "left" for column in table.headings)
    headings = ", ".join(f"strong({_typst(column.label)})" for column in table.headings)
    rows = [", ".join(map(_typst, row)) for row in table.rows]
    return _text_of(
        "#figure(",
        f"  caption: {_typst(_caption(table), LONGEST_CAPTION)},",
        "  table(",
        f"    columns: {len(table.headings)},",
        f"    align: ({alignments},),",
        "    stroke: none,",
        "    table.hline(),",
        f"    table.header({headings},),",
        "    table.hline(stroke: 0.5pt),",
        *(f"    {row}," for row in rows),
        "    table.hline(),",
        "  ),",
        ")",
    )


def _typst(text: str, longest: int = LONGEST_LINE) -> str:
    """A text as a string literal of Typst, cut after `longest` characters."""
    escaped = inert_line(text, longest).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text_of(*lines: str) -> str:
    """The lines as one text, each ended by a line break."""
    return "".join(f"{line}\n" for line in lines)


def _caption(table: Table) -> str:
    """The caption of a table: its title as a sentence, then its notes."""
    title = table.title if table.title.endswith((".", "?", "!")) else f"{table.title}."
    return " ".join([title, *table.notes])


WRITERS: Mapping[str, Callable[[Table], str]] = {
    "md": to_markdown,
    "tex": to_latex,
    "typ": to_typst,
}
"""The function that writes a table, by the ending of the file."""
ON_REQUEST = frozenset({"tex", "typ"})
"""Endings of files that are written only if they are asked for, or replace an earlier one."""


def csv_of(section: Section) -> str:
    """The values of the section as CSV; empty without rows."""
    if not section.rows:
        return ""
    keys = section.keys or tuple(section.rows[0])
    return to_csv(keys, ([row[key] for key in keys] for row in section.rows))


def texts_of(section: Section, note: str = "") -> dict[str, str]:
    """The text of each file of the section, empty for a file that has no content; `note` comes
    before a table's own.
    """
    tables = [with_note(table, note) if note else table for table in section.tables]
    texts = {f"{section.name}.csv": csv_of(section)}
    for ending, write in WRITERS.items():
        texts[f"{section.name}.{ending}"] = "\n".join(map(write, tables))
    return texts


def pngs_of(section: Section) -> dict[str, bytes]:
    """The PNG of each picture of the section by its file."""
    # matplotlib is slow to import, and printing does not need it
    from .draw import png_of

    return {f"plots/{picture.name}.png": png_of(picture) for picture in section.pictures}


def write_files(
    files: Mapping[str, str | bytes], directory: Path, formats: Collection[str] = ()
) -> list[Path]:
    """Write each file below the directory, and make folders as needed; return the paths.

    An empty file is not written; an earlier file of the same name is removed. Of the endings
    ON_REQUEST those in `formats` are written; an earlier file is replaced all the same, so that it
    does not differ from the others.
    """
    written = []
    for name, content in files.items():
        path = directory / name
        ending = path.suffix.removeprefix(".")
        if ending in ON_REQUEST and ending not in formats and not path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if not content:
            path.unlink(missing_ok=True)
            continue
        data = content if isinstance(content, bytes) else content.encode(errors="replace")
        write_atomically(path, data)
        written.append(path)
    return written
