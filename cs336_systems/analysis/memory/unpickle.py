"""Reads the pickle of a memory snapshot in a process of its own, and hands it back as columns of numbers.

`snapshot.py` runs this file as a script, with the pickle on standard input. A hostile pickle can crash Python's
unpickler, keep it busy for ever or fill the memory, whatever classes it is refused: then only this process dies. So it
imports the standard library alone (`python -I -S` finds nothing else), which also lets it start in 20 ms.
"""

import ctypes
import gc
import json
import os
import pickle
import resource
import signal
import struct
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NoReturn, TypeAlias, TypeVar

Wanted = TypeVar("Wanted")
Ints: TypeAlias = "array[int]"
Items = Sequence[Mapping[str, Any]]

REFUSED = 3
"""Exit status if the file holds no snapshot; standard output then says why."""
CHUNK = 1000
"""Events that are converted at a time, so that they stay in the processor's cache."""
MAX_SHOWN = 40
"""Characters of a value that a message quotes."""
MAX_REASON = 200
"""Characters of the unpickler's own message."""
MAX_NOTES = 6
"""Notes on unknown actions and keys."""
KNOWN_KEYS = frozenset(
    {"action", "addr", "size", "stream", "time_us", "frames", "device_free", "compile_context", "user_metadata",
     "forward_frames", "pool_id"}
)  # fmt: skip
"""Keys of an event, up to torch 2.13."""
_PR_SET_PDEATHSIG = 1


class ContentError(ValueError):
    """The pickle was read, and holds no snapshot."""


class PlainUnpickler(pickle.Unpickler):
    """The standard library's unpickler without any class, function, extension code or persistent id."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse all globals. Extension codes, of which none is registered here, would come here too."""
        raise pickle.UnpicklingError(f"{shown(module)} {shown(name)} would run code of others, so nothing was loaded")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse all persistent ids."""
        raise pickle.UnpicklingError(f"persistent id {shown(pid)} would run code of others, so nothing was loaded")


class Converter:
    """Makes columns of the dicts and lists of a snapshot."""

    def __init__(self, actions: Mapping[str, int], states: Mapping[str, int]) -> None:
        """`actions` and `states` give the numbers that stand for these texts in the columns."""
        self._actions, self._states = actions, states
        self._unknown: Counter[str] = Counter()
        self._frames: dict[tuple[str, int, str], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._number_of_list: dict[int, int] = {}
        """By the id of a list of frames that a segment or block has, its first number."""
        self._stack_of_list = array("q", [0])
        self._shared: list[tuple[int, int]] = []
        self._number_of: dict[tuple[int, ...], int] = {}
        """Of the stack whose frames have these ids."""
        self._alike: dict[tuple[int, int], tuple[list[Any], int]] = {}

    def convert(self, content: object) -> tuple[dict[str, Any], list[Ints]]:
        """A description of the snapshot; the stack of each list of frames; the other columns, device by device.

        Lists of frames are numbered in this order: those of all segments, then for each device those of its events and
        those of its blocks. A list that a segment or block has too is one object in the pickle; `shared` gives its
        first number.
        """
        top = need(content, dict, "the top level")
        traces = need(top.get("device_traces"), list, "'device_traces'")
        segments = [need(item, dict, "a segment") for item in need(top.get("segments"), list, "'segments'")]
        self._check_annotations(top)
        columns: list[Ints] = []
        of_device: dict[int, list[Mapping[str, Any]]] = {}
        column_of(segments, "device", "segments")  # raises for what is no number
        for segment in segments:
            of_device.setdefault(segment["device"], []).append(segment)
            blocks = need(segment.get("blocks"), list, "'blocks' of a segment")
            check_types(blocks, {dict}, "a segment", "blocks that are dicts")
            lists = [segment.get("frames"), *(block.get("frames") for block in blocks)]
            first = len(self._stack_of_list)
            self._add_lists(lists, "a segment")
            for number, frames in enumerate(lists, first):
                if frames:
                    self._number_of_list.setdefault(id(frames), number)
        num_lists_of_segments = len(self._stack_of_list)
        self._shared = []
        trace_of = {device: trace for device, trace in enumerate(traces) if trace}
        devices = []
        for device in sorted({*of_device, *trace_of}):
            tables = (
                self._events(need(trace_of.get(device, []), list, f"trace {device}"), f"trace {device}"),
                self._segments(found := of_device.get(device, []), f"the segments of device {device}"),
                self._blocks(found, f"the blocks of device {device}"),
            )
            columns += chain.from_iterable(tables)
            devices.append([device, *(len(table[0]) for table in tables)])
        description = {
            "devices": devices,
            "num_lists": len(self._stack_of_list),
            "num_lists_of_segments": num_lists_of_segments,
            "shared": self._shared,
            "frames": list(self._frames),
            "stacks": list(self._stacks),
            "settings": dict(self._settings(top)),
            "notes": list(self._notes()),
        }
        return description, [self._stack_of_list, *columns]

    def _events(self, trace: Items, where: str) -> list[Ints]:
        """The columns of `Events` but the last, whose lists of frames are added to the others."""
        columns = [array("q") for _ in range(5)]
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
            columns[0] += numbers(codes, where)
            addresses = values["addr"]
            if "device_free" in values:
                pairs = zip(values["action"], addresses, values["device_free"], strict=True)
                addresses = [free if action == "oom" else address for action, address, free in pairs]
            columns[1] += numbers(addresses, f"'addr' (of an oom 'device_free') of {where}")
            for column, key in zip(columns[2:], ("size", "stream", "time_us"), strict=True):
                column += numbers(values[key], f"'{key}' of {where}")
            self._add_lists(values["frames"], where)
        return columns

    def _with_known_actions(self, events: Items) -> Items:
        """The events without those of unknown actions, which are counted."""
        actions = [event["action"] for event in events]
        self._unknown.update(f"action {shown(action)}" for action in actions if action not in self._actions)
        return [event for event in events if event["action"] in self._actions]

    def _segments(self, items: Items, where: str) -> list[Ints]:
        """The columns of `Segments`."""
        is_expandable = [item.get("is_expandable") is True for item in items]
        return [
            *(column_of(items, key, where) for key in ("address", "total_size", "stream")),
            numbers(is_expandable, where),
        ]

    def _blocks(self, segments: Items, where: str) -> list[Ints]:
        """The columns of `Blocks` but the last, as for events; the blocks of each segment in turn."""
        lists = [segment["blocks"] for segment in segments]
        items = list(chain.from_iterable(lists))
        states: list[Any] = [item.get("state") for item in items]
        if wrong := [state for state in states if type(state) is not str or state not in self._states]:
            raise ContentError(f"'state' of a block needs one of {', '.join(self._states)}, got {shown(wrong[0])}")
        self._add_lists([item.get("frames") for item in items], where)
        return [
            numbers(chain.from_iterable([row] * len(found) for row, found in enumerate(lists)), where),
            *(column_of(items, key, where) for key in ("address", "size", "requested_size")),
            numbers(map(self._states.__getitem__, states), where),
        ]

    def _add_lists(self, lists: Sequence[Any], where: str) -> None:
        """Give the next numbers to these lists of frames.

        Most lists are different objects with the same frames. Comparing a list with one that has the same first and
        middle frame is three times as fast as looking all its frames up. This loop sees every event: a function that
        is called for each list would take twice as long.
        """
        check_types(lists, {list, type(None)}, f"'frames' of {where}", "lists")
        alike, last, number = self._alike, None, 0
        stacks = []
        for frames in lists:
            if frames is not last:
                last, number = frames, 0
                if frames:
                    key = id(frames[0]), id(frames[len(frames) // 2])
                    same, number = alike.get(key, (None, 0))
                    if same != frames:
                        number = self._stack_number(frames)
                        alike[key] = frames, number
            stacks.append(number)
        earlier = self._number_of_list
        if not earlier.keys().isdisjoint(map(id, lists)):
            named = enumerate(map(id, lists), len(self._stack_of_list))
            self._shared += [(row, earlier[frames]) for row, frames in named if frames in earlier]
        self._stack_of_list.extend(array("q", stacks))

    def _stack_number(self, frames: list[Any]) -> int:
        """The number of a stack, the same for equal ones."""
        ids = tuple(map(id, frames))
        if ids not in self._number_of:
            stack = tuple(self._frame_number(frame) for frame in frames)
            self._number_of[ids] = self._stacks.setdefault(stack, len(self._stacks))
        return self._number_of[ids]

    def _frame_number(self, frame: object) -> int:
        values = need(frame, dict, "a frame of a stack").get
        filename, line, name = values("filename"), values("line"), values("name")
        if not (type(filename) is str and type(line) is int and type(name) is str):
            raise ContentError(f"a frame of a stack needs a filename, a line and a name, got {shown(line)} as its line")
        return self._frames.setdefault((filename, line, name), len(self._frames))

    def _check_annotations(self, top: Mapping[str, Any]) -> None:
        """Refuse malformed annotations, which nothing else reads."""
        entries = need(top.get("external_annotations", []), list, "'external_annotations'")
        check_types(entries, {dict}, "'external_annotations'", "dicts")
        for key in ("device", "time_us"):
            column_of(entries, key, "an annotation")
        for key in ("name", "stage"):
            check_types([entry.get(key) for entry in entries], {str}, f"'{key}' of an annotation", "texts")

    def _settings(self, top: Mapping[str, Any]) -> Iterator[tuple[str, str | int | float | bool]]:
        for name, value in need(top.get("allocator_settings", {}), dict, "'allocator_settings'").items():
            inner = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
            yield from ((key, setting) for key, setting in inner.items() if isinstance(setting, str | int | float))

    def _notes(self) -> Iterator[str]:
        named, others = self._unknown.most_common(MAX_NOTES - 1), len(self._unknown) - (MAX_NOTES - 1)
        yield from (f"Passed over: {count} times {what}." for what, count in named)
        if others > 0:
            rest = self._unknown.total() - sum(count for _, count in named)
            yield f"Passed over: {rest} times one of {others} other unknown actions and keys."


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
    """The values of all events for each key, None where an event has no such key."""
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


def column_of(items: Items, key: str, where: str) -> Ints:
    """The values that the items have for a key."""
    return numbers([item.get(key) for item in items], f"'{key}' of {where}")


def numbers(values: Iterable[Any], where: str) -> Ints:
    """The values as 64-bit integers."""
    values = tuple(values)
    try:
        return array("q", values)
    except (TypeError, OverflowError):
        wrong = next(value for value in values if not isinstance(value, int) or not -(2**63) <= value < 2**63)
        raise ContentError(f"{where} needs whole numbers of 64 bits, got {shown(wrong)}") from None


def readable(text: str) -> str:
    """The text with marks in place of what is no Unicode, such as bytes of a file's name."""
    return text.encode(errors="surrogatepass").decode(errors="replace")


def shown(thing: object) -> str:
    """A short text for a message; never the text of a container, which may be endless."""
    if thing is None:
        return "nothing"
    return repr(thing)[:MAX_SHOWN] if isinstance(thing, str | int | float) else f"a {type(thing).__name__}"


def limit(what: int, most: int) -> None:
    """Bound what this process may use of a resource, unless less is allowed anyway."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def die_with(parent: int) -> None:
    """End this process when the process `parent`, which has started it, ends; on Linux alone."""
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
    gc.disable()  # millions of objects are made and kept: looking through them again and again finds nothing
    try:
        content = PlainUnpickler(sys.stdin.buffer).load()
        description, columns = Converter(**json.loads(codes)).convert(content)
        reply = readable(json.dumps(description, ensure_ascii=False, allow_nan=False)).encode()
    except MemoryError:
        problem = (
            f"it would take more than {max_memory_bytes >> 20} MiB of memory: no memory snapshot, or a damaged one"
        )
    except ContentError as error:
        problem = f"{error}: no memory snapshot, or a damaged one"
    except Exception as error:  # the unpickler raises almost all there are
        problem = f"the pickle cannot be read ({str(error)[:MAX_REASON]}): truncated, damaged or no memory snapshot"
    else:
        write(struct.pack("q", sum(map(len, columns))), *columns, reply)
        os._exit(0)  # returning would take millions of objects apart, which takes time and may overflow the stack
    write(problem.encode(errors="replace"))
    os._exit(REFUSED)


def write(*parts: "bytes | Ints") -> None:
    """Write to standard output."""
    for part in parts:
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    parent, max_memory_bytes, max_cpu_s = map(int, sys.argv[1:4])
    main(parent, max_memory_bytes, max_cpu_s, sys.argv[4])
