"""Reads a memory snapshot of PyTorch, the pickle that `torch.cuda.memory._dump_snapshot` writes.

A process of its own (unpickle.py) reads the pickle without torch and with bounded memory and time. Unknown keys and
actions, as of a newer PyTorch, are ignored and counted.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from cs336_systems.analysis.columns import Columns, Ints, ProfileError
from cs336_systems.analysis.files import read_head, what_it_is
from cs336_systems.analysis.memory import unpickle
from cs336_systems.analysis.memory.lifetimes import (
    Action,
    Blocks,
    BlockState,
    DeviceMemory,
    Events,
    Frame,
    Segments,
    Stack,
)

NEEDED = "a memory snapshot of PyTorch"
HOW_TO_RECORD = (
    "record with `torch.cuda.memory._record_memory_history()` and write with `torch.cuda.memory._dump_snapshot(FILE)`"
)
MAX_BYTES = 8 * 2**30
"""Largest size of a file, some hundred million events."""
MAX_TOTAL_BYTES = 2**62
"""Largest sum of the sizes in a column, so that sums fit 64 bits."""
MAX_ADDRESS = 2**61
BASE_MEMORY_BYTES, MEMORY_PER_BYTE = 2**29, 20
"""Address space that reading a file may take; a million events take 7 times the file."""
BASE_CPU_S, BYTES_PER_CPU_S = 10, 2**21
"""Processor time that reading a file may take; a million events (110 MB) take 1 to 2 s."""

Setting = str | int | float | bool
Table = TypeVar("Table", bound=Columns)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One snapshot: the memory of each device when it was taken, and the events before, as far back as recorded."""

    path: Path
    devices: tuple[DeviceMemory, ...]
    """The devices that have memory, or had some in the recording."""
    stacks: tuple[Stack, ...]
    """All different; a stack's number in the columns is its place here."""
    settings: Mapping[str, Setting]
    """Settings of the allocator; those of a group as `group.name`."""
    notes: tuple[str, ...]


class _Description(msgspec.Struct):
    """What unpickle.py writes about the columns that it hands over."""

    devices: list[tuple[int, int, int, int]]
    """For each device its number and the lengths of its tables: segments, blocks, events."""
    frames: list[Frame]
    stacks: list[list[int]]
    """The numbers of the frames of each stack."""
    settings: dict[str, Setting]
    notes: tuple[str, ...]


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot at `path`; raise ProfileError if the file is not a snapshot."""
    reply = memoryview(_converted(path))
    (num_bytes,) = reply[:8].cast("q")
    described = msgspec.json.decode(reply[8 + num_bytes :], type=_Description)
    devices = tuple(_devices(described.devices, np.frombuffer(reply[8 : 8 + num_bytes], dtype=np.int64)))
    for memory in devices:
        _check(path, memory)
    return Snapshot(
        path=path,
        devices=devices,
        stacks=tuple(tuple(described.frames[number] for number in stack) for stack in described.stacks),
        settings=described.settings,
        notes=described.notes,
    )


def _converted(path: Path) -> bytes:
    """What unpickle.py writes about the file; raise ProfileError if it refuses the file or dies of it."""
    head = read_head(path, 2, NEEDED)
    if head[:1] != b"\x80":
        raise ProfileError(path, f"needed {NEEDED}, but {what_it_is(path, head)}: {HOW_TO_RECORD}")
    codes = {
        "actions": {action.name.lower(): action for action in Action},
        "states": {state.name.lower(): state for state in BlockState}
        | {"active_awaiting_free": BlockState.ACTIVE_PENDING_FREE},
    }
    try:
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                problem = f"needed at most {MAX_BYTES} bytes, got {size}: record fewer events (max_entries)"
                raise ProfileError(path, problem)
            cpu_s = BASE_CPU_S + size // BYTES_PER_CPU_S
            limits = [str(limit) for limit in (BASE_MEMORY_BYTES + MEMORY_PER_BYTE * size, cpu_s)]
            done = subprocess.run(
                # isolated: a module in another directory, such as the current one, cannot replace one of Python's own
                [sys.executable, "-I", "-S", unpickle.__file__, str(os.getpid()), *limits, msgspec.json.encode(codes)],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then kills the other
                check=False,
            )
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    if done.returncode == unpickle.REFUSED:
        raise ProfileError(path, f"{done.stdout.decode(errors='replace')}; {HOW_TO_RECORD}")
    if done.returncode == -signal.SIGXCPU:
        raise ProfileError(path, f"it would take more than {cpu_s} s to read: no memory snapshot, or a damaged one")
    if done.returncode:
        end = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit status {done.returncode}"
        raise ProfileError(path, f"Python's unpickler crashed on it ({end}): no memory snapshot, or a damaged one")
    return done.stdout


def _devices(devices: Sequence[Sequence[int]], values: Ints) -> Iterator[DeviceMemory]:
    """The memory of each device, whose tables lie one after the other in `values`, column by column."""
    sizes = [
        length * len(fields(kind))
        for _, *lengths in devices
        for kind, length in zip((Segments, Blocks, Events), lengths, strict=True)
    ]
    tables = iter(np.split(values, np.cumsum(sizes)))
    for device, *_ in devices:
        yield DeviceMemory(
            device=device,
            segments=_table(Segments, next(tables)),
            blocks=_table(Blocks, next(tables)),
            events=_table(Events, next(tables)),
        )


def _table(kind: type[Table], values: Ints) -> Table:
    names = [field.name for field in fields(kind)]
    return kind(**dict(zip(names, values.reshape(len(names), -1), strict=True)))


def _check(path: Path, memory: DeviceMemory) -> None:
    """Raise ProfileError for addresses and sizes that no allocator has, so that all sums fit 64 bits."""
    events, segments, blocks, device = memory.events, memory.segments, memory.blocks, memory.device
    for values, where, most in (
        (events.address, f"addresses in trace {device}", MAX_ADDRESS),
        (events.num_bytes, f"'size' of trace {device}", MAX_TOTAL_BYTES),
        (segments.address, f"addresses in the segments of device {device}", MAX_ADDRESS),
        (segments.num_bytes, f"'total_size' of the segments of device {device}", MAX_TOTAL_BYTES),
        (blocks.address, f"addresses in the blocks of device {device}", MAX_ADDRESS),
        (blocks.num_bytes, f"'size' of the blocks of device {device}", MAX_TOTAL_BYTES),
        (blocks.requested_bytes, f"'requested_size' of the blocks of device {device}", MAX_TOTAL_BYTES),
    ):
        largest = values.max(initial=0) if most == MAX_ADDRESS else values.sum(dtype=np.float64)
        if values.min(initial=0) < 0 or largest > most:
            needed = "from 0 to" if most == MAX_ADDRESS else "from 0 on that add up to at most"
            worst = min(values.min(), 0) or values.max()
            problem = f"{where} needs values {needed} {most}, got {worst}: no memory snapshot, or a damaged one"
            raise ProfileError(path, f"{problem}; {HOW_TO_RECORD}")
