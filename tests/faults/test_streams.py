"""Standard output and error are for whoever reads them: one that closes ends no sweep and loses
no result.
"""

import csv
import io
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from cs336 import cli
from cs336.record import Status
from tests.faults.harness import ROOT, command, eventually, results
from tests.faults.models import PAUSED

pytestmark = pytest.mark.usefixtures("no_pictures")

GOES_ON = "the same command goes on from here"


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def closed_terminal():
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


@pytest.fixture
def streams(place, monkeypatch):
    """Give this process standard streams of the test's own: of each name, a descriptor, or None
    for a file.
    """
    opened = []

    def put(**descriptors):
        for name, descriptor in descriptors.items():
            target = (
                os.open(place / name, os.O_WRONLY | os.O_CREAT)
                if descriptor is None
                else descriptor
            )
            stream = io.TextIOWrapper(io.FileIO(target, "w"), write_through=True)
            opened.append(stream)
            monkeypatch.setattr(sys, name, stream)
            monkeypatch.setattr(sys, f"__{name}__", stream)

    yield put
    for name in ("stdout", "stderr"):
        getattr(sys, name).flush()
    monkeypatch.undo()


@pytest.fixture
def terminated_when_paused(place):
    """This process gets SIGTERM when the sweep's run waits, and outside of a sweep takes no
    notice.
    """
    ended = threading.Event()

    def watch():
        if eventually(lambda: PAUSED.exists() or ended.is_set()) and not ended.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    watching = threading.Thread(target=watch)
    watching.start()
    yield
    ended.set()
    watching.join()
    signal.signal(signal.SIGTERM, handler)


def statuses(directory):
    with (results(directory) / "results.csv").open() as file:
        return [row["status"] for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("closed", "names"),
    [(closed_pipe, ["stdout"]), (closed_terminal, ["stderr"]), (closed_pipe, ["stdout", "stderr"])],
)
def test_a_sweep_that_nobody_reads_is_done_all_the_same(place, streams, closed, names):
    streams(**{name: closed() if name in names else None for name in ("stdout", "stderr")})
    assert cli.sweep(command(contexts=[4, 8])[2:]) == 0
    assert statuses(place) == [Status.OK, Status.OK]
    assert list((results(place) / "plots").iterdir())
    for name in {"stdout", "stderr"} - set(names):
        assert (place / name).read_text() != ""


@pytest.mark.parametrize(("gone", "left"), [("stdout", "stderr"), ("stderr", "stdout")])
def test_an_interrupted_sweep_says_what_to_do_where_it_can_be_read(
    place, streams, terminated_when_paused, gone, left
):
    streams(**{gone: closed_pipe(), left: None})
    assert cli.sweep(command("pauses_once")[2:]) == 130
    assert statuses(place) == [Status.OK]
    assert (place / left).read_text().count(GOES_ON) == 1


CLOSED_AT_THE_START = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-"}


@pytest.mark.parametrize("closed", [("stdout",), ("stdin", "stdout", "stderr")])
def test_streams_that_are_closed_from_the_start(place, closed):
    """What is opened instead takes their numbers, and what is printed must not end in a file."""
    check = (
        "import os, sys; from cs336.commands.outcome import guard_outputs; guard_outputs();"
        "print('a'); print('b', file=sys.stderr, flush=True); print(sys.stdout.isatty());"
        "print(os.open('first', os.O_CREAT | os.O_WRONLY), file=open('second', 'w'))"
    )
    script = f'"$@" {" ".join(CLOSED_AT_THE_START[name] for name in closed)}'
    words = ["sh", "-c", script, "sh", sys.executable, "-c", check]
    done = subprocess.run(
        words, cwd=place, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int((place / "second").read_text()) > 2
    assert (place / "first").read_text() == ""
