"""The driver of a sweep on several machines: it decides where each run goes, and alone writes the records.

It knows nothing of the engine that connects the machines. An event costs time proportional to the logarithm of the
number of runs.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cs336_systems.config import Device, Parallel, Profiler, RunConfig
from cs336_systems.files import error_in_words, write_atomically
from cs336_systems.record import Failure, RecordError, RunRecord, RunWarning, Status, WarningCode, decode_record
from cs336_systems.sweep.cluster.conditions import Conditions
from cs336_systems.sweep.cluster.fetch import Fetch, FetchError
from cs336_systems.sweep.cluster.nodes import (
    Answer,
    Chunk,
    Connected,
    Event,
    Joined,
    Left,
    Node,
    Nodes,
    Pending,
    Unfit,
)
from cs336_systems.sweep.cluster.waiting import Placement, Waiting
from cs336_systems.sweep.keep import Keeper
from cs336_systems.sweep.listener import Machines
from cs336_systems.sweep.run import MORE_FOR_RANKS_S, Loop, num_slots
from cs336_systems.sweep.store import SweepError, quarantine
from cs336_systems.text import counted

MAX_TRIES = 3
"""How often a run is started before it fails, if each time its machine is lost."""
_GRACE_S = 60.0
"""How much later than the time limit of its run, which the machine enforces itself, a machine must have answered."""
_TICK_S = 1.0
_MOST_FETCHES = 8
"""How many runs' profiles are fetched at a time. Each takes the memory of one chunk on both sides."""


_SHARED = RunWarning(
    code=WarningCode.CPU_SHARED,
    message="other runs were at work on this machine, and the CPU limits this one; leave out --share-nodes",
)


def _is_cpu_limited(record: RunRecord) -> bool:
    """Whether the CPU limits the run, which others on its machine would then disturb."""
    return any(warning.code is WarningCode.LAUNCH_BOUND for warning in record.warnings)


@dataclass(slots=True)
class _Run:
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
    """How long its machine may take for what it was last asked."""
    deadline_s: float = math.inf
    """When this time is over."""
    held: int = 0
    """How many slots of its machine it holds: none while its profile is fetched, if that disturbs no other run."""
    record: RunRecord | None = None
    fetch: Fetch | None = None
    """Its profile on the way from the machine."""

    def drop_fetch(self) -> None:
        """Forget what has come of its record and profile; nothing that has been put in place is removed."""
        if self.fetch is not None:
            self.fetch.drop()
        self.record = self.fetch = None


class _RefusedError(Exception):
    """A machine has sent a record that does not count."""


@dataclass(slots=True)
class _Place:
    """A machine in use."""

    node: Node
    free: int
    running: dict[str, _Run] = field(default_factory=dict)
    """The runs on it, by their keys."""


@dataclass(slots=True)
class Driver:
    """Keeps every machine at work until nothing is left to do, or `is_stopped` says so."""

    keeper: Keeper
    nodes: Nodes
    timeout_s: float
    wait_nodes_s: float
    """How long it waits for a machine while none is at work."""
    is_stopped: Callable[[], bool]
    explainer: Loop
    """Explains on this machine what has been fetched."""
    conditions: Conditions
    placement: Placement
    kept: Sequence[RunRecord] = ()
    """Records of an earlier sweep, whose repeats go on where they were measured if such a machine is there at first."""
    most_slots: int = 0
    _places: dict[str, _Place] = field(default_factory=dict)
    _newcomers: list[Node] = field(default_factory=list)
    """Machines that have joined before the conditions of the sweep are known."""
    _waiting: Waiting[_Run] = field(init=False)
    _deadlines: list[tuple[float, int, str, _Run]] = field(default_factory=list)
    """A heap: when a machine must have answered, a number, the machine's name, the run."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _num_running: int = 0
    _num_pending: int = 0
    """How many machines the cluster has ordered that are not there yet."""
    _to_fetch: deque[tuple[_Place, _Run]] = field(default_factory=deque)
    """Runs that have ended and whose profiles wait, because enough others are on their way."""
    _on_cpu: bool = False
    """Whether explaining a profile, or fetching it from the machine, would disturb the runs beside it."""
    _fetching: set[str] = field(default_factory=set)
    """Keys of those whose profiles are on their way."""

    def run(self, todo: Sequence[RunConfig]) -> None:
        """Measure all; raise SweepError if for too long no machine is there that could go on."""
        self._waiting = Waiting(self.placement)
        self._on_cpu = any(config.device is Device.CPU for config in todo)
        for order, config in enumerate(todo):
            self._waiting.push(_Run(order, config, config.key, config.digest, num_slots(config)))
        try:
            self._work()
        finally:
            for place in self._places.values():
                for run in place.running.values():
                    run.drop_fetch()

    def _work(self) -> None:
        worked_s = ticked_s = self.nodes.now_s()
        while (self._waiting or self._num_running) and not self.is_stopped():
            for event in self.nodes.events(_TICK_S):
                self._handle(event)
            now_s = self.nodes.now_s()
            self._choose_conditions()
            self._give_up_silent(now_s)
            self._fetch_more()
            self._fill(now_s)
            if self.explainer.is_busy and not self._on_cpu:
                self.explainer.step(0.0)
            if self._num_running:
                worked_s = now_s
            elif self._waiting and now_s - worked_s >= self.wait_nodes_s:
                raise SweepError(self._why_nothing_runs())
            if now_s - ticked_s >= _TICK_S:
                ticked_s = now_s
                left_s = (
                    None if self._num_running or not self._waiting else max(0.0, self.wait_nodes_s - (now_s - worked_s))
                )
                now = Machines(len(self._places), self._num_pending, self._num_running, left_s)
                self.keeper.listener.machines(now)
                self.keeper.listener.tick()

    def _handle(self, event: Event) -> None:
        match event:
            case Joined(node):
                self._newcomers.append(node)
            case Left(name, why):
                self._leave(name, why)
            case Answer():
                self._answered(event)
            case Chunk():
                self._take(event)
            case Unfit(what, why):
                self._note(f"{what} is not used: {why}")
            case Pending(count):
                self._num_pending = count
            case Connected(log):
                self._note(f"connected to the cluster; logs of its engine: {log}")

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
        if self._places and self.kept:
            self._go_on_from(self.kept)
            self.kept = ()

    def _go_on_from(self, kept: Sequence[RunRecord]) -> None:
        """Settle what has been measured in part where that was, and set apart what the CPU limits."""
        nodes = {(node.identity, node.host): node for node in (place.node for place in self._places.values())}
        kinds = {node.identity: node for node in nodes.values()}
        for record in kept:
            if _is_cpu_limited(record):
                self._waiting.set_apart(record.config.digest)
            if record.environment is not None:
                identity = record.environment.identity
                found = nodes.get((identity, record.environment.host))
                found = found or (None if self.placement.same_node else kinds.get(identity))
                if found is not None:
                    self._waiting.settle(record.config.digest, found)

    def _refuse(self, node: Node, why: str) -> None:
        self.nodes.give_up(node.name, refused=True)
        self._note(f"{node.host} is not used: {why}")

    def _note(self, line: str) -> None:
        self.keeper.listener.noted(line)

    def _fill(self, now_s: float) -> None:
        """Start as many runs as fit; again if the first run of a family has bound others to a kind of machine."""
        started = True
        while self._waiting and started:
            started = False
            for place in self._places.values():
                while place.free and (run := self._waiting.pop(place.node, place.free)):
                    self._start(run, place, now_s)
                    started = True

    def _start(self, run: _Run, place: _Place, now_s: float) -> None:
        run.started_s = now_s
        run.held = place.node.slots if self._waiting.is_apart(run.family) else run.width
        others = [other for other in place.running.values() if other.record is None]
        run.neighbours = {other.key for other in others}
        for other in others:
            other.neighbours.add(run.key)
        place.free -= run.held
        place.running[run.key] = run
        self._num_running += 1
        more_s = MORE_FOR_RANKS_S if run.config.parallel is not Parallel.NONE else 0.0
        self._expect(run, place, self.timeout_s + _GRACE_S + more_s)
        self.nodes.start(place.node.name, run.config)
        self.keeper.listener.started(run.config, None)

    def _expect(self, run: _Run, place: _Place, patience_s: float) -> None:
        """The machine must answer for this run within this time."""
        run.patience_s, run.deadline_s = patience_s, self.nodes.now_s() + patience_s
        heapq.heappush(self._deadlines, (run.deadline_s, next(self._numbers), place.node.name, run))

    def _ended(self, place: _Place, run: _Run) -> None:
        """Nothing more of the run is on the machine."""
        del place.running[run.key]
        self._free(place, run)
        self._num_running -= 1
        self._fetching.discard(run.key)
        run.drop_fetch()

    def _free(self, place: _Place, run: _Run) -> None:
        place.free += run.held
        run.held = 0

    def _give_up_silent(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, _, name, run = heapq.heappop(self._deadlines)
            place = self._places.get(name)
            if place is not None and place.running.get(run.key) is run and run.deadline_s == deadline_s:
                self._give_up(place, f"it did not answer within {run.patience_s:g} s")

    def _give_up(self, place: _Place, why: str) -> None:
        self.nodes.give_up(place.node.name)
        self._leave(place.node.name, why)

    def _leave(self, name: str, why: str) -> None:
        """Put back what ran on a machine that is lost; a run that was lost too often has failed."""
        self._newcomers = [node for node in self._newcomers if node.name != name]
        place = self._places.pop(name, None)
        if place is None:
            return
        self._note(f"{place.node.host} is lost: {why}")
        if not any(other.node.host == place.node.host for other in self._places.values()):
            self._waiting.leave(place.node)
        for run in list(place.running.values()):
            self._ended(place, run)
            run.lost.append(f"{place.node.host}: {why}")
            if len(run.lost) < MAX_TRIES:
                self._waiting.push(run)
                continue
            message = f"its machine was lost {MAX_TRIES} times: {'; '.join(run.lost)}"
            elapsed_s = self.nodes.now_s() - run.started_s
            failed = self.keeper.fail(run.config, Status.KILLED, Failure(message=message), elapsed_s)
            self.keeper.finish(failed)

    def _answered(self, answer: Answer) -> None:
        """Keep the record, after the profile if there is one, as a record says that its profile is there.

        An answer is ignored from a machine that was given up, and for a run that it was not asked for.
        """
        place = self._places.get(answer.name)
        run = place.running.get(answer.key) if place is not None else None
        if place is None or run is None or run.record is not None:
            return
        try:
            record = self._checked(run, answer.data)
            fetch = Fetch(run.config, self.keeper.runs, answer.files)
        except (_RefusedError, FetchError) as error:
            elapsed_s, message = self.nodes.now_s() - run.started_s, f"from {place.node.host}: {error}"
            self._finish(place, run, self.keeper.refuse(run.config, message, elapsed_s))
            return
        if _is_cpu_limited(record):
            self._waiting.set_apart(run.family)
            if run.neighbours and self._waiting.is_apart(run.family):
                self._again(place, run)
                return
        if run.config.profiler is Profiler.NONE:
            self._finish(place, run, self.keeper.write(record))
        else:
            run.record, run.fetch, run.deadline_s = record, fetch, math.inf
            self._to_fetch.append((place, run))

    def _again(self, place: _Place, run: _Run) -> None:
        """Measure the run once more, with a machine to itself."""
        self._note(f"{run.config.label} is measured again without others on its machine, as the CPU limits it")
        if run.config.profiler is not Profiler.NONE:
            self.nodes.release(place.node.name, run.key)
        self._ended(place, run)
        self._waiting.push(run)

    def _finish(self, place: _Place, run: _Run, record: RunRecord) -> None:
        """The record is written: go on to the next run, and to what is to be explained."""
        if run.config.profiler is not Profiler.NONE:
            self.nodes.release(place.node.name, run.key)
        self._ended(place, run)
        self.keeper.finish(record)
        self.explainer.explain_later(record)

    def _fetch_more(self) -> None:
        """Have more profiles sent. Until then a run holds its slots, so that machines do not fill up with profiles."""
        while self._to_fetch and len(self._fetching) < _MOST_FETCHES:
            place, run = self._to_fetch.popleft()
            if run.fetch is not None and place.running.get(run.key) is run:
                self._fetching.add(run.key)
                if not self._on_cpu and not self._waiting.is_apart(run.family):
                    self._free(place, run)
                self._go_on(place, run, run.fetch)

    def _take(self, chunk: Chunk) -> None:
        """Keep a part of a profile. A machine from which another one comes than was asked for is not used any more."""
        place = self._places.get(chunk.name)
        run = place.running.get(chunk.key) if place is not None else None
        if place is not None and run is not None and run.fetch is not None and run.key in self._fetching:
            self._go_on(place, run, run.fetch, chunk)

    def _go_on(self, place: _Place, run: _Run, fetch: Fetch, chunk: Chunk | None = None) -> None:
        """Take the part that has come, and ask for the next one; after the last, put all in place."""
        assert run.record is not None
        try:
            if chunk is not None:
                fetch.take(chunk.file, chunk.offset, chunk.data)
            part = fetch.next_part()
            if part is not None:
                self._expect(run, place, _GRACE_S)
                self.nodes.fetch(place.node.name, run.key, *part)
                return
            fetch.keep()
        except FetchError as error:
            self._give_up(place, str(error))
        except OSError as error:
            raise SweepError(error_in_words(error)) from error
        else:
            self._finish(place, run, self.keeper.write(run.record))

    def _checked(self, run: _Run, data: bytes) -> RunRecord:
        """The record that `data`, which may be anything, holds; raise _RefusedError if it is none that counts."""
        try:
            record = decode_record(data, self._path(run))
        except RecordError as error:
            raise self._set_aside(run, data, "the record was not readable", f": {error}") from error
        if record.config != run.config:
            raise self._set_aside(run, data, "the record is of another run")
        if (changed := self.keeper.changed_since(record)) is not None:
            raise _RefusedError(changed)
        warnings = (*record.warnings, _SHARED) if run.neighbours and _is_cpu_limited(record) else record.warnings
        neighbours = tuple(sorted(run.neighbours))
        return replace(record, lost_tries=tuple(run.lost), neighbours=neighbours, warnings=warnings)

    def _set_aside(self, run: _Run, data: bytes, what: str, why: str = "") -> "_RefusedError":
        write_atomically(self._path(run), data)
        return _RefusedError(f"{what}; kept as {quarantine(self._path(run)).name}{why}")

    def _path(self, run: _Run) -> Path:
        return self.keeper.runs / f"{run.key}.json"

    def _why_nothing_runs(self) -> str:
        left, needed = counted(len(self._waiting), "run"), max(run.width for run in self._waiting)
        slots = [place.node.slots for place in self._places.values()]
        found = f"{counted(len(slots), 'machine')} with at most {max(slots)} slot(s) each" if slots else "none"
        found += f", and {self._num_pending} pending" if self._num_pending else ""
        return (
            f"no machine for the {left} left within {self.wait_nodes_s:g} s: needed {needed} slot(s) on one, "
            f"found {found}; finished runs are kept, and the same command goes on"
        )
