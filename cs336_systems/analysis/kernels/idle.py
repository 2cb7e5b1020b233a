"""Why a device was idle.

An idle time that lies partly in a range of the phase `data`, or in a call that allocates memory, is
cut there, so that each piece has one cause. The first of these rules that holds gives the cause.
`next` is the kernel or copy that ends the idle time.

1. The host is not the cause: BETWEEN_KERNELS. The call that launched `next` had returned before the
   piece began, or had begun by then and launched other work first (a CUDA graph), or the device
   took the larger part of the piece to begin `next`. A launch needs LAUNCH_LATENCY_S to reach an
   idle device. In the other rules the device waited for the host until the call that launched
   `next`.
2. The host was in a range of the phase `data`: DATA. It was in a call that allocates: ALLOCATION.
3. Nothing follows in the step: END_OF_STEP.
4. For more than half of that wait the host made no CUDA call, in pauses longer than HOST_PAUSE_S:
   HOST_PAUSE.
5. When the idle time began, the host was in a call that waits for the device, or had left one less
   than WAIT_SLACK_S before, and that call was over when `next` was launched: HOST_WAITED; likewise
   if the host was in calls that wait or copy for more than half of that wait, as when another
   device still works. The start of a step is exempt from the first part of this rule.
6. Otherwise: LATE_LAUNCH.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..columns import Ints, Mask, chosen, groups, joined, spread
from .attribution import Jobs, Selection, frame_of, totals
from .calls import ApiCallKind
from .device_time import Busy, DeviceSteps
from .host_calls import Host
from .modules import RangeParts
from .phases import CODES, PHASES, Codes, LaunchPhase
from .short_names import short_name
from .step_profile import Gap, IdleCause, IdleTimes
from .trace import MAX_TIME_NS, Events, Times, Trace, Union

HOST_PAUSE_S = 1e-3
"""Eager PyTorch launches something every few microseconds, and takes some hundred to prepare the
longest phase.
"""
LAUNCH_LATENCY_S = 5e-6
"""From the end of a launch call to the start of its kernel on an idle device: 2 us on an H200,
rarely more than 5.
"""
WAIT_SLACK_S = 10e-6
"""Longest time between the end of a wait and the idle time that it explains; host and device
clocks agree no better.
"""
NUM_GAPS = 20

_PAUSE_NS = round(HOST_PAUSE_S * 1e9)
_LATENCY_NS = round(LAUNCH_LATENCY_S * 1e9)
SLACK_NS = round(WAIT_SLACK_S * 1e9)

CAUSES = tuple(IdleCause)
UNKNOWN_CAUSE = -1
_CODE = {cause: code for code, cause in enumerate(CAUSES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps(Times):
    """Idle times of devices within steps."""

    step: Ints
    before: Ints
    """Row of `Jobs` that ended before the idle time; -1 at the start of a step."""
    after: Ints
    """Row of `Jobs` that ends the idle time; -1 at the end of a step."""
    phase: Codes
    cause: Codes
    """Index into `CAUSES`; UNKNOWN_CAUSE if the launch of the following job is not in the trace."""


def find_gaps(
    jobs: Jobs, devices: Sequence[Busy], spans: DeviceSteps, selection: Selection, host: Host
) -> Gaps:
    """All idle times of the devices that a step used, with their causes, by step and start."""
    gaps = joined(Gaps.empty(), *(_gaps_of(busy, spans) for busy in devices))
    causes = _Causes(host, selection)
    gaps = causes.in_pieces(gaps)
    ends_step = gaps.after < 0
    phase = np.append(jobs.phase, np.int8(0))[gaps.after]
    phase[ends_step] = _last_phase(selection)[gaps.step[ends_step]]
    cause = np.full(len(gaps), _CODE[IdleCause.END_OF_STEP], dtype=np.int8)
    causes.explain(cause, gaps.start_ns, gaps.end_ns)
    followed = chosen(gaps, ~ends_step)
    after = followed.after
    # what a call launches later than other work is late only where the call was late
    of_launch = _starts_its_launch(jobs)[after] | ~jobs.is_launched[after]
    of_launch |= jobs.launch_ns[after] > followed.start_ns
    by_host = causes.of(followed, jobs)
    cause[~ends_step] = np.where(of_launch, by_host, _CODE[IdleCause.BETWEEN_KERNELS])
    gaps = replace(gaps, phase=phase, cause=cause)
    return chosen(gaps, np.lexsort((gaps.start_ns, gaps.step)))


def _gaps_of(busy: Busy, spans: DeviceSteps) -> Gaps:
    """The idle times of one device, as yet without phase and cause."""
    steps = np.flatnonzero(busy.union.within(spans.start_ns, spans.end_ns))
    holes = busy.union.holes(spans.start_ns[steps], spans.end_ns[steps])
    rows = np.append(busy.rows, -1)
    unknown = np.full(len(holes), UNKNOWN_CAUSE, dtype=np.int8)
    return Gaps(
        step=steps[holes.window],
        start_ns=holes.start_ns,
        end_ns=holes.end_ns,
        before=rows[holes.before],
        after=rows[holes.after],
        phase=unknown,
        cause=unknown,
    )


def _last_phase(selection: Selection) -> Codes:
    """The last phase of each step."""
    last = np.full(len(selection.steps), CODES[LaunchPhase.UNATTRIBUTED], dtype=np.int8)
    last[selection.windows.step] = selection.windows.phase  # the last assignment stays
    return last


class _Causes:
    """Applies the rules to idle times."""

    def __init__(self, host: Host, selection: Selection) -> None:
        self._host = host
        calls, windows = host.calls, selection.windows
        is_data = windows.phase == CODES[LaunchPhase.DATA]
        allocates = host.does(ApiCallKind.ALLOCATE)
        self._explained = {
            IdleCause.ALLOCATION: calls.union(allocates),
            IdleCause.DATA: windows.union(is_data),
        }
        blocks = calls.is_wait | (calls.is_launch & ~calls.is_kernel)
        self._blocking = calls.union(blocks)
        called = calls.union()
        quiet_start = np.append(-MAX_TIME_NS, called.end)
        quiet_end = np.append(called.start, MAX_TIME_NS)
        is_pause = quiet_end - quiet_start > _PAUSE_NS
        # times longer than _PAUSE_NS in which no thread is in a call
        self._pauses = Union(quiet_start[is_pause], quiet_end[is_pause])
        waits = np.flatnonzero(calls.is_wait)
        waits = waits[np.argsort(calls.start_ns[waits], kind="stable")]
        self._waits = [waits[rows] for _, rows in groups(calls.thread[waits])]

    def in_pieces(self, gaps: Gaps) -> Gaps:
        """The idle times, cut where the host began or ended what explains a part of them."""
        unions = self._explained.values()
        cuts = np.unique(np.concatenate([np.append(union.start, union.end) for union in unions]))
        first = np.searchsorted(cuts, gaps.start_ns, side="right")
        last = np.searchsorted(cuts, gaps.end_ns, side="left")
        count = last - first + 1
        gap, piece = spread(count)
        pieces = chosen(gaps, gap)
        at = first[gap] + piece
        start = np.where(piece > 0, np.append(cuts, 0)[at - 1], pieces.start_ns)
        is_last = piece == count[gap] - 1
        end = np.where(is_last, pieces.end_ns, np.append(cuts, 0)[np.minimum(at, len(cuts))])
        return replace(pieces, start_ns=start, end_ns=end)

    def explain(self, cause: Codes, start: Ints, end: Ints) -> None:
        """Set the cause of the pieces that lie in what explains them."""
        for known, union in self._explained.items():
            cause[union.within(start, end) == end - start] = _CODE[known]

    def of(self, gaps: Gaps, jobs: Jobs) -> Codes:
        """The causes of these idle times, each of which ends with a job."""
        start, end, after = gaps.start_ns, gaps.end_ns, gaps.after
        launch = jobs.launch_ns[after]
        returned = self._host.returned(jobs.call[after], launch)
        # rule 1: the host had launched the job in time. From `could_begin` on, the device could
        # have begun it
        could_begin = np.clip(returned + _LATENCY_NS, start, end)
        in_time = (returned <= start) | (2 * (could_begin - start) < end - start)
        # rule 4: the device waited for the host from `start` to `waited_until`
        waited_until = np.clip(launch, start, end)
        is_pause = 2 * self._pauses.within(start, waited_until) > waited_until - start
        # rule 5, which needs an earlier job in the step
        is_wait = (gaps.before >= 0) & self._was_waiting(start, launch)
        is_wait |= 2 * self._blocking.within(start, waited_until) > waited_until - start
        cause = np.full(len(start), _CODE[IdleCause.LATE_LAUNCH], dtype=np.int8)
        # from the last rule to the first, since an earlier rule overrides a later one
        cause[is_wait] = _CODE[IdleCause.HOST_WAITED]
        cause[is_pause] = _CODE[IdleCause.HOST_PAUSE]
        self.explain(cause, start, end)
        cause[in_time] = _CODE[IdleCause.BETWEEN_KERNELS]
        cause[~jobs.is_launched[after]] = UNKNOWN_CAUSE
        return cause

    def _was_waiting(self, start: Ints, launch: Ints) -> Mask:
        """Whether, when each idle time began, the host was in a call that waits or had just left
        one, and that call was over at the launch.
        """
        calls = self._host.calls
        waiting = np.zeros(len(start), dtype=np.bool_)
        # the calls of one thread, of which only the last to begin can still be open
        for rows in self._waits:
            at = np.searchsorted(calls.start_ns[rows], start, side="right")
            wait_end = np.append(-MAX_TIME_NS, np.maximum.accumulate(calls.end_ns[rows]))[at]
            waiting |= (wait_end >= start - SLACK_NS) & (wait_end <= launch)
        return waiting


def _starts_its_launch(jobs: Jobs) -> Mask:
    """Whether each row is the first job of its launch; false for the later nodes of a CUDA
    graph.
    """
    in_order = frame_of(jobs).sort_values("start_ns", kind="stable")
    return ~in_order.duplicated(["launch_ns", "thread"]).sort_index().to_numpy()


def longest_gaps(
    gaps: Gaps, jobs: Jobs, parts: RangeParts, trace: Trace, spans: DeviceSteps, host: Host
) -> Iterator[Gap]:
    """The NUM_GAPS longest idle times with a known cause, the longest first."""
    frame = frame_of(gaps)[gaps.cause != UNKNOWN_CAUSE]
    frame = frame.sort_values("duration_ns", ascending=False, kind="stable")

    def name(job: int) -> str:
        return short_name(trace.strings[jobs.name[job]]) if job >= 0 else ""

    def module(job: int) -> tuple[str, ...]:
        return parts.names(int(parts.path[jobs.module[job]])) if job >= 0 else ()

    rows: Iterable[Any] = frame[:NUM_GAPS].itertuples()
    for row in rows:
        yield Gap(
            step=row.step,
            start_s=(row.start_ns - int(spans.origin_ns[row.step])) / 1e9,
            duration_s=row.duration_ns / 1e9,
            phase=PHASES[row.phase],
            cause=CAUSES[row.cause],
            before=name(row.before),
            after=name(row.after),
            module=module(row.after),
            host_call=host.longest_call(row.start_ns, row.end_ns),
            host_range=_open_range(trace, trace.ranges, jobs, row),
            library_call=_open_range(trace, trace.library_calls, jobs, row),
        )


def _open_range(trace: Trace, ranges: Events, jobs: Jobs, gap: Any) -> str:  # noqa: ANN401
    """The name of the shortest of these ranges that is open for more than half of the gap, on the
    thread that launched the job `after` it; empty for none.
    """
    after, start_ns, end_ns = gap.after, gap.start_ns, gap.end_ns
    if after < 0 or not jobs.is_launched[after]:
        return ""
    shared = np.minimum(ranges.end_ns, end_ns) - np.maximum(ranges.start_ns, start_ns)
    is_open = (ranges.thread == jobs.thread[after]) & (2 * shared > end_ns - start_ns)
    rows = np.flatnonzero(is_open)
    if not len(rows):
        return ""
    return trace.strings[int(ranges.name[rows[ranges.duration_ns[rows].argmin()]])]


def idle_times(gaps: Gaps, num_devices: Ints) -> tuple[IdleTimes, ...]:
    """Idle times by phase and cause, the longest first; the mean over the devices that a step
    uses.
    """
    frame = frame_of(gaps)[gaps.cause != UNKNOWN_CAUSE]
    spread = frame.groupby(["phase", "cause"])["duration_ns"]
    median_ns, longest_ns = spread.median(), spread.max()
    weighted = frame.assign(duration_ns=frame["duration_ns"] / num_devices[frame["step"]])

    def times(phase: int, cause: int, **sums: Any) -> IdleTimes:  # noqa: ANN401 (count and time)
        return IdleTimes(
            phase=PHASES[phase],
            cause=CAUSES[cause],
            median_s=float(median_ns[phase, cause]) / 1e9,
            longest_s=float(longest_ns[phase, cause]) / 1e9,
            **sums,
        )

    return tuple(totals(weighted, times, phase=int, cause=int))


def idle_notes(gaps: Gaps) -> tuple[str, ...]:
    """A note on idle times whose cause is unknown, if there are any."""
    unknown = gaps.cause == UNKNOWN_CAUSE
    if not unknown.any():
        return ()
    time_s = int(gaps.duration_ns[unknown].sum()) / 1e9
    return (
        f"{int(unknown.sum())} idle times of the device, {time_s:.3g} s together, end with a "
        "kernel or copy without a launch in the file: their cause is unknown, and they are left "
        "out.",
    )
