"""The kernel traces of a sweep beside each other: tables, the course's answers, a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path

from cs336_systems.report.entries import labels
from cs336_systems.report.plots import drawing
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.sections.kernels.answers import sweep_answers
from cs336_systems.report.sections.kernels.entries import Profiled, load_profiled
from cs336_systems.report.sections.kernels.plots import draw_configurations
from cs336_systems.report.sections.kernels.shares import (
    attention_by_configuration,
    classes_by_configuration,
    products_by_configuration,
)
from cs336_systems.report.sections.kernels.tables import (
    phases_by_configuration,
    slowdown_by_configuration,
    top_kernels_by_configuration,
)
from cs336_systems.report.table import Table

__all__ = ["Profiled", "load_profiled", "sweep_tables", "write_kernel_sweep"]

_TO_PRINT: tuple[Callable[[Sequence[Profiled]], Section], ...] = (
    phases_by_configuration,
    classes_by_configuration,
    products_by_configuration,
    slowdown_by_configuration,
)
_SECTIONS = (*_TO_PRINT, attention_by_configuration, top_kernels_by_configuration)


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
    files: dict[str, str | bytes] = {"answers.md": sweep_answers(entries)}
    for make in _SECTIONS:
        files |= texts_of(make(entries))
    bars = list(zip(labels(entries), (entry.profile for entry in entries), strict=True))
    files["plots/configurations.png"] = drawing.to_png(draw_configurations(bars))
    return write_files(files, directory)
