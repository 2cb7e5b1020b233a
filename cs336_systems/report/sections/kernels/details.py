"""Tables that are readable for one trace only: kernels, modules, idle times, calls of the host.

Times and counts are per step, unless they are those of a single launch.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import KernelTimes, StepProfile, Work
from cs336_systems.ranges import Range
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.section import Section, Table, make_table
from cs336_systems.report.sections.kernels.facts import WHOLE_STEP, Sum, added, grouped, path_text, terms, wall_s
from cs336_systems.report.words import label, percent, ratio, rounded

MAX_MODULES = 20
"""Rows of the table of modules: files of other programs may hold hundreds of different ranges."""
_EACH = ("mean", "median", "min", "max", "std")
_KERNEL_CSV = ("phase", "class", "short_name", "share", "total_ms_per_step", "count_per_step", "count",
               *(f"{name}_ms" for name in _EACH), "name")  # fmt: skip
_BLOCK = re.compile(r"(?P<kind>(?:\w{0,40}(?:block|layer)s?|h)[._ ]?)(?P<number>\d{1,6})", re.IGNORECASE)
"""Names of a numbered block: `block.3` here, `layers.3`, `TransformerBlock_3` or `h.3` in files of others."""

_UNIT = re.compile(r"(?P<kind>(?:gather |scatter |FSDP::).{0,200}?)(?P<number>\d{1,6})(?P<rest>\)?)")
"""Names of ranges around a gather or scatter of the parameters of a numbered block: `gather layers.3`."""

ModulePath = tuple[str, ...]
"""Names of the ranges around a launch, the outermost first."""


def details(profile: StepProfile, top: int) -> list[Section]:
    """All of these sections, with at most `top` kernels and idle times in a table."""
    return [
        kernels_section(profile, top),
        modules_section(profile),
        idle_section(profile, top),
        host_calls_section(profile),
    ]


def kernels_section(profile: StepProfile, top: int) -> Section:
    """The `top` kernels of the whole step and of each phase; the CSV has all."""
    phases: list[LaunchPhase | None] = [None, *(phase.phase for phase in profile.phases)]
    own = {phase: [kernel for kernel in profile.kernels if kernel.phase is phase] for phase in phases}
    total_s = {phase: added(kernels).total_s for phase, kernels in own.items()}
    rows = [_kernel(profile, kernel, total_s[kernel.phase]) for kernel in profile.kernels]
    tables = [
        _kernels_table(profile, phase, [row for row in rows if row["phase"] == (phase or WHOLE_STEP)], top)
        for phase in phases
        if total_s[phase]
    ]
    return Section(name="kernels", tables=tuple(tables), rows=rows, keys=_KERNEL_CSV)


def _kernel(profile: StepProfile, kernel: KernelTimes, total_s: float) -> Row:
    each_s = (kernel.mean_s, kernel.median_s, kernel.min_s, kernel.max_s, kernel.stdev_s)
    return {
        "phase": kernel.phase or WHOLE_STEP,
        "class": kernel.kind,
        "short_name": kernel.short_name,
        "share": ratio(kernel.total_s, total_s),
        **_per_step(kernel, profile.num_steps),
        "count": kernel.count,
        **{f"{name}_s": time_s for name, time_s in zip(_EACH, each_s, strict=True)},
        **{f"{name}_ms": None if time_s is None else time_s * 1e3 for name, time_s in zip(_EACH, each_s, strict=True)},
        "name": kernel.name,
    }


def _per_step(part: KernelTimes | Sum, steps: int) -> Row:
    return {"count_per_step": part.count / steps, "total_ms_per_step": part.total_s / steps * 1e3}


def _kernels_table(profile: StepProfile, phase: LaunchPhase | None, rows: Sequence[Row], top: int) -> Table:
    words = terms(profile)
    columns = [
        column("share"),
        column("total_ms_per_step", name="total"),
        column("count_per_step", name="count", drop_order=2),
        *(column(f"{name}_s") for name in _EACH),
        column("class", drop_order=3),
        column("short_name", name=words.item),
    ]
    notes = [f"Total and count are per step; the others of single {words.items} in all steps."]
    if len(rows) > top:
        part = percent(*(sum(row["total_ms_per_step"] for row in chosen) for chosen in (rows[:top], rows)))
        notes.append(f"Shown are {top} of {len(rows)} different {words.items}, {part} % of the time.")
    where = "a whole step" if phase is None else phase
    return make_table(f"{words.items.capitalize()} of {where}, by {words.time}", columns, rows[:top], notes)


def collapsed(path: ModulePath) -> ModulePath:
    """The path with a star for the number of each block."""
    found = [(name, _BLOCK.fullmatch(name) or _UNIT.fullmatch(name)) for name in path]
    return tuple(f"{match['kind']}*{match.groupdict().get('rest', '')}" if match else name for name, match in found)


def modules_section(profile: StepProfile) -> Section:
    """Time of the kernels in each module, without those in its own modules; the table has all blocks as one row.

    A second table has the least, median and longest time of a block with all in it. The CSV has each module.
    """
    sums = grouped(profile.modules, lambda row: (collapsed(row.path), row.phase))
    paths = grouped(profile.modules, lambda row: collapsed(row.path))
    words, steps, whole = terms(profile), profile.num_steps, added(profile.modules)
    rows = [
        {"module": path_text(path), "share": ratio(part.total_s, whole.total_s), "kernels_per_step": part.count / steps}
        | {phase: sums[path, phase].total_s / steps * 1e3 if (path, phase) in sums else None for phase in LaunchPhase}
        for path, part in paths.items()
    ]
    columns: list[Column] = [
        column("module"),
        *(Column(phase, "ms", key=phase, write=rounded, about=f"Time in {phase}.") for phase in _phases(profile)),
        column("share", drop_order=0),
        column("kernels_per_step", name=words.items),
    ]
    notes = [f"{words.time} per step, of a module without the modules in it; a star stands for all blocks."]
    if len(rows) > MAX_MODULES:
        part_of_all = percent(added([*paths.values()][:MAX_MODULES]).total_s, whole.total_s)
        notes.append(f"Shown are {MAX_MODULES} of {len(rows)} modules, {part_of_all} % of the time.")
    tables = (make_table("Modules", columns, rows[:MAX_MODULES], notes), *_blocks(profile)) if rows else ()
    every = grouped(profile.modules, lambda row: (row.path, row.phase))
    return Section(name="modules", tables=tables, rows=[
        {"module": path_text(path, cut=False), "phase": phase, **_per_step(part, steps),
         "share": ratio(part.total_s, whole.total_s)}
        for (path, phase), part in every.items()
    ])  # fmt: skip


def _phases(profile: StepProfile) -> list[LaunchPhase]:
    return [phase.phase for phase in profile.phases if any(phase.launches)]


def _blocks(profile: StepProfile) -> Iterator[Table]:
    """Least, median and longest time of a block with all in it; nothing for a model without numbered blocks."""
    within = [row for row in profile.modules if _block_of(row.path)]
    sums = grouped(within, lambda row: (_block_of(row.path), row.phase))
    rows = []
    for phase in _phases(profile):
        if own := {path: part.total_s / profile.num_steps * 1e3 for (path, of), part in sums.items() if of is phase}:
            longest, *_ = own
            times_ms = own.values()
            rows.append({"phase": phase, "blocks": len(own), "block_min_ms": min(times_ms),
                         "block_median_ms": median(times_ms), "block_max_ms": max(times_ms),
                         "longest_block": path_text(longest)})  # fmt: skip
    keys = ("block_min_ms", "block_median_ms", "block_max_ms", "longest_block")
    if rows:
        columns = [column("phase"), column("blocks", drop_order=3), *map(column, keys)]
        yield make_table("Blocks", columns, rows, [f"{terms(profile).time} per step of a block with all in it."])


def _block_of(path: ModulePath) -> ModulePath:
    """The path up to its first block, empty without one; a leading `forward`, which is recomputation, is left out."""
    path = path[1:] if path[:1] == (Range.FORWARD,) else path
    return next((path[: depth + 1] for depth, name in enumerate(path) if _BLOCK.fullmatch(name)), ())


def idle_section(profile: StepProfile, top: int) -> Section:
    """Idle time by phase and cause, and the `top` longest idle times; nothing for a CPU, which is its own host."""
    if profile.work is Work.OPERATORS or not profile.idle:
        return Section(name="idle")
    steps, whole_s = profile.num_steps, wall_s(profile)
    parts = [(str(row.phase), str(row.cause), added([row])) for row in profile.idle]
    parts.append((WHOLE_STEP, "all", added(profile.idle)))
    rows = [
        {
            "phase": phase,
            "cause": cause,
            "idle_ms_per_step": part.total_s / steps * 1e3,
            "share_of_wall": ratio(part.total_s, whole_s),
            "count_per_step": part.count / steps,
            "idle_each_s": ratio(part.total_s, part.count),
        }
        for phase, cause, part in parts
    ]
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
    tables = (table, _gaps_table(_gaps(profile)[:top])) if profile.gaps else (table,)
    keys = ("phase", "cause", "idle_ms_per_step", "share_of_wall", "count_per_step")
    return Section(name="idle", tables=tables, rows=rows[:-1], keys=keys)


def _gaps(profile: StepProfile) -> list[Row]:
    return [
        {
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
        for gap in profile.gaps
    ]


def _gaps_table(gaps: Iterable[Row]) -> Table:
    columns = [
        column("idle_ms"),
        column("step", drop_order=5),
        column("start_ms"),
        column("phase"),
        column("cause"),
        column("before", write=lambda name: label(name) or "start of the step"),
        column("after", write=lambda name: label(name) or "end of the step"),
        column("module", drop_order=7, text=lambda row: row["module"] or path_text(())),
        column("host_call", write=lambda name: label(name) or "no CUDA call"),
    ]
    notes = ["Steps count from 0; at: from the start of the step. Module: around the launch of what came after."]
    return make_table("Longest idle times", columns, gaps, notes)


def host_calls_section(profile: StepProfile) -> Section:
    """Launches and waits of the host in each phase; the CSV has every function."""
    steps, kinds = profile.num_steps, {"launches": False, "waits": True}
    chosen = [row for row in profile.host_calls if row.is_launch or row.is_wait]
    sums = grouped(chosen, lambda row: (row.phase, row.is_wait))
    rows: list[Row] = []
    for phase in LaunchPhase:
        own = {kind: sums.get((phase, is_wait), Sum()) for kind, is_wait in kinds.items()}
        if any(part.count for part in own.values()):
            rows.append({"phase": phase} | {
                f"host_{kind}_{name}": value for kind, part in own.items() for name, value in (
                    ("per_step", part.count / steps), ("ms", part.total_s / steps * 1e3),
                    ("each_s", ratio(part.total_s, part.count)))
            })  # fmt: skip
    columns = [
        column("phase"),
        *(column(f"host_{kind}_{name}") for kind in kinds for name in ("per_step", "ms", "each_s")),
    ]
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
            "mean_ms": ratio(row.total_s * 1e3, row.count),
        }
        for row in profile.host_calls
    ]
    return Section(name="host_calls", tables=tables, rows=every)
