"""The driver of a sweep on several machines: it decides where each run goes, and alone writes the records.

It knows nothing of the engine that connects the machines. An event costs time proportional to the logarithm of the
number of runs.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cs336_systems.config import Parallel, RunConfig
from cs336_systems.files import write_atomically
from cs336_systems.record import Failure, Identity, RecordError, RunRecord, Status, decode_record
from cs336_systems.sweep.cluster.conditions import Conditions
from cs336_systems.sweep.cluster.nodes import Answer, Event, Joined, Left, Node, Nodes, Unfit
from cs336_systems.sweep.keep import Keeper
from cs336_systems.sweep.run import MORE_FOR_RANKS_S, num_slots
from cs336_systems.sweep.store import SweepError, quarantine
from cs336_systems.text import counted

MAX_TRIES = 3
"""How often a run is started before it fails, if each time its machine is lost."""
_GRACE_S = 60.0
"""How much later than the time limit of its run, which the machine enforces itself, a machine must have answered."""
_TICK_S = 1.0


@dataclass(slots=True)
class _Run:
    order: int
    config: RunConfig
    key: str
    family: str
    """Equal for all repeats of a configuration, which are measured on one kind of machine."""
    width: int
    """How many slots of one machine it takes."""
    lost: list[str] = field(default_factory=list)
    """Why earlier tries gave no record."""
    started_s: float = 0.0


@dataclass(slots=True)
class _Place:
    """A machine in use."""

    node: Node
    free: int
    running: dict[str, _Run] = field(default_factory=dict)
    """The runs on it, by their keys."""


class _Waiting:
    """Runs that wait for a machine: widest first, then in the order of the sweep.

    While a wide run waits, no narrower one starts on a machine on which the wide one could run; otherwise the slots
    that it needs would never be free at the same time.
    """

    def __init__(self) -> None:
        self._heaps: defaultdict[tuple[Identity | None, int], list[tuple[int, _Run]]] = defaultdict(list)
        self._kinds: dict[str, Identity] = {}
        """The kind of machine on which a family is measured, once its first run has started."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, run: _Run) -> None:
        self._count += 1
        self._put(run)

    def _put(self, run: _Run) -> None:
        heapq.heappush(self._heaps[self._kinds.get(run.family), run.width], (run.order, run))

    def pop(self, place: _Place) -> _Run | None:
        """The run that the machine starts next; None if there is none, or too few of its slots are free."""
        kind = place.node.identity
        self._sort_out(kind)
        widths = {width for (found, width), heap in self._heaps.items() if heap and found in (None, kind)}
        width = max((width for width in widths if width <= place.node.slots), default=0)
        if not 0 < width <= place.free:
            return None
        run = heapq.heappop(min((self._heaps[each, width] for each in (None, kind)), key=_first))[1]
        self._kinds.setdefault(run.family, kind)
        self._count -= 1
        return run

    def _sort_out(self, kind: Identity) -> None:
        """Move first runs of no kind to the heap of another kind, if their family has been started on that."""
        for (found, _), heap in list(self._heaps.items()):
            while found is None and heap and self._kinds.get(heap[0][1].family, kind) != kind:
                self._put(heapq.heappop(heap)[1])

    def __iter__(self) -> Iterator[_Run]:
        return (run for heap in self._heaps.values() for _, run in heap)


def _first(heap: list[tuple[int, _Run]]) -> float:
    return heap[0][0] if heap else float("inf")


@dataclass(slots=True)
class Driver:
    """Keeps every machine at work until nothing is left to do, or `is_stopped` says so."""

    keeper: Keeper
    nodes: Nodes
    timeout_s: float
    wait_nodes_s: float
    """How long it waits for a machine while none is at work."""
    is_stopped: Callable[[], bool]
    conditions: Conditions
    most_slots: int = 0
    _places: dict[str, _Place] = field(default_factory=dict)
    _newcomers: list[Node] = field(default_factory=list)
    """Machines that have joined before the conditions of the sweep are known."""
    _waiting: _Waiting = field(default_factory=_Waiting)
    _deadlines: list[tuple[float, int, str, _Run]] = field(default_factory=list)
    """A heap: when a machine must have answered, the order of the run, the machine's name, the run."""
    _num_running: int = 0

    def run(self, todo: Sequence[RunConfig]) -> None:
        """Measure all; raise SweepError if for too long no machine is there that could go on."""
        for order, config in enumerate(todo):
            self._waiting.push(_Run(order, config, config.key, config.digest, num_slots(config)))
        worked_s = ticked_s = self.nodes.now_s()
        while (self._waiting or self._num_running) and not self.is_stopped():
            for event in self.nodes.events(_TICK_S):
                self._handle(event)
            now_s = self.nodes.now_s()
            self._choose_conditions()
            self._give_up_silent(now_s)
            self._fill(now_s)
            if self._num_running:
                worked_s = now_s
            elif self._waiting and now_s - worked_s >= self.wait_nodes_s:
                raise SweepError(self._why_nothing_runs())
            if now_s - ticked_s >= _TICK_S:
                ticked_s = now_s
                self.keeper.listener.tick()

    def _handle(self, event: Event) -> None:
        match event:
            case Joined(node):
                self._newcomers.append(node)
            case Left(name, why):
                self._leave(name, why)
            case Answer(name, key, data):
                self._finish(name, key, data)
            case Unfit(what, why):
                self._note(f"{what} is not used: {why}")

    def _choose_conditions(self) -> None:
        """Use those machines that have joined and have the conditions of the sweep."""
        self.conditions.choose(self._newcomers)
        for node in self._newcomers:
            if (why := self.conditions.why_refused(node)) is not None:
                self._refuse(node, why)
            else:
                self._places[node.name] = _Place(node, node.slots)
                self.most_slots = max(self.most_slots, sum(place.node.slots for place in self._places.values()))
                self._note(f"{node.host} joins: {node.identity.device_name}, {counted(node.slots, 'slot')}")
        self._newcomers.clear()

    def _refuse(self, node: Node, why: str) -> None:
        self.nodes.give_up(node.name)
        self._note(f"{node.host} is not used: {why}")

    def _note(self, line: str) -> None:
        self.keeper.listener.noted(line)

    def _fill(self, now_s: float) -> None:
        """Start as many runs as fit; again if the first run of a family has bound others to a kind of machine."""
        started = True
        while self._waiting and started:
            started = False
            for place in self._places.values():
                while place.free and (run := self._waiting.pop(place)):
                    self._start(run, place, now_s)
                    started = True

    def _start(self, run: _Run, place: _Place, now_s: float) -> None:
        run.started_s = now_s
        place.free -= run.width
        place.running[run.key] = run
        self._num_running += 1
        limit_s = self.timeout_s + _GRACE_S + (MORE_FOR_RANKS_S if run.config.parallel is not Parallel.NONE else 0.0)
        heapq.heappush(self._deadlines, (now_s + limit_s, run.order, place.node.name, run))
        self.nodes.start(place.node.name, run.config)
        self.keeper.listener.started(run.config, None)

    def _ended(self, place: _Place, key: str) -> _Run | None:
        run = place.running.pop(key, None)
        if run is not None:
            place.free += run.width
            self._num_running -= 1
        return run

    def _give_up_silent(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, _, name, run = heapq.heappop(self._deadlines)
            place = self._places.get(name)
            if place is not None and place.running.get(run.key) is run:
                why = f"it did not answer within {deadline_s - run.started_s:g} s"
                self.nodes.give_up(name)
                self._leave(name, why)

    def _leave(self, name: str, why: str) -> None:
        """Put back what ran on a machine that is lost; a run that was lost too often has failed."""
        self._newcomers = [node for node in self._newcomers if node.name != name]
        place = self._places.pop(name, None)
        if place is None:
            return
        self._note(f"{place.node.host} is lost: {why}")
        for key in list(place.running):
            run = self._ended(place, key)
            assert run is not None
            run.lost.append(f"{place.node.host}: {why}")
            if len(run.lost) < MAX_TRIES:
                self._waiting.push(run)
                continue
            message = f"its machine was lost {MAX_TRIES} times: {'; '.join(run.lost)}"
            elapsed_s = self.nodes.now_s() - run.started_s
            failed = self.keeper.fail(run.config, Status.KILLED, Failure(message=message), elapsed_s)
            self.keeper.finish(failed)

    def _finish(self, name: str, key: str, data: bytes) -> None:
        """Keep the record; ignore one from a machine that was given up, or of a run that it was not asked for."""
        place = self._places.get(name)
        run = self._ended(place, key) if place is not None else None
        if place is not None and run is not None:
            self.keeper.finish(self._kept(run, data, place.node))

    def _kept(self, run: _Run, data: bytes, node: Node) -> RunRecord:
        """Write the record that `data`, which may be anything, holds, or one that says what is wrong with it."""
        elapsed_s = self.nodes.now_s() - run.started_s
        path = self.keeper.runs / f"{run.key}.json"
        try:
            record = decode_record(data, path)
        except RecordError as error:
            return self._set_aside(run, data, elapsed_s, f"the record from {node.host} was not readable", f": {error}")
        if record.config != run.config:
            return self._set_aside(run, data, elapsed_s, f"the record from {node.host} is of another run")
        if (changed := self.keeper.changed_since(record)) is not None:
            return self.keeper.refuse(run.config, f"{node.host}: {changed}", elapsed_s)
        return self.keeper.write(replace(record, lost_tries=tuple(run.lost)))

    def _set_aside(self, run: _Run, data: bytes, elapsed_s: float, what: str, why: str = "") -> RunRecord:
        path = self.keeper.runs / f"{run.key}.json"
        write_atomically(path, data)
        return self.keeper.refuse(run.config, f"{what}; kept as {quarantine(path).name}{why}", elapsed_s)

    def _why_nothing_runs(self) -> str:
        left, needed = counted(len(self._waiting), "run"), max(run.width for run in self._waiting)
        slots = [place.node.slots for place in self._places.values()]
        found = f"{counted(len(slots), 'machine')} with at most {max(slots)} slot(s) each" if slots else "none"
        return (
            f"no machine for the {left} left within {self.wait_nodes_s:g} s: needed {needed} slot(s) on one, "
            f"found {found}; finished runs are kept, and the same command goes on"
        )
