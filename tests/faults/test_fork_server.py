"""A fork server that does not answer, as after SIGSTOP, holds up no sweep: its workers end when their time is up."""

import multiprocessing.forkserver

import psutil
import pytest

from cs336_systems.record import Status, WarningCode
from cs336_systems.sweep import isolation
from tests.faults.harness import config, path_of, sweep, time_is_up
from tests.faults.models import HANGING


@pytest.fixture
def impatient(preloaded, monkeypatch):
    """A fork server that has started must answer soon; what it costs if it is too slow is another one."""
    monkeypatch.setattr(isolation, "_ANSWER_S", 2.0)


def test_a_worker_that_stops_the_fork_server_and_hangs(place, impatient):
    faulty, after = config("stops_the_fork_server_and_hangs"), config()
    with time_is_up(lambda worker: worker.config == faulty and HANGING.exists()):
        records = {record.config: record for record in sweep(place, faulty, after).measured}
    assert records[faulty].status is Status.TIMEOUT
    assert records[after].status is Status.OK


def test_a_worker_that_stops_the_fork_server_and_ends_well(place, impatient):
    faulty = config("stops_the_fork_server")
    with time_is_up(lambda _: path_of(faulty, place).exists()):
        (record,) = sweep(place, faulty).measured
    assert record.status is Status.OK
    assert WarningCode.TEARDOWN_FAILED in {warning.code for warning in record.warnings}


def test_a_fork_server_that_is_stopped_between_two_runs_is_replaced(place, impatient):
    sweep(place, config())
    psutil.Process(multiprocessing.forkserver._forkserver._forkserver_pid).suspend()
    (record,) = sweep(place, config(seed=1)).measured
    assert record.status is Status.OK
