"""Runs recorded by the allocator, with their memory profiles and plain twins, and what tells them apart."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cs336_systems.analysis.memory.profile import MemoryProfile
from cs336_systems.config import RunConfig
from cs336_systems.costs.memory import predicted_peak_bytes
from cs336_systems.record import RunRecord
from cs336_systems.report.columns import Column
from cs336_systems.report.frame import order
from cs336_systems.report.identity import Identity, csv_with_identities, identities, identity_columns, names_of, telling
from cs336_systems.report.listing import Listing
from cs336_systems.report.table import make_table
from cs336_systems.report.words import shared_settings

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry:
    """A run whose memory was recorded, where it went, and the same run without a recording."""

    config: RunConfig
    """Of the recorded run."""
    profile: MemoryProfile
    plain: RunRecord | None
    """None where there is no such run."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the peak is only what the run had before memory ran out."""
        return self.profile.work.out_of_memory > 0

    @property
    def is_first_step(self) -> bool:
        """Whether nothing but the first step of all was recorded, which ends before others need the most."""
        return self.config.warmup_steps == 0 and self.config.measured_steps == 1

    @property
    def plain_peak_bytes(self) -> int | None:
        """The allocator's own peak without a recording; None where it is not known, or is that of later steps."""
        memory = None if self.plain is None else self.plain.memory
        is_of_others = self.plain is not None and self.is_first_step and self.plain.config.warmup_steps > 0
        return None if memory is None or is_of_others else memory.peak_allocated_bytes

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Of the recorded steps; None where that is not predicted."""
        return predicted_peak_bytes(self.config)

    @property
    def device_name(self) -> str | None:
        """By the plain twin; None where there is none."""
        environment = None if self.plain is None else self.plain.environment
        return None if environment is None else environment.identity.device_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Generic[Part]):
    """One row of a table over configurations."""

    entry: MemoryEntry
    identity: Identity
    part: Part
    """What of the entry the row is about."""


def in_order(entries: Iterable[MemoryEntry]) -> list[MemoryEntry]:
    """The entries as tables list them."""
    return sorted(entries, key=lambda entry: order(entry.config))


def identities_of(entries: Sequence[MemoryEntry]) -> list[Identity]:
    """Which configuration each entry is."""
    return identities((entry.config, entry.device_name) for entry in entries)


def labels(
    entries: Sequence[MemoryEntry], *, always: Sequence[str] = ("size", "context_length"), without: Sequence[str] = ()
) -> list[str]:
    """A few words for each entry, with what tells it from the others: `small ctx 128 train bf16`."""
    return names_of(identities_of(entries), always=always, without=without)


def settings(entries: Sequence[MemoryEntry]) -> str:
    """What all entries share, in words."""
    return shared_settings([(entry.config, entry.device_name) for entry in entries])


def rows_of_entries(entries: Sequence[MemoryEntry], parts: Callable[[MemoryEntry], Sequence[Part]]) -> list[Row[Part]]:
    """A row for each part of each entry."""
    named = zip(entries, identities_of(entries), strict=True)
    return [Row(entry=entry, identity=row, part=part) for entry, row in named for part in parts(entry)]


def make_listing(
    name: str,
    title: str,
    rows: Sequence[Row[Part]],
    columns: Sequence[Column[Row[Part]]],
    csv: Mapping[str, Callable[[Row[Part]], object]],
    notes: Sequence[str],
    without: Sequence[str] = (),
    among: Sequence[MemoryEntry] = (),
) -> Listing:
    """The columns after those that tell the configurations apart, `without` some; in the CSV all that say which it is.

    What all configurations share, those of the rows or all `among` which a row stands for several, is said once, below
    the table. Nothing at all where there are no rows.
    """
    if not rows:
        return Listing(name=name, tables=(), csv="")
    told = [row.identity for row in rows]
    names = [name for name in telling(told) if name not in without]
    before: list[Column[Row[Part]]] = identity_columns(names, told, lambda row: row.identity)
    shared = settings(among or [row.entry for row in rows])
    failed = [row.entry.is_out_of_memory for row in rows]
    table = make_table(
        title, [*before, *columns], rows, [*notes, *([f"{shared}."] if shared else [])],
        (lambda row: row.entry.is_out_of_memory) if any(failed) else None,
    )  # fmt: skip
    values = [(row.identity, [value(row) for value in csv.values()]) for row in rows]
    return Listing(name=name, tables=(table,), csv=csv_with_identities(values, tuple(csv)) if csv else "")
