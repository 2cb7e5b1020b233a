"""The sweep itself: it gives runs to Ray, and keeps what they return."""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import msgspec
import ray.experimental.internal_kv
from ray.exceptions import RayError

from ...config import Device, Profiler, RunConfig
from ...files import error_in_words, write_atomically
from ...record import Failure, RunRecord, Status
from ...text import counted
from .. import store
from ..isolation import Interrupts, preload_to_explain, spare_children
from ..keep import Keeper, Listener, resume
from ..process import adopt_orphans
from ..run import Loop, Outcome, num_slots, outcome
from . import connection
from .machines import Machine, alive_machines, count_devices, look, ready
from .task import Needs, Request, decoded, measure, result_paths

MAX_TRIES = 3
"""How often Ray starts a run whose machine or process dies each time."""
_TICK_S = 1.0
_SPARE_S = 60.0
"""How much longer than its time limit a run may take, with all that Ray does for it."""


def sweep_on_cluster(
    configs: Sequence[RunConfig],
    directory: Path,
    listener: Listener,
    *,
    address: str,
    timeout_s: float,
    fresh: bool,
    allow_mixed: bool,
    require_device: str | None,
    wait_nodes_s: float,
) -> Outcome:
    """Measure those of `configs` that have no result in `directory` yet, on the machines of the
    cluster at `address`.

    The caller holds the directory's lock. Raises SweepError and LockedError as `run_sweep` does,
    and SweepError if there is no machine for `wait_nodes_s`.
    """
    runs = store.make_writable(directory / "runs")
    with contextlib.ExitStack() as stack:
        keeper, todo, unexplained, present = resume(
            configs, runs, listener, fresh=fresh, allow_mixed=allow_mixed
        )
        adopt_orphans()
        preload_to_explain()
        interrupts = stack.enter_context(Interrupts())
        explainer = Loop(keeper, (None,), timeout_s, interrupts, deque(unexplained))
        stack.callback(explainer.end)
        if todo:
            with connection.connected(address):
                spare_children()
                interrupts.at_once = False
                nsys = any(config.profiler is Profiler.NSYS for config in todo)
                needs = Needs(identity=present, require_device=require_device, nsys=nsys)
                _Driver(keeper, explainer, todo, wait_nodes_s, needs, allow_mixed).run()
        explainer.run(())  # what is left; the machines are free for others
        return outcome(keeper, interrupted=interrupts.count > 0)


@dataclass(slots=True)
class _Driver:
    """Has the runs measured until nothing is left to do, or a signal interrupts the sweep."""

    keeper: Keeper
    explainer: Loop
    """Explains profiles on this machine; if CPUs are measured, after all runs."""
    todo: Sequence[RunConfig]
    wait_nodes_s: float
    needs: Needs
    allow_mixed: bool
    _waiting: deque[RunConfig] = field(default_factory=deque)
    """The widest first, because the GPUs that they need would otherwise never be free at the
    same time.
    """
    _running: dict[Any, tuple[RunConfig, float, str]] = field(default_factory=dict)
    """Runs that Ray has, by what it will return, each with the time at which Ray got it, and the
    key of its place.
    """
    _deaths: Counter[RunConfig] = field(default_factory=Counter)
    """How often a run had died before a machine refused it, after which Ray counts its starts
    anew.
    """
    _keys: str = field(default_factory=lambda: f"cs336-{uuid4()}-")
    """How the keys of this sweep begin."""
    _left_out: set[str] = field(default_factory=set)
    """Ids of the machines that the sweep does not use, or that are lost."""
    _there: dict[str, str] = field(default_factory=dict)
    """Hosts of the machines that the sweep uses, by id."""
    _lost_s: dict[str, float] = field(default_factory=dict)
    """When machines were lost whose runs Ray may not have started elsewhere yet, by id."""
    _worked_s: float = field(default_factory=monotonic)
    """When a machine was last there that had slots for a run."""
    _cores: float = 0.0
    """How many cores a run on a CPU takes: all of its machine."""

    def run(self) -> None:
        """Measure all runs on the machines of the cluster; raise SweepError if no machine could be
        used for too long.
        """
        self._waiting.extend(sorted(self.todo, key=num_slots, reverse=True))
        used: list[Machine] = []
        while not used and not self.explainer.interrupts.count:
            machines, self.needs = look(self._device, self.needs, allow_mixed=self.allow_mixed)
            used = [machine for machine in machines if self._is_used(machine)]
            widths = [machine.runs_at_once(self._device) for machine in used]
            self._check_patience(max(widths, default=0))
            if not used:
                time.sleep(_TICK_S)
        for cores, _ in Counter(machine.count for machine in used).most_common(1):
            self._cores = cores
        measure_task = ray.remote(max_calls=0)(measure)
        while (self._waiting or self._running) and not self.explainer.interrupts.count:
            slots = self._slots(alive_machines())
            self._submit(measure_task, slots)
            for reference in ready([*self._running], _TICK_S, least=1):
                self._take(reference, *self._running.pop(reference))
            self._ask_again()
            if self.explainer.is_busy and self._device is Device.CUDA:
                self.explainer.step(0.0)
            self._check_patience(max(slots.values(), default=0))
            self.keeper.listener.tick()
        delete = ray.experimental.internal_kv._internal_kv_del
        connection.promptly(partial(delete, self._keys, del_by_prefix=True))

    @property
    def _device(self) -> Device:
        """The device of all runs."""
        return self.todo[0].device

    def _is_used(self, machine: Machine) -> bool:
        """Whether the sweep uses the machine; a machine that does not meet its needs is left out
        from now on.
        """
        if machine.refused is None:
            # where an earlier look found that it could not be used
            self._left_out.discard(machine.id)
        else:
            self._leave_out(machine.id, machine.host, machine.refused)
        return machine.refused is None

    def _leave_out(self, name: str, host: str, why: str) -> None:
        """Have Ray place no run on the machine with this id, and tell the listener why, once."""
        if name not in self._left_out:
            self._left_out.add(name)
            self._there.pop(name, None)
            self.keeper.listener.noted(f"{host} is not used: {why}")

    def _places(self, key: str) -> list[str]:
        """Ids of the machines where the run with this key has begun, the last being where it is;
        none if it waits.
        """
        get = partial(ray.experimental.internal_kv._internal_kv_get, key)
        noted = connection.promptly(get) or b""
        return noted.decode().split()

    def _ask_again(self) -> None:
        """Give Ray again what does not end, although its machine was lost a while ago, or it must
        have ended long ago.

        Ray does not notice the former while connections to the machine stay open, nor that a
        process is stopped. Runs that have noted no machine, as they wait or have only just begun,
        lose nothing.
        """
        now_s = monotonic()
        gone = {name for name, lost_s in self._lost_s.items() if now_s - lost_s >= connection.RAY_S}
        for reference, (config, started_s, key) in [*self._running.items()]:
            is_late = now_s - started_s >= MAX_TRIES * (self.explainer.timeout_s + _SPARE_S)
            if not is_late and not gone:
                continue
            places = self._places(key)
            if not is_late and places and places[-1] not in gone:
                continue
            del self._running[reference]
            ray.cancel(reference, force=True)
            self._waiting.append(config)
            if places and places[-1] in self._there:
                host = self._there[places[-1]]
                self._leave_out(places[-1], host, "a run there does not end")
        for name in gone:
            del self._lost_s[name]

    def _slots(self, alive: dict[str, dict[str, Any]]) -> dict[str, int]:
        """How many ranks each machine in use can run at once; notes the machines that join and
        that are lost.
        """
        slots: dict[str, int] = {}
        is_on_cpu = self._device is Device.CPU
        for name, listed in alive.items():
            host = str(listed["NodeManagerHostname"])
            count = count_devices(listed, self._device)
            if is_on_cpu and count not in (0, self._cores):
                why = f"Ray counts {count:g} of its cores, needed {self._cores:g} as of the others"
                self._leave_out(name, host, why)
            if not count or name in self._left_out:
                continue
            slots[name] = 1 if is_on_cpu else int(count)
            if name not in self._there:
                self._there[name] = host
                runs = counted(slots[name], "run")
                self.keeper.listener.noted(f"{host} joins: {runs} at a time")
        for name in self._there.keys() - alive.keys():
            self._lost_s[name] = monotonic()
            # else a run may wait for what Ray has asked of it, while its connections are open
            self._left_out.add(name)
            host = self._there.pop(name)
            self.keeper.listener.noted(f"{host} is lost; Ray starts what ran there elsewhere")
        return slots

    def _submit(self, task: Any, slots: dict[str, int]) -> None:  # noqa: ANN401
        """Give Ray as many runs as the machines have slots for, so that runs which Ray has are
        in progress.
        """
        running = sum(num_slots(config) for config, *_ in self._running.values())
        free = sum(slots.values()) - running
        widest = max(slots.values(), default=0)
        for config in [*self._waiting]:
            width = num_slots(config)
            # a narrower run may fit, and the machine for this one may be held by another job
            if width <= min(free, widest):
                free -= width
                self._waiting.remove(config)
                self._start(task, config)

    def _start(self, task: Any, config: RunConfig) -> None:  # noqa: ANN401
        """Give Ray a run, to start it on a machine that the sweep uses."""
        resources: dict[str, float] = {"num_cpus": self._cores}
        if self._device is Device.CUDA:
            resources = {"num_cpus": 0, "num_gpus": num_slots(config)}
        selector = None
        if self._left_out:
            selector = {"ray.io/node-id": f"!in({','.join(self._left_out)})"}
        retries = MAX_TRIES - 1 - self._deaths[config]
        placed = task.options(**resources, max_retries=retries, label_selector=selector)
        key = f"{self._keys}{uuid4()}"
        request = Request(config, self.explainer.timeout_s, self.needs, key)
        reference = placed.remote(msgspec.json.encode(request))
        self._running[reference] = config, monotonic(), key
        self.keeper.listener.started(config, None)

    def _take(self, reference: object, config: RunConfig, started_s: float, key: str) -> None:
        """Keep the record and the profile of a run that has ended, or give the run to another
        machine.
        """
        elapsed_s = monotonic() - started_s
        try:
            reply = decoded(connection.promptly(partial(ray.get, reference)), config)
            why = reply.refused
        except (ray.exceptions.LocalRayletDiedError, ray.exceptions.RaySystemError):
            raise
        except RayError as error:
            tries = f"given up by Ray, which starts a run {MAX_TRIES} times at most"
            failure = Failure(message=f"{tries}: {connection.in_a_line(error)}")
            self.keeper.finish(self.keeper.fail(config, Status.KILLED, failure, elapsed_s))
            return
        except (ValueError, TypeError, RecursionError) as error:
            why = f"no reply of a run: {error}"
        if why is None:
            record = self._kept(config, reply.files, elapsed_s)
            self.keeper.finish(record)
            self.explainer.explain_later(record)
        elif places := self._places(key):
            *died, place = places
            self._deaths[config] += len(died)
            self._leave_out(place, self._there.get(place, place), why)
            self._waiting.appendleft(config)
        else:
            self.keeper.finish(self.keeper.refuse(config, why, elapsed_s))

    def _kept(self, config: RunConfig, files: dict[str, bytes], elapsed_s: float) -> RunRecord:
        """Write the files that a run has left on its machine into this directory, and return its
        record once checked.
        """
        try:
            (self.keeper.runs / f"{config.key}.json").unlink(missing_ok=True)
            store.fresh_profile_path(config, self.keeper.runs)
            for path in result_paths(config, self.keeper.runs):
                if path.name in files:
                    write_atomically(path, files[path.name])
        except OSError as error:
            raise store.SweepError(error_in_words(error)) from error
        return self.keeper.read(config, elapsed_s)

    def _check_patience(self, most: int) -> None:
        """Raise SweepError if for too long no machine has had slots for any run; `most` is how
        many one has now.
        """
        left = [*self._waiting, *(config for config, *_ in self._running.values())]
        needed = min(map(num_slots, left), default=0)
        if needed <= most:
            self._worked_s = monotonic()
        elif monotonic() - self._worked_s >= self.wait_nodes_s:
            raise store.SweepError(
                f"no machine for the {counted(len(left), 'run')} left within "
                f"{self.wait_nodes_s:g} s: needed {needed} slot(s) on one, found {most}"
                f"{connection.RESUMES}"
            )
