"""What a loop shows while it runs, from steps whose times are known."""

import io
import random
import statistics
import sys
from types import SimpleNamespace

import pytest

from cs336.config import Phase
from cs336.measure.clock import StepTimes
from cs336.watched import live
from cs336.watched.live import LATELY, LOG_EVERY, Live
from cs336.watched.marks import WatchedStep

PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def step_of(phases_s, between_s=0.0, between_data_s=0.0, tokens=100):
    times = StepTimes(
        step_s=sum(phases_s.values()), host_s=0.0, phases_s=phases_s, host_phases_s={}
    )
    return WatchedStep(
        times=times,
        between_s=between_s,
        between_data_s=between_data_s,
        tokens=SimpleNamespace(count=tokens),
    )


def make_live(every=None, is_first=True, mfu=None):
    return Live("mine", every, lambda _: mfu, lambda: is_first)


def drawn_steps(seed, count):
    generator = random.Random(seed)
    return [
        step_of(
            {phase: generator.uniform(0.001, 0.01) for phase in PHASES},
            between_s=0.02,
            between_data_s=generator.uniform(0, 0.02),
            tokens=generator.randint(1, 1000),
        )
        for _ in range(count)
    ]


def test_numbers_are_means_since_they_were_taken(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shown, steps = make_live(mfu=0.4), drawn_steps(0, 30)
    assert shown.take() == {}
    for part in (steps[:7], steps[7:]):
        for number, step in enumerate(part):
            shown.step_read(number, step)
        numbers = shown.take()
        step_ms = [1e3 * step.times.step_s for step in part]
        assert numbers["step_ms"] == pytest.approx(statistics.fmean(step_ms))
        waits_s = [step.times.phases_s[Phase.DATA] + step.between_data_s for step in part]
        assert numbers["data_ms"] == pytest.approx(1e3 * statistics.fmean(waits_s))
        loop_s = sum(step.times.step_s + 0.02 for step in part)
        tokens = sum(step.tokens.count for step in part)
        assert numbers["tokens_per_s"] == pytest.approx(tokens / loop_s)
        assert numbers["mfu"] == 0.4
        # the parts are the whole loop
        parts_ms = [numbers[f"{phase}_ms"] for phase in PHASES] + [numbers["between_steps_ms"]]
        assert sum(parts_ms) == pytest.approx(1e3 * loop_s / len(part))
        assert all(type(number) is float for number in numbers.values())
    assert shown.take() == {}


def test_warmup_steps_do_not_count(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown = make_live()
    shown.step_read(-1, step_of({Phase.FORWARD: 1.0}))
    assert shown.take() == {}
    assert sys.stderr.getvalue() == ""


def test_slow_steps_are_far_beyond_the_steps_before(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shown = make_live()
    for number in range(100):
        is_slow = number in (3, 50, 70)
        shown.step_read(number, step_of({Phase.FORWARD: 0.02 if is_slow else 0.01}))
    # before LATELY steps nothing is known to be usual
    assert LATELY > 3
    assert shown.take()["slow_steps"] == 2


def test_a_terminal_has_one_line_that_is_drawn_again(monkeypatch):
    stream, now = Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(live, "monotonic", lambda: now[0])
    monkeypatch.setattr(live, "_has_progress_bar", lambda: False)
    monkeypatch.setenv("TERM", "xterm")
    shown = make_live(mfu=0.412)
    for number in range(100):
        now[0] += 0.05
        shown.step_read(number, step_of({Phase.FORWARD: 0.01, Phase.BACKWARD: 0.03}))
    text = stream.getvalue()
    assert "\n" not in text
    drawings = text.split(live.ERASE)[1:]
    # 5 s of steps, drawn at most every 0.2 s
    assert 20 <= len(drawings) <= 26
    for word in ("40 ms", "2,500 tokens/s", "41.2 %", "backward 75 %"):
        assert word in drawings[-1]
    shown.finish()
    assert stream.getvalue().endswith(live.ERASE)


def test_a_progress_bar_keeps_its_line(monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    shown = make_live()
    with tqdm.tqdm(total=3, file=io.StringIO()):
        shown.step_read(0, step_of({Phase.FORWARD: 0.01}))
    assert stream.getvalue() == ""
    shown.step_read(1, step_of({Phase.FORWARD: 0.01}))
    assert "step 2" in stream.getvalue()


def run(shown, steps=2 * LOG_EVERY + 1):
    for number in range(steps):
        shown.step_read(number, step_of({Phase.FORWARD: 0.01}))


def test_a_file_has_a_line_every_so_many_steps(monkeypatch, tmp_path):
    for every, count in ((None, 2), (50, 4), (0, 0)):
        path = tmp_path / f"{every}.log"
        with path.open("w") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            run(make_live(every))
        lines = path.read_text().splitlines()
        assert len(lines) == count
        assert all("\x1b" not in line for line in lines)


def test_a_pipe_has_lines_only_where_they_are_asked_for(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run(make_live())
    run(make_live(50, is_first=False))
    assert stream.getvalue() == ""
    run(make_live(50))
    assert stream.getvalue().count("\n") == 4


def test_a_stream_that_is_closed_is_no_failure(monkeypatch, tmp_path):
    stream = (tmp_path / "log").open("w")
    monkeypatch.setattr(sys, "stderr", stream)
    stream.close()
    run(make_live(1))
    monkeypatch.setattr(sys, "stderr", None)
    run(make_live())


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="every"):
        make_live(-1)
