"""A sweep whose runs are measured on several machines; this one keeps the records."""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from cs336_systems.config import Profiler, RunConfig
from cs336_systems.measure.inputs import all_inputs
from cs336_systems.record import Identity
from cs336_systems.sweep.cluster.conditions import Conditions
from cs336_systems.sweep.cluster.driver import Driver
from cs336_systems.sweep.cluster.nodes import Nodes
from cs336_systems.sweep.cluster.waiting import ANYWHERE, Placement
from cs336_systems.sweep.interrupts import Interrupts
from cs336_systems.sweep.isolation import preload_to_explain, spare_children
from cs336_systems.sweep.keep import Keeper, resume
from cs336_systems.sweep.listener import Listener
from cs336_systems.sweep.locks import exclusive
from cs336_systems.sweep.process import adopt_orphans
from cs336_systems.sweep.run import Loop, Outcome, outcome
from cs336_systems.sweep.store import make_writable, refuse_to_mix

_MOST_EXPLAINERS = 4
"""How many profiles are explained at a time at most, of which each can take gigabytes of memory."""


def sweep_on_nodes(
    configs: Sequence[RunConfig],
    directory: Path,
    listener: Listener,
    connect: Callable[[Sequence[RunConfig], float], contextlib.AbstractContextManager[Nodes]],
    *,
    timeout_s: float = 600.0,
    fresh: bool = False,
    allow_mixed: bool = False,
    require_device: str | None = None,
    placement: Placement = ANYWHERE,
    wait_nodes_s: float = 180.0,
) -> Outcome:
    """Measure those of `configs` that have no result in `directory` yet, on the machines that `connect` yields.

    `connect` is called with the runs to measure and the time limit of each, unless there are no runs.
    Raises SweepError and LockedError as `run_sweep` does, and SweepError if there is no machine for `wait_nodes_s`.
    """
    started = monotonic()
    runs = make_writable(directory / "runs")
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive(directory / ".lock", f"the directory {directory}"))
        kept, todo, unexplained, problems = resume(configs, runs, fresh=fresh)
        inputs = () if allow_mixed else all_inputs(configs)
        known = next((record.environment.identity for record in kept if record.environment), None)
        identity: Identity | None = None if allow_mixed else known
        if identity is not None:
            refuse_to_mix(kept, identity, inputs, directory)
        listener.planned(kept, todo, problems)
        if unexplained or any(config.profiler is not Profiler.NONE for config in todo):
            adopt_orphans()
            preload_to_explain()
        keeper, most_slots = Keeper(runs, listener, inputs), 0
        interrupts = stack.enter_context(Interrupts())
        explainers = (None,) * min(_MOST_EXPLAINERS, max(1, (os.cpu_count() or 1) // 2))
        explainer = Loop(keeper, explainers, timeout_s, interrupts, lambda: False, deque(unexplained))
        stack.callback(explainer.end)
        if todo:
            with connect(todo, timeout_s) as nodes:
                spare_children()
                needs_nsys = any(config.profiler is Profiler.NSYS for config in todo)
                conditions = Conditions(identity, allow_mixed, require_device, needs_nsys)
                driver = Driver(
                    keeper,
                    nodes,
                    timeout_s,
                    wait_nodes_s,
                    lambda: interrupts.count > 0,
                    explainer,
                    conditions,
                    placement,
                    kept,
                )
                driver.run(todo)
                most_slots = driver.most_slots
        explainer.run(())  # what is left; the machines are free for others
        return outcome(keeper, interrupted=interrupts.count > 0, wall_s=monotonic() - started, slots=most_slots)
