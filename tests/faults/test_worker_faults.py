"""Whatever a worker dies of, its run is a row, the next run is none the worse, and nothing is left behind."""

import contextlib
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cs336_systems.record import Status, WarningCode, read_record
from cs336_systems.sweep import run as sweep_module
from cs336_systems.sweep.isolation import LOG_TAIL_BYTES
from tests.faults.harness import (
    Witness,
    config,
    contents,
    eventually,
    lay_out_models,
    memory_cgroup,
    path_of,
    processes_in,
    sweep,
    time_is_up,
)
from tests.faults.models import HANGING

SIGNALS = {
    "sigkill": (Status.KILLED, "SIGKILL"),
    "sigkill_from_outside": (Status.KILLED, "SIGKILL"),
    "sigterm_from_outside": (Status.CRASHED, "SIGTERM"),
    "segfault": (Status.CRASHED, "SIGSEGV"),
    "abort": (Status.CRASHED, "SIGABRT"),
    "nameless_signal": (Status.CRASHED, f"signal {signal.SIGRTMIN + 5}"),
}
LAST_WORDS = {"segfault": "the last words before a segmentation fault", "abort": "c10::Error"}
OUT_OF_MEMORY = {"asks_for_a_pebibyte": 2**50, "python_out_of_memory": None}
HANGS = ("hangs_printing", "hangs_with_closed_output", "ignores_signals", "stops_itself", "hangs_with_family")
EXITS = ("exits_well", "calls_exit", "exits_with_family")
WRONG_RECORDS = (
    "half_a_record", "empty_record", "record_of_another_run", "record_of_the_future", "record_that_is_a_directory",
)  # fmt: skip
TEARDOWNS = {"aborts_at_teardown": "SIGABRT", "fails_at_teardown": "status 3", "hangs_at_teardown": "did not end"}
OTHERS = ("raises", "good_with_family", "gigabyte_on_stderr")
FAULTS = (*SIGNALS, *OUT_OF_MEMORY, *HANGS, *EXITS, *WRONG_RECORDS, *TEARDOWNS, *OTHERS)


class WitnessOfFaults(Witness):
    """After each run, makes sure that it has left no process, and lets the next one hang."""

    def finished(self, record):
        place = Path.cwd()
        assert eventually(lambda: not processes_in(place)), (record.config, processes_in(place))
        HANGING.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def survived(tmp_path_factory, preloaded):
    """The records of one sweep in which every fault follows another, between good runs that may not notice."""
    directory = tmp_path_factory.mktemp("survived")
    good = config(seed=1)
    runs = [good, *map(config, FAULTS), config(seed=2)]

    def is_over(worker):
        fault = worker.config.model_factory.partition(":")[2]
        if fault in HANGS:
            return HANGING.exists()
        return fault == "hangs_at_teardown" and path_of(worker.config, directory).exists()

    with contextlib.chdir(directory), time_is_up(is_over):
        lay_out_models(directory)
        sweep(directory, good)
        earlier = contents(directory / "runs")
        witness = WitnessOfFaults()
        outcome = sweep(directory, *runs, witness=witness)
    assert witness.runs == runs[1:]
    assert contents(directory / "runs").items() >= earlier.items()
    assert not outcome.interrupted
    by_config = {record.config: record for record in outcome.records}
    assert [by_config[run].status for run in (runs[0], runs[-1])] == [Status.OK, Status.OK]
    return directory, by_config


@pytest.fixture
def record_of(survived):
    """The record of a fault, as the sweep returned it and as it is in the file."""
    directory, by_config = survived

    def find(fault):
        record = by_config[config(fault)]
        assert read_record(path_of(record.config, directory)) == record
        return record

    return find


def survive(place, fault, **options):
    """The record of a fault that needs a sweep of its own, after a good run and before another."""
    before, faulty, after = config(seed=1), config(fault), config(seed=2)
    outcome = sweep(place, before, faulty, after, **options)
    by_config = {record.config: record for record in outcome.records}
    assert [by_config[run].status for run in (before, after)] == [Status.OK, Status.OK]
    assert not outcome.interrupted
    return by_config[faulty]


@pytest.mark.parametrize("fault", SIGNALS)
def test_death_by_a_signal_names_it(record_of, fault):
    record = record_of(fault)
    assert (record.status, record.failure.signal) == SIGNALS[fault]
    assert record.failure.signal in record.failure.message
    assert LAST_WORDS.get(fault, "") in (record.failure.log_tail or "")


@pytest.fixture
def small_cgroup(place):
    with memory_cgroup(place) as group:
        if group is None:
            pytest.skip("memory cgroups cannot be made here")
        yield


def test_the_kernels_out_of_memory_killer(place, small_cgroup):
    record = survive(place, "host_out_of_memory")
    assert record.status is Status.KILLED
    assert "memory" in record.failure.message


def test_death_of_the_fork_server(place, monkeypatch):
    """The time allowed does not include the making of another: a worker's time begins when it has been started."""
    begun, workers = [], []
    start = BaseProcess.start

    def start_and_note(process):
        start(process)
        begun.append(time.monotonic())

    monkeypatch.setattr(BaseProcess, "start", start_and_note)
    with time_is_up(lambda worker: workers.append(worker)):
        record = survive(place, "kills_the_fork_server")
    assert record.status in (Status.CRASHED, Status.KILLED)
    assert all(began <= worker.started for began, worker in zip(begun, dict.fromkeys(workers), strict=True))


@pytest.mark.parametrize("fault", OUT_OF_MEMORY)
def test_out_of_memory_is_a_result(record_of, fault):
    record = record_of(fault)
    assert record.status is Status.OOM
    assert record.failure.requested_bytes == OUT_OF_MEMORY[fault]


def test_an_exception_keeps_its_message_and_its_traceback(record_of):
    record = record_of("raises")
    assert record.status is Status.CRASHED
    assert record.failure.message == r"RuntimeError: no such layer \x00"
    assert "in raises" in record.failure.traceback


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang_ends_at_the_timeout(record_of, fault):
    record = record_of(fault)
    assert record.status is Status.TIMEOUT
    assert "--timeout-s" in record.failure.message
    if fault == "hangs_printing":
        assert "still alive" in record.failure.log_tail


def test_the_time_allowed_is_that_of_the_clock(place):
    timeout_s = 1.0
    started = time.monotonic()
    (record,) = sweep(place, config("hangs_with_closed_output"), timeout_s=timeout_s).records
    assert record.status is Status.TIMEOUT
    assert time.monotonic() - started >= timeout_s


def test_descendants_that_outlive_a_good_run_are_ended(record_of):
    assert record_of("good_with_family").status is Status.OK


@pytest.mark.parametrize("fault", EXITS)
def test_an_exit_without_a_record_is_no_success(record_of, fault):
    record = record_of(fault)
    assert record.status is Status.CRASHED
    assert "status 0" in record.failure.message


@pytest.mark.parametrize("fault", WRONG_RECORDS)
def test_a_wrong_record_is_invalid_and_kept(survived, record_of, fault):
    record = record_of(fault)
    assert record.status is Status.INVALID
    runs = survived[0] / "runs"
    (kept,) = runs.glob(f"{record.key}*.invalid*")
    assert kept.name in record.failure.message
    if fault == "half_a_record":
        files = (path.read_bytes() for path in runs.glob("*.json"))
        assert kept.read_bytes() in {data[: len(data) // 2] for data in files}


@pytest.mark.parametrize("fault", TEARDOWNS)
def test_a_crash_after_the_record_is_a_warning(record_of, fault):
    record = record_of(fault)
    assert record.status is Status.OK
    assert len(record.measurements) > 0
    (warning,) = [warning for warning in record.warnings if warning.code is WarningCode.TEARDOWN_FAILED]
    assert TEARDOWNS[fault] in warning.message


def test_a_gigabyte_on_standard_error_is_bounded(survived, record_of):
    record = record_of("gigabyte_on_stderr")
    assert record.status is Status.CRASHED
    assert record.failure.log_tail.endswith("the end of the gigabyte")
    assert len(record.failure.log_tail) <= LOG_TAIL_BYTES
    assert path_of(record.config, survived[0]).stat().st_size < 2 * LOG_TAIL_BYTES


def test_a_worker_that_prints_does_not_make_the_terminal_busy(place):
    """The sweep tells its listener once a tick, however often the worker's output wakes it."""
    witness, times_told = Witness(), []

    def enough(worker):
        times_told.append(witness.ticks)
        return witness.ticks >= 3

    with time_is_up(enough):
        started = time.monotonic()
        sweep(place, config("hangs_printing"), witness=witness)
        elapsed_s = time.monotonic() - started
        tick_s = sweep_module._TICK_S
    assert 3 <= witness.ticks <= elapsed_s / tick_s
    assert len(times_told) > witness.ticks


def test_a_model_that_changes_directory(place):
    outcome = sweep(Path("relative"), config("changes_directory"))
    assert [record.status for record in outcome.records] == [Status.OK]


def test_workers_are_fresh_and_have_not_touched_cuda(place):
    configs = [config("notes_its_process", repeat=repeat) for repeat in range(3)]
    sweep(place, *configs)
    notes = [tuple(map(int, line.split())) for line in Path("notes").read_text().splitlines()]
    pids, sessions, fork_servers, initialized, threads = zip(*notes, strict=True)
    assert len(set(pids)) == len(configs)
    assert sessions == pids
    assert len(set(fork_servers)) == 1
    assert set(initialized) == {0}
    assert set(threads) == {1}


def test_what_failed_is_tried_again_and_what_has_a_result_is_not(place):
    ok, oom, failing = config(), config("asks_for_a_pebibyte"), config("fails_once")
    first = sweep(place, ok, oom, failing)
    assert [record.status for record in first.measured] == [Status.OK, Status.OOM, Status.CRASHED]
    results = {path_of(run, place).name for run in (ok, oom)}
    earlier = {name: file for name, file in contents(place / "runs").items() if name in results}
    witness = Witness()
    second = sweep(place, ok, oom, failing, witness=witness)
    assert [record.config for record in witness.kept] == sorted((ok, oom), key=lambda run: run.key)
    assert witness.runs == [failing]
    assert [record.status for record in second.measured] == [Status.OK]
    assert {name: file for name, file in contents(place / "runs").items() if name in results} == earlier
