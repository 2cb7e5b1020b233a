"""The verdict on two configurations, as a table that shows what it rests on."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cs336_systems.analysis.compare import Comparison
from cs336_systems.analysis.statistics import FEWEST, mean_interval
from cs336_systems.analysis.warnings import STEPS, in_doubt
from cs336_systems.report.columns import Column, column
from cs336_systems.report.numbers import interval_text, mean_and_std
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.table import Table, make_table

Side = tuple[str, str, Sequence[float]]
"""A or B, its flags or its path, and the mean steps of its processes (seconds)."""


def comparison_table(
    names: Sequence[str],
    means_s: Sequence[Sequence[float]],
    comparison: Comparison,
    codes: Sequence[Sequence[Sequence[str]]] = ((), ()),
) -> Table:
    """One row per side: `names` are the flags or paths, `means_s` the mean step times of the processes, in seconds.

    `codes` are the warnings of each process.
    """
    rows: list[Side] = list(zip("AB", names, means_s, strict=True))
    columns: list[Column[Side]] = [
        Column("side", numeric=False, text=lambda row: row[0]),
        Column("configuration", numeric=False, text=lambda row: row[1]),
        Column("processes", drop_order=2, text=lambda row: str(len(row[2]))),
        Column("step", "ms", text=lambda row: _step(row[2])),
        column("step_ci95_low_ms", text=lambda row: _interval(row[2])),
        Column("step of each process", "ms", numeric=False, drop_order=3, text=lambda row: _each(row[2])),
    ]
    known = [column for column in columns if any(column.cell(row) for row in rows)]
    spread = " ± standard deviation" if max(map(len, means_s)) >= FEWEST else ""
    how = f"Mean{spread} over fresh processes, run alternately."
    return make_table("A against B", known, rows, (how, comparison.sentence, *_doubts(codes)))


def _doubts(codes: Sequence[Sequence[Sequence[str]]]) -> Iterator[str]:
    """How many processes of a side carry each warning that puts their times, and so the verdict, in doubt."""
    found = []
    for side, processes in zip("AB", codes, strict=True):
        counts = Counter(code for process in processes for code in process if in_doubt([code]))
        found += [f"{code} in {count} of {len(processes)} processes of {side}" for code, count in counts.items()]
    if found:
        yield f"In doubt: {', '.join(found)}. Close other programs, or use {STEPS.more}."


def write_comparison(table: Table, directory: Path) -> None:
    """Write comparison.md, .tex and .typ."""
    texts = texts_of(Section(name="comparison", tables=(table,)))
    write_files({name: text for name, text in texts.items() if text}, directory)


def _step(means_s: Sequence[float]) -> str:
    """The mean, and the standard deviation of three or more; two stand beside it one by one."""
    deviation_s = statistics.stdev(means_s) if len(means_s) >= FEWEST else None
    return mean_and_std(statistics.fmean(means_s) * 1e3, None if deviation_s is None else deviation_s * 1e3)


def _interval(means_s: Sequence[float]) -> str:
    return interval_text(*(mean_interval([mean * 1e3 for mean in means_s]) or (None, None)))


def _each(means_s: Sequence[float]) -> str:
    return ", ".join(f"{mean * 1e3:.3f}" for mean in means_s)
