"""The memory of a sweep's configurations beside each other: tables, the course's answers, pictures."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from cs336_systems.report.entries import labels, settings
from cs336_systems.report.frame import order
from cs336_systems.report.identity import file_names
from cs336_systems.report.plots import drawing
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.sections.memory.allocations import largest_by_configuration
from cs336_systems.report.sections.memory.answers import sweep_answers
from cs336_systems.report.sections.memory.entries import MemoryEntry
from cs336_systems.report.sections.memory.peak_bars import draw_peaks
from cs336_systems.report.sections.memory.phases import boundaries_by_configuration
from cs336_systems.report.sections.memory.plots import draw_memory
from cs336_systems.report.sections.memory.tables import categories_by_configuration, peaks_by_configuration
from cs336_systems.report.table import Table

__all__ = ["MemoryEntry", "memory_sweep_tables", "write_memory_sweep"]

Bar = tuple[str, MemoryEntry]
"""A run with its label."""
MAX_BARS = 40
"""Of one picture; more would not fit a page."""


def memory_sweep_tables(entries: Sequence[MemoryEntry]) -> list[Table]:
    """For a terminal: peaks by mode, every peak, what each consists of; none for no entries."""
    sections = [make(_in_order(entries)) for make in _SECTIONS[:2]] if entries else []
    return [table for section in sections for table in section.tables]


def write_memory_sweep(entries: Sequence[MemoryEntry], directory: Path) -> list[Path]:
    """Write each table as CSV, Markdown, LaTeX and Typst, answers.md and plots/; return the paths.

    plots/peaks.png has a bar for each configuration, peaks2.png those that it has no room for, plots/<key>_timeline.png
    is its timeline. The directory is made. Without entries nothing is written. A table that these entries have no rows
    for has no files: those of earlier entries are removed.
    """
    if not entries:
        return []
    ordered = _in_order(entries)
    files: dict[str, str | bytes] = {"answers.md": sweep_answers(ordered)}
    for make in _SECTIONS:
        files |= texts_of(make(ordered))
    files |= _pictures(ordered)
    return write_files(files, directory)


def _in_order(entries: Sequence[MemoryEntry]) -> list[MemoryEntry]:
    """The entries as tables list them."""
    return sorted(entries, key=lambda entry: order(entry.config))


def _pictures(entries: Sequence[MemoryEntry]) -> dict[str, bytes]:
    pictures = {}
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


def _pages(bars: Sequence[Bar]) -> Iterator[list[Bar]]:
    """As many sizes on a page as there is room for; one that needs more than a page begins a new one."""
    page: list[Bar] = []
    for _, group in groupby(bars, _size):
        own = list(group)
        if page and len(page) + len(own) > MAX_BARS:
            yield page
            page = []
        page += own
        while len(page) > MAX_BARS:
            yield page[:MAX_BARS]
            page = page[MAX_BARS:]
    yield page


def _size(bar: Bar) -> str:
    return bar[1].config.size


_SECTIONS: tuple[Callable[[Sequence[MemoryEntry]], Section], ...] = (
    peaks_by_configuration, categories_by_configuration, boundaries_by_configuration, largest_by_configuration,
)  # fmt: skip
"""The first two are what a terminal has room for."""
