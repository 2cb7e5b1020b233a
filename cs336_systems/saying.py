"""What long work calls to say what it begins; report/status_line.py shows it."""

from typing import Protocol


class Say(Protocol):
    """Called before each part, and never while anything is timed."""

    def __call__(self, doing: str, done: int = 0, total: int = 0) -> None:
        """Take a few words; where the part is one of several, how many of the `total` are done."""


def say_nothing(doing: str, done: int = 0, total: int = 0) -> None:
    """For work that nobody watches."""
