"""One trace in full, and any number beside each other: as tables for a terminal, and as files of a
directory.

Tables of kernels, modules and idle times are readable for one trace only. Times and counts are per
step, unless they are those of a single launch.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import StepProfile, Work, encode_profile
from ...columns import Column, Row, column, columns_of
from ...draw import Drawing, Picture
from ...formats import pngs_of, texts_of, to_markdown, write_files
from ...identity import file_names
from ...section import Section, Table, findings_table, labels, make_table, with_note
from ...words import percent, ratio, rounded
from .findings import MIN_SHARE, answer, findings
from .plots import communication_chart, configuration_chart, draw_timeline
from .tables import (
    OF_ONE,
    PRINTED,
    SUBJECTS,
    WHOLE_STEP,
    Explained,
    Timed,
    about,
    added,
    grouped,
    path_text,
    terms,
    wall_s,
)


def tables_of(entries: Sequence[Explained]) -> list[Table]:
    """The tables of several traces for a terminal; none for no entries."""
    return (
        _noted_once(table for make in PRINTED for table in make(entries).tables) if entries else []
    )


def answer_of(entry: Explained) -> list[str]:
    """The lines before the tables: the answer in three sentences, then further findings."""
    first = answer(entry)
    further = [f"- {text}" for text in findings(entry) if text not in first]
    return [*first, *(["", *further] if further else [])]


def tables_of_one(entry: Explained, top: int) -> list[Table]:
    """The tables of one trace for a terminal; a note below the first names file, device and steps.

    At most `top` kernels of the step and of each phase are listed. Tables that say nothing that
    another one or the answer does not say are left out.
    """
    profile = entry.profile
    of_phases, *others = [*(make([entry]) for make in OF_ONE), *details(profile, top)]
    tables = [
        table for section in others if _says_more(section.name, profile) for table in section.tables
    ]
    return _noted_once([*(with_note(table, about(profile)) for table in of_phases.tables), *tables])


def _says_more(name: str, profile: StepProfile) -> bool:
    """Whether the tables of this section hold more than one thing, or a part of the step that
    matters.
    """
    match name:
        case "classes":
            return len({row.kind for row in profile.classes}) > 1
        case "modules":
            return any(row.path for row in profile.modules)
        case "idle":
            return added(profile.idle).total_s >= MIN_SHARE * wall_s(profile)
        case "copies":
            return added(profile.copies[:-1]).total_s >= MIN_SHARE * wall_s(profile)
    return True


def _noted_once(tables: Iterable[Table]) -> list[Table]:
    """The tables, each without the notes of those above it."""
    found, said = [], set[str]()
    for table in tables:
        found.append(replace(table, notes=tuple(note for note in table.notes if note not in said)))
        said |= set(table.notes)
    return found


def _findings(entry: Explained) -> Table:
    return findings_table(findings(entry), "Nothing stands out.")


def sections_of(entries: Sequence[Explained]) -> list[Section]:
    """The sections of several traces, with their pictures."""
    pairs = [(name, entry.profile) for name, entry in zip(labels(entries), entries, strict=True)]
    stems = file_names(name for name, _ in pairs)
    timelines = [
        _timeline(f"{stem}_timeline", own, name)
        for stem, (name, own) in zip(stems, pairs, strict=True)
    ]
    charts = [make(pairs) for make in (configuration_chart, communication_chart)]
    pictures: list[Picture] = [chart for chart in charts if chart is not None]
    pictures += itertools.chain.from_iterable(timelines)
    return [*(make(entries) for make in SUBJECTS), Section(name="plots", pictures=pictures)]


def _timeline(file: str, profile: StepProfile, name: str = "") -> list[Drawing]:
    """The picture of one step, unless it has no pieces, as that of an empty trace."""
    has_timeline = (
        profile.pictured is not None and profile.pictured.wall_s and profile.pictured.pieces
    )
    return [Drawing(file, partial(draw_timeline, profile, name))] if has_timeline else []


def write_kernels(
    entry: Explained, directory: Path, top: int, formats: Collection[str] = ()
) -> list[Path]:
    """Write profile.json, findings.md, the picture and each table as CSV, Markdown and in the
    other `formats`; return the paths.

    Tables hold at most `top` kernels. The directory is made if need be. A subject that this trace
    has nothing of has no files: those of an earlier one are removed.
    """
    note = about(entry.profile)
    files: dict[str, str | bytes] = {
        "plots/timeline.png": b"",
        "profile.json": encode_profile(entry.profile),
        "findings.md": to_markdown(with_note(_findings(entry), note)),
    }
    for section in (*(make([entry]) for make in OF_ONE), *details(entry.profile, top)):
        files |= texts_of(section, note)
    files |= pngs_of(Section(name="timeline", pictures=_timeline("timeline", entry.profile)))
    return write_files(files, directory, formats)


MAX_MODULES = 20
"""Rows of the table of modules: files of other programs may hold hundreds of different ranges."""
_EACH = ("mean", "median", "min", "max", "std")
_KERNEL_CSV = (
    "phase",
    "class",
    "short_name",
    "share",
    "total_ms_per_step",
    "count_per_step",
    "count",
    *(f"{name}_ms" for name in _EACH),
    "name",
)
_NUMBERED = re.compile(
    r"(?P<kind>(?:\w{0,40}(?:block|layer)s?|h)[._ ]?|(?:gather |scatter "
    r"|FSDP::).{0,200}?)\d{1,6}(?P<rest>\)?)",
    re.I,
)
"""Names of a numbered block: `block.3` here, `layers.3`, `TransformerBlock_3` or `h.3` in files of
others; and of the ranges around a gather or scatter of a block's parameters: `gather layers.3`,
`FSDP::all_gather (model.layers.3)`.
"""


def details(profile: StepProfile, top: int) -> list[Section]:
    """All of these sections, with at most `top` kernels in a table."""
    return [kernels_section(profile, top), modules_section(profile), idle_section(profile)]


def kernels_section(profile: StepProfile, top: int) -> Section:
    """The `top` kernels of the whole step and of each phase; the CSV has all."""
    tables: list[Table] = []
    every: list[Row] = []
    for phase in (None, *(phase.phase for phase in profile.phases)):
        kernels = [kernel for kernel in profile.kernels if kernel.phase is phase]
        total_s = added(kernels).total_s
        rows: list[Row] = []
        for kernel in kernels:
            each_s = (kernel.mean_s, kernel.median_s, kernel.min_s, kernel.max_s, kernel.stdev_s)
            row: Row = {
                "phase": phase or WHOLE_STEP,
                "class": kernel.kind,
                "short_name": kernel.short_name,
                "share": ratio(kernel.total_s, total_s),
                **_per_step(kernel, profile.num_steps),
                "count": kernel.count,
                "name": kernel.name,
            }
            for name, time_s in zip(_EACH, each_s, strict=True):
                row |= {f"{name}_s": time_s, f"{name}_ms": None if time_s is None else time_s * 1e3}
            rows.append(row)
        every += rows
        if total_s:
            tables.append(_kernels_table(profile, phase, rows, top))
    return Section(name="kernels", tables=tuple(tables), rows=every, keys=_KERNEL_CSV)


def _per_step(part: Timed, steps: int) -> Row:
    return {"count_per_step": part.count / steps, "total_ms_per_step": part.total_s / steps * 1e3}


def _kernels_table(
    profile: StepProfile, phase: LaunchPhase | None, rows: Sequence[Row], top: int
) -> Table:
    item, time = terms(profile)
    shown = columns_of(
        "share",
        column("total_ms_per_step", name="total"),
        column("count_per_step", name="count", drop_order=2),
        *(f"{name}_s" for name in _EACH),
        column("class", drop_order=3),
        column("short_name", name=item),
    )
    notes = [f"Total and count are per step; the others of single {item}s in all steps."]
    if len(rows) > top:
        part = percent(
            *(sum(row["total_ms_per_step"] for row in chosen) for chosen in (rows[:top], rows))
        )
        notes.append(f"Shown are {top} of {len(rows)} different {item}s, {part} % of the time.")
    where = "a whole step" if phase is None else phase
    return make_table(f"{item.capitalize()}s of {where}, by {time}", shown, rows[:top], notes)


def collapsed(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path with a star for the number of each block."""
    return tuple(
        f"{found['kind']}*{found['rest']}" if (found := _NUMBERED.fullmatch(name)) else name
        for name in path
    )


def modules_section(profile: StepProfile) -> Section:
    """Time of the kernels in each module, without those in its own modules; the table has all
    blocks as one row.

    The CSV has each module.
    """
    sums = grouped(profile.modules, lambda row: (collapsed(row.path), row.phase))
    paths = grouped(profile.modules, lambda row: collapsed(row.path))
    (item, time), steps, whole = terms(profile), profile.num_steps, added(profile.modules)
    rows = [
        {
            "module": path_text(path),
            "share": ratio(part.total_s, whole.total_s),
            "kernels_per_step": part.count / steps,
        }
        | {
            phase: sums[path, phase].total_s / steps * 1e3 if (path, phase) in sums else None
            for phase in LaunchPhase
        }
        for path, part in paths.items()
    ]
    launched = [phase.phase for phase in profile.phases if any(phase.launches)]
    of_phases = (
        Column(phase, "ms", key=phase, write=rounded, about=f"Time in {phase}.")
        for phase in launched
    )
    number = column("kernels_per_step", name=f"{item}s")
    shown = columns_of("module", *of_phases, column("share", drop_order=0), number)
    notes = [
        f"{time} per step, of a module without the modules in it; a star stands for all blocks."
    ]
    if len(rows) > MAX_MODULES:
        part_of_all = percent(added([*paths.values()][:MAX_MODULES]).total_s, whole.total_s)
        notes.append(
            f"Shown are {MAX_MODULES} of {len(rows)} modules, {part_of_all} % of the time."
        )
    every = grouped(profile.modules, lambda row: (row.path, row.phase))
    return Section(
        name="modules",
        tables=(make_table("Modules", shown, rows[:MAX_MODULES], notes),) if rows else (),
        rows=[
            {
                "module": path_text(path, cut=False),
                "phase": phase,
                **_per_step(part, steps),
                "share": ratio(part.total_s, whole.total_s),
            }
            for (path, phase), part in every.items()
        ],
    )


def idle_section(profile: StepProfile) -> Section:
    """Idle time by phase and cause; nothing for a CPU, which is its own host."""
    if profile.work is Work.OPERATORS or not profile.idle:
        return Section(name="idle")
    steps, whole_s = profile.num_steps, wall_s(profile)
    parts = [
        (str(row.phase), str(row.cause), added([row]), row.median_s, row.longest_s)
        for row in profile.idle
    ]
    rows: list[Row] = [
        {
            "phase": phase,
            "cause": cause,
            "idle_ms_per_step": part.total_s / steps * 1e3,
            "share_of_wall": ratio(part.total_s, whole_s),
            "count_per_step": part.count / steps,
            "median_s": median_s,
            "longest_s": longest_s,
        }
        for phase, cause, part, median_s, longest_s in [
            *parts,
            (WHOLE_STEP, "all", added(profile.idle), None, None),
        ]
    ]
    shown = columns_of(
        "phase",
        "cause",
        "idle_ms_per_step",
        "share_of_wall",
        column("count_per_step", name="times", drop_order=2),
        "median_s",
        Column("longest", "µs", "The longest.", key="longest_s", drop_order=3, scale=1e6),
    )
    notes = [
        (
            "Per profiled step, and % of its wall time. A time belongs to the phase of the kernel "
            "that ended it."
        )
    ]
    table = make_table("Idle times of the GPU", shown, rows, notes)
    keys = ("phase", "cause", "idle_ms_per_step", "share_of_wall", "count_per_step")
    return Section(name="idle", tables=(table,), rows=rows[:-1], keys=keys)
