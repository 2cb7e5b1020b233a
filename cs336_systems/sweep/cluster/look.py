"""The process that asks a Ray cluster for its machines, and each machine for a description, without reserving anything.

It writes a `Look` to standard output as JSON.
"""

import os
import sys
from collections.abc import Sequence

import msgspec
import ray

from cs336_systems.config import Device
from cs336_systems.sweep.cluster.connection import ask, begin, connect, free_resources, in_a_line, machines, resource_of
from cs336_systems.sweep.cluster.measurer import Description
from cs336_systems.sweep.cluster.nodes import Look, Machine
from cs336_systems.sweep.cluster.patience import PATIENCE

_ANSWER_S = 60.0
"""How long all machines together may take to describe themselves; the package is sent to them first."""


def _look(asked: str) -> Look:
    found = machines()
    has_gpus = any(machine["Resources"].get("GPU") for machine in found.values())
    device = Device(asked) if asked != "auto" else Device.CUDA if has_gpus else Device.CPU
    free = free_resources()
    answers = {name: ask(name, device) for name in found}
    ray.wait([*answers.values()], num_returns=len(answers), timeout=_ANSWER_S)
    seen = []
    for name, machine in found.items():
        description, why = _answer(answers[name])
        seen.append(
            Machine(
                name=name,
                host=str(machine["NodeManagerHostname"]),
                address=str(machine["NodeManagerAddress"]),
                node=None if description is None else description.node(name),
                count=machine["Resources"].get(resource_of(device), 0),
                free=free.get(name, {}).get(resource_of(device), 0),
                failure=why,
            )
        )
    return Look(device=device, machines=tuple(sorted(seen, key=lambda each: (each.host, each.address, each.name))))


def _answer(reference: "ray.ObjectRef[bytes]") -> tuple[Description | None, str | None]:
    """The description that a machine gives, or why there is none."""
    try:
        data = ray.get(reference, timeout=0)
        return msgspec.json.decode(data, type=Description | None), "it has no NVIDIA GPU" if data == b"null" else None
    except ray.exceptions.GetTimeoutError:
        return None, f"it did not answer within {_ANSWER_S:g} s"
    except (ray.exceptions.RayError, msgspec.DecodeError) as error:
        return None, in_a_line(error)


def main(words: Sequence[str]) -> None:
    """Look, for the process `words[0]`, at the cluster at `words[1]`, for runs on the device `words[2]`."""
    out = begin(words[0])
    try:
        connect(words[1], PATIENCE.head_s)
        found = _look(words[2])
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        found = Look(failure=in_a_line(error))
    out.write(msgspec.json.encode(found))
    out.flush()
    os._exit(0)  # a normal exit of Python could wait for a head that is gone


if __name__ == "__main__":
    main(sys.argv[1:])
