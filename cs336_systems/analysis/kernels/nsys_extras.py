"""What an export of nsys has beside kernels, calls and ranges: samples of the device's counters,
allocations of memory, calls of libraries, and stacks of calls of CUDA.

nsys writes these tables only if it was told to record them.
"""

import re

import numpy as np

from ..columns import NO_ROWS, Ints, joined
from ..memory.profile import Place
from .nsys_tables import Tables
from .trace import NO_RANGES, NO_SAMPLES, MemoryEvents, Ranges, Samples

SAMPLE_TABLE = "GPU_METRICS"
COUNTER_TABLE = "TARGET_INFO_GPU_METRICS"
MEMORY_TABLE = "CUDA_GPU_MEMORY_USAGE_EVENTS"
STACK_TABLE = "CUDA_CALLCHAINS"
LIBRARY_TABLES = ("CUBLAS_EVENTS", "CUDNN_EVENTS", "OSRT_API")
_COUNTER = re.compile(
    r"((?:Tensor|SMs?) Active|SM Issue|DRAM \w+ Bandwidth|NVLink .*|PCIe \w+ Throughput) "
    r"\[Throughput %\]"
)
"""Counters whose values say how much of a unit is in use."""
NO_COUNTER = -1
GPU_OF_TYPE = 0xFF
"""The bits of a `typeId` that hold the number of the GPU."""


def samples(tables: Tables) -> Samples:
    """The samples of counters that say how much of a unit is in use, by counter and time."""
    named = {}
    for key in tables.rows(COUNTER_TABLE, "typeId", "metricId", "metricName"):
        if known := _COUNTER.fullmatch(str(key[2])):
            named[key[:2]] = tables.strings.id(known[1])
    if not named:
        return NO_SAMPLES
    wanted = ", ".join({str(metric) for _, metric in named})
    columns = {"timestamp": None, "typeId": None, "metricId": None, "value": 0}
    time, device, metric, value = tables.ints(
        SAMPLE_TABLE, columns, where=f"metricId IN ({wanted})"
    )
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
    time, device, size, kind, operation, pool = tables.ints(
        MEMORY_TABLE,
        {"start": None, "deviceId": 0, "bytes": 0, "memKind": 0, "memoryOperationType": 0},
        {"localMemoryPoolAddress": 0},
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


def library_calls(tables: Tables) -> Ranges:
    """Calls of cuBLAS, cuDNN and the operating system."""
    parts = []
    for table in LIBRARY_TABLES:
        columns = {"start": None, "end": None, "globalTid": 0, "nameId": 0}
        start, end, thread, name = tables.ints(table, columns)
        tables.durations(table, start, end)
        parts.append(
            Ranges(
                name=tables.strings.column(name),
                process=thread,
                thread=thread,
                start_ns=start,
                end_ns=end,
                is_nested=np.ones(len(start), dtype=np.bool_),
            )
        )
    return joined(NO_RANGES, *parts)


def call_places(tables: Tables, chain: Ints) -> tuple[tuple[Place, ...], Ints]:
    """Distinct lines of Python, and the index of that of each call's stack; -1 for none."""
    return (), NO_ROWS
