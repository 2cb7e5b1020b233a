"""Merges the records of a run's ranks into one record."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from cs336_systems.config import Phase
from cs336_systems.record import Measurement, Memory, RankRecord, RunRecord, RunWarning, Traffic, WarningCode

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
    return RankRecord(
        rank=rank,
        measurements=record.measurements,
        warmup_times_s=record.warmup_times_s,
        host_times_s=record.host_times_s,
        host_phases=record.host_phases,
        losses=record.losses,
        memory=record.memory,
        moments=record.moments,
        telemetry=record.telemetry,
        device_uuid=record.environment.device_uuid if record.environment else None,
        warnings=record.warnings,
    )
