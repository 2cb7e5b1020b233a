"""What a watched loop shows while it runs: a line on a terminal, lines in a log, and numbers for a
tracker of experiments.
"""

import contextlib
import os
import shutil
import stat
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TextIO

from ..config import Phase
from ..text import inert_line
from .marks import WatchedStep
from .observer import Observer

LOG_EVERY = 100
"""Steps from one line of a log to the next."""
REDRAWN_S = 0.2
"""Least time between two drawings of a terminal's line."""
SLOW, LATELY = 1.5, 31
"""A step that takes so many times the median of so many steps before it is slow; fewer steps are
too few to tell.
"""
MOST_SUMMED = 10_000
"""Most steps that are summed up at once: the last ones."""
BETWEEN = "between steps"
ERASE = "\r\x1b[2K"


@dataclass(slots=True)
class Sums:
    """Sums over some steps, in seconds: of the loop, so with what lies before each step."""

    steps: int = 0
    step_s: float = 0.0
    loop_s: float = 0.0
    tokens: int = 0
    parts_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The loop's time by phase, and what lies between steps without what waited for data there."""

    def add(self, step: WatchedStep) -> None:
        """Count a step."""
        between_s = step.between_s or 0.0
        self.steps += 1
        self.step_s += step.times.step_s
        self.loop_s += step.times.step_s + between_s
        self.tokens += step.tokens.count or 0
        for phase, seconds in step.times.phases_s.items():
            self.parts_s[phase] += seconds
        self.parts_s[Phase.DATA] += step.between_data_s
        self.parts_s[BETWEEN] += between_s - step.between_data_s

    def numbers(self) -> dict[str, float]:
        """Means by name: milliseconds of a step and of its parts, and tokens per second; those that
        were not seen are left out.
        """
        if not self.steps:
            return {}
        means = {"step_ms": 1e3 * self.step_s / self.steps}
        for part, seconds in self.parts_s.items():
            if seconds:
                means[f"{part.replace(' ', '_')}_ms"] = 1e3 * seconds / self.steps
        if self.tokens and self.loop_s:
            means["tokens_per_s"] = self.tokens / self.loop_s
        return means

    def longest(self) -> str:
        """The longest part of the loop, and its share; empty where no part was seen."""
        part, seconds = max(self.parts_s.items(), key=lambda entry: entry[1], default=("", 0.0))
        return f"{part} {100 * seconds / self.loop_s:.0f} %" if seconds and self.loop_s else ""


class Live(Observer):
    """Shows the steps of a loop on standard error, and sums them up for `metrics`.

    On a terminal it is a line that is drawn again; in a file, a line every LOG_EVERY steps; nothing
    in a pipe or a notebook, and beside a progress bar of tqdm's, whose line it is. With `every`
    there is a line every so many steps, wherever standard error goes, and with 0 none. `mfu` gives
    the share of the peak at a number of tokens per second, `is_first` whether this rank shows it.
    """

    def __init__(
        self,
        name: str,
        every: int | None,
        mfu: Callable[[Sums], float | None],
        is_first: Callable[[], bool],
    ) -> None:
        if every is not None and every < 0:
            raise ValueError(f"watch: every must be at least 0 (no lines), got {every}")
        self._name, self._every, self._mfu, self._is_first = name, every, mfu, is_first
        self._lately: deque[float] = deque(maxlen=LATELY)
        self._shown: deque[WatchedStep] = deque(maxlen=MOST_SUMMED)
        self._taken: deque[WatchedStep] = deque(maxlen=MOST_SUMMED)
        """Measured steps since the last line, and since the last `take`; they are summed up there,
        because a step is to cost little.
        """
        self._steps = self._slow_steps = self._slow_taken = 0
        """All measured steps, and of these slow ones, in all and before the last `take`."""
        self._drawn_s = -REDRAWN_S
        self._is_drawn = False

    def take(self) -> dict[str, float]:
        """The numbers of the measured steps that were read since the last call; empty if none."""
        sums = _summed(self._taken)
        numbers = sums.numbers()
        if numbers:
            numbers["slow_steps"] = self._slow_steps - self._slow_taken
            self._slow_taken = self._slow_steps
            mfu = self._mfu(sums)
            if mfu is not None:
                numbers["mfu"] = mfu
        return {name: float(value) for name, value in numbers.items()}

    def step_read(self, number: int, step: WatchedStep) -> None:
        """Count a measured step, and show it if it is time."""
        if number < 0:
            return
        interval_s = step.times.step_s + (step.between_s or 0.0)
        is_slow = len(self._lately) == LATELY and interval_s > SLOW * statistics.median(
            self._lately
        )
        self._lately.append(interval_s)
        self._steps += 1
        self._slow_steps += is_slow
        self._shown.append(step)
        self._taken.append(step)
        # a stream that is closed or full is no reason to end a training loop
        with contextlib.suppress(OSError, ValueError):
            self._show()

    def step_failed(self, *_: object) -> None:
        """Erase the line, before the exception is printed."""
        self.finish()

    def finish(self) -> None:
        """Erase the line of a terminal."""
        if self._is_drawn:
            self._is_drawn = False
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(ERASE)
                sys.stderr.flush()

    def line(self) -> str:
        """The steps since the last line in a few words."""
        sums = _summed(self._shown)
        numbers = sums.numbers()
        words = [f"{self._name}: step {self._steps:,}", f"{numbers['step_ms']:.4g} ms"]
        if "tokens_per_s" in numbers:
            words.append(f"{numbers['tokens_per_s']:,.0f} tokens/s")
        mfu = self._mfu(sums)
        if mfu is not None:
            words.append(f"MFU {100 * mfu:.3g} %")
        words.append(sums.longest())
        if self._slow_steps:
            words.append(f"{self._slow_steps:,} slow")
        return "  ".join(filter(None, words))

    def _show(self) -> None:
        stream = sys.stderr
        if stream is None:  # a program without a console
            return
        if self._every is None and _is_terminal(stream):
            now_s = monotonic()
            if now_s - self._drawn_s < REDRAWN_S or _has_progress_bar() or not self._is_first():
                return
            self._drawn_s, self._is_drawn = now_s, True
            width = shutil.get_terminal_size().columns - 1
            stream.write(f"{ERASE}{inert_line(self.line())[:width]} ")
        else:
            every = _lines_in(stream) if self._every is None else self._every
            if not every or self._steps % every or not self._is_first():
                return
            stream.write(f"{inert_line(self.line())}\n")
        stream.flush()


def _summed(steps: deque[WatchedStep]) -> Sums:
    """The sums over the steps, which are forgotten."""
    sums = Sums()
    while steps:
        sums.add(steps.popleft())
    return sums


def _is_terminal(stream: TextIO) -> bool:
    """Whether a line can be drawn again there."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _lines_in(stream: TextIO) -> int:
    """Steps between two lines: LOG_EVERY in a file, 0 for none elsewhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a notebook has no descriptor
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return LOG_EVERY
    return 0


def _has_progress_bar() -> bool:
    """Whether a progress bar of tqdm's is open, which draws its own line."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return bool(getattr(tqdm, "_instances", ()))
