"""A process that measures one run at a time on a machine of a cluster, in workers as a local sweep does.

The process writes a description of the machine to standard output, then reads requests from standard input and writes
replies, each a line of JSON. All other output goes to standard error. The process ends with the one that started it.
Raw profiles stay in a temporary directory until the next line of input, which means that they have been opened.
"""

import contextlib
import hashlib
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec

from cs336_systems.analysis.kernels.nsys import has_nsys
from cs336_systems.config import Device, RunConfig
from cs336_systems.files import error_in_words
from cs336_systems.measure.environment import identity
from cs336_systems.measure.nvml import Gpu, alike, visible_gpus
from cs336_systems.record import Identity, RunRecord
from cs336_systems.sweep.cluster.fetch import RawFile
from cs336_systems.sweep.cluster.nodes import Node
from cs336_systems.sweep.isolation import WorkerProcess, preload, spare_children
from cs336_systems.sweep.locks import LockedError, at_work, cpu_lock_path, exclusive, gpu_lock_path
from cs336_systems.sweep.process import adopt_orphans, begin_worker, when_it_ends
from cs336_systems.sweep.run import measure_one
from cs336_systems.sweep.store import SweepError, raw_profile_paths


class Description(msgspec.Struct, frozen=True):
    """A machine's description of itself."""

    host: str
    identity: Identity
    gpus: tuple[str, ...]
    """UUIDs of the GPUs of one kind that the process can see; empty where the CPU is measured."""
    has_nsys: bool
    """Whether Nsight Systems is installed."""

    def node(self, name: str) -> Node:
        """The machine as the driver knows it, under this name."""
        return Node(
            name=name, host=self.host, identity=self.identity, slots=len(self.gpus) or 1, has_nsys=self.has_nsys
        )

    @property
    def kind(self) -> tuple[Identity, bool]:
        """The properties for which a sweep may refuse the machine."""
        return self.identity, self.has_nsys


class Request(msgspec.Struct, frozen=True):
    """A run to measure."""

    config: RunConfig
    timeout_s: float
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that it takes, which the agent of the machine chooses."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a run, failed or not, or the reason why the machine cannot measure."""

    record: RunRecord | None = None
    error: str | None = None
    files: tuple[RawFile, ...] = ()
    """Files that the run's profiler has left, also of a failed run."""
    folder: str = ""
    """Where the files are, on this machine."""


def describe(device: str) -> bytes:
    """The `Description` of this machine for runs on the device; `null` if it has no such device."""
    gpus = _gpus(Device(device))
    return msgspec.json.encode(None if device == Device.CUDA and not gpus else _description(Device(device), gpus))


def _gpus(device: Device) -> tuple[Gpu, ...]:
    return alike(visible_gpus()) if device is Device.CUDA else ()


def _description(device: Device, gpus: Sequence[Gpu]) -> Description:
    found = identity(device, gpus[0] if gpus else None)
    return Description(platform.node(), found, tuple(gpu.uuid for gpu in gpus), has_nsys())


def main(words: Sequence[str]) -> None:
    """Serve the process `words[0]`; measure on the device `words[1]`, with the modules `words[2:]` preloaded."""
    # kill only this process: the one that removes its temporary directory must outlive it
    when_it_ends(int(words[0]), lambda: os.kill(os.getpid(), signal.SIGKILL))
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
        with TemporaryDirectory(prefix="cs336-", dir=get_temp_dir()) as scratch:
            reply = _measured(request, [gpu for gpu in gpus if gpu.uuid in request.gpus], Path(scratch) / "runs")
            _say(replies, reply)
            if reply.files:
                sys.stdin.buffer.readline()


@contextlib.contextmanager
def _removed_at_the_end(directory: str) -> Iterator[None]:
    """Have the directory removed soon after this process has ended, also if it is killed, as Ray does at the end."""
    words = ["sh", "-c", 'read -r _; sleep 1; rm -rf -- "$1"', "sh", directory]
    remover = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert remover.stdin is not None
    spare_children()
    with remover.stdin:
        yield


def _nothing(log: Connection) -> None:
    begin_worker(log)


def _say(replies: BinaryIO, message: Any) -> None:  # noqa: ANN401
    replies.write(msgspec.json.encode(message) + b"\n")
    replies.flush()


def _measured(request: Request, gpus: Sequence[Gpu], runs: Path) -> Reply:
    try:
        runs.mkdir()
        with contextlib.ExitStack() as stack:
            for gpu in gpus:
                stack.enter_context(exclusive(gpu_lock_path(gpu.uuid), f"{gpu.name} ({gpu.uuid})"))
            are_others = stack.enter_context(at_work(None if gpus else cpu_lock_path()))
            record = measure_one(
                request.config, runs,
                timeout_s=request.timeout_s, gpus=gpus or (None,), are_others=are_others, explains=False,
            )  # fmt: skip
        paths = [path for path in raw_profile_paths(request.config, runs) if path.is_file()]
        return Reply(record, files=tuple(map(_described, paths)), folder=str(paths[0].parent) if paths else "")
    except (SweepError, LockedError) as error:
        return Reply(error=str(error))
    except OSError as error:
        return Reply(error=error_in_words(error))


def _described(path: Path) -> RawFile:
    with path.open("rb") as file:
        return RawFile(path.name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), _removed_at_the_end(get_temp_dir()):
        main(sys.argv[1:])
