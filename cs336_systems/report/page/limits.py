"""Sentences on what limits the configurations of a sweep: by the clock, by memory, and by what profiles show."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from cs336_systems.analysis.advice import against_launches
from cs336_systems.config import Phase, RunConfig
from cs336_systems.costs.time import limited_by_launches
from cs336_systems.record import Failure, RunRecord, Status, WarningCode
from cs336_systems.report.columns import Row
from cs336_systems.report.frame import codes_of
from cs336_systems.report.numbers import milliseconds, percent_of
from cs336_systems.report.page.rows import Named, Parts, between, linked, listed, named_rows
from cs336_systems.report.page.subjects import Subjects
from cs336_systems.report.page.write import Block, Linked, Part
from cs336_systems.report.sections.kernels.facts import WHOLE_STEP, is_launch_bound, terms
from cs336_systems.report.sections.kernels.findings import MIN_BUSY_SHARE
from cs336_systems.report.sections.kernels.tables import CLASS_KEYS
from cs336_systems.report.sections.memory.entries import MemoryEntry
from cs336_systems.report.sections.memory.words import size
from cs336_systems.report.words import status_text
from cs336_systems.text import counted, inert_line

MOST_OF_ONE = 3
"""Most findings that are shown of a profile if it is the only one."""


def limits(own: Subjects) -> Iterator[Linked | Part]:
    """What the clock says of all configurations, which of them failed, and what profiles say."""
    steps = named_rows(own.steps, "step_mean_ms")
    yield from _launches(steps, own)
    yield from _longest_phase(steps, own)
    yield from _failed(steps, own)
    yield from _profiles(own, any(step.row["status"] == Status.OOM for step in steps))


def recorded_runs(blocks: Sequence[Block]) -> list[Named]:
    """A row for each run whose memory was recorded, with its peak."""
    rows = named_rows(blocks, "peak_allocated_bytes", lambda row: isinstance(row["entry"], MemoryEntry))
    return list({id(row.row["entry"]): row for row in rows}.values())  # a run may be in several tables


def _of(part: Sequence[Named], whole: Sequence[Named]) -> str:
    if len(part) == len(whole) > 1:
        return "both configurations" if len(whole) == 2 else f"all {len(whole)} configurations"
    return f"{len(part)} of {counted(len(whole), 'configuration')}" if len(whole) > 1 else "the only configuration"


def _timed(steps: Sequence[Named]) -> list[Named]:
    return [step for step in steps if step.row["step_mean_ms"] is not None]


def _launches(steps: Sequence[Named], own: Subjects) -> Iterator[Linked]:
    """Where launching takes the whole step, and where the GPU is still at work after it."""
    timed = _timed(steps)
    launched = [step for step in timed if WarningCode.LAUNCH_BOUND in codes_of(step.row)]
    if launched:
        named = listed(launched, "step_mean_ms", lambda step: f"{step.name} ({milliseconds(step.row['step_mean_ms'])})")
        ways = list(dict.fromkeys(against_launches(step.row["config"]) for step in launched))
        whom = f", for {launched[0].name}," if len(ways) > 1 else ""
        yield linked(f"The host's launches limit {_of(launched, steps)}: ", *named, f". What helps{whom} is {ways[0]}.")
    watched = {record.config.configuration for record in own.results.published if _is_behind_host(record)}
    others = [step for step in timed if step.row["config"] in watched and step not in launched]
    if others:
        is_rest = 0 < len(launched) == len(steps) - len(others) and len(own.steps) == 1
        which = f"the other {len(others)}" if is_rest else _of(others, steps)
        took = [", which takes ", *between(others, "step_mean_ms", milliseconds)] if is_rest else []
        yield linked(f"In {which} the GPU is still at work when the host has launched a step", *took, ".")


def _is_behind_host(record: RunRecord) -> bool:
    """Whether the GPU is still at work when the host has launched a step."""
    step, host_s = record.measurement(Phase.STEP), record.launch_times_s
    if step is None or not host_s:
        return False
    return not limited_by_launches({Phase.STEP: step.times_s}, {Phase.STEP: host_s})


def _longest_phase(steps: Sequence[Named], own: Subjects) -> Iterator[Linked]:
    """Which phase is the longest, of the steps after most warm-up, where more than one was measured."""
    timed = _timed([step for step in steps if step.block is own.steps[0]])
    longest: dict[Phase, list[Named]] = defaultdict(list)
    for step in timed:
        times_ms = {phase: step.row.get(f"{phase}_mean_ms") for phase in Phase if phase is not Phase.STEP}
        known = {phase: time_ms for phase, time_ms in times_ms.items() if time_ms}
        if len(known) > 1:
            longest[max(known, key=known.__getitem__)].append(step)
    every = sum(map(len, longest.values()))
    parts: Parts = []
    for phase, phased in sorted(longest.items(), key=lambda item: -len(item[1])):
        number = f" in {len(phased)} of {every}" if len(phased) < every else ""
        shares = between(phased, f"{phase}_mean_ms", percent_of, _share_of(phase))
        parts += [f"{'; ' if parts else 'The longest phase is '}{phase}{number}, with ", *shares]
    if parts:
        yield linked(*parts, " of the step.")


def _share_of(phase: Phase) -> Callable[[Row], float]:
    return lambda row: row[f"{phase}_mean_ms"] / row["step_mean_ms"]


def _failed(steps: Sequence[Named], own: Subjects) -> Iterator[Linked]:
    """The configurations that failed, by how they ended; of those out of memory, what the first asked for."""
    failures = {record.config.configuration: record.failure for record in own.results.published}
    by_status: dict[str, list[Named]] = defaultdict(list)
    for step in steps:
        if step.row["status"] != Status.OK:
            by_status[step.row["status"]].append(step)
    for status, ended in by_status.items():
        if status == Status.OOM:
            why = _asked_for(failures, ended[0].row["config"])
            yield linked(f"Memory limits {_of(ended, steps)}: ", *listed(ended, "status"), f"{why}.")
        else:
            yield linked(f"Ended as {status_text(status)}: {_of(ended, steps)}, ", *listed(ended, "status"), ".")


def _asked_for(failures: Mapping[RunConfig, Failure | None], config: RunConfig) -> str:
    failure = failures.get(config)
    if failure is None or failure.requested_bytes is None or failure.free_bytes is None:
        return ""
    return f"; the first asked for {size(failure.requested_bytes)} with {size(failure.free_bytes)} free"


def _profiles(own: Subjects, is_oom_told: bool) -> Iterator[Linked | Part]:
    """The main findings of a profile that is the only one of its kind; of several, what they have in common."""
    kernels, memory, blocks = own.of_kernels, own.of_memory, [*own.kernels, *own.memory]
    if len(kernels) > 1:
        yield from _kernels(blocks)
    if len(memory) > 1 and not is_oom_told:
        yield from _out_of_memory(blocks)
    for told, key in ((kernels, "wall_mean_ms"), (memory, "peak_allocated_bytes")):
        for name, _, texts in told if len(told) == 1 else ():
            rows = named_rows(blocks, key, lambda row: row.get("phase") in (None, WHOLE_STEP))
            for text in texts[:MOST_OF_ONE]:
                yield inert_line(f"{name}: {text}"), rows[0].link(key, "")[1] if rows else ""


def _kernels(blocks: Sequence[Block]) -> Iterator[Linked]:
    """Whether the host or the GPU is the limit of each profiled step, and which class of kernels takes the most."""
    on_gpu, by_limit = _whole_steps(blocks, "busy_share"), defaultdict[str, list[Named]](list)
    for each in on_gpu:
        by_limit[_limit_of(each.row)].append(each)
    for who, own in by_limit.items():
        number = f"{len(own)} of {counted(len(on_gpu), 'profiled run')}"
        slower = ", whose launches the profiler makes slower" if is_launch_bound(own[0].row["entry"].profile) else ""
        yield linked(f"{who} {number}{slower}: kernels run ", *between(own, "busy_share", percent_of), " of the step.")
    keys = {kind: f"{key}_share" for kind, key in CLASS_KEYS.items()}
    shares = {kind: _whole_steps(blocks, key) for kind, key in keys.items()}
    largest = max(shares, key=lambda kind: sum(each.row[keys[kind]] for each in shares[kind]))
    if own := shares[largest]:
        time = terms(own[0].row["entry"].profile).time
        yield linked(f"Kernels of class {largest} take ", *between(own, keys[largest], percent_of), f" of the {time}.")


def _whole_steps(blocks: Sequence[Block], key: str) -> list[Named]:
    """The rows of whole steps in which the value below the key is known and not 0."""
    return named_rows(blocks, key, lambda row: row["phase"] == WHOLE_STEP and bool(row[key]))


def _limit_of(row: Row) -> str:
    if is_launch_bound(row["entry"].profile):
        return "The CPU limits"
    return "The GPU limits" if row["busy_share"] >= MIN_BUSY_SHARE else "Neither the CPU nor the GPU alone limits"


def _out_of_memory(blocks: Sequence[Block]) -> Iterator[Linked]:
    """The recorded runs in which memory ran out."""
    runs = recorded_runs(blocks)
    failed = [run for run in runs if run.row["status"] == Status.OOM]
    if failed:
        number = f"{len(failed)} of {counted(len(runs), 'recorded run')}"
        yield linked(f"Memory ran out in {number}: ", *listed(failed, "status"), ".")
