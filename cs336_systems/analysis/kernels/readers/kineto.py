"""Reads a trace of torch.profiler (Kineto), the JSON that its `export_chrome_trace` writes.

The correlation id connects a kernel with the call that launched it. The device's copies of
annotations are not read: they show when a range's kernels ran, and lose kernels that another thread
launched.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ....text import counted
from ...columns import GZIP_MAGIC, ZIP_MAGIC, Ints, ProfileError, joined
from ..calls import ApiCallKind
from ..collectives import of_collective
from ..kineto_content import TORCH_TRACE
from ..kineto_events import HOW_TO_TRACE, Args, Category, EventBatch, TraceEvents
from ..kineto_messages import message_of
from ..kineto_operators import LinkedOperators, frames_of_program, linked_operators, shape_text
from ..trace import (
    NOWHERE,
    ApiCalls,
    DeviceWork,
    Events,
    GroupNesting,
    Launches,
    Message,
    Nodes,
    Operators,
    Ranges,
    Strings,
    Trace,
    of_names,
    with_copies_apart,
    without_call,
)
from . import Reader

GRAPH_LAUNCHES = re.compile(r"(?:cuda|cu|hip)GraphLaunch")


_BATCHES = (
    [Category.KERNEL],
    [Category.COPY, Category.FILL],
    [Category.DRIVER_CALL, Category.CALL],
    [Category.RANGE],
)
"""Categories of the events that are read together: kernels, copies, calls of CUDA, ranges."""


def read_kineto(path: Path) -> Trace:
    """Read the trace in the JSON at `path`, plain or in gzip; raise ProfileError for other files.

    If no device ran anything, the host's operators take the place of kernels.
    """
    events = TraceEvents(path)
    device_names, has_operators = events.device_names, events.has_operators
    distributed = events.distributed
    kernels, copies, calls, ranges = events.batches(*_BATCHES)
    is_of_host = not len(kernels) and not len(copies)
    collectives = events.collectives()
    session = _Session(path, calls, ranges, collectives)
    operators = linked_operators(events, None if is_of_host else (*kernels.events, *copies.events))
    frames, odd = frames_of_program(events), tuple(_what_is_odd(events))
    del events  # it holds most of the memory
    if is_of_host:
        work = session.work_of_host(operators.calls)
    else:
        work = session.work(kernels, _names(kernels, collectives))
    copied = session.work(copies, [event.name for event in copies.events])
    trace = Trace(
        kernels=work,
        copies=copied,
        nodes=Nodes(**session.on_host(operators.nodes), forward=operators.forward),
        operators=session.operators(operators),
        frames=Events(**session.on_host(frames.functions)),
        calls_of_modules=session.ranges_of(frames.modules),
        has_operators=has_operators,
        rank=distributed.rank,
        world_size=distributed.world_size,
        ranges=session.ranges,
        api_calls=session.calls,
        strings=session.strings.all,
        messages=tuple(session.messages),
        device_names=device_names,
        is_of_host=is_of_host,
        lacks_device=is_of_host and session.uses_device,
        notes=(*session.notes(is_of_host), *odd),
    )
    return with_copies_apart(trace)


class _Session:
    """The host's calls and ranges, and the work that they launched."""

    def __init__(
        self,
        path: Path,
        calls: EventBatch,
        ranges: EventBatch,
        collectives: Mapping[int | str | None, Args],
    ) -> None:
        self.path, self._collectives = path, collectives
        self.strings = Strings()
        self.messages: dict[Message, int] = {}
        self.calls = ApiCalls(
            **self.on_host(calls),
            correlation=self._ints(calls, [event.args.correlation for event in calls.events]),
        )
        self._launches = Launches(self.calls)
        self.ranges = self.ranges_of(ranges)

    @property
    def uses_device(self) -> bool:
        """Whether the host launched something on a device, or sent messages by NCCL, which only
        devices do.
        """
        calls, ranges, strings = self.calls, self.ranges, self.strings.all
        is_launch = of_names(calls.name, strings, ApiCallKind.LAUNCH.is_done_by, np.bool_)
        is_message = of_names(ranges.name, strings, lambda name: name.startswith("nccl:"), np.bool_)
        return bool(is_launch.any() or is_message.any())

    def notes(self, is_of_host: bool) -> Iterator[str]:
        """Notes on what the file lacks."""
        if not is_of_host and not len(self.calls):
            yield (
                f"No calls of the device's runtime, so no kernel's launch is known: {HOW_TO_TRACE}."
            )
        if is_of_host and self.uses_device:
            yield (
                "The program used a device, whose work is not in the file: the operators of the "
                "host are shown, whose times are those of launching."
            )
        if not len(self.ranges):
            yield (
                "There are no ranges: record with `torch.profiler.record_function` around "
                "what you want to see."
            )

    def _messages(self, kernels: Sequence[Args]) -> Ints:
        """The message of each kernel, by itself or the operator that started its collective. If an
        operator started several kernels, its bytes are those of the first.
        """
        index, started = [], set[int | str | None]()
        for args in kernels:
            said = [args]
            if (operator := self._collectives.get(args.external_id)) is not None:
                said.append(operator)
            elif args.collective is None:
                index.append(-1)
                continue
            message = message_of(said)
            if operator is not None and args.external_id in started:
                message = replace(message, num_bytes=0)
            started.add(args.external_id)
            index.append(self.messages.setdefault(message, len(self.messages)))
        return np.array(index, dtype=np.int64)

    def _process(self, correlation: Ints) -> int:
        """The process that launched the device's work, since events of a device do not name it: of
        several, the only one with calls of these correlation ids. A device may log calls of its
        own under another process.
        """
        calls = self.calls
        of_events = calls.process if len(calls) else self.ranges.process
        processes = np.unique(of_events).tolist()
        if len(processes) > 1:
            launching = calls.process[np.isin(calls.correlation, correlation)]
            processes = np.unique(launching).tolist() or processes
        if not processes:
            return 0
        if len(processes) > 1:
            raise ProfileError(
                self.path,
                f"needed the trace of one process, got kernels and {len(processes)} processes "
                f"that may have launched them ({', '.join(map(str, processes[:3]))}, ...): read "
                "each rank's own file",
            )
        return int(processes[0])

    def _ints(self, batch: EventBatch, values: Sequence[int | str | None]) -> Ints:
        try:
            return np.array(values, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            pass  # some are texts or missing
        try:
            whole = [int(value, 0) if isinstance(value, str) else value or 0 for value in values]
            return np.array(whole, dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise ProfileError(
                self.path,
                f"events of category {batch.events[0].cat} need whole numbers of 64 bits, and "
                f"have others ({error}): the trace is damaged, record it again",
            ) from error

    def on_host(self, batch: EventBatch) -> dict[str, Ints]:
        """The columns of `Events` for what happened on the host's threads."""
        thread = batch.thread
        return {
            "name": self.strings.ids(event.name for event in batch.events),
            "process": self._ints(batch, [process for process, _ in batch.threads])[thread],
            "thread": thread,
            "start_ns": batch.start_ns,
            "end_ns": batch.end_ns,
        }

    def ranges_of(self, batch: EventBatch) -> Ranges:
        """Events of the host as nested ranges."""
        names = self.strings.ids(without_call(event.name) for event in batch.events)
        columns = self.on_host(batch) | {"name": names}
        return Ranges(**columns, is_nested=np.ones(len(batch), dtype=np.bool_))

    def work(self, batch: EventBatch, names: Sequence[str]) -> DeviceWork:
        """The device's work, under these names."""
        args = [event.args for event in batch.events]
        correlation = self._ints(batch, [arg.correlation for arg in args])
        launched_by = self._process(correlation) if len(batch) else 0
        process = np.full(len(batch), launched_by, dtype=np.int64)
        launch = self._launches.columns(process, correlation)
        name = self.strings.ids(names)
        strings = self.strings.all
        is_graph = of_names(
            self.calls.name, strings, lambda text: bool(GRAPH_LAUNCHES.match(text)), np.bool_
        )
        marks = self._marks([(arg.name, arg.autograd_phase) for arg in args])
        return DeviceWork(
            name=name,
            process=process,
            device=self._ints(batch, [arg.ran_on for arg in args]),
            stream=self._ints(batch, [arg.stream for arg in args]),
            start_ns=batch.start_ns,
            end_ns=batch.end_ns,
            is_in_graph=np.append(is_graph, False)[launch["call"]],
            mark=marks,
            message=self._messages(args),
            **launch,
        )

    def _marks(self, named: Sequence[tuple[object, object]]) -> Ints:
        """The row of a range for each marked kernel, -1 for others; each name gets one range of
        no time at the end. `named` has the mark's name and phase of autograd for each kernel.
        """
        texts = [""] * len(named)
        for index, (name, phase) in enumerate(named):
            if isinstance(name, str) and name:
                texts[index] = f"{name} ({phase})" if isinstance(phase, str) else name
        marks = [text for text in dict.fromkeys(texts) if text]
        rows = {text: row for row, text in enumerate(marks, start=len(self.ranges))}
        if marks:
            nowhere = np.full(len(marks), NOWHERE, dtype=np.int64)
            marked = Ranges(
                name=self.strings.ids(marks),
                process=nowhere,
                thread=nowhere,
                start_ns=np.zeros_like(nowhere),
                end_ns=np.zeros_like(nowhere),
                is_nested=np.zeros(len(marks), dtype=np.bool_),
            )
            self.ranges = joined(self.ranges, marked)
        return np.array([rows.get(text, -1) for text in texts], dtype=np.int64)

    def operators(self, linked: LinkedOperators) -> Operators:
        """Calls of operators, with their shapes."""
        calls = linked.calls
        shapes = self.strings.ids(shape_text(event) for event in calls.events)
        return Operators(**self.on_host(calls), is_recorded=linked.is_recorded, shape=shapes)

    def work_of_host(self, batch: EventBatch) -> DeviceWork:
        """Operators of the host as work, where each is its own launch and the stream is its
        thread.
        """
        if not len(batch):
            raise ProfileError(
                self.path, f"no kernels of a device and no operators of the host: {HOW_TO_TRACE}"
            )
        start, none = batch.start_ns, np.full(len(batch), -1, dtype=np.int64)
        columns = self.on_host(batch)
        columns["end_ns"] = start + self_times(batch.thread, start, batch.end_ns)
        return DeviceWork(
            **columns,
            device=np.zeros_like(start),
            stream=batch.thread,
            is_launched=np.ones(len(start), dtype=np.bool_),
            launch_ns=start,
            call=none,
            is_in_graph=np.zeros(len(start), dtype=np.bool_),
            mark=none,
            message=none,
        )


def _what_is_odd(events: TraceEvents) -> Iterator[str]:
    """Sentences about a file that is not as PyTorch writes it."""
    if events.num_copies:
        yield f"{events.num_copies} events stand in the file more than once, and count once."
    if events.num_without_duration:
        left_out = counted(events.num_without_duration, "event")
        yield (
            f"Left out: {left_out} without a duration. What one event begins and another ends is "
            "not read."
        )
    if events.is_open:
        yield "The list of events has no end: the file may have been cut off, and lack later ones."


def _names(kernels: EventBatch, collectives: Mapping[int | str | None, Args]) -> list[str]:
    """The names of the kernels; the collective stands before that of a kernel whose own name does
    not tell it.
    """
    names = []
    for event in kernels.events:
        kind = event.args.collective
        started = collectives.get(event.args.external_id)
        if kind is None and started is not None:
            kind = str(started.collective or "")
        names.append(event.name if kind is None else of_collective(event.name, kind))
    return names


def self_times(thread: Ints, start_ns: Ints, end_ns: Ints) -> Ints:
    """For each interval, its duration without that of the intervals inside it on its thread.

    Intervals of one thread nest. If some cross, as in a damaged file, the result is still never
    negative.
    """
    alone: Ints = end_ns - start_ns
    lasting = np.flatnonzero(alone > 0)
    parent = GroupNesting(thread[lasting], start_ns[lasting], end_ns[lasting]).parent
    inner, outer = lasting[parent >= 0], lasting[parent[parent >= 0]]
    np.subtract.at(alone, outer, np.minimum(end_ns[inner], end_ns[outer]) - start_ns[inner])
    return alone.clip(0)


def recognises(_: Path, head: bytes) -> bool:
    """Whether the file is compressed or begins as JSON does."""
    return head.startswith((GZIP_MAGIC, ZIP_MAGIC)) or head.lstrip()[:1] in (b"{", b"[")


READER = Reader(needed=TORCH_TRACE, recognises=recognises, read=read_kineto)
