"""One rank of a run whose ranks torchrun started: each leaves its record in a directory, and rank 0 makes one of all.

If another rank fails, rank 0 may wait for it in a collective, where no signal reaches Python. So a thread of rank 0
looks for failed records and for the signal with which torchrun ends the other ranks, and then writes the record itself.
The kernel sends the same signal when torchrun itself is killed.
"""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep

from cs336_systems.config import Device, RunConfig
from cs336_systems.files import write_atomically
from cs336_systems.measure.nvml import visible_gpus
from cs336_systems.parallel.rank import Rank, devices_of
from cs336_systems.record import Failure, RunRecord, Status, encode_record, read_record
from cs336_systems.sweep.merge import merge
from cs336_systems.sweep.process import die_with_forker
from cs336_systems.sweep.ranks import GRACE_S, RankOutcome, failed_record

_TICK_S = 0.1
_RUN_ID = "TORCHELASTIC_RUN_ID"


def see_own_gpu(config: RunConfig, rank: Rank) -> None:
    """Make only this rank's own GPU visible, or all ranks' GPUs, its own first, if ranks write to each other's memory.

    Call it before anything has asked CUDA for its devices.
    """
    if config.device is Device.CUDA:
        uuids = [gpu.uuid for gpu in visible_gpus()[: rank.ranks]]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices_of(rank.rank, uuids, all_of_them=config.parallel.writes_to_others)


def measure_as_rank(
    config: RunConfig, rank: Rank, runs: Path, measured: Callable[[], RunRecord], keep: Callable[[RunRecord], None]
) -> RunRecord | None:
    """Measure as this rank, by `measured`; on rank 0 return the one record of all ranks, on others None.

    `keep` writes a record; it is called if the run has failed and rank 0 cannot return.
    """
    meeting = _Meeting(runs.with_name(f".torchrun-{os.environ.get(_RUN_ID, 'run')}-{os.getppid()}"), config, rank.ranks)
    meeting.directory.mkdir(parents=True, exist_ok=True)
    agent = os.getppid()
    if rank.rank:
        die_with_forker(signal.SIGKILL)
        meeting.bring(rank.rank, measured())
        return None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_forker(signal.SIGTERM)
    started_at, done = datetime.now(UTC).isoformat(timespec="seconds"), threading.Event()

    def watch() -> None:
        while not done.is_set():
            is_ended = signal.sigtimedwait({signal.SIGTERM}, _TICK_S) is not None
            if is_ended or meeting.has_failed:
                if done.wait(GRACE_S):
                    return
                keep(meeting.conclusion(started_at, is_alone=os.getppid() != agent))
                shutil.rmtree(meeting.directory, ignore_errors=True)
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    own = measured()
    done.set()
    meeting.bring(0, own)
    meeting.wait()
    record = meeting.conclusion(started_at, is_alone=os.getppid() != agent)
    shutil.rmtree(meeting.directory, ignore_errors=True)
    return record


@dataclass(slots=True)
class _Meeting:
    """The directory in which the ranks leave their records."""

    directory: Path
    config: RunConfig
    ranks: int

    def bring(self, rank: int, record: RunRecord) -> None:
        """Leave the record of a rank."""
        write_atomically(self._path(rank), encode_record(record))

    def _path(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.json"

    @property
    def records(self) -> dict[int, RunRecord]:
        """The records that ranks have left so far, by rank."""
        return {rank: read_record(self._path(rank)) for rank in range(self.ranks) if self._path(rank).is_file()}

    @property
    def has_failed(self) -> bool:
        return any(record.status is not Status.OK for record in self.records.values())

    def wait(self) -> None:
        """Wait for all records; only a little while once a rank has failed, or has ended long before another."""
        deadline = monotonic() + (GRACE_S if self.has_failed else 60.0)
        while len(self.records) < self.ranks and monotonic() < deadline:
            sleep(_TICK_S)

    def conclusion(self, started_at: str, *, is_alone: bool = False) -> RunRecord:
        """The one record of all ranks: of their times, or of the first failure; `is_alone` if torchrun is gone."""
        found = self.records
        if len(found) == self.ranks and not self.has_failed:
            return merge([found[rank] for rank in range(self.ranks)])
        failed = [
            RankOutcome(rank=rank, record=record) for rank, record in found.items() if record.status is not Status.OK
        ]
        missing = [rank for rank in range(1, self.ranks) if rank not in found]
        blank = RunRecord(config=self.config, status=Status.CRASHED, started_at=started_at)
        cause = min(failed, key=lambda each: each.blame, default=None)
        if cause is not None and (not missing or cause.blame[0] == 0):
            return failed_record(cause, blank)
        if is_alone:
            return replace(blank, failure=Failure(message="torchrun ended before its ranks, which were ended too"))
        named = "rank" if len(missing) == 1 else "one of ranks"
        message = f"{named} {', '.join(map(str, missing))} ended without a record: see what torchrun printed"
        failed_rank = missing[0] if len(missing) == 1 else None
        return replace(blank, failure=Failure(message=message), failed_rank=failed_rank)
