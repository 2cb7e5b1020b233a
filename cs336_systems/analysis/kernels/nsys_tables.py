"""The tables of a SQLite export of nsys, which may be missing and whose columns vary by version."""

import sqlite3
from array import array
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..columns import Ints, ProfileError
from .trace import Strings, check_times

_NOTHING: Mapping[str, int] = MappingProxyType({})


class Tables:
    """Reads plain tables of an export, whole and without joins."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection
        connection.text_factory = lambda text: text.decode(errors="replace")
        # only tables have a root page: reading a view or a virtual table would run code of the file
        rows = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        )
        self.present = {name for (name,) in rows}
        self.strings = Strings(self.names("StringIds", "value"))

    def columns(self, table: str) -> set[str]:
        """Names of the table's stored columns, without computed ones."""
        return {row[1] for row in self.connection.execute(f"PRAGMA table_info({table})")}

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is this table, with all of these columns."""
        return table in self.present and {*columns} <= self.columns(table)

    def ints(
        self,
        table: str,
        needed: Mapping[str, int | None],
        optional: Mapping[str, int] = _NOTHING,
        where: str = "1",
    ) -> list[Ints]:
        """Read columns of whole numbers: the `needed` ones, then the `optional` ones, of the rows
        that fulfil the condition `where`.

        The mappings give the value that replaces NULL, and for optional columns that of a missing
        column. A missing table has no rows. Raises ProfileError if a needed column is missing or
        holds anything but whole numbers.
        """
        num_columns = len(needed) + len(optional)
        if table not in self.present:
            return [np.zeros(0, dtype=np.int64)] * num_columns
        present = self.columns(table)
        missing = [name for name in needed if name.removesuffix(" IS NULL") not in present]
        if missing:
            raise ProfileError(
                self.path,
                f"table {table} needs columns {', '.join(needed)}, and has no "
                f"{', '.join(missing)}: export the report again with a newer nsys",
            )
        columns = [_expression(name, value) for name, value in needed.items()]
        for name, value in optional.items():
            columns.append(_expression(name, value) if name in present else str(value))
        # so that all queries have one order of rows
        query = f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED WHERE {where}"
        try:
            flat = array("q", chain.from_iterable(self.connection.execute(query)))
        except (TypeError, OverflowError) as error:
            raise ProfileError(
                self.path,
                f"table {table} needs whole numbers in columns {', '.join((*needed, *optional))}, "
                f"and has others ({error}): the export is damaged",
            ) from error
        rows = np.frombuffer(flat, dtype=np.int64).reshape(-1, num_columns)
        return list(np.ascontiguousarray(rows.T))

    def rows(self, table: str, *columns: str, where: str = "1") -> list[tuple[Any, ...]]:
        """The values of these columns, row by row; nothing if the table or a column is missing."""
        if not self.has(table, *columns):
            return []
        query = f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED WHERE {where}"
        return self.connection.execute(query).fetchall()

    def names(self, table: str, column: str) -> dict[int, str]:
        """Names by id, from a table of names; empty if the table is missing."""
        rows = self.rows(table, "id", column)
        return {number: str(text) for number, text in rows if text is not None}

    def check_times(self, table: str, start: Ints, end: Ints) -> None:
        """Raise ProfileError for times that cannot be."""
        try:
            check_times(start, end, f"rows of table {table}")
        except ValueError as error:
            raise ProfileError(self.path, f"{error}: the export is damaged") from error


def _expression(column: str, if_null: int | None) -> str:
    """The SQL for a column, or for an expression such as `end IS NULL`."""
    quoted = f'"{column}"' if " " not in column else column
    return quoted if if_null is None else f"IFNULL({quoted}, {if_null})"
