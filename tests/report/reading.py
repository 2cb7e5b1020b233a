"""What stands in a table, and in the CSV file of a section."""

import csv
import io

from cs336_systems.report.formats import csv_of


def column(table, name, number=0):
    """Cells below the heading of this name, or of the one so many after it that is called the same."""
    found = [index for index, heading in enumerate(table.headings) if heading.name == name]
    return [row[found[number]] for row in table.rows]


def csv_rows(section, **chosen):
    """Rows of the section's CSV file, or those that have these values."""
    found = csv.DictReader(io.StringIO(csv_of(section), newline=""))
    return [row for row in found if all(row[key] == value for key, value in chosen.items())]
