"""The charts of peaks: what the peak of each run of a sweep consists of."""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

from cs336_systems.analysis.memory.profile import MemoryProfile
from cs336_systems.report.entries import labels, settings
from cs336_systems.report.numbers import GIB
from cs336_systems.report.plots.charts import Axis, Bar, Chart, Curve, Line, Panel, Point, Style, distinct
from cs336_systems.report.plots.palette import CATEGORY_COLOURS
from cs336_systems.report.sections.memory.entries import MemoryEntry
from cs336_systems.report.sections.memory.facts import by_category
from cs336_systems.report.sections.memory.words import size
from cs336_systems.text import inert_line, shorten

LabelledRun: TypeAlias = tuple[str, MemoryEntry]
LabelledProfile: TypeAlias = tuple[str, MemoryProfile]
MAX_BARS = 40
"""Most bars in one picture; more would not fit on a printed page."""
VISIBLE = 1 / 500
"""Smallest part of any peak with which a category is in the legend."""
LONGEST_PHASE = 16
"""Characters of the name of a phase."""


def peak_charts(entries: Sequence[MemoryEntry]) -> list[Chart]:
    """A bar for each of several runs; a second chart, `peaks2`, has those that the first has no room for."""
    if len(entries) < 2:
        return []
    pages = _pages(list(zip(labels(entries), entries, strict=True)))
    words = settings(entries)
    return [
        peak_chart(
            f"peaks{'' if page == 1 else page}",
            [[(label, entry.profile) for label, entry in group] for _, group in groupby(shown, _size)],
            words,
        )
        for page, shown in enumerate(pages, start=1)
    ]


def peak_chart(name: str, groups: Sequence[Sequence[LabelledProfile]], words: str = "") -> Chart:
    """A bar for each labelled profile: what its peak consists of, and as a mark what was reserved then.

    Each group has a panel with a scale of its own, so that a small model is seen beside a large one. Nothing is cut
    off: a scale reaches as far as the largest of its group. Raise ValueError for no profile.
    """
    if not groups or not all(groups):
        raise ValueError(f"a picture of peaks needs at least one profile in each group, got {list(map(len, groups))}")
    peaks = [profile.peak for group in groups for _, profile in group]
    largest = {
        category: max(by_category(peak)[category] / (peak.allocated_bytes or 1) for peak in peaks)
        for category in CATEGORY_COLOURS
    }
    styles = {
        str(category): Style(colour=colour, label=None if largest[category] > VISIBLE else "")
        for category, colour in CATEGORY_COLOURS.items()
    }
    return Chart(
        name=name, title="What the peak of memory consists of, by configuration", settings=words,
        panels=[_panel(group) for group in groups], size=(6.0, 0.0), legend=4, styles=styles, is_lying=True,
    )  # fmt: skip


def _panel(group: Sequence[LabelledProfile]) -> Panel:
    names, profiles = distinct(label for label, _ in group), [profile for _, profile in group]
    reserved = [Point(x=name, value=own.peak.reserved_bytes / GIB) for name, own in zip(names, profiles, strict=True)]
    marks = Curve(line=Line(name="reserved", points=tuple(reserved)), colour="#222222", marker="|", dash="", size=13)
    bars = [_bar(name, profile) for name, profile in zip(names, profiles, strict=True)]
    y = Axis(label="memory at the peak (GiB)", unit="GiB")
    return Panel(x=Axis(names=names), y=y, bars=bars, curves=[marks])


def _bar(label: str, profile: MemoryProfile) -> Bar:
    """What the peak consists of, with its sum and phase as words."""
    peak, found = profile.peak, by_category(profile.peak)
    is_lost = bool(profile.work.out_of_memory)
    where = f"\nin {shorten(inert_line(peak.phase), LONGEST_PHASE)}" if peak.phase and not is_lost else ""
    return Bar(
        name=label,
        parts={str(category): found[category] / GIB for category in CATEGORY_COLOURS if found[category]},
        words=f"{size(peak.allocated_bytes)}{where}",
        failure="out of memory" if is_lost else "",
    )


def _pages(runs: Sequence[LabelledRun]) -> list[list[LabelledRun]]:
    """The bars of each chart: whole sizes as long as they fit; a size with too many bars begins a new chart."""
    pages: list[list[LabelledRun]] = [[]]
    for own in (list(group) for _, group in groupby(runs, _size)):
        for part in (own[start : start + MAX_BARS] for start in range(0, len(own), MAX_BARS)):
            if len(pages[-1]) + len(part) > MAX_BARS:
                pages.append([])
            pages[-1] += part
    return pages


def _size(run: LabelledRun) -> str:
    return run[1].config.size
