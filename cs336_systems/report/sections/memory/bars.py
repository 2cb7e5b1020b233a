"""Bars of what peaks of memory consist of."""

from collections.abc import Sequence
from itertools import groupby

from ....text import shorten
from ...charts import CATEGORY_COLOURS, Bar, Chart, Panel, Style, distinct
from ...section import labels, settings
from ...words import GIB
from .entry import MemoryEntry, by_category
from .words import size

CATEGORIES = {str(category): Style(colour=colour) for category, colour in CATEGORY_COLOURS.items()}
LONGEST_PHASE = 16
"""Characters of the name of a phase."""


def peak_charts(entries: Sequence[MemoryEntry]) -> list[Chart]:
    """A bar for each of several runs: what its peak consists of, and as a mark what was reserved
    then.

    Each size has a panel with a scale of its own, so that a small model is seen beside a large one.
    Nothing is cut off: a scale reaches as far as the largest of its size.
    """
    if len(entries) < 2:
        return []
    named = zip(distinct(labels(entries)), entries, strict=True)
    panels = []
    for _, runs in groupby(named, lambda run: run[1].config and run[1].config.size):
        bars = [peak_bar(label, entry) for label, entry in runs]
        panels.append(Panel(label="memory at the peak (GiB)", bars=bars, mark="reserved"))
    return [
        Chart(
            name="peaks",
            title="What the peak of memory consists of, by configuration",
            settings=settings(entries),
            panels=panels,
            styles=CATEGORIES,
        )
    ]


def peak_bar(label: str, entry: MemoryEntry) -> Bar:
    """What the peak consists of, with its sum and phase as figures."""
    peak = entry.profile.peak
    sizes = by_category(peak)
    parts = {str(name): sizes[name] / GIB for name in CATEGORY_COLOURS if sizes[name]}
    figures, failure = [size(peak.allocated_bytes)], ""
    if entry.is_out_of_memory:
        failure = "out of memory"
    elif peak.phase:
        figures.append(f"in {shorten(peak.phase, LONGEST_PHASE)}")
    mark = peak.reserved_bytes / GIB
    return Bar(name=label, parts=parts, figures=figures, failure=failure, mark=mark)
