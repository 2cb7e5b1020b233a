"""Which rows of a CSV file stand for the rows of a table."""

from cs336_systems.report.page.copies import copies
from tests.report.page.pages import csv_of, make_steps


def test_each_row_of_the_table_has_the_row_of_the_file_with_its_values() -> None:
    table = make_steps()
    values = csv_of([{"size": "huge", "step_mean_ms": 1.0}, *reversed(table.values)])
    found = copies(table, values)["CSV"]
    assert [list(parts) for *_, parts in found["rows"]] == [
        ['"a, b"', "small", "0.0995"], ['"a, b"', "medium", "0.1004"], ['"a, b"', "large", ""],
        ['"a, b"', "xl", "0.00991"],
    ]  # fmt: skip
    assert found["columns"] == [None, 0, 1]
    assert found["whole"] == values
    assert "whole" not in copies(table, csv_of(table.values))["CSV"]


def test_a_file_of_other_rows_is_copied_whole_or_else_the_cells_as_they_are_shown() -> None:
    table = make_steps()
    for values in (csv_of(table.values[:3]), "device\nCPU\n"):
        found = copies(table, values)["CSV"]
        assert found["whole"] == values
        assert [tuple(parts) for *_, parts in found["rows"]] == list(table.rows)
        assert "columns" not in found
