"""The ranks of a run: its worker starts them, watches them, and makes one record of their records
or failures.

The worker itself never touches CUDA. A rank that fails ends the others, and so does one that is
stopped. The processes of collectives that `cs336 ceilings` times are started and watched here too.
"""

import math
import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from operator import gt, sub
from pathlib import Path
from time import monotonic
from typing import Generic, Protocol, TypeVar

import psutil

from ..config import Device, Phase, RunConfig
from ..parallel.collectives import Rank, devices_of
from ..record import (
    Failure,
    Measurement,
    RankRecord,
    RunRecord,
    RunWarning,
    Status,
    Traffic,
    WarningCode,
    time_now,
)
from ..temporary import temporary_directory
from .isolation import failure_of
from .process import die_with_forker
from .store import path_of_rank

_GRACE_S = 2.0
"""How long the other ranks may go on after one has failed, because their errors may show the
cause.
"""
_LOOK_S = 1.0
"""Time between two looks for stopped ranks: long, because timed steps share the host."""
_STOPPED_S = 2.0
"""How long a rank may be stopped before it counts as failed; the others wait for it."""
_COLLECTIVE_S = 7 * 24 * 3600.0
"""How long a collective may take: longer than any run, whose own time limit ends it."""
_OF_OTHERS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "NCCL",
)
"""Parts of error messages of a rank that has lost the connection to another rank."""


class Answer(Protocol):
    """What a rank sends when it is done."""

    @property
    def status(self) -> Status:
        """How the rank's call ended: ok, or the kind of failure."""

    @property
    def failure(self) -> Failure | None:
        """Why the rank's call failed; None if it did not."""


AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(slots=True, eq=False, kw_only=True)
class RankEnd(Generic[AnswerT]):
    """One rank as the process that started it sees it, and how it ended."""

    process: BaseProcess
    pipe: Connection
    rank: int
    answer: AnswerT | None = None
    exit_code: int | None = None
    """Set if the process has ended without an answer; -SIGSTOP if it was stopped for too long."""
    stopped_s: float | None = None
    """When the process was first seen to be stopped; None if it is not."""
    order: int = 0
    """Position of this rank among the ranks by the order in which their ends were seen."""

    @property
    def is_pending(self) -> bool:
        """Whether the rank has neither ended nor answered."""
        return self.answer is None and self.exit_code is None

    @property
    def status(self) -> Status:
        """How the rank ended."""
        if self.answer is not None:
            return self.answer.status
        assert self.exit_code is not None
        status, _ = failure_of(self.exit_code)
        return status

    @property
    def failure(self) -> Failure:
        """Why a rank that has failed did so; the message names the rank."""
        if self.answer is not None and self.answer.failure is not None:
            failure = self.answer.failure
            return replace(failure, message=f"rank {self.rank}: {failure.message}")
        assert self.exit_code is not None
        _, failure = failure_of(self.exit_code)
        return replace(failure, message=f"rank {self.rank} {failure.message}")

    @property
    def blame(self) -> tuple[int, int]:
        """Sort key of failures; the smallest is the cause: own failures, then aborts, then lost
        connections.
        """
        failure = None if self.answer is None else self.answer.failure
        kind = 0
        if failure is None and self.exit_code == -signal.SIGABRT:
            kind = 1
        elif failure is not None and any(sign in failure.message for sign in _OF_OTHERS):
            kind = 2
        return kind, self.order

    def receive(self) -> None:
        """Receive the answer, or note how the process ended if it closed the pipe without one."""
        try:
            self.answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_GRACE_S)
            exit_code = self.process.exitcode
            self.exit_code = 255 if exit_code is None else exit_code

    def look(self) -> None:
        """Note whether the process is stopped, and give it up if that lasts."""
        try:
            is_stopped = psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            is_stopped = False
        self.stopped_s = (self.stopped_s or monotonic()) if is_stopped else None
        if self.stopped_s is not None and monotonic() - self.stopped_s >= _STOPPED_S:
            self.exit_code = -signal.SIGSTOP


def run_ranks(
    call: Callable[[Rank], AnswerT], ranks: int, devices: Sequence[str], timeout_s: float
) -> list[RankEnd[AnswerT]]:
    """Make the call for each rank in a process, a child of this one, which sends what it returns.

    `devices` are the GPUs that each sees (see devices_of), empty on a CPU. A collective may take
    `timeout_s`. The others end at most _GRACE_S after the first that fails. Afterwards no process
    is left.
    """
    context = multiprocessing.get_context("fork")
    ends: list[RankEnd[AnswerT]] = []
    with temporary_directory() as scratch:
        try:
            for number in range(ranks):
                place = Rank(
                    rank=number,
                    ranks=ranks,
                    meeting=f"file://{scratch}/meeting",
                    timeout_s=timeout_s,
                )
                pipe, other = context.Pipe(duplex=False)
                process = context.Process(target=_answer, args=(call, place, devices, other))
                process.start()
                other.close()
                ends.append(RankEnd(rank=number, process=process, pipe=pipe))
            _watch(ends)
        finally:
            for end in ends:
                end.process.kill()
            for end in ends:
                end.process.join()
                end.pipe.close()
    return ends


def first_failed(ends: Sequence[RankEnd[AnswerT]]) -> RankEnd[AnswerT] | None:
    """The rank whose failure is the cause of the others'; None if all ended well."""
    ended = [end for end in ends if not end.is_pending]
    failed = [end for end in ended if end.status is not Status.OK]
    return min(failed, key=lambda end: end.blame, default=None)


def _answer(
    call: Callable[[Rank], AnswerT], place: Rank, devices: Sequence[str], pipe: Connection
) -> None:
    """Entry of a rank: make the call, send its answer, and end without waiting for the other
    ranks.
    """
    die_with_forker(signal.SIGKILL)
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[place.rank]
    pipe.send(call(place))
    pipe.close()
    os._exit(0)


def _watch(ends: Sequence[RankEnd[AnswerT]]) -> None:
    """Wait until no rank is pending, but not longer than _GRACE_S after one has failed."""
    deadline = math.inf
    while monotonic() < deadline:
        pending = [end for end in ends if end.is_pending]
        if not pending:
            return
        ready = wait([end.pipe for end in pending], min(_LOOK_S, deadline - monotonic()))
        for end in pending:
            if end.pipe in ready:
                end.receive()
            else:
                end.look()
            if not end.is_pending:
                end.order = sum(not other.is_pending for other in ends)
        if first_failed(ends) is not None:
            deadline = min(deadline, monotonic() + _GRACE_S)


def measure_on_ranks(
    config: RunConfig, gpu_uuids: Sequence[str], profile: Path | None = None
) -> RunRecord:
    """Run the configuration on its ranks, each a child of this process, and return the one record
    of all.

    `gpu_uuids` names a GPU for each rank. Rank 0 writes the file `profile`, if the run has a
    profiler, and each other rank a file beside it, with its number.
    """
    started_at = time_now()
    devices = devices_of(gpu_uuids, all_of_them=config.parallel.writes_to_others)
    ends = run_ranks(partial(_measure_rank, config, profile), config.ranks, devices, _COLLECTIVE_S)
    failed = first_failed(ends)
    if failed is None:
        return merge([end.answer for end in ends if end.answer is not None])
    record = failed.answer or RunRecord(config=config, status=failed.status, started_at=started_at)
    return replace(record, failure=failed.failure, failed_rank=failed.rank)


def _measure_rank(config: RunConfig, profile: Path | None, rank: Rank) -> RunRecord:
    """Run the configuration as one rank of several, and return the record of this rank."""
    import torch

    from ..measure.run import measure

    if config.device is Device.CPU:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.ranks))
    return measure(config, profile=profile and path_of_rank(profile, rank.rank), rank=rank)


UNEVEN_SHARE = 0.05
"""Share of a step by which the ranks' own work may differ without a warning."""
STEADY_SHARE = 0.9
"""Share of the steps in which the same rank must be the slower one for a warning."""


def merge(records: Sequence[RunRecord]) -> RunRecord:
    """One record of the ranks' records, all of which ended well, in the order of the ranks."""
    warmup = zip(*(record.warmup_times_s for record in records), strict=False)
    launches = zip(*(record.host_times_s for record in records), strict=True)
    losses = zip(*(record.losses for record in records), strict=False)
    memories = [record.memory for record in records if record.memory is not None]
    traffics = [record.traffic for record in records if record.traffic is not None]
    return replace(
        records[0],
        measurements=_slowest(records, [record.measurements for record in records]),
        warmup_times_s=tuple(map(max, warmup)),
        host_times_s=tuple(map(max, launches)),
        host_phases=_slowest(records, [record.host_phases for record in records]),
        losses=tuple(map(_mean, losses)),
        memory=max(memories, key=lambda memory: memory.peak_allocated_bytes, default=None),
        traffic=max(traffics, key=_sent_bytes, default=None),
        warnings=(*_warnings(records), *_uneven(records)),
        ranks=tuple(_of_rank(rank, record) for rank, record in enumerate(records)),
    )


def _sent_bytes(traffic: Sequence[Traffic]) -> int:
    """Bytes that one rank sends in a step, by all of its collectives."""
    return sum(collectives.sent_bytes for collectives in traffic)


def _slowest(
    records: Sequence[RunRecord], parts: Sequence[Sequence[Measurement]]
) -> tuple[Measurement, ...]:
    """Merged times of the phases of a run on several ranks: for each step, those of the rank whose
    step was the slowest, so that the phases add up. `parts` has each rank's measurements by phase.
    """
    steps = [_times(record, Phase.STEP) for record in records]
    slowest = [times.index(max(times)) for times in zip(*steps, strict=True)]
    merged = []
    for of_phase in zip(*parts, strict=True):
        times_s = tuple(of_phase[rank].times_s[step] for step, rank in enumerate(slowest))
        merged.append(Measurement(of_phase[0].phase, times_s))
    return tuple(merged)


def _times(record: RunRecord, phase: Phase) -> tuple[float, ...]:
    """The times in seconds of a phase on one rank, one for each step; empty if it was not
    measured.
    """
    measurement = record.measurement(phase)
    return () if measurement is None else measurement.times_s


def _mean(losses: Sequence[float | None]) -> float | None:
    """The loss of the whole batch, as all ranks have batches of one size; None if one of them is
    not finite.
    """
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if len(known) == len(losses) else None


def _warnings(records: Sequence[RunRecord]) -> list[RunWarning]:
    """The first warning of each kind, which names its rank unless all ranks have one."""
    ranks_warned: dict[WarningCode, dict[int, RunWarning]] = {}
    for rank, record in enumerate(records):
        for warning in record.warnings:
            ranks_warned.setdefault(warning.code, {}).setdefault(rank, warning)
    warnings = []
    for by_rank in ranks_warned.values():
        rank, warning = next(iter(by_rank.items()))
        if len(by_rank) < len(records):
            warning = replace(warning, message=f"rank {rank}: {warning.message}")
        warnings.append(warning)
    return warnings


def _uneven(records: Sequence[RunRecord]) -> list[RunWarning]:
    """A warning if one rank's own work, its step without the phase communication, takes clearly
    longer.

    PyTorch's DDP and FSDP hide such a difference, because they wait for the other ranks inside of
    backward.
    """
    steps = [_times(record, Phase.STEP) for record in records]
    waits = [_times(record, Phase.COMMUNICATION) for record in records]
    work = [[*map(sub, step, wait)] for step, wait in zip(steps, waits, strict=True)]
    medians = [statistics.median(times) for times in work]
    slow, quick = medians.index(max(medians)), medians.index(min(medians))
    num_slower = sum(map(gt, work[slow], work[quick]))
    is_steady = num_slower >= STEADY_SHARE * len(work[slow])
    whole = statistics.median(map(max, zip(*steps, strict=True)))
    if medians[slow] - medians[quick] <= UNEVEN_SHARE * whole or not is_steady:
        return []
    message = (
        f"rank {slow} works {medians[slow] * 1e3:.3g} ms of a step itself, rank {quick} "
        f"{medians[quick] * 1e3:.3g} ms, and waits for the others; look for what slows the one "
        "down"
    )
    return [RunWarning(code=WarningCode.UNEVEN_RANKS, message=message)]


def _of_rank(rank: int, record: RunRecord) -> RankRecord:
    """What the record of a run on several ranks keeps of one rank's own record."""
    names = {field.name for field in fields(RankRecord)} - {"rank", "device_uuid"}
    shared = {name: getattr(record, name) for name in names}
    device_uuid = record.environment.device_uuid if record.environment else None
    return RankRecord(rank=rank, device_uuid=device_uuid, **shared)
