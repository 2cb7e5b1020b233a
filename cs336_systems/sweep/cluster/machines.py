"""The machines of the cluster, and which of them a sweep uses."""

import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...config import Device
from ...record import Identity
from . import connection
from .task import Needs, Node, describe

_ANSWER_S = 15.0
"""How long all machines together may take to describe themselves; of one that is silent for longer,
the runs themselves find out whether it has what the sweep needs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of the cluster as a sweep that begins now sees it."""

    id: str
    host: str
    address: str
    count: float
    """Number of its GPUs as Ray counts them, or of its cores if CPUs are measured."""
    node: Node | None
    refused: str | None
    """Why the sweep does not use it; None if it does."""

    def runs_at_once(self, device: Device) -> int:
        """How many ranks the machine runs at a time: one on each GPU, or one on its CPU."""
        if self.refused is not None:
            return 0
        return int(self.count) if device is Device.CUDA else 1


def look(device: Device, needs: Needs, *, allow_mixed: bool) -> tuple[list[Machine], Needs]:
    """All machines of the cluster, and what a sweep requires of those that join later.

    If `needs` names no identity, the machines that have most slots choose it, unless all may be
    mixed.
    """
    alive = alive_machines()
    # its process goes on to measure, not on a GPU
    task = ray.remote(max_calls=int(device is Device.CUDA))(describe)
    answers = {
        name: task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
        ).remote(device.value)
        for name in alive
    }
    ready([*answers.values()], _ANSWER_S)

    def machines(needs: Needs) -> list[Machine]:
        """All machines of the cluster with what they answered, each refused if it does not meet
        `needs`.
        """
        return [
            _machine(name, alive[name], answer, device, needs) for name, answer in answers.items()
        ]

    slots: Counter[Identity] = Counter()
    for machine in machines(needs):
        if machine.node is not None and machine.refused is None:
            slots[machine.node.identity] += machine.runs_at_once(device)
    if needs.identity is None and not allow_mixed and slots:
        needs = msgspec.structs.replace(needs, identity=slots.most_common(1)[0][0])
    return sorted(machines(needs), key=attrgetter("host", "address", "id")), needs


def ready(references: list[Any], patience_s: float, least: int | None = None) -> list[Any]:
    """What tasks have returned and Ray has brought here, after this time or once so many are
    here, which may be all.
    """
    if not references:
        time.sleep(patience_s)
        return []
    waiting = partial(
        ray.wait, references, num_returns=least or len(references), timeout=patience_s
    )
    return [*connection.promptly(waiting, patience_s + connection.RAY_S)[0]]


def alive_machines() -> dict[str, dict[str, Any]]:
    """The machines of the cluster, by id; raise OSError if its head or Ray on this machine has
    died or hangs.
    """

    def find() -> dict[str, dict[str, Any]]:
        """Ray's nodes that are alive, by their id; raise OSError if this machine's node is not
        among them.
        """
        context = ray.get_runtime_context()
        connection.checked_address(context.gcs_address)
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        here = alive.get(context.get_node_id())
        if here is None:
            raise OSError(
                "Ray has died on this machine, and takes along what was started from here"
            )
        connection.checked_address(f"{here['NodeManagerAddress']}:{here['NodeManagerPort']}")
        return alive

    return connection.promptly(find)


def _machine(
    name: str,
    listed: dict[str, Any],
    answer: Any,  # noqa: ANN401
    device: Device,
    needs: Needs,
) -> Machine:
    """The machine as Ray has `listed` it, with its answer to `describe`, and whether the sweep
    uses it.
    """
    node = None
    refused = None
    count = count_devices(listed, device)
    try:
        node = msgspec.json.decode(ray.get(answer, timeout=0), type=Node | None)
        refused = "it has no NVIDIA GPU" if node is None else needs.why_left_out(node)
    except ray.exceptions.GetTimeoutError:
        pass  # its runs find out
    except (RayError, msgspec.DecodeError, TypeError, RecursionError) as error:
        refused = connection.in_a_line(error)
    if not count:
        units = "GPUs" if device is Device.CUDA else "cores"
        refused = f"Ray counts none of its {units}"
    return Machine(
        id=name,
        host=str(listed["NodeManagerHostname"]),
        address=str(listed["NodeManagerAddress"]),
        count=count,
        node=node,
        refused=refused,
    )


def count_devices(listed: dict[str, Any], device: Device) -> float:
    """How many of its GPUs, or of its cores if CPUs are measured, Ray counts."""
    return float(listed["Resources"].get("GPU" if device is Device.CUDA else "CPU", 0))
