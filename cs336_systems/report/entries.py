"""Tables over the configurations of a sweep: rows with what tells them apart before what was found in each."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from cs336_systems.config import RunConfig
from cs336_systems.record import Status
from cs336_systems.report.columns import Column, Row
from cs336_systems.report.identity import (
    ALWAYS,
    LEADING,
    Identity,
    identities,
    identity_columns,
    names_of,
    shared_settings,
    trailing,
)
from cs336_systems.report.section import Section
from cs336_systems.report.table import make_table

Values: TypeAlias = Row


class Entry(Protocol):
    """A run whose profile was explained."""

    @property
    def config(self) -> RunConfig | None:
        """Of the profiled run; None for a file of which nothing else is known."""

    @property
    def device_name(self) -> str | None:
        """None where it is not known."""


E = TypeVar("E", bound=Entry)


def identities_of(entries: Sequence[Entry]) -> list[Identity]:
    """Which configuration each entry is; empty for a file of which none is known."""
    known = [(entry.config, entry.device_name) for entry in entries if entry.config is not None]
    found = iter(identities(known))
    return [{} if entry.config is None else next(found) for entry in entries]


def labels(entries: Sequence[Entry], *, always: Sequence[str] = ALWAYS, without: Sequence[str] = ()) -> list[str]:
    """A few words for each entry, with what tells it from the others: `small ctx 128 train bf16`."""
    return names_of(identities_of(entries), always=always, without=without)


def settings(entries: Sequence[Entry], also: Collection[str] = ()) -> str:
    """What all entries share, in words."""
    known = [(entry.config, entry.device_name) for entry in entries if entry.config is not None]
    return shared_settings(known, also)


def rows_of(entries: Sequence[E], parts: Callable[[E], Iterable[Mapping[str, object]]]) -> list[Values]:
    """A row for each part of each entry: its configuration by column, what the part holds, and the entry itself."""
    identified = zip(entries, identities_of(entries), strict=True)
    return [{**own, **part, "entry": entry, "identity": own} for entry, own in identified for part in parts(entry)]


def over_configurations(
    name: str,
    title: str,
    rows: Sequence[Values],
    columns: Sequence[Column],
    csv: Sequence[str],
    notes: Iterable[str],
    *,
    shown: Callable[[Values], bool] = lambda _: True,
    without: Sequence[str] = (),
    among: Sequence[Entry] = (),
) -> Section:
    """The columns after those that tell the configurations apart, `without` some; in the CSV all that say which it is.

    Columns that have no value but 0 in any row that is `shown` are left out. What all configurations share, those of
    the rows or all `among` which a row stands for several, is said once, below the table: of a single configuration
    its size and context too. Nothing at all where there are no rows.
    """
    kept = [row for row in rows if shown(row)]
    is_single = all(row["identity"] == kept[0]["identity"] for row in kept)
    before = [] if is_single else identity_columns(kept, without=without)
    columns = [column for column in columns if not column.key or any(row[column.key] for row in kept)]
    shared = settings(among or [row["entry"] for row in kept], ALWAYS if is_single else ())
    table = make_table(
        title, [*before, *columns], kept, [*notes, *([f"{shared}."] if shared else [])],
        lambda row: row.get("status", Status.OK) != Status.OK,
    )  # fmt: skip
    every = [row | row["identity"] for row in rows] if csv else []
    before_csv = [name for name in LEADING if rows and name in rows[0]["identity"]]
    keys = (*before_csv, *csv, *trailing([row["identity"] for row in rows]))
    return Section(name=name, tables=(table,) if kept else (), rows=every, keys=keys)
