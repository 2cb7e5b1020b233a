"""One trace in full, and any number beside each other: as tables for a terminal, and as files of a
directory.

Tables of kernels, modules and idle times are readable for one trace only. Times and counts are per
step, unless they are those of a single launch.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import StepProfile, Timed, Work, encode_profile
from ...charts import Drawing, Picture
from ...columns import Column, Row, column, columns_of
from ...formats import pngs_of, texts_of, to_markdown, write_files
from ...identity import file_names
from ...section import Section, Table, all_tables, findings_table, labels, make_table, with_note
from ...words import percent, ratio, rounded
from ..plugged import added_sections
from .bars import communication_chart, configuration_chart
from .entry import Explained
from .figures import MIN_SHARE
from .findings import answer, findings
from .kinds import kinds
from .ledger import ledger_section
from .operators import operators_section
from .sums import WHOLE_STEP, about, added, grouped, path_text, terms, wall_s
from .tables import OF_ONE, PRINTED, SUBJECTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tables_of(entries: Sequence[Explained]) -> list[Table]:
    """The tables of several traces for a terminal; none for no entries."""
    if not entries:
        return []
    sections = [*(make(entries) for make in PRINTED), *added_sections(Explained, entries)]
    return _noted_once(all_tables(sections))


def answer_of(entry: Explained) -> list[str]:
    """The lines before the tables: the answer in three sentences, then further findings."""
    first = [finding.text for finding in answer(entry)]
    texts = [finding.text for finding in findings(entry)]
    further = [f"- {text}" for text in texts if text not in first]
    return [*first, "", *further] if further else first


def tables_of_one(entry: Explained, top: int) -> list[Table]:
    """The tables of one trace for a terminal; a note below the first names file, device and steps.

    At most `top` kernels of the step and of each phase are listed. Tables that say nothing that
    another one or the answer does not say are left out.
    """
    profile = entry.profile
    of_phases, *others = _sections_of_one(entry, top)
    tables = [with_note(table, about(profile)) for table in of_phases.tables]
    for section in others:
        if _says_more(section.name, profile):
            tables += section.tables
    return _noted_once(tables)


def _sections_of_one(entry: Explained, top: int) -> list[Section]:
    """All sections of one trace, that of the phases first and that of the pictures last."""
    pictures = [*_steps(entry.profile), *_timeline("timeline", entry.profile)]
    return [
        *(make([entry]) for make in OF_ONE),
        kinds([entry]),
        *detail_sections(entry.profile, top),
        operators_section(entry.profile),
        ledger_section(entry),
        *added_sections(Explained, [entry]),
        Section(name="pictures", pictures=pictures),
    ]


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
    shortened = []
    said = set[str]()
    for table in tables:
        notes = tuple(note for note in table.notes if note not in said)
        shortened.append(replace(table, notes=notes))
        said |= set(table.notes)
    return shortened


def _findings(entry: Explained) -> Table:
    return findings_table(findings(entry), "Nothing stands out.")


def sections_of(entries: Sequence[Explained]) -> list[Section]:
    """The sections of the traces of runs, or of one file without a record, with their pictures."""
    if entries[0].subject is None:
        (entry,) = entries
        shown = _sections_of_one(entry, TOP_ON_A_PAGE)
        return [section for section in shown if _says_more(section.name, entry.profile)]
    profiles = [entry.profile for entry in entries]
    labelled = list(zip(labels(entries), profiles, strict=True))
    pictures: list[Picture] = []
    for chart in (configuration_chart(labelled), communication_chart(labelled)):
        if chart is not None:
            pictures.append(chart)
    stems = file_names(name for name, _ in labelled)
    for stem, (name, profile) in zip(stems, labelled, strict=True):
        pictures += _timeline(f"{stem}_timeline", profile, name)
    return [
        *(make(entries) for make in SUBJECTS),
        *added_sections(Explained, entries),
        Section(name="plots", pictures=pictures),
    ]


def _timeline(file: str, profile: StepProfile, name: str = "") -> list[Drawing]:
    """The picture of one step, unless it has no pieces, as that of an empty trace."""
    if not _has_timeline(profile):
        return []

    def make() -> "Figure":
        from .plots import draw_timeline

        return draw_timeline(profile, name)

    return [Drawing(file, make)]


def _has_timeline(profile: StepProfile) -> bool:
    """Whether one step can be drawn as a timeline."""
    step = profile.pictured
    return step is not None and step.wall_s > 0 and bool(step.pieces)


def _steps(profile: StepProfile) -> list[Drawing]:
    """The picture of several steps beside each other, if the file has several."""
    if not any(step.pieces for step in profile.beside):
        return []

    def make() -> "Figure":
        from .plots import draw_steps

        return draw_steps(profile)

    return [Drawing(BESIDE, make)]


BESIDE = "steps"
"""Name of the picture of several steps, which only the page has: drawing it takes a second."""


def write_kernels(
    entry: Explained, directory: Path, top: int, formats: Collection[str] = ()
) -> list[Path]:
    """Write profile.json, findings.md, the picture of one step and each table as CSV, Markdown and
    in the other `formats`; return the paths.

    Tables hold at most `top` kernels. The directory is made if need be. A subject that this trace
    has nothing of has no files: those of an earlier one are removed.
    """
    note = about(entry.profile)
    files: dict[str, str | bytes] = {
        "plots/timeline.png": b"",
        "plots/steps.png": b"",
        PROFILE_FILE: encode_profile(entry.profile),
        "findings.md": to_markdown(with_note(_findings(entry), note)),
    }
    for section in _sections_of_one(entry, top):
        pictures = [picture for picture in section.pictures if picture.name != BESIDE]
        files |= texts_of(section, note)
        files |= pngs_of(replace(section, pictures=pictures))
    return write_files(files, directory, formats)


def keep_profile(profile: StepProfile, directory: Path) -> None:
    """Write the profile itself into its directory."""
    write_files({PROFILE_FILE: encode_profile(profile)}, directory)


PROFILE_FILE = "profile.json"
"""The profile of a single file, in its directory."""
TOP_ON_A_PAGE = 10
"""Most kernels in a table of the page of a single file."""
MAX_MODULES = 20
"""Rows of the table of modules: files of other programs may hold hundreds of different ranges."""
_OF_LAUNCHES = ("mean", "median", "min", "max", "std")
"""Statistics of the single launches of a kernel."""
_KERNEL_CSV = (
    "phase",
    "class",
    "short_name",
    "share",
    "total_ms_per_step",
    "count_per_step",
    "count",
    *(f"{name}_ms" for name in _OF_LAUNCHES),
    "name",
)
_NUMBERED = re.compile(
    r"\A(?P<kind>(?:\w{0,40}(?:block|layer)s?|h)[._ ]?|(?:gather |scatter "
    r"|FSDP::).{0,200}?)\d{1,6}(?P<rest>\)?)\Z",
    re.I,
)
"""Names of a numbered block: `block.3` here, `layers.3`, `TransformerBlock_3` or `h.3` in files of
others; and of the ranges around a gather or scatter of a block's parameters: `gather layers.3`,
`FSDP::all_gather (model.layers.3)`.
"""


def detail_sections(profile: StepProfile, top: int) -> list[Section]:
    """What a profile shows of single kernels (at most `top` in a table), of modules, and of the
    device's idle times.
    """
    return [kernels_section(profile, top), modules_section(profile), idle_section(profile)]


def kernels_section(profile: StepProfile, top: int) -> Section:
    """The `top` kernels of the whole step and of each phase; the CSV has all."""
    tables: list[Table] = []
    rows: list[Row] = []
    for phase in (None, *(times.phase for times in profile.phases)):
        of_phase = _kernel_rows(profile, phase)
        rows += of_phase
        if any(row["share"] for row in of_phase):
            tables.append(_kernels_table(profile, phase, of_phase, top))
    return Section(name="kernels", tables=tuple(tables), rows=rows, keys=_KERNEL_CSV)


def _kernel_rows(profile: StepProfile, phase: LaunchPhase | None) -> list[Row]:
    """A row for each kernel of the phase, or of the whole step."""
    kernels = profile.kernels_of(phase)
    total_s = added(kernels).total_s
    # without the picture, a link to a kernel's launches in it would lead nowhere
    drawn = profile.pictured if _has_timeline(profile) else None
    places = {} if drawn is None else drawn.places
    rows = []
    for kernel in kernels:
        row: Row = {
            "phase": phase or WHOLE_STEP,
            "class": kernel.kind,
            "short_name": kernel.short_name,
            "share": ratio(kernel.total_s, total_s),
            **_per_step(kernel, profile.num_steps),
            "count": kernel.count,
            "name": kernel.name,
            "places": places.get(kernel.name),
        }
        times_s = (kernel.mean_s, kernel.median_s, kernel.min_s, kernel.max_s, kernel.stdev_s)
        for name, time_s in zip(_OF_LAUNCHES, times_s, strict=True):
            row[f"{name}_s"] = time_s
            row[f"{name}_ms"] = None if time_s is None else time_s * 1e3
        rows.append(row)
    return rows


def _per_step(part: Timed, steps: int) -> Row:
    return {"count_per_step": part.count / steps, "total_ms_per_step": part.total_s / steps * 1e3}


def _kernels_table(
    profile: StepProfile, phase: LaunchPhase | None, rows: Sequence[Row], top: int
) -> Table:
    """The first kernels of these rows; a note says how many more there are."""
    item, time = terms(profile)
    shown = columns_of(
        "share",
        column("total_ms_per_step", name="total"),
        column("count_per_step", name="count", drop_order=2),
        *(f"{name}_s" for name in _OF_LAUNCHES),
        column("class", drop_order=3),
        column("short_name", name=item),
    )
    notes = [f"Total and count are per step; the others of single {item}s in all steps."]
    if len(rows) > top:
        shown_ms = sum(row["total_ms_per_step"] for row in rows[:top])
        part = percent(shown_ms, sum(row["total_ms_per_step"] for row in rows))
        notes.append(f"Shown are {top} of {len(rows)} different {item}s, {part} % of the time.")
    where = "a whole step" if phase is None else phase
    return make_table(f"{item.capitalize()}s of {where}, by {time}", shown, rows[:top], notes)


def collapsed(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path with a star for the number of each block."""
    return tuple(_NUMBERED.sub(r"\g<kind>*\g<rest>", name) for name in path)


def modules_section(profile: StepProfile) -> Section:
    """Time of the kernels in each module, without those in its own modules; the table has all
    blocks as one row.

    The CSV has each module.
    """
    whole_s = added(profile.modules).total_s
    rows = []
    for (path, phase), part in grouped(profile.modules, lambda row: (row.path, row.phase)).items():
        row = {"module": path_text(path, cut=False), "phase": phase}
        row |= _per_step(part, profile.num_steps)
        rows.append(row | {"share": ratio(part.total_s, whole_s)})
    tables = (_modules_table(profile, whole_s),) if rows else ()
    return Section(name="modules", tables=tables, rows=rows)


def _modules_table(profile: StepProfile, whole_s: float) -> Table:
    """The modules with a column for each phase; blocks that differ by their numbers are one row."""
    (item, time), steps = terms(profile), profile.num_steps
    by_phase = grouped(profile.modules, lambda row: (collapsed(row.path), row.phase))
    by_path = grouped(profile.modules, lambda row: collapsed(row.path))
    rows = []
    for path, part in by_path.items():
        row: Row = {
            "module": path_text(path),
            "share": ratio(part.total_s, whole_s),
            "kernels_per_step": part.count / steps,
        }
        for phase in LaunchPhase:
            of_phase = by_phase.get((path, phase))
            row[phase] = None if of_phase is None else of_phase.total_s / steps * 1e3
        rows.append(row)
    columns = [column("module")]
    for times in profile.phases:
        if any(times.launches):
            phase = times.phase
            columns.append(Column(phase, "ms", f"Time in {phase}.", key=phase, write=rounded))
    columns += [column("share", drop_order=0), column("kernels_per_step", name=f"{item}s")]
    notes = [
        f"{time} per step, of a module without the modules in it; a star stands for all blocks."
    ]
    if len(rows) > MAX_MODULES:
        shown_s = added(list(by_path.values())[:MAX_MODULES]).total_s
        share = percent(shown_s, whole_s)
        notes.append(f"Shown are {MAX_MODULES} of {len(rows)} modules, {share} % of the time.")
    return make_table("Modules", columns, rows[:MAX_MODULES], notes)


def idle_section(profile: StepProfile) -> Section:
    """Idle time by phase and cause; nothing for a CPU, which is its own host."""
    if profile.work is Work.OPERATORS or not profile.idle:
        return Section(name="idle")
    rows = []
    for times in profile.idle:
        row = {"phase": times.phase, "cause": times.cause} | _idle_values(profile, times)
        rows.append(row | {"median_s": times.median_s, "longest_s": times.longest_s})
    whole = {"phase": WHOLE_STEP, "cause": "all", "median_s": None, "longest_s": None}
    whole |= _idle_values(profile, added(profile.idle))
    columns = columns_of(
        "phase",
        "cause",
        "idle_ms_per_step",
        "share_of_wall",
        column("count_per_step", name="times", drop_order=2),
        "median_s",
        Column("longest", "µs", "The longest.", key="longest_s", drop_order=3, scale=1e6),
    )
    note = (
        "Per profiled step, and % of its wall time. A time belongs to the phase of the kernel "
        "that ended it."
    )
    table = make_table("Idle times of the GPU", columns, [*rows, whole], [note])
    keys = ("phase", "cause", "idle_ms_per_step", "share_of_wall", "count_per_step")
    return Section(name="idle", tables=(table,), rows=rows, keys=keys)


def _idle_values(profile: StepProfile, part: Timed) -> Row:
    """Time, share and count of idle times, per step."""
    return {
        "idle_ms_per_step": part.total_s / profile.num_steps * 1e3,
        "share_of_wall": ratio(part.total_s, wall_s(profile)),
        "count_per_step": part.count / profile.num_steps,
    }
