"""A wall clock that goes backwards changes no duration and no timeout."""

import math
import shutil
import subprocess
import time

import pytest

from cs336_systems.config import Phase
from cs336_systems.record import Status, load_records
from tests.faults.harness import command, config, runs, sweep

BACKWARDS = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static long looks;
int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec = 1600000000 - 60 * __sync_fetch_and_add(&looks, 1);
    return status;
}
"""


def assert_sane(record, wall_s):
    step = record.measurement(Phase.STEP)
    assert all(0 < time_s < wall_s for time_s in step.times_s)
    durations = record.durations
    parts = (durations.setup_s, durations.warmup_s, durations.measured_s)
    assert all(0 < part_s < wall_s for part_s in parts)
    assert math.fsum(parts) <= durations.total_s < wall_s


def test_a_model_whose_clock_goes_backwards(place):
    started = time.monotonic()
    outcome = sweep(place, config("clock_set_back"))
    assert [record.status for record in outcome.records] == [Status.OK]
    assert_sane(outcome.records[0], time.monotonic() - started)
    assert 0 < outcome.overhead_s < time.monotonic() - started


def test_a_system_whose_clock_goes_backwards(launch, place):
    """For all processes of the sweep: a library before libc turns the clock back by a minute at every look."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = place / "backwards.c", place / "backwards.so"
    source.write_text(BACKWARDS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    started = time.monotonic()
    preload = {"LD_PRELOAD": str(library)}
    environment = ["env", *(f"{name}={value}" for name, value in preload.items())]
    good = launch([*environment, *command("hangs_where_context_is_8", contexts=(4,))])
    assert good.wait() == 0, good.stderr
    words = [*command("hangs_where_context_is_8", contexts=(4, 8)), "--timeout-s", "1"]
    slow = launch([*environment, *words])
    assert slow.wait() == 1, slow.stderr
    wall_s = time.monotonic() - started
    records, _ = load_records(runs(place))
    by_context = {record.config.model.context_length: record for record in records}
    assert by_context[4].started_at.startswith("2020-09")
    assert_sane(by_context[4], wall_s)
    assert by_context[8].status is Status.TIMEOUT
