"""What runs on the machines of the cluster, and what they and the sweep send each other."""

import contextlib
import os
import sys
from functools import cache, partial
from pathlib import Path

import msgspec
import psutil
import ray.experimental.internal_kv

from ...analysis.kernels import has_nsys
from ...config import Device, RunConfig
from ...files import error_in_words
from ...measure.environment import identity
from ...measure.nvml import Gpu, alike, visible_gpus
from ...record import Identity
from ...temporary import temporary_directory
from ...torch_needed import require_torch
from .. import store
from ..isolation import fork_server
from ..process import when_it_ends
from ..run import measure_one, num_slots


class Node(msgspec.Struct, frozen=True):
    """A machine's description of itself."""

    identity: Identity
    has_nsys: bool
    """Whether Nsight Systems is installed."""


class Needs(msgspec.Struct, frozen=True):
    """What a sweep requires of its machines."""

    identity: Identity | None = None
    """Conditions in which all machines must be alike; None if they may differ, or before the
    first machine is known.
    """
    require_device: str | None = None
    """Part of the name of the device that machines must have, without regard to case."""
    nsys: bool = False
    """Whether a run is to be profiled by Nsight Systems."""

    def why_left_out(self, node: Node) -> str | None:
        """Why the sweep does not use the machine; None if it does."""
        if (self.require_device or "").casefold() not in node.identity.device_name.casefold():
            return f"it has {node.identity.device_name}, needed {self.require_device}"
        if self.nsys and not node.has_nsys:
            return "it has no nsys on the PATH, which --nsys needs"
        if self.identity is None:
            return None
        different = [
            f"{name} is {present}, needed {needed}"
            for name, present, needed in store.differences(node.identity, self.identity)
        ]
        return f"{'; '.join(different)}; --allow-mixed uses it too" if different else None


class Request(msgspec.Struct, frozen=True):
    """A run to measure."""

    config: RunConfig
    timeout_s: float
    needs: Needs
    key: str
    """Where the task notes in Ray's store on which machine it runs, after those where it was
    started before.
    """


class Reply(msgspec.Struct, frozen=True):
    """What a task returns."""

    refused: str | None = None
    """Why the machine has not measured the run; None if it has."""
    files: dict[str, bytes] = {}
    """Contents of the files that the run has left, by their names."""


def describe(device: str) -> bytes:
    """The task that describes its machine for runs on the device: a `Node` in JSON; `null`
    without such a device.
    """
    if device == Device.CUDA and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        # so some Rays hide GPUs from a task that asks for none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    gpu = next(iter(visible_gpus()), None) if device == Device.CUDA else None
    if device == Device.CUDA and gpu is None:
        return b"null"
    require_torch("measuring")
    return msgspec.json.encode(Node(identity(Device(device), gpu), has_nsys()))


def measure(request: bytes) -> bytes:
    """The task of a `Request`: measure the run on this machine, on the GPUs that Ray has chosen."""
    asked = msgspec.json.decode(request, type=Request)
    _note_place(asked.key)
    _prepare()
    try:
        reply = Reply(files=_measured(asked))
    except KeyboardInterrupt:
        os._exit(1)  # Ray ends this process, and starts the run elsewhere
    except OSError as error:
        reply = Reply(refused=error_in_words(error))
    except Exception as error:  # the driver would unpickle an exception
        reply = Reply(refused=str(error) or type(error).__name__)
    return msgspec.msgpack.encode(reply)


def _note_place(key: str) -> None:
    """Add this machine to those where the run was started, in Ray's store."""
    kv = ray.experimental.internal_kv
    earlier = kv._internal_kv_get(key) or b""
    place = ray.get_runtime_context().get_node_id()
    kv._internal_kv_put(key, earlier + place.encode() + b" ", overwrite=True)


def _measured(asked: Request) -> dict[str, bytes]:
    """The files that the run leaves, by name; raise SweepError if this machine does not have what
    it needs.
    """
    config = asked.config
    # Ray has set it; a local run has PyTorch's own number
    if "OMP_NUM_THREADS" not in psutil.Process().environ():
        os.environ.pop("OMP_NUM_THREADS", None)
    gpus: tuple[Gpu, ...] = ()
    if config.device is Device.CUDA:
        gpus = alike(visible_gpus())
        if len(gpus) < num_slots(config):
            raise store.SweepError(
                f"it has {len(gpus)} GPUs of one kind that Ray gives to the run, needed "
                f"{num_slots(config)}"
            )
    first_gpu = next(iter(gpus), None)
    node = Node(identity(config.device, first_gpu), not asked.needs.nsys or has_nsys())
    why = asked.needs.why_left_out(node)
    if why is not None:
        raise store.SweepError(why)
    files = {}
    with temporary_directory() as scratch, store.exclusive_gpus(gpus):
        runs = scratch / "runs"
        runs.mkdir()
        measure_one(config, runs, timeout_s=asked.timeout_s, gpus=gpus or (None,), explains=False)
        for path in result_paths(config, runs):
            if path.is_file():
                files[path.name] = path.read_bytes()
    return files


@cache
def _prepare() -> None:
    """Let this process of Ray end with the one that has started it, and what it starts not import
    Ray's program.

    Without the former, Ray lets a task go on for ever where it dies. The first call of
    `fork_server` must come before this process adopts orphans, as the shell that removes temporary
    files is to be one.
    """
    fork_server()
    when_it_ends(os.getppid(), partial(os._exit, 1))
    with contextlib.suppress(AttributeError):
        del sys.modules["__main__"].__file__


def result_paths(config: RunConfig, runs: Path) -> list[Path]:
    """Paths of all files that the run may leave. The record is the last: it implies that the
    others are there.
    """
    return [*store.raw_profile_paths(config, runs), runs / f"{config.key}.json"]


def decoded(data: bytes, config: RunConfig) -> Reply:
    """The reply of a task, decoded from msgpack. Raises ValueError or TypeError for data that
    cannot be a reply about this run.
    """
    reply = msgspec.msgpack.decode(data, type=Reply)
    names = [path.name for path in result_paths(config, Path("runs"))]
    for name in reply.files:
        if name not in names:
            raise ValueError(f"needed files among {', '.join(names)}, got {name[:80]!r}")
    if reply.refused is None and names[-1] not in reply.files:
        raise ValueError("needed a record, got none")
    return reply
