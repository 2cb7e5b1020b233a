"""Memory that a program reserved on its devices, from a profiler's record of every allocation."""

from collections.abc import Iterator

import numpy as np

from ..columns import Ints, groups
from .device_time import DeviceWindows
from .phases import PHASES, LaunchPhase
from .step_profile import ReservedPeak
from .trace import Trace


def reserved_peaks(trace: Trace, windows: DeviceWindows) -> Iterator[ReservedPeak]:
    """The most memory of each kind and device that was reserved at one time: in the whole file,
    then in each phase on the host.

    What is freed and was never seen to be allocated was there from the start.
    """
    memory = trace.memory
    _, place = np.unique(np.stack([memory.kind, memory.device]), axis=1, return_inverse=True)
    for _, rows in groups(place.reshape(-1)):
        rows = rows[np.argsort(memory.time_ns[rows], kind="stable")]
        level = np.append(0, np.cumsum(memory.size[rows]))
        level -= level.min()
        peaks: dict[LaunchPhase | None, int] = {None: int(level.max())}
        for code, highest in _by_phase(memory.time_ns[rows], level, windows):
            peaks[PHASES[code]] = max(highest, peaks.get(PHASES[code], 0))
        for phase, peak in peaks.items():
            yield ReservedPeak(
                kind=trace.strings[memory.kind[rows[0]]],
                device=int(memory.device[rows[0]]),
                phase=phase,
                peak_bytes=peak,
            )


def _by_phase(time: Ints, level: Ints, windows: DeviceWindows) -> Iterator[tuple[int, int]]:
    """The phase and the highest level of each window; `level` begins before the first time."""
    first = np.searchsorted(time, windows.host_start_ns)
    last = np.searchsorted(time, windows.host_end_ns)
    for code, begin, end in zip(windows.phase, first, last, strict=True):
        yield int(code), int(level[begin : end + 1].max())
