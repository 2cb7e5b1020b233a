"""Headlines of drawn results: never a number that leaves out rows, whatever ended how."""

import random
from collections import Counter

from cs336.record import Status, WarningCode
from cs336.report.configurations import step_results
from cs336.report.page.glance import of_memory, of_profiles, of_steps
from cs336.report.sections.memory.entry import MemoryEntry
from cs336.report.words import GIB, NamedRows, status_text
from tests.report.making import make_config, make_failure, make_record
from tests.report.reading import has_extremes
from tests.report.sections.kernels.test_findings import draw
from tests.report.sections.memory.profiles import make_memory

FAILURES = (Status.OOM, Status.CRASHED, Status.TIMEOUT)


def draw_runs(rng):
    """Runs of as many contexts that ended in some way: all well, none, or each by chance; some
    have no peak.
    """
    least, number = rng.choice((0.0, 0.5, 1.0)), rng.choice((0, 1, 1, 2, 3, 7))
    for config in (make_config("tiny", context_length=32 * (1 + index)) for index in range(number)):
        if rng.random() < least:
            peak_bytes = rng.choice((None, rng.randrange(2**30, 2**36)))
            codes = rng.sample([WarningCode.LAUNCH_BOUND], rng.randrange(2))
            yield make_record(
                config, (rng.uniform(1e-3, 2),) * 2, peak_bytes=peak_bytes, codes=codes
            )
        else:
            yield make_failure(config, rng.choice(FAILURES))


def check(text: str, measured: list[float | None], ends: Counter) -> None:
    """The text has both extremes of the values, says how many rows have one, and how many ended
    how.
    """
    values = [value for value in measured if value is not None]
    assert not values or has_extremes(text, values), text
    whole = len(measured)
    for status, count in ends.items():
        assert (status_text(status) + (f" in {count} of {whole}" if whole > 1 else "")) in text
    part = f"{whole}" if len(values) == whole else f"{len(values)} of {whole}"
    assert (f" in {part} configurations" in text) is (bool(values) and whole > 1), text


def test_a_headline_of_runs_leaves_none_out() -> None:
    rng = random.Random(11)
    for runs in (list(draw_runs(rng)) for _ in range(60)):
        rows = (step_results(runs)) if runs else []
        ends = Counter(run.status for run in runs if run.status is not Status.OK)
        entries = [MemoryEntry(profile=make_memory(), subject=run.config) for run in runs[2:4]]
        steps, more = of_steps(rows)
        check(
            steps,
            [1e3 * run.measurements[-1].mean_s if run.measurements else None for run in runs],
            ends,
        )
        peaks = [run.memory.peak_allocated_bytes / GIB if run.memory else None for run in runs]
        check(of_memory(entries, rows)[0], peaks, ends)
        late = sum(bool(run.warnings) for run in runs)
        assert (f"in {late} of {len(runs)}" in more) is (late > 0 and len(runs) > 1)


def test_a_headline_of_profiles_counts_each_limit() -> None:
    """Groups that disagree, of which none is called all."""
    rng = random.Random(12)
    for drawn in ([draw(rng) for _ in range(rng.randrange(2, 9))] for _ in range(30)):
        configs = [
            make_config("tiny", context_length=32 * (1 + index)) for index in range(len(drawn))
        ]
        entries = [own.entry(config) for own, config in zip(drawn, configs, strict=True)]
        failed = make_failure(make_config("tiny", context_length=8))
        text, more = of_profiles(
            entries, (step_results([*(entry.plain for entry in entries), failed]))
        )
        for limit, count in Counter(own.limit for own in drawn).items():
            assert f"{limit} in {count} of {len(drawn)}" in text
        assert f"out of memory in 1 of {len(drawn) + 1}" in text
        busy = more.partition(" of the step")[0]
        assert has_extremes(busy, [100 * own.busy / own.whole() for own in drawn]), busy


def test_an_extreme_is_marked_exactly_where_its_row_is_in_doubt() -> None:
    rng = random.Random(5)
    for _ in range(60):
        values = rng.sample(range(1, 100), rng.randint(2, 6))
        rows = [{"value": value, "is_odd": rng.random() < 0.5} for value in values]
        told = NamedRows(rows, [f"row{value}" for value in values])
        least, most = told.range("value", "{:g}".format, doubt="is_odd").split(" to ")
        for text, value in ((least, min(values)), (most, max(values))):
            is_odd = next(row["is_odd"] for row in rows if row["value"] == value)
            assert text == f"{value}{' ?' if is_odd else ''} (row{value})"
