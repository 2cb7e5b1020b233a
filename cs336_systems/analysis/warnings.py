"""Warnings about the raw step times of one run. No time is ever dropped.

Thresholds of significance are such that independent noise rarely warns: of runs of 10 independent
steps, fewer than 1 in 100 gets a warning about drift. Thresholds of size leave out differences that
would change no conclusion.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import Phase, Profiler, RunConfig
from ..costs.time import MIN_LAUNCHED_SHARE, limited_by_launches
from ..record import Measurement, RunRecord, RunWarning, Telemetry, WarningCode
from .remedies import against_launches
from .statistics import lag1_autocorrelation, outliers, slope

MAX_CV = 0.05
"""Largest coefficient of variation. A quiet machine stays below 1 to 2 % after warm-up; above 5 %,
the mean of 10 steps is not known to 3 %.
"""
OUTLIER_ALPHA = 0.005
"""Share of runs of independent normal steps that the test of outliers names; of runs of 5 steps,
1 %.
"""
MIN_OUTLIER = 0.05
"""Least distance of an outlier from the median, relative to it; smaller ones do not matter."""
FULL_CLOCK = 0.995
"""Share of the maximal SM clock from which on a GPU is not throttled, whatever reason it names."""
MIN_DRIFT = 0.01
"""Least drift, relative to the mean: of the last step from the first, of the second half from the
first, or the coefficient of variation of correlated steps.
"""
MIN_DRIFT_STEPS = 10
"""Fewest steps for a warning about drift; with fewer, noise looks like drift too often."""
MAX_T = 4.5
"""Standard errors above which a slope, or the difference between halves, is significant: by chance
in 1 of 500 runs of 10 independent steps, in fewer of longer runs.
"""
MIN_LAG1 = 0.5
"""Least lag-1 autocorrelation r that warns: 3 such steps are worth 1 independent step, by (1 +
r) / (1 - r).
"""
MAX_LAG1_Z = 2.5
"""Standard errors by which the lag-1 autocorrelation must exceed -1/n, its mean for independent
steps.
"""
MAX_OUTLIERS = 5
"""Most outliers that a warning names."""
OF_TIMES = frozenset(
    {WarningCode.UNSTABLE, WarningCode.OUTLIERS, WarningCode.DRIFT, WarningCode.LAUNCH_BOUND}
)
"""Warnings that follow from the times in a record alone."""
DOUBTFUL = frozenset(
    {
        WarningCode.FEW_WARMUP_STEPS,
        WarningCode.UNSTABLE,
        WarningCode.OUTLIERS,
        WarningCode.DRIFT,
        WarningCode.RECOMPILED,
        WarningCode.ALLOCATOR_GREW,
        WarningCode.THROTTLED,
        WarningCode.GPU_SHARED,
        WarningCode.CPU_SHARED,
        WarningCode.PROCESSES_APART,
    }
)
"""Warnings that put a time in doubt: another measurement may give another time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """What was timed repeatedly, in words for a warning; `warmup` and `more` are advice that
    follows `use`.
    """

    name: str
    plural: str
    warmup: str
    """What helps against a slow start."""
    more: str
    """What helps against a wide spread."""
    advice: str = ""
    """What to do in any case, instead of these and of other advice that is meant for benchmarks."""

    def against(self, remedy: str) -> str:
        """The remedy, or the advice that replaces it."""
        return self.advice or remedy


STEPS = Repeated(
    name="step",
    plural="steps",
    warmup="more --warmup-steps",
    more="more --warmup-steps and --measured-steps",
)
LOOP_STEPS = Repeated(
    name="step", plural="steps", warmup="", more="", advice="causes are named where they were seen"
)
PASSES = Repeated(
    name="pass",
    plural="passes",
    warmup="more --warmup-passes",
    more="more --warmup-passes and --passes",
)
LOOPS = Repeated(
    name="loop",
    plural="loops",
    warmup="a longer --loop-s",
    more="more --loops and a longer --loop-s",
)


def in_doubt(codes: Iterable[str]) -> bool:
    """Whether warnings of these codes put a time in doubt."""
    return not DOUBTFUL.isdisjoint(codes)


def may_be_in_doubt(times_s: Sequence[float]) -> bool:
    """Whether any of the warnings about times can doubt these, by their range alone: fewer than
    MIN_DRIFT_STEPS of them do not drift, and neither the scatter nor an outlier exceeds the range.
    """
    spread = max(times_s) / min(times_s) - 1
    return len(times_s) >= MIN_DRIFT_STEPS or spread >= min(MAX_CV, MIN_OUTLIER)


def measurement_warnings(
    measured: Measurement | None, repeated: Repeated
) -> tuple[RunWarning, ...]:
    """Warnings about the times; none without times, or if a time is 0, which a coarse clock may
    show.
    """
    if measured is None or not all(measured.times_s):
        return ()
    return timing_warnings(measured.times_s, repeated=repeated)


def launch_bound_phases(
    measurements: Iterable[Measurement], host_phases: Iterable[Measurement]
) -> dict[Phase, float]:
    """The phases of a run in which the device waits for the host to launch kernels, with their mean
    times on the device in seconds.

    `measurements` has each phase's times on the device, and `host_phases` those on the host, from
    the same steps. Without the latter no phase is known to be launch-bound. The whole step is not
    judged, only its phases.
    """
    on_device = {phase.phase: phase.times_s for phase in measurements}
    on_host = {phase.phase: phase.times_s for phase in host_phases}
    on_device.pop(Phase.STEP, None)
    return limited_by_launches(on_device, on_host)


def judged(record: RunRecord) -> RunRecord:
    """The record with the warnings that follow from its times, in the place of those that it has.

    A process that measures writes its record first, so that no time limit can lose the times while
    they are judged.
    """
    steps = record.measurement(Phase.STEP)
    if steps is None or not all(steps.times_s):  # which a coarse clock may show
        return record
    others = [warning for warning in record.warnings if warning.code not in OF_TIMES]
    launched_s = launch_bound_phases(record.measurements, record.host_phases)
    return replace(
        record, warnings=(*others, *timing_warnings(steps.times_s, launched_s, record.config))
    )


def timing_warnings(
    times_s: Sequence[float],
    launched_s: Mapping[Phase, float] | None = None,
    config: RunConfig | None = None,
    repeated: Repeated = STEPS,
) -> tuple[RunWarning, ...]:
    """Warnings about the raw times of the measured steps, or of what else was repeated, in order.

    `launched_s` are the times of the phases that wait for launches. With the `config` of the run,
    the advice leaves out what the run does already.
    """
    name = repeated.name
    for number, time_s in enumerate(times_s, start=1):
        if not 0 < time_s < math.inf:
            raise ValueError(
                f"{name} times must be positive and finite seconds, got {time_s} for {name} "
                f"{number}"
            )
    if not times_s:
        return ()
    messages = {
        WarningCode.UNSTABLE: _unstable(times_s, repeated),
        WarningCode.OUTLIERS: _outliers(times_s, repeated),
        WarningCode.DRIFT: _drift(times_s, repeated),
        WarningCode.LAUNCH_BOUND: _launch_bound(times_s, launched_s or {}, config),
    }
    told = {code: message for code, message in messages.items() if message is not None}
    return tuple(RunWarning(code=code, message=message) for code, message in told.items())


def _unstable(times_s: Sequence[float], repeated: Repeated) -> str | None:
    """A warning if the times scatter by more than MAX_CV of their mean, else None."""
    cv = _cv(times_s)
    if cv <= MAX_CV:
        return None
    remedy = repeated.against(f"close other programs, or use {repeated.more}")
    return (
        f"the standard deviation is {_percent(cv)} of the mean {repeated.name}, over "
        f"{_percent(MAX_CV)}: {remedy}"
    )


def throttled(telemetry: Telemetry) -> str | None:
    """Why the driver lowered the clock before or after the measured steps, and to which share;
    None if it did not.
    """
    clocks, reasons = [], set[str]()
    for state in (telemetry.before, telemetry.after):
        if state.throttle_reasons:
            clocks.append(state.sm_clock_hz / state.max_sm_clock_hz)
            reasons.update(state.throttle_reasons)
    clock = min(clocks, default=1.0)
    if clock >= FULL_CLOCK:
        return None
    return f"{', '.join(sorted(reasons))}: SM clock at {clock:.0%} of its maximum"


def _cv(times_s: Sequence[float]) -> float:
    """Coefficient of variation: sample standard deviation over mean."""
    n, mean_s = len(times_s), statistics.fmean(times_s)  # `statistics.stdev` is slow
    return math.dist(times_s, [mean_s] * n) / math.sqrt(max(n - 1, 1)) / mean_s


def _outliers(times_s: Sequence[float], repeated: Repeated) -> str | None:
    """A warning that names single times far from the median, by a test for outliers and by at least
    MIN_OUTLIER of the median; None without any.
    """
    median_s = statistics.median(times_s)
    distances = [time_s / median_s - 1 for time_s in times_s]
    if max(map(abs, distances)) < MIN_OUTLIER:
        return None  # without the slow test
    found = outliers(times_s, OUTLIER_ALPHA)
    far = [place for place in found if abs(distances[place]) >= MIN_OUTLIER]
    if not far:
        return None
    named = []
    for place in far[:MAX_OUTLIERS]:
        named.append(f"{repeated.name} {place + 1} {_signed_percent(distances[place])}")
    more = f" and {len(far) - MAX_OUTLIERS} more" if len(far) > MAX_OUTLIERS else ""
    remedy = repeated.against("close other programs" if far[0] else f"use {repeated.warmup}")
    return (
        f"{len(far)} of {len(times_s)} {repeated.plural} lie far from the median of "
        f"{median_s * 1e3:.4g} ms ({', '.join(named)}{more}); they are kept: {remedy}, or rely on "
        "the median"
    )


def _drift(times_s: Sequence[float], repeated: Repeated) -> str | None:
    """A warning if the times change in the course of the steps, by the first of three tests that
    sees it; None without one or with too few steps to tell.
    """
    if len(times_s) < MIN_DRIFT_STEPS:
        return None
    for drift_in in (_slope_seen, _halves_seen, _correlation_seen):
        drift = drift_in(times_s, repeated)
        if drift is not None:
            remedy = f"use {repeated.warmup}, and look at the clocks and the temperature"
            return f"{drift}: {repeated.against(remedy)}"
    return None


def _slope_seen(times_s: Sequence[float], repeated: Repeated) -> str | None:
    """A sentence on how much the times change steadily, by the slope of a regression line, if the
    slope is significant and the change noticeable; else None.
    """
    per_step, error = slope(times_s)
    change = per_step * (len(times_s) - 1) / statistics.fmean(times_s)
    if abs(per_step) <= MAX_T * error or abs(change) < MIN_DRIFT:
        return None
    return (
        f"the {repeated.name} time changed steadily by {_signed_percent(change)} over "
        f"{len(times_s)} {repeated.plural}"
    )


def _halves_seen(times_s: Sequence[float], repeated: Repeated) -> str | None:
    """A sentence on how the mean of the second half of the times differs from that of the first, if
    the difference is significant and noticeable; else None.
    """
    half = len(times_s) // 2
    first, second = times_s[:half], times_s[-half:]
    difference = statistics.fmean(second) - statistics.fmean(first)
    error = math.sqrt((statistics.variance(first) + statistics.variance(second)) / half)
    change = difference / statistics.fmean(times_s)
    if abs(difference) <= MAX_T * error or abs(change) < MIN_DRIFT:
        return None
    return (
        f"the second half of the {repeated.plural} took {_signed_percent(change)} against the "
        "first half"
    )


def _correlation_seen(times_s: Sequence[float], repeated: Repeated) -> str | None:
    """A sentence that neighbouring times resemble each other, if their autocorrelation is
    significant and their scatter noticeable; else None.
    """
    n = len(times_s)
    lag1 = lag1_autocorrelation(times_s)
    error = (n - 2) / (n * math.sqrt(n - 1))  # exact for independent normal values (Moran 1948)
    least = max(MIN_LAG1, MAX_LAG1_Z * error - 1 / n)
    if lag1 is None or lag1 <= least or _cv(times_s) < MIN_DRIFT:
        return None
    return (
        f"each {repeated.name} resembles the one before (lag-1 autocorrelation {lag1:.2f} "
        f"over {n} {repeated.plural})"
    )


def _launch_bound(
    times_s: Sequence[float], launched_s: Mapping[Phase, float], config: RunConfig | None
) -> str | None:
    """A warning if waiting for kernel launches takes more than MIN_LAUNCHED_SHARE of the mean step;
    else None.

    `launched_s` has the seconds in a step of each phase that waits for launches.
    """
    share = sum(launched_s.values()) / statistics.fmean(times_s)
    if share <= MIN_LAUNCHED_SHARE:
        return None
    is_profiled = config is not None and config.profiler is not Profiler.NONE
    under = " with the profiler running, which makes launches slower" if is_profiled else ""
    return (
        f"the CPU is the limit in {_percent(share)} of the step{under} ({', '.join(launched_s)}), "
        f"so a faster GPU would not help there; use {against_launches(config)}"
    )


def _percent(fraction: float) -> str:
    """A fraction in percent, with one decimal."""
    return f"{fraction * 100:.1f} %"


def _signed_percent(fraction: float) -> str:
    """A fraction in percent, with sign and one decimal."""
    return f"{fraction * 100:+.1f} %"
