"""The driver of a sweep on several machines: it decides where each run goes, and is the only one to write records.

The driver does not depend on the engine that connects the machines. An event costs time proportional to the logarithm
of the number of runs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cs336_systems.config import Device, Parallel, Profiler, RunConfig
from cs336_systems.files import error_in_words
from cs336_systems.record import Failure, RunRecord, Status
from cs336_systems.sweep.cluster.checked import RefusedError, checked_record, is_cpu_limited
from cs336_systems.sweep.cluster.conditions import Conditions
from cs336_systems.sweep.cluster.fetch import Fetch, FetchError
from cs336_systems.sweep.cluster.nodes import Answer, Chunk, Connected, Event, Joined, Left, Node, Nodes, Pending, Unfit
from cs336_systems.sweep.cluster.places import Place, Places, Run
from cs336_systems.sweep.cluster.waiting import Placement, Waiting
from cs336_systems.sweep.keep import Keeper
from cs336_systems.sweep.listener import Machines
from cs336_systems.sweep.run import MORE_FOR_RANKS_S, Loop, num_slots
from cs336_systems.sweep.store import SweepError
from cs336_systems.text import counted

MAX_TRIES = 3
"""How often a run is started before it counts as failed, if its machine is lost each time."""
_GRACE_S = 60.0
"""How much longer than a run's time limit, which the machine enforces itself, the driver waits for an answer."""
_TICK_S = 1.0
_MOST_FETCHES = 8
"""How many runs' profiles are fetched at a time. Each takes the memory of one chunk on both sides."""


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
    """Explains fetched profiles on this machine."""
    conditions: Conditions
    placement: Placement
    kept: Sequence[RunRecord] = ()
    """Records of an earlier sweep; further repeats stay on the same kind of machine if one is there at the start."""
    _places: Places = field(default_factory=Places)
    _newcomers: list[Node] = field(default_factory=list)
    """Machines that have joined since the last look."""
    _waiting: Waiting[Run] = field(init=False)
    _num_pending: int = 0
    """How many machines the cluster has ordered that are not there yet."""
    _to_fetch: deque[tuple[Place, Run]] = field(default_factory=deque)
    """Ended runs whose profiles wait, because _MOST_FETCHES others are being fetched."""
    _fetching: set[str] = field(default_factory=set)
    """Keys of the runs whose profiles are being fetched."""
    _on_cpu: bool = False
    """Whether explaining or fetching a profile would disturb other runs, because they are measured on the CPU."""

    @property
    def most_slots(self) -> int:
        """How many ranks the machines could run at once, at most."""
        return self._places.most_slots

    def run(self, todo: Sequence[RunConfig]) -> None:
        """Measure all; raise SweepError if there is no usable machine for too long."""
        self._waiting = Waiting(self.placement)
        self._on_cpu = any(config.device is Device.CPU for config in todo)
        for order, config in enumerate(todo):
            self._waiting.push(Run(order, config, config.key, config.digest, num_slots(config)))
        try:
            self._work()
        finally:
            self._places.drop_fetches()

    def _work(self) -> None:
        worked_s = ticked_s = self.nodes.now_s()
        while (self._waiting or self._places.num_running) and not self.is_stopped():
            for event in self.nodes.events(_TICK_S):
                self._handle(event)
            now_s = self.nodes.now_s()
            self._take_in_newcomers()
            for place, run in self._places.overdue(now_s):
                self._give_up(place, f"it did not answer within {run.patience_s:g} s")
            self._fetch_more()
            self._fill(now_s)
            if self.explainer.is_busy and not self._on_cpu:
                self.explainer.step(0.0)
            if self._places.num_running:
                worked_s = now_s
            elif self._waiting and now_s - worked_s >= self.wait_nodes_s:
                raise SweepError(self._why_nothing_runs())
            if now_s - ticked_s >= _TICK_S:
                ticked_s = now_s
                self._tick(worked_s + self.wait_nodes_s - now_s)

    def _tick(self, left_s: float) -> None:
        """Report the state to the listener; `left_s` is how much longer the sweep waits for a machine."""
        running = self._places.num_running
        patience_s = None if running or not self._waiting else max(0.0, left_s)
        self.keeper.listener.machines(Machines(len(self._places), self._num_pending, running, patience_s))
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

    def _note(self, line: str) -> None:
        self.keeper.listener.noted(line)

    def _take_in_newcomers(self) -> None:
        """Use those machines that have joined and meet the conditions of the sweep."""
        self.conditions.choose(self._newcomers)
        for node in self._newcomers:
            if (why := self.conditions.why_refused(node)) is not None:
                self.nodes.give_up(node.name, refused=True)
                self._note(f"{node.host} is not used: {why}")
            else:
                self._places.add(node)
                self._note(f"{node.host} joins: {node.identity.device_name}, {counted(node.slots, 'slot')}")
        self._newcomers.clear()
        if self._places and self.kept:
            self._go_on_from(self.kept)
            self.kept = ()

    def _go_on_from(self, kept: Sequence[RunRecord]) -> None:
        """Bind partly measured families to their kind of machine; set apart families that the CPU limits."""
        nodes = {(place.node.identity, place.node.host): place.node for place in self._places}
        kinds = {node.identity: node for node in nodes.values()}
        for record in kept:
            if is_cpu_limited(record):
                self._waiting.set_apart(record.config.digest)
            if record.environment is not None:
                identity = record.environment.identity
                found = nodes.get((identity, record.environment.host))
                found = found or (None if self.placement.same_node else kinds.get(identity))
                if found is not None:
                    self._waiting.settle(record.config.digest, found)

    def _fill(self, now_s: float) -> None:
        """Start as many runs as fit; repeat, because a family's first run binds its other runs to a kind of machine."""
        started = True
        while self._waiting and started:
            started = False
            for place in self._places:
                while place.free and (run := self._waiting.pop(place.node, place.free)):
                    self._start(run, place, now_s)
                    started = True

    def _start(self, run: Run, place: Place, now_s: float) -> None:
        held = place.node.slots if self._waiting.is_apart(run.family) else run.width
        more_s = MORE_FOR_RANKS_S if run.config.parallel is not Parallel.NONE else 0.0
        self._places.start(run, place, held, now_s)
        self._places.expect(run, place, now_s, self.timeout_s + _GRACE_S + more_s)
        self.nodes.start(place.node.name, run.config)
        self.keeper.listener.started(run.config, None)

    def _end(self, run: Run, place: Place) -> None:
        self._places.end(run, place)
        self._fetching.discard(run.key)

    def _give_up(self, place: Place, why: str) -> None:
        self.nodes.give_up(place.node.name)
        self._leave(place.node.name, why)

    def _leave(self, name: str, why: str) -> None:
        """Requeue the runs of a lost machine; a run that was lost MAX_TRIES times has failed."""
        self._newcomers = [node for node in self._newcomers if node.name != name]
        place = self._places.remove(name)
        if place is None:
            return
        self._note(f"{place.node.host} is lost: {why}")
        if not self._places.has_host(place.node.host):
            self._waiting.leave(place.node)
        for run in list(place.running.values()):
            self._end(run, place)
            run.lost.append(f"{place.node.host}: {why}")
            if len(run.lost) < MAX_TRIES:
                self._waiting.push(run)
                continue
            message = f"its machine was lost {MAX_TRIES} times: {'; '.join(run.lost)}"
            elapsed_s = self.nodes.now_s() - run.started_s
            failed = self.keeper.fail(run.config, Status.KILLED, Failure(message=message), elapsed_s)
            self.keeper.finish(failed)

    def _answered(self, answer: Answer) -> None:
        """Keep the record, but fetch the profile first, because a record implies that its profile is there.

        Answers from a machine that was given up, and for runs that it was not asked for, are ignored.
        """
        found = self._places.find(answer.name, answer.key)
        if found is None or found[1].record is not None:
            return
        place, run = found
        try:
            record = checked_record(run, answer.data, self.keeper)
            fetch = Fetch(run.config, self.keeper.runs, answer.files)
        except (RefusedError, FetchError) as error:
            elapsed_s, message = self.nodes.now_s() - run.started_s, f"from {place.node.host}: {error}"
            self._finish(place, run, self.keeper.refuse(run.config, message, elapsed_s))
            return
        if is_cpu_limited(record):
            self._waiting.set_apart(run.family)
            if run.neighbours and self._waiting.is_apart(run.family):
                self._again(place, run)
                return
        if run.config.profiler is Profiler.NONE:
            self._finish(place, run, self.keeper.write(record))
        else:
            run.record, run.fetch, run.deadline_s = record, fetch, float("inf")
            self._to_fetch.append((place, run))

    def _again(self, place: Place, run: Run) -> None:
        """Measure the run once more, with a machine to itself."""
        self._note(f"{run.config.label} is measured again without others on its machine, as the CPU limits it")
        self._release_profile(place, run)
        self._end(run, place)
        self._waiting.push(run)

    def _finish(self, place: Place, run: Run, record: RunRecord) -> None:
        """After the record is written, free the run's slots and queue its profile to be explained."""
        self._release_profile(place, run)
        self._end(run, place)
        self.keeper.finish(record)
        self.explainer.explain_later(record)

    def _release_profile(self, place: Place, run: Run) -> None:
        if run.config.profiler is not Profiler.NONE:
            self.nodes.release(place.node.name, run.key)

    def _fetch_more(self) -> None:
        """Have more profiles sent. Until then a run holds its slots, so that machines do not fill up with profiles."""
        while self._to_fetch and len(self._fetching) < _MOST_FETCHES:
            place, run = self._to_fetch.popleft()
            if run.fetch is not None and place.running.get(run.key) is run:
                self._fetching.add(run.key)
                if not self._on_cpu and not self._waiting.is_apart(run.family):
                    place.release(run)
                self._go_on(place, run, run.fetch)

    def _take(self, chunk: Chunk) -> None:
        """Keep a part of a profile that was asked for; another one is ignored."""
        found = self._places.find(chunk.name, chunk.key)
        if found is not None and found[1].fetch is not None and chunk.key in self._fetching:
            self._go_on(*found, found[1].fetch, chunk)

    def _go_on(self, place: Place, run: Run, fetch: Fetch, chunk: Chunk | None = None) -> None:
        """Write the received part and request the next one; after the last, put all files in place.

        A machine that sends another part than requested is not used any more.
        """
        assert run.record is not None
        try:
            if chunk is not None:
                fetch.take(chunk.file, chunk.offset, chunk.data)
            part = fetch.next_part()
            if part is not None:
                self._places.expect(run, place, self.nodes.now_s(), _GRACE_S)
                self.nodes.fetch(place.node.name, run.key, *part)
                return
            fetch.keep()
        except FetchError as error:
            self._give_up(place, str(error))
        except OSError as error:
            raise SweepError(error_in_words(error)) from error
        else:
            self._finish(place, run, self.keeper.write(run.record))

    def _why_nothing_runs(self) -> str:
        left, needed = counted(len(self._waiting), "run"), max(run.width for run in self._waiting)
        slots = [place.node.slots for place in self._places]
        found = f"{counted(len(slots), 'machine')} with at most {max(slots)} slot(s) each" if slots else "none"
        found += f", and {self._num_pending} pending" if self._num_pending else ""
        return (
            f"no machine for the {left} left within {self.wait_nodes_s:g} s: needed {needed} slot(s) on one, "
            f"found {found}; finished runs are kept, and the same command goes on"
        )
