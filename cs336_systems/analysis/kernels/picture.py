"""Chooses one step, and reduces its phases and kernels to the data of a picture."""

import numpy as np

from cs336_systems.analysis.columns import Ints
from cs336_systems.analysis.kernels.device_time import DeviceSteps, DeviceWindows, Jobs
from cs336_systems.analysis.kernels.kernel_times import CLASSES
from cs336_systems.analysis.kernels.phases import PHASES, Codes
from cs336_systems.analysis.kernels.step_profile import PicturedStep, Piece, Window
from cs336_systems.analysis.kernels.windows import HostSteps

CELLS = 2000
"""Cells that the step's time is divided into: about the width of a picture in pixels."""
MAX_PIECES = 5000
"""Beyond this number, the pieces that begin in one cell are merged, and get the class that ran longest."""


def picture(steps: HostSteps, spans: DeviceSteps, windows: DeviceWindows, jobs: Jobs, kind: Codes) -> PicturedStep:
    """The step of median wall time (of two, the shorter); `kind` holds the classes of the kernels in `jobs`."""
    order = np.argsort(steps.end_ns - steps.start_ns, kind="stable")
    step = int(order[(len(order) - 1) // 2])
    start = int(steps.start_ns[step])
    wall = int(spans.end_ns[step]) - start
    in_step = np.flatnonzero(windows.step == step)
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
            for row in in_step.tolist()
        ),
        pieces=_pieces(jobs, kind, np.flatnonzero(jobs.step[: len(kind)] == step), start, max(wall // CELLS, 1)),
    )


def _pieces(jobs: Jobs, kind: Codes, rows: Ints, origin: int, cell: int) -> tuple[Piece, ...]:
    """Merge kernels of one stream, phase and class that are less than a cell apart."""
    rows = rows[np.lexsort((jobs.start_ns[rows], jobs.stream[rows], jobs.device[rows]))]
    start, end = jobs.start_ns[rows], jobs.end_ns[rows]
    lane = np.stack((jobs.device[rows], jobs.stream[rows], jobs.phase[rows].astype(np.int64)))
    changes = (np.diff(lane, axis=1) != 0).any(axis=0)
    apart = changes | (np.diff(kind[rows]) != 0) | (start[1:] - end[:-1] >= cell)
    if apart.sum() >= MAX_PIECES:
        apart = changes | (np.diff((start - origin) // cell) != 0)
    first = np.flatnonzero(np.append(np.ones(len(rows[:1]), dtype=np.bool_), apart))
    last = np.append(first[1:], len(rows))[: len(first)] - 1
    if not len(first):
        return ()
    weight = np.zeros((len(first), len(CLASSES)), dtype=np.int64)
    piece = np.repeat(np.arange(len(first)), last - first + 1)
    np.add.at(weight, (piece, kind[rows]), end - start + 1)  # + 1, so that a kernel of no duration has weight too
    busy = np.add.reduceat(end - start, first)
    piece_end = np.maximum.reduceat(end, first)
    return tuple(
        Piece(
            stream=int(jobs.stream[rows[begin]]),
            phase=PHASES[jobs.phase[rows[begin]]],
            kind=CLASSES[weight[index].argmax()],
            start_s=(int(start[begin]) - origin) / 1e9,
            end_s=(int(piece_end[index]) - origin) / 1e9,
            busy_s=int(busy[index]) / 1e9,
        )
        for index, begin in enumerate(first.tolist())
    )
