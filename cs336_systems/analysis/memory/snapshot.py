"""Reads a memory snapshot of PyTorch, the pickle that `torch.cuda.memory._dump_snapshot` writes, without torch.

Every class, function, extension code and persistent id in the pickle is refused, and memory is limited while it is
read. What it holds is turned into columns of numbers and never walked, printed or compared as a whole, because it may
contain itself. Unknown keys and actions, as of a newer PyTorch, are ignored and counted.
"""

import gc
import pickle
import resource
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import psutil

from cs336_systems.analysis.columns import Columns, ProfileError
from cs336_systems.analysis.files import read_head, what_it_is
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
MAX_TOTAL_BYTES = 2**62
"""Largest sum of the sizes in a column, so that sums fit 64 bits."""
MAX_ADDRESS = 2**61
BASE_MEMORY_BYTES, MEMORY_PER_BYTE = 2**29, 20
"""Address space that reading a file may take; a million events take 7 times the file."""
CHUNK = 400
"""Events that are converted at a time, so that they stay in the processor's cache."""
INT = "l"
"""C's long, which `struct` packs twice as fast as `q`; it has 64 bits on Linux and macOS."""
MAX_ALIKE = 16
"""Most stacks with the same first frame and length that a list is compared with, before its frames are looked up."""
MAX_SHOWN = 40
"""Characters of a value that a message quotes."""
MAX_REASON = 200
"""Characters of the unpickler's own message that are quoted."""
MAX_NOTES = 6
"""Notes on unknown actions and keys."""
KNOWN_KEYS = frozenset(
    {"action", "addr", "size", "stream", "time_us", "frames", "device_free", "compile_context", "user_metadata",
     "forward_frames", "pool_id"}
)  # fmt: skip
"""Keys of an event, up to torch 2.13."""
ACTIONS = {action.name.lower(): int(action) for action in Action}
STATES = {state.name.lower(): int(state) for state in BlockState} | {
    "active_awaiting_free": int(BlockState.ACTIVE_PENDING_FREE)
}

Items = Sequence[Mapping[str, Any]]
Setting = str | int | float | bool
Wanted = TypeVar("Wanted")
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


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot at `path`; raise ProfileError if the file is not a snapshot."""
    head = read_head(path, 2, NEEDED)
    if head[:1] != b"\x80":
        raise ProfileError(path, f"needed {NEEDED}, but {what_it_is(path, head)}: {HOW_TO_RECORD}")
    most = BASE_MEMORY_BYTES + MEMORY_PER_BYTE * path.stat().st_size
    try:
        with path.open("rb") as file, _limited(most):
            snapshot = _Converter().convert(path, PlainUnpickler(file).load())
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    except MemoryError:
        problem = f"it would take more than {most >> 20} MiB of memory: no memory snapshot, or a damaged one"
    except ContentError as error:
        problem = f"{error}: no memory snapshot, or a damaged one"
    except Exception as error:  # the unpickler may raise nearly every kind of exception
        problem = f"the pickle cannot be read ({str(error)[:MAX_REASON]}): truncated, damaged or no memory snapshot"
    else:
        for memory in snapshot.devices:
            _check(path, memory)
        return snapshot
    raise ProfileError(path, f"{problem}; {HOW_TO_RECORD}")


@contextmanager
def _limited(num_bytes: int) -> Iterator[None]:
    """Within the block, this process gets at most so much more memory, and the garbage collector is off."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + num_bytes
    was_enabled = gc.isenabled()
    gc.disable()  # of the millions of objects that are made, none is garbage
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if was_enabled:
            gc.enable()


class ContentError(ValueError):
    """The pickle can be read, but is no snapshot."""


class PlainUnpickler(pickle.Unpickler):
    """The standard library's unpickler without any class, function, extension code or persistent id."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse all globals. Extension codes, of which none is registered here, would come here too."""
        raise pickle.UnpicklingError(f"{shown(module)} {shown(name)} would run code of the file, so nothing was loaded")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse all persistent ids."""
        raise pickle.UnpicklingError(f"persistent id {shown(pid)} would run code of the file, so nothing was loaded")


class _Converter:
    """Turns the dicts and lists of a snapshot into columns of 64-bit integers."""

    def __init__(self) -> None:
        self._unknown: Counter[str] = Counter()
        self._frames: dict[tuple[str, int, str], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._number_of: dict[tuple[int, ...], int] = {}
        """By the addresses of all frames of a list, the number of its stack."""
        self._alike: dict[int, tuple[list[list[Any]], list[int]]] = {}
        """By the address of the first frame and the length: some such lists, and the numbers of their stacks."""

    def convert(self, path: Path, content: object) -> Snapshot:
        """The snapshot at `path`, whose pickle held `content`; raise ContentError if that is no snapshot."""
        top = need(content, dict, "the top level")
        traces = need(top.get("device_traces"), list, "'device_traces'")
        segments = need(top.get("segments"), list, "'segments'")
        check_types(segments, {dict}, "'segments'", "dicts")
        check_annotations(top)
        segments_of: dict[int, list[Mapping[str, Any]]] = {}
        column_of(segments, "device", "segments")  # raises unless all are numbers
        for segment in segments:
            segments_of.setdefault(int(segment["device"]), []).append(segment)
        trace_of = {device: need(trace, list, f"trace {device}") for device, trace in enumerate(traces) if trace}
        devices = tuple(
            DeviceMemory(
                device=device,
                segments=self._segments(segments_of.get(device, []), f"the segments of device {device}"),
                blocks=self._blocks(segments_of.get(device, []), f"the blocks of device {device}"),
                events=self._events(trace_of.get(device, []), f"trace {device}"),
            )
            for device in sorted({*segments_of, *trace_of})
        )
        frames = [Frame(readable(filename), line, readable(name)) for filename, line, name in self._frames]
        return Snapshot(
            path=path,
            devices=devices,
            stacks=tuple(tuple(frames[number] for number in stack) for stack in self._stacks),
            settings=dict(settings_of(top)),
            notes=tuple(self._notes()),
        )

    def _segments(self, segments: Items, where: str) -> Segments:
        self._stack_numbers([segment.get("frames") for segment in segments], where)  # raises for what is no stack
        return _table(Segments, [column_of(segments, key, where) for key in ("address", "total_size", "stream")])

    def _blocks(self, segments: Items, where: str) -> Blocks:
        """The blocks of each segment in turn."""
        lists = [need(segment.get("blocks"), list, "'blocks' of a segment") for segment in segments]
        blocks = list(chain.from_iterable(lists))
        check_types(blocks, {dict}, "a segment", "blocks that are dicts")
        states: list[Any] = [block.get("state") for block in blocks]
        if wrong := [state for state in states if type(state) is not str or state not in STATES]:
            raise ContentError(f"'state' of a block needs one of {', '.join(STATES)}, got {shown(wrong[0])}")
        columns = [
            pack([row for row, found in enumerate(lists) for _ in found], where),
            *(column_of(blocks, key, where) for key in ("address", "size", "requested_size")),
            pack([STATES[state] for state in states], where),
            self._stack_numbers([block.get("frames") for block in blocks], where),
        ]
        return _table(Blocks, columns)

    def _events(self, trace: Items, where: str) -> Events:
        columns = [bytearray() for _ in range(6)]
        for begin in range(0, len(trace), CHUNK):
            events = trace[begin : begin + CHUNK]
            values = values_of(events, where)
            check_types(values["action"], {str}, f"'action' of {where}", "texts")
            for key in values.keys() - KNOWN_KEYS:
                self._unknown[f"key {shown(key)} of an event"] += sum(key in event for event in events)
            try:
                codes = [ACTIONS[action] for action in values["action"]]
            except KeyError:
                values = values_of(self._with_known_actions(events), where)
                codes = [ACTIONS[action] for action in values["action"]]
            addresses = values["addr"]
            if "device_free" in values:
                pairs = zip(values["action"], addresses, values["device_free"], strict=True)
                addresses = [free if action == "oom" else address for action, address, free in pairs]
            columns[0] += pack(codes, where)
            columns[1] += pack(addresses, f"'addr' (of an oom 'device_free') of {where}")
            for column, key in zip(columns[2:5], ("size", "stream", "time_us"), strict=True):
                column += pack(values[key], f"'{key}' of {where}")
            columns[5] += self._stack_numbers(values["frames"], where)
        return _table(Events, columns)

    def _with_known_actions(self, events: Items) -> Items:
        """The events without those of unknown actions, which are counted."""
        actions = [event["action"] for event in events]
        self._unknown.update(f"action {shown(action)}" for action in actions if action not in ACTIONS)
        return [event for event in events if event["action"] in ACTIONS]

    def _stack_numbers(self, lists: Sequence[Any], where: str) -> bytes:
        """For each list of frames the number of its stack.

        Most lists are different objects with equal frames. Comparing a list with known ones of the same first frame and
        length takes a seventh of the time of looking up all of its frames. The loop runs for every event, so for most
        of them it must not call a Python function.
        """
        alike, last, number, found = self._alike, None, 0, []
        for frames in lists:
            if frames is not last:
                last, number = frames, 0
                if frames:
                    try:
                        known, numbers = alike[id(frames[0]) ^ len(frames)]
                    except (KeyError, TypeError):
                        known = []
                    if frames in known:  # `index` alone would write a list that it does not find into its error
                        number = numbers[known.index(frames)]
                    else:
                        number = self._stack_number(need(frames, list, f"'frames' of {where}"))
                elif frames is not None and type(frames) is not list:
                    need(frames, list, f"'frames' of {where}")
            found.append(number)
        return pack(found, where)

    def _stack_number(self, frames: list[Any]) -> int:
        """The number of a stack, the same for equal ones."""
        ids = tuple(map(id, frames))
        if ids not in self._number_of:
            stack = tuple(map(self._frame_number, frames))
            self._number_of[ids] = self._stacks.setdefault(stack, len(self._stacks))
        known, numbers = self._alike.setdefault(id(frames[0]) ^ len(frames), ([], []))
        is_flat = all(isinstance(value, str | int | None) for frame in frames for value in frame.values())
        if len(known) < MAX_ALIKE and is_flat:  # comparing containers of a hostile file might never end
            known.append(frames)
            numbers.append(self._number_of[ids])
        return self._number_of[ids]

    def _frame_number(self, frame: object) -> int:
        values = need(frame, dict, "a frame of a stack").get
        filename, line, name = values("filename"), values("line"), values("name")
        if not (type(filename) is str and type(line) is int and type(name) is str):
            raise ContentError(f"a frame of a stack needs a filename, a line and a name, got {shown(line)} as its line")
        return self._frames.setdefault((filename, line, name), len(self._frames))

    def _notes(self) -> Iterator[str]:
        named, others = self._unknown.most_common(MAX_NOTES - 1), len(self._unknown) - (MAX_NOTES - 1)
        yield from (f"Passed over: {count} times {what}." for what, count in named)
        if others > 0:
            rest = self._unknown.total() - sum(count for _, count in named)
            yield f"Passed over: {rest} times one of {others} other unknown actions and keys."


def check_annotations(top: Mapping[str, Any]) -> None:
    """Raise ContentError for malformed annotations, which nothing else reads."""
    entries = need(top.get("external_annotations", []), list, "'external_annotations'")
    check_types(entries, {dict}, "'external_annotations'", "dicts")
    for key in ("device", "time_us"):
        column_of(entries, key, "an annotation")
    for key in ("name", "stage"):
        check_types([entry.get(key) for entry in entries], {str}, f"'{key}' of an annotation", "texts")


def settings_of(top: Mapping[str, Any]) -> Iterator[tuple[str, str | int | float | bool]]:
    """Settings of the allocator; those of a group as `group.name`."""
    for name, value in need(top.get("allocator_settings", {}), dict, "'allocator_settings'").items():
        check_types(
            [name, *(value if isinstance(value, dict) else ())], {str}, "a name in 'allocator_settings'", "texts"
        )
        inner = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        for key, setting in inner.items():
            if isinstance(setting, str | int | float):
                yield readable(key), readable(setting) if isinstance(setting, str) else setting


def need(thing: object, kind: type[Wanted], where: str) -> Wanted:
    """The thing, which must be of that kind."""
    if not isinstance(thing, kind):
        raise ContentError(f"{where} needs a {kind.__name__}, got {shown(thing)}")
    return thing


def check_types(things: Sequence[object], kinds: set[type], where: str, needed: str) -> None:
    """Raise ContentError for the first thing that is of none of the kinds."""
    if not kinds >= set(map(type, things)):
        wrong = next(thing for thing in things if type(thing) not in kinds)
        raise ContentError(f"{where} needs {needed}, got {shown(wrong)}")


def values_of(events: Items, where: str) -> Mapping[str, Sequence[Any]]:
    """For each key the values of all events, None where an event does not have the key."""
    try:
        keys = list(events[0])
        if len(keys) > 1 and set(map(len, events)) == {len(keys)}:
            columns = zip(*map(itemgetter(*keys), events), strict=True)  # a KeyError unless all have the same keys
            return defaultdict(lambda: [None] * len(events), zip(keys, columns, strict=True))
    except (IndexError, KeyError, TypeError):
        pass
    check_types(events, {dict}, where, "dicts")
    found = {key: [event.get(key) for event in events] for key in set().union(*events)}
    return defaultdict(lambda: [None] * len(events), found)


def column_of(items: Items, key: str, where: str) -> bytes:
    """The values that the items have for a key, which must be integers."""
    return pack([item.get(key) for item in items], f"'{key}' of {where}")


def pack(values: Sequence[Any], where: str) -> bytes:
    """The values as 64-bit integers."""
    try:
        return struct.pack(f"{len(values)}{INT}", *values)
    except struct.error:
        wrong = next(value for value in values if not isinstance(value, int) or not -(2**63) <= value < 2**63)
        raise ContentError(f"{where} needs whole numbers of 64 bits, got {shown(wrong)}") from None


def readable(text: str) -> str:
    """The text without lone surrogates, which are no Unicode; names of files may hold them."""
    return text.encode(errors="surrogatepass").decode(errors="replace")


def shown(thing: object) -> str:
    """A short text for a message; never the text of a container, which may be endless."""
    if thing is None:
        return "nothing"
    return repr(thing)[:MAX_SHOWN] if isinstance(thing, str | int | float) else f"a {type(thing).__name__}"


def _table(kind: type[Table], columns: Sequence[bytes | bytearray]) -> Table:
    values = [np.frombuffer(column, dtype=np.int64) for column in columns]
    return kind(**dict(zip((field.name for field in fields(kind)), values, strict=True)))


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
