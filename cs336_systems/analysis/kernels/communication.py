"""How long collectives ran on the device, and for how much of that time it computed nothing."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.kernels.collectives import COLLECTIVES, NO_COLLECTIVE, Collective
from cs336_systems.analysis.kernels.device_time import Busy, DeviceWindows, Jobs
from cs336_systems.analysis.kernels.frames import by_phase
from cs336_systems.analysis.kernels.phases import PHASES
from cs336_systems.analysis.kernels.step_profile import CommunicationTimes
from cs336_systems.analysis.kernels.union import Union
from cs336_systems.analysis.kernels.windows import HostSteps


def communication_times(
    jobs: Jobs, devices: Sequence[Busy], num_devices: Ints, steps: HostSteps, windows: DeviceWindows
) -> tuple[CommunicationTimes, ...]:
    """The times of collectives in each phase: of each kind, then (`collective` None) of all kinds together.

    Total time is the part of the phase on the device in which at least one kernel of the kind runs; exposed time is the
    part of that in which no kernel that computes and no copy runs. The time of an NCCL kernel includes its wait for the
    other ranks. If a step uses several devices, times are the mean over them, as busy times are.
    """
    kinds = np.unique(jobs.collective[jobs.collective != NO_COLLECTIVE]).tolist()
    chosen: list[tuple[Collective | None, Mask]] = [(COLLECTIVES[kind], jobs.collective == kind) for kind in kinds]
    if kinds:
        chosen.append((None, jobs.collective != NO_COLLECTIVE))
    found = [
        times
        for kind, is_chosen in chosen
        for times in _times(kind, _in_windows(jobs, is_chosen, devices, num_devices, steps, windows), len(steps))
    ]
    return tuple(sorted(found, key=lambda times: PHASES.index(times.phase)))


def _in_windows(
    jobs: Jobs, is_chosen: Mask, devices: Sequence[Busy], num_devices: Ints, steps: HostSteps, windows: DeviceWindows
) -> pd.DataFrame:
    """For each window, how many of the chosen kernels begin in it, how long they run, and the exposed part of that."""
    launches, total, exposed = (np.zeros(len(windows), dtype=np.int64) for _ in range(3))
    for busy in devices:
        mine = (steps.process == busy.process)[windows.step]
        rows, computing = busy.rows[is_chosen[busy.rows]], busy.rows[_computes(jobs, busy.rows)]
        either = np.append(rows, computing)
        ran, computed, worked = (Union(jobs.start_ns[own], jobs.end_ns[own]) for own in (rows, computing, either))
        total += mine * _covered(ran, windows)
        exposed += mine * (_covered(worked, windows) - _covered(computed, windows))
        start = np.sort(jobs.start_ns[rows])
        launches += mine * (np.searchsorted(start, windows.end_ns) - np.searchsorted(start, windows.start_ns))
    count = np.maximum(num_devices, 1)[windows.step]
    return pd.DataFrame(
        {
            "phase": windows.phase,
            "step": windows.step,
            "launches": launches,
            "total_s": total / count / 1e9,
            "exposed_s": exposed / count / 1e9,
        }
    )


def _covered(union: Union, windows: DeviceWindows) -> Ints:
    return union.until(windows.end_ns) - union.until(windows.start_ns)


def _computes(jobs: Jobs, rows: Ints) -> Mask:
    """Whether each job of a device computes or copies for the program, and is not part of a collective.

    A collective may copy too: copies count as part of collectives if their stream runs these and no other kernels.
    """
    is_collective = jobs.collective[rows] != NO_COLLECTIVE
    is_kernel = ~is_collective & ~jobs.is_copy[rows]
    of_collectives = np.setdiff1d(jobs.stream[rows[is_collective]], jobs.stream[rows[is_kernel]])
    computes: Mask = ~is_collective & ~(jobs.is_copy[rows] & np.isin(jobs.stream[rows], of_collectives))
    return computes


def _times(kind: Collective | None, found: pd.DataFrame, num_steps: int) -> Iterator[CommunicationTimes]:
    """The times of each phase in which collectives of this kind ran."""
    for phase, rows in by_phase(found):
        sums = rows.drop(columns="phase").groupby("step").sum().reindex(range(num_steps), fill_value=0)
        if sums.to_numpy().any():
            yield CommunicationTimes(
                phase=phase,
                collective=kind,
                launches=tuple(sums["launches"].astype(int).tolist()),
                total_s=tuple(sums["total_s"].tolist()),
                exposed_s=tuple(sums["exposed_s"].tolist()),
            )
