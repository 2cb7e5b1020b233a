"""Calls of Ray itself: connect, list machines, and start agents and tasks on them."""

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any, BinaryIO

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import cs336_systems
from cs336_systems.config import Device
from cs336_systems.sweep.cluster.agent import Agent
from cs336_systems.sweep.cluster.measurer import describe
from cs336_systems.sweep.process import die_with_forker


def begin(parent: str) -> BinaryIO:
    """Make this process end with its parent (`parent` is its id), and return standard output, for messages only.

    All other output, such as Ray's, goes to standard error.
    """
    die_with_forker(signal.SIGKILL)  # by the kernel, since Ray can hold Python's lock while it waits
    if os.getppid() != int(parent):
        os._exit(1)  # it has ended already
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out


def connect(address: str, patience_s: float) -> str:
    """Connect to the cluster at this address and return the directory of its logs.

    Raises OSError if nothing answers there within `patience_s`, and RuntimeError, ValueError or RayError if Ray fails.
    """
    if address == "auto":
        address = _this_cluster()
    _check_address(address, patience_s)
    context = ray.init(
        address=address,
        configure_logging=False,
        log_to_driver=False,
        runtime_env={"py_modules": [str(Path(cs336_systems.__file__).parent)]},
    )
    return str(Path(context["session_dir"]) / "logs")


def _this_cluster() -> str:
    """The address of the cluster that this machine belongs to; it may have died, as Ray keeps its last address."""
    try:
        return str(canonicalize_bootstrap_address_or_die("auto"))
    except ConnectionError:
        raise OSError("this machine belongs to none; `ray start` makes it part of one") from None


def _check_address(address: str, patience_s: float) -> None:
    """Raise OSError if nothing listens at HOST:PORT, for which Ray would wait a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), patience_s).close()
    except OSError as error:
        raise OSError(f"nothing listens at {address} ({error.strerror or error})") from error


def this_machine() -> str:
    """The id of the machine on which this process runs."""
    return str(ray.get_runtime_context().get_node_id())


def num_pending() -> int | None:
    """How many machines the autoscaler has ordered that are not there yet; None if it does not say."""
    with contextlib.suppress(Exception):  # part of Ray that not every cluster has, and that may change
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return len(status.pending_nodes) + sum(int(launch.count) for launch in status.pending_launches)
    return None


def machines() -> dict[str, dict[str, Any]]:
    """What Ray says of each machine that is alive, by its id."""
    return {machine["NodeID"]: machine for machine in ray.nodes() if machine["Alive"]}


def resource_of(device: Device) -> str:
    """Ray's name of the resource that runs on this device need."""
    return "GPU" if device is Device.CUDA else "CPU"


def free_resources() -> dict[str, dict[str, float]]:
    """Resources of each machine that no job has reserved, by the machine's id."""
    found: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return found


def ask(machine: str, device: Device) -> "ray.ObjectRef[bytes]":
    """Have a new process on the machine describe it, which takes none of its GPUs."""
    options = {
        "num_cpus": 0, "num_gpus": 0, "max_retries": 0, "scheduling_strategy": _only_on(machine),
        # Ray before 2.51 hides the GPUs from a task that takes none
        "runtime_env": {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
    }  # fmt: skip
    return ray.remote(max_calls=1)(describe).options(**options).remote(device.value)


def start_agent(machine: str, num_cpus: float, num_gpus: float, *arguments: object) -> Any:  # noqa: ANN401
    """Start an `Agent` that reserves these CPUs and GPUs of the machine, and return Ray's handle of it."""
    options = {
        "num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": _only_on(machine), "max_restarts": 0,
        "max_concurrency": max(1, int(num_gpus)) + 1,  # a run on each GPU, and one call beside them
    }  # fmt: skip
    return ray.remote(Agent).options(**options).remote(*arguments)


def _only_on(machine: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(machine, soft=False)


def in_a_line(error: BaseException | None) -> str:
    """The error in one line: the first line of Ray's message, or plainer words."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return in_a_line(error.cause)
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "Ray cannot reach it any more"
    if isinstance(error, ray.exceptions.RayActorError):
        return "the machine died, or the agent on it"
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
