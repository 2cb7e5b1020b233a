"""What a watched loop shows while it runs: a line on a terminal, lines in a log, and numbers for a
tracker of experiments.
"""

import contextlib
import os
import shutil
import stat
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import TextIO

from ..text import inert_line
from .marks import WatchedStep
from .observer import Observer
from .ranks import Ranks
from .slow_steps import FEWEST, Usual, is_slow, usual_of

LOG_EVERY = 100
"""Steps from one line of a log to the next."""
REDRAWN_S = 0.2
"""Least time between two drawings of a terminal's line."""
MORE_STEPS = 1.25
"""Factor of the steps that are known from which what is usual of them is computed again."""
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
        self.steps += 1
        self.step_s += step.times.step_s
        self.loop_s += step.interval_s
        self.tokens += step.tokens.count or 0
        for part, seconds in step.parts_s().items():
            self.parts_s[part] += seconds

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
    there is a line every so many steps, wherever standard error goes, and with 0 none. `steps` are
    the measured steps, the last ones of a long loop. `mfu` gives the share of the peak at a number
    of tokens per second; the first of the `ranks` shows it.
    """

    def __init__(
        self,
        name: str,
        steps: deque[WatchedStep],
        every: int | None,
        mfu: Callable[[Sums], float | None],
        ranks: Ranks,
    ) -> None:
        if every is not None and every < 0:
            raise ValueError(f"watch: every must be at least 0 (no lines), got {every}")
        self._name, self._measured = name, steps
        self._every, self._mfu, self._ranks = every, mfu, ranks
        self._steps = self._shown = self._taken = self._judged = 0
        """All measured steps, and of these those before the last line, before the last `take`, and
        those of which it is known whether they are slow.
        """
        self._slow_steps = self._slow_taken = 0
        """Slow steps in all, and before the last `take`."""
        self._usual: dict[bool, Usual] = {}
        self._usual_of = 0
        """What is usual of the first so many steps."""
        self._drawn_s = -REDRAWN_S
        self._is_drawn = False

    def take(self) -> dict[str, float]:
        """The numbers of the measured steps that were read since the last call; empty if none."""
        sums = self._sums(self._taken, self._steps)
        self._taken = self._steps
        numbers = sums.numbers()
        if numbers:
            self._judge()
            numbers["slow_steps"] = self._slow_steps - self._slow_taken
            self._slow_taken = self._slow_steps
            mfu = self._mfu(sums)
            if mfu is not None:
                numbers["mfu"] = mfu
        return {name: float(value) for name, value in numbers.items()}

    def steps_read(self, first: int, steps: Sequence[WatchedStep]) -> None:
        """Count the measured ones of these steps, and show them if it is time."""
        before = self._steps
        self._steps += len(steps) - min(max(0, -first), len(steps))
        # a stream that is closed or full is no reason to end a training loop
        if self._steps > before:
            with contextlib.suppress(OSError, ValueError):
                self._show(before)

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

    def line(self, to: int) -> str:
        """The steps since the last line, up to so many in all, in a few words."""
        sums = self._sums(self._shown, to)
        self._shown = to
        self._judge()
        numbers = sums.numbers()
        words = [f"{self._name}: step {to:,}", f"{numbers['step_ms']:.4g} ms"]
        if "tokens_per_s" in numbers:
            words.append(f"{numbers['tokens_per_s']:,.0f} tokens/s")
        mfu = self._mfu(sums)
        if mfu is not None:
            words.append(f"MFU {100 * mfu:.3g} %")
        words.append(sums.longest())
        if self._slow_steps:
            words.append(f"{self._slow_steps:,} slow")
        return "  ".join(filter(None, words))

    def _show(self, before: int) -> None:
        """Write the lines that are due after the step `before`."""
        stream = sys.stderr
        if stream is None:  # a program without a console
            return
        if self._every is None and _is_terminal(stream):
            now_s = monotonic()
            if now_s - self._drawn_s < REDRAWN_S or _has_progress_bar() or not self._ranks.is_first:
                return
            self._drawn_s, self._is_drawn = now_s, True
            width = shutil.get_terminal_size().columns - 1
            stream.write(f"{ERASE}{inert_line(self.line(self._steps))[:width]} ")
        else:
            every = _lines_in(stream) if self._every is None else self._every
            if not every or not self._ranks.is_first:
                return
            for to in range(before + every - before % every, self._steps + 1, every):
                stream.write(f"{inert_line(self.line(to))}\n")
        stream.flush()

    def _between(self, begin: int, end: int) -> list[WatchedStep]:
        """The measured steps from one number to another that are kept still."""
        latest = islice(reversed(self._measured), self._steps - end, self._steps - begin)
        return list(latest)[::-1]

    def _sums(self, begin: int, end: int) -> Sums:
        sums = Sums()
        for step in self._between(begin, end):
            sums.add(step)
        return sums

    def _judge(self) -> None:
        """Count the slow steps, by what is usual of all steps up to some time ago."""
        if self._steps >= max(FEWEST, MORE_STEPS * self._usual_of):
            self._usual_of, self._usual = self._steps, usual_of(self._measured)
        if self._usual:
            for step in self._between(self._judged, self._steps):
                self._slow_steps += is_slow(step, self._usual)
            self._judged = self._steps


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
