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
from cs336_systems.report.plots.draw import Drawing, Picture
from cs336_systems.report.section import Section, Table, findings_table, with_note
from cs336_systems.report.sections.kernels.details import details
from cs336_systems.report.sections.kernels.entries import Explained, about
from cs336_systems.report.sections.kernels.findings import findings
from cs336_systems.report.sections.kernels.plots import communication_chart, configuration_chart, draw_timeline
from cs336_systems.report.sections.kernels.tables import attention, classes, communication, phases, ranks, top_kernels

_PRINTED: tuple[Callable[[Sequence[Explained]], Section], ...] = (phases, communication, ranks, classes)
_OF_ONE = (*_PRINTED, attention)
SUBJECTS = (*_OF_ONE, top_kernels)
"""Sections about any number of traces; those in details.py have more of the kernels of a single one."""


def tables_of(entries: Sequence[Explained]) -> list[Table]:
    """The tables of several traces for a terminal; none for no entries."""
    return _noted_once(table for make in _PRINTED for table in make(entries).tables) if entries else []


def tables_of_one(entry: Explained, top: int) -> list[Table]:
    """The tables of one trace for a terminal, findings first; a note below the first names file, device and steps.

    At most `top` kernels and idle times are listed.
    """
    sections = [*(make([entry]) for make in _OF_ONE), *details(entry.profile, top)]
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


def sections_of(entries: Sequence[Explained]) -> list[Section]:
    """The sections of several traces, with their pictures."""
    pairs = [(name, entry.profile) for name, entry in zip(labels(entries), entries, strict=True)]
    stems = file_names(name for name, _ in pairs)
    timelines = [_timeline(f"{stem}_timeline", own, name) for stem, (name, own) in zip(stems, pairs, strict=True)]
    charts = [make(pairs) for make in (configuration_chart, communication_chart)]
    pictures: list[Picture] = [chart for chart in charts if chart is not None]
    pictures += itertools.chain.from_iterable(timelines)
    return [*(make(entries) for make in SUBJECTS), Section(name="plots", pictures=pictures)]


def _timeline(file: str, profile: StepProfile, name: str = "") -> list[Drawing]:
    """The picture of one step, unless it takes no time, as that of an empty trace."""
    has_timeline = profile.pictured is not None and profile.pictured.wall_s
    return [Drawing(file, partial(draw_timeline, profile, name))] if has_timeline else []


def write_kernels(entry: Explained, directory: Path, top: int) -> list[Path]:
    """Write profile.json, findings.md, the picture and each table as CSV, Markdown, LaTeX and Typst; return the paths.

    Tables hold at most `top` kernels and idle times. The directory is made if need be. A subject that this trace has
    nothing of has no files: those of an earlier one are removed.
    """
    note = about(entry.profile)
    files: dict[str, str | bytes] = {
        "plots/timeline.png": b"",
        "profile.json": encode_profile(entry.profile),
        "findings.md": to_markdown(with_note(_findings(entry), note)),
    }
    for section in (*(make([entry]) for make in _OF_ONE), *details(entry.profile, top)):
        files |= texts_of(section, note)
    files |= pngs_of(Section(name="timeline", pictures=_timeline("timeline", entry.profile)))
    return write_files(files, directory)
