"""Events and calls between the driver of a sweep and the machines that measure for it."""

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
    """Unique among all machines that ever join a sweep; a machine that comes back gets another name."""
    host: str
    identity: Identity
    slots: int
    """How many ranks the machine can run at once: its GPUs, or 1 for a CPU, where two runs would disturb each other."""
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
    """A run has ended on a machine. `data` should be its record in JSON, but has not been checked."""

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
    """Number of machines that the cluster has ordered and that have not joined yet; sent when it changes."""

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
    """The machine's description of itself; None if unknown, with the reason in `failure`."""
    count: float
    """Number of its GPUs as the engine counts them, or of its cores if CPUs are measured."""
    free: float
    """Number of these GPUs or cores that no job has reserved."""
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
        """End what runs on this machine, and stop using it under this name.

        The machine may join again under another name; if it was refused, only after it has changed.
        """

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call, in order; waits for an event, but no longer than this."""

    def now_s(self) -> float:
        """The time in seconds, by a monotonic clock."""
