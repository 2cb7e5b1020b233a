"""Kernel traces as tables for a terminal and as files of a directory: one trace in full, several beside each other."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from cs336_systems.analysis.kernels.step_profile import StepProfile, encode_profile
from cs336_systems.report.entries import labels
from cs336_systems.report.formats import to_markdown
from cs336_systems.report.identity import file_names
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.draw import png_of
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.sections.kernels.answers import answers
from cs336_systems.report.sections.kernels.communication import communication, ranks
from cs336_systems.report.sections.kernels.details import details
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import about
from cs336_systems.report.sections.kernels.findings import findings
from cs336_systems.report.sections.kernels.plots import (
    class_chart,
    communication_chart,
    configuration_chart,
    draw_timeline,
)
from cs336_systems.report.sections.kernels.tables import attention, classes, phases, top_kernels
from cs336_systems.report.table import Table, findings_table, with_note

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


def write_kernels(
    entries: Sequence[Explained],
    directory: Path,
    top: int | None = None,
    status: Callable[[str, int, int], None] | None = None,
) -> list[Path]:
    """Write each table as CSV, Markdown, LaTeX and Typst, answers.md and pictures; return the paths.

    With `top`, which needs a single entry, also profile.json, findings.md and the sections of details.py, with so many
    kernels and idle times in a table. Of a sweep, pictures have the name of the run; `status` shows which is drawn.
    The directory is made if need be. Without entries nothing is written. A subject that these entries have nothing of
    has no files: those of earlier entries are removed.
    """
    if not entries:
        return []
    files: dict[str, str | bytes] = {"answers.md": answers(entries)}
    sections, note = [make(entries) for make in (SUBJECTS if top is None else SUBJECTS[:-1])], ""
    if top is None:
        names = labels(entries)
        profiles = [entry.profile for entry in entries]
        for done, (name, stem, profile) in enumerate(zip(names, file_names(names), profiles, strict=True)):
            if status is not None:
                status(f"drawing {name}", done, len(names))
            files |= _pictures(profile, f"{stem}_", name)
        pairs = list(zip(names, profiles, strict=True))
        charts = (configuration_chart(pairs), communication_chart(pairs))
        files |= {f"plots/{chart.name}.png": png_of(chart) for chart in charts if chart is not None}
    else:
        (entry,) = entries
        note = about(entry.profile)
        files["profile.json"] = encode_profile(entry.profile)
        files["findings.md"] = to_markdown(with_note(_findings(entry), note))
        files |= _pictures(entry.profile)
        sections += details(entry.profile, top)
    for section in sections:
        files |= texts_of(section, note)
    return write_files(files, directory)


def _pictures(profile: StepProfile, prefix: str = "", name: str = "") -> dict[str, bytes]:
    """The pictures by file; empty for the timeline of a profile that has none."""
    has_timeline = profile.pictured is not None and profile.pictured.wall_s  # that of an empty trace takes no time
    return {
        f"plots/{prefix}classes.png": png_of(class_chart(profile, name=name)),
        f"plots/{prefix}timeline.png": drawing.to_png(draw_timeline(profile, name)) if has_timeline else b"",
    }
