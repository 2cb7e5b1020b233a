"""Memory profiles as tables for a terminal, and as files of a directory: of one snapshot, or of the runs of a sweep."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cs336_systems.analysis.memory.profile import MemoryProfile, encode_memory_profile
from cs336_systems.report.entries import labels, settings
from cs336_systems.report.formats import to_markdown
from cs336_systems.report.frame import order
from cs336_systems.report.identity import file_names
from cs336_systems.report.plots.draw import Drawing
from cs336_systems.report.section import Section, pngs_of, texts_of, write_files
from cs336_systems.report.sections.memory.entries import MemoryEntry, about
from cs336_systems.report.sections.memory.findings import findings
from cs336_systems.report.sections.memory.plots import draw_memory, peak_charts
from cs336_systems.report.sections.memory.tables import blocks, boundaries, largest, peaks, phases
from cs336_systems.report.table import Table, findings_table, with_note

TOP_OF_RUNS = 3
"""Largest allocations to list for each of several runs."""


def sections_of(entries: Sequence[MemoryEntry], top: int = TOP_OF_RUNS) -> list[Section]:
    """All sections in reading order, then pictures; a single snapshot also has one on the blocks of its model.

    The picture of a single snapshot is `timeline`. Runs have theirs as `<key>_timeline`, and several a bar each in
    `peaks`.
    """
    entries = _in_order(entries)
    found = [peaks(entries), boundaries(entries), phases(entries), largest(entries, top)]
    profile = entries[0].profile
    if entries[0].config is None:
        timeline = Section(name="timeline", pictures=[Drawing("timeline", partial(draw_memory, profile))])
        return [*found, blocks(profile), timeline]
    return [*found, Section(name="plots", pictures=[*peak_charts(entries), *_timelines(entries)])]


def memory_tables(entries: Sequence[MemoryEntry], top: int = TOP_OF_RUNS) -> list[Table]:
    """Tables for a terminal: peaks of runs; findings and all sections of a single snapshot."""
    if not entries or entries[0].config is not None:
        return list(peaks(_in_order(entries)).tables) if entries else []
    details = [table for section in sections_of(entries, top) for table in section.tables]
    return [_findings(entries[0].profile), *details]


def write_memory(profile: MemoryProfile, directory: Path, top: int) -> list[Path]:
    """Write memory.json, findings.md, each section in every format, and plots/ into the directory; return the paths.

    The directory is made. The files of an empty section are removed.
    """
    files: dict[str, str | bytes] = {
        "memory.json": encode_memory_profile(profile),
        "findings.md": to_markdown(_findings(profile)),
    }
    for section in sections_of([MemoryEntry(profile=profile)], top):
        files |= {**texts_of(section, about(profile)), **pngs_of(section)}
    return write_files(files, directory)


def _in_order(entries: Sequence[MemoryEntry]) -> list[MemoryEntry]:
    """Runs in the order of tables; a single snapshot as it is."""
    return sorted(entries, key=lambda entry: order(entry.config) if entry.config else ())


def _findings(profile: MemoryProfile) -> Table:
    """The findings as a table, with the name of the snapshot below it."""
    return with_note(findings_table(findings(profile)), about(profile))


def _timelines(entries: Sequence[MemoryEntry]) -> list[Drawing]:
    titles = labels(entries, always=("size", "context_length", "mode", "precision"))
    stems = file_names(entry.config.key for entry in entries if entry.config)
    return [
        Drawing(f"{stem}_timeline", partial(draw_memory, entry.profile, settings([entry]), title))
        for entry, title, stem in zip(entries, titles, stems, strict=True)
    ]
