"""Reads a trace of torch.profiler (Kineto), the JSON that its `export_chrome_trace` writes.

The correlation id connects a kernel with the call that launched it. The device's copies of annotations are not read:
they show when a range's kernels ran, and lose kernels that another thread launched.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cs336_systems.analysis.columns import Ints, ProfileError
from cs336_systems.analysis.kernels.events import HOW_TO_RECORD, Batch, Events
from cs336_systems.analysis.kernels.lookup import Launches, Strings
from cs336_systems.analysis.kernels.trace import ApiCalls, DeviceWork, Ranges, Trace, with_copies_apart

KERNELS = frozenset({"kernel"})
COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
CALLS = frozenset({"cuda_runtime", "cuda_driver"})
RANGES = frozenset({"user_annotation"})
OPERATORS = frozenset({"cpu_op"})

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
BOOKKEEPING = "autograd::engine::evaluate_function: "
"""Operators whose names begin so wrap a node of autograd, which is an event of its own, and add the engine's dispatch
and hooks. They are left out, so that times of operators add up."""


def read_kineto(path: Path) -> Trace:
    """Read the trace in the JSON at `path`, plain or in gzip; raise ProfileError for a file that is not a trace.

    If no device ran anything, the host's operators take the place of kernels.
    """
    events = Events(path)
    device_names = events.device_names
    kernels, copies, calls, ranges = events.batches(KERNELS, COPIES, CALLS, RANGES)
    is_of_host = not (len(kernels) or len(copies))
    operators = events.batches(OPERATORS)[0] if is_of_host else None
    del events  # it holds most of the memory
    session = _Session(path, calls, ranges)
    work = session.work(kernels) if operators is None else session.work_of_host(operators)
    trace = Trace(
        kernels=work,
        copies=session.work(copies),
        ranges=session.ranges,
        api_calls=session.calls,
        strings=session.strings.all,
        device_names=device_names,
        is_of_host=is_of_host,
        notes=tuple(session.notes(is_of_host)),
    )
    return with_copies_apart(trace)


class _Session:
    """The host's calls and ranges, and the work that they launched."""

    def __init__(self, path: Path, calls: Batch, ranges: Batch) -> None:
        self.path = path
        self.strings = Strings()
        self._threads: dict[tuple[int | str, int | str], int] = {}
        self.calls = ApiCalls(
            **self._on_host(calls), correlation=self._ints(calls, [event.args.correlation for event in calls.events])
        )
        self._launches = Launches(self.calls)
        self.ranges = self._ranges(ranges)

    def notes(self, is_of_host: bool) -> Iterator[str]:
        """Notes on what the file lacks."""
        if not is_of_host and not len(self.calls):
            yield f"No calls of the CUDA runtime, so no kernel's launch is known: {HOW_TO_RECORD}."
        if is_of_host and len(self.calls):
            yield "CUDA was called, but no device ran anything: the operators of the host are shown."
        if not len(self.ranges):
            yield "There are no ranges: record with `torch.profiler.record_function` around what you want to see."

    def _process(self) -> int:
        """The process that launched the device's work, since events of a device do not name it."""
        processes = np.unique(self.calls.process).tolist() or np.unique(self.ranges.process).tolist() or [0]
        if len(processes) > 1:
            raise ProfileError(
                self.path,
                f"needed the trace of one process, got kernels and {len(processes)} processes that may have launched "
                f"them ({', '.join(map(str, processes[:3]))}, ...): read each rank's own file",
            )
        return int(processes[0])

    def _ints(self, batch: Batch, values: Sequence[int | str]) -> Ints:
        try:
            return np.array(values, dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise ProfileError(
                self.path,
                f"events of category {batch.events[0].cat} need whole numbers of 64 bits, and have others ({error}): "
                "the trace is damaged, record it again",
            ) from error

    def _on_host(self, batch: Batch) -> dict[str, Ints]:
        """Columns of events on the host's threads."""
        number = self._threads
        threads = [number.setdefault((event.pid, event.tid), len(number)) for event in batch.events]
        thread = np.array(threads, dtype=np.int64)
        return {
            "name": self.strings.ids(event.name for event in batch.events),
            "process": self._ints(batch, [process for process, _ in number])[thread],
            "thread": thread,
            "start_ns": batch.start_ns,
            "duration_ns": batch.duration_ns,
        }

    def _ranges(self, batch: Batch) -> Ranges:
        columns = self._on_host(batch)
        return Ranges(
            name=columns["name"],
            process=columns["process"],
            thread=columns["thread"],
            start_ns=batch.start_ns,
            end_ns=batch.start_ns + batch.duration_ns,
            is_open=np.zeros(len(batch), dtype=np.bool_),
            is_nested=np.ones(len(batch), dtype=np.bool_),
        )

    def work(self, batch: Batch) -> DeviceWork:
        """The device's work."""
        args = [event.args for event in batch.events]
        correlation = self._ints(batch, [a.correlation for a in args])
        process = np.full(len(batch), self._process() if len(batch) else 0, dtype=np.int64)
        call = self._launches.find(process, correlation)
        is_launched, launch, thread = self._launches.columns(call)
        name = self.strings.ids(event.name for event in batch.events)
        graph_calls = [index for index, text in enumerate(self.strings.all) if text.startswith(GRAPH_LAUNCHES)]
        return DeviceWork(
            name=name,
            process=process,
            device=self._ints(batch, [a.own_device for a in args]),
            stream=self._ints(batch, [a.stream for a in args]),
            start_ns=batch.start_ns,
            duration_ns=batch.duration_ns,
            is_launched=is_launched,
            launch_ns=launch,
            thread=thread,
            is_in_graph=is_launched & np.isin(np.append(self.calls.name, -1)[call], graph_calls),
        )

    def work_of_host(self, batch: Batch) -> DeviceWork:
        """Operators of the host as work, where each is its own launch and the stream is its thread."""
        if not len(batch):
            raise ProfileError(self.path, f"no kernels of a device and no operators of the host: {HOW_TO_RECORD}")
        columns = self._on_host(batch)
        bookkeeping = [index for index, text in enumerate(self.strings.all) if text.startswith(BOOKKEEPING)]
        is_operator = ~np.isin(columns["name"], bookkeeping)
        columns = {name: column[is_operator] for name, column in columns.items()}
        thread, start = columns["thread"], columns["start_ns"]
        return DeviceWork(
            name=columns["name"],
            process=columns["process"],
            device=np.zeros_like(start),
            stream=thread,
            start_ns=start,
            duration_ns=self_times(thread, start, columns["duration_ns"]),
            is_launched=np.ones(len(start), dtype=np.bool_),
            launch_ns=start,
            thread=thread,
            is_in_graph=np.zeros(len(start), dtype=np.bool_),
        )


def self_times(thread: Ints, start_ns: Ints, duration_ns: Ints) -> Ints:
    """For each interval, its duration without that of the intervals inside it on its thread.

    Intervals of one thread nest. If some cross, as in a damaged file, the result is still never negative.
    """
    own = duration_ns.copy()
    lasting = np.flatnonzero(duration_ns > 0)
    start, end = start_ns[lasting], start_ns[lasting] + duration_ns[lasting]
    order = np.lexsort((-end, start, thread[lasting]))
    rows, start, end, on_thread = lasting[order], start[order], end[order], thread[lasting[order]]

    # depth of each interval: the number that began before it on its thread, less the number that ended
    times, ranks = np.unique(np.concatenate((start, end)), return_inverse=True)
    key = np.tile(on_thread * len(times), 2) + ranks
    began, position = key[: len(rows)], np.arange(len(rows))
    depth = position - np.searchsorted(np.sort(key[len(rows) :]), began, side="right")

    # the interval around each one is the last before it whose depth is smaller by one
    level = depth * len(rows) + position
    by_level = np.argsort(level)
    inner = np.flatnonzero(depth > 0)
    outer = by_level[np.searchsorted(level[by_level], level[inner] - len(rows)) - 1]
    inside = np.maximum(np.minimum(end[inner], end[outer]) - start[inner], 0)
    np.subtract.at(own, rows[outer], inside)
    return np.maximum(own, 0)
