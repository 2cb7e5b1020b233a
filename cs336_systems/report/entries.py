"""Tables of explained profiles: first the columns that distinguish the configurations, then those of the values."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.config import Profiler, RunConfig
from cs336_systems.record import RunRecord, Status
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
from cs336_systems.report.section import FINDING, Section, finding_rows, make_table
from cs336_systems.text import print_aside


class Entry(Protocol):
    """An explained profile, with what is known of its run."""

    @property
    def config(self) -> RunConfig | None:
        """Configuration of the profiled run; None for a file without a record."""

    @property
    def device_name(self) -> str | None:
        """Name of the device; None if it is unknown."""


E = TypeVar("E", bound=Entry)


def load_entries(
    records: Iterable[RunRecord], profilers: Collection[Profiler], load: Callable[[RunRecord], E]
) -> list[E]:
    """The entries that `load` makes of the runs under these profilers, in the order of tables.

    Profiles for which `load` raises ProfileError are left out, with one warning that counts them and names the first.
    """
    from cs336_systems.report.frame import order  # pandas is slow to import, and only entries need it

    found, problems = [], []
    for record in sorted(records, key=lambda record: order(record.config)):
        if record.config.profiler in profilers:
            try:
                found.append(load(record))
            except ProfileError as error:
                ended = "" if record.status is Status.OK else f"; the run ended as {record.status}"
                problems.append(f"{record.config.label}: {error}{ended}")
    if problems:
        others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        print_aside(f"warning: no explained profile{others}: {problems[0]}")
    return found


def identities_of(entries: Sequence[Entry]) -> list[Identity]:
    """The identity of each entry; empty for a file without a record."""
    known = [(entry.config, entry.device_name) for entry in entries if entry.config is not None]
    found = iter(identities(known))
    return [{} if entry.config is None else next(found) for entry in entries]


def labels(entries: Sequence[Entry], *, always: Sequence[str] = ALWAYS, without: Sequence[str] = ()) -> list[str]:
    """A name for each entry, of the settings that distinguish it: `small ctx 128 train bf16`."""
    return names_of(identities_of(entries), always=always, without=without)


def settings(entries: Sequence[Entry], also: Collection[str] = ()) -> str:
    """The settings that all entries share, in words."""
    known = [(entry.config, entry.device_name) for entry in entries if entry.config is not None]
    return shared_settings(known, also)


def rows_of(entries: Sequence[E], parts: Callable[[E], Iterable[Mapping[str, object]]]) -> list[Row]:
    """A row for each part of each entry: the settings of the entry, the values of the part, and the entry itself."""
    identified = zip(entries, identities_of(entries), strict=True)
    return [{**own, **part, "entry": entry, "identity": own} for entry, own in identified for part in parts(entry)]


def over_configurations(
    name: str,
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    csv: Sequence[str],
    notes: Iterable[str],
    *,
    shown: Callable[[Row], bool] = lambda _: True,
) -> Section:
    """A section with one table of the rows that are `shown`, and with all rows and the columns `csv` in the CSV file.

    In the table, the columns that distinguish the configurations come first. Columns whose values are all 0 or unknown
    are left out. A note names the settings that all configurations share, and for a single configuration its size and
    context too. The CSV file has all settings of each row. Without shown rows there is no table.
    """
    kept = [row for row in rows if shown(row)]
    is_single = all(row["identity"] == kept[0]["identity"] for row in kept)
    before = [] if is_single else identity_columns(kept)
    columns = [column for column in columns if not column.key or any(row[column.key] for row in kept)]
    shared = settings([row["entry"] for row in kept], ALWAYS if is_single else ())
    table = make_table(
        title, [*before, *columns], kept, [*notes, *([f"{shared}."] if shared else [])],
        lambda row: row.get("status", Status.OK) != Status.OK,
    )  # fmt: skip
    every = [row | row["identity"] for row in rows] if csv else []
    before_csv = [name for name in LEADING if rows and name in rows[0]["identity"]]
    keys = (*before_csv, *csv, *trailing([row["identity"] for row in rows]))
    return Section(name=name, tables=(table,) if kept else (), rows=every, keys=keys)


def findings_section(name: str, entries: Sequence[E], find: Callable[[E], Iterable[str]]) -> Section:
    """What `find` says of each profile, in rows."""
    rows = rows_of(entries, lambda entry: finding_rows(find(entry)))
    return over_configurations(name, "Findings", rows, FINDING, [column.key for column in FINDING], ())
