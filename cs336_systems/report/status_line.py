"""What a command is doing now, on standard error: a line that is redrawn on a terminal, a line each elsewhere."""

import sys
from pathlib import Path
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cs336_systems.text import inert_line

LARGE_BYTES = 8 * 2**20
"""Of a profiler's file that takes a second and more to read."""
_STARTED = monotonic()


class StatusLine:
    """Draws only when it is called: a drawing thread would share the host with what is timed.

    Use it as a context manager, and print results after it: on a terminal it takes its line away at the end.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, emoji=False)
        self._live: Live | None = None

    def __enter__(self) -> "StatusLine":
        if sys.stderr.isatty() and not self._console.is_dumb_terminal:
            # what is printed meanwhile goes above the line, unless standard output goes elsewhere
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty()
            )
            self._live.start()
            self._console.show_cursor()  # a process that is killed could not bring it back
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Take the line away, before results are printed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def reading(self, path: Path) -> None:
        """Say that the file is read, unless that takes no time to speak of."""
        size = path.stat().st_size
        if size >= LARGE_BYTES or path.suffix == ".nsys-rep":
            self(f"reading {path.name}, {size / 2**20:.0f} MiB")

    def __call__(self, doing: str, done: int = 0, total: int = 0) -> None:
        """Say what begins; where it is one of several parts of a task, how many of the `total` are done."""
        count = f"{done + 1} of {total}: " if total else ""
        line = f"[{monotonic() - _STARTED:5.1f} s] {count}{inert_line(doing)}"
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            print(line, file=sys.stderr, flush=True)
