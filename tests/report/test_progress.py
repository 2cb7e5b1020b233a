"""A sweep's progress where standard error is no terminal."""

import pytest

from cs336_systems.report.progress import TerminalListener
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
