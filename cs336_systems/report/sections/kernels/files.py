"""Kernel traces as tables for a terminal and as files of a directory: one trace in full, several beside each other."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cs336_systems.analysis.kernels.step_profile import StepProfile, encode_profile
from cs336_systems.report.entries import labels
from cs336_systems.report.formats import pngs_of, texts_of, to_markdown, write_files
from cs336_systems.report.identity import file_names
from cs336_systems.report.plots.draw import Drawing
from cs336_systems.report.section import Section, Table, findings_table, with_note
from cs336_systems.report.sections.kernels.communication import communication, ranks
from cs336_systems.report.sections.kernels.details import details
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import about
from cs336_systems.report.sections.kernels.findings import findings
from cs336_systems.report.sections.kernels.plots import (
    communication_chart,
    configuration_chart,
    draw_timeline,
)
from cs336_systems.report.sections.kernels.tables import attention, classes, phases, top_kernels

_PRINTED: tuple[Callable[[Sequence[Explained]], Section], ...] = (
    phases,
    communication,
    ranks,
    classes,
)
SUBJECTS = (*_PRINTED, attention, top_kernels)
"""Sections about any number of traces; those in details.py have more of the kernels of a single one."""


def tables_of(entries: Sequence[Explained]) -> list[Table]:
    """The tables of several traces for a terminal; none for no entries."""
    return _noted_once(table for make in _PRINTED for table in make(entries).tables) if entries else []


def tables_of_one(entry: Explained, top: int) -> list[Table]:
    """The tables of one trace for a terminal, findings first; a note below the first names file, device and steps.

    At most `top` kernels and idle times are listed.
    """
    sections = [*(make([entry]) for make in SUBJECTS[:-1]), *details(entry.profile, top)]
    found = _findings(entry)
    tables = [*([found] if found.rows else []), *(table for section in sections for table in section.tables)]
    return _noted_once([with_note(tables[0], about(entry.profile)), *tables[1:]])


def _noted_once(tables: Iterable[Table]) -> list[Table]:
    """The tables, each without the notes of those above it."""
    found, said = [], set[str]()
    for table in tables:
        found.append(replace(table, notes=tuple(note for note in table.notes if note not in said)))
        said |= set(table.notes)
    return found


def _findings(entry: Explained) -> Table:
    return findings_table(findings(entry.profile, entry.config), "Nothing stands out.")


def sections_of(entries: Sequence[Explained], top: int | None = None) -> list[Section]:
    """All sections of these traces, with their pictures; with `top`, of a single trace as in `write_kernels`."""
    if top is not None:
        profile, own = entries[0].profile, [make(entries) for make in SUBJECTS[:-1]]
        return [*own, *details(profile, top), Section(name="timeline", pictures=_timeline("timeline", profile))]
    found = [make(entries) for make in SUBJECTS]
    pairs = [(name, entry.profile) for name, entry in zip(labels(entries), entries, strict=True)]
    stems = file_names(name for name, _ in pairs)
    timelines = [_timeline(f"{stem}_timeline", own, name) for stem, (name, own) in zip(stems, pairs, strict=True)]
    charts = [chart for make in (configuration_chart, communication_chart) if (chart := make(pairs)) is not None]
    return [*found, Section(name="plots", pictures=[*charts, *itertools.chain.from_iterable(timelines)])]


def _timeline(file: str, profile: StepProfile, name: str = "") -> list[Drawing]:
    """The picture of one step, unless it takes no time, as that of an empty trace."""
    has_timeline = profile.pictured is not None and profile.pictured.wall_s
    return [Drawing(file, partial(draw_timeline, profile, name))] if has_timeline else []


def write_kernels(entries: Sequence[Explained], directory: Path, top: int | None = None) -> list[Path]:
    """Write each table as CSV, Markdown, LaTeX and Typst, and pictures; return the paths.

    With `top`, which needs a single entry, also profile.json, findings.md and the sections of details.py, with so many
    kernels and idle times in a table. The directory is made if need be. Without entries nothing is written. A subject
    that these entries have nothing of has no files: those of earlier entries are removed.
    """
    if not entries:
        return []
    files: dict[str, str | bytes] = {} if top is None else {"plots/timeline.png": b""}
    note = ""
    if top is not None:
        (entry,) = entries
        note = about(entry.profile)
        files["profile.json"] = encode_profile(entry.profile)
        files["findings.md"] = to_markdown(with_note(_findings(entry), note))
    for section in sections_of(entries, top):
        files |= {**texts_of(section, note), **pngs_of(section)}
    return write_files(files, directory)
