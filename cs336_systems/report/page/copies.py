"""Texts that a reader copies from a table: its lines in each format; the page leaves out hidden rows and columns."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cs336_systems.report.formats import Line, Lines, latex_lines, markdown_lines, to_csv, typst_lines
from cs336_systems.report.table import Table

WRITERS: Mapping[str, Callable[[Table], Lines]] = {
    "Markdown": markdown_lines, "LaTeX": latex_lines, "Typst": typst_lines,
}  # fmt: skip
FORMATS = (*WRITERS, "CSV")


def copies(table: Table, values: str) -> dict[str, Any]:
    """The lines of the table in each format, as JSON; `values` is the CSV file of its subject, or empty."""
    lines = {name: _as_json(write(table)) for name, write in WRITERS.items()}
    return lines | {"CSV": _csv_copy(table, values)}


def _csv_copy(table: Table, values: str) -> dict[str, Any]:
    """The rows of the CSV file that the table shows; if it has other rows than the table, the cells as they are shown.

    `columns` has, for each column of the file, the column of the table that shows it, or None. `whole` is what is
    copied of the unchanged table, where that is not these rows.
    """
    header, *rows = csv.reader(io.StringIO(values)) if values else [[]]
    numbers = _numbers(table, header, rows)
    if numbers is None:
        whole = {"whole": values} if values else {}
        shown = to_csv([heading.label for heading in table.headings], table.rows)
        return _as_json(_csv_lines(list(csv.reader(io.StringIO(shown))))) | whole
    owners = {key: place for place, own in enumerate(table.headings) for key in (own.key, own.std) if key}
    whole = {} if numbers == list(range(len(rows))) else {"whole": values}
    lines = _csv_lines([header, *(rows[number] for number in numbers)])
    return _as_json(lines) | {"columns": [owners.get(key) for key in header]} | whole


def _numbers(table: Table, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int] | None:
    """For each row of the table, the number of the CSV file's row with the same values; None where one has none."""
    places = [place for place, key in enumerate(header) if table.values and key in table.values[0]]
    if not places or len(table.values) != len(table.rows):
        return None
    known: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        known.setdefault(tuple(row[place] for place in places), []).append(number)
    own = to_csv(
        [header[place] for place in places], ([row[header[place]] for place in places] for row in table.values)
    )
    found = []
    for cells in list(csv.reader(io.StringIO(own)))[1:]:
        if not (same := known.get(tuple(cells))):
            return None
        found.append(same.pop(0))
    return found


def _csv_lines(rows: Sequence[Sequence[str]]) -> Lines:
    lines = [Line("", tuple(map(_quoted, row)), ",", "") for row in rows]
    return Lines(tuple(lines[:1]), tuple(lines[1:]))


def _quoted(cell: str) -> str:
    """The cell as it stands in a CSV file."""
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="").writerow((cell, ""))
    return buffer.getvalue()[:-1]


def _as_json(lines: Lines) -> dict[str, Any]:
    def part(line: Line | str) -> object:
        return line if isinstance(line, str) else [line.before, line.between, line.after, line.parts]

    return {"head": list(map(part, lines.head)), "rows": list(map(part, lines.rows)), "foot": lines.foot}
