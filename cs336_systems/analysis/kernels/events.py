"""Reads the events of a Chrome trace (the JSON of torch.profiler), with bounded memory and exact to the nanosecond."""

import gzip
import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Generic, TypeVar, cast

import msgspec
import numpy as np

from cs336_systems.analysis.columns import Ints, ProfileError
from cs336_systems.analysis.files import GZIP_MAGIC, SQLITE_MAGIC, read_head, what_it_is
from cs336_systems.analysis.kernels.trace import MAX_TIME_NS, durations
from cs336_systems.files import refuse_another_kind

MAX_BYTES = 8 * 2**30
"""Largest decompressed JSON that is read: some thirty million events."""
MAX_RATIO = 64
"""Largest ratio of decompressed to compressed size. Traces have 10 to 25; a file made to fill memory has a thousand."""
SMALL_BYTES = 2**24
"""Bytes that are decompressed whatever the ratio: a short trace of equal steps may compress better."""
EXACT_US = 2**43
"""Below it (101 days) a float of microseconds is off by at most 2**-11, which is less than half a nanosecond.

PyTorch counts from a `baseTimeNanoseconds` at most three months ago; older ones, and others, count from 1970.
"""
MAX_EXCERPT = 60

HOW_TO_RECORD = (
    "record with `torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])` "
    "and write with `export_chrome_trace`"
)
NEEDED = "a trace of torch.profiler (JSON, or JSON in gzip)"

Number = TypeVar("Number", float, Decimal)


class Args(msgspec.Struct, frozen=True, gc=False):
    """The fields of an event's `args` that are read."""

    correlation: int = 0
    device: int | None = None
    inDevice: int = 0  # noqa: N815
    """The device that a copy between two devices runs on, which has no `device`."""
    stream: int = 0

    @property
    def own_device(self) -> int:
        """The device that ran the event."""
        return self.inDevice if self.device is None else self.device


class Event(msgspec.Struct, Generic[Number], kw_only=True, gc=False):
    """One event; times in microseconds.

    Name and process are required, because an event without fields would take thirty times its size in memory.
    """

    # in the order in which PyTorch writes the fields, which is the fastest to decode
    cat: str = ""
    name: str
    pid: int | str
    tid: int | str = 0
    ts: Number | None = None
    dur: Number | None = None
    args: Args = Args()


class _Device(msgspec.Struct):
    name: str = ""


class _File(msgspec.Struct, Generic[Number]):
    traceEvents: list[Event[Number]]  # noqa: N815
    deviceProperties: list[_Device] = []  # noqa: N815


AnyEvent = Event[float] | Event[Decimal]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Events with a duration, of some categories."""

    events: Sequence[AnyEvent]
    start_ns: Ints
    duration_ns: Ints

    def __len__(self) -> int:
        return len(self.events)


class Events:
    """All events of the trace at `path`; raises ProfileError for a file that is not a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = _read(path)
        file = _decode(path, self._content, _File[float])
        self._events: Sequence[AnyEvent] = file.traceEvents
        self._is_exact = False
        self.device_names = tuple(dict.fromkeys(device.name for device in file.deviceProperties))

    def batches(self, *groups: Collection[str]) -> list[Batch]:
        """One batch for each group of categories."""
        found = [self._batch(events) for events in self._chosen(groups)]
        if self._is_exact or not any(_is_long(batch) for batch in found):
            return found
        found, self._events = [], ()  # two decoded files at once would take too much memory
        self._events, self._is_exact = _decode(self.path, self._content, _File[Decimal]).traceEvents, True
        return [self._batch(events) for events in self._chosen(groups)]

    def _chosen(self, groups: Sequence[Collection[str]]) -> list[list[AnyEvent]]:
        """The events of each group that have a duration."""
        chosen: list[list[AnyEvent]] = [[] for _ in groups]
        group_of = {name: group for names, group in zip(groups, chosen, strict=True) for name in names}
        wanted = [event for event in self._events if event.cat in group_of]
        for event in wanted:
            if event.dur is not None:
                group_of[event.cat].append(event)
        return chosen

    def _batch(self, events: list[AnyEvent]) -> Batch:
        what = f"events of category {events[0].cat}" if events else "events"
        try:
            start = _nanoseconds([event.ts for event in events], what)
            duration = _nanoseconds([event.dur for event in events], what)
            return Batch(events=events, start_ns=start, duration_ns=durations(start, start + duration, what))
        except ValueError as error:
            raise ProfileError(self.path, f"{error}: the trace is damaged, record it again") from error


def _read(path: Path) -> bytes | bytearray:
    head = read_head(path, len(SQLITE_MAGIC), NEEDED)
    try:
        size = path.stat().st_size
        is_compressed = head.startswith(GZIP_MAGIC)
        content = _decompress(path, size) if is_compressed else b"" if size > MAX_BYTES else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ProfileError(path, f"not a whole gzip file ({error}): copy it again or export it again") from error
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    if max(size, len(content)) > MAX_BYTES:
        raise ProfileError(path, f"needed at most {MAX_BYTES} bytes, got more: record fewer steps")
    if content[:100].lstrip()[:1] not in (b"{", b"["):
        raise ProfileError(path, f"needed {NEEDED}, but {what_it_is(path, bytes(content[:100]))}")
    return content


def _decompress(path: Path, size: int) -> bytearray:
    limit = max(size * MAX_RATIO, SMALL_BYTES)
    content = bytearray()
    with gzip.open(path) as file:
        while len(content) <= min(limit, MAX_BYTES) and (part := file.read(2**20)):
            content += part
    if len(content) > limit:
        raise ProfileError(path, f"grows more than {MAX_RATIO} times when decompressed, which no trace does")
    return content


def _decode(path: Path, content: bytes | bytearray, kind: type[_File[Number]]) -> _File[Number]:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        refuse_another_kind(path, content, "a trace of torch.profiler", ProfileError)
        raise ProfileError(path, f"needed {NEEDED}, but it has other contents ({error}): {HOW_TO_RECORD}") from error
    except msgspec.DecodeError as error:
        raise ProfileError(path, _what_is_malformed(content, str(error))) from error
    except UnicodeDecodeError as error:
        raise ProfileError(path, f"a name is not UTF-8 ({error}): rename it and record again") from error
    except RecursionError as error:
        raise ProfileError(path, "nested too deeply for a trace") from error


def _what_is_malformed(content: bytes | bytearray, error: str) -> str:
    at = re.search(r"\(byte (\d+)\)", error)
    if at is None:
        return "truncated: copy it again or export it again"
    before = content[max(0, int(at[1]) - MAX_EXCERPT) : int(at[1])].decode(errors="replace")
    return (
        f"{error}, after {before!r}. PyTorch writes a double quote in a range's name as it is, "
        "which ends the name: if one stands there, rename the range and record again"
    )


def _nanoseconds(times_us: Sequence[float | Decimal | None], what: str) -> Ints:
    """The times in whole nanoseconds; raise ValueError if one is missing or out of range."""
    rounded = np.array(times_us, dtype=np.float64)  # NaN for None
    if not (is_time := np.abs(rounded) <= MAX_TIME_NS / 1000).all():
        worst = times_us[int(is_time.argmin())]
        raise ValueError(f"{what} need times within {MAX_TIME_NS} ns of zero, got {worst} us")
    if times_us and isinstance(times_us[0], Decimal):
        return np.array([round(time * 1000) for time in cast("Sequence[Decimal]", times_us)], dtype=np.int64)
    whole = np.floor(rounded)  # multiplied apart from the fraction, whose last bits would be lost otherwise
    return whole.astype(np.int64) * 1000 + np.rint((rounded - whole) * 1000).astype(np.int64)


def _is_long(batch: Batch) -> bool:
    return any(bool((np.abs(times) >= EXACT_US * 1000).any()) for times in (batch.start_ns, batch.duration_ns))
