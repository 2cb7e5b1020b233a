"""Memory profiles as tables for a terminal, and as files of a directory: of one snapshot, or of the runs of a sweep."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from cs336_systems.analysis.memory.profile import MemoryProfile, encode_memory_profile
from cs336_systems.report.entries import labels, settings
from cs336_systems.report.formats import to_markdown
from cs336_systems.report.frame import order
from cs336_systems.report.identity import file_names
from cs336_systems.report.plots import drawing
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.sections.memory.allocations import at_peak, blocks, largest, saved
from cs336_systems.report.sections.memory.answers import answers
from cs336_systems.report.sections.memory.entries import MemoryEntry, Snapshot, recorded_runs
from cs336_systems.report.sections.memory.findings import findings
from cs336_systems.report.sections.memory.peak_bars import draw_peaks
from cs336_systems.report.sections.memory.peaks import allocator, categories, peaks
from cs336_systems.report.sections.memory.phases import boundaries, phases
from cs336_systems.report.sections.memory.plots import draw_memory
from cs336_systems.report.sections.memory.words import about
from cs336_systems.report.table import Table, findings_table, with_note

Bar = tuple[str, MemoryEntry]
"""A run with its label."""
MAX_BARS = 40
"""Of one picture; more would not fit a page."""
TOP = 10
"""Allocations of a single snapshot to list."""


def sections(entries: Sequence[Snapshot], top: int = TOP) -> list[Section]:
    """All that is known of the entries, in the order to read it; of a single snapshot with single allocations."""
    found = [peaks(entries), categories(entries), boundaries(entries), phases(entries)]
    if recorded_runs(entries):
        return [*found, largest(entries)]
    profile = entries[0].profile
    details = [at_peak(profile, top), largest(entries, top), blocks(profile), saved(profile), allocator(profile)]
    return [*found, *details]


def memory_tables(entries: Sequence[Snapshot], top: int = TOP) -> list[Table]:
    """For a terminal: of several runs the peaks and what they consist of; of a single snapshot findings, then all."""
    if runs := _in_order(entries):
        return [table for make in (peaks, categories) for table in make(runs).tables]
    details = [table for section in sections(entries, top) for table in section.tables] if entries else []
    return [*(_findings(entry.profile) for entry in entries), *details]


def write_memory(entries: Sequence[Snapshot], directory: Path, top: int = TOP) -> list[Path]:
    """Write each subject as CSV, Markdown, LaTeX and Typst, answers.md and plots/ into the directory; return the paths.

    Of a single snapshot memory.json and findings.md too, and plots/timeline.png; of runs, plots/peaks.png has a bar for
    each, peaks2.png those that it has no room for, and plots/<key>_timeline.png is the timeline of each. The directory
    is made. Without entries nothing is written. A subject that these entries have nothing of has no files: those of
    earlier ones are removed.
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
    """The runs as tables list them; none of a single snapshot."""
    return sorted(recorded_runs(entries), key=lambda entry: order(entry.config))


def _findings(profile: MemoryProfile) -> Table:
    """What stands out, with what the tables are of."""
    return with_note(findings_table(findings(profile)), about(profile))


def _picture(entry: Snapshot) -> dict[str, str | bytes]:
    return {"plots/timeline.png": drawing.to_png(draw_memory(entry.profile))}


def _pictures(entries: Sequence[MemoryEntry]) -> dict[str, str | bytes]:
    pictures: dict[str, str | bytes] = {}
    for page, shown in enumerate(_pages(list(zip(labels(entries), entries, strict=True))), start=1):
        groups = [[(label, entry.profile) for label, entry in group] for _, group in groupby(shown, _size)]
        name = f"plots/peaks{'' if page == 1 else page}.png"
        pictures[name] = drawing.to_png(draw_peaks(groups, settings(entries)))
    titles = labels(entries, always=("size", "context_length", "mode", "precision"))
    stems = file_names(entry.config.key for entry in entries)
    for entry, title, stem in zip(entries, titles, stems, strict=True):
        picture = draw_memory(entry.profile, settings([entry]), title)
        pictures[f"plots/{stem}_timeline.png"] = drawing.to_png(picture)
    return pictures


def _pages(bars: Sequence[Bar]) -> list[list[Bar]]:
    """As many sizes on a page as there is room for; one that needs more than a page begins a new one."""
    pages: list[list[Bar]] = [[]]
    for own in (list(group) for _, group in groupby(bars, _size)):
        for part in (own[start : start + MAX_BARS] for start in range(0, len(own), MAX_BARS)):
            if len(pages[-1]) + len(part) > MAX_BARS:
                pages.append([])
            pages[-1] += part
    return pages


def _size(bar: Bar) -> str:
    return bar[1].config.size
