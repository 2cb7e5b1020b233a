"""What a run waits for until its steps are timed: imports, compilation, first calls of kernels.

A part that runs inside another one is taken out of that one's time, so that the parts of a run add
up to no more than the run.
"""

import contextlib
from collections.abc import Callable, Iterator
from time import perf_counter, time

import psutil

_seconds: dict[str, float] = {}
"""The time of each part so far, without the parts inside it."""
_open: list["_Part"] = []
"""The parts that are running, the outermost first."""
_listener: list[Callable[[str], None]] = []
"""What is told of each part, if anything is."""


class _Part:
    """A part that is running."""

    def __init__(self, name: str, detail: str) -> None:
        """Begin the part now."""
        self.name = name
        self.words = f"{name}: {detail}" if detail else name
        self.began = perf_counter()
        self.inside_s = 0.0
        """Time of the parts inside it that have ended."""


def tell(say: Callable[[str], None]) -> None:
    """Call `say` with each part that begins from now on, in a few words."""
    _listener[:] = [say]


def say(what: str) -> None:
    """Tell what is done next, before it begins and never while a step is timed."""
    for listener in _listener:
        listener(what)


def begin(name: str, detail: str = "") -> None:
    """Begin a part; `detail` is told beside its name, and not kept."""
    _open.append(_Part(name, detail))
    say(_open[-1].words)


def end() -> None:
    """End the part that began last, and tell that the one around it goes on; without any, do
    nothing.
    """
    if not _open:
        return
    part = _open.pop()
    whole_s = perf_counter() - part.began
    _seconds[part.name] = _seconds.get(part.name, 0.0) + whole_s - part.inside_s
    if _open:
        _open[-1].inside_s += whole_s
        say(_open[-1].words)


@contextlib.contextmanager
def waiting_for(name: str, detail: str = "") -> Iterator[None]:
    """Context that is one part of the start; parts that began in it end with it."""
    depth = len(_open)
    begin(name, detail)
    try:
        yield
    finally:
        while len(_open) > depth:
            end()


def note_since_start(name: str) -> None:
    """Take the time since this process was started, without that of the parts so far, as a part."""
    since_s = time() - psutil.Process().create_time()
    _seconds[name] = max(since_s - sum(_seconds.values()), 0.0)


def taken() -> dict[str, float]:
    """The seconds of each part, which are then forgotten, in the order in which the parts ended."""
    parts = dict(_seconds)
    _seconds.clear()
    return parts
