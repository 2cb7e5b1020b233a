"""Prints results on standard output: tables, lines, and the summary of a run or a sweep."""

import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod
from rich.containers import Lines
from rich.text import Text

from ..analysis.loop_times import loop_sentences
from ..config import Profiler
from ..record import RunRecord
from ..studies.ceilings_files import NO_CEILINGS, Ceilings, ceilings_beside, load_ceilings_or_warn
from ..sweep.keep import has_explanation
from ..text import inert_line, print_line, shortened, unbroken
from .column import Column
from .configurations import step_results
from .section import FINDING, Table
from .sections.shortage import shortage_table
from .sections.steps import results_table, step_answer
from .words import own_place, own_traceback

UNLIMITED = 1_000_000
"""Width that rich is given for an unlimited width."""
LONGEST_TRACEBACK = 20_000
HEIGHT = 25
"""Lines of the terminal. Nothing printed here depends on it, but without it rich looks for the
width by itself.
"""
MAX_WORD = 24
"""Longest part of a word, in characters, that a terminal keeps on one line."""
LONGEST_ON_TERMINAL = 1000
"""Longest text of a cell in the terminal, in characters; the longest cell sets the width of its
column.
"""
TOP = 10
"""Rows of a table about the profile of one run."""
FAILED_STYLE = "dim red"
JOINT = "\ufdd0"
"""Stands for a space at which no line may end, because rich ends lines at no-break spaces too. No
text has this character: Unicode never assigns it.
"""


class Words(Text):
    """A text that is wrapped between its words, but not within a quantity."""

    def wrap(self, *args: Any, **options: Any) -> Lines:  # noqa: ANN401 (those of rich)
        """The lines of the text, as rich makes them."""
        whole = self.copy()
        whole.plain = unbroken(self.plain, JOINT)
        lines = whole.wrap(*args, **options)
        for line in lines:
            line.plain = line.plain.replace(JOINT, " ")
        return lines


def print_table(table: Table, directory: Path | None = None) -> None:
    """Print a table within the terminal's width; `directory` is where its files are, if it was
    written.
    """
    width = _width()
    where = "" if directory is None else f"; the CSV and Markdown files in {directory} have them"
    _console(width).print(to_rich(table, width, where))


def print_sentences(sentences: Iterable[str]) -> None:
    """Print each sentence on lines of its own, and an empty line behind them; wrapped in a
    terminal only.
    """
    lines = [Words(inert_line(sentence)) for sentence in sentences]
    if lines:
        _console(_width()).print(Group(*lines, ""))


def _width() -> int | None:
    """The width to use: COLUMNS if set, else the terminal's; None, which is unlimited, if the
    output is no terminal.
    """
    try:
        asked = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        asked = 0
    if asked > 0:
        return asked
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _console(width: int | None) -> Console:
    """A console of rich that is so many characters wide, or unlimited."""
    return Console(highlight=False, emoji=False, width=width or UNLIMITED, height=HEIGHT)


def _labelled(label: str, style: str, text: str) -> Group:
    """A text behind a label in the style."""
    return Group(Words.assemble((inert_line(label), style), inert_line(text)))


def print_run(
    record: RunRecord, path: Path | None = None, ceilings: Ceilings = NO_CEILINGS
) -> None:
    """Print the table of one run, its failure or warnings, and the path of its record."""
    results = step_results([record], ceilings)
    print_sentences(step_answer(results[0], record))
    print_table(results_table(results, has_csv=False))
    console = _console(_width())
    if record.failure is not None:
        where = f" in {record.failure.where}" if record.failure.where else ""
        console.print(_labelled(record.status, "red", f"{where}: {record.failure.message}"))
        for line in shortened(own_traceback(record), LONGEST_TRACEBACK).splitlines():
            print_line(line)
    for sentence in loop_sentences(record):
        console.print(Group(Words(inert_line(sentence))))
    if record.seen is not None and record.seen.out_of_memory is not None:
        print_table(shortage_table(record.seen.out_of_memory))
    for warning in record.warnings:
        console.print(_labelled(warning.code, "yellow", f": {warning.message}"))
    print_line(f"record: {path}")


def print_measured(record: RunRecord, runs: Path) -> None:
    """Print the tables of a run that was measured into `runs`, and where its time or memory went
    if that was recorded, also if the run failed.
    """
    ceilings = load_ceilings_or_warn(ceilings_beside(runs.parent))
    print_run(record, runs / f"{record.key}.json", ceilings)
    if record.subject.profiler is Profiler.NONE or not has_explanation(record.subject, runs):
        return
    from .results import Results
    from .sections.kernels.files import tables_of_one as kernel_tables
    from .sections.memory.findings import answer
    from .sections.memory.tables import tables_of_one as memory_tables

    results = Results.load([record], runs.parent)
    print_line("")
    for explained in results.kernels:
        print_tables(kernel_tables(explained, TOP))
    for entry in results.memory:
        texts = [finding.text for finding in answer(entry.profile)]
        print_tables(memory_tables(entry.profile, TOP), answer=texts)


def print_tables(
    tables: Iterable[Table], directory: Path | None = None, answer: Iterable[str] = ()
) -> None:
    """Print the answer in sentences, then each table with an empty line behind it."""
    print_sentences(answer)
    for table in tables:
        print_table(table, directory)
        print_line("")


def print_sweep(tables: Iterable[Table], records: Sequence[RunRecord], directory: Path) -> None:
    """Print the tables of a sweep, its failed runs, and its directory."""
    for table in tables:
        print_table(table, directory)
    console = _console(_width())
    for record in records:
        if record.failure is not None:
            place = own_place(record)
            message = f"{record.failure.message} ({place})" if place else record.failure.message
            console.print(_labelled(record.subject.label, "red", f": {message}"))
    print_line(f"results: {directory}")


def to_rich(table: Table, width: int | None = None, where: str = "") -> Group:
    """Title, table and notes for a terminal of `width` characters; None is unlimited.

    If the table is too wide, columns with a `drop_order` are left out; a note names them, followed
    by `where`, which says where to find them.
    """
    title = Words(inert_line(table.title), style="bold")
    notes = list(table.notes)
    if width is None and table.headings == FINDING:
        lines = [f"{number}. {inert_line(finding)}" for number, finding in table.rows]
        return Group(title, *map(Words, [*lines, *map(inert_line, notes)]))
    texts: list[list[str]] = [[] for _ in table.headings]
    for row in table.rows:
        for cells, cell in zip(texts, row, strict=True):
            cells.append(inert_line(cell, LONGEST_ON_TERMINAL))
    shown, widths, gap = _fit(table.headings, texts, width)
    body = _body(table, texts, shown, widths, gap) if widths else _list(table, texts, shown)
    left_out = [
        heading.label.strip()
        for column, heading in enumerate(table.headings)
        if column not in shown
    ]
    if left_out:
        names = ", ".join(dict.fromkeys(left_out))
        notes.append(f"Not shown at this width: {names}{where}.")
    return Group(title, body, *(Words(inert_line(note)) for note in notes))


def _fit(
    headings: Sequence[Column], texts: Sequence[Sequence[str]], width: int | None
) -> tuple[Sequence[int], Sequence[int], int]:
    """The indices of the columns to show, their widths, and the spaces between; `texts` are the
    cells of each column.

    If all cells fit on one line each, nothing is wrapped. Otherwise headings and texts wrap, and
    columns are left out, those with the highest `drop_order` first, until the others fit. There are
    no widths if even the columns without a `drop_order` do not fit: `to_rich` then writes a list.
    """
    shown: Sequence[int] = range(len(headings))
    heads = [[*_lines(heading), *cells] for heading, cells in zip(headings, texts, strict=True)]
    whole = [*map(_widest, heads)]  # the width of each column if nothing wraps
    if width is None or sum(whole) + 2 * (len(whole) - 1) <= width:
        return shown, whole, 2
    least = []  # the width of each column if all texts wrap that may; numbers never do
    for heading, head, cells in zip(headings, heads, texts, strict=True):
        unbroken = cells if heading.numeric or not heading.wraps else ()
        least.append(_widest([*_words(head), *unbroken]))
    by_drop_order = sorted(shown, key=lambda column: headings[column].drop_order)
    fewest = max(1, sum(not heading.drop_order for heading in headings))
    # narrow gaps are tried before a column is left out
    for number, gap in itertools.product(range(len(headings), fewest - 1, -1), (2, 1)):
        shown = sorted(by_drop_order[:number])
        room = width - gap * (number - 1)
        if sum(least[column] for column in shown) <= room:
            return shown, _stretched(least, whole, shown, room), gap
    return shown, (), 0


def _stretched(
    least: Sequence[int], most: Sequence[int], columns: Sequence[int], room: int
) -> list[int]:
    """Widths between `least` and `most` that fill the room; columns that need little more than
    `least` come first.
    """
    widths = {column: least[column] for column in columns}
    left = room - sum(widths.values())
    for rank, column in enumerate(sorted(columns, key=lambda column: most[column] - least[column])):
        given = min(most[column] - least[column], left // (len(columns) - rank))
        widths[column] += given
        left -= given
    return list(widths.values())


def _lines(heading: Column) -> list[str]:
    """Name and unit of a column, as the lines of its heading."""
    return [inert_line(part) for part in (heading.name, heading.unit) if part]


def _words(texts: Iterable[str]) -> list[str]:
    """The pieces of texts that are not broken when a cell wraps; words longer than MAX_WORD are
    cut.
    """
    words: list[str] = []
    for text in texts:
        words += [word[:MAX_WORD] for word in unbroken(text, JOINT).split(" ")]
    return words


def _widest(texts: Iterable[str]) -> int:
    """Width of the widest text in terminal cells; 0 without texts."""
    return max(map(cell_len, texts), default=0)


def _body(
    table: Table,
    texts: Sequence[Sequence[str]],
    shown: Sequence[int],
    widths: Sequence[int],
    gap: int,
) -> rich.table.Table:
    """The table of rich with the columns `shown`, whose widths in characters are given in that
    order.

    `texts` holds the cells of each column of `table`, and `gap` the spaces between two columns.
    """
    drawn = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0)
    )
    for column, width in zip(shown, widths, strict=True):
        heading = table.headings[column]
        justify: JustifyMethod = "right" if heading.numeric else "left"
        drawn.add_column(
            Text("\n".join(_lines(heading))), justify=justify, width=width, overflow="fold"
        )
    for index in range(len(table.rows)):
        cells = (Words(texts[column][index]) for column in shown)
        drawn.add_row(*cells, style=FAILED_STYLE if index in table.failed else None)
    return drawn


def _list(table: Table, texts: Sequence[Sequence[str]], shown: Sequence[int]) -> Group:
    """The table as a list: a line for each cell, and a blank line between two rows."""
    blocks: list[Words | str] = []
    for index in range(len(table.rows)):
        lines = []
        for column in shown:
            if text := texts[column][index]:
                lines.append(f"{inert_line(table.headings[column].label)}: {text}")
        # an empty line between two rows
        blocks += [""] if blocks else []
        blocks.append(Words("\n".join(lines), style=FAILED_STYLE if index in table.failed else ""))
    return Group(*blocks)
