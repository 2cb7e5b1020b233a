"""Separates records that cannot be compared, so that the page does not put them side by side; with the reasons."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cs336_systems.config import Phase
from cs336_systems.record import Environment, Identity, RunRecord
from cs336_systems.report.results import Results
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.sections.memory.entries import MemoryEntry
from cs336_systems.text import counted, inert_line

T = TypeVar("T")

CONDITIONS = {"device_name": "hardware", "driver": "driver", "torch": "PyTorch", "code": "measuring code"}
"""What records must share to be compared, by the fields of `Identity`, in words."""
TOLERANCE = 0.02
"""Share of a step by which the sum of its phases may be longer: events at the borders of phases take time too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Separated:
    """Results that can be compared among each other, and why others cannot."""

    groups: Sequence[Results]
    reasons: Sequence[str]
    conditions: Sequence[str]
    """For each group, the conditions that tell it from the others, in words; empty for the only one."""


def separated(results: Results) -> Separated:
    """The results in groups that were measured under the same conditions, without parts that contradict a whole."""
    checked = [without_contradictions(record) for record in results.records]
    records, wrong = [record for record, _ in checked], [text for _, texts in checked for text in texts]
    groups = _grouped(records, lambda record: record)
    reasons = [*_reasons(records, len(groups)), *wrong]
    found = []
    for group in groups:
        keys = {id_of(record) for record in group}
        identity = _identity(group)
        kernels = [entry for entry in results.kernels if id_of(entry.profiled) in keys]
        of_config = {record.config for record in group}
        memory = [
            entry
            for entry in results.memory
            if (entry.config in of_config if entry.recorded is None else id_of(entry.recorded) in keys)
        ]
        entries: list[Profiled | MemoryEntry] = [*kernels, *memory]
        for entry in entries:
            if entry.plain is not None and not _is_same(entry.plain, identity):
                reasons.append(
                    f"{inert_line(entry.config.label)}: the run under a profiler and the run without one were measured "
                    "under other conditions, so the slowdown by the profiler is not known."
                )
        found.append(
            Results(
                records=group,
                kernels=[e if _is_plain(e.plain, identity) else replace(e, plain=None) for e in kernels],
                memory=[e if _is_plain(e.plain, identity) else replace(e, plain=None) for e in memory],
            )
        )
    return Separated(
        groups=found,
        reasons=list(dict.fromkeys([*reasons, *_only_profiled(found)])),
        conditions=_conditions([_identity(group) for group in groups]),
    )


def by_warmup(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """The records by the number of warm-up steps, the most first: a step after fewer is not the same step."""
    numbers = sorted({record.config.warmup_steps for record in records}, reverse=True)
    return [[record for record in records if record.config.warmup_steps == number] for number in numbers]


def warmup_reasons(records: Sequence[RunRecord]) -> list[str]:
    """Why runs after different numbers of warm-up steps stand in different tables."""
    groups = by_warmup(records)
    if len(groups) < 2:
        return []
    counts = ", ".join(f"{counted(len(own), 'run')} after {own[0].config.warmup_steps}" for own in groups)
    return [
        f"Runs after different numbers of warm-up steps have tables of their own ({counts}): "
        "a step after fewer may hold what a steady step does not."
    ]


def id_of(record: RunRecord) -> tuple[str, str, Environment | None]:
    """What names a record among those of several directories, which may have been measured in the same second."""
    return record.key, record.started_at, record.environment


def without_contradictions(record: RunRecord) -> tuple[RunRecord, list[str]]:
    """The record without parts that are larger than their whole, and a sentence for each that was left out."""
    step, label, reasons = record.measurement(Phase.STEP), inert_line(record.config.label), []
    parts_s = sum(each.mean_s for each in record.measurements if each.phase is not Phase.STEP)
    if step is not None and parts_s > (1 + TOLERANCE) * step.mean_s:
        reasons.append(
            f"{label}: the phases add up to {parts_s * 1e3:.4g} ms, more than the step of {step.mean_s * 1e3:.4g} ms, "
            "so they are not shown as its parts."
        )
        record = replace(record, measurements=(step,))
    host_s = statistics.fmean(record.host_times_s) if record.host_times_s else 0.0
    if step is not None and host_s > (1 + TOLERANCE) * step.mean_s:
        reasons.append(
            f"{label}: the host took {host_s * 1e3:.4g} ms to launch a step, more than the step of "
            f"{step.mean_s * 1e3:.4g} ms, so it is not shown as its part."
        )
        record = replace(record, host_times_s=())
    memory = record.memory
    device_bytes = record.environment.device_memory_bytes if record.environment else None
    if memory is not None and device_bytes is not None and memory.peak_reserved_bytes > device_bytes:
        reasons.append(
            f"{label}: the peak of reserved memory, {memory.peak_reserved_bytes:,} bytes, is more than the device has, "
            f"{device_bytes:,} bytes, so no peak is shown."
        )
        record, memory = replace(record, memory=None), None
    if memory is not None and memory.peak_allocated_bytes > memory.peak_reserved_bytes:
        reasons.append(
            f"{label}: the peak of allocated memory, {memory.peak_allocated_bytes:,} bytes, is more than that of "
            f"reserved memory, {memory.peak_reserved_bytes:,} bytes, of which it is a part, so neither is shown."
        )
        record = replace(record, memory=None)
    return record, reasons


def _grouped(items: Iterable[T], record_of: Callable[[T], RunRecord]) -> list[list[T]]:
    """The items by the conditions of their records; one that failed before it could name any is with the first."""
    groups: dict[Identity, list[T]] = {}
    unknown: list[T] = []
    for item in items:
        environment = record_of(item).environment
        (unknown if environment is None else groups.setdefault(environment.identity, [])).append(item)
    first, *others = groups.values() or [[]]
    return [[*first, *unknown], *others]


def _reasons(records: Sequence[RunRecord], num_groups: int) -> list[str]:
    """By what the conditions differ, with the number of runs under each."""
    if num_groups < 2:
        return []
    identities = [record.environment.identity for record in records if record.environment is not None]
    found = []
    for name, words in CONDITIONS.items():
        values = [str(getattr(identity, name)) for identity in identities]
        if len(set(values)) > 1:
            counts = ", ".join(f"{counted(values.count(value), 'run')} with {value}" for value in dict.fromkeys(values))
            found.append(
                inert_line(
                    f"Runs with different {words} have tables and pictures of their own ({counts}): "
                    f"a difference between them may be due to the {words}."
                )
            )
    return found


def _conditions(identities: Sequence[Identity | None]) -> list[str]:
    """The conditions in which the identities differ, of each in words."""
    values = {name: [str(getattr(own, name, "")) for own in identities] for name in CONDITIONS}
    differing = {name: found for name, found in values.items() if len(set(found)) > 1}
    return [
        inert_line(", ".join(f"{CONDITIONS[name]} {found[place]}" for name, found in differing.items()))
        for place in range(len(identities))
    ]


def _identity(group: Sequence[RunRecord]) -> Identity | None:
    return next((record.environment.identity for record in group if record.environment is not None), None)


def _is_same(record: RunRecord, identity: Identity | None) -> bool:
    return record.environment is None or identity is None or record.environment.identity == identity


def _is_plain(plain: RunRecord | None, identity: Identity | None) -> bool:
    return plain is None or _is_same(plain, identity)


def _only_profiled(groups: Iterable[Results]) -> list[str]:
    """That runs under a profiler have no row among the times, and how many there are."""
    profiled = [
        record
        for results in groups
        for record in results.records
        if record not in results.published and record.measurement(Phase.STEP) is not None
    ]
    if not profiled:
        return []
    return [
        f"{counted(len(profiled), 'run')} under a profiler {'has no row' if len(profiled) == 1 else 'have no rows'} in "
        "the tables of times: a profiler makes a step slower, so its times are not put beside those without one."
    ]
