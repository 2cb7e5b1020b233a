"""The events in the JSON of torch.profiler (Kineto), with their times in whole nanoseconds."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np

from ...files import refuse_another_kind
from ..columns import Ints, ProfileError
from .collectives import COLLECTIVE_OPERATOR
from .kineto_content import TORCH_TRACE, read_content
from .trace import MAX_TIME_NS, check_times

EXACT_US = 2**43
"""Below it (101 days) a float of microseconds is off by at most 2**-11, which is less than half a
nanosecond.

PyTorch counts from a `baseTimeNanoseconds` at most three months ago; older ones, and others, count
from 1970.
"""
MAX_EXCERPT = 60

BOOKKEEPING = "autograd::engine::evaluate_function: "
"""Operators whose names begin so wrap a node of autograd, which is an event of its own, and add the
engine's dispatch and hooks. They are left out, so that times of operators add up.
"""
HOW_TO_TRACE = (
    "record with `torch.profiler.profile(activities=[ProfilerActivity.CPU, "
    "ProfilerActivity.CUDA])` and write with `export_chrome_trace`"
)

_NOTHING = msgspec.Raw(b"[]")
Microseconds = TypeVar("Microseconds", float, Decimal)


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
    external_id: int | str | None = msgspec.field(default=None, name="External id")
    """The number of an operator, or of the innermost operator around a launch."""
    sequence: int | str | None = msgspec.field(default=None, name="Sequence number")
    """The number of the node that an operator of forward makes, or of a node of backward."""
    forward_thread: int | str | None = msgspec.field(default=None, name="Fwd thread id")
    # not decoded, as most operators launch nothing
    dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")
    values: msgspec.Raw = msgspec.field(default=_NOTHING, name="Concrete Inputs")
    collective: Any = msgspec.field(default=None, name="Collective name")
    task_type: Any = msgspec.field(default=None, name="Task Type")
    """What ran the event, in traces of Ascend NPUs."""
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_size: Any = msgspec.field(default=None, name="Group size")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None

    @property
    def ran_on(self) -> int | str | None:
        """The device that ran the event."""
        return self.inDevice if self.device is None else self.device


class Category(StrEnum):
    """What an event is, by the names for CUDA; a member takes no memory for each event."""

    KERNEL = "kernel"
    COPY = "gpu_memcpy"
    FILL = "gpu_memset"
    CALL = "cuda_runtime"
    DRIVER_CALL = "cuda_driver"
    RANGE = "user_annotation"
    OPERATOR = "cpu_op"
    FUNCTION = "python_function"
    OPERATOR_OR_RANGE = "Operator"
    """PyTorch 1.8 and 1.9 put both in one category."""
    TASK = "mtia_ccp_events"
    """What MTIA's processor of commands did, its waits for other streams too."""
    NONE = ""
    OTHER = "ac2g"
    """Arrows, and all else that is not read."""

    @classmethod
    def _missing_(cls, value: object) -> "Category":
        return _OTHER_NAMES.get(value, cls.OTHER)


_OTHER_NAMES: dict[object, Category] = {
    "Kernel": Category.KERNEL,
    "Memcpy": Category.COPY,
    "Memset": Category.FILL,
    **dict.fromkeys(("Runtime", "runtime", "driver"), Category.CALL),
}
"""Names of PyTorch 1.8 and 1.9, and of other devices."""
for _maker in ("hip", "xpu", "mtia", "privateuse1"):
    _OTHER_NAMES[f"{_maker}_runtime"] = Category.CALL
    _OTHER_NAMES[f"{_maker}_driver"] = Category.DRIVER_CALL


class Event(msgspec.Struct, Generic[Microseconds], kw_only=True, gc=False):
    """One event; times in microseconds.

    Name and process are required, because an event without fields would take thirty times its size
    in memory.
    """

    # in the order in which PyTorch writes the fields, which is the fastest to decode
    cat: Category = Category.NONE
    name: str
    pid: int | str
    tid: int | str = 0
    ts: Microseconds | None = None
    dur: Microseconds | None = None
    args: Args = Args()


class _Device(msgspec.Struct):
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """What a trace's `distributedInfo` says about its process; None and empty for what it does not
    say.
    """

    rank: int | None = None
    world_size: int | None = None
    backend: str = ""


def _distributed(info: dict[str, Any]) -> Distributed:
    return Distributed(
        rank=_whole(info.get("rank"), least=0),
        world_size=_whole(info.get("world_size"), least=1),
        backend=str(info.get("backend", "")),
    )


def _whole(value: object, *, least: int) -> int | None:
    """The value, if it is a whole number of at least this."""
    return value if isinstance(value, int) and value >= least else None


class _Header(msgspec.Struct):
    traceEvents: msgspec.Raw  # noqa: N815
    distributedInfo: dict[str, Any] = {}  # noqa: N815


def read_distributed(path: Path) -> Distributed | None:
    """What the file says about its process; None for JSON of another kind, and for what is no
    JSON.
    """
    try:
        content = read_content(path)
    except ProfileError:
        return None
    try:
        return _distributed(msgspec.json.decode(content, type=_Header).distributedInfo)
    except msgspec.ValidationError:
        is_list = content.lstrip()[:1] == b"["
        return Distributed() if is_list and b'"ph"' in content[:1000] else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _distributed(_decode(path, content).distributedInfo)


class _File(msgspec.Struct, Generic[Microseconds]):
    traceEvents: list[Event[Microseconds]]  # noqa: N815
    deviceProperties: list[_Device] = []  # noqa: N815
    distributedInfo: dict[str, Any] = {}  # noqa: N815


_FileT = TypeVar("_FileT", _File[float], _File[Decimal])
AnyEvent = Event[float] | Event[Decimal]


@dataclass(frozen=True, kw_only=True)
class EventBatch:
    """Events with a duration, of some categories."""

    events: Sequence[AnyEvent]
    start_ns: Ints
    end_ns: Ints
    threads: dict[tuple[int | str, int | str], int]
    """Numbers of processes and threads, which all batches of a file share."""

    @cached_property
    def thread(self) -> Ints:
        """The number of each event's thread on the host."""
        number = self.threads
        threads = [number.setdefault((event.pid, event.tid), len(number)) for event in self.events]
        return np.array(threads, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.events)


class TraceEvents:
    """All events of the trace at `path`; raises ProfileError for a file that is not a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = read_content(path)
        file: _File[float] | _File[Decimal] = _decode(path, self._content)
        self._by_category = _by_category(file.traceEvents)
        self._is_exact = False
        self._threads: dict[tuple[int | str, int | str], int] = {}
        self.is_open = _is_open(self._content)
        """The list of events has no last bracket, as Chrome's format allows."""
        self.num_copies = 0
        """Events that stand in the file a second time, and are left out."""
        self.num_without_duration = 0
        """Events that do not say how long they last, and are left out."""
        self.has_operators = Category.OPERATOR in self._by_category
        self.device_names = tuple(
            dict.fromkeys(device.name for device in file.deviceProperties if device.name)
        )
        self.distributed = _distributed(file.distributedInfo)

    def batches(self, *groups: Collection[Category]) -> list[EventBatch]:
        """One batch for each group of categories."""
        before = self.num_copies, self.num_without_duration
        batches = [self._batch_of(categories) for categories in groups]
        times = [np.append(batch.start_ns, batch.end_ns) for batch in batches]
        if self._is_exact or np.abs(np.concatenate(times)).max(initial=0) < EXACT_US * 1000:
            return batches
        # two decoded files at once would take too much memory
        batches, self._by_category = [], {}
        self.num_copies, self.num_without_duration = before
        file = _decode(self.path, self._content, is_exact=True)
        self._by_category = _by_category(file.traceEvents)
        self._is_exact = True
        return [self._batch_of(categories) for categories in groups]

    def of_category(self, category: Category) -> list[AnyEvent]:
        """All events of the category, also those without a duration."""
        return self._by_category.get(category, [])

    def collectives(self) -> dict[int | str | None, Args]:
        """What is said of each collective, its name and process group among it, by the number of
        the operator that started it.
        """
        operators = self.of_category(Category.OPERATOR)
        named = [event.args for event in operators if event.name == COLLECTIVE_OPERATOR]
        return {args.external_id: args for args in named if args.external_id is not None}

    def _batch_of(self, categories: Collection[Category]) -> EventBatch:
        """The events of the categories."""
        events = list(chain.from_iterable(map(self.of_category, categories)))
        return self.batch(events, counts=True)

    def batch(self, events: Sequence[AnyEvent], *, counts: bool = False) -> EventBatch:
        """Those of these events that have a duration; those that are left out count if `counts`."""
        num_events = len(events)
        events = [event for event in events if event.dur is not None]
        self.num_without_duration += num_events - len(events) if counts else 0
        what = f"events of category {events[0].cat}" if events else "events"
        try:
            start = _nanoseconds([event.ts for event in events], what)
            end = start + _nanoseconds([event.dur for event in events], what)
            check_times(start, end, what)
        except ValueError as error:
            raise ProfileError(
                self.path, f"{error}: the trace is damaged, record it again"
            ) from error
        copies = _copies(events, start, end - start)
        if copies:
            events = [event for row, event in enumerate(events) if row not in copies]
            start, end = (np.delete(times, list(copies)) for times in (start, end))
            self.num_copies += len(copies) if counts else 0
        return EventBatch(events=events, start_ns=start, end_ns=end, threads=self._threads)


def _copies(events: Sequence[AnyEvent], start_ns: Ints, duration_ns: Ints) -> set[int]:
    """The rows of events that are equal to an earlier one, their numbers included.

    Events without a number may be alike, and so may events of up to one microsecond where times are
    whole microseconds.
    """
    order = np.lexsort((duration_ns, start_ns))
    start, duration = start_ns[order], duration_ns[order]
    is_equal = (np.diff(start) == 0) & (np.diff(duration) == 0)
    is_equal &= duration[1:] > (0 if (start % 1000).any() else 1000)
    beside = np.flatnonzero(is_equal)
    rows = np.unique(np.append(order[beside], order[beside + 1])).tolist()
    seen: set[bytes] = set()
    copies = set()
    for row in rows:
        args = events[row].args
        if not args.correlation and args.external_id is None:
            continue
        text = msgspec.json.encode(events[row])
        if text in seen:
            copies.add(row)
        seen.add(text)
    return copies


_OPERATOR_NAME = re.compile(r"::|Backward\d{0,2}$|^struct ")
"""Part of the names of operators and of autograd's nodes, which PyTorch 1.8 and 1.9 put in one
category with ranges.
"""
_NPU_TASK = re.compile(r"AI_|MIX_")
"""Beginning of the types of an NPU's tasks that compute; such events have no category."""


def _by_category(events: Iterable[AnyEvent]) -> dict[Category, list[AnyEvent]]:
    """The events; those of old versions of PyTorch and of NPUs in today's categories."""
    by_category: defaultdict[Category, list[AnyEvent]] = defaultdict(list)
    for category, neighbours in groupby(events, key=attrgetter("cat")):
        by_category[category].extend(neighbours)
    for event in by_category.pop(Category.OPERATOR_OR_RANGE, []):
        is_operator = _OPERATOR_NAME.search(event.name)
        by_category[Category.OPERATOR if is_operator else Category.RANGE].append(event)
    for event in by_category.pop(Category.TASK, []):
        if not event.name.startswith("event_"):
            by_category[Category.KERNEL].append(event)
    for event in by_category.pop(Category.NONE, []):
        if isinstance(event.args.task_type, str) and _NPU_TASK.match(event.args.task_type):
            by_category[Category.KERNEL].append(event)
    return dict(by_category)


_BACKSLASH = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')


def _escaped(backslash: re.Match[bytes]) -> bytes:
    """The escape sequence as it is, or two backslashes for one that begins none."""
    return backslash[0] if len(backslash[0]) > 1 else rb"\\"


NO_TIME_US = 1e300
"""Stands for a duration that is no number: without any duration, an event would be no work."""
_WORD = rb"[+-]?\b(?i:nan|inf(?:inity)?)(?:\.\d+)?\b"
_NO_NUMBER = re.compile(
    rb'(?P<duration>"dur"\s*:\s*)' + _WORD + rb'|"(?:[^"\\]|\\.)*"|' + _WORD, re.DOTALL
)
"""A text, or one of the words that programs write for what is no number, and JSON has not."""


def _without_word(match: re.Match[bytes]) -> bytes:
    """A text as it is, and `null` or NO_TIME_US for what is no number."""
    if match["duration"] is not None:
        return match["duration"] + str(NO_TIME_US).encode()
    return match[0] if match[0].startswith(b'"') else b"null"


def _is_open(content: bytes | bytearray) -> bool:
    """Whether the content is a list without its last bracket."""
    begin, end = content[:MAX_EXCERPT].lstrip(), content[-MAX_EXCERPT:].rstrip()
    return begin.startswith(b"[") and not end.endswith(b"]")


def _as_file(content: bytes | bytearray, file: type[_FileT], event: type) -> _FileT:
    """The file, or the bare list of events that Chrome's format allows in its place, whose last
    bracket may be missing.
    """
    if content.lstrip()[:1] == b"[":
        content = content.rstrip().rstrip(b",")
        if content.endswith(b"}"):
            content += b"]"
        decoder = msgspec.json.Decoder(list[event])  # type: ignore[valid-type]
        return file(traceEvents=decoder.decode(content))
    return msgspec.json.decode(content, type=file)


_TIME_AS_TEXT = re.compile(r"got `str` - at `\$(?:\.traceEvents)?\[\.*\d*\]\.(?:ts|dur)`")
"""Part of the error of msgspec for a trace whose times are texts."""


def _decode(
    path: Path, content: bytes | bytearray, *, is_exact: bool = False
) -> _File[float] | _File[Decimal]:
    """The file, its times as floats or as exact decimals."""
    try:
        if is_exact:
            return _as_file(content, _File[Decimal], Event[Decimal])
        return _as_file(content, _File[float], Event[float])
    except msgspec.ValidationError as error:
        if not is_exact and _TIME_AS_TEXT.search(str(error)):
            return _decode(path, content, is_exact=True)  # times as texts, as torch_npu writes them
        _refuse_lines(path, content)
        refuse_another_kind(path, content, "a trace of torch.profiler", ProfileError)
        raise ProfileError(
            path, f"needed {TORCH_TRACE}, but it has other contents ({error}): {HOW_TO_TRACE}"
        ) from error
    except msgspec.DecodeError as error:
        _refuse_lines(path, content)
        # a path of Windows in a name, whose backslashes PyTorch writes as they are
        mended = _BACKSLASH.sub(_escaped, content)
        if "escape" in str(error) and mended != content:
            return _decode(path, mended, is_exact=is_exact)
        mended = _NO_NUMBER.sub(_without_word, content)
        if mended != content:
            return _decode(path, mended, is_exact=is_exact)
        raise ProfileError(path, _what_is_malformed(content, str(error))) from error
    except UnicodeDecodeError as error:
        raise ProfileError(
            path, f"a name is not UTF-8 ({error}): rename it and record again"
        ) from error
    except RecursionError as error:
        raise ProfileError(path, "nested too deeply for a trace") from error


_LINES = re.compile(rb"\s*\{[^\n]*\}[ \r]*\n\s*\{")
"""Beginning of a file with one JSON object on each line."""


def _refuse_lines(path: Path, content: bytes | bytearray) -> None:
    """Raise ProfileError for JSON lines."""
    if _LINES.match(content):
        raise ProfileError(
            path,
            f"needed {TORCH_TRACE}, got JSON lines: if each line is an event, put commas between "
            "them and brackets around all; if each is a trace, make a file of each",
        )


def _what_is_malformed(content: bytes | bytearray, error: str) -> str:
    """What is wrong with the JSON, from the error of its decoder."""
    byte = re.search(r"\(byte (\d+)\)", error)
    place = len(content) if byte is None else int(byte[1])
    if byte is None or ("number" in error and place >= len(content) - 1):
        return "truncated: copy it again or export it again"
    before = content[max(0, place - MAX_EXCERPT) : place].decode(errors="replace")
    return (
        f"{error}, after {before!r}. PyTorch writes a double quote in a range's name as it is, "
        "which ends the name: if one stands there, rename the range and record again"
    )


def _nanoseconds(times_us: Sequence[float | Decimal | None], what: str) -> Ints:
    """The times in whole nanoseconds; raise ValueError if one is missing or out of range."""
    rounded = np.array(times_us, dtype=np.float64)  # NaN for None
    is_time = np.abs(rounded) <= MAX_TIME_NS / 1000
    if not is_time.all():
        worst = times_us[int(is_time.argmin())]
        got = "no number" if worst is None or worst == NO_TIME_US else f"{worst} us"
        raise ValueError(f"{what} need times within {MAX_TIME_NS} ns of zero, got {got}")
    if times_us and isinstance(times_us[0], Decimal):
        exact = cast("Sequence[Decimal]", times_us)
        return np.array([round(time * 1000) for time in exact], dtype=np.int64)
    # multiplied apart from the fraction, whose last bits would be lost otherwise
    whole = np.floor(rounded)
    return whole.astype(np.int64) * 1000 + np.rint((rounded - whole) * 1000).astype(np.int64)
