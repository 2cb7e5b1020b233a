"""Whatever a worker dies of, its run is a row, the next run is none the worse, and nothing is
left behind.
"""

import contextlib
import signal
from pathlib import Path

import pytest

from cs336.analysis.warnings import judged
from cs336.record import Status, read_record
from cs336.sweep import isolation
from tests.faults.harness import (
    Witness,
    config,
    contents,
    eventually,
    lay_out_models,
    path_of,
    processes_in,
    sweep,
    time_is_up,
)
from tests.faults.models import HANGING

SIGNALS = {
    "sigkill": (Status.KILLED, "SIGKILL"),
    "segfault": (Status.CRASHED, "SIGSEGV"),
    "nameless_signal": (Status.CRASHED, f"signal {signal.SIGRTMIN + 5}"),
}
HANGS = ("hangs_printing", "hangs_with_closed_output", "stops_itself", "hangs_with_family")
EXITS = ("exits_well", "exits_with_family")
WRONG_RECORDS = ("half_a_record", "record_of_the_future", "record_that_is_a_directory")
TEARDOWNS = ("fails_at_teardown", "hangs_at_teardown", "hangs_while_it_judges")
OTHERS = ("asks_for_a_pebibyte", "raises", "good_with_family")
FAULTS = (*SIGNALS, *HANGS, *EXITS, *WRONG_RECORDS, *TEARDOWNS, *OTHERS)


class WitnessOfFaults(Witness):
    """After each run, makes sure that it has left no process, and lets the next one hang."""

    def finished(self, record):
        place = Path.cwd()
        assert eventually(lambda: not processes_in(place)), (record.config, processes_in(place))
        HANGING.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def survived(tmp_path_factory, preloaded):
    """The records of one sweep in which every fault follows another, between good runs that may
    not notice.
    """
    directory = tmp_path_factory.mktemp("survived")
    good = config(seed=1)
    runs = [good, *map(config, FAULTS), config(seed=2)]

    def is_over(worker):
        fault = worker.subject.model_factory.partition(":")[2]
        if fault in HANGS:
            return HANGING.exists()
        return fault in TEARDOWNS[1:] and path_of(worker.subject, directory).exists()

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


@pytest.mark.parametrize("fault", SIGNALS)
def test_death_by_a_signal_names_it(record_of, fault):
    record = record_of(fault)
    assert (record.status, record.failure.signal) == SIGNALS[fault]
    assert record.failure.signal in record.failure.message
    if fault == "segfault":
        assert "the last words" in record.failure.log_tail


@pytest.mark.parametrize("fault", ["kills_the_fork_server", "stops_the_fork_server_and_hangs"])
def test_a_fork_server_that_dies_or_hangs_is_replaced(place, monkeypatch, fault):
    monkeypatch.setattr(isolation, "_ANSWER_S", 2.0)
    faulty, after = config(fault), config()
    with time_is_up(lambda worker: worker.subject == faulty and HANGING.exists()):
        records = {record.config: record for record in sweep(place, faulty, after).measured}
    assert records[faulty].status in (Status.CRASHED, Status.KILLED, Status.TIMEOUT)
    assert records[after].status is Status.OK


def test_out_of_memory_is_a_result(record_of):
    record = record_of("asks_for_a_pebibyte")
    assert record.status is Status.OOM
    assert record.failure.requested_bytes == 2**50


def test_an_exception_keeps_its_message_and_its_traceback(record_of):
    record = record_of("raises")
    assert record.status is Status.CRASHED
    assert record.failure.message == "RuntimeError: no such layer \0"
    assert "in raises" in record.failure.traceback


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang_ends_at_the_timeout(record_of, fault):
    record = record_of(fault)
    assert record.status is Status.TIMEOUT
    assert "--timeout-s" in record.failure.message
    if fault == "hangs_printing":
        assert "still alive" in record.failure.log_tail


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
def test_a_crash_after_the_record_does_not_change_it(record_of, fault):
    record = record_of(fault)
    assert record.status is Status.OK
    assert len(record.measurements) > 0
    assert record == judged(record)


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
    assert {
        name: file for name, file in contents(place / "runs").items() if name in results
    } == earlier
