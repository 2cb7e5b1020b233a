"""Explains raw profiles outside of a sweep: after `benchmark.py`, and in reports of earlier runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.config import RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.sweep.listener import Listener
from cs336_systems.text import print_aside


def explain_or_warn(records: Sequence[RunRecord], runs: Path, say: Callable[[str], None], doing: str = "") -> bool:
    """Explain the raw profiles of `records` in `runs` that are not explained yet; return whether all could be.

    Before each, `say` is called with `doing`, or by default with the name of the run. A profile that cannot be
    explained is a warning on standard error.
    """
    from cs336_systems.sweep.run import explain_again

    return not explain_again(records, runs, _Lines(say, doing))


@dataclass(frozen=True, slots=True)
class _Lines(Listener):
    """Says which profile is being explained, and prints a warning for each that cannot be."""

    say: Callable[[str], None]
    doing: str

    def explaining(self, config: RunConfig) -> None:
        self.say(self.doing or f"explaining the profile of {config.label}")

    def explained(self, config: RunConfig, failure: str | None) -> None:
        if failure is not None:
            print_aside(f"warning: not explained: {config.label}: {failure}")
