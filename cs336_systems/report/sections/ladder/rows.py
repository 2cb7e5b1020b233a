"""What came of each rung of a ladder: its times, its speed-up over others, its gate, and the reason in numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cs336_systems.analysis.compare import compare, process_means
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import StepProfile, Work
from cs336_systems.analysis.statistics import quotient_stdev
from cs336_systems.analysis.warnings import in_doubt
from cs336_systems.config import Phase, RunConfig
from cs336_systems.costs.traffic import Traffic, traffic
from cs336_systems.record import Compilation, RunRecord, Status
from cs336_systems.report.frame import COLUMNS, codes_of, rows_of, to_frame
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.words import STATUS_WORDS
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.sweep.ladder import Gate, Rung, judge, reason_run, reference

CONFIDENCE = 0.95
MAX_SLOWDOWN = 0.10
"""Of the profiled step against the plain one, up to which its class times may be the reason for the plain time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """How many times faster one rung is than another, by the geometric means over processes."""

    ratio: float
    low: float | None
    high: float | None
    """Interval at CONFIDENCE; None where either rung has fewer than FEWEST processes."""
    stdev: float | None = None
    """What the deviations of both steps come to; None where one is not known."""
    is_doubted: bool = False
    """Whether a warning puts the time of either rung in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What the device did in one step of a profiled run."""

    work: Work
    launches: float
    """Kernels; on a CPU operators."""
    step_s: float
    """Wall time by the host's clock, profiler and all."""
    busy_s: float
    """With a kernel or a copy at work."""
    class_s: dict[KernelClass, float]
    """Durations of kernels, added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRow:
    """One rung, measured."""

    rung: Rung
    row: dict[str, Any]
    """Columns of results.csv, over the rung's processes; those of a rung that has not run are empty."""
    num_processes: int
    """That ended well."""
    gate: Gate
    over_last: SpeedUp | None
    """Over the last rung below that counts; None for the first that counts, and without times."""
    over_first: SpeedUp | None
    """Over the first rung that counts."""
    last: str
    """Name of the rung that `over_last`, and the reason, are over; empty for none."""
    compilations: tuple[Compilation, ...]
    """Of each process, in order of repeats."""
    reason: Reason | None
    """None without a profile."""
    traffic: Traffic | None

    @property
    def is_credited(self) -> bool:
        """It has times, and passed the gate: others are compared with it, and it may be the fastest."""
        return self.num_processes > 0 and self.gate.passed is True

    @property
    def ended(self) -> str:
        """How the rung ended, in words."""
        status = self.row["status"]
        return "not run" if status is None else STATUS_WORDS[Status(status)]

    @property
    def compile_s(self) -> float | None:
        """The longest compilation of its processes: that of the one which found least in the compiler's cache."""
        return max((compilation.seconds for compilation in self.compilations), default=None)

    @property
    def busy_share(self) -> float | None:
        """GPU busy in one profiled step over the time of one without a profiler, which slows the host, not the kernels;
        at most 1. None on a CPU, and where either is missing."""
        mean_ms: float | None = self.row["step_mean_ms"]
        if self.reason is None or self.reason.work is Work.OPERATORS or not mean_ms:
            return None
        return min(1.0, self.reason.busy_s * 1e3 / mean_ms)

    @property
    def slowdown(self) -> float | None:
        """How much longer the profiled step took than the plain one, as a share of that; None where either is missing.

        Below 0 where it was faster.
        """
        mean_ms: float | None = self.row["step_mean_ms"]
        return None if self.reason is None or not mean_ms else self.reason.step_s * 1e3 / mean_ms - 1

    @property
    def is_slowed(self) -> bool:
        """The profiled step was another one than the plain step, whose time its class times do not explain."""
        return self.slowdown is not None and self.slowdown > MAX_SLOWDOWN


def ladder_rows(
    ladder: Sequence[Rung],
    records: Sequence[RunRecord],
    profiles: Sequence[Profiled],
    ceilings: Ceilings = NO_CEILINGS,
) -> tuple[LadderRow, ...]:
    """One row for each rung, in order, by the records of its configuration among `records`.

    A rung that fails its gate, or has no verdict, is nobody's measure: later ones are compared with the last before it
    that passed.
    """
    references = _reference_losses(ladder[0], records)
    rows: list[LadderRow] = []
    times: dict[str, list[float]] = {}
    columns: dict[str, dict[str, Any]] = {}
    credited: list[str] = []
    for rung in ladder:
        own = _records_of(rung.config, records)
        done = [record for record in own if record.status is Status.OK]
        times[rung.name] = process_means(own, Phase.STEP)
        columns[rung.name] = _frame_row(rung.config, own, ceilings)
        last, first = (credited[-1], credited[0]) if credited else ("", "")
        row = LadderRow(
            rung=rung,
            row=columns[rung.name],
            num_processes=len(done),
            gate=judge(rung.config.precision, [record.losses for record in done], references, fp8=rung.config.fp8),
            over_last=_over(times, columns, last, rung.name),
            over_first=_over(times, columns, first, rung.name),
            last=last,
            compilations=tuple(record.compilation for record in done if record.compilation is not None),
            reason=_reason(rung, profiles),
            traffic=traffic(rung.config),
        )
        rows.append(row)
        credited += [rung.name] if row.is_credited else []
    return tuple(rows)


def speed_ups(row: LadderRow) -> dict[str, Any]:
    """Both speed-ups by the columns that show them; None for what is not known."""
    parts = {"": "ratio", "_ci95_low": "low", "_ci95_high": "high", "_std": "stdev", "_is_doubted": "is_doubted"}
    found = {"over_last": row.over_last, "over_first": row.over_first}
    return {
        f"speed_up_{name}{ending}": getattr(gain, part, None)
        for name, gain in found.items()
        for ending, part in parts.items()
    }


def fastest_row(rows: Sequence[LadderRow]) -> LadderRow | None:
    """The credited rung with the shortest step; None where there is none."""
    return min((row for row in rows if row.is_credited), key=lambda row: float(row.row["step_mean_ms"]), default=None)


def speed_up(slow: Sequence[float], fast: Sequence[float]) -> SpeedUp | None:
    """Over process means in seconds; None where a side has none. The interval is that of `cs336 compare`, inverted."""
    if not slow or not fast or not all((*slow, *fast)):
        return None
    if min(len(slow), len(fast)) < 2:
        return SpeedUp(ratio=(sum(slow) / len(slow)) / (sum(fast) / len(fast)), low=None, high=None)
    found = compare(slow, fast, confidence=CONFIDENCE)
    if found.low is None or found.high is None:
        return SpeedUp(ratio=1 / found.ratio, low=None, high=None)
    return SpeedUp(ratio=1 / found.ratio, low=1 / found.high, high=1 / found.low)


def _over(
    times: Mapping[str, Sequence[float]], columns: Mapping[str, dict[str, Any]], slow: str, fast: str
) -> SpeedUp | None:
    """The speed-up of one rung over another, by their names, with what puts it in doubt; None where there is none."""
    found = speed_up(times[slow], times[fast]) if slow else None
    if found is None:
        return None
    rows = columns[slow], columns[fast]
    return replace(
        found,
        stdev=quotient_stdev(found.ratio, *(row["step_cv"] for row in rows)),
        is_doubted=any(in_doubt(codes_of(row)) for row in rows),
    )


def _records_of(config: RunConfig, records: Sequence[RunRecord]) -> list[RunRecord]:
    found = [record for record in records if record.config.configuration == config.configuration]
    return sorted(found, key=lambda record: record.config.repeat)


def _reference_losses(first: Rung, records: Sequence[RunRecord]) -> list[tuple[float | None, ...]]:
    """Those of the first rung; where it has none, of the same step with its activations computed again."""
    candidates = [first.config]
    if first.config.model_factory is None:
        candidates.append(reference(first))
    for config in candidates:
        if done := [record.losses for record in _records_of(config, records) if record.status is Status.OK]:
            return done
    return []


def _frame_row(config: RunConfig, records: Sequence[RunRecord], ceilings: Ceilings) -> dict[str, Any]:
    """The first of its rows: with repeats on several devices there would be more, which nothing here mixes."""
    return rows_of(to_frame(records, ceilings))[0] if records else dict.fromkeys(COLUMNS) | {"config": config}


def _reason(rung: Rung, profiles: Sequence[Profiled]) -> Reason | None:
    found = [entry.profile for entry in profiles if entry.config == reason_run(rung)]
    return reason_of(found[-1]) if found and found[-1].num_steps else None


def reason_of(profile: StepProfile) -> Reason:
    """Sums over the profile, per step."""
    steps = profile.num_steps
    class_s: dict[KernelClass, float] = {}
    for times in profile.classes:
        class_s[times.kind] = class_s.get(times.kind, 0.0) + times.total_s / steps
    return Reason(
        work=profile.work,
        launches=sum(sum(phase.launches) for phase in profile.phases) / steps,
        step_s=sum(profile.step_s) / steps,
        busy_s=sum(sum(phase.busy_s) for phase in profile.phases) / steps,
        class_s=class_s,
    )
