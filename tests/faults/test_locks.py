"""One sweep at a time in a directory and on a GPU, whoever started it and however the last one
ended.
"""

import os
import signal
import subprocess
import sys
import uuid

import pytest

from cs336 import cli
from cs336.commands import benchmark
from cs336.record import Status
from cs336.sweep.store import LockedError, exclusive, gpu_lock_path
from tests.faults.harness import (
    ROOT,
    WITHOUT_REPORT,
    command,
    config,
    contents,
    results,
    runs,
    sweep,
)
from tests.faults.models import PAUSED
from tests.report.making import make_record

HOLD = """
import os, sys, time
from pathlib import Path
from cs336.sweep.store import LockedError, exclusive
if len(sys.argv) > 2:
    try:
        os.setgroups([])
        os.setuid(int(sys.argv[2]))
    except PermissionError:
        sys.exit("may not become another user")
try:
    with exclusive(Path(sys.argv[1]), "the GPU"):
        print("held", flush=True)
        sys.stdin.read()
except LockedError as error:
    print(error, flush=True)
"""


class Holder:
    """Another process, maybe of another user, that takes the lock and keeps it until told to let
    go.
    """

    def __init__(self, path, *user):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path), *map(str, user)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = self.process.stdout.readline().strip()
        if not self.said and "another user" in (failed := self.process.communicate()[1]):
            pytest.skip(failed)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.communicate()


def test_a_second_sweep_in_one_directory_names_the_first(launch, place, capsys):
    first = launch(command("pauses_once"))
    first.wait_for(PAUSED)
    earlier = contents(runs(place))
    assert cli.sweep(command("pauses_once")[2:]) == 1
    refused = capsys.readouterr().err
    assert f"is in use by process {first.process.pid} on " in refused
    assert WITHOUT_REPORT.name in refused
    assert first.process.poll() is None
    assert contents(runs(place)) == earlier
    first.process.send_signal(signal.SIGKILL)
    first.wait()
    outcome = sweep(results(place), config())  # the lock file is there still, its holder is not
    assert [record.status for record in outcome.measured] == [Status.OK]


def test_a_second_run_of_a_configuration_names_the_first(tmp_path, monkeypatch, capsys):
    words = ["--device", "cpu", "--output", str(tmp_path)]

    def measure(config, *_):
        monkeypatch.setattr(benchmark, "_measure", lambda config, *_: make_record(config, (2.0,)))
        assert cli.benchmark(words) == 1
        return make_record(config, (1.0,))

    monkeypatch.setattr(benchmark, "_measure", measure)
    assert cli.benchmark(words) == 0
    assert f"is in use by process {os.getpid()} on " in capsys.readouterr().err
    assert cli.benchmark(words) == 0


@pytest.fixture
def gpu_lock():
    path = gpu_lock_path(f"GPU-{uuid.uuid4()}")
    yield path
    path.unlink(missing_ok=True)


def test_a_gpu_lock_serves_all_users(gpu_lock):
    with Holder(gpu_lock, 65533), Holder(gpu_lock, 65534) as refused:
        assert "is in use by process" in refused.said
    with Holder(gpu_lock, 65534) as second:
        assert second.said == "held"
        assert str(second.process.pid) in gpu_lock.read_text()
        with (
            pytest.raises(LockedError, match=str(second.process.pid)),
            exclusive(gpu_lock, "the GPU"),
        ):
            pass
