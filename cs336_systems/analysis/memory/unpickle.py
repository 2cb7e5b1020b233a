"""Reads the pickle of a memory snapshot in a process of its own, and returns it as columns of numbers.

`snapshot.py` runs this file as a script, with the pickle on standard input. Although every class is refused, a hostile
pickle can crash Python's unpickler, keep it busy for ever or fill the memory; then only this process dies.
It imports nothing but the standard library (`python -I -S` finds nothing else), which also lets it start in 20 ms.
"""

import ctypes
import gc
import json
import mmap
import os
import pickle
import resource
import signal
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import IO, Any, NoReturn, TypeVar, cast

Wanted = TypeVar("Wanted")
Items = Sequence[Mapping[str, Any]]

REFUSED = 3
"""Exit status if the file holds no snapshot; standard output then says why."""
CHUNK = 400
"""Events that are converted at a time, so that they stay in the processor's cache."""
INT, INT_BYTES = "l", struct.calcsize("l")
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
_PR_SET_PDEATHSIG = 1


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


class Mapped:
    """A file mapped into memory, which the unpickler reads without copying it."""

    def __init__(self, file: int) -> None:
        self._rest = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))

    def peek(self, _: int) -> memoryview:
        """Everything that has not been read."""
        return self._rest

    def read(self, num_bytes: int) -> memoryview:
        """The next bytes."""
        taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return taken

    def readline(self) -> memoryview:
        """The rest: the unpickler finds complete lines in what it peeks at, and calls this for an unfinished one."""
        return self.read(len(self._rest))


class Converter:
    """Turns the dicts and lists of a snapshot into columns of 64-bit integers."""

    def __init__(self, actions: Mapping[str, int], states: Mapping[str, int]) -> None:
        """`actions` and `states` give the numbers that stand for these texts in the columns."""
        self._actions, self._states = actions, states
        self._unknown: Counter[str] = Counter()
        self._frames: dict[tuple[str, int, str], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._number_of: dict[tuple[int, ...], int] = {}
        """By the addresses of all frames of a list, the number of its stack."""
        self._alike: dict[int, tuple[list[list[Any]], list[int]]] = {}
        """By the address of the first frame and the length: some such lists, and the numbers of their stacks."""

    def convert(self, content: object) -> tuple[dict[str, Any], list[bytes | bytearray]]:
        """A description of the snapshot, and for each device the columns of `Segments`, `Blocks` and `Events`."""
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
        devices: list[list[int]] = []
        columns: list[bytes | bytearray] = []
        for device in sorted({*segments_of, *trace_of}):
            found = segments_of.get(device, [])
            tables = (
                self._segments(found, f"the segments of device {device}"),
                self._blocks(found, f"the blocks of device {device}"),
                self._events(trace_of.get(device, []), f"trace {device}"),
            )
            columns += chain.from_iterable(tables)
            devices.append([device, *(len(table[0]) // INT_BYTES for table in tables)])
        description = {
            "devices": devices,
            "frames": list(self._frames),
            "stacks": list(self._stacks),
            "settings": dict(settings_of(top)),
            "notes": list(self._notes()),
        }
        return description, columns

    def _segments(self, segments: Items, where: str) -> list[bytes]:
        """The columns of `Segments`."""
        self._stack_numbers([segment.get("frames") for segment in segments], where)  # raises for what is no stack
        return [column_of(segments, key, where) for key in ("address", "total_size", "stream")]

    def _blocks(self, segments: Items, where: str) -> list[bytes]:
        """The columns of `Blocks`; the blocks of each segment in turn."""
        lists = [need(segment.get("blocks"), list, "'blocks' of a segment") for segment in segments]
        blocks = list(chain.from_iterable(lists))
        check_types(blocks, {dict}, "a segment", "blocks that are dicts")
        states: list[Any] = [block.get("state") for block in blocks]
        if wrong := [state for state in states if type(state) is not str or state not in self._states]:
            raise ContentError(f"'state' of a block needs one of {', '.join(self._states)}, got {shown(wrong[0])}")
        return [
            pack([row for row, found in enumerate(lists) for _ in found], where),
            *(column_of(blocks, key, where) for key in ("address", "size", "requested_size")),
            pack([self._states[state] for state in states], where),
            self._stack_numbers([block.get("frames") for block in blocks], where),
        ]

    def _events(self, trace: Items, where: str) -> list[bytearray]:
        """The columns of `Events`."""
        columns = [bytearray() for _ in range(6)]
        for begin in range(0, len(trace), CHUNK):
            events = trace[begin : begin + CHUNK]
            values = values_of(events, where)
            check_types(values["action"], {str}, f"'action' of {where}", "texts")
            for key in values.keys() - KNOWN_KEYS:
                self._unknown[f"key {shown(key)} of an event"] += sum(key in event for event in events)
            try:
                codes = [self._actions[action] for action in values["action"]]
            except KeyError:
                values = values_of(self._with_known_actions(events), where)
                codes = [self._actions[action] for action in values["action"]]
            addresses = values["addr"]
            if "device_free" in values:
                pairs = zip(values["action"], addresses, values["device_free"], strict=True)
                addresses = [free if action == "oom" else address for action, address, free in pairs]
            columns[0] += pack(codes, where)
            columns[1] += pack(addresses, f"'addr' (of an oom 'device_free') of {where}")
            for column, key in zip(columns[2:5], ("size", "stream", "time_us"), strict=True):
                column += pack(values[key], f"'{key}' of {where}")
            columns[5] += self._stack_numbers(values["frames"], where)
        return columns

    def _with_known_actions(self, events: Items) -> Items:
        """The events without those of unknown actions, which are counted."""
        actions = [event["action"] for event in events]
        self._unknown.update(f"action {shown(action)}" for action in actions if action not in self._actions)
        return [event for event in events if event["action"] in self._actions]

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
                        number = numbers[known.index(frames)]
                    except (KeyError, TypeError, ValueError):
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
        if len(known) < MAX_ALIKE:
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
        inner = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        yield from ((key, setting) for key, setting in inner.items() if isinstance(setting, str | int | float))


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


def shown(thing: object) -> str:
    """A short text for a message; never the text of a container, which may be endless."""
    if thing is None:
        return "nothing"
    return repr(thing)[:MAX_SHOWN] if isinstance(thing, str | int | float) else f"a {type(thing).__name__}"


def limit(what: int, most: int) -> None:
    """Bound what this process may use of a resource, unless a smaller bound holds already."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def die_with(parent: int) -> None:
    """End this process when the process `parent`, which has started it, ends (on Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def main(parent: int, max_memory_bytes: int, max_cpu_s: int, codes: str) -> NoReturn:
    """Convert the pickle on standard input and end this process."""
    die_with(parent)
    limit(resource.RLIMIT_AS, max_memory_bytes)
    limit(resource.RLIMIT_CPU, max_cpu_s)
    limit(resource.RLIMIT_CORE, 0)
    gc.disable()  # of the millions of objects that are made, none is garbage
    try:
        unpickler = PlainUnpickler(cast("IO[bytes]", Mapped(0)))  # kept alive: deallocating its memo takes time
        description, columns = Converter(**json.loads(codes)).convert(unpickler.load())
        text = json.dumps(description, ensure_ascii=False, allow_nan=False)
        reply = (
            text.encode(errors="surrogatepass").decode(errors="replace").encode()
        )  # names of files may be no Unicode
    except MemoryError:
        problem = (
            f"it would take more than {max_memory_bytes >> 20} MiB of memory: no memory snapshot, or a damaged one"
        )
    except ContentError as error:
        problem = f"{error}: no memory snapshot, or a damaged one"
    except Exception as error:  # the unpickler may raise nearly every kind of exception
        problem = f"the pickle cannot be read ({str(error)[:MAX_REASON]}): truncated, damaged or no memory snapshot"
    else:
        write(struct.pack("q", sum(map(len, columns))), *columns, reply)
        os._exit(0)  # an orderly end would deallocate millions of objects, which is slow and may overflow the stack
    write(problem.encode(errors="replace"))
    os._exit(REFUSED)


def write(*parts: bytes | bytearray) -> None:
    """Write to standard output."""
    for part in parts:
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    parent, max_memory_bytes, max_cpu_s = map(int, sys.argv[1:4])
    main(parent, max_memory_bytes, max_cpu_s, sys.argv[4])
