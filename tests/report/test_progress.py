"""A sweep's progress where standard error is no terminal."""

import pytest

from cs336_systems.report.progress import TerminalListener
from cs336_systems.sweep.listener import Machines
from tests.report.making import make_config, make_failure, make_record


def test_a_pipe_gets_one_line_for_each_result_and_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    message = " ".join(["word"] * 100)
    done, failed = (
        make_record(make_config(), (0.1, 0.2)),
        make_failure(make_config(context_length=256), message=message),
    )
    with TerminalListener() as listener:
        listener.planned([done], [failed.config], [])
        listener.finished(failed)
    *_, result = lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, "kept records, the import, the result"
    assert result.endswith(message)


def test_waiting_for_machines_is_said_when_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalListener() as listener:
        listener.planned([], [make_config()], [])
        capsys.readouterr()
        for left_s in range(20, 15, -1):
            listener.machines(Machines(there=0, pending=2, running=0, patience_s=left_s))
        listener.machines(Machines(there=1, pending=1, running=1, patience_s=None))
        listener.machines(Machines(there=0, pending=1, running=0, patience_s=20))
    first, second = capsys.readouterr().err.splitlines()
    assert "2 pending" in first
    assert "1 pending" in second


def test_a_run_that_is_started_again_keeps_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    configs = [make_config(), make_config(context_length=256)]
    with TerminalListener() as listener:
        listener.planned([], configs, [])
        for config in [*configs, configs[0]]:
            listener.started(config, None)
    assert [line for line in capsys.readouterr().err.splitlines() if "3 of 2" in line] == []
