"""The verdict on two configurations, as a table that shows what it rests on."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from cs336_systems.analysis.compare import Comparison
from cs336_systems.json_files import write_atomically
from cs336_systems.report.formats import WRITERS, Heading, Table, mean_and_std

HEADINGS = (
    Heading("side", numeric=False),
    Heading("configuration", numeric=False),
    Heading("processes"),
    Heading("step", "ms"),
    Heading("step of each process", "ms", numeric=False),
)


def comparison_table(names: Sequence[str], means_s: Sequence[Sequence[float]], comparison: Comparison) -> Table:
    """One row per side: `names` are the flags or paths, `means_s` the mean step times of the processes, in seconds."""
    rows = [
        (side, name, str(len(means)), _ms(means), ", ".join(f"{mean * 1e3:.3f}" for mean in means))
        for side, name, means in zip("AB", names, means_s, strict=True)
    ]
    notes = ("Mean ± standard deviation over the means of fresh processes, run alternately.", comparison.sentence)
    return Table(title="A against B", headings=HEADINGS, rows=tuple(rows), notes=notes)


def write_comparison(table: Table, directory: Path) -> None:
    """Write comparison.md, .tex and .typ."""
    for ending, write in WRITERS.items():
        write_atomically(directory / f"comparison.{ending}", write(table).encode(errors="replace"))


def _ms(means_s: Sequence[float]) -> str:
    return mean_and_std(statistics.fmean(means_s) * 1e3, statistics.stdev(means_s) * 1e3)
