"""The ranks of a run: its worker starts them, watches them, and makes one record of their records or failures.

The worker itself never touches CUDA. A rank that fails ends the others.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import msgspec

from cs336_systems.config import Device, Phase, RunConfig
from cs336_systems.parallel.collectives import Rank, devices_of
from cs336_systems.record import (
    Failure,
    Measurement,
    Memory,
    RankRecord,
    RunRecord,
    RunWarning,
    Status,
    Traffic,
    WarningCode,
)
from cs336_systems.sweep.isolation import end_in_words, signal_name
from cs336_systems.sweep.process import die_with_forker
from cs336_systems.sweep.store import path_of_rank

_GRACE_S = 2.0
"""How long the other ranks may go on after one has failed, because their errors may show the cause."""
_COLLECTIVE_S = 7 * 24 * 3600.0
"""How long a collective may take: longer than any run, whose own time limit ends it."""
_OF_OTHERS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "DistBackendError",
    "DistNetworkError", "DistStoreError", "NCCL",
)  # fmt: skip
"""Parts of error messages of a rank that has lost the connection to another rank."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Process:
    """One rank as the worker sees it, and how it ended."""

    process: BaseProcess
    pipe: Connection
    rank: int
    record: RunRecord | None = None
    exit_code: int | None = None
    """Set if the process has ended without a record."""
    order: int = 0
    """Position of this rank among the ranks by the order in which their ends were seen."""

    @property
    def is_pending(self) -> bool:
        """Whether the rank has neither ended nor sent a record."""
        return self.record is None and self.exit_code is None

    @property
    def has_failed(self) -> bool:
        """Whether the rank has ended without times."""
        return self.exit_code is not None or (self.record is not None and self.record.status is not Status.OK)

    @property
    def blame(self) -> tuple[int, int]:
        """Sort key of failures; the smallest is the cause: own failures, then aborts, then lost connections."""
        failure = None if self.record is None else self.record.failure
        if failure is not None:
            return (2 if any(sign in failure.message for sign in _OF_OTHERS) else 0), self.order
        return (1 if self.exit_code == -signal.SIGABRT else 0), self.order


def measure_on_ranks(config: RunConfig, gpu_uuids: Sequence[str], profile: Path | None = None) -> RunRecord:
    """Run the configuration on its ranks, each a child of this process, and return the one record of all.

    `gpu_uuids` names a GPU for each rank. Rank 0 writes the file `profile`, if the run has a profiler, and each other
    rank a file beside it, with its number.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with TemporaryDirectory(prefix="cs336-", dir=get_temp_dir()) as scratch:
        meeting = f"file://{scratch}/meeting"
        ranks = [
            Rank(rank=rank, ranks=config.ranks, meeting=meeting, timeout_s=_COLLECTIVE_S)
            for rank in range(config.ranks)
        ]
        with _started(config, ranks, gpu_uuids, profile) as processes:
            _watch(processes)
    if failed := [each for each in processes if each.has_failed]:
        return _failed_record(min(failed, key=lambda each: each.blame), config, started_at)
    return merge([each.record for each in processes if each.record is not None])


@contextlib.contextmanager
def _started(
    config: RunConfig, ranks: Sequence[Rank], gpu_uuids: Sequence[str], profile: Path | None
) -> Iterator[list[_Process]]:
    """Start the processes of the ranks; on exit none of them is left."""
    context = multiprocessing.get_context("fork")
    processes: list[_Process] = []
    try:
        for rank in ranks:
            pipe, other = context.Pipe(duplex=False)
            gpu = devices_of(rank.rank, gpu_uuids, all_of_them=config.parallel.writes_to_others) if gpu_uuids else None
            process = context.Process(target=_measure_rank, args=(config, rank, gpu, profile, other))
            process.start()
            other.close()
            processes.append(_Process(rank=rank.rank, process=process, pipe=pipe))
        yield processes
    finally:
        for each in processes:
            each.process.kill()
        for each in processes:
            each.process.join()
            each.pipe.close()


def _watch(processes: Sequence[_Process]) -> None:
    """Wait until no rank is pending, but not longer than _GRACE_S after one has failed."""
    deadline = math.inf
    while (pending := [each for each in processes if each.is_pending]) and monotonic() < deadline:
        ready = wait([each.pipe for each in pending], None if deadline == math.inf else deadline - monotonic())
        for each in pending:
            if each.pipe in ready:
                _receive(each)
                each.order = sum(not other.is_pending for other in processes)
        if any(each.has_failed for each in processes):
            deadline = min(deadline, monotonic() + _GRACE_S)


def _receive(each: _Process) -> None:
    """Receive the record of a rank, or note how the rank ended if it closed the pipe without one."""
    try:
        each.record = msgspec.json.decode(each.pipe.recv_bytes(), type=RunRecord)
    except (EOFError, OSError):
        each.process.join(_GRACE_S)
        each.exit_code = each.process.exitcode if each.process.exitcode is not None else 255


def _measure_rank(config: RunConfig, rank: Rank, gpu: str | None, profile: Path | None, pipe: Connection) -> None:
    """Entry of a rank: measure, send the record, and end without waiting for the other ranks."""
    die_with_forker(signal.SIGKILL)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    from cs336_systems.measure.run import measure

    if config.device is Device.CPU:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.ranks))
    if profile is not None:
        profile = path_of_rank(profile, rank.rank)
    record = measure(config, profile=profile, rank=rank)
    pipe.send_bytes(msgspec.json.encode(record))
    pipe.close()
    os._exit(0)


def _failed_record(each: _Process, config: RunConfig, started_at: str) -> RunRecord:
    """The record of a run in which this rank failed first."""
    named = f"rank {each.rank}"
    if each.record is not None and each.record.failure is not None:
        failure = replace(each.record.failure, message=f"{named}: {each.record.failure.message}")
        return replace(each.record, failure=failure, failed_rank=each.rank)
    assert each.exit_code is not None
    is_killed = each.exit_code == -signal.SIGKILL
    failure = Failure(
        message=f"{named} {end_in_words(each.exit_code)}",
        signal=signal_name(-each.exit_code) if each.exit_code < 0 else None,
    )
    status = Status.KILLED if is_killed else Status.CRASHED
    return RunRecord(config=config, status=status, started_at=started_at, failure=failure, failed_rank=each.rank)


UNEVEN_SHARE = 0.05
"""Share of a step by which the ranks' own work may differ without a warning."""
STEADY_SHARE = 0.9
"""Share of the steps in which the same rank must be the slower one for a warning."""


def merge(records: Sequence[RunRecord]) -> RunRecord:
    """One record of the ranks' records, all of which ended well, in the order of the ranks."""
    first = records[0]
    return replace(
        first,
        measurements=_slowest(records, [record.measurements for record in records]),
        warmup_times_s=tuple(map(max, zip(*(record.warmup_times_s for record in records), strict=False))),
        host_times_s=tuple(map(max, zip(*(record.host_times_s for record in records), strict=True))),
        host_phases=_slowest(records, [record.host_phases for record in records]),
        losses=tuple(map(_mean, zip(*(record.losses for record in records), strict=False))),
        memory=max((record.memory for record in records if record.memory), key=_peak, default=None),
        traffic=max((record.traffic for record in records if record.traffic is not None), key=_sent, default=None),
        warnings=(*_warnings(records), *_uneven(records)),
        ranks=tuple(_of_rank(rank, record) for rank, record in enumerate(records)),
    )


def _slowest(records: Sequence[RunRecord], parts: Sequence[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    """For each step, all times of its slowest rank, so that they add up; `parts` are the measurements of each rank."""
    steps = [_times(record, Phase.STEP) for record in records]
    slowest = [max(range(len(records)), key=times.__getitem__) for times in zip(*steps, strict=True)]
    return tuple(
        Measurement(own[0].phase, tuple(own[rank].times_s[step] for step, rank in enumerate(slowest)))
        for own in zip(*parts, strict=True)
    )


def _times(record: RunRecord, phase: Phase) -> tuple[float, ...]:
    measurement = record.measurement(phase)
    return () if measurement is None else measurement.times_s


def _mean(losses: Sequence[float | None]) -> float | None:
    """The loss of the whole batch, as all ranks have batches of one size; None if one of them is not finite."""
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if len(known) == len(losses) else None


def _peak(memory: Memory) -> int:
    return memory.peak_allocated_bytes


def _sent(traffic: Sequence[Traffic]) -> int:
    return sum(each.sent_bytes for each in traffic)


def _warnings(records: Sequence[RunRecord]) -> list[RunWarning]:
    """The first warning of each kind, which names its rank unless all ranks have one."""
    found = []
    for code in dict.fromkeys(warning.code for record in records for warning in record.warnings):
        own = [(rank, each) for rank, record in enumerate(records) for each in record.warnings if each.code is code]
        rank, warning = own[0]
        is_of_all = len({rank for rank, _ in own}) == len(records)
        found.append(warning if is_of_all else replace(warning, message=f"rank {rank}: {warning.message}"))
    return found


def _uneven(records: Sequence[RunRecord]) -> list[RunWarning]:
    """A warning if one rank's own work, its step without the phase communication, takes clearly longer.

    PyTorch's DDP and FSDP hide such a difference, because they wait for the other ranks inside of backward.
    """
    steps, waits = ([_times(record, phase) for record in records] for phase in (Phase.STEP, Phase.COMMUNICATION))
    own = [[step - wait for step, wait in zip(*both, strict=True)] for both in zip(steps, waits, strict=True)]
    medians = [statistics.median(times) for times in own]
    slow, quick = (medians.index(choose(medians)) for choose in (max, min))
    differences = [one - other for one, other in zip(own[slow], own[quick], strict=True)]
    is_steady = sum(each > 0 for each in differences) >= STEADY_SHARE * len(differences)
    whole = statistics.median(map(max, zip(*steps, strict=True)))
    if medians[slow] - medians[quick] <= UNEVEN_SHARE * whole or not is_steady:
        return []
    message = (
        f"rank {slow} works {medians[slow] * 1e3:.3g} ms of a step itself, rank {quick} {medians[quick] * 1e3:.3g} ms, "
        "and waits for the others; look for what slows the one down"
    )
    return [RunWarning(code=WarningCode.UNEVEN_RANKS, message=message)]


def _of_rank(rank: int, record: RunRecord) -> RankRecord:
    shared = {each.name for each in fields(RankRecord)} & {each.name for each in fields(RunRecord)}
    device_uuid = record.environment.device_uuid if record.environment else None
    return RankRecord(rank=rank, device_uuid=device_uuid, **{name: getattr(record, name) for name in shared})
