"""Chooses one step, and keeps its phases, kernels and idle times as the data of a picture."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from cs336_systems.analysis.columns import groups
from cs336_systems.analysis.kernels.attribution import HostSteps
from cs336_systems.analysis.kernels.classes import MAX_NAME
from cs336_systems.analysis.kernels.device_time import CAUSES, UNKNOWN_CAUSE, DeviceSteps, DeviceWindows, Gaps
from cs336_systems.analysis.kernels.modules import CLASSES, RangeParts
from cs336_systems.analysis.kernels.phases import PHASES
from cs336_systems.analysis.kernels.step_profile import (
    IdleSpans,
    KernelTimes,
    ModuleTimes,
    PicturedStep,
    Piece,
    StreamCopies,
    StreamKernels,
    Window,
)

MAX_KERNELS = 50_000
"""Beyond this number, which would take some 2 MB, the kernels that begin in one cell are merged."""
CELLS = 2000
"""Cells that the step's time is divided into: about the width of a picture in pixels."""
MAX_IDLE = 3000
"""Only the longest idle times are kept."""


def median_step(steps: HostSteps) -> int:
    """The step of median wall time; of two, the shorter."""
    order = np.argsort(steps.end_ns - steps.start_ns, kind="stable")
    return int(order[(len(order) - 1) // 2])


def picture(
    step: int,
    steps: HostSteps,
    spans: DeviceSteps,
    windows: DeviceWindows,
    kernels: pd.DataFrame,
    copies: pd.DataFrame,
    gaps: Gaps,
) -> PicturedStep:
    """The picture of one step; `kernels` are from `with_rows`, `copies` have their names in the column `text`."""
    start = int(steps.start_ns[step])
    wall = int(spans.end_ns[step]) - start
    kernels, copies = _by_stream(kernels, start), _by_stream(copies, start)
    are_few = len(kernels) + len(copies) <= MAX_KERNELS
    return PicturedStep(
        step=step,
        wall_s=wall / 1e9,
        windows=tuple(
            Window(
                phase=PHASES[windows.phase[row]],
                host_start_s=(int(windows.host_start_ns[row]) - start) / 1e9,
                host_end_s=(int(windows.host_end_ns[row]) - start) / 1e9,
                device_start_s=(int(windows.start_ns[row]) - start) / 1e9,
                device_end_s=(int(windows.end_ns[row]) - start) / 1e9,
            )
            for row in np.flatnonzero(windows.step == step).tolist()
        ),
        streams=tuple(_streams(kernels)) if are_few else (),
        copies=tuple(_copies(copies)) if are_few else (),
        idle=tuple(_idle(gaps, step, start)),
        pieces=() if are_few else _pieces(kernels, max(wall // CELLS, 1)),
    )


def _by_stream(rows: pd.DataFrame, start: int) -> pd.DataFrame:
    """The rows by stream and start, in nanoseconds from the start of the step."""
    rows = rows.sort_values(["device", "stream", "start_ns"], kind="stable")
    return rows.assign(**{name: rows[name] - start for name in ("start_ns", "end_ns", "launch_ns")})


def with_rows(
    rows: pd.DataFrame,
    kernels: Sequence[KernelTimes],
    modules: Sequence[ModuleTimes],
    strings: Sequence[str],
    parts: RangeParts,
) -> pd.DataFrame:
    """The kernels with two more columns: the row of each in the table of kernels, and in that of modules."""
    kernel_of = {row.name: index for index, row in enumerate(kernels) if row.phase is None}
    module_of = {(row.path, row.phase): index for index, row in enumerate(modules)}
    kernel = {name: kernel_of[strings[name][:MAX_NAME]] for name in rows["name"].unique().tolist()}
    place = pd.Series(parts.path[rows["module"]] * len(PHASES) + rows["phase"].to_numpy(), index=rows.index)
    module = {
        own: module_of[parts.names(own // len(PHASES)), PHASES[own % len(PHASES)]] for own in place.unique().tolist()
    }
    return rows.assign(kernel_row=rows["name"].map(kernel), module_row=place.map(module))


def _streams(rows: pd.DataFrame) -> Iterator[StreamKernels]:
    for _, own in rows.groupby(["device", "stream"], sort=False):
        launches = zip(own["launch_ns"].tolist(), own["is_launched"].tolist(), strict=True)
        yield StreamKernels(
            device=int(own["device"].iloc[0]),
            stream=int(own["stream"].iloc[0]),
            start_ns=tuple(own["start_ns"].tolist()),
            duration_ns=tuple(own["duration_ns"].tolist()),
            launch_ns=tuple(launch if is_launched else None for launch, is_launched in launches),
            kernel=tuple(own["kernel_row"].tolist()),
            module=tuple(own["module_row"].tolist()),
        )


def _copies(rows: pd.DataFrame) -> Iterator[StreamCopies]:
    for _, own in rows.groupby(["device", "stream", "text", "phase"], sort=False):
        yield StreamCopies(
            device=int(own["device"].iloc[0]),
            stream=int(own["stream"].iloc[0]),
            name=own["text"].iloc[0][:MAX_NAME],
            phase=PHASES[own["phase"].iloc[0]],
            start_ns=tuple(own["start_ns"].tolist()),
            duration_ns=tuple(own["duration_ns"].tolist()),
        )


def _idle(gaps: Gaps, step: int, start: int) -> Iterator[IdleSpans]:
    rows = np.flatnonzero((gaps.step == step) & (gaps.cause != UNKNOWN_CAUSE))
    length = gaps.end_ns - gaps.start_ns
    rows = np.sort(rows[np.argsort(-length[rows], kind="stable")[:MAX_IDLE]])
    for device, on_device in groups(gaps.device[rows]):
        for cause, own in groups(gaps.cause[rows[on_device]].astype(np.int64)):
            chosen = rows[on_device[own]]
            yield IdleSpans(
                device=device,
                cause=CAUSES[cause],
                start_ns=tuple((gaps.start_ns[chosen] - start).tolist()),
                duration_ns=tuple(length[chosen].tolist()),
            )


def _pieces(rows: pd.DataFrame, cell: int) -> tuple[Piece, ...]:
    """Merge the kernels of one stream and phase that begin in one cell; the class is that which ran longest."""
    ordered = [rows[name].to_numpy() for name in ("device", "stream", "phase")]
    start, end, kind = (rows[name].to_numpy() for name in ("start_ns", "end_ns", "kind"))
    apart = np.any([np.diff(column) != 0 for column in [*ordered, start // cell]], axis=0)
    first = np.flatnonzero(np.append(True, apart))
    piece = np.cumsum(np.append(False, apart))
    weight = np.zeros((len(first), len(CLASSES)), dtype=np.int64)
    np.add.at(weight, (piece, kind), end - start + 1)  # + 1, so that a kernel of no duration has weight too
    busy = np.add.reduceat(end - start, first)
    piece_end = np.maximum.reduceat(end, first)
    return tuple(
        Piece(
            stream=int(ordered[1][begin]),
            phase=PHASES[ordered[2][begin]],
            kind=CLASSES[weight[index].argmax()],
            start_s=int(start[begin]) / 1e9,
            end_s=int(piece_end[index]) / 1e9,
            busy_s=int(busy[index]) / 1e9,
        )
        for index, begin in enumerate(first.tolist())
    )
