"""Counts, sums and statistics of kernels and of their classes, by phase."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cs336_systems.analysis.columns import Ints
from cs336_systems.analysis.kernels.classes import MAX_NAME, KernelClass, classify_kernel, short_name
from cs336_systems.analysis.kernels.frames import by_phase, totals
from cs336_systems.analysis.kernels.phases import PHASES, Codes, LaunchPhase
from cs336_systems.analysis.kernels.step_profile import ClassTimes, KernelTimes

CLASSES = tuple(KernelClass)


def kernel_classes(names: Ints, strings: Sequence[str]) -> Codes:
    """The class of each kernel, as an index into `CLASSES`."""
    used, index = np.unique(names, return_inverse=True)
    codes = {kind: code for code, kind in enumerate(CLASSES)}
    kinds = np.array([codes[classify_kernel(strings[name])] for name in used.tolist()], dtype=np.int8)
    return kinds[index]


def kernel_times(kernels: pd.DataFrame, strings: Sequence[str]) -> tuple[KernelTimes, ...]:
    """Times of each kernel in the whole step, then in each phase; the longest total first."""
    rows = list(_kernel_times(kernels, strings, None))
    for phase, in_phase in by_phase(kernels):
        rows += _kernel_times(in_phase, strings, phase)
    return tuple(rows)


def _kernel_times(kernels: pd.DataFrame, strings: Sequence[str], phase: LaunchPhase | None) -> Iterator[KernelTimes]:
    found = kernels.groupby("name")["duration_ns"].agg(["count", "sum", "median", "min", "max", "std"])
    rows: Iterable[Any] = found.sort_values("sum", ascending=False, kind="stable").itertuples(name=None)
    for index, count, total_ns, *times_ns, stdev_ns in rows:
        median_s, min_s, max_s = (time / 1e9 for time in times_ns)
        yield KernelTimes(
            name=strings[index][:MAX_NAME],
            short_name=short_name(strings[index]),
            kind=classify_kernel(strings[index]),
            phase=phase,
            count=count,
            total_s=total_ns / 1e9,
            mean_s=total_ns / count / 1e9,
            median_s=median_s,
            min_s=min_s,
            max_s=max_s,
            stdev_s=None if count == 1 else stdev_ns / 1e9,
        )


def class_times(kernels: pd.DataFrame) -> tuple[ClassTimes, ...]:
    """Times of each class in each phase where it occurs; by phase, the longest first."""
    return tuple(
        ClassTimes(kind=CLASSES[row.kind], phase=PHASES[row.phase], count=row.count, total_s=row.total_ns / 1e9)
        for row in sorted(totals(kernels, "phase", "kind"), key=lambda row: row.phase)
    )
