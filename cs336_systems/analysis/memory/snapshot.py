"""Reads a memory snapshot of PyTorch, the pickle that `torch.cuda.memory._dump_snapshot` writes.

It is read by machinery of our own, which executes nothing and needs no torch (unpickle.py, pickle_rows.py). Keys and
actions that a newer PyTorch adds are passed over, and counted.
"""

import gc
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cs336_systems.analysis.columns import Ints, ProfileError
from cs336_systems.analysis.files import read_head, what_it_is
from cs336_systems.analysis.memory.device_memory import Action, Blocks, BlockState, DeviceMemory, Events, Segments
from cs336_systems.analysis.memory.pickle_rows import RowReader, Rows
from cs336_systems.analysis.memory.stacks import NO_STACK, Stacks
from cs336_systems.analysis.memory.unpickle import PADDING, Machine

NEEDED = "a memory snapshot of PyTorch"
HOW_TO_RECORD = (
    "record with `torch.cuda.memory._record_memory_history()` and write with `torch.cuda.memory._dump_snapshot(FILE)`"
)
MAX_BYTES = 8 * 2**30
"""Of a file: some hundred million events."""
MAX_TOTAL_BYTES = 2**62
"""Of all sizes in a column together, so that sums fit 64 bits."""
MAX_ADDRESS = 2**61
MAX_SHOWN = 40
MAX_NOTES = 6
"""On what was passed over."""
KNOWN_KEYS = frozenset(
    {"action", "addr", "size", "stream", "time_us", "frames", "device_free", "compile_context", "user_metadata",
     "forward_frames", "pool_id"}
)  # fmt: skip
"""Of an event, up to torch 2.13."""


Setting = str | int | float | bool
Items = Sequence[Mapping[str, Any]]
Wanted = TypeVar("Wanted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """The program said that something begins or ends."""

    name: str
    stage: str
    """`START` or `END`."""
    device: int
    time_us: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One snapshot: what was allocated when it was taken, and how it came to that, as far back as was recorded."""

    path: Path
    devices: tuple[DeviceMemory, ...]
    """Those that have memory, or had."""
    stacks: Stacks
    annotations: tuple[Annotation, ...]
    settings: Mapping[str, Setting]
    """Of the allocator; those of a group as `group.name`."""
    notes: tuple[str, ...]


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot at `path`; raise ProfileError where there is none."""
    pickled = _read(path)
    rows = RowReader(pickled, texts={"action"})
    machine = Machine(path, pickled, rows)
    with _no_collection():
        content = machine.load()
        return _Reader(machine, Stacks(machine, rows.spans)).snapshot(content)


def _read(path: Path) -> bytearray:
    head = read_head(path, 2, NEEDED)
    if head[:1] != b"\x80":
        raise ProfileError(path, f"needed {NEEDED}, but {what_it_is(path, head)}: {HOW_TO_RECORD}")
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ProfileError(path, f"needed at most {MAX_BYTES} bytes, got {size}: record fewer events (max_entries)")
        content = bytearray(size + PADDING)
        with path.open("rb") as file:
            file.readinto(memoryview(content)[:size])
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    return content


@contextmanager
def _no_collection() -> Iterator[None]:
    """Millions of objects are made and kept: looking through them again and again finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_ACTIONS = {action.name.lower(): int(action) for action in Action if action is not Action.UNKNOWN}
_STATES = {state.name.lower(): int(state) for state in BlockState} | {
    "active_awaiting_free": int(BlockState.ACTIVE_PENDING_FREE)
}


class _Reader:
    """From the pickle's dicts and lists to columns. Nothing is walked but what is known to be there."""

    def __init__(self, machine: Machine, stacks: Stacks) -> None:
        self._machine, self._stacks = machine, stacks
        self._unknown: Counter[str] = Counter()

    def snapshot(self, content: object) -> Snapshot:
        top = self._need(content, dict, "the top level")
        traces = self._need(top.get("device_traces"), list, "'device_traces'")
        events = {
            device: self._events(self._need(trace, list, f"trace {device}"), f"trace {device}")
            for device, trace in enumerate(traces)
            if trace
        }
        segments = self._by_device(top)
        devices = sorted({*events, *segments})
        return Snapshot(
            path=self._machine.path,
            devices=tuple(self._memory(device, events.get(device), segments.get(device, [])) for device in devices),
            stacks=self._stacks,
            annotations=tuple(self._annotations(top)),
            settings=dict(self._settings(top)),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        named, others = self._unknown.most_common(MAX_NOTES - 1), len(self._unknown) - (MAX_NOTES - 1)
        yield from (f"Passed over: {count} times {what}." for what, count in named)
        if others > 0:
            rest = self._unknown.total() - sum(count for _, count in named)
            yield f"Passed over: {rest} times one of {others} other unknown actions and keys."

    def _memory(self, device: int, events: Events | None, segments: Items) -> DeviceMemory:
        where = f"the segments of device {device}"
        lists = [self._need(segment.get("blocks"), list, f"'blocks' of {where}") for segment in segments]
        return DeviceMemory(
            device=device,
            events=self._events([], "") if events is None else events,
            segments=self._segments(segments, where),
            blocks=self._blocks(lists, f"the blocks of device {device}"),
        )

    def _error(self, problem: str) -> ProfileError:
        return ProfileError(self._machine.path, f"{problem}: no memory snapshot, or a damaged one; {HOW_TO_RECORD}")

    def _need(self, thing: object, kind: type[Wanted], where: str) -> Wanted:
        if not isinstance(thing, kind):
            raise self._error(f"{where} needs a {kind.__name__}, got {_shown(thing)}")
        return thing

    def _numbers(self, items: Items, key: str, where: str) -> Ints:
        return self._column([item.get(key) for item in items], f"'{key}' of {where}")

    def _column(self, values: list[Any], where: str) -> Ints:
        try:
            return np.array(array("q", values), dtype=np.int64)
        except (TypeError, OverflowError):
            wrong = next(value for value in values if type(value) is not int or not -(2**63) <= value < 2**63)
            raise self._error(f"{where} needs whole numbers of 64 bits, got {_shown(wrong)}") from None

    def _sizes(self, items: Items, key: str, where: str) -> Ints:
        return self._checked(self._numbers(items, key, where), f"'{key}' of {where}")

    def _checked(self, sizes: Ints, where: str) -> Ints:
        if len(sizes) and (sizes.min() < 0 or sizes.sum(dtype=np.float64) > MAX_TOTAL_BYTES):
            worst = sizes.min() if sizes.min() < 0 else sizes.max()
            raise self._error(f"{where} needs sizes from 0 on that add up to at most {MAX_TOTAL_BYTES}, got {worst}")
        return sizes

    def _check_addresses(self, addresses: Ints, where: str) -> None:
        if len(addresses) and not 0 <= addresses.min() <= addresses.max() <= MAX_ADDRESS:
            worst = addresses.min() if addresses.min() < 0 else addresses.max()
            raise self._error(f"{where} needs addresses from 0 to {MAX_ADDRESS}, got {worst}")

    def _addresses(self, items: Items, where: str) -> Ints:
        addresses = self._numbers(items, "address", where)
        self._check_addresses(addresses, where)
        return addresses

    def _stack_numbers(self, items: Items, where: str) -> Ints:
        numbers = [self._stacks.number_of(item.get("frames")) for item in items]
        if None in numbers:
            wrong = items[numbers.index(None)].get("frames")
            raise self._error(f"'frames' of {where} needs lists, got {_shown(wrong)}")
        return self._column(numbers, f"'frames' of {where}")

    def _events(self, trace: list[object], where: str) -> Events:
        """The columns of dicts and of `Rows`, in their order."""
        pieces, dicts = [np.zeros((len(fields(Events)), 0), dtype=np.int64)], list[Mapping[str, Any]]()
        for item in (*trace, None):
            if isinstance(item, dict):
                dicts.append(item)
                continue
            pieces.append(self._of_dicts(dicts, where))
            dicts = []
            if isinstance(item, Rows):
                pieces.append(self._of_rows(item, where))
            elif item is not None:
                raise self._error(f"{where} needs dicts, got {_shown(item)}")
        table = np.concatenate(pieces, axis=1)
        table = table[:, table[0] != Action.UNKNOWN]
        self._checked(table[2], f"'size' of {where}")
        self._check_addresses(table[1], where)
        return Events(**{field.name: column for field, column in zip(fields(Events), table, strict=True)})

    def _of_dicts(self, items: Items, where: str) -> Ints:
        """A row for each column of `Events`; 0 for all of an unknown action."""
        self._unknown.update(f"key {_shown(key)} of an event" for item in items for key in item.keys() - KNOWN_KEYS)
        texts = [item.get("action") for item in items]
        action = self._column([self._action(text, where) for text in texts], where)
        known = np.flatnonzero(action != Action.UNKNOWN)
        chosen = [items[row] for row in known.tolist()]
        address = [item.get("device_free" if item["action"] == "oom" else "addr") for item in chosen]
        table = np.zeros((len(fields(Events)), len(items)), dtype=np.int64)
        table[0] = action
        table[1, known] = self._column(address, f"'addr' (of an oom 'device_free') of {where}")
        for row, key in enumerate(("size", "stream", "time_us"), start=2):
            table[row, known] = self._numbers(chosen, key, where)
        table[5, known] = self._stack_numbers(chosen, where)
        return table

    def _of_rows(self, rows: Rows, where: str) -> Ints:
        others = np.fromiter(rows.others, dtype=np.int64, count=len(rows.others))
        keys = {*rows.numbers, *rows.references}
        self._unknown.update({
            f"key {_shown(key)} of an event": rows.length - len(others) for key in keys - KNOWN_KEYS
        })  # fmt: skip
        address = "addr" if "addr" in keys else "device_free"
        table = np.full((len(fields(Events)), rows.length), NO_STACK, dtype=np.int64)
        is_row = np.ones(rows.length, dtype=np.bool_)
        is_row[others] = False
        if "action" not in rows.references or not {address, "size", "stream", "time_us"} <= rows.numbers.keys():
            raise self._error(f"{where} needs events with an action, {address}, size, stream and time_us, got {keys}")
        table[0, is_row] = self._actions(rows.references["action"][is_row], where)
        for row, key in enumerate((address, "size", "stream", "time_us"), start=1):
            table[row] = rows.numbers[key]
        if "frames" in rows.references:
            table[5] = rows.references["frames"]
        table[:, others] = self._of_dicts(list(rows.others.values()), where)
        return table

    def _actions(self, references: Ints, where: str) -> Ints:
        """The actions that these numbers in the memo stand for."""
        if references.max(initial=0) >= len(self._machine.memo):
            raise self._error(f"'action' of {where} refers to what is not there")
        counts = np.bincount(references)
        numbers = np.flatnonzero(counts)
        code_of = np.zeros_like(counts)
        code_of[numbers] = [self._action(self._machine.memo[n], where, int(counts[n])) for n in numbers.tolist()]
        return code_of[references]

    def _action(self, text: object, where: str, count: int = 1) -> int:
        if type(text) is not str:
            raise self._error(f"'action' of {where} needs a text, got {_shown(text)}")
        if text not in _ACTIONS:
            self._unknown[f"action {_shown(text)}"] += count
        return _ACTIONS.get(text, Action.UNKNOWN)

    def _by_device(self, top: Mapping[str, Any]) -> dict[int, list[Mapping[str, Any]]]:
        segments = [self._need(item, dict, "a segment") for item in self._need(top.get("segments"), list, "'segments'")]
        of_device: dict[int, list[Mapping[str, Any]]] = {}
        for segment, device in zip(segments, self._numbers(segments, "device", "segments").tolist(), strict=True):
            of_device.setdefault(device, []).append(segment)
        return of_device

    def _segments(self, items: Items, where: str) -> Segments:
        return Segments(
            address=self._addresses(items, where),
            num_bytes=self._sizes(items, "total_size", where),
            stream=self._numbers(items, "stream", where),
            is_expandable=np.array([item.get("is_expandable") is True for item in items], dtype=np.bool_),
        )

    def _blocks(self, lists: Sequence[list[object]], where: str) -> Blocks:
        """Those of each segment in turn."""
        items: Items = [self._need(block, dict, f"one of {where}") for found in lists for block in found]
        return Blocks(
            segment=np.repeat(np.arange(len(lists)), [len(found) for found in lists]),
            address=self._addresses(items, where),
            num_bytes=self._sizes(items, "size", where),
            requested_bytes=self._sizes(items, "requested_size", where),
            state=self._column([self._state(item.get("state")) for item in items], where),
            stack=self._stack_numbers(items, where),
        )

    def _state(self, text: object) -> int:
        if type(text) is not str or text not in _STATES:
            raise self._error(f"'state' of a block needs one of {', '.join(_STATES)}, got {_shown(text)}")
        return _STATES[text]

    def _annotations(self, top: Mapping[str, Any]) -> Iterator[Annotation]:
        for item in self._need(top.get("external_annotations", []), list, "'external_annotations'"):
            entry = self._need(item, dict, "an annotation")
            device, time_us = self._column([entry.get("device"), entry.get("time_us")], "an annotation").tolist()
            name, stage = (self._need(entry.get(key), str, f"'{key}' of an annotation") for key in ("name", "stage"))
            yield Annotation(name=name, stage=stage, device=device, time_us=time_us)

    def _settings(self, top: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
        for name, value in self._need(top.get("allocator_settings", {}), dict, "'allocator_settings'").items():
            if isinstance(value, Setting):
                yield name, value
            elif isinstance(value, dict):
                yield from ((f"{name}.{key}", inner) for key, inner in value.items() if isinstance(inner, Setting))


def _shown(thing: object) -> str:
    """A short text for a message; never the text of a container, which may be endless."""
    if thing is None:
        return "nothing"
    return repr(thing)[:MAX_SHOWN] if isinstance(thing, str | int | float) else f"a {type(thing).__name__}"
