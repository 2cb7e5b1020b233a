"""Reads a memory snapshot of PyTorch, the pickle that `torch.cuda.memory._dump_snapshot` writes.

A process of its own reads the pickle (unpickle.py), without torch and with bounded memory and time. Keys and actions
that a newer PyTorch adds are passed over, and counted.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec
import numpy as np

from cs336_systems.analysis.columns import Columns, Ints, ProfileError
from cs336_systems.analysis.files import read_head, what_it_is
from cs336_systems.analysis.memory import unpickle
from cs336_systems.analysis.memory.device_memory import (
    NO_STACK,
    Action,
    Blocks,
    BlockState,
    DeviceMemory,
    Events,
    Frame,
    Segments,
    Stacks,
)

NEEDED = "a memory snapshot of PyTorch"
HOW_TO_RECORD = (
    "record with `torch.cuda.memory._record_memory_history()` and write with `torch.cuda.memory._dump_snapshot(FILE)`"
)
MAX_BYTES = 8 * 2**30
"""Size of a file: some hundred million events."""
MAX_TOTAL_BYTES = 2**62
"""Sum of all sizes in a column, so that sums fit 64 bits."""
MAX_ADDRESS = 2**61
BASE_MEMORY_BYTES, MEMORY_PER_BYTE = 2**29, 20
"""What reading a file may take, of address space; a million events take 6 times the file."""
BASE_CPU_S, BYTES_PER_CPU_S = 10, 2**21
"""What reading a file may take, of processor time; a million events (110 MB) take 1 to 2 s."""

Setting = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One snapshot: what was allocated when it was taken, and how it came to that, as far back as was recorded."""

    path: Path
    devices: tuple[DeviceMemory, ...]
    """Those that have memory, or had."""
    stacks: Stacks
    settings: Mapping[str, Setting]
    """Settings of the allocator; those of a group as `group.name`."""
    notes: tuple[str, ...]


class _Description(msgspec.Struct):
    """What unpickle.py says of the columns that it hands over."""

    devices: list[tuple[int, int, int, int]]
    """Number of the device, then the lengths of its events, segments and blocks."""
    num_lists: int
    num_lists_of_segments: int
    shared: list[tuple[int, int]]
    """Numbers of lists of frames, each with the smaller number of the same list."""
    frames: list[Frame]
    stacks: list[list[int]]
    """Frames of each stack."""
    settings: dict[str, Setting]
    notes: tuple[str, ...]


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot at `path`; raise ProfileError where there is none."""
    reply = memoryview(_converted(path))
    (num_values,) = reply[:8].cast("q")
    described = msgspec.json.decode(reply[8 + 8 * num_values :], type=_Description)
    values = np.frombuffer(reply, dtype=np.int64, count=num_values, offset=8)
    stack_of_list, values = np.split(values, [described.num_lists])
    numbers = np.where(stack_of_list == 0, NO_STACK, np.arange(described.num_lists))
    for row, number in described.shared:
        numbers[row] = number
    reader = _Reader(path, values, numbers[described.num_lists_of_segments :])
    devices = tuple(reader.memory(device, lengths) for device, *lengths in described.devices)
    stacks = tuple(tuple(described.frames[number] for number in stack) for stack in described.stacks)
    return Snapshot(
        path=path,
        devices=devices,
        stacks=Stacks(different=stacks, of_list=stack_of_list),
        settings=described.settings,
        notes=described.notes,
    )


def _converted(path: Path) -> bytes:
    """What unpickle.py makes of the file."""
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
                # isolated: no module of another directory, such as the current one, can take the place of Python's own
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
        raise ProfileError(
            path, f"Python's unpickler does not survive it ({end}): no memory snapshot, or a damaged one"
        )
    return done.stdout


class _Reader:
    """Checks the columns, and puts those of each device together."""

    def __init__(self, path: Path, values: Ints, lists: Ints) -> None:
        """`lists` numbers the lists of frames, which are the last column of events and of blocks."""
        self._path, self._values, self._lists = path, values, lists

    def memory(self, device: int, lengths: Sequence[int]) -> DeviceMemory:
        """The next device in the columns."""
        events, segments, blocks = (
            self._table(kind, length) for kind, length in zip((Events, Segments, Blocks), lengths, strict=True)
        )
        for table, where, size in (
            (events, f"trace {device}", "size"),
            (segments, f"the segments of device {device}", "total_size"),
            (blocks, f"the blocks of device {device}", "size"),
        ):
            self._check_addresses(table["address"], f"addresses in {where}")
            self._check_sizes(table["num_bytes"], f"'{size}' of {where}")
        self._check_sizes(blocks["requested_bytes"], f"'requested_size' of the blocks of device {device}")
        is_expandable = segments.pop("is_expandable") != 0
        return DeviceMemory(
            device=device,
            events=Events(**events),
            segments=Segments(**segments, is_expandable=is_expandable),
            blocks=Blocks(**blocks),
        )

    def _table(self, kind: type[Columns], length: int) -> dict[str, Ints]:
        names = [field.name for field in fields(kind) if field.name != "stack"]
        table, self._values = np.split(self._values, [length * len(names)])
        columns = dict(zip(names, table.reshape(len(names), length), strict=True))
        if len(names) < len(fields(kind)):
            columns["stack"], self._lists = np.split(self._lists, [length])
        return columns

    def _check_sizes(self, sizes: Ints, where: str) -> None:
        if len(sizes) and (sizes.min() < 0 or sizes.sum(dtype=np.float64) > MAX_TOTAL_BYTES):
            worst = sizes.min() if sizes.min() < 0 else sizes.max()
            raise self._error(f"{where} needs sizes from 0 on that add up to at most {MAX_TOTAL_BYTES}, got {worst}")

    def _check_addresses(self, addresses: Ints, where: str) -> None:
        if len(addresses) and not 0 <= addresses.min() <= addresses.max() <= MAX_ADDRESS:
            worst = addresses.min() if addresses.min() < 0 else addresses.max()
            raise self._error(f"{where} needs addresses from 0 to {MAX_ADDRESS}, got {worst}")

    def _error(self, problem: str) -> ProfileError:
        return ProfileError(self._path, f"{problem}: no memory snapshot, or a damaged one; {HOW_TO_RECORD}")
