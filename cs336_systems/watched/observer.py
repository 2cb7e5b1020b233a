"""What a part that looks at the steps of a watched loop is told."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..config import Phase
from .marks import WatchedStep

TROUBLES: list[str] = []
"""What went wrong in hooks and observers, which is our own fault and never the loop's."""


class Observer:
    """Looks at the steps of a watched loop; each method does nothing unless a part overrides it.

    All are called on the thread of the loop. What `step_begins` and `step_ended` do lies outside of
    the step's times, and what `phase_begins` does lies within them.
    """

    def step_begins(self, number: int) -> None:
        """Called before step `number` begins; the first measured step is 0, and the steps of the
        warm-up are negative.
        """

    def phase_begins(self, phase: Phase | None) -> None:
        """Called when a phase of the open step begins; None ends the step, also one that fails."""

    def step_ended(self, number: int) -> None:
        """Called when step `number` has ended on the host without an exception."""

    def step_failed(self, number: int, error: BaseException) -> None:
        """Called when an exception leaves step `number`, which is not counted; it goes on."""

    def steps_read(self, first: int, steps: Sequence[WatchedStep]) -> None:
        """Called once the times of some steps in a row are known, the first of which is number
        `first`: several at once, and some time after they have ended.
        """

    def finish(self) -> None:
        """Called before a record is made and when the watching ends, so possibly several times."""


class Observers:
    """The parts that look at one loop; of each method, those that do something in it."""

    def __init__(self, parts: Sequence[Observer]) -> None:
        self.parts = parts
        """In the order in which they are told."""
        self.phase_begins = overriding(parts, "phase_begins")
        self.step_begins = overriding(parts, "step_begins")
        self.step_ended = overriding(parts, "step_ended")
        self.step_failed = overriding(parts, "step_failed")
        self.steps_read = overriding(parts, "steps_read")


def overriding(observers: Iterable[Observer], method: str) -> list[Callable[..., Any]]:
    """The methods of this name of the observers that do something in it: calls cost time."""
    calls = []
    for observer in observers:
        if getattr(type(observer), method) is not getattr(Observer, method):
            calls.append(getattr(observer, method))
    return calls


def say(calls: list[Callable[..., Any]], *arguments: Any) -> None:  # noqa: ANN401
    """Call all; one that fails is not called again, and the loop of the user goes on."""
    for call in tuple(calls):
        try:
            call(*arguments)
        except Exception as error:
            calls.remove(call)
            note_trouble(call, error)


def note_trouble(call: Callable[..., Any], error: Exception) -> None:
    """Keep what went wrong in a call, for the report to say."""
    TROUBLES.append(f"{call.__qualname__}: {type(error).__name__}: {error}")
