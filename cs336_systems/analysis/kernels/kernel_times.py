"""Counts, sums and statistics of kernels and of their classes, by phase."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Ints
from cs336_systems.analysis.kernels.classes import MAX_NAME, KernelClass, classify_kernel, short_name
from cs336_systems.analysis.kernels.phases import PHASES, Codes, LaunchPhase
from cs336_systems.analysis.kernels.step_profile import ClassTimes, KernelTimes

CLASSES = tuple(KernelClass)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Statistics of durations in groups; one element per group, in order of the key."""

    key: Ints
    count: Ints
    total_ns: Ints
    median_ns: NDArray[np.float64]
    least_ns: Ints
    most_ns: Ints
    squares: NDArray[np.float64]
    """Sum of the squared deviations from the mean."""


def grouped(key: Ints, duration_ns: Ints) -> Grouped:
    """Statistics of the durations that share a key."""
    order = np.lexsort((duration_ns, key))
    key, time = key[order], duration_ns[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    count = np.diff(np.append(first, len(key)))
    total = np.add.reduceat(time, first) if len(first) else time
    deviation = (time - np.repeat(total / np.maximum(count, 1), count)) ** 2
    return Grouped(
        key=key[first],
        count=count,
        total_ns=total,
        median_ns=(time[first + (count - 1) // 2] + time[first + count // 2]) / 2,
        least_ns=time[first],
        most_ns=time[first + count - 1],
        squares=np.array(np.add.reduceat(deviation, first) if len(first) else deviation, dtype=np.float64),
    )


def kernel_classes(names: Ints, strings: Sequence[str]) -> Codes:
    """The class of each kernel, as an index into `CLASSES`."""
    used, index = np.unique(names, return_inverse=True)
    codes = {kind: code for code, kind in enumerate(CLASSES)}
    kinds = np.array([codes[classify_kernel(strings[name])] for name in used.tolist()], dtype=np.int8)
    return kinds[index]


def kernel_times(names: Ints, phase: Codes, duration_ns: Ints, strings: Sequence[str]) -> tuple[KernelTimes, ...]:
    """Times of each kernel in the whole step, then in each phase; the longest total first."""
    in_step = _kernel_rows(grouped(names, duration_ns), strings, None)
    rows = list(in_step)
    for code, which in enumerate(PHASES):
        chosen = phase == code
        rows += _kernel_rows(grouped(names[chosen], duration_ns[chosen]), strings, which)
    return tuple(rows)


def _kernel_rows(groups: Grouped, strings: Sequence[str], phase: LaunchPhase | None) -> list[KernelTimes]:
    rows = []
    for index in np.argsort(-groups.total_ns, kind="stable").tolist():
        name, count = strings[groups.key[index]], int(groups.count[index])
        variance = float(groups.squares[index]) / (count - 1) if count > 1 else None
        row = KernelTimes(
            name=name[:MAX_NAME],
            short_name=short_name(name),
            kind=classify_kernel(name),
            phase=phase,
            count=count,
            total_s=int(groups.total_ns[index]) / 1e9,
            mean_s=int(groups.total_ns[index]) / count / 1e9,
            median_s=float(groups.median_ns[index]) / 1e9,
            min_s=int(groups.least_ns[index]) / 1e9,
            max_s=int(groups.most_ns[index]) / 1e9,
            stdev_s=None if variance is None else variance**0.5 / 1e9,
        )
        rows.append(row)
    return rows


def class_times(kind: Codes, phase: Codes, duration_ns: Ints) -> tuple[ClassTimes, ...]:
    """Times of each class in each phase where it occurs; by phase, the longest first."""
    shape = (len(PHASES), len(CLASSES))
    time, count = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    np.add.at(time, (phase, kind), duration_ns)
    np.add.at(count, (phase, kind), 1)
    return tuple(
        ClassTimes(kind=CLASSES[code], phase=which, count=int(count[row, code]), total_s=int(time[row, code]) / 1e9)
        for row, which in enumerate(PHASES)
        for code in np.argsort(-time[row], kind="stable").tolist()
        if count[row, code]
    )
