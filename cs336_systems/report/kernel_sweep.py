"""The kernel traces of a sweep beside each other: tables, the course's answers, a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path

from cs336_systems.record import write_atomically
from cs336_systems.report import drawing
from cs336_systems.report.formats import WRITERS, Table
from cs336_systems.report.kernel_entries import Profiled, labels, load_profiled
from cs336_systems.report.kernel_listing import Listing
from cs336_systems.report.kernel_plots import draw_configurations
from cs336_systems.report.kernel_sweep_answers import sweep_answers
from cs336_systems.report.kernel_sweep_shares import (
    attention_listing,
    classes_listing,
    products_listing,
    top_kernels_listing,
)
from cs336_systems.report.kernel_sweep_tables import phases_listing, slowdown_listing

__all__ = ["Profiled", "load_profiled", "sweep_tables", "write_kernel_sweep"]

_TO_PRINT: tuple[Callable[[Sequence[Profiled]], Listing], ...] = (
    phases_listing,
    classes_listing,
    products_listing,
    slowdown_listing,
)
_LISTINGS = (*_TO_PRINT, attention_listing, top_kernels_listing)


def sweep_tables(entries: Sequence[Profiled]) -> list[Table]:
    """For a terminal: phases, classes, matrix products, slowdown; none for no entries."""
    return [table for make in _TO_PRINT for table in make(entries).tables] if entries else []


def write_kernel_sweep(entries: Sequence[Profiled], directory: Path) -> list[Path]:
    """Write each table as CSV, Markdown, LaTeX and Typst, answers.md and plots/configurations.png; return the paths.

    The directory is made if need be. Without entries nothing is written. A table that these entries have no rows for
    has no files: those of earlier entries are removed.
    """
    if not entries:
        return []
    (directory / "plots").mkdir(parents=True, exist_ok=True)
    files = {"answers.md": sweep_answers(entries).encode(errors="replace")}
    for make in _LISTINGS:
        listing = make(entries)
        texts = {"csv": listing.csv, **{end: "\n".join(map(write, listing.tables)) for end, write in WRITERS.items()}}
        files |= {f"{listing.name}.{ending}": text.encode(errors="replace") for ending, text in texts.items()}
    bars = list(zip(labels(entries), (entry.profile for entry in entries), strict=True))
    files["plots/configurations.png"] = drawing.to_png(draw_configurations(bars))
    for name, data in files.items():
        if data:
            write_atomically(directory / name, data)
        else:
            (directory / name).unlink(missing_ok=True)
    return [directory / name for name, data in files.items() if data]
