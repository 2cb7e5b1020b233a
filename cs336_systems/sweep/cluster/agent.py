"""The actor of the engine on each machine of a cluster; it starts the processes that measure.

The agent takes and returns bytes of JSON, or returns bytes of raw profiles. It holds these files open after removing
their names, so that they disappear when the agent ends for any reason. Processes that time runs do not load the engine.
"""

import functools
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep

import msgspec

from cs336_systems.sweep.cluster.fetch import CHUNK_BYTES, RawFile
from cs336_systems.sweep.cluster.measurer import Description, Reply, Request
from cs336_systems.sweep.process import child_environment, when_it_ends
from cs336_systems.sweep.run import num_slots


class Agent:
    """Starts one measuring process for each GPU of the machine, or one for its CPU.

    The agent ends after `lease_s` seconds without a message from its sweep, which may be unable to end it.
    """

    def __init__(self, device: str, modules: Sequence[str], lease_s: float) -> None:
        when_it_ends(os.getppid(), functools.partial(os._exit, 1))  # the engine's process on this machine
        self._renewed, self._lease_s = monotonic(), lease_s
        threading.Thread(target=self._end_unless_renewed, daemon=True).start()
        self._command = [sys.executable, "-m", f"{__package__}.measurer", str(os.getpid()), device, *modules]
        self._lock = threading.Lock()
        self._free_gpus: list[str] = []
        self._files: dict[tuple[str, str], int] = {}
        """Descriptors of raw profiles by the key of their run and their name."""
        self._measurers: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

    def renew(self) -> None:
        """Renew the lease, because the sweep goes on. Without this the agent and its processes end after `lease_s`."""
        self._renewed = monotonic()

    def end(self) -> None:
        """End this process and those that measure, because the sweep ends."""
        os._exit(1)

    def _end_unless_renewed(self) -> None:
        while (left_s := self._renewed + self._lease_s - monotonic()) > 0:
            sleep(left_s)
        os._exit(1)

    def describe(self) -> bytes:
        """Start the processes, and return the `Description` of the machine as one of them gives it, or a `Reply`."""
        first = self._started()
        line = _answer(first)
        try:
            found = msgspec.json.decode(line, type=Description)
        except msgspec.ValidationError:
            return line
        self._free_gpus = list(found.gpus)
        self._measurers.put(first)
        for more in [self._started() for _ in found.gpus[1:]]:
            _answer(more)
            self._measurers.put(more)
        return line

    def measure(self, data: bytes) -> bytes:
        """Measure what the `Request` says, on GPUs that are free, and return the `Reply`."""
        request = msgspec.json.decode(data, type=Request)
        width = num_slots(request.config)
        with self._lock:
            gpus, self._free_gpus = tuple(self._free_gpus[:width]), self._free_gpus[width:]
        measurer = self._measurers.get()
        try:
            assert measurer.stdin is not None
            measurer.stdin.write(msgspec.json.encode(msgspec.structs.replace(request, gpus=gpus)) + b"\n")
            measurer.stdin.flush()
            line = _answer(measurer)
            left = msgspec.json.decode(line, type=_Files)
            for file in left.files:
                self._files[request.config.key, file.name] = os.open(Path(left.folder) / file.name, os.O_RDONLY)
            if left.files:
                measurer.stdin.write(b"\n")
                measurer.stdin.flush()
            return line
        except OSError as error:
            return msgspec.json.encode(Reply(error=f"the process that measures has ended: {error}"))
        finally:
            self._measurers.put(measurer)
            with self._lock:
                self._free_gpus += gpus

    def fetch(self, key: str, name: str, offset: int) -> bytes:
        """The next part of a raw profile of the run; empty if there is none."""
        descriptor = self._files.get((key, name))
        return b"" if descriptor is None else os.pread(descriptor, CHUNK_BYTES, offset)

    def release(self, key: str) -> None:
        """Remove the raw profiles of the run."""
        for found in [found for found in self._files if found[0] == key]:
            os.close(self._files.pop(found))

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=child_environment(),
        )


class _Files(msgspec.Struct):
    """What a run has left on this machine: the part of a `Reply` that is read here."""

    files: tuple[RawFile, ...] = ()
    folder: str = ""


def _answer(measurer: subprocess.Popen[bytes]) -> bytes:
    assert measurer.stdout is not None
    line = measurer.stdout.readline()
    if line.endswith(b"\n"):
        return line
    return msgspec.json.encode(Reply(error=f"the process that measures ended with status {measurer.wait()}"))
