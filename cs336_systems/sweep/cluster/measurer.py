"""A process that measures one run at a time on a machine of a cluster, in workers as a local sweep does.

It reads requests from standard input and writes replies to standard output, each a line of JSON; first of all, a
description of the machine. What else is printed goes to standard error. It ends with the process that started it.
"""

import contextlib
import os
import platform
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec

from cs336_systems.config import Device, RunConfig
from cs336_systems.files import error_in_words
from cs336_systems.measure.environment import identity
from cs336_systems.measure.nvml import Gpu, alike, visible_gpus
from cs336_systems.record import Identity, RunRecord
from cs336_systems.sweep.isolation import WorkerProcess, preload
from cs336_systems.sweep.locks import LockedError, at_work, cpu_lock_path, exclusive, gpu_lock_path
from cs336_systems.sweep.process import adopt_orphans, begin_worker, die_with
from cs336_systems.sweep.run import measure_one
from cs336_systems.sweep.store import SweepError


class Description(msgspec.Struct, frozen=True):
    """What a machine says of itself."""

    host: str
    identity: Identity
    gpus: tuple[str, ...]
    """UUIDs of the GPUs of one kind that the process can see; empty where the CPU is measured."""


class Request(msgspec.Struct, frozen=True):
    """A run to measure."""

    config: RunConfig
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that it takes."""
    timeout_s: float


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """How it ended: the record, also of a run that failed, or why the machine cannot measure."""

    record: RunRecord | None = None
    error: str | None = None


def describe(device: str) -> bytes:
    """The `Description` of this machine for runs on the device; `null` if it has no such device."""
    gpus = _gpus(Device(device))
    return msgspec.json.encode(None if device == Device.CUDA and not gpus else _description(Device(device), gpus))


def _gpus(device: Device) -> tuple[Gpu, ...]:
    return alike(visible_gpus()) if device is Device.CUDA else ()


def _description(device: Device, gpus: Sequence[Gpu]) -> Description:
    found = identity(device, gpus[0] if gpus else None)
    return Description(platform.node(), found, tuple(gpu.uuid for gpu in gpus))


def main(words: Sequence[str]) -> None:
    """Serve the process `words[0]`; measure on the device `words[1]`, with the modules `words[2:]` preloaded."""
    die_with(int(words[0]))
    device = Device(words[1])
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    adopt_orphans()
    gpus = _gpus(device)
    if device is Device.CUDA and not gpus:
        _say(replies, Reply(error="no NVIDIA GPU that this process can see"))
        return
    preload(*words[2:])
    WorkerProcess(_nothing).reap()  # once it has answered, the fork server has imported torch
    _say(replies, _description(device, gpus))
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        _say(replies, _measured(request, [gpu for gpu in gpus if gpu.uuid in request.gpus]))


def _nothing(log: Connection) -> None:
    begin_worker(log)


def _say(replies: BinaryIO, message: Any) -> None:  # noqa: ANN401
    replies.write(msgspec.json.encode(message) + b"\n")
    replies.flush()


def _measured(request: Request, gpus: Sequence[Gpu]) -> Reply:
    try:
        with contextlib.ExitStack() as stack:
            for gpu in gpus:
                stack.enter_context(exclusive(gpu_lock_path(gpu.uuid), f"{gpu.name} ({gpu.uuid})"))
            are_others = stack.enter_context(at_work(None if gpus else cpu_lock_path()))
            runs = Path(stack.enter_context(TemporaryDirectory(prefix="cs336-", dir=get_temp_dir())))
            return Reply(
                record=measure_one(
                    request.config, runs, timeout_s=request.timeout_s, gpus=gpus or (None,), are_others=are_others
                )
            )
    except (SweepError, LockedError) as error:
        return Reply(error=str(error))
    except OSError as error:
        return Reply(error=error_in_words(error))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
