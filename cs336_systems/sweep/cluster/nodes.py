"""What the driver of a sweep and the machines that measure for it tell each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cs336_systems.config import Device, RunConfig
from cs336_systems.record import Identity
from cs336_systems.sweep.cluster.fetch import RawFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that measures, as it describes itself."""

    name: str
    """Unique among all machines that ever join a sweep: one that left and comes back has another."""
    host: str
    identity: Identity
    slots: int
    """How many ranks it can run at once: its GPUs, or 1 for a CPU, on which two runs would time each other."""
    has_nsys: bool
    """Whether Nsight Systems is installed there."""


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
    files: tuple[RawFile, ...] = ()
    """What its profiler has left on the machine, to be fetched."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a file that a run has left on a machine; empty if the machine does not have it."""

    name: str
    key: str
    file: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Unfit:
    """A machine cannot take part; `what` names it."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Pending:
    """How many machines the cluster has ordered that are not there yet; said when that changes."""

    count: int


@dataclass(frozen=True, slots=True)
class Connected:
    """The cluster has answered; the engine writes its logs to this directory."""

    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of a cluster, whether a sweep could use it or not."""

    name: str
    host: str
    address: str
    node: Node | None
    """What it says of itself; None if that is not known, with the reason in `failure`."""
    count: float
    """Its GPUs by the engine's count, or its cores where CPUs are measured."""
    free: float
    """Those of them that no job has reserved."""
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All machines of a cluster, described for runs on a device; or why there was none to be seen."""

    device: Device = Device.CPU
    machines: tuple[Machine, ...] = ()
    failure: str | None = None


Event: TypeAlias = Joined | Left | Answer | Chunk | Unfit | Pending | Connected


class Nodes(Protocol):
    """The machines of a sweep, as an engine connects them."""

    def start(self, name: str, config: RunConfig) -> None:
        """Have this machine measure the run, on as many of its slots as the run has ranks."""

    def fetch(self, name: str, key: str, file: str, offset: int) -> None:
        """Have this machine send the next part of a file of the run that has ended there, as a `Chunk`."""

    def release(self, name: str, key: str) -> None:
        """Let this machine remove the files of the run."""

    def give_up(self, name: str, *, refused: bool = False) -> None:
        """End what runs on this machine, and use it no more under this name.

        It may join again under another one: a machine that was refused as soon as it is not as it was.
        """

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call, in order; waits for an event, but no longer than this."""

    def now_s(self) -> float:
        """The time in seconds, by a clock that is never set back."""
