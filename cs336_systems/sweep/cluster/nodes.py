"""What the driver of a sweep and the machines that measure for it tell each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cs336_systems.config import RunConfig
from cs336_systems.record import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that measures, as it describes itself."""

    name: str
    """Unique among all machines that ever join a sweep: one that left and comes back has another."""
    host: str
    identity: Identity
    slots: int
    """How many ranks it can run at once: its GPUs, or 1 for a CPU, on which two runs would time each other."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A machine is ready to measure."""

    node: Node


@dataclass(frozen=True, slots=True)
class Left:
    """A machine is gone, and every run on it is lost."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A run has ended on a machine. `data` should be its record, in JSON; nothing is known of it yet."""

    name: str
    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Unfit:
    """A machine cannot take part; `what` names it."""

    what: str
    why: str


Event: TypeAlias = Joined | Left | Answer | Unfit


class Nodes(Protocol):
    """The machines of a sweep, as an engine connects them."""

    def start(self, name: str, config: RunConfig) -> None:
        """Have this machine measure the run, on as many of its slots as the run has ranks."""

    def give_up(self, name: str) -> None:
        """End what runs on this machine, and use it no more."""

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call, in order; waits for an event, but no longer than this."""

    def now_s(self) -> float:
        """The time in seconds, by a clock that is never set back."""
