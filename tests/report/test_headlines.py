"""Headlines of drawn results: never a number that leaves out rows, whatever ended how."""

import random
import re
from collections import Counter

import pytest

from cs336_systems.record import Status, WarningCode
from cs336_systems.report.frame import rows_of, to_frame
from cs336_systems.report.headlines import Headline, of_memory, of_profiles, of_steps
from cs336_systems.report.sections.memory.findings import MemoryEntry
from cs336_systems.report.words import GIB
from tests.report.making import make_config, make_failure, make_record
from tests.report.sections.kernels.test_findings import draw
from tests.report.sections.memory.profiles import make_memory

FAILURES = (Status.OOM, Status.CRASHED, Status.TIMEOUT)


def draw_runs(rng):
    """Runs of as many contexts that ended in some way: all well, none, or each by chance; some have no peak."""
    least, number = rng.choice((0.0, 0.5, 1.0)), rng.choice((0, 1, 1, 2, 3, 7))
    for config in (make_config("tiny", context_length=32 * (1 + index)) for index in range(number)):
        if rng.random() < least:
            peak_bytes = rng.choice((None, rng.randrange(2**20, 2**36)))
            codes = rng.sample([WarningCode.LAUNCH_BOUND], rng.randrange(2))
            yield make_record(config, (rng.uniform(1e-3, 2),) * 2, peak_bytes=peak_bytes, codes=codes)
        else:
            yield make_failure(config, rng.choice(FAILURES))


def check_counts(told: Headline, key: str, wanted: Counter) -> None:
    assert {claim.of: claim.value for claim in told.claims if claim.key == key} == wanted


def check_range(told: Headline, key: str, wanted: list[float], number: int) -> None:
    """The claims are the extremes of all values, and all rows are spoken of only if all have one."""
    found = [claim.value for claim in told.claims if claim.key == key]
    assert found == pytest.approx([min(wanted), max(wanted)] if wanted else [])
    if said := re.search(r" in (?:(\d+) of )?(\d+) configuration", told.text):
        assert (int(said[1] or said[2]), int(said[2])) == (len(wanted), number), told.text
    else:
        assert number <= 1 or not wanted, told.text


def test_a_headline_of_runs_leaves_none_out() -> None:
    rng = random.Random(11)
    for runs in (list(draw_runs(rng)) for _ in range(60)):
        rows = rows_of(to_frame(runs)) if runs else []
        ok = [run for run in runs if run.status is Status.OK]
        ends = Counter(run.status for run in runs if run.status is not Status.OK)
        entries = [MemoryEntry(profile=make_memory(), config=run.config) for run in runs[:2]]
        steps, memory = of_steps(rows), of_memory(entries, rows)
        check_counts(steps, "status", ends)
        check_counts(memory, "status", ends)
        check_range(steps, "step_mean_ms", [1e3 * run.measurements[-1].mean_s for run in ok], len(runs))
        peaks = [run.memory.peak_allocated_bytes / GIB for run in ok if run.memory is not None]
        check_range(memory, "peak_allocated_gib", peaks, len(runs))
        late = sum(bool(run.warnings) for run in ok)
        check_counts(steps, "warnings", Counter({WarningCode.LAUNCH_BOUND: late} if late else {}))


def test_a_headline_of_profiles_counts_each_limit() -> None:
    """Groups that disagree, of which none is called all."""
    rng = random.Random(12)
    for drawn in ([draw(rng) for _ in range(rng.randrange(2, 9))] for _ in range(30)):
        configs = [make_config("tiny", context_length=32 * (1 + index)) for index in range(len(drawn))]
        entries = [own.entry(config) for own, config in zip(drawn, configs, strict=True)]
        failed = make_failure(make_config("tiny", context_length=8))
        told = of_profiles(entries, rows_of(to_frame([*(entry.plain for entry in entries), failed])))
        check_counts(told, "limit", Counter(own.limit for own in drawn))
        check_counts(told, "status", Counter({Status.OOM: 1}))
        busy = [own.busy / own.whole() for own in drawn]
        found = [claim.value for claim in told.claims if claim.key == "busy_share"]
        assert found == pytest.approx([min(busy), max(busy)])
        assert "out of memory" in told.text
