"""Says on standard error what a command is doing: in one line that is redrawn, or in a new line if not a terminal."""

import sys
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from cs336_systems.text import inert_line

if TYPE_CHECKING:
    from rich.live import Live

LARGE_BYTES = 8 * 2**20
"""Size of a profiler's file from which reading it takes a second or more."""
_STARTED = monotonic()


class StatusLine:
    """The line that says what a command is doing. It has no thread, which would disturb what is timed on the host.

    Use it as a context manager, and print results after it: at its end it removes the line from a terminal.
    """

    def __init__(self) -> None:
        self._live: Live | None = None

    def __enter__(self) -> "StatusLine":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, emoji=False)
            if not console.is_dumb_terminal:
                # rich prints other output above the line, if both go to the terminal
                self._live = Live(
                    console=console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty()
                )
                self._live.start()
                console.show_cursor()  # rich hides the cursor, which a killed process could not show again
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
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
        count = f"{done + 1} of {total}: " if total else ""
        line = f"[{monotonic() - _STARTED:5.1f} s] {count}{inert_line(doing)}"
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            print(line, file=sys.stderr, flush=True)
