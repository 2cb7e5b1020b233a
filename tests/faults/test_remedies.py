"""What cannot be written is named, with what helps against its cause and nothing that does not."""

import errno
import os
import shutil

import pytest

from cs336_systems import cli
from cs336_systems.sweep.store import SweepError
from tests.faults.harness import ROOT, Witness, config, path_of, sweep

pytestmark = pytest.mark.usefixtures("no_pictures")

WORDS = {
    errno.ENOSPC: "space",
    errno.EDQUOT: "quota",
    errno.EROFS: "writable",
    errno.EACCES: "permission",
    errno.ENOENT: "moved or removed",
}


def assert_only_this_helps(text, code):
    text = text.replace(os.strerror(code), "").lower()
    found = [word for word in WORDS.values() if word in text]
    assert found == [WORDS[code]], text
    assert "same command again" in text
    assert "traceback" not in text


@pytest.fixture
def failing(monkeypatch):
    """From now on, whatever is written fails like this, at its end."""

    def fail(code):
        def fsync(_descriptor):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fsync)

    return fail


@pytest.mark.parametrize("code", WORDS, ids=errno.errorcode.get)
def test_a_table_that_cannot_be_written(tmp_path, capsys, failing, code):
    directory = tmp_path / "sweep"
    shutil.copytree(ROOT / "data/published/e2e_benchmark/inference/runs", directory / "runs")
    failing(code)
    assert cli.main(["report", str(directory)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]  # before it, what the command does
    assert str(directory / "results.") in said
    assert_only_this_helps(said, code)


@pytest.mark.parametrize("code", WORDS, ids=errno.errorcode.get)
def test_a_record_of_a_failure_that_cannot_be_written(place, failing, code):
    class Fail(Witness):
        def started(self, config, gpu):
            failing(code)

    with pytest.raises(SweepError) as refused:
        sweep(place, config("exits_well"), witness=Fail())
    assert str(path_of(config("exits_well"), place)) in str(refused.value)
    assert_only_this_helps(str(refused.value), code)


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_a_file_in_the_place_of_a_directory(tmp_path, capsys, output):
    (tmp_path / "file").touch()
    sweep = ROOT / "data/published/e2e_benchmark/inference"
    assert cli.main(["report", str(sweep), "--output", str(tmp_path / output)]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert str(tmp_path / "file") in said
    assert "move away the file" in said


def test_results_that_a_run_moves_away(place):
    with pytest.raises(SweepError) as refused:
        sweep(place, config("moves_the_results"))
    assert str(place / "runs") in str(refused.value)
    assert_only_this_helps(str(refused.value), errno.ENOENT)


def test_an_output_that_is_read_only_is_said_before_the_first_run(place, failing):
    failing(errno.EROFS)
    with pytest.raises(SweepError, match="writable or choose another --output"):
        sweep(place, config())
