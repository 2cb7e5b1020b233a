"""A sweep whose runs are measured on several machines; this one keeps the records."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from cs336_systems.config import RunConfig
from cs336_systems.measure.inputs import all_inputs
from cs336_systems.record import Identity, load_records
from cs336_systems.sweep.cluster.conditions import Conditions
from cs336_systems.sweep.cluster.driver import Driver
from cs336_systems.sweep.cluster.nodes import Nodes
from cs336_systems.sweep.interrupts import Interrupts
from cs336_systems.sweep.keep import Keeper, resume
from cs336_systems.sweep.listener import Listener
from cs336_systems.sweep.locks import exclusive
from cs336_systems.sweep.run import Outcome
from cs336_systems.sweep.store import make_writable, refuse_to_mix, write_environment


def sweep_on_nodes(
    configs: Sequence[RunConfig],
    directory: Path,
    listener: Listener,
    connect: Callable[[], contextlib.AbstractContextManager[Nodes]],
    *,
    timeout_s: float = 600.0,
    fresh: bool = False,
    allow_mixed: bool = False,
    require_device: str | None = None,
    wait_nodes_s: float = 180.0,
) -> Outcome:
    """Measure those of `configs` that have no result in `directory` yet, on the machines that `connect` brings.

    Raises SweepError and LockedError as `run_sweep` does, and SweepError if no machine is there for `wait_nodes_s`.
    """
    started = monotonic()
    runs = make_writable(directory / "runs")
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive(directory / ".lock", f"the directory {directory}"))
        kept, todo, problems = resume(configs, runs, fresh=fresh)
        inputs = () if allow_mixed else all_inputs(configs)
        known = next((record.environment.identity for record in kept if record.environment), None)
        identity: Identity | None = None if allow_mixed else known
        if identity is not None:
            refuse_to_mix(kept, identity, inputs, directory)
        listener.planned(kept, todo, problems)
        keeper, most_slots, interrupted = Keeper(runs, listener, inputs), 0, False
        if todo:
            nodes = stack.enter_context(connect())
            interrupts = stack.enter_context(Interrupts())
            conditions = Conditions(identity, allow_mixed, require_device)
            driver = Driver(keeper, nodes, timeout_s, wait_nodes_s, lambda: interrupts.count > 0, conditions)
            driver.run(todo)
            most_slots, interrupted = driver.most_slots, interrupts.count > 0
        every, _ = load_records(runs)
        write_environment(every, directory)
        return Outcome(
            records=tuple(every),
            measured=tuple(keeper.measured),
            interrupted=interrupted,
            wall_s=monotonic() - started,
            slots=most_slots,
        )
