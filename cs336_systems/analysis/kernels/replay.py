"""The pictured step as a queue that the host fills and the device empties, so that it can be replayed with changes.

The device runs all kernels except those of collectives, in the order in which they began; a kernel that overlapped with
earlier ones counts with the time that it added to them. A kernel that was launched in time but began late waited for
something, such as a collective, and waits as long in every replay. The host's time for a launch is the time since the
launch before, without the time in which the host waited for room in the queue.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.idle import LAUNCH_LATENCY_S
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import (
    IdleCause,
    PicturedStep,
    StepProfile,
    StreamCopies,
    StreamKernels,
    Work,
)
from cs336_systems.analysis.kernels.union import Union
from cs336_systems.config import Phase
from cs336_systems.costs.time import QUEUE_DEPTH, Launch, TimePrediction, replay

MAX_GAP_S = 5e-6
"""Longest gap between two kernels of a stream; a kernel that begins later than that waited for something."""
FULL_QUEUE = 0.9
"""If the queue is filled to this share, a long time between two launches counts as waiting for room."""

Floats = NDArray[np.float64]
Named = tuple[KernelClass | None, str, LaunchPhase, tuple[str, ...]]
"""Class, name, phase and ranges of a job."""
_MAX_GAP_NS = round(MAX_GAP_S * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One kernel, or one copy by the driver, of a stream that computes."""

    host_s: float
    """Time that the host needs to launch it, after the job before."""
    kernel_s: float
    wait_s: float = 0.0
    """Time that it waits for something else, after the job before it has ended."""
    exposed_s: float = 0.0
    """The part of `wait_s` in which a collective runs, or a stream that only copies."""
    pause_s: float = 0.0
    """Time in which the host pauses before it, besides `host_s`."""
    is_after_wait: bool = False
    """The host first waits until the device has run everything."""
    phase: LaunchPhase = LaunchPhase.FORWARD
    kind: KernelClass | None = None
    """None for a copy or fill by the driver."""
    name: str = ""
    path: tuple[str, ...] = ()
    """Ranges around the launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The jobs of a step in order, and the times of the device and the host that belong to no job."""

    jobs: Sequence[Job]
    latency_s: float
    """Time from a launch to the start of its kernel on an idle device."""
    gap_s: float
    """Time between two kernels if the second was launched early enough."""
    tail_s: float
    """Time from the end of the last kernel to the end of the step."""
    exposed_tail_s: float = 0.0
    """The part of `tail_s` in which a collective runs, or a stream that only copies."""
    host_share: float = 1.0
    """Factor of all jobs' `host_s`: below 1 if launches are faster than in the profile."""

    @property
    def host_s(self) -> float:
        """Time that the host needs for all launches, if it never waits or pauses."""
        return self.host_share * sum(job.host_s for job in self.jobs)

    def with_jobs(self, jobs: Sequence[Job]) -> "Queue":
        """The same queue with other jobs."""
        return replace(self, jobs=jobs)

    def with_host(self, host_s: float) -> "Queue":
        """The same queue with a host that needs `host_s` for all launches, if that is less: a profiler slows it."""
        share = min(1.0, host_s / self.host_s) if self.host_s else 1.0
        return replace(self, host_share=share * self.host_share)

    def run(self) -> TimePrediction:
        """The step in which the host launches the jobs, and the device runs them."""
        launches = [
            Launch(
                host_s=self.host_share * job.host_s + job.pause_s,
                kernel_s=job.kernel_s,
                wait_s=job.wait_s,
                is_after_wait=job.is_after_wait,
            )
            for job in self.jobs
        ]
        found = replay({Phase.STEP: launches}, self.gap_s, latency_s=self.latency_s)
        step_s = found.step_s + self.tail_s
        return replace(found, phases_s={Phase.STEP: step_s}, step_s=step_s)


def queue_of(profile: StepProfile) -> Queue | None:
    """The queue of the pictured step; None if its single kernels are not kept, if none computes, and for a CPU."""
    step = profile.pictured
    if profile.work is not Work.KERNELS or step is None or not step.streams:
        return None
    rows = _of_main_device(_rows(profile, step))
    communicates = rows["kind"] == KernelClass.COMMUNICATION
    is_computing = (rows["kind"].notna() & ~communicates).groupby(rows["stream"]).transform("any") & ~communicates
    if not is_computing.any():
        return None
    jobs, others = rows[is_computing].reset_index(drop=True), rows[~is_computing]
    times = _Times(jobs, step)
    beside = _within(others, times.before, times.start)
    waits = times.waits(beside)
    exposed = np.minimum(waits, beside)
    ended, end = int(times.end.max()), round(step.wall_s * 1e9)
    (exposed_tail,) = _within(others, np.array([ended]), np.array([max(ended, end)]))
    return Queue(
        jobs=list(_jobs(jobs, times, waits, exposed)),
        latency_s=times.latency / 1e9,
        gap_s=times.gap / 1e9,
        tail_s=max(0, end - ended) / 1e9,
        exposed_tail_s=int(exposed_tail) / 1e9,
    )


def _rows(profile: StepProfile, step: PicturedStep) -> pd.DataFrame:
    """All kernels and copies of the step by start; a copy gets the launch time of the job before it on its stream."""
    parts = []
    for own in step.streams:
        kernels, modules = (profile.kernels[row] for row in own.kernel), (profile.modules[row] for row in own.module)
        launch = [np.nan if time is None else time for time in own.launch_ns]
        named: list[Named] = [
            (kernel.kind, kernel.name, module.phase, module.path)
            for kernel, module in zip(kernels, modules, strict=True)
        ]
        parts.append(_frame(own, named).assign(launch=launch))
    for copies in step.copies:
        named = [(None, copies.name, copies.phase, ())] * len(copies.start_ns)
        parts.append(_frame(copies, named).assign(launch=np.nan))
    rows = pd.concat(parts, ignore_index=True).sort_values("start", kind="stable", ignore_index=True)
    rows["launch"] = rows.groupby(["device", "stream"])["launch"].ffill().fillna(0)
    return rows


def _frame(own: StreamKernels | StreamCopies, named: Sequence[Named]) -> pd.DataFrame:
    found = pd.DataFrame(list(named), columns=["kind", "name", "phase", "path"], dtype="object")
    start, duration = (np.array(times, dtype=np.int64) for times in (own.start_ns, own.duration_ns))
    return found.assign(device=own.device, stream=own.stream, start=start, duration=duration)


def _of_main_device(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the device with the longest total time."""
    longest = rows.groupby("device")["duration"].transform("sum").to_numpy().argmax()
    chosen: pd.DataFrame = rows[rows["device"] == rows["device"].iloc[longest]]
    return chosen.reset_index(drop=True)


def _within(rows: pd.DataFrame, start: Ints, end: Ints) -> Ints:
    """How long rows run from each start to its end."""
    if rows.empty:
        return np.zeros(len(start), dtype=np.int64)
    union = Union(rows["start"].to_numpy(), (rows["start"] + rows["duration"]).to_numpy())
    ran: Ints = np.maximum(0, union.until(end) - union.until(start))
    return ran


class _Times:
    """When the jobs were launched, and when they ran, in nanoseconds from the step's start."""

    def __init__(self, jobs: pd.DataFrame, step: PicturedStep) -> None:
        self.start: Ints = jobs["start"].to_numpy()
        self.end: Ints = np.maximum.accumulate(self.start + jobs["duration"].to_numpy())
        self.before: Ints = np.append(0, self.end[:-1])
        self.launch: Ints = jobs["launch"].to_numpy().astype(np.int64, copy=True)
        self.step = step
        is_copy = jobs["kind"].isna().to_numpy()
        is_late = (self.launch > self.before) & ~is_copy
        late = self.start[is_late] - self.launch[is_late]
        self.latency = float(np.median(late)) if len(late) else LAUNCH_LATENCY_S * 1e9
        # launches of copies are not kept; a copy after an idle time is assumed to be launched just before it began
        is_late_copy = is_copy & (self.start - self.before > _MAX_GAP_NS)
        self.launch[is_late_copy] = self.start[is_late_copy] - round(self.latency)
        self.launch = np.maximum.accumulate(np.maximum(0, self.launch))
        self.in_time: Mask = self.launch + self.latency <= self.before
        gaps = (self.start - self.before)[self.in_time]
        short = gaps[(gaps >= 0) & (gaps <= _MAX_GAP_NS)]
        self.gap = float(short.mean()) if len(short) else 0.0
        self.host = self._host(jobs["phase"])

    def waits(self, others: Ints) -> Floats:
        """How long each job waited after the one before, beyond the gap; `others` is how long other streams ran then.

        A job that was launched late counts as waiting for other streams if these ran for at least half of the time that
        its launch does not explain.
        """
        ready = np.maximum(self.before + self.gap, self.launch + self.latency)
        excess = self.start - ready
        is_waiting = (excess > _MAX_GAP_NS) & (self.in_time | (others >= excess / 2))
        return np.where(is_waiting, np.maximum(0, self.start - self.before - self.gap), 0.0)

    def ended_by(self, cause: IdleCause) -> Ints:
        """Length of the idle time with this cause that each job ended; 0 for none."""
        length = {
            start + duration: duration
            for own in self.step.idle
            if own.cause is cause
            for start, duration in zip(own.start_ns, own.duration_ns, strict=True)
        }
        return np.array([length.get(time, 0) for time in self.start.tolist()], dtype=np.int64)

    def _host(self, phase: "pd.Series[str]") -> Floats:
        """The host's time for each job; the phase's median if the host waited for room in the queue."""
        host = np.diff(self.launch, prepend=0).astype(np.float64)
        launched_before = np.append(0, self.launch[:-1])
        queued = np.arange(len(host)) - np.searchsorted(self.end, launched_before, side="right")
        usual = pd.Series(host).where(host > 0).groupby(phase).transform("median").fillna(0).to_numpy()
        return np.where((queued >= FULL_QUEUE * QUEUE_DEPTH) & (host > usual), usual, host)


def _jobs(rows: pd.DataFrame, times: _Times, waits: Floats, exposed: Floats) -> Iterator[Job]:
    waited = times.ended_by(IdleCause.HOST_WAITED) > 0
    paused = np.minimum(times.ended_by(IdleCause.HOST_PAUSE), times.host)
    host = np.where(waited, np.maximum(0, times.launch - times.before), times.host - paused)
    alone = times.end - np.maximum(times.start, times.before)  # the part that does not overlap with earlier jobs
    columns = (np.maximum(0, alone).tolist(), *(rows[name].tolist() for name in ("phase", "kind", "name", "path")))
    own = zip(host, waits, exposed, paused, waited, *columns, strict=True)
    for host_ns, wait_ns, exposed_ns, pause_ns, is_after_wait, duration, phase, kind, name, path in own:
        yield Job(
            host_s=float(host_ns) / 1e9,
            kernel_s=duration / 1e9,
            wait_s=float(wait_ns) / 1e9,
            exposed_s=float(exposed_ns) / 1e9,
            pause_s=float(pause_ns) / 1e9,
            is_after_wait=bool(is_after_wait),
            phase=phase,
            kind=kind,
            name=name,
            path=path,
        )
