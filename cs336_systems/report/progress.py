"""What a command is doing, on standard error: in a line that is redrawn, or in new lines if not a
terminal.

It has no thread, which would disturb what is timed on the host. rich is imported only where it
draws: a step that is timed in this process has nothing beside it that it does not need.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..config import Phase, RunConfig
from ..measure.nvml import Gpu
from ..record import RecordError, RunRecord
from ..subject import Subject
from ..sweep.keep import Listener
from ..text import counted, inert_line, print_aside
from .words import STATUS_WORDS

if TYPE_CHECKING:
    from rich.live import Live

LARGE_BYTES = 8 * 2**20
"""Size of a profiler's file from which reading it takes a second or more."""
IMPORTING = "importing PyTorch, once for all runs"
MOST_NAMED = 8
"""How many runs in progress are named; of more, as on a cluster, only their number is."""
LEAST_APART_S = 5.0
"""Least time between two lines where there is no terminal; what a command does in between has no
line.
"""
_STARTED = monotonic()


class StatusLine(Listener):
    """The line that says what a command is doing, or which runs of a sweep; above it stands a line
    for each result.

    Use it as a context manager, and print results after it: at its end it removes the line from a
    terminal.
    """

    def __init__(self, names: Mapping[Any, str] | None = None, first: str = IMPORTING) -> None:
        """`names` are names of configurations that replace the list of their settings; repeats
        share a name.

        `first` is what a sweep does before its first run.
        """
        self._names = names or {}
        self._first = first
        self._live: Live | None = None
        self._printed_s = -math.inf
        self._doing = ""
        self._running: dict[str, str] = {}
        self._done = self._total = 0

    def __enter__(self) -> "StatusLine":
        """Show the line, if standard error is a terminal that can redraw it."""
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, emoji=False)
            if not console.is_dumb_terminal:
                # rich prints other output above the line, if both go to the terminal
                self._live = Live(
                    console=console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=sys.stdout.isatty(),
                )
                self._live.start()
                # rich hides the cursor, which a killed process could not show again
                console.show_cursor()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        self.end()

    def end(self) -> None:
        """Remove the line, before results are printed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def reading(self, path: Path) -> None:
        """Say that a file is being read, if it is so large that reading takes a while."""
        size = path.stat().st_size
        if size >= LARGE_BYTES or path.suffix == ".nsys-rep":
            self(f"reading {path.name}, {size / 2**20:.0f} MiB")

    def __call__(self, doing: str, done: int = 0, total: int = 0) -> None:
        """Say what begins now, and for one of `total` parts of a task how many are done."""
        self._doing = f"{done + 1} of {total}: {doing}" if total else doing
        now_s = monotonic()
        if self._live is not None:
            self.tick()
        elif now_s - self._printed_s >= LEAST_APART_S:
            self._printed_s = now_s
            print_aside(f"[{now_s - _STARTED:5.1f} s] {self._doing}")

    def tick(self) -> None:
        """Draw a terminal's line again, with the time that has passed."""
        if self._live is not None:
            from rich.text import Text

            line = inert_line(f"[{monotonic() - _STARTED:5.1f} s] {self._doing}")
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def planned(
        self, kept: Sequence[RunRecord], todo: Sequence[RunConfig], problems: Sequence[RecordError]
    ) -> None:
        """Say what is done, what runs and what was set aside."""
        for problem in problems:
            print_aside(f"set aside {problem}")
        if kept:
            print_aside(f"{counted(len(kept), 'record')} kept, {counted(len(todo), 'run')} to go")
        self._total = len(todo)
        if todo:
            self(self._first)

    def importing(self) -> None:
        """Import meanwhile what writes the tables and plots at the end, which takes a second."""
        from . import draw, results  # noqa: F401
        from .page import chapters  # noqa: F401

    def started(self, config: RunConfig, gpu: Gpu | None) -> None:
        """Show the run among those in progress."""
        doing = self._label(config)
        if gpu is not None and gpu.index > 0 and not config.is_shared:
            doing += f" on GPU {gpu.index}"
        self._show(config, doing)

    def finished(self, record: RunRecord) -> None:
        """Print the result in one line."""
        self._running.pop(record.key, None)
        self._done += 1
        print_aside(describe_run(record, self._label(record.subject)))

    def explaining(self, subject: Subject) -> None:
        """Show whose profile is being explained."""
        self._show(subject, f"explaining the profile of {self._label(subject)}")

    def explained(self, subject: Subject, failure: str | None) -> None:
        """Print in one line why a profile could not be explained, if so."""
        self._running.pop(subject.key, None)
        if failure is not None:
            print_aside(f"not explained {self._label(subject)}: {failure}")

    def noted(self, line: str) -> None:
        """Print the line."""
        print_aside(line)

    def _label(self, subject: Subject) -> str:
        """The name of a run on the status line: its given name with the repeat, else its own
        label.
        """
        name = self._names.get(subject.configuration)
        if name is None:
            return subject.label
        return f"{name} #{subject.repeat}" if subject.repeat else name

    def _show(self, subject: Subject, doing: str) -> None:
        """Show on the status line what is being done to this run, beside the other runs in
        progress.
        """
        self._running[subject.key] = doing
        now = " | ".join(self._running.values())
        if len(self._running) > MOST_NAMED:
            now = f"{len(self._running)} runs in progress"
        self(now, min(self._done, self._total - 1), self._total)


def describe_run(record: RunRecord, label: str) -> str:
    """One line that says how a run, named `label`, has ended."""
    step = record.measurement(Phase.STEP)
    if step is None:
        message = record.failure.message if record.failure else ""
        return f"{label:<34} {STATUS_WORDS[record.status]} {message}"
    spread = "" if step.stdev_s is None else f" ± {step.stdev_s * 1e3:.2f}"
    memory = f"  {record.memory.peak_allocated_bytes / 2**30:.1f} GiB" if record.memory else ""
    doubts = "".join(f"  {warning.code}" for warning in record.warnings)
    return f"{label:<34} {step.mean_s * 1e3:9.2f}{spread} ms{memory}{doubts}"
