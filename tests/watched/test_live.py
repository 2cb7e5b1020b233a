"""What a loop shows while it runs, from steps whose times are known."""

import io
import random
import statistics
import sys
from collections import deque
from types import SimpleNamespace

import pytest

from cs336.config import Phase
from cs336.measure.clock import StepTimes
from cs336.watched import live
from cs336.watched.live import LOG_EVERY, Live
from cs336.watched.marks import WatchedStep
from cs336.watched.slow_steps import FEWEST, slow_positions

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


class Shown:
    """A live line and the steps that it shows."""

    def __init__(self, every=None, is_first=True, mfu=None):
        self.steps = deque(maxlen=10_000)
        self.live = Live(
            "mine", self.steps, every, lambda _: mfu, SimpleNamespace(is_first=is_first)
        )
        self.take, self.finish = self.live.take, self.live.finish

    def read(self, number, *steps):
        self.steps += steps[max(0, -number) :]
        self.live.steps_read(number, steps)


make_live = Shown


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
            shown.read(number, step)
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
    shown.read(-1, step_of({Phase.FORWARD: 1.0}))
    assert shown.take() == {}
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_slow_steps_are_those_of_the_report(monkeypatch, batch):
    """The report judges all steps at once, of which there are enough to know what is usual."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shown, generator = make_live(), random.Random(batch)
    steps = []
    for number in range(2 * 64 * FEWEST):
        seconds = 0.02 if number in (3, 50, 70) else generator.uniform(0.0098, 0.0102)
        steps.append(step_of({Phase.FORWARD: seconds}))
    counted = 0.0
    for number in range(0, len(steps), batch):
        shown.read(number, *steps[number : number + batch])
        counted += shown.take()["slow_steps"]
    assert counted == len(slow_positions(steps)) == 3


def test_steps_that_are_read_together_are_shown_as_one_by_one(monkeypatch, tmp_path):
    monkeypatch.setattr(live, "_is_terminal", lambda _: False)
    texts = []
    for batch in (1, 23):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        shown, steps = make_live(10), drawn_steps(3, 95)
        for number in range(0, len(steps), batch):
            shown.read(number, *steps[number : number + batch])
        texts.append([line.partition(" slow")[0] for line in stream.getvalue().splitlines()])
    steps_of = [[line.split("  ")[:4] for line in text] for text in texts]
    assert steps_of[0] == steps_of[1]
    assert len(texts[0]) == 9


def test_a_terminal_has_one_line_that_is_drawn_again(monkeypatch):
    stream, now = Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(live, "monotonic", lambda: now[0])
    monkeypatch.setattr(live, "_has_progress_bar", lambda: False)
    monkeypatch.setenv("TERM", "xterm")
    shown = make_live(mfu=0.412)
    for number in range(100):
        now[0] += 0.05
        shown.read(number, step_of({Phase.FORWARD: 0.01, Phase.BACKWARD: 0.03}))
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
        shown.read(0, step_of({Phase.FORWARD: 0.01}))
    assert stream.getvalue() == ""
    shown.read(1, step_of({Phase.FORWARD: 0.01}))
    assert "step 2" in stream.getvalue()


def run(shown, steps=2 * LOG_EVERY + 1):
    for number in range(steps):
        shown.read(number, step_of({Phase.FORWARD: 0.01}))


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
