"""Memory profiles as tables for a terminal, and as files of a directory: of one snapshot, or of the runs of a sweep."""

from collections.abc import Sequence
from pathlib import Path

from cs336_systems.analysis.memory.profile import MemoryProfile, encode_memory_profile
from cs336_systems.report.entries import labels, settings
from cs336_systems.report.formats import to_markdown
from cs336_systems.report.frame import order
from cs336_systems.report.identity import file_names
from cs336_systems.report.plots import drawing
from cs336_systems.report.plots.draw import png_of
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.sections.memory.allocations import blocks, largest
from cs336_systems.report.sections.memory.answers import answers
from cs336_systems.report.sections.memory.entries import MemoryEntry, Snapshot, recorded_runs
from cs336_systems.report.sections.memory.findings import findings
from cs336_systems.report.sections.memory.plots import draw_memory, peak_charts
from cs336_systems.report.sections.memory.tables import boundaries, peaks, phases
from cs336_systems.report.sections.memory.words import about
from cs336_systems.report.table import Table, findings_table, with_note

TOP = 10
"""Default number of allocations of a single snapshot that a table lists."""


def sections(entries: Sequence[Snapshot], top: int = TOP) -> list[Section]:
    """All sections in reading order; a single snapshot also has one on the blocks of its model."""
    found = [peaks(entries), boundaries(entries), phases(entries)]
    if recorded_runs(entries):
        return [*found, largest(entries)]
    return [*found, largest(entries, top), blocks(entries[0].profile)]


def memory_tables(entries: Sequence[Snapshot], top: int = TOP) -> list[Table]:
    """Tables for a terminal: peaks of runs; findings and all sections of a single snapshot."""
    if runs := _in_order(entries):
        return list(peaks(runs).tables)
    details = [table for section in sections(entries, top) for table in section.tables] if entries else []
    return [*(_findings(entry.profile) for entry in entries), *details]


def write_memory(entries: Sequence[Snapshot], directory: Path, top: int = TOP) -> list[Path]:
    """Write each section as CSV, Markdown, LaTeX and Typst, answers.md and plots/ into the directory; return the paths.

    A single snapshot also gets memory.json and findings.md; its picture is plots/timeline.png. Runs of a sweep have
    their timelines in plots/<key>_timeline.png and a bar each in plots/peaks.png, continued in peaks2.png. The
    directory is made. Without entries nothing is written. The files of an empty section are removed.
    """
    if not entries:
        return []
    runs = _in_order(entries)
    files: dict[str, str | bytes] = {"answers.md": answers(runs or entries)}
    if not runs:
        profile = entries[0].profile
        files |= {"memory.json": encode_memory_profile(profile), "findings.md": to_markdown(_findings(profile))}
    for section in sections(runs or entries, top):
        files |= texts_of(section, "" if runs else about(entries[0].profile))
    return write_files(files | (_pictures(runs) if runs else _picture(entries[0])), directory)


def _in_order(entries: Sequence[Snapshot]) -> list[MemoryEntry]:
    """The runs of a sweep in the order of tables; empty for a single snapshot."""
    return sorted(recorded_runs(entries), key=lambda entry: order(entry.config))


def _findings(profile: MemoryProfile) -> Table:
    """The findings as a table, with the name of the snapshot below it."""
    return with_note(findings_table(findings(profile)), about(profile))


def _picture(entry: Snapshot) -> dict[str, str | bytes]:
    return {"plots/timeline.png": drawing.to_png(draw_memory(entry.profile))}


def _pictures(entries: Sequence[MemoryEntry]) -> dict[str, str | bytes]:
    pictures: dict[str, str | bytes] = {f"plots/{chart.name}.png": png_of(chart) for chart in peak_charts(entries)}
    titles = labels(entries, always=("size", "context_length", "mode", "precision"))
    stems = file_names(entry.config.key for entry in entries)
    for entry, title, stem in zip(entries, titles, stems, strict=True):
        picture = draw_memory(entry.profile, settings([entry]), title)
        pictures[f"plots/{stem}_timeline.png"] = drawing.to_png(picture)
    return pictures
