"""Shows the progress of a sweep on standard error: a bar, the runs in progress, and a line for each result."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from cs336_systems.config import Phase, RunConfig
from cs336_systems.costs.duration import NOTHING_EXPECTED, Expected
from cs336_systems.measure.nvml import Gpu
from cs336_systems.record import RecordError, RunRecord, Status
from cs336_systems.report.status_line import StatusLine
from cs336_systems.report.terminal import plain
from cs336_systems.report.words import STATUS_WORDS
from cs336_systems.sweep.listener import Listener
from cs336_systems.text import counted

FIRST = "importing PyTorch, once for all runs"
MOST_NAMED = 8
"""How many runs in progress are named beside the bar; of more, as on a cluster, only their number is."""


class TerminalListener(Listener):
    """Shows the progress of a sweep. It has no thread, which would disturb what is timed on the host."""

    def __init__(
        self,
        names: Mapping[RunConfig, str] | None = None,
        first: str = FIRST,
        expected: Expected = NOTHING_EXPECTED,
    ) -> None:
        """`names` are names of configurations that replace the list of their settings; repeats share a name.

        `first` is what a sweep does before its first run, and `expected` how long its runs should take.
        """
        self._names, self._first = names or {}, first
        self._left = TimeLeft(expected)
        self.console = Console(stderr=True, emoji=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            _LeftColumn(self._left),
            console=self.console,
            auto_refresh=False,
            disable=not self.console.is_terminal,
            speed_estimate_period=3600,
        )
        self._task: TaskID | None = None
        self._running: dict[str, str] = {}
        self._numbers: dict[RunConfig, int] = {}
        """Numbers of the runs that this command, not an earlier one, has started; a second try keeps its number."""
        self._lines = StatusLine()
        self._total = 0

    def __enter__(self) -> "TerminalListener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._progress.stop()

    def planned(self, kept: Sequence[RunRecord], todo: Sequence[RunConfig], problems: Sequence[RecordError]) -> None:
        """Say what is done, what runs and what was set aside."""
        self._progress.start()
        for problem in problems:
            self._print(f"[yellow]set aside[/] {plain(str(problem))}")
        if kept:
            self._print(f"{counted(len(kept), 'record')} kept, {counted(len(todo), 'run')} to go")
        self._total = len(todo)
        self._left.planned(todo)
        first = self._first if todo else ""
        self._task = self._progress.add_task(first, total=self._total)
        self._progress.refresh()
        if first and not self.console.is_terminal:
            self._lines(first)

    def importing(self) -> None:
        """Import meanwhile what writes the tables and plots at the end, which takes a second."""
        import cs336_systems.report.page.chapters
        import cs336_systems.report.results  # noqa: F401

    def started(self, config: RunConfig, gpu: Gpu | None) -> None:
        """Show the run among those in progress; without a bar, in a line of its own."""
        self._left.started()
        label = self._label(config)
        number = self._numbers.setdefault(config, len(self._numbers))
        is_named = gpu is not None and gpu.index > 0 and not config.is_shared
        self._running[config.key] = f"{label} on GPU {gpu.index}" if gpu and is_named else label
        if not self.console.is_terminal:
            self._lines(self._running[config.key], number, self._total)
        self._show()

    def finished(self, record: RunRecord) -> None:
        """Print the result in one line."""
        self._running.pop(record.key, None)
        self._left.finished(record.config)
        self._print(describe_run(record, self._label(record.config)))
        if self._task is not None:
            self._progress.advance(self._task)
        self._show()

    def explaining(self, config: RunConfig) -> None:
        """Show whose profile is being explained; without a bar, only if an earlier command measured the run."""
        self._running[config.key] = doing = f"explaining the profile of {self._label(config)}"
        if not self.console.is_terminal and config not in self._numbers:
            self._lines(doing)
        self._show()

    def explained(self, config: RunConfig, failure: str | None) -> None:
        """Print in one line why a profile could not be explained, if so."""
        self._running.pop(config.key, None)
        if failure is not None:
            self._print(f"[yellow]not explained[/] {plain(f'{self._label(config)}: {failure}')}")
        self._show()

    def noted(self, line: str) -> None:
        """Print the line."""
        self._print(f"[dim]{plain(line)}[/]")

    def tick(self) -> None:
        """Update the bar's clock."""
        self._progress.refresh()

    def _print(self, line: str) -> None:
        """Print one line with rich's markup, which is wrapped only on a terminal."""
        self.console.print(line, highlight=False, soft_wrap=not self.console.is_terminal)

    def _label(self, config: RunConfig) -> str:
        name = self._names.get(config.configuration)
        if name is None:
            return config.label
        return f"{name} #{config.repeat}" if config.repeat else name

    def _show(self) -> None:
        if self._task is not None:
            few = len(self._running) <= MOST_NAMED
            now = " | ".join(self._running.values()) if few else f"{len(self._running)} runs in progress"
            self._progress.update(self._task, description=plain(now))
        self._progress.refresh()


class TimeLeft:
    """Time left of a sweep, from the predicted times of its runs and the ratio of actual to predicted time so far."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._waiting: list[RunConfig] = []
        self._done_s = 0.0
        """Predicted time of the finished runs."""
        self._begun_s: float | None = None
        self._took_s = 0.0
        """Time from the start of the first run to the end of the last finished one."""

    def planned(self, todo: Sequence[RunConfig]) -> None:
        """Note the runs to come, in order."""
        self._waiting = list(todo)

    def started(self) -> None:
        """Note that a run begins now."""
        if self._begun_s is None:
            self._begun_s = monotonic()

    def finished(self, config: RunConfig) -> None:
        """Note that this run ends now."""
        if config in self._waiting and self._begun_s is not None:
            self._waiting.remove(config)
            self._done_s += self._expected.runs_s.get(config, 0.0)
            self._took_s = monotonic() - self._begun_s

    def __call__(self) -> float | None:
        """Seconds left; None if of some run it is not known how long it should take."""
        if (left_s := self._expected.total_s(self._waiting)) is None or self._begun_s is None:
            return left_s
        if self._done_s:
            left_s = sum(map(self._expected.runs_s.__getitem__, self._waiting)) * self._took_s / self._done_s
        return max(0.0, left_s - (monotonic() - self._begun_s - self._took_s))


class _LeftColumn(TimeRemainingColumn):
    """The time that is left; by the number of runs so far, if no more is known."""

    def __init__(self, left_s: Callable[[], float | None]) -> None:
        super().__init__()
        self._left_s = left_s

    def render(self, task: Task) -> Text:
        """Hours, minutes and seconds."""
        left_s = self._left_s()
        return super().render(task) if left_s is None else Text(str(timedelta(seconds=round(left_s))), style="cyan")


def describe_run(record: RunRecord, label: str) -> str:
    """One line with rich's markup that says how a run, named `label`, has ended."""
    label = plain(f"{label:<34}")
    step = record.measurement(Phase.STEP)
    if step is None:
        colour = "yellow" if record.status is Status.OOM else "red"
        why = record.failure.message if record.failure else ""
        return f"{label} [{colour}]{STATUS_WORDS[record.status]}[/] {plain(why)}"
    spread = "" if step.stdev_s is None else f" ± {step.stdev_s * 1e3:.2f}"
    memory = f"  {record.memory.peak_allocated_bytes / 2**30:.1f} GiB" if record.memory else ""
    doubts = " ".join(warning.code for warning in record.warnings)
    return f"{label} {step.mean_s * 1e3:9.2f}{spread} ms{memory}" + (f"  [yellow]{doubts}[/]" if doubts else "")
