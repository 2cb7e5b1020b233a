"""The machines that a sweep uses, the runs on each, and until when each must answer."""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from cs336_systems.config import RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.sweep.cluster.fetch import Fetch
from cs336_systems.sweep.cluster.nodes import Node


@dataclass(slots=True)
class Run:
    """A run that waits for a machine or is on one."""

    order: int
    config: RunConfig
    key: str
    family: str
    """Equal for all repeats of a configuration, which stay on one kind of machine, or on one machine."""
    width: int
    """How many slots of one machine it takes."""
    neighbours: set[str] = field(default_factory=set)
    """Keys of the runs that were measured on its machine meanwhile."""
    lost: list[str] = field(default_factory=list)
    """Why earlier tries gave no record."""
    started_s: float = 0.0
    patience_s: float = 0.0
    """How long the machine may take to answer the last request for this run."""
    deadline_s: float = math.inf
    """When the machine must have answered."""
    held: int = 0
    """How many slots of its machine the run holds; 0 while its profile is fetched, if that disturbs no other run."""
    record: RunRecord | None = None
    fetch: Fetch | None = None
    """Its profile while it is being fetched."""

    def drop_fetch(self) -> None:
        """Drop its record and what has been received of its profile; files at their final paths are kept."""
        if self.fetch is not None:
            self.fetch.drop()
        self.record = self.fetch = None


@dataclass(slots=True)
class Place:
    """A machine in use."""

    node: Node
    free: int
    running: dict[str, Run] = field(default_factory=dict)
    """The runs on it, by their keys."""

    def release(self, run: Run) -> None:
        """Free the slots that the run holds."""
        self.free += run.held
        run.held = 0


class Places:
    """All machines in use, by the names of their nodes."""

    def __init__(self) -> None:
        self.num_running = 0
        self.most_slots = 0
        """How many slots there were at most at one time."""
        self._places: dict[str, Place] = {}
        self._deadlines: list[tuple[float, int, str, Run]] = []
        """A heap: when a machine must have answered, a number, the machine's name, the run."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places.values())

    def add(self, node: Node) -> None:
        """Use this machine from now on."""
        self._places[node.name] = Place(node, node.slots)
        self.most_slots = max(self.most_slots, sum(place.node.slots for place in self))

    def remove(self, name: str) -> Place | None:
        """Use the machine no more, and return it for the caller to end its runs; None if it was not used."""
        return self._places.pop(name, None)

    def find(self, name: str, key: str) -> tuple[Place, Run] | None:
        """The machine and the run on it; None if it is not used, or has no such run."""
        place = self._places.get(name)
        run = None if place is None else place.running.get(key)
        return None if place is None or run is None else (place, run)

    def has_host(self, host: str) -> bool:
        """Whether one of the machines is on this host."""
        return any(place.node.host == host for place in self)

    def start(self, run: Run, place: Place, held: int, now_s: float) -> None:
        """Note that the run begins on the machine and holds `held` slots; runs measured meanwhile are neighbours."""
        run.started_s, run.held = now_s, held
        others = [other for other in place.running.values() if other.record is None]
        run.neighbours = {other.key for other in others}
        for other in others:
            other.neighbours.add(run.key)
        place.free -= held
        place.running[run.key] = run
        self.num_running += 1

    def expect(self, run: Run, place: Place, now_s: float, patience_s: float) -> None:
        """Set the deadline for the machine's next answer about this run."""
        run.patience_s, run.deadline_s = patience_s, now_s + patience_s
        heapq.heappush(self._deadlines, (run.deadline_s, next(self._numbers), place.node.name, run))

    def overdue(self, now_s: float) -> Iterator[tuple[Place, Run]]:
        """Machines that have not answered in time, each with the run that it was asked for."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, _, name, run = heapq.heappop(self._deadlines)
            found = self.find(name, run.key)
            if found is not None and found[1] is run and run.deadline_s == deadline_s:
                yield found

    def end(self, run: Run, place: Place) -> None:
        """Remove the run from the machine."""
        del place.running[run.key]
        place.release(run)
        self.num_running -= 1
        run.drop_fetch()

    def drop_fetches(self) -> None:
        """Drop all partly received profiles, because the sweep ends."""
        for place in self:
            for run in place.running.values():
                run.drop_fetch()
