"""Machines of a Ray cluster, reached through a separate process, which isolates Ray's threads, output and crashes."""

import contextlib
import importlib.util
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import BinaryIO

import msgspec

from cs336_systems.config import RunConfig
from cs336_systems.sweep.cluster.measurer import Request
from cs336_systems.sweep.cluster.messages import MAX_LINE_BYTES, Command, Message, Part
from cs336_systems.sweep.cluster.nodes import Event, Joined, Look
from cs336_systems.sweep.cluster.patience import PATIENCE
from cs336_systems.sweep.process import child_environment
from cs336_systems.sweep.run import modules_of
from cs336_systems.sweep.store import SweepError

_CHUNK_BYTES = 1 << 16
_CONNECT_S = 60.0
"""How long the connection may take. Ray itself waits for longer where the cluster of an old address has died."""
_LOOK_S = 150.0
"""How long a look at all machines may take."""
_END_S = 5.0
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}


def is_installed() -> bool:
    """Whether Ray is installed, without importing it, which takes seconds."""
    return importlib.util.find_spec("ray") is not None


@contextlib.contextmanager
def connected(address: str, configs: Sequence[RunConfig], timeout_s: float) -> Iterator["RayNodes"]:
    """The machines of the cluster at `address` ("auto": the one that this machine belongs to), with agents on them.

    The runs to measure are `configs`, each of which may take `timeout_s`.
    """
    with tempfile.TemporaryFile() as errors:
        device, patience = configs[0].device, msgspec.json.encode(PATIENCE).decode()
        words = [sys.executable, "-m", f"{__package__}.bridge", str(os.getpid()), address, device.value, patience]
        process = subprocess.Popen(
            [*words, *modules_of(configs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env=child_environment() | _QUIET,
        )
        try:
            yield RayNodes(process, errors, address, timeout_s)
        finally:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(timeout=_END_S)
            process.kill()
            process.wait()


def look(address: str, device: str) -> Look:
    """The machines of the cluster at `address`, described for runs on the device; raise SweepError without it."""
    words = [sys.executable, "-m", f"{__package__}.look", str(os.getpid()), address, device]
    environment = child_environment() | _QUIET
    try:
        done = subprocess.run(words, capture_output=True, timeout=_LOOK_S, env=environment, check=False)
        found = msgspec.json.decode(done.stdout, type=Look)
    except subprocess.TimeoutExpired:
        found = Look(failure=f"it did not answer within {_LOOK_S:g} s")
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        found = Look(failure=f"the process connected to Ray has ended: {''.join(lines[-1:])}")
    if found.failure is not None:
        raise SweepError(f"no connection to the Ray cluster {address}: {found.failure}")
    return found


class RayNodes:
    """Speaks to the process that is connected to Ray."""

    def __init__(self, process: "subprocess.Popen[bytes]", errors: BinaryIO, address: str, timeout_s: float) -> None:
        self._process, self._errors, self._address, self._timeout_s = process, errors, address, timeout_s
        self._began_s = self.now_s()
        self._rest = b""
        """The beginning of a line whose end has not arrived yet."""
        self._is_connected = False
        self._first: list[Joined] | None = []
        """Machines that have joined so far; None once all have joined that were there at the start."""

    def start(self, name: str, config: RunConfig) -> None:
        """Have this machine measure the run."""
        self._tell(Command(name, Request(config, self._timeout_s)))

    def fetch(self, name: str, key: str, file: str, offset: int) -> None:
        """Have this machine send the next part of a file of the run."""
        self._tell(Command(name, part=Part(key, file, offset)))

    def release(self, name: str, key: str) -> None:
        """Let this machine remove the files of the run."""
        self._tell(Command(name, part=Part(key)))

    def give_up(self, name: str, *, refused: bool = False) -> None:
        """End what runs on this machine, and use it no more under this name."""
        self._tell(Command(name, refused=refused))

    def now_s(self) -> float:
        """The time in seconds, by a clock that is never set back."""
        return monotonic()

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call; raise SweepError if the connection is lost."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            if not self._is_connected and self.now_s() - self._began_s > _CONNECT_S:
                raise self._lost(f"it did not answer within {_CONNECT_S:g} s")
            return []
        chunk = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
        if not chunk:
            raise self._lost(f"the process connected to Ray has ended{self._last_words()}")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise self._lost("a message without an end")
        return [event for line in lines for event in self._events(msgspec.json.decode(line, type=Message))]

    def _events(self, message: Message) -> Iterator[Event]:
        if message.failed is not None:
            raise self._lost(message.failed)
        self._is_connected = True
        if self._first is not None and message.joined is not None:
            self._first.append(message.joined)
        elif self._first is not None and message.left is not None:
            self._first = [each for each in self._first if each.node.name != message.left.name]
        elif event := next((found for name in message.__struct_fields__ if (found := getattr(message, name))), None):
            yield event
        elif self._first is not None:
            yield from self._first
            self._first = None

    def _tell(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except OSError:
            return  # the next call of `events` reports that the process has ended, and why

    def _last_words(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _CHUNK_BYTES))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _lost(self, why: str) -> SweepError:
        return SweepError(
            f"no connection to the Ray cluster {self._address}: {why}; finished runs are kept, "
            "and the same command goes on"
        )
