"""What stands in a table, in the CSV file of a section, and in a sentence."""

import csv
import io
import re

import pytest

from cs336.report.formats import csv_of


def column(table, name, number=0):
    """Cells below the heading of this name, or of the one so many after it that is called the
    same.
    """
    found = [index for index, heading in enumerate(table.headings) if heading.name == name]
    return [row[found[number]] for row in table.rows]


def csv_rows(section, **chosen):
    """Rows of the section's CSV file, or those that have these values."""
    found = csv.DictReader(io.StringIO(csv_of(section), newline=""))
    return [row for row in found if all(row[key] == value for key, value in chosen.items())]


def numbers(text: str) -> list[float]:
    """All numbers of a sentence."""
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def has_extremes(text: str, values: list[float]) -> bool:
    """Whether the least and the largest value are in the text, to the three digits that it
    shows.
    """
    return all(pytest.approx(end, rel=5e-3) in numbers(text) for end in (min(values), max(values)))
