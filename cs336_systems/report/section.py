"""What a report consists of: sections, each with tables for people and values for programs.

The function of a section makes rows, which are dicts of values, chooses columns from `columns.py`,
and gives both to `make_table`, which writes the cells. `formats.py` writes the finished section to
files, `terminal.py` its tables to a terminal. Tables of explained profiles begin with the columns
that distinguish the configurations.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..analysis.columns import ProfileError
from ..config import Profiler
from ..record import RunRecord, Status
from ..subject import Subject
from ..text import print_aside
from . import identity
from .column import Column, Row
from .columns import columns_of
from .configurations import order

if TYPE_CHECKING:
    from .charts import Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table for people. Its cells are text, rounded and scaled for reading; `values` has the
    values themselves.
    """

    title: str
    headings: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    """Sentences below the table."""
    findings: tuple[str, ...] = ()
    """The notes that say what stands out; a page shows them first."""
    failed: frozenset[int] = frozenset()
    """Indices of the rows of failed runs, which a terminal shows in another colour."""
    values: tuple[Mapping[str, Any], ...] = ()
    """The values that the rows were made from, by key: unrounded, in the units of CSV files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence about an explained profile, and what it claims."""

    code: str
    """What the sentence says, as one word for programs."""
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the sentence by name: seconds and counts per step, bytes, shares."""
    cost: float = 0.0
    """Time or memory that it costs; findings stand in this order, the largest first."""


FINDING = (
    Column("no.", key="number", write=str),
    Column("finding", key="finding", numeric=False, write=str),
)


def finding_rows(findings: Iterable[Finding | str]) -> list[Row]:
    """A row for each finding, with its number."""
    rows = []
    for number, finding in enumerate(findings, 1):
        text = finding if isinstance(finding, str) else finding.text
        rows.append({"number": number, "finding": text})
    return rows


def findings_table(findings: Sequence[Finding | str], none: str = "") -> Table:
    """A table of numbered findings; if there are none, its note is `none`."""
    rows = finding_rows(findings)
    return make_table("Findings", FINDING, rows, () if rows or not none else (none,))


def with_note(table: Table, note: str) -> Table:
    """The table with one more note, which comes first."""
    return replace(table, notes=(note, *table.notes))


def known(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns that have a value in at least one row."""
    return [column for column in columns if any(map(column.cell, rows))]


def quantity_table(
    title: str,
    rows: Iterable[Sequence[object]],
    notes: Iterable[str],
    keys: Sequence[str] = ("quantity", "amount", "unit"),
) -> Table:
    """A table with one quantity on each line. Each row holds the values of the columns with
    these keys, in order.
    """
    values = [dict(zip(keys, row, strict=True)) for row in rows]
    return make_table(title, columns_of(*keys), values, notes)


def make_table(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Mapping[str, Any]],
    notes: Iterable[str] = (),
    failed: Callable[[Any], bool] | None = None,
    findings: Iterable[str] = (),
) -> Table:
    """Make a table: write the cell of each column for each row; `failed` says which rows are those
    of failed runs.

    `findings` are those of the notes that say what stands out.
    """
    kept = tuple(rows)
    cells = []
    for row in kept:
        cells.append(tuple(column.cell(row) for column in columns))
    of_failed = []
    if failed is not None:
        of_failed = [index for index, row in enumerate(kept) if failed(row)]
    return Table(
        title=title,
        headings=tuple(columns),
        rows=tuple(cells),
        notes=tuple(notes),
        findings=tuple(findings),
        failed=frozenset(of_failed),
        values=kept,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One subject of a report: its tables for people, and its values for a CSV file."""

    name: str
    """Name of the files, without an ending."""
    tables: tuple[Table, ...] = ()
    """Empty if the subject is written as CSV only."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The values by key, in the units of the CSV file; empty if nothing is known of the subject."""
    keys: Sequence[str] = ()
    """Keys of the CSV file's columns, in order; if empty, all keys of the first row."""
    pictures: "Sequence[Picture]" = ()
    """Pictures in files of their names in plots/, and on the page."""


def all_tables(sections: Iterable[Section]) -> list[Table]:
    """The tables of all these sections, in order."""
    return list(chain.from_iterable(section.tables for section in sections))


class Entry(Protocol):
    """An explained profile, or a row of results, with what is known of its run."""

    @property
    def subject(self) -> Subject | None:
        """What was profiled; None for a file without a record."""

    @property
    def device_name(self) -> str | None:
        """Name of the device; None if it is unknown."""


E = TypeVar("E", bound=Entry)


def load_entries(
    records: Iterable[RunRecord], profilers: Collection[Profiler], load: Callable[[RunRecord], E]
) -> list[E]:
    """The entries that `load` makes of the runs under these profilers, in the order of tables.

    Profiles for which `load` raises ProfileError are left out, with one warning that counts them
    and names the first.
    """
    entries, problems = [], []
    for record in sorted(records, key=lambda record: order(record.subject)):
        if record.subject.profiler in profilers:
            try:
                entries.append(load(record))
            except ProfileError as error:
                ended = "" if record.status is Status.OK else f"; the run ended as {record.status}"
                problems.append(f"{record.subject.label}: {error}{ended}")
    if problems:
        others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        print_aside(f"warning: no explained profile{others}: {problems[0]}")
    return entries


def identities_of(entries: Sequence[Entry]) -> list[identity.Identity]:
    """The identity of each entry; empty for a file without a record."""
    identities = iter(identity.identities(_runs(entries)))
    return [{} if entry.subject is None else next(identities) for entry in entries]


def _runs(entries: Iterable[Entry]) -> list[tuple[Subject, str | None]]:
    """The subject and the device's name of each entry that has a subject."""
    return [(entry.subject, entry.device_name) for entry in entries if entry.subject is not None]


def labels(entries: Sequence[Entry], always: Sequence[str] = identity.ALWAYS) -> list[str]:
    """A name for each entry, of the settings that distinguish it: `small ctx 128 train bf16`."""
    return identity.names_of(identities_of(entries), always)


def short_labels(entries: Sequence[Entry]) -> list[str]:
    """Short names that tell several entries apart, for a headline; none for a single one."""
    return identity.short_names_of(identities_of(entries)) if len(entries) > 1 else []


def distinct_labels(entries: Sequence[Entry]) -> list[str]:
    """Names that tell several entries apart; none for a single one."""
    return labels(entries) if len(entries) > 1 else []


def settings(entries: Iterable[Entry], also: Collection[str] = ()) -> str:
    """The settings that all entries share, in words."""
    return identity.shared_settings(_runs(entries), also)


def rows_of(
    entries: Sequence[E], parts: Callable[[E], Iterable[Mapping[str, object]]]
) -> list[Row]:
    """A row for each part of each entry: the settings of the entry, the values of the part, and
    the entry itself.
    """
    rows = []
    for entry, of_entry in zip(entries, identities_of(entries), strict=True):
        whole: Row = {"entry": entry, "identity": of_entry}
        rows += [{**of_entry, **part, **whole} for part in parts(entry)]
    return rows


def over_configurations(
    name: str,
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    notes: Iterable[str] = (),
    csv: Sequence[str] | None = None,
    *,
    shown: Callable[[Row], bool] = lambda _: True,
) -> Section:
    """A section about several configurations: a table for people, and a CSV file of all rows.

    The rows are those of `rows_of`. The table has the rows for which `shown` is true; without such
    rows there is no table. Its first columns distinguish the configurations; then come `columns`,
    except those whose values are all 0 or unknown. Below `notes`, a note names the settings that
    all configurations share, and for a single configuration its size and context too. The CSV file
    has the columns `csv`, by default those of the table, and all settings; if `csv` is empty, it
    has no rows.
    """
    if csv is None:
        csv = [column.key for column in columns]
    kept = [row for row in rows if shown(row)]
    is_single = all(row["identity"] == kept[0]["identity"] for row in kept)
    identity_columns = [] if is_single else identity.identity_columns(kept)
    filled = []
    for column in columns:
        is_filled = not column.key or any(row[column.key] for row in kept)
        if is_filled:
            filled.append(column)
    all_notes = list(notes)
    also = identity.ALWAYS if is_single else ()
    if shared := settings([row["entry"] for row in kept], also):
        all_notes.append(f"{shared}.")
    table = make_table(title, [*identity_columns, *filled], kept, all_notes, _has_failed)
    runs = [row["identity"] for row in rows]
    leading = [name for name in identity.LEADING if rows and name in runs[0]]
    return Section(
        name=name,
        tables=(table,) if kept else (),
        rows=[row | row["identity"] for row in rows] if csv else (),
        keys=(*leading, *csv, *identity.trailing(runs)),
    )


def _has_failed(row: Mapping[str, Any]) -> bool:
    """Whether a row has a status, and it is not ok."""
    return bool(row.get("status", Status.OK) != Status.OK)


def findings_section(
    name: str, entries: Sequence[E], find: Callable[[E], Iterable[Finding | str]]
) -> Section:
    """The sentences that `find` returns for each profile, one in a row."""
    rows = rows_of(entries, lambda entry: finding_rows(find(entry)))
    return over_configurations(name, "Findings", rows, FINDING)
