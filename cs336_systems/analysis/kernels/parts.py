"""Parts of the model that ranges delimit: its modules, and attention's scores, softmax and values."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.kernels.attribution import Attribution
from cs336_systems.analysis.kernels.frames import totals
from cs336_systems.analysis.kernels.phases import PHASES
from cs336_systems.analysis.kernels.step_profile import AttentionPart, ModuleTimes
from cs336_systems.ranges import Range

MAX_DEPTH = 64
"""Largest number of names in a path; ranges nested deeper share the path, since longer ones could fill the memory."""

PARTS = tuple(AttentionPart)
NO_PART = -1
Parts = NDArray[np.int8]
"""Indices into `PARTS`, NO_PART for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNames:
    """Names that the ranges around the parts of attention may have, in upper or lower case.

    They are this project's, those of the course's handout, and those of a published solution. As `softmax` and `matmul`
    may occur elsewhere, ranges count only where scores, softmax and values follow each other inside one range.
    """

    scores: tuple[str, ...] = (Range.SCORES, "computing attention scores", "attention scores")
    softmax: tuple[str, ...] = (Range.SOFTMAX, "computing softmax", "softmax")
    values: tuple[str, ...] = (Range.VALUES, "final matmul", "matmul")

    def __post_init__(self) -> None:
        names = [name.casefold() for name in (*self.scores, *self.softmax, *self.values)]
        if len(set(names)) < len(names):
            raise ValueError(f"each part of attention needs range names of its own, got {', '.join(names)}")

    def part(self, name: str) -> int:
        """Index into `PARTS` of the part that a range of this name may be; NO_PART for none."""
        accepted = (self.scores, self.softmax, self.values)
        found = (part for part, names in enumerate(accepted) if name.casefold() in map(str.casefold, names))
        return next(found, NO_PART)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeParts:
    """The module path and the part of attention of each range; the last element of each column means no range."""

    path: Ints
    """Index into `paths`."""
    paths: tuple[tuple[int, str], ...]
    """For each path, the path around it and its last name; path 0 is empty."""
    part: Parts
    """The part of attention that the range is, or that it is inside."""
    part_range: Ints
    """The range that is that part of attention; -1 for none."""
    in_attention: Mask
    """Inside a range with the name of attention's own range; in backward attention has no other range."""

    def names(self, path: int) -> tuple[str, ...]:
        """The names of a path, the outermost first."""
        names = []
        while path > 0:
            path, name = self.paths[path]
            names.append(name)
        return tuple(reversed(names))


def range_parts(attribution: Attribution, names: AttentionNames) -> RangeParts:
    """Find the parts of all ranges, from the outermost to the innermost, in time linear in their number."""
    ranges, strings, parent = attribution.trace.ranges, attribution.trace.strings, attribution.parent
    own = _attention_ranges(attribution, names)
    around = parent[own == PARTS.index(AttentionPart.SCORES)]
    attention_names = np.unique(ranges.name[around[around >= 0]])
    is_attention = np.append(np.isin(ranges.name, attention_names), False).tolist()
    part_range = np.append(np.where(own == NO_PART, -1, np.arange(len(own))), -1).tolist()
    path, depth = [0] * len(part_range), [0]
    known: dict[tuple[int, int], int] = {}
    paths = [(0, "")]
    name_of, parent_of = ranges.name.tolist(), parent.tolist()
    for index in np.lexsort((-ranges.end_ns, ranges.start_ns)).tolist():
        outer = parent_of[index]  # -1 for none, which indexes the last element
        path[index] = path[outer]
        if depth[path[outer]] < MAX_DEPTH:
            key = path[outer], name_of[index]
            if key not in known:
                known[key] = len(paths)
                paths.append((path[outer], strings[name_of[index]]))
                depth.append(depth[path[outer]] + 1)
            path[index] = known[key]
        if part_range[index] < 0:
            part_range[index] = part_range[outer]
        is_attention[index] |= is_attention[outer]
    return RangeParts(
        path=np.array(path, dtype=np.int64),
        paths=tuple(paths),
        part=np.append(own, np.int8(NO_PART))[part_range],
        part_range=np.array(part_range, dtype=np.int64),
        in_attention=np.array(is_attention, dtype=np.bool_),
    )


def _attention_ranges(attribution: Attribution, names: AttentionNames) -> Parts:
    """The part that each range is: scores, the softmax that follows them inside the same range, then the values."""
    ranges = attribution.trace.ranges
    used, index = np.unique(ranges.name, return_inverse=True)
    wanted = np.array([names.part(attribution.trace.strings[name]) for name in used.tolist()], dtype=np.int8)
    label = wanted[index]
    rows = np.flatnonzero((label != NO_PART) & ranges.is_nested)
    rows = rows[np.lexsort((ranges.start_ns[rows], attribution.parent[rows], ranges.thread[rows]))]
    label = label[rows]
    is_sibling = np.zeros(len(rows), dtype=np.bool_)
    thread, parent = ranges.thread[rows], attribution.parent[rows]
    is_sibling[1:] = (thread[1:] == thread[:-1]) & (parent[1:] == parent[:-1])
    previous = np.append(np.int8(NO_PART), label)[:-1]
    is_scores, is_softmax = label == 0, (label == 1) & (previous == 0) & is_sibling
    is_values = (label == 2) & is_sibling & np.append(False, is_softmax)[:-1]
    accepted = is_scores | is_softmax | is_values
    own = np.full(len(ranges), NO_PART, dtype=np.int8)
    own[rows[accepted]] = label[accepted]
    return own


def module_times(kernels: pd.DataFrame, parts: RangeParts) -> tuple[ModuleTimes, ...]:
    """Kernels by module path and phase, the longest first."""
    with_paths = kernels.assign(path=parts.path[kernels["module"]])
    return tuple(
        ModuleTimes(path=parts.names(row.path), phase=PHASES[row.phase], count=row.count, total_s=row.total_ns / 1e9)
        for row in totals(with_paths, "path", "phase")
    )
