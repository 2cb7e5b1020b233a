"""Writes a table as Markdown, LaTeX, Typst or for the terminal, and rows of values as CSV.

There is one function for each format. Cells may hold any text, such as a kernel's name or an error message: each
function escapes what its format would read as markup.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import rich.box
import rich.table
from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from cs336_systems.report.columns import Column
from cs336_systems.report.table import Table
from cs336_systems.text import LONGEST_LINE, inert_line

FORMULA_STARTS = frozenset("=+-@\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}"
                           "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}")  # fmt: skip
"""First characters that make a spreadsheet read a text as a formula (OWASP, CSV injection)."""
CSV_DIGITS = 9
"""Significant digits of a number in a CSV file: a nanosecond in a second."""
MAX_WORD = 24
"""Longest part of a word, in characters, that a terminal keeps on one line."""
LONGEST_ON_TERMINAL = 1000
"""Longest text of a cell in the terminal, in characters; the longest cell sets the width of its column."""
LONGEST_CELL = 32_000
"""Longest text in a CSV file, in characters: a spreadsheet's cell holds 32,767."""
LONGEST_CAPTION = 20_000
"""Longest caption of a LaTeX or Typst table, in characters; it holds the title and all notes."""

_MARKDOWN = str.maketrans(
    {**{c: f"\\{c}" for c in "\\`*_[]#|~$"}, "&": "&amp;", "<": "&lt;", ">": "&gt;"}
)  # fmt: skip
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
    """The values as CSV. None and NaN are empty; texts that a spreadsheet would read as formulas begin with a quote."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_csv_text(name) for name in header])
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return buffer.getvalue()


def _csv_cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return format(value, f".{CSV_DIGITS}g")
    if isinstance(value, bool | int):
        return str(value)
    return _csv_text(str(value))


def _csv_text(text: str) -> str:
    text = inert_line(text, LONGEST_CELL)
    return f"'{text}" if text.lstrip()[:1] in FORMULA_STARTS else text


def to_markdown(table: Table) -> str:
    """A pipe table below its title."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rules = ["---:" if heading.numeric else ":---" for heading in table.headings]
    header = line(_markdown(heading.label) for heading in table.headings)
    rows = [line(map(_markdown, row)) for row in table.rows]
    notes = [text for note in table.notes for text in ("", _markdown_paragraph(note))]
    return _text_of(f"### {_markdown(table.title)}", "", header, line(rules), *rows, *notes)


def _markdown(text: str) -> str:
    """The text with everything escaped that Markdown would read as markup."""
    return inert_line(text).translate(_MARKDOWN)


def _markdown_paragraph(text: str) -> str:
    escaped = _markdown(text).strip()
    return f"\\{escaped}" if escaped[:1] in ("-", "+", "=") else escaped


def to_latex(table: Table) -> str:
    """A floating booktabs table."""
    return _text_of(
        r"% needs \usepackage{booktabs}",
        r"\begin{table}[htbp]",
        r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{_latex(_caption(table), LONGEST_CAPTION)}}}",
        rf"\begin{{tabular}}{{{''.join('r' if heading.numeric else 'l' for heading in table.headings)}}}",
        r"\toprule",
        _latex_row(heading.label for heading in table.headings),
        r"\midrule",
        *map(_latex_row, table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    )


def _latex(text: str, longest: int = LONGEST_LINE) -> str:
    return inert_line(text, longest).translate(_LATEX)


def _latex_row(cells: Iterable[str]) -> str:
    return rf"{' & '.join(map(_latex, cells))} \\"


def to_typst(table: Table) -> str:
    """A figure that holds a table. Every text is a string literal, in which no markup is read."""
    return _text_of(
        "#figure(",
        f"  caption: {_typst(_caption(table), LONGEST_CAPTION)},",
        "  table(",
        f"    columns: {len(table.headings)},",
        f"    align: ({', '.join('right' if heading.numeric else 'left' for heading in table.headings)},),",
        "    stroke: none,",
        "    table.hline(),",
        f"    table.header({', '.join(f'strong({_typst(heading.label)})' for heading in table.headings)},),",
        "    table.hline(stroke: 0.5pt),",
        *(f"    {', '.join(map(_typst, row))}," for row in table.rows),
        "    table.hline(),",
        "  ),",
        ")",
    )


def _typst(text: str, longest: int = LONGEST_LINE) -> str:
    escaped = inert_line(text, longest).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text_of(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def _caption(table: Table) -> str:
    title = table.title if table.title.endswith((".", "?", "!")) else f"{table.title}."
    return " ".join([title, *table.notes])


def to_rich(table: Table, width: int | None = None, where: str = "") -> Group:
    """Title, table and notes for a terminal of `width` characters; None is unlimited.

    If the table is too wide, columns with a `drop_order` are left out; a note names them, followed by `where`, which
    says where to find them.
    """
    columns = range(len(table.headings))
    texts = [[inert_line(row[column], LONGEST_ON_TERMINAL) for row in table.rows] for column in columns]
    layout = _fit(table.headings, texts, width)
    body = _body(table, texts, layout) if layout.widths else _list(table, texts, layout)
    left_out = [heading.label.strip() for column, heading in enumerate(table.headings) if column not in layout.columns]
    names = ", ".join(dict.fromkeys(left_out))
    notes = [*table.notes, *([f"Not shown at this width: {names}{where}."] if left_out else [])]
    return Group(Text(inert_line(table.title), style="bold"), body, *(Text(inert_line(note)) for note in notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The columns that a terminal shows, and their widths."""

    columns: Sequence[int]
    """Indices of the columns that are shown."""
    widths: Sequence[int] = ()
    """Width of each shown column, in characters; empty if no table fits, so that each cell has a line of its own."""
    gap: int = 2
    """Spaces between two columns."""


def _fit(headings: Sequence[Column], texts: Sequence[Sequence[str]], width: int | None) -> _Layout:
    """Choose columns and widths; `texts` are the cells of each column.

    If all cells fit on one line each, nothing is wrapped. Otherwise headings and texts wrap, and columns are left out
    by their `drop_order`; if even that is too wide, numbers wrap too.
    """
    columns = range(len(headings))
    whole = [_widest([*_lines(heading), *cells]) for heading, cells in zip(headings, texts, strict=True)]
    if width is None or sum(whole) + 2 * (len(whole) - 1) <= width:
        return _Layout(columns=columns, widths=whole)
    words = [_widest(_words([*_lines(heading), *cells])) for heading, cells in zip(headings, texts, strict=True)]
    firm = [
        max(words[column], _widest(texts[column])) if headings[column].numeric else words[column] for column in columns
    ]
    by_worth = sorted(columns, key=lambda column: headings[column].drop_order)
    fewest = max(1, sum(not heading.drop_order for heading in headings))
    selections = [sorted(by_worth[:number]) for number in range(len(headings), fewest - 1, -1)]
    ways = [(shown, firm, gap) for shown in selections for gap in (2, 1)]
    for shown, least, gap in (*ways, (selections[-1], words, 1)):
        room = width - gap * (len(shown) - 1)
        if sum(least[column] for column in shown) <= room:
            return _Layout(columns=shown, widths=_stretched(least, whole, shown, room), gap=gap)
    return _Layout(columns=selections[-1])


def _stretched(least: Sequence[int], most: Sequence[int], columns: Sequence[int], room: int) -> list[int]:
    """Widths between `least` and `most` that fill the room; columns that need little more than `least` come first."""
    widths = {column: least[column] for column in columns}
    left = room - sum(widths.values())
    for rank, column in enumerate(sorted(columns, key=lambda column: most[column] - least[column])):
        given = min(most[column] - least[column], left // (len(columns) - rank))
        widths[column] += given
        left -= given
    return list(widths.values())


def _lines(heading: Column) -> list[str]:
    return [inert_line(part) for part in (heading.name, heading.unit) if part]


def _words(texts: Iterable[str]) -> list[str]:
    """The pieces that stay on one line if texts wrap; a word longer than MAX_WORD is cut."""
    return [word[:MAX_WORD] for text in texts for word in re.split(r" +(?!±)", text)]


def _widest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _body(table: Table, texts: Sequence[Sequence[str]], layout: _Layout) -> rich.table.Table:
    drawn = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, layout.gap - 1, 0, 0)
    )
    for column, width in zip(layout.columns, layout.widths, strict=True):
        heading = table.headings[column]
        drawn.add_column(
            Text("\n".join(_lines(heading))),
            justify="right" if heading.numeric else "left",
            width=width,
            overflow="fold",
        )
    for index in range(len(table.rows)):
        cells = (Text(texts[column][index]) for column in layout.columns)
        drawn.add_row(*cells, style=FAILED_STYLE if index in table.failed else None)
    return drawn


def _list(table: Table, texts: Sequence[Sequence[str]], layout: _Layout) -> Text:
    """The table as a list: a line for each cell, and a blank line between two rows."""
    blocks = []
    for index in range(len(table.rows)):
        lines = [f"{inert_line(table.headings[c].label)}: {texts[c][index]}" for c in layout.columns if texts[c][index]]
        blocks.append(Text("\n".join(lines), style=FAILED_STYLE if index in table.failed else ""))
    return Text("\n\n").join(blocks)


FAILED_STYLE = "dim red"
WRITERS: Mapping[str, Callable[[Table], str]] = {"md": to_markdown, "tex": to_latex, "typ": to_typst}
"""The function that writes a table, by the ending of the file."""
