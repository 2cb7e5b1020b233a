"""A sweep's progress where standard error is no terminal."""

import pytest

from cs336_systems.costs.duration import NOTHING_EXPECTED, Expected
from cs336_systems.report import progress
from cs336_systems.report.progress import TerminalListener, TimeLeft
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


def test_a_run_that_is_started_again_keeps_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    configs = [make_config(), make_config(context_length=256)]
    with TerminalListener() as listener:
        listener.planned([], configs, [])
        for config in [*configs, configs[0]]:
            listener.started(config, None)
    assert [line for line in capsys.readouterr().err.splitlines() if "3 of 2" in line] == []


def test_the_time_left_is_what_is_expected_at_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that should take 10, 20 and 30 s, of which the first takes 15: the others should take 75 s."""
    now_s = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now_s[0])
    configs = [make_config(context_length=length) for length in (128, 256, 512)]
    left = TimeLeft(Expected(steps_s={}, runs_s=dict(zip(configs, (10.0, 20.0, 30.0), strict=True))))
    left.planned(configs)
    found = [left()]
    now_s[0] = 107.0  # PyTorch was imported
    left.started()
    found.append(left())
    now_s[0] = 117.0
    found.append(left())
    now_s[0] = 122.0
    left.finished(configs[0])
    found.append(left())
    now_s[0] = 132.0
    found.append(left())
    now_s[0] = 1000.0
    found.append(left())
    assert found == pytest.approx([60, 60, 50, 75, 65, 0])


def test_the_time_left_on_two_gpus_is_shared_before_there_is_a_pace() -> None:
    configs = [make_config(context_length=length) for length in (128, 256, 512)]
    left = TimeLeft(Expected(steps_s={}, runs_s=dict.fromkeys(configs, 10.0), num_gpus=2))
    left.planned(configs)
    assert left() == 20


def test_without_a_forecast_of_all_runs_the_time_left_is_not_known() -> None:
    left = TimeLeft(NOTHING_EXPECTED)
    left.planned([make_config()])
    left.started()
    assert left() is None
