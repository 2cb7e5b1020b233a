"""Memory profiles as tables for a terminal, and as files of a directory: of one snapshot, or of the runs of a sweep."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cs336_systems.analysis.memory.profile import MemoryProfile, encode_memory_profile
from cs336_systems.report.entries import labels, settings
from cs336_systems.report.formats import pngs_of, texts_of, to_markdown, write_files
from cs336_systems.report.frame import order
from cs336_systems.report.identity import file_names
from cs336_systems.report.plots.draw import Drawing
from cs336_systems.report.section import Section, Table, findings_table, with_note
from cs336_systems.report.sections.memory.allocations import blocks, largest
from cs336_systems.report.sections.memory.entries import MemoryEntry, Snapshot, recorded_runs
from cs336_systems.report.sections.memory.findings import findings
from cs336_systems.report.sections.memory.plots import draw_memory, peak_charts
from cs336_systems.report.sections.memory.tables import boundaries, peaks, phases
from cs336_systems.report.sections.memory.words import about

TOP = 10
"""Default number of allocations of a single snapshot that a table lists."""


def sections_of(entries: Sequence[Snapshot], top: int = TOP) -> list[Section]:
    """All sections in reading order, then pictures; a single snapshot also has one on the blocks of its model.

    The picture of a single snapshot is `timeline`. Runs have theirs as `<key>_timeline`, and several a bar each in
    `peaks`, continued in `peaks2`.
    """
    runs = _in_order(entries)
    every = runs or entries
    found = [peaks(every), boundaries(every), phases(every)]
    if runs:
        return [*found, largest(runs), Section(name="plots", pictures=[*peak_charts(runs), *_timelines(runs)])]
    profile = entries[0].profile
    timeline = Section(name="timeline", pictures=[Drawing("timeline", partial(draw_memory, profile))])
    return [*found, largest(entries, top), blocks(profile), timeline]


def memory_tables(entries: Sequence[Snapshot], top: int = TOP) -> list[Table]:
    """Tables for a terminal: peaks of runs; findings and all sections of a single snapshot."""
    if runs := _in_order(entries):
        return list(peaks(runs).tables)
    details = [table for section in sections_of(entries, top) for table in section.tables] if entries else []
    return [*(_findings(entry.profile) for entry in entries), *details]


def write_memory(entries: Sequence[Snapshot], directory: Path, top: int = TOP) -> list[Path]:
    """Write each section as CSV, Markdown, LaTeX and Typst, and plots/ into the directory; return the paths.

    A single snapshot also gets memory.json and findings.md. The directory is made. Without entries nothing is written.
    The files of an empty section are removed.
    """
    if not entries:
        return []
    files: dict[str, str | bytes] = {}
    is_single = not recorded_runs(entries)
    if is_single:
        profile = entries[0].profile
        files |= {"memory.json": encode_memory_profile(profile), "findings.md": to_markdown(_findings(profile))}
    for section in sections_of(entries, top):
        files |= {**texts_of(section, about(entries[0].profile) if is_single else ""), **pngs_of(section)}
    return write_files(files, directory)


def _in_order(entries: Sequence[Snapshot]) -> list[MemoryEntry]:
    """The runs of a sweep in the order of tables; empty for a single snapshot."""
    return sorted(recorded_runs(entries), key=lambda entry: order(entry.config))


def _findings(profile: MemoryProfile) -> Table:
    """The findings as a table, with the name of the snapshot below it."""
    return with_note(findings_table(findings(profile)), about(profile))


def _timelines(entries: Sequence[MemoryEntry]) -> list[Drawing]:
    titles = labels(entries, always=("size", "context_length", "mode", "precision"))
    stems = file_names(entry.config.key for entry in entries)
    return [
        Drawing(f"{stem}_timeline", partial(draw_memory, entry.profile, settings([entry]), title))
        for entry, title, stem in zip(entries, titles, stems, strict=True)
    ]
