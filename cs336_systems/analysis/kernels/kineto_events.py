"""The events in the JSON of torch.profiler (Kineto), with their times in whole nanoseconds."""

import gzip
import io
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

import msgspec
import numpy as np

from ...files import refuse_another_kind
from ..columns import GZIP_MAGIC, SQLITE_MAGIC, ZIP_MAGIC, Ints, ProfileError, read_head, what_it_is
from .trace import MAX_TIME_NS, durations

MAX_BYTES = 8 * 2**30
"""Largest decompressed JSON that is read: some thirty million events."""
EXACT_US = 2**43
"""Below it (101 days) a float of microseconds is off by at most 2**-11, which is less than half a
nanosecond.

PyTorch counts from a `baseTimeNanoseconds` at most three months ago; older ones, and others, count
from 1970.
"""
MAX_EXCERPT, MAX_LISTED = 60, 3

BOOKKEEPING = "autograd::engine::evaluate_function: "
"""Operators whose names begin so wrap a node of autograd, which is an event of its own, and add the
engine's dispatch and hooks. They are left out, so that times of operators add up.
"""
HOW_TO_RECORD = (
    "record with `torch.profiler.profile(activities=[ProfilerActivity.CPU, "
    "ProfilerActivity.CUDA])` and write with `export_chrome_trace`"
)
NEEDED = "a trace of torch.profiler (JSON, in gzip, or alone in a .zip)"

Number = TypeVar("Number", float, Decimal)


class Args(msgspec.Struct, frozen=True, gc=False):
    """The fields of an event's `args` that are read. ROCm writes numbers as text, some of them
    in hexadecimal.
    """

    correlation: int | str | None = 0
    device: int | str | None = None
    inDevice: int | str | None = 0  # noqa: N815
    """The device that a copy between two devices runs on, which has no `device`."""
    stream: int | str | None = 0
    name: Any = None
    """The name by which PyTorch marks a kernel of a CUDA graph
    (`torch.cuda.graph_annotations.mark_kernels`).
    """
    autograd_phase: Any = None
    task_type: Any = msgspec.field(default=None, name="Task Type")
    """What ran the event, in traces of Ascend NPUs."""

    @property
    def own_device(self) -> int | str | None:
        """The device that ran the event."""
        return self.inDevice if self.device is None else self.device


class Event(msgspec.Struct, Generic[Number], kw_only=True, gc=False):
    """One event; times in microseconds.

    Name and process are required, because an event without fields would take thirty times its size
    in memory.
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
    distributedInfo: dict[str, Any] = {}  # noqa: N815


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
        file: _File[float] | _File[Decimal] = _decode(path, self._content)
        self._by_category = _by_category(file.traceEvents)
        self._is_exact = False
        self.has_operators = "cpu_op" in self._by_category
        self.device_names = tuple(dict.fromkeys(device.name for device in file.deviceProperties))
        rank = file.distributedInfo.get("rank")
        self.rank = rank if isinstance(rank, int) and rank >= 0 else None

    def batches(self, *groups: Collection[str]) -> list[Batch]:
        """One batch for each group of categories."""
        found = [self._batch(events) for events in self._chosen(groups)]
        times = np.concatenate(
            [times for batch in found for times in (batch.start_ns, batch.duration_ns)]
        )
        if self._is_exact or np.abs(times).max(initial=0) < EXACT_US * 1000:
            return found
        found, self._by_category = [], {}  # two decoded files at once would take too much memory
        self._by_category = _by_category(
            _decode(self.path, self._content, is_exact=True).traceEvents
        )
        self._is_exact = True
        return [self._batch(events) for events in self._chosen(groups)]

    def nodes(self) -> Batch:
        """The nodes of backward, which are operators of the host."""
        operators = self._by_category.get("cpu_op", [])
        nodes = [event for event in operators if event.name.startswith(BOOKKEEPING)]
        return self._batch([event for event in nodes if event.dur is not None])

    def _chosen(self, groups: Sequence[Collection[str]]) -> list[list[AnyEvent]]:
        """The events of each group that have a duration."""
        found = [
            chain.from_iterable(self._by_category.get(name, ()) for name in sorted(names))
            for names in groups
        ]
        return [[event for event in events if event.dur is not None] for events in found]

    def _batch(self, events: list[AnyEvent]) -> Batch:
        what = f"events of category {events[0].cat}" if events else "events"
        try:
            start = _nanoseconds([event.ts for event in events], what)
            duration = _nanoseconds([event.dur for event in events], what)
            return Batch(
                events=events, start_ns=start, duration_ns=durations(start, start + duration, what)
            )
        except ValueError as error:
            raise ProfileError(
                self.path, f"{error}: the trace is damaged, record it again"
            ) from error


_OPERATOR_NAME = re.compile(r"::|Backward\d{0,2}$|^struct ")
"""Part of the names of operators and of autograd's nodes, which PyTorch 1.8 and 1.9 put in one
category with ranges.
"""
_NPU_TASK = re.compile(r"AI_|MIX_")
"""Beginning of the types of an NPU's tasks that compute; such events have no category."""


def _by_category(events: Iterable[AnyEvent]) -> dict[str, list[AnyEvent]]:
    """The events; those of old versions of PyTorch and of NPUs in today's categories."""
    found: defaultdict[str, list[AnyEvent]] = defaultdict(list)
    for event in events:
        found[event.cat].append(event)
    for event in found.pop("Operator", []):
        found["cpu_op" if _OPERATOR_NAME.search(event.name) else "user_annotation"].append(event)
    for event in found.pop("", []):
        if isinstance(event.args.task_type, str) and _NPU_TASK.match(event.args.task_type):
            found["kernel"].append(event)
    return dict(found)


def _read(path: Path) -> bytes | bytearray:
    head = read_head(path, len(SQLITE_MAGIC), NEEDED)
    content: bytes | bytearray
    try:
        if head.startswith(ZIP_MAGIC):
            content = _unzip(path)
        elif head.startswith(GZIP_MAGIC):
            with gzip.open(path) as file:
                content = _decompress(cast("IO[bytes]", file))
        else:
            content = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
    except (
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise ProfileError(
            path, f"not a whole compressed file ({error}): copy it again or export it again"
        ) from error
    except OSError as error:
        raise ProfileError(path, f"cannot be read: {error.strerror}") from error
    if max(len(content), path.stat().st_size) > MAX_BYTES:
        raise ProfileError(path, f"needed at most {MAX_BYTES} bytes, got more: record fewer steps")
    if content[:100].lstrip()[:1] not in (b"{", b"["):
        raise ProfileError(path, f"needed {NEEDED}, but {what_it_is(path, bytes(content[:100]))}")
    return content


def _decompress(file: IO[bytes]) -> bytes | bytearray:
    content = bytearray()
    while len(content) <= MAX_BYTES and (part := file.read(2**20)):
        content += part
    return content


def _unzip(path: Path) -> bytes | bytearray:
    """The one file in the archive, decompressed twice if it is in gzip."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            listed = ", ".join(names[:MAX_LISTED]) or "none"
            raise ProfileError(
                path,
                f"needed a .zip with one trace, got {len(names)} files ({listed}): unpack it first",
            )
        with archive.open(names[0]) as file:
            content = _decompress(file)
    if not content.startswith(GZIP_MAGIC):
        return content
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as unpacked:
        return _decompress(cast("IO[bytes]", unpacked))


_LONE_BACKSLASH = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')


def _decode(
    path: Path, content: bytes | bytearray, *, is_exact: bool = False
) -> _File[float] | _File[Decimal]:
    """The file, its times as floats or as exact decimals."""
    try:
        if is_exact:
            return msgspec.json.decode(content, type=_File[Decimal])
        return msgspec.json.decode(content, type=_File[float])
    except msgspec.ValidationError as error:
        if not is_exact and re.search(
            r"got `str` - at `\$\.traceEvents\[\.*\d*\]\.(?:ts|dur)`", str(error)
        ):
            return _decode(path, content, is_exact=True)  # times as texts, as torch_npu writes them
        refuse_another_kind(path, content, "a trace of torch.profiler", ProfileError)
        raise ProfileError(
            path, f"needed {NEEDED}, but it has other contents ({error}): {HOW_TO_RECORD}"
        ) from error
    except msgspec.DecodeError as error:
        # a path of Windows in a name, whose backslashes PyTorch writes as they are
        mended = _LONE_BACKSLASH.sub(
            lambda found: found[0] if len(found[0]) > 1 else rb"\\", content
        )
        if "escape" in str(error) and mended != content:
            return _decode(path, mended, is_exact=is_exact)
        raise ProfileError(path, _what_is_malformed(content, str(error))) from error
    except UnicodeDecodeError as error:
        raise ProfileError(
            path, f"a name is not UTF-8 ({error}): rename it and record again"
        ) from error
    except RecursionError as error:
        raise ProfileError(path, "nested too deeply for a trace") from error


def _what_is_malformed(content: bytes | bytearray, error: str) -> str:
    at = re.search(r"\(byte (\d+)\)", error)
    if at is None or ("number" in error and int(at[1]) >= len(content) - 1):
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
        return np.array(
            [round(time * 1000) for time in cast("Sequence[Decimal]", times_us)], dtype=np.int64
        )
    # multiplied apart from the fraction, whose last bits would be lost otherwise
    whole = np.floor(rounded)
    return whole.astype(np.int64) * 1000 + np.rint((rounded - whole) * 1000).astype(np.int64)
