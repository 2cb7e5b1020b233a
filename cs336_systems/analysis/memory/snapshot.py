"""Reads a memory snapshot of PyTorch, the pickle that `torch.cuda.memory._dump_snapshot` writes,
without torch.

Every class, function, extension code and persistent id in the pickle is refused, and memory is
limited while it is read. What it holds is turned into columns of numbers. Actions and keys that are
unknown, as of a newer PyTorch, are passed over.
"""

import gc
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import psutil

from ...posix_needed import IS_POSIX
from ...text import counted
from ..columns import Columns, Ints, Mask, ProfileError, read_head, spread, what_it_is

if IS_POSIX:
    import resource

SNAPSHOT_FILE = "a memory snapshot of PyTorch"
HOW_TO_SNAPSHOT = (
    "record with `torch.cuda.memory._record_memory_history()` and write with "
    "`torch.cuda.memory._dump_snapshot(FILE)`"
)
BASE_MEMORY_BYTES, MEMORY_PER_BYTE = 2**29, 20
"""Address space that reading a file may take; a million events take 7 times the file."""
MAX_REASON = 200
"""Characters of a reason that are quoted."""
SHARED_POOL = (0, 0)
"""Id of the pool that is no private one."""
NO_STACK, NOT_RECORDED = 0, 1
"""Numbers of the stack without any frame, as threads without Python code have, and of that which
stands for stacks that were not recorded.
"""


class Frame(NamedTuple):
    """One call of a stack."""

    filename: str
    line: int
    name: str


Stack = tuple[Frame, ...]
"""The innermost call first."""
UNRECORDED: Stack = (Frame("", 0, ""),)
"""In place of a stack that was not recorded."""


class Annotation(NamedTuple):
    """The start or end of a range that the program named with `record_function`."""

    time_us: int
    name: str
    is_start: bool


class Action(IntEnum):
    """What the allocator did. An event's size is what the program asked for; that of a segment
    is what CUDA gave.
    """

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    """The memory may be used again; this follows the request at once, unless other streams use
    it too.
    """
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    """A part of an expandable segment got memory."""
    SEGMENT_UNMAP = 6
    OOM = 7
    SNAPSHOT = 8


class BlockState(IntEnum):
    """Whether a block was in use when the snapshot was taken."""

    ACTIVE_ALLOCATED = 0
    ACTIVE_PENDING_FREE = 1
    """Freed by the program, but another stream may still use it."""
    INACTIVE = 2


ACTIONS = {action.name.lower(): int(action) for action in Action}
STATES = {state.name.lower(): int(state) for state in BlockState} | {
    "active_awaiting_free": int(BlockState.ACTIVE_PENDING_FREE)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEvents(Columns):
    """What one device's allocator did, in order."""

    action: Ints
    """A value of `Action`."""
    address: Ints
    """For `OOM` the free bytes of the device; for `SNAPSHOT` 0."""
    num_bytes: Ints
    """For `OOM` the request, rounded up by the allocator; for `SNAPSHOT` the size of all active
    blocks.
    """
    stream: Ints
    time_us: Ints
    """Microseconds since 1970; 0 in files of PyTorch until 2.1."""
    stack: Ints
    """Number of the stack of the call that allocated or freed, or NO_STACK."""

    @property
    def has_clock(self) -> bool:
        """Whether the times go on with the events. PyTorch reads the clock under the allocator's
        lock, so that they never go back.
        """
        if not self.time_us.any():
            return False
        is_in_order = bool((np.diff(self.time_us) >= 0).all())
        return is_in_order and (len(self) == 1 or bool(self.time_us[-1] > self.time_us[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments(Columns):
    """Memory that the allocator had from CUDA when the snapshot was taken."""

    address: Ints
    num_bytes: Ints
    stream: Ints
    pool: Ints
    """0 for the memory that all code shares; another number for each private pool, as CUDA
    graphs and `torch.cuda.MemPool` have.
    """
    is_small: Mask
    """Whether it serves requests of at most 1 MiB."""
    is_expandable: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStates(Columns):
    """The parts of the segments when the snapshot was taken, in use or free."""

    segment: Ints
    """Row of its segment."""
    address: Ints
    num_bytes: Ints
    requested_bytes: Ints
    """The last request that the block served."""
    state: Ints
    """A value of `BlockState`."""
    stack: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device in a snapshot."""

    device: int
    events: AllocatorEvents
    segments: Segments
    blocks: BlockStates


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One snapshot: the memory of each device when it was taken, and the events before, as far
    back as recorded.
    """

    path: Path
    devices: tuple[DeviceMemory, ...]
    """The devices that have memory, or had some in the recording."""
    stacks: tuple[Stack, ...]
    """A stack's number in the columns is its place here."""
    labels: tuple[str, ...]
    """For each stack the `user_metadata` that the program had set, empty without; stacks of one
    label are all different.
    """
    annotations: tuple[Annotation, ...]
    """In the order of time."""
    settings: Mapping[str, Any]
    """Settings of the allocator, as in the file."""
    notes: tuple[str, ...]


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot at `path`; raise ProfileError if the file is not a snapshot."""
    head = read_head(path, 2, SNAPSHOT_FILE)
    if head[:1] != b"\x80":
        raise ProfileError(
            path, f"needed {SNAPSHOT_FILE}, but {what_it_is(path, head)}: {HOW_TO_SNAPSHOT}"
        )
    most = BASE_MEMORY_BYTES + MEMORY_PER_BYTE * path.stat().st_size
    try:
        with path.open("rb") as file, _limited(most):
            content = _Unpickler(file).load()
            try:
                return _Converter().convert(path, content)
            except (
                AttributeError,
                IndexError,
                KeyError,
                OverflowError,
                TypeError,
                ValueError,
            ) as error:
                problem = (
                    f"its content is not that of a snapshot ({type(error).__name__}: "
                    f"{str(error)[:MAX_REASON]})"
                )
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    except MemoryError:
        problem = f"it would take more than {most >> 20} MiB of memory"
    except Exception as error:  # the unpickler may raise nearly every kind of exception
        problem = f"the pickle cannot be read ({str(error)[:MAX_REASON]})"
    raise ProfileError(
        path, f"{problem}: truncated, damaged or no memory snapshot; {HOW_TO_SNAPSHOT}"
    )


@contextmanager
def _limited(num_bytes: int) -> Iterator[None]:
    """Within the block, this process gets at most so much more memory, where the system can limit
    it, and the garbage collector is off.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # of the millions of objects that are made, none is garbage
    try:
        with _address_space(num_bytes) if IS_POSIX else nullcontext():
            yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _address_space(num_bytes: int) -> Iterator[None]:
    """Limit the address space of this process to what it has and so much more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + num_bytes
    if soft != resource.RLIM_INFINITY:
        most = min(soft, most)
    with suppress(OSError, ValueError):  # macOS refuses some limits
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Unpickler(pickle.Unpickler):
    """The standard library's unpickler without any class, function, extension code or persistent
    id.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse all globals. Extension codes, of which none is registered here, would come here
        too.
        """
        raise pickle.UnpicklingError(
            f"{module[:40]!r} {name[:40]!r} would run code of the file, so nothing was loaded"
        )

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse all persistent ids."""
        raise pickle.UnpicklingError(
            f"persistent id {pid!r:.40} would run code of the file, so nothing was loaded"
        )


class _Converter:
    """Turns the dicts and lists of a snapshot into columns of 64-bit integers.

    What is not as PyTorch writes it raises whatever Python raises.
    """

    def __init__(self) -> None:
        """Start with no stacks but the two that stand for an absent and an unrecorded one."""
        self._unknown: Counter[str] = Counter()
        self._stacks: dict[tuple[Stack, str], int] = {
            ((), ""): NO_STACK,
            (UNRECORDED, ""): NOT_RECORDED,
        }
        self._numbers_of: defaultdict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
        """By label, the number of a stack by the addresses of its frames: most lists of frames
        differ, but share their frames.
        """
        self._frame_of: dict[int, Frame] = {}

    def convert(self, path: Path, content: Mapping[str, Any]) -> Snapshot:
        """The snapshot at `path`, whose pickle held `content`."""
        segments_of: dict[int, list[Mapping[str, Any]]] = {}
        for segment in content["segments"]:
            segments_of.setdefault(segment["device"], []).append(segment)
        trace_of = {device: trace for device, trace in enumerate(content["device_traces"]) if trace}
        devices = []
        for device in sorted({*segments_of, *trace_of}):
            segments = segments_of.get(device, [])
            memory = DeviceMemory(
                device=device,
                segments=_segments(segments),
                blocks=self._blocks(segments),
                events=self._events(trace_of.get(device, [])),
            )
            devices.append(memory)
        return Snapshot(
            path=path,
            devices=tuple(devices),
            stacks=tuple(stack for stack, _ in self._stacks),
            labels=tuple(label for _, label in self._stacks),
            annotations=_annotations(content.get("external_annotations", ())),
            settings=content.get("allocator_settings", {}),
            notes=tuple(self._notes()),
        )

    def _blocks(self, segments: Sequence[Mapping[str, Any]]) -> BlockStates:
        """The blocks of each segment in turn."""
        num_blocks = [len(segment["blocks"]) for segment in segments]
        blocks = [*chain.from_iterable(segment["blocks"] for segment in segments)]
        addresses = [*chain.from_iterable(map(_addresses, segments))]
        requested_bytes, with_frames = [], []
        for block in blocks:
            # until version 2.0, PyTorch wrote request and stack of the block's last use apart
            last: Mapping[str, Any] = (block.get("history") or ({},))[0]
            real_size = last.get("real_size", block["size"])
            requested_bytes.append(block.get("requested_size", real_size))
            with_frames.append(block if "frames" in block else last)
        segment, _ = spread(_ints(num_blocks))
        return BlockStates(
            segment=segment,
            address=_ints(addresses),
            num_bytes=_sizes(_values(blocks, "size")),
            requested_bytes=_sizes(requested_bytes),
            state=_ints([STATES[block["state"]] for block in blocks]),
            stack=self._stack_numbers(with_frames),
        )

    def _events(self, trace: Sequence[Mapping[str, Any]]) -> AllocatorEvents:
        """The events of known actions; those of others are counted."""
        known = [event for event in trace if event["action"] in ACTIONS]
        if len(known) < len(trace):
            actions = Counter(event["action"] for event in trace)
            for action in ACTIONS:
                del actions[action]
            self._unknown += actions
        addresses = []
        for event in known:
            key = "addr" if "addr" in event else "device_free"
            addresses.append(event[key])
        return AllocatorEvents(
            action=_ints([ACTIONS[event["action"]] for event in known]),
            address=_ints(addresses),
            num_bytes=_sizes(_values(known, "size")),
            stream=_ints(_values(known, "stream")),
            time_us=_ints([event.get("time_us", 0) for event in known]),
            stack=self._stack_numbers(known),
        )

    def _stack_numbers(self, things: Sequence[Mapping[str, Any]]) -> Ints:
        """The number of the stack of each event or block, the same for equal ones."""
        numbers = []
        for thing in things:
            frames = thing.get("frames")
            if frames is None:
                frames = _NO_FRAMES
            number_of = self._numbers_of[thing.get("user_metadata", "")]
            ids = tuple(map(id, frames))
            number = number_of.get(ids)
            if number is None:
                labelled = (self._stack(frames), _readable(thing.get("user_metadata", "")))
                number = self._stacks.setdefault(labelled, len(self._stacks))
                number_of[ids] = number
            numbers.append(number)
        return _ints(numbers)

    def _stack(self, frames: Iterable[Mapping[str, Any]]) -> Stack:
        """The stack with these frames, of which each is read once."""
        frame_of = self._frame_of
        for frame in frames:
            if id(frame) not in frame_of:
                file, name = _readable(frame["filename"]), _readable(frame["name"])
                frame_of[id(frame)] = Frame(file, int(frame["line"]), name)
        return tuple(frame_of[id(frame)] for frame in frames)

    def _notes(self) -> Iterator[str]:
        """A sentence on events whose action is unknown and which were passed over, if there were
        any.
        """
        if self._unknown:
            names = ", ".join(_readable(name)[:40] for name, _ in self._unknown.most_common(3))
            yield (
                f"Passed over: {counted(self._unknown.total(), 'event')} of unknown actions, "
                f"such as {names}."
            )


def _segments(segments: Sequence[Mapping[str, Any]]) -> Segments:
    """The segments of a snapshot as arrays. Pools are numbered, and 0 is the pool that all
    share.
    """
    pools = [tuple(segment.get("segment_pool_id", SHARED_POOL)) for segment in segments]
    private = sorted({*pools} - {SHARED_POOL})
    number_of = {pool: number for number, pool in enumerate([SHARED_POOL, *private])}
    is_small = [segment.get("segment_type") == "small" for segment in segments]
    is_expandable = [segment.get("is_expandable", False) for segment in segments]
    return Segments(
        address=_ints(_values(segments, "address")),
        num_bytes=_sizes(_values(segments, "total_size")),
        stream=_ints(_values(segments, "stream")),
        pool=_ints([number_of[pool] for pool in pools]),
        is_small=_ints(is_small) > 0,
        is_expandable=_ints(is_expandable) > 0,
    )


def _values(things: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """What each of the things has under the key."""
    return [thing[key] for thing in things]


_NO_FRAMES = [UNRECORDED[0]._asdict()]
"""In place of a missing list of frames."""


def _annotations(entries: Iterable[Mapping[str, Any]]) -> tuple[Annotation, ...]:
    """The starts and ends of ranges; other annotations are passed over."""
    annotations = []
    for entry in entries:
        if entry.get("stage") in ("START", "END") and "name" in entry and "time_us" in entry:
            name = _readable(entry["name"])
            annotations.append(Annotation(entry["time_us"], name, entry["stage"] == "START"))
    # sorting is stable: what happened in one microsecond stays in its order
    return tuple(sorted(annotations, key=attrgetter("time_us")))


def _addresses(segment: Mapping[str, Any]) -> Iterator[int]:
    """The address of each block; blocks fill their segment, and PyTorch until 2.0 writes their
    sizes only.
    """
    behind = segment["address"]
    for block in segment["blocks"]:
        yield block.get("address", behind)
        behind += block["size"]


def _ints(values: Sequence[Any]) -> Ints:
    """The values as an array of int64."""
    return np.fromiter(values, dtype=np.int64, count=len(values))


def _sizes(values: Sequence[Any]) -> Ints:
    """Sizes in bytes; raise ValueError for what is none."""
    sizes = _ints(values)
    wrong = [value for value in values if isinstance(value, float)]
    wrong += sizes[sizes < 0].tolist()
    if wrong:
        raise ValueError(f"sizes are whole numbers from 0 on, got {wrong[0]}")
    return sizes


def _readable(text: str) -> str:
    """The text without lone surrogates, which are no Unicode; names of files may hold them."""
    return text.encode(errors="replace").decode()
