"""The verdict on two configurations, as a table that shows what it rests on."""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cs336_systems.analysis.compare import Comparison, compare, process_means
from cs336_systems.analysis.statistics import FEWEST, mean_interval
from cs336_systems.analysis.warnings import STEPS, in_doubt
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.columns import Row, column
from cs336_systems.report.section import Section
from cs336_systems.report.sections.ratio_charts import processes_chart
from cs336_systems.report.table import Table, known, make_table
from cs336_systems.report.words import STATUS_WORDS
from cs336_systems.sweep.store import SweepError

COLUMNS = ("side", "configuration", "processes", "step_mean_ms", "step_ci95_low_ms", "process_means")


def pair_section(
    names: Sequence[str], sides: Sequence[Sequence[RunRecord]]
) -> tuple[Section, Row, Mapping[str, Any], Sequence[str]]:
    """The verdict on two configurations by the processes that ended well: as table, values, JSON and sentences.

    Raises SweepError for a side of which none ended well, and ValueError for too few processes.
    """
    means = [process_means(side) for side in sides]
    for name, records, own in zip("AB", sides, means, strict=True):
        if records and not own:
            ended = STATUS_WORDS[records[0].status]
            raise SweepError(f"{name} cannot be compared: {ended} in {len(records)} of {len(records)} processes")
    comparison = compare(*means)
    codes = [[[w.code for w in record.warnings] for record in side if record.status is Status.OK] for side in sides]
    listed = [
        {"side": side, "configuration": name, "process_means_s": own, "process_warnings": warned}
        for side, name, own, warned in zip("AB", names, means, codes, strict=True)
    ]
    row = {
        "verdict": str(comparison.verdict), "ratio": comparison.ratio,
        "ratio_low": comparison.low, "ratio_high": comparison.high,
        "ratio_is_doubted": in_doubt(itertools.chain.from_iterable(itertools.chain(*codes))),
    }  # fmt: skip
    table = comparison_table(names, means, comparison, codes)
    section = Section(name="comparison", tables=(table,), pictures=(processes_chart(names, means),))
    json = {"sides": listed, "verdict": comparison.verdict, "comparison": comparison}
    return section, row, json, [comparison.sentence, *_doubts(codes)]


def comparison_table(
    names: Sequence[str],
    means_s: Sequence[Sequence[float]],
    comparison: Comparison,
    codes: Sequence[Sequence[Sequence[str]]] = ((), ()),
) -> Table:
    """One row per side: `names` are the flags or paths, `means_s` the mean step times of the processes, in seconds.

    `codes` are the warnings of each process.
    """
    sides = zip("AB", names, means_s, strict=True)
    rows = [{"side": side, "configuration": name, **_times([mean * 1e3 for mean in own])} for side, name, own in sides]
    spread = " ± standard deviation" if max(map(len, means_s)) >= FEWEST else ""
    notes = f"Mean{spread} over fresh processes, run alternately.", comparison.sentence, *_doubts(codes)
    return make_table("A against B", known([column(key) for key in COLUMNS], rows), rows, notes)


def _times(means_ms: Sequence[float]) -> dict[str, object]:
    """The mean of the processes, and the standard deviation and interval of three or more."""
    low_ms, high_ms = mean_interval(means_ms) or (None, None)
    return {
        "processes": len(means_ms),
        "step_mean_ms": statistics.fmean(means_ms),
        "step_std_ms": statistics.stdev(means_ms) if len(means_ms) >= FEWEST else None,
        "step_ci95_low_ms": low_ms,
        "step_ci95_high_ms": high_ms,
        "process_means": ", ".join(f"{mean_ms:.3f}" for mean_ms in means_ms),
    }


def _doubts(codes: Sequence[Sequence[Sequence[str]]]) -> Iterator[str]:
    """How many processes of a side carry each warning that puts their times, and so the verdict, in doubt."""
    found = []
    for side, processes in zip("AB", codes, strict=True):
        counts = Counter(code for process in processes for code in process if in_doubt([code]))
        found += [f"{code} in {count} of {len(processes)} processes of {side}" for code, count in counts.items()]
    if found:
        yield f"In doubt: {', '.join(found)}. Close other programs, or use {STEPS.more}."
