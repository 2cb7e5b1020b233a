"""Reads reports of Nsight Systems: exports them to SQLite by the program nsys, and reads the
export.

Tables without rows are missing, and columns vary by version, so the reader looks at the schema
first. It opens the file read-only, and reads plain tables only, whole and without joins.
"""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from ....temporary import run_for_this_process, temporary_directory
from ....text import counted
from ...columns import SQLITE_MAGIC, Ints, Mask, ProfileError, chosen, joined, read_head, what_it_is
from .. import NsysError, find_nsys, nsys_extras
from ..calls import ApiCallKind
from ..known_ranges import phase_named
from ..nsys_tables import Tables
from ..trace import (
    ApiCalls,
    DeviceWork,
    Launches,
    Ranges,
    Times,
    Trace,
    of_names,
    with_copies_apart,
    without_call,
)
from . import Reader

REPORT_ENDING = ".nsys-rep"


def export(report: Path, directory: Path) -> Path:
    """Export the report to a SQLite file in `directory` and return its path; raise NsysError if
    nsys fails.
    """
    database = directory / f"{report.stem}.sqlite"
    command = [
        find_nsys(),
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={database}",
    ]
    output = directory / "output"
    # stacks of Python are JSON, for which older versions have no option
    status = run_for_this_process([*command, "--include-json=true", str(report)], output)
    if status:
        status = run_for_this_process([*command, str(report)], output)
    if status or not database.is_file():
        said = " ".join(output.read_text(encoding="utf-8", errors="replace").split())[-500:]
        raise NsysError(f"{report}: nsys export ended with status {status}: {said}")
    return database


KERNEL_TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"
GRAPH_TABLE = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
CALL_TABLE = "CUPTI_ACTIVITY_KIND_RUNTIME"
COPY_TABLE = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILL_TABLE = "CUPTI_ACTIVITY_KIND_MEMSET"
RANGE_TABLE = "NVTX_EVENTS"

HEADER_BYTES = 100
THREAD_BITS = 24
"""Lowest bits of a `globalTid`, which hold the thread's id; without them it is the `globalPid`."""
PUSH_POP, START_END = 59, 60
"""Numbers of the kinds of ranges, for old files that do not name the kinds."""
NO_STRING = -1
NSYS_EXPORT = "the SQLite export of an nsys report"
_AROUND_NAME = re.compile(
    r"^autograd::engine::evaluate_function: |^torch\.nn\.modules\.|\.forward$"
)
"""What `nsys --pytorch` puts around the name of an operator or module."""
_CALL_OF_MODULE = "Module.__call__"
"""The range that `nsys --pytorch=functions-trace` puts around that of each module's forward."""

HOW_TO_RUN_NSYS = (
    "record with `nsys profile --trace=cuda,nvtx`, then export with `nsys export "
    "--type=sqlite REPORT.nsys-rep`"
)


def read_nsys(path: Path) -> Trace:
    """Read a report of nsys, which is exported for that, or the SQLite export of one.

    Raises ProfileError for a file that is no export, NsysError if nsys is needed and missing.
    """
    if path.suffix != REPORT_ENDING:
        return read_export(path)
    with temporary_directory() as scratch:
        return read_export(export(path, scratch))


def read_export(path: Path) -> Trace:
    """Read the trace in the SQLite export at `path`; raise ProfileError for a file that is no
    such export.
    """
    head = read_head(path, HEADER_BYTES, NSYS_EXPORT)
    if not head.startswith(SQLITE_MAGIC):
        raise ProfileError(path, f"needed {NSYS_EXPORT}, but {what_it_is(path, head)}")
    page_bytes, num_pages = int.from_bytes(head[16:18], "big"), int.from_bytes(head[28:32], "big")
    expected, size = num_pages * (65536 if page_bytes == 1 else page_bytes), path.stat().st_size
    # SQLite would read zeros where the end is missing
    if len(head) < HEADER_BYTES or size < expected:
        raise ProfileError(
            path,
            f"truncated: needed {expected} bytes, got {size}; copy it again or export it again",
        )
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return with_copies_apart(_Export(path, connection).trace())
    # names in the schema may not be UTF-8
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as error:
        raise ProfileError(
            path, f"not a whole SQLite database ({error}): export the report again"
        ) from error


class _Export(Tables):
    """Makes the trace from the tables of an export."""

    def trace(self) -> Trace:
        api_calls = self._api_calls()
        if not {KERNEL_TABLE, GRAPH_TABLE} & self.present:
            raise ProfileError(self.path, self._why_no_kernels(api_calls))
        calls = Launches(api_calls)
        kernels = self._work(KERNEL_TABLE, "demangledName", calls)
        graphs = self._work(GRAPH_TABLE, "graphId", calls)
        copies = self._work(COPY_TABLE, "copyKind", calls)
        fills = self._work(FILL_TABLE, "bytes", calls)
        places, call_place = nsys_extras.call_places(self, api_calls)
        last_ns = _last(kernels, graphs, copies, fills, api_calls)
        ranges, num_left_open = self._ranges(last_ns)
        return Trace(
            kernels=joined(kernels, graphs),
            copies=joined(copies, fills),
            ranges=ranges,
            api_calls=api_calls,
            samples=nsys_extras.samples(self),
            memory=nsys_extras.memory_events(self),
            library_calls=nsys_extras.library_calls(self),
            places=places,
            call_place=call_place,
            strings=self.strings.all,
            device_names=tuple(dict.fromkeys(self.names("TARGET_INFO_GPU", "name").values())),
            notes=(*self._notes(len(graphs), num_left_open), *nsys_extras.notes(self, places)),
        )

    def _why_no_kernels(self, calls: ApiCalls) -> str:
        """Why there is no kernel, as far as the calls of CUDA tell, and what to do."""
        missing = f"no table {KERNEL_TABLE}"
        if not len(calls):
            return f"{missing}, so no CUDA kernel was traced: {HOW_TO_RUN_NSYS}"
        names, does_launch = self.strings.all, ApiCallKind.KERNELS.is_done_by
        is_launch = of_names(calls.name, names, does_launch, np.bool_)
        launches = int(is_launch.sum())
        if not launches:
            return (
                f"{missing}, and no launch of a kernel among the {len(calls)} calls of CUDA in "
                "the file; record a part of the program that computes"
            )
        return (
            f"{missing}, and {launches} launches of kernels: CUDA was traced, and its kernels "
            "were lost; record again with `CuptiUseRawGpuTimestamps=false` in nsys' configuration "
            "(NSYS_CONFIG_DIRECTIVES), or on another machine"
        )

    def _notes(self, num_graphs: int, num_left_open: int) -> Iterator[str]:
        if CALL_TABLE not in self.present:
            yield f"No table {CALL_TABLE}, so no kernel's launch is known: {HOW_TO_RUN_NSYS}."
        if RANGE_TABLE not in self.present:
            yield f"No table {RANGE_TABLE}, so there are no ranges: {HOW_TO_RUN_NSYS}."
        if num_graphs:
            yield (
                f"{num_graphs} launches of CUDA graphs were traced as a whole, without their "
                "kernels: record with --cuda-graph-trace=node to see these."
            )
        if num_left_open:
            yield (
                f"Left out: {counted(num_left_open, 'phase')} of which the end was not recorded, "
                "although a later one of the same name began."
            )

    def _api_calls(self) -> ApiCalls:
        start, end, name, thread, correlation, kind = self.ints(
            CALL_TABLE,
            {"start": None, "end": None, "nameId": None, "globalTid": 0, "correlationId": 0},
            {"eventClass": 0},
        )
        self.check_times(CALL_TABLE, start, end)
        # of a call with a stack there are two rows
        names = self.names("ENUM_NSYS_EVENT_CLASS", "name")
        is_stack = np.isin(kind, [number for number, text in names.items() if "BACKTRACE" in text])
        calls = ApiCalls(
            name=self.strings.column(name),
            process=_process(thread),
            thread=thread,
            start_ns=start,
            end_ns=end,
            correlation=correlation,
        )
        return chosen(calls, ~is_stack)

    def _work(self, table: str, kind_column: str, calls: Launches) -> DeviceWork:
        """The rows of a table of kernels, graphs, copies or fills."""
        needed = {
            "start": None,
            "end": None,
            "deviceId": None,
            "streamId": None,
            "globalPid": 0,
            "correlationId": 0,
            kind_column: None,
        }
        graph_column = "graphId" if table == GRAPH_TABLE else "graphNodeId"
        start, end, device, stream, process, correlation, kind, graph = self.ints(
            table, needed, {graph_column: 0}
        )
        self.check_times(table, start, end)
        return DeviceWork(
            name=self._work_names(table, kind),
            process=process,
            device=device,
            stream=stream,
            start_ns=start,
            end_ns=end,
            is_in_graph=graph != 0,
            mark=np.full(len(start), -1, dtype=np.int64),
            message=np.full(len(start), -1, dtype=np.int64),
            **calls.columns(process, correlation),
        )

    def _work_names(self, table: str, kind: Ints) -> Ints:
        """Names of the rows of a table, by the column that tells kernels or copies apart."""
        if table == KERNEL_TABLE:
            return self.strings.column(kind)
        if table == COPY_TABLE:
            labels = self.names("ENUM_CUDA_MEMCPY_OPER", "label")
            names = {number: f"memcpy {label}" for number, label in labels.items()}
            return self._with_memory(self.strings.column(kind, names, "memcpy"))
        name = self.strings.id("memset" if table == FILL_TABLE else "CUDA graph")
        return np.full(len(kind), name, dtype=np.int64)

    def _with_memory(self, name: Ints) -> Ints:
        """Names of copies with the memory of both sides, as in `memcpy Host-to-Device (Pageable
        -> Device)`.
        """
        kinds = self.names("ENUM_CUDA_MEM_KIND", "label")
        if not kinds or not {"srcKind", "dstKind"} <= self.columns(COPY_TABLE):
            return name
        source, target = self.ints(COPY_TABLE, {"srcKind": 0, "dstKind": 0})
        used, index = np.unique(np.stack([name, source, target]), axis=1, return_inverse=True)
        strings, texts = self.strings.all, []
        for copy, from_kind, to_kind in used.T.tolist():
            memory = f"{kinds.get(from_kind, '?')} -> {kinds.get(to_kind, '?')}"
            texts.append(f"{strings[copy]} ({memory})")
        return self.strings.ids(texts)[index.reshape(-1)]

    def _ranges(self, last_ns: int) -> tuple[Ranges, int]:
        """The ranges, of which one that is still open lasts until `last_ns`; and how many phases
        that were left open are not among them.
        """
        names = self.names("ENUM_NSYS_EVENT_TYPE", "name")
        kinds = {name: number for number, name in names.items()}
        push_pop = kinds.get("NvtxPushPopRange", PUSH_POP)
        start_end = kinds.get("NvtxStartEndRange", START_END)
        start, end, is_open, kind, thread, key = self.ints(
            RANGE_TABLE,
            {"start": None, "end": last_ns, "end IS NULL": None, "eventType": None, "globalTid": 0},
            {"textId": NO_STRING},
        )
        name = self.strings.column(key)
        if RANGE_TABLE in self.present and "text" in self.columns(RANGE_TABLE):
            texts = self.connection.execute(f"SELECT text FROM {RANGE_TABLE} NOT INDEXED")
            ids = []
            for (text,) in texts:
                ids.append(NO_STRING if text is None else self.strings.id(str(text)))
            text_id = np.array(ids, dtype=np.int64)
            name = np.where(text_id >= 0, text_id, name)
        strings = self.strings.all

        def plain_name(text: str) -> int:
            named = without_call(text)
            if phase_named(named) is None:
                named = _AROUND_NAME.sub("", named)
            return self.strings.id(named)

        name = of_names(name, strings, plain_name, np.int64)
        end = np.where(is_open != 0, np.maximum(start, last_ns), end)
        self.check_times(RANGE_TABLE, start, end)
        ranges = Ranges(
            name=name,
            process=_process(thread),
            thread=thread,
            start_ns=start,
            end_ns=end,
            is_nested=kind == push_pop,
        )
        is_wrapper = name == self.strings.id(_CALL_OF_MODULE)
        is_range = ((kind == push_pop) | (kind == start_end)) & ~is_wrapper
        ranges = chosen(ranges, is_range)
        is_left_open = _left_open(ranges, is_open[is_range] != 0, self.strings.all)
        return chosen(ranges, ~is_left_open), int(is_left_open.sum())


def _left_open(ranges: Ranges, is_open: Mask, strings: Sequence[str]) -> Mask:
    """Which open ranges are phases that ended, and when was not seen: their thread has begun a
    phase of the same name since.
    """
    result = np.zeros(len(ranges), dtype=np.bool_)
    last_begin: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero(is_open):
        name, thread = int(ranges.name[row]), int(ranges.thread[row])
        if name < 0 or phase_named(strings[name]) is None:
            continue
        if (name, thread) not in last_begin:
            is_alike = (ranges.name == name) & (ranges.thread == thread)
            last_begin[name, thread] = int(ranges.start_ns[is_alike].max())
        result[row] = last_begin[name, thread] > ranges.start_ns[row]
    return result


def _process(thread: Ints) -> Ints:
    """The `globalPid` of each `globalTid`."""
    return thread >> THREAD_BITS << THREAD_BITS


def _last(*parts: Times) -> int:
    """When the last event of all the parts ended."""
    return int(np.concatenate([part.end_ns for part in parts]).max(initial=0))


def recognises(path: Path, head: bytes) -> bool:
    """Whether the file is a report, or has the beginning of an SQLite file."""
    return path.suffix == REPORT_ENDING or head.startswith(SQLITE_MAGIC)


READER = Reader(needed=NSYS_EXPORT, recognises=recognises, read=read_nsys)
