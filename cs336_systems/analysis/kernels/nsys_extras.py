"""What an export of nsys has beside kernels, calls and ranges: samples of the device's counters,
allocations of memory, calls of libraries, and stacks of calls of CUDA.

nsys writes these tables only if it was told to record them.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from ..columns import Ints, joined
from ..memory.profile import Place
from ..memory.snapshot import Frame
from ..memory.stacks import code_places
from .nsys_tables import Tables
from .trace import ApiCalls, Events, MemoryEvents, Samples

SAMPLE_TABLE = "GPU_METRICS"
COUNTER_TABLE = "TARGET_INFO_GPU_METRICS"
MEMORY_TABLE = "CUDA_GPU_MEMORY_USAGE_EVENTS"
RANGE_TABLE = "NVTX_EVENTS"
LIBRARY_TABLES = ("CUBLAS_EVENTS", "CUDNN_EVENTS", "OSRT_API")
_COUNTER = re.compile(
    r"((?:Tensor|SMs?) Active|SM Issue|DRAM \w+ Bandwidth|NVLink .*|PCIe \w+ Throughput) "
    r"\[Throughput %\]"
)
"""Counters whose values say how much of a unit is in use."""
IS_SHARE = (
    f"metricId IN (SELECT metricId FROM {COUNTER_TABLE} WHERE metricName LIKE '%Throughput%')"
)
"""The condition of a sample in percent."""
STACK = "Python Backtrace on CUDA"
IS_OF_STACKS = f"text = '{STACK}'"
"""The condition of the row that names the domain of marks with stacks of calls of CUDA."""
IS_STACK = f"jsonText LIKE '{{\"{STACK}\"%'"
"""The condition of a mark with the stack of a call of CUDA."""
NO_COUNTER = -1
GPU_OF_TYPE = 0xFF
"""The bits of a `typeId` that hold the number of the GPU."""


def samples(tables: Tables) -> Samples:
    """The samples of counters that say how much of a unit is in use, by counter and time."""
    named = {}
    for key in tables.rows(COUNTER_TABLE, "typeId", "metricId", "metricName"):
        if known := _COUNTER.fullmatch(str(key[2])):
            named[key[:2]] = tables.strings.id(known[1])
    columns = {"timestamp": None, "typeId": None, "metricId": None, "value": 0}
    if not named or not tables.has(SAMPLE_TABLE, *columns):
        return Samples.empty()
    time, device, metric, value = tables.ints(SAMPLE_TABLE, columns, where=IS_SHARE)
    order = np.lexsort((time, metric, device))
    time, device, metric, value = (column[order] for column in (time, device, metric, value))
    is_first = (np.diff(device, prepend=-1) != 0) | (np.diff(metric, prepend=-1) != 0)
    first = np.flatnonzero(is_first)
    keys = zip(device[first].tolist(), metric[first].tolist(), strict=True)
    series = [named.get(key, NO_COUNTER) for key in keys]
    counter = np.repeat(np.array(series, dtype=np.int64), np.diff(first, append=len(time)))
    # the first sample of a series began at an unknown time
    rows = np.flatnonzero(~is_first & (counter != NO_COUNTER))
    number = dict(tables.rows("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId"))
    gpus, index = np.unique(device[rows] & GPU_OF_TYPE, return_inverse=True)
    numbers = [number.get(gpu, gpu) for gpu in gpus.tolist()]
    return Samples(
        counter=counter[rows],
        device=np.array(numbers, dtype=np.int64)[index],
        start_ns=time[rows - 1],
        end_ns=time[rows],
        value=value[rows],
    )


def memory_events(tables: Tables) -> MemoryEvents:
    """Allocations and frees of memory, of each device and kind."""
    columns = {"start": None, "deviceId": 0, "bytes": 0, "memKind": 0, "memoryOperationType": 0}
    if not tables.has(MEMORY_TABLE, *columns):
        return MemoryEvents.empty()
    time, device, size, kind, operation, pool = tables.ints(
        MEMORY_TABLE, columns, {"localMemoryPoolAddress": 0}
    )
    labels = tables.names("ENUM_CUDA_MEM_KIND", "label")
    # cudaMallocAsync takes from a pool, which keeps what it frees
    labels |= {~number: f"{label}, in a pool" for number, label in labels.items()}
    names = tables.names("ENUM_CUDA_DEV_MEM_EVENT_OPER", "label")
    frees = [number for number, name in names.items() if "dealloc" in name.lower()]
    return MemoryEvents(
        kind=tables.strings.column(np.where(pool != 0, ~kind, kind), labels, "unknown"),
        device=device,
        time_ns=time,
        size=np.where(np.isin(operation, frees), -size, size),
    )


def library_calls(tables: Tables) -> Events:
    """Calls of cuBLAS, cuDNN and the operating system."""
    parts = []
    columns = {"start": None, "end": None, "globalTid": 0, "nameId": 0}
    for table in LIBRARY_TABLES:
        if not tables.has(table, *columns):
            continue
        start, end, thread, name = tables.ints(table, columns)
        tables.check_times(table, start, end)
        names = tables.strings.column(name)
        parts.append(Events(name=names, process=thread, thread=thread, start_ns=start, end_ns=end))
    return joined(Events.empty(), *parts)


def call_places(tables: Tables, calls: ApiCalls) -> tuple[tuple[Place, ...], Ints]:
    """Distinct lines of the program, and for each call the index of the innermost one on its stack
    of Python; -1 for none.

    nsys marks the stack on the calling thread just before the call.
    """
    places: dict[Place, int] = {}
    of_calls = np.full(len(calls), -1, dtype=np.int64)
    columns = ("globalTid", "start", "jsonText", "domainId", "text")
    marks = tables.rows(RANGE_TABLE, *columns, where=IS_STACK)
    known: dict[str, int] = {}
    texts = tables.names("StringIds", "value")
    order = np.lexsort((calls.start_ns, calls.thread))
    keys = list(zip(calls.thread[order].tolist(), calls.start_ns[order].tolist(), strict=True))
    for thread, time, text, *_ in marks:
        at = bisect_left(keys, (thread, time))
        if at < len(keys) and keys[at][0] == thread:
            if text not in known:
                place = _innermost(text, texts)
                known[text] = -1 if place is None else places.setdefault(place, len(places))
            of_calls[order[at]] = known[text]
    return tuple(places), of_calls


def notes(tables: Tables, places: Sequence[Place]) -> Iterator[str]:
    """A sentence about stacks that were recorded, and are not in the export."""
    if not places and tables.rows(RANGE_TABLE, "text", where=IS_OF_STACKS):
        yield (
            "Stacks of Python were recorded, and are not in this export: export again with `nsys "
            "export --type=sqlite --include-json=true`."
        )


def _innermost(text: str, texts: Mapping[int, str]) -> Place | None:
    """The innermost line outside of libraries of a stack that nsys wrote as JSON; None for none.

    Functions and files are numbers of the report's `texts`.
    """
    try:
        (stack,) = msgspec.json.decode(text, type=dict[str, _Stack]).values()
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError):
        return None
    frames = [
        Frame(texts.get(frame.file, ""), frame.line, texts.get(frame.function, ""))
        for frame in stack.frames
    ]
    return next(iter(code_places(tuple(frames))), None)


class _Frame(msgspec.Struct, rename="pascal"):
    function: int = 0
    file: int = 0
    line: int = 0


class _Stack(msgspec.Struct, rename="pascal"):
    frames: list[_Frame]
