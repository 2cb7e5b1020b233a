"""Tables of where the time of a `StepProfile` went: modules and blocks, idle times of the device, calls of the host."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import Gap, HostCalls, ModuleTimes, StepProfile, Work
from cs336_systems.ranges import Range
from cs336_systems.report.columns import Column, column
from cs336_systems.report.entries import Values
from cs336_systems.report.numbers import count as count_text
from cs336_systems.report.numbers import label, percent, rounded, share
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.words import WHOLE_STEP, terms
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


def modules_section(profile: StepProfile) -> Section:
    """Time of the kernels in each module and in none of its own modules; blocks are added up."""
    sums = list(_sums((collapsed(row.path), row) for row in profile.modules).values())
    shown, words = sums[:MAX_MODULES], terms(profile)
    steps, whole_s = profile.num_steps, sum(row.whole_s for row in sums)
    rows = [
        {"module": path_text(row.path), "share": share(row.whole_s, whole_s)}
        | {"kernels_per_step": sum(row.count.values()) / steps}
        | {phase: row.total_s[phase] / steps * 1e3 if phase in row.total_s else None for phase in LaunchPhase}
        for row in shown
    ]
    columns: list[Column[Values]] = [
        column("module"),
        *(Column(phase, "ms", key=phase, write=rounded) for phase in _phases(profile)),
        column("share", drop_order=0),
        column("kernels_per_step", name=words.items),
    ]
    notes = [f"{words.time} per step, of a module without the modules in it; a star stands for all blocks."]
    if len(shown) < len(sums):
        part = percent(sum(row.whole_s for row in shown), whole_s)
        notes.append(f"Shown are {len(shown)} of {len(sums)} modules, {part} % of the time.")
    tables = (make_table("Modules", columns, rows, notes),) if rows else ()
    return Section(name="modules", tables=tables, rows=_module_rows(profile, sums))


def _phases(profile: StepProfile) -> list[LaunchPhase]:
    return [phase.phase for phase in profile.phases if any(phase.launches)]


def _module_rows(profile: StepProfile, sums: Iterable[ModuleSum]) -> list[Values]:
    """A row for each module and phase."""
    steps, whole_s = profile.num_steps, sum(row.total_s for row in profile.modules)
    return [
        {
            "module": " > ".join(row.path) or OUTSIDE,
            "phase": phase,
            "count_per_step": row.count[phase] / steps,
            "total_ms_per_step": row.total_s[phase] / steps * 1e3,
            "share": share(row.total_s[phase], whole_s),
        }
        for row in sums
        for phase in row.count
    ]


def blocks_section(profile: StepProfile) -> Section:
    """Time of each block with all in it; to read, the least, median and most over the blocks."""
    within = [(key, row) for row in profile.modules if (key := _block_of(row.path)) is not None]
    blocks = dict(sorted(_sums(within).items(), key=lambda item: _in_order(item[0])))
    steps = profile.num_steps
    rows = []
    for phase in _phases(profile):
        if not (own := _of_phase(blocks.values(), phase)):
            continue
        times_s = [block.total_s[phase] for block in own]
        rows.append({"phase": phase, "blocks": len(own), "min": times_s[0] / steps, "median": median(times_s) / steps,
                     "max": times_s[-1] / steps, "longest": path_text(own[-1].path)})  # fmt: skip
    columns: list[Column[Values]] = [
        column("phase"),
        column("blocks", drop_order=3),
        Column("min", "ms", drop_order=2, key="min", scale=1e3, write=rounded),
        Column("median", "ms", key="median", scale=1e3, write=rounded),
        Column("max", "ms", drop_order=1, key="max", scale=1e3, write=rounded),
        Column("longest", numeric=False, drop_order=4, key="longest", write=str),
    ]
    notes = [f"{terms(profile).time} per step of a block with all in it. Each block is in blocks.csv."]
    tables = (make_table("Blocks", columns, rows, notes),) if blocks else ()
    return Section(name="blocks", tables=tables, rows=_module_rows(profile, blocks.values()))


def _of_phase(blocks: Iterable[ModuleSum], phase: LaunchPhase) -> list[ModuleSum]:
    """Those with kernels in the phase, the shortest first."""
    return sorted((block for block in blocks if phase in block.count), key=lambda block: block.total_s[phase])


def _in_order(path: tuple[str, ...]) -> tuple[tuple[str, ...], str, int]:
    found = _BLOCK.fullmatch(path[-1])
    assert found, "the last name of a block's path is that of the block"
    return path[:-1], found["kind"], int(found["number"])


def idle_section(profile: StepProfile, top: int) -> Section:
    """Idle time by phase and cause, and the `top` longest idle times; nothing for a CPU, which is its own host."""
    if profile.work is Work.OPERATORS or not profile.idle:
        return Section(name="idle")
    steps, wall_s = profile.num_steps, sum(sum(phase.wall_s) for phase in profile.phases)
    whole = (WHOLE_STEP, "all", sum(row.count for row in profile.idle), sum(row.total_s for row in profile.idle))
    rows = [
        {
            "phase": phase,
            "cause": cause,
            "idle_ms_per_step": total_s / steps * 1e3,
            "share_of_wall": share(total_s, wall_s),
            "count_per_step": count / steps,
            "idle_each_s": share(total_s, count),
        }
        for phase, cause, count, total_s in (
            *((row.phase, row.cause, row.count, row.total_s) for row in profile.idle), whole
        )
    ]  # fmt: skip
    columns = [
        column("phase"),
        column("cause"),
        column("idle_ms_per_step"),
        column("share_of_wall"),
        column("count_per_step", name="times", drop_order=2),
        column("idle_each_s"),
    ]
    notes = ["Per step; % of the step's wall time. A time belongs to the phase of the kernel that ended it."]
    table = make_table("Idle times of the GPU", columns, rows, notes)
    tables = (table, _gaps_table(profile.gaps[:top])) if profile.gaps else (table,)
    keys = ("phase", "cause", "idle_ms_per_step", "share_of_wall", "count_per_step")
    return Section(name="idle", tables=tables, rows=rows[:-1], keys=keys)


def _gap(gap: Gap) -> Values:
    return {
        "step": gap.step,
        "start_ms": gap.start_s * 1e3,
        "idle_ms": gap.duration_s * 1e3,
        "phase": gap.phase,
        "cause": gap.cause,
        "before": gap.before,
        "after": gap.after,
        "module": path_text(gap.module) if gap.module else None,
        "host_call": gap.host_call,
    }


def _gaps_table(gaps: Iterable[Gap]) -> Table:
    columns = [
        column("idle_ms"),
        column("step", drop_order=5),
        column("start_ms"),
        column("phase"),
        column("cause"),
        column("before", write=lambda name: label(name) or "start of the step"),
        column("after", write=lambda name: label(name) or "end of the step"),
        column("module", drop_order=7, text=lambda row: row["module"] or OUTSIDE),
        column("host_call", write=lambda name: label(name) or "no CUDA call"),
    ]
    notes = ["Steps count from 0; at: from the start of the step. Module: around the launch of what came after."]
    return make_table("Longest idle times", columns, map(_gap, gaps), notes)


def gaps_section(profile: StepProfile) -> Section:
    """All of the longest idle times that the profile keeps, as CSV; those to read stand below the idle times."""
    keys = ("step", "start_ms", "idle_ms", "phase", "cause", "before", "after", "module", "host_call")
    return Section(name="gaps", rows=[*map(_gap, profile.gaps)], keys=keys)


def host_calls_section(profile: StepProfile) -> Section:
    """Launches and waits of the host in each phase; as CSV every function."""
    steps = profile.num_steps
    launches = [row for row in profile.host_calls if row.is_launch and not row.is_wait]
    waits = [row for row in profile.host_calls if row.is_wait]
    phases = {row.phase for row in (*launches, *waits)}
    rows = [
        {"phase": phase} | _calls("launches", launches, phase, steps) | _calls("waits", waits, phase, steps)
        for phase in LaunchPhase
        if phase in phases
    ]
    columns: list[Column[Values]] = [column("phase")]
    for name in ("launches", "waits"):
        columns.append(Column(name, drop_order=1, key=f"{name}_per_step", write=count_text))
        columns.append(Column("time", "ms", key=f"{name}_ms", write=rounded))
        columns.append(Column("each", "µs", drop_order=2, key=f"{name}_each_s", scale=1e6))
    notes = [
        "Calls of CUDA by the host, per step, in the phase that the host was in. Waits: synchronisations, and copies "
        "to the host that are followed by one."
    ]
    tables = (make_table("Launches and waits of the host", columns, rows, notes),) if rows else ()
    every = [
        {
            "phase": row.phase,
            "function": row.name,
            "is_launch": row.is_launch,
            "is_wait": row.is_wait,
            "count_per_step": row.count / steps,
            "total_ms_per_step": row.total_s / steps * 1e3,
            "mean_ms": share(row.total_s * 1e3, row.count),
        }
        for row in profile.host_calls
    ]
    return Section(name="host_calls", tables=tables, rows=every)


def _calls(name: str, calls: Iterable[HostCalls], phase: LaunchPhase, steps: int) -> Values:
    """Number and time of the calls in the phase."""
    chosen = [row for row in calls if row.phase is phase]
    count, total_s = sum(row.count for row in chosen), sum(row.total_s for row in chosen)
    return {
        f"{name}_per_step": count / steps,
        f"{name}_ms": total_s / steps * 1e3,
        f"{name}_each_s": share(total_s, count),
    }
