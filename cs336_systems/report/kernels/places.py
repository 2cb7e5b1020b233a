"""Tables of where the time of a `StepProfile` went: modules and blocks, idle times of the device, calls of the host."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from statistics import median

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import Gap, HostCalls, IdleTimes, ModuleTimes, StepProfile, Work
from cs336_systems.ranges import Range
from cs336_systems.report.columns import Column
from cs336_systems.report.kernels.terms import WHOLE_STEP, count_per_step, microseconds, milliseconds, terms
from cs336_systems.report.listing import Listing, csv_of
from cs336_systems.report.numbers import label, percent, share
from cs336_systems.report.table import Table, make_table
from cs336_systems.text import inert_line

MAX_MODULES = 20
"""Rows of the readable table of modules: files of others may hold hundreds of different ranges."""
OUTSIDE = "outside of all ranges"

_BLOCK = re.compile(r"(?P<kind>(?:\w{0,40}(?:block|layer)s?|h)[._ ]?)(?P<number>\d{1,6})", re.IGNORECASE)
"""Names of a numbered block: `block.3` here, `layers.3`, `TransformerBlock_3` or `h.3` in files of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSum:
    """Kernels in the ranges of one path, in each phase, over all steps."""

    path: tuple[str, ...]
    count: dict[LaunchPhase, int]
    total_s: dict[LaunchPhase, float]

    @property
    def whole_s(self) -> float:
        """In all phases."""
        return sum(self.total_s.values())


def path_text(path: tuple[str, ...]) -> str:
    """The path as `block.3 > ffn`; each name at most as long as a table has room for."""
    return " > ".join(label(inert_line(name)) for name in path) or OUTSIDE


def collapsed(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path with a star for the number of each block."""
    found = [(name, _BLOCK.fullmatch(name)) for name in path]
    return tuple(f"{match['kind']}*" if match else name for name, match in found)


def _block_of(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """The path up to its first block, or None for a path without; forward in backward is left out of it."""
    path = path[1:] if path[:1] == (Range.FORWARD,) else path
    return next((path[: depth + 1] for depth, name in enumerate(path) if _BLOCK.fullmatch(name)), None)


def _sums(modules: Iterable[tuple[tuple[str, ...], ModuleTimes]]) -> dict[tuple[str, ...], ModuleSum]:
    """The modules added up by the key that each comes with, the longest first."""
    counts: dict[tuple[str, ...], dict[LaunchPhase, int]] = defaultdict(lambda: defaultdict(int))
    times_s: dict[tuple[str, ...], dict[LaunchPhase, float]] = defaultdict(lambda: defaultdict(float))
    for key, row in modules:
        counts[key][row.phase] += row.count
        times_s[key][row.phase] += row.total_s
    sums = {key: ModuleSum(path=key, count=dict(counts[key]), total_s=dict(times_s[key])) for key in counts}
    return dict(sorted(sums.items(), key=lambda item: -item[1].whole_s))


def modules_listing(profile: StepProfile) -> Listing:
    """Time of the kernels in each module and in none of its own modules; blocks are added up."""
    sums = list(_sums((collapsed(row.path), row) for row in profile.modules).values())
    rows = sums[:MAX_MODULES]
    words, steps, whole_s = terms(profile), profile.num_steps, sum(row.whole_s for row in sums)
    columns: list[Column[ModuleSum]] = [
        Column("module", numeric=False, says=lambda row: path_text(row.path)),
        *(_module_time(phase, steps) for phase in _phases(profile)),
        Column("share", "%", says=lambda row: percent(row.whole_s, whole_s)),
        Column(words.items, spare=4, says=lambda row: count_per_step(sum(row.count.values()), steps)),
    ]
    notes = [f"{words.time} per step, of a module without the modules in it; a star stands for all blocks."]
    if len(rows) < len(sums):
        part = percent(sum(row.whole_s for row in rows), whole_s)
        notes.append(f"Shown are {len(rows)} of {len(sums)} modules, {part} % of the time.")
    tables = (make_table("Modules", columns, rows, notes),) if rows else ()
    return Listing(name="modules", tables=tables, csv=_modules_csv(profile, sums))


def _phases(profile: StepProfile) -> list[LaunchPhase]:
    return [phase.phase for phase in profile.phases if any(phase.launches)]


def _module_time(phase: LaunchPhase, steps: int) -> Column[ModuleSum]:
    def cell(row: ModuleSum) -> str:
        return milliseconds(row.total_s[phase] / steps) if phase in row.total_s else ""

    return Column(phase, "ms", says=cell)


def _modules_csv(profile: StepProfile, sums: Iterable[ModuleSum]) -> str:
    """A row for each module and phase."""
    rows = [(row, phase) for row in sums for phase in row.count]
    whole_s = sum(row.total_s for row in profile.modules)
    columns: dict[str, Callable[[tuple[ModuleSum, LaunchPhase]], object]] = {
        "module": lambda row: " > ".join(row[0].path) or OUTSIDE,
        "phase": itemgetter(1),
        "count_per_step": lambda row: row[0].count[row[1]] / profile.num_steps,
        "total_ms_per_step": lambda row: row[0].total_s[row[1]] * 1e3 / profile.num_steps,
        "share": lambda row: share(row[0].total_s[row[1]], whole_s),
    }
    return csv_of(columns, rows)


def blocks_listing(profile: StepProfile) -> Listing:
    """Time of each block with all in it; to read, the least, median and most over the blocks."""
    within = [(key, row) for row in profile.modules if (key := _block_of(row.path)) is not None]
    blocks = dict(sorted(_sums(within).items(), key=lambda item: _in_order(item[0])))
    steps = profile.num_steps
    rows = [(phase, _of_phase(blocks.values(), phase)) for phase in _phases(profile)]
    columns: list[Column[tuple[LaunchPhase, list[ModuleSum]]]] = [
        Column("phase", numeric=False, says=itemgetter(0)),
        Column("blocks", spare=3, says=lambda row: str(len(row[1]))),
        Column("min", "ms", spare=2, says=lambda row: milliseconds(row[1][0].total_s[row[0]] / steps)),
        Column("median", "ms", says=lambda row: milliseconds(median(b.total_s[row[0]] for b in row[1]) / steps)),
        Column("max", "ms", spare=1, says=lambda row: milliseconds(row[1][-1].total_s[row[0]] / steps)),
        Column("longest", numeric=False, spare=4, says=lambda row: path_text(row[1][-1].path)),
    ]
    notes = [f"{terms(profile).time} per step of a block with all in it. Each block is in blocks.csv."]
    table = make_table("Blocks", columns, [row for row in rows if row[1]], notes)
    return Listing(name="blocks", tables=(table,) if blocks else (), csv=_modules_csv(profile, blocks.values()))


def _of_phase(blocks: Iterable[ModuleSum], phase: LaunchPhase) -> list[ModuleSum]:
    """Those with kernels in the phase, the shortest first."""
    return sorted((block for block in blocks if phase in block.count), key=lambda block: block.total_s[phase])


def _in_order(path: tuple[str, ...]) -> tuple[tuple[str, ...], str, int]:
    found = _BLOCK.fullmatch(path[-1])
    assert found, "the last name of a block's path is that of the block"
    return path[:-1], found["kind"], int(found["number"])


def idle_listing(profile: StepProfile, top: int) -> Listing:
    """Idle time by phase and cause, and the `top` longest idle times; nothing for a CPU, which is its own host."""
    if profile.work is Work.OPERATORS or not profile.idle:
        return Listing(name="idle", tables=(), csv="")
    steps, wall_s = profile.num_steps, sum(sum(phase.wall_s) for phase in profile.phases)
    whole = sum(row.count for row in profile.idle), sum(row.total_s for row in profile.idle)
    rows: list[tuple[str, str, int, float]] = [
        *((row.phase, row.cause, row.count, row.total_s) for row in profile.idle), (WHOLE_STEP, "all", *whole)
    ]  # fmt: skip
    columns: list[Column[tuple[str, str, int, float]]] = [
        Column("phase", numeric=False, says=itemgetter(0)),
        Column("cause", numeric=False, says=itemgetter(1)),
        Column("idle", "ms", says=lambda row: milliseconds(row[3] / steps)),
        Column("of wall", "%", spare=1, says=lambda row: percent(row[3], wall_s)),
        Column("times", spare=2, says=lambda row: count_per_step(row[2], steps)),
        Column("each", "µs", spare=3, says=lambda row: microseconds(share(row[3], row[2]))),
    ]
    notes = ["Per step; % of the step's wall time. A time belongs to the phase of the kernel that ended it."]
    table = make_table("Idle times of the GPU", columns, rows, notes)
    tables = (table, _gaps_table(profile.gaps[:top])) if profile.gaps else (table,)
    csv_columns: dict[str, Callable[[IdleTimes], object]] = {
        "phase": attrgetter("phase"),
        "cause": attrgetter("cause"),
        "idle_ms_per_step": lambda row: row.total_s * 1e3 / steps,
        "share_of_wall": lambda row: share(row.total_s, wall_s),
        "count_per_step": lambda row: row.count / steps,
    }
    return Listing(name="idle", tables=tables, csv=csv_of(csv_columns, profile.idle))


def _gaps_table(gaps: Iterable[Gap]) -> Table:
    columns: list[Column[Gap]] = [
        Column("idle", "ms", says=lambda gap: milliseconds(gap.duration_s)),
        Column("step", spare=5, says=lambda gap: str(gap.step)),
        Column("at", "ms", spare=6, says=lambda gap: milliseconds(gap.start_s)),
        Column("phase", numeric=False, says=attrgetter("phase")),
        Column("cause", numeric=False, says=attrgetter("cause")),
        Column("before it", numeric=False, spare=8, says=lambda gap: label(gap.before) or "start of the step"),
        Column("after it", numeric=False, spare=4, says=lambda gap: label(gap.after) or "end of the step"),
        Column("module", numeric=False, spare=7, says=lambda gap: path_text(gap.module)),
        Column("host was in", numeric=False, spare=3, says=lambda gap: label(gap.host_call) or "no CUDA call"),
    ]
    notes = ["Steps count from 0; at: from the start of the step. Module: around the launch of what came after."]
    return make_table("Longest idle times", columns, gaps, notes)


def gaps_listing(profile: StepProfile) -> Listing:
    """All of the longest idle times that the profile keeps, as CSV; those to read stand below the idle times."""
    columns: dict[str, Callable[[Gap], object]] = {
        "step": attrgetter("step"),
        "start_ms": lambda gap: gap.start_s * 1e3,
        "idle_ms": lambda gap: gap.duration_s * 1e3,
        "phase": attrgetter("phase"),
        "cause": attrgetter("cause"),
        "before": attrgetter("before"),
        "after": attrgetter("after"),
        "module": lambda gap: path_text(gap.module) if gap.module else None,
        "host_call": attrgetter("host_call"),
    }
    return Listing(name="gaps", tables=(), csv=csv_of(columns, profile.gaps))


def host_calls_listing(profile: StepProfile) -> Listing:
    """Launches and waits of the host in each phase; as CSV every function."""
    steps = profile.num_steps
    phases = list(dict.fromkeys(row.phase for row in profile.host_calls if row.is_launch or row.is_wait))
    rows = [phase for phase in LaunchPhase if phase in phases]
    columns: list[Column[LaunchPhase]] = [
        Column("phase", numeric=False, says=str),
        *(
            column
            for name, chosen in (
                ("launches", [row for row in profile.host_calls if row.is_launch and not row.is_wait]),
                ("waits", [row for row in profile.host_calls if row.is_wait]),
            )
            for column in _call_columns(name, chosen, steps)
        ),
    ]
    notes = [
        "Calls of CUDA by the host, per step, in the phase that the host was in. Waits: synchronisations, and copies "
        "to the host that are followed by one."
    ]
    tables = (make_table("Launches and waits of the host", columns, rows, notes),) if rows else ()
    csv_columns: dict[str, Callable[[HostCalls], object]] = {
        "phase": attrgetter("phase"),
        "function": attrgetter("name"),
        "is_launch": attrgetter("is_launch"),
        "is_wait": attrgetter("is_wait"),
        "count_per_step": lambda row: row.count / steps,
        "total_ms_per_step": lambda row: row.total_s * 1e3 / steps,
        "mean_ms": lambda row: share(row.total_s * 1e3, row.count),
    }
    return Listing(name="host_calls", tables=tables, csv=csv_of(csv_columns, profile.host_calls))


def _call_columns(name: str, calls: list[HostCalls], steps: int) -> list[Column[LaunchPhase]]:
    def sums(phase: LaunchPhase) -> tuple[int, float]:
        chosen = [row for row in calls if row.phase is phase]
        return sum(row.count for row in chosen), sum(row.total_s for row in chosen)

    def mean(phase: LaunchPhase) -> str:
        count, total_s = sums(phase)
        return microseconds(share(total_s, count))

    return [
        Column(name, spare=1, says=lambda phase: count_per_step(sums(phase)[0], steps)),
        Column("time", "ms", says=lambda phase: milliseconds(sums(phase)[1] / steps)),
        Column("each", "µs", spare=2, says=mean),
    ]
