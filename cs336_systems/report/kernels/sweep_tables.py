"""Tables over the configurations of a sweep: times of the phases, what the profiler costs. More in kernel_sweep_shares.

Times are per step, as in the tables of a single trace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cs336_systems.analysis.kernels.step_profile import Work
from cs336_systems.config import Phase
from cs336_systems.report.columns import Column
from cs336_systems.report.identity import Identity, csv_with_identities, identity_columns, telling
from cs336_systems.report.kernels.entries import Profiled, identities_of
from cs336_systems.report.kernels.tables import PhaseRow, phase_rows
from cs336_systems.report.kernels.terms import count_per_step, milliseconds, terms
from cs336_systems.report.listing import Listing, percent, share
from cs336_systems.report.numbers import significant
from cs336_systems.report.table import make_table
from cs336_systems.report.words import shared_settings

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Generic[Part]):
    """One row of a table over configurations."""

    entry: Profiled
    identity: Identity
    part: Part
    """What of the entry the row is about."""

    @property
    def steps(self) -> int:
        return self.entry.profile.num_steps


def rows_of_entries(entries: Sequence[Profiled], parts: Callable[[Profiled], Sequence[Part]]) -> list[Row[Part]]:
    """A row for each part of each entry."""
    return [
        Row(entry=entry, identity=named, part=part)
        for entry, named in zip(entries, identities_of(entries), strict=True)
        for part in parts(entry)
    ]


def make_listing(
    name: str,
    title: str,
    rows: Sequence[Row[Part]],
    columns: Sequence[Column[Row[Part]]],
    csv: Mapping[str, Callable[[Row[Part]], object]],
    note: str,
    shown: Callable[[Row[Part]], bool] = lambda _: True,
) -> Listing:
    """The columns and, before them, those that tell the configurations apart; in the CSV all that say which they are.

    What all configurations share is said once, below the table. Nothing at all where there are no rows.
    """
    kept = [row for row in rows if shown(row)]
    told = [row.identity for row in kept]
    before: list[Column[Row[Part]]] = identity_columns(telling(told), told, lambda row: row.identity)
    settings = shared_settings([(row.entry.config, row.identity["device_name"]) for row in kept])
    table = make_table(title, [*before, *columns], kept, [note, *([f"{settings}."] if settings else [])])
    found = csv_with_identities([(row.identity, [value(row) for value in csv.values()]) for row in rows], tuple(csv))
    return Listing(name=name, tables=(table,) if kept else (), csv=found)


def text(value: float | None, digits: int = 4) -> str:
    """The value for a cell; empty for None."""
    return "" if value is None else significant(value, digits)


def in_ms(time_s: float | None) -> float | None:
    """The time in ms for a CSV file."""
    return None if time_s is None else time_s * 1e3


def phases_listing(entries: Sequence[Profiled]) -> Listing:
    """Kernels and times of each phase, beside the clock of the run without a profiler."""
    words = terms(entries[0].profile)
    on_device = entries[0].profile.work is Work.KERNELS

    def mean(name: str) -> Callable[[Row[PhaseRow]], float]:
        return lambda row: sum(getattr(row.part, name)) / row.steps

    def busy(row: Row[PhaseRow]) -> str:
        return percent(sum(row.part.busy_s), sum(row.part.wall_s))

    columns: list[Column[Row[PhaseRow]]] = [
        Column("phase", numeric=False, says=lambda row: row.part.name),
        Column(words.items, spare=4, says=lambda row: count_per_step(sum(row.part.launches), row.steps)),
        Column(words.time, "ms", says=lambda row: milliseconds(mean("kernel_s")(row))),
        Column("wall", "ms", spare=1, says=lambda row: milliseconds(mean("wall_s")(row))),
        *([Column("GPU busy", "%", spare=2, says=busy)] if on_device else []),
        Column("clock", "ms", spare=3, says=lambda row: text(in_ms(_clock_s(row)))),
        Column("wall vs clock", "%", spare=5, says=lambda row: _change(_over_clock(row))),
    ]
    csv: dict[str, Callable[[Row[PhaseRow]], object]] = {
        "phase": lambda row: row.part.name,
        "kernels_per_step": mean("launches"),
        "kernel_mean_ms": lambda row: in_ms(mean("kernel_s")(row)),
        "wall_mean_ms": lambda row: in_ms(mean("wall_s")(row)),
        "busy_share": lambda row: share(sum(row.part.busy_s), sum(row.part.wall_s)) if on_device else None,
        "host_mean_ms": lambda row: in_ms(mean("host_s")(row)) if on_device else None,
        "clock_mean_ms": lambda row: in_ms(_clock_s(row)),
        "wall_over_clock": _over_clock,
    }
    note = "Wall: by the trace, with the profiler. Clock: the same run without a profiler."
    rows = rows_of_entries(entries, lambda entry: phase_rows(entry.profile))
    title = "Phases by configuration"
    return make_listing("phases", title, rows, columns, csv, note, lambda row: any(row.part.launches))


def _change(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f}"


def _clock_s(row: Row[PhaseRow]) -> float | None:
    """The plain run's time for what the row tells of; its whole step is called as ours is."""
    return row.entry.clock_s(Phase(row.part.name)) if row.part.name in set(Phase) else None


def _over_clock(row: Row[PhaseRow]) -> float | None:
    clock_s = _clock_s(row)
    return sum(row.part.wall_s) / row.steps / clock_s if clock_s else None


def slowdown_listing(entries: Sequence[Profiled]) -> Listing:
    """What the profiler costs: the step with it and without."""
    items = terms(entries[0].profile).items

    def watched_s(row: Row[None]) -> float | None:
        measured = row.entry.profiled.measurement(Phase.STEP)
        return None if measured is None else measured.mean_s

    def factor(row: Row[None]) -> float | None:
        plain_s, time_s = row.entry.clock_s(Phase.STEP), watched_s(row)
        return time_s / plain_s if plain_s and time_s else None

    def launches(row: Row[None]) -> int:
        return sum(sum(phase.launches) for phase in row.entry.profile.phases)

    columns: list[Column[Row[None]]] = [
        Column("step", "ms", says=lambda row: text(in_ms(row.entry.clock_s(Phase.STEP)))),
        Column("with profiler", "ms", spare=1, says=lambda row: text(in_ms(watched_s(row)))),
        Column("slowdown", "times", says=lambda row: text(factor(row), 3)),
        Column(f"{items} per step", spare=2, says=lambda row: count_per_step(launches(row), row.steps)),
    ]
    csv: dict[str, Callable[[Row[None]], object]] = {
        "plain_step_mean_ms": lambda row: in_ms(row.entry.clock_s(Phase.STEP)),
        "profiled_step_mean_ms": lambda row: in_ms(watched_s(row)),
        "slowdown": factor,
        "kernels_per_step": lambda row: launches(row) / row.steps,
    }
    profilers = " and ".join(dict.fromkeys(str(entry.config.profiler) for entry in entries))
    note = f"Profiler: {profilers}, in a run of its own. Times by the clock, mean over the measured steps."
    rows = rows_of_entries(entries, lambda _: [None])
    return make_listing("slowdown", "What the profiler costs", rows, columns, csv, note)
