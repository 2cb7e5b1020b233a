"""What cannot be written is named, with what helps against its cause and nothing that does not."""

import errno
import os
import shutil

import pytest

from cs336_systems import cli
from cs336_systems.files import error_in_words
from cs336_systems.sweep.store import SweepError
from tests.faults.harness import ROOT, config, sweep

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


@pytest.mark.parametrize("code", WORDS, ids=errno.errorcode.get)
def test_an_error_of_the_system_in_words(code):
    said = error_in_words(OSError(code, os.strerror(code), "the/file"))
    assert said.startswith("the/file: ")
    assert_only_this_helps(said, code)


def test_a_table_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    code, directory = errno.ENOSPC, tmp_path / "sweep"
    shutil.copytree(ROOT / "data/published/e2e_benchmark/inference/runs", directory / "runs")

    def fail(_descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    assert cli.main(["report", str(directory)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]  # before it, what the command does
    assert str(directory / "results.") in said
    assert_only_this_helps(said, code)


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
