"""What limits a profiled step: the GPU, the host's launches, data, copies or communication."""

from collections.abc import Iterator
from enum import StrEnum

from ....analysis.kernels.step_profile import IdleCause, Work
from ....analysis.remedies import against_launches
from ....record import WarningCode
from ...section import Finding
from ...words import label, percent_of
from .entry import Explained
from .figures import MIN_SHARE, Figures, us
from .gains import LOADS_ITSELF, copies_gain_s, range_of_data
from .sums import added, collectives_s, copies_alone_s, idle, total

MIN_LATE_SHARE = 0.2
"""Share of the step that the GPU is idle because the next kernel was launched late. A step that the
GPU limits has a percent or two, at its start; one that the CPU limits half and more.
"""
MIN_BUSY_SHARE = 0.8
"""Smallest share of the step that the GPU must be busy to be called the limit of the step."""
MIN_EXPOSED_SHARE = 0.1
"""Smallest share of the step that exposed communication must have to be called its limit."""
MIN_BETWEEN_FOR_DATA = 0.1
"""Smallest share of the idle time between steps for which data is named."""
_COPIES = {
    "host to device, pageable": "pin it (pin_memory=True) and copy with non_blocking=True",
    "device to host, pageable": "copy less often, or into pinned memory",
    "host to device": "copy on a stream of its own while the step before computes",
    "device to host": "copy less often",
}
"""What helps against copies whose kind begins with these words; the first that fits is told."""
_LOADER = "enumerate(DataLoader)#"


class Limit(StrEnum):
    """What limits a step on a GPU."""

    GPU = "the GPU"
    LAUNCHES = "the host's launches"
    DATA = "data"
    BETWEEN = "the time between steps"
    COPIES = "copies"
    COMMUNICATION = "communication"
    IDLE = "idle times of several causes"
    ONE_STEP = "not seen from a part of the work"
    DOUBT = "in doubt"


def limit_of(entry: Explained) -> Limit | None:
    """What limits the step; None for a trace of a CPU or without time."""
    limit = undoubted_limit(entry)
    return Limit.DOUBT if limit is not None and _doubts(entry, limit) else limit


def undoubted_limit(entry: Explained) -> Limit | None:
    """What limits the step, if nothing puts the times in doubt."""
    profile = entry.profile
    span = entry.span()
    if profile.work is not Work.KERNELS or not span.whole_s:
        return None
    is_busy = span.busy_s >= MIN_BUSY_SHARE * span.whole_s
    # the clock of a run times its steps, and not what is between them
    between = None if span.by_clock else profile.between
    if between and between.idle_s >= MIN_LATE_SHARE * (span.whole_s + between.total_s):
        return Limit.BETWEEN
    late = late_s(entry)
    for_data = span.gain_s(idle(profile, IdleCause.DATA).total_s)
    if for_data >= max(MIN_LATE_SHARE * span.whole_s, late):
        return Limit.DATA
    if late >= MIN_LATE_SHARE * span.whole_s or (_was_launch_bound(entry) and not is_busy):
        return Limit.LAUNCHES
    if copies_alone_s(profile) >= MIN_LATE_SHARE * span.whole_s:
        return Limit.COPIES
    if not is_busy:
        return Limit.IDLE
    exposed_s = collectives_s(profile, exposed=True)
    is_computing = span.busy_s - exposed_s >= MIN_BUSY_SHARE * span.whole_s
    is_small = exposed_s < MIN_EXPOSED_SHARE * span.whole_s
    if not (is_computing or is_small):
        return Limit.COMMUNICATION
    return Limit.ONE_STEP if _is_part_of_work(entry) else Limit.GPU


def _is_part_of_work(entry: Explained) -> bool:
    """Whether the program has work that the file's steps do not show: kernels beside a single step,
    or beside several steps a large part of the time of all kernels; without steps, all that lies
    before the first kernel and after the last. The GPU may wait there.
    """
    profile = entry.profile
    left = profile.left
    if profile.is_whole_trace:
        return True
    if entry.span().by_clock:
        return False
    if profile.num_steps == 1:
        return left.outside + left.no_launch + left.cut > 0
    left_s = left.outside_s + left.no_launch_s + left.cut_s
    return left_s >= MIN_LATE_SHARE * profile.kernel_s


def late_s(entry: Explained) -> float:
    """Idle time because of late launches in the step.

    By the clock without a profiler it is what the other causes, which a profiler makes no shorter,
    leave of the time that the device does not work.
    """
    span = entry.span()
    late = idle(entry.profile, IdleCause.LATE_LAUNCH).total_s
    if not span.by_clock:
        return late
    others_s = added(entry.profile.idle).total_s - late
    return min(late, max(span.idle_s - others_s, 0.0))


def _was_launch_bound(entry: Explained) -> bool:
    """Whether the record of the run without a profiler says that its launches were the limit."""
    warnings = () if entry.plain is None else entry.plain.warnings
    return any(warning.code is WarningCode.LAUNCH_BOUND for warning in warnings)


def _doubts(entry: Explained, limit: Limit) -> list[str]:
    """Why it is not sure that this limits the step."""
    doubts = list(entry.profile.doubts)
    if _was_launch_bound(entry) and limit is not Limit.LAUNCHES:
        doubts.append(
            "by its own clock the run without a profiler was limited by its launches (launch-bound)"
        )
    return doubts


class Verdict(Figures):
    """Says what limits the step."""

    def limit(self) -> Iterator[Finding]:
        """Whether host, GPU, data, communication or copies limit the step; for a CPU, the operator
        that takes longest.
        """
        if not self.on_device:
            for kernel in self.kernels[:1]:
                text = (
                    f"The operator {label(kernel.short_name)} ({kernel.kind}) takes "
                    f"{self.of_work(kernel.total_s)}, {self.ms(kernel.total_s)} in "
                    f"{self.count(kernel.count, 'call')}."
                )
                numbers = {"kernel_s": kernel.total_s, "launch_count": kernel.count}
                yield self.finding("longest operator", text, **numbers)
        limit = undoubted_limit(self.entry)
        if limit is None:
            return
        doubts = _doubts(self.entry, limit)
        verdict = self.verdict(limit)
        if doubts:
            verdict = (
                f"In doubt is what limits the {self.whole}: {'; '.join(doubts)}. By the file's "
                f"times: {verdict}"
            )
        yield self.finding(
            f"limit {limit.name.lower()}",
            verdict,
            step_s=self.step_s,
            busy_s=self.span.busy_s,
            busy_share=self.span.busy_share,
            late_s=self.span.gain_s(idle(self.profile, IdleCause.LATE_LAUNCH).total_s),
            data_s=self.span.gain_s(idle(self.profile, IdleCause.DATA).total_s),
            copies_s=self.copies_s,
            copies_gain_s=copies_gain_s(self.entry),
            between_s=self.profile.between.idle_s if self.profile.between else 0.0,
        )

    def verdict(self, limit: Limit) -> str:
        """What limits the step on a GPU."""
        if limit is Limit.COPIES:
            return f"Copies limit the {self.whole}: {self.copying(self.ms(self.step_s))}"
        if limit is Limit.DATA:
            return f"Data limits the {self.whole}: {self.loading()}"
        if limit is Limit.BETWEEN:
            return self.waiting_between()
        busy = self.busy()
        if limit is Limit.LAUNCHES:
            if not self.has_many_short(IdleCause.LATE_LAUNCH):
                return (
                    f"The CPU is the limit: the GPU is busy {busy} A few long idle times are most "
                    "of that: fewer kernels would not save them."
                )
            ways = against_launches(self.config, self.in_use)
            slower = " A profiler makes each launch slower: without one it is less."
            if self.span.by_clock:
                slower = ""
            return (
                f"The CPU is the limit: the GPU is busy {busy}{self.launch_cost()}{slower} A "
                f"faster GPU does not help; use {ways}."
            )
        if limit is Limit.IDLE:
            return f"The GPU is busy only {busy}"
        if limit is Limit.COMMUNICATION:
            return f"Communication is a limit: the GPU is busy {busy}"
        if limit is Limit.ONE_STEP:
            return f"{self.part_of_work()} {busy} What it does outside of them is not seen."
        host_s = sum(self.profile.step_s)
        if not self.span.by_clock and host_s < MIN_BUSY_SHARE * self.step_s:
            return (
                "The GPU is the limit, and the host runs ahead of it: it is busy "
                f"{self.of_step(self.span.busy_s)} of the step's {self.ms(self.step_s)}, while "
                f"the host's step lasts {self.ms(host_s)}."
            )
        return f"The GPU is the limit: it is busy {busy}"

    def part_of_work(self) -> str:
        """The part of the program's work that the file shows, and that the GPU is busy in it."""
        if self.profile.is_whole_trace:
            return "Between its first work and its last in the file the GPU is busy"
        steps = "the only whole step"
        if self.profile.num_steps > 1:
            steps = f"the {self.profile.num_steps} steps"
        return f"In {steps} of the file the GPU is busy"

    def has_many_short(self, cause: IdleCause) -> bool:
        """Whether the idle time of this cause is made up of many short idle times, which fewer
        kernels would save, and not of a few long ones.

        It is if idle times of the median length of their phase, as many as there are, would take
        at least half as long as the real ones take in all.
        """
        by_phase = [times for times in self.profile.idle if times.cause is cause]
        if any(times.median_s is None for times in by_phase):
            return True  # of an older version, which did not keep it
        if_all_median_s = sum(times.count * (times.median_s or 0.0) for times in by_phase)
        return 2 * if_all_median_s >= added(by_phase).total_s

    def busy(self) -> str:
        """How much of the step the GPU is busy, with the profiler's own times beside those of the
        clock, how much of that with nothing but collectives, and how much it is idle because of
        late launches.
        """
        span, at_most = self.span, ""
        text = f"{percent_of(span.busy_share)} of the {self.whole}'s {self.ms(self.step_s)}"
        if span.by_clock:
            at_most = "at most "
            text += (
                f" ({percent_of(span.busy_s, span.profiled_s)} of {self.ms(span.profiled_s)} "
                "under the profiler)"
            )
        exposed_s = collectives_s(self.profile, exposed=True)
        if exposed_s >= MIN_EXPOSED_SHARE * self.step_s:
            text += f", {self.of_step(exposed_s)} with communication alone"
        late = idle(self.profile, IdleCause.LATE_LAUNCH).total_s
        if late >= MIN_SHARE * self.step_s:
            late_share = self.of_step(span.gain_s(late))
            text += f", and idle {at_most}{late_share} because the next kernel was not launched yet"
        return f"{text}."

    def waiting_between(self) -> str:
        """How long the GPU idles between the steps, and whether for data."""
        between = self.profile.between
        assert between is not None
        idle_s = between.idle_s
        whole_s = self.step_s + between.total_s
        text = (
            f"The time between the steps is the limit: for {self.ms(idle_s)} of "
            f"{self.ms(whole_s)} from step to step the GPU runs nothing"
        )
        if between.data_s >= MIN_BETWEEN_FOR_DATA * idle_s:
            return f"{text}, {self.ms(between.data_s)} of it while the host takes a batch."
        return f"{text}; within a step it is busy {percent_of(self.span.busy_share)}."

    def loading(self) -> str:
        """How long the GPU waits for a batch, in which range, and what helps."""
        name = range_of_data(self.profile)
        where = label(name)
        remedy = "load the next batch while the step before computes"
        if name.startswith(_LOADER):
            where = f"DataLoader.{name.rpartition('.')[2]}"
            remedy = "more workers (num_workers), prefetch"
            if LOADS_ITSELF in name:
                remedy = "let workers load (num_workers), prefetch"
        for_data = self.span.gain_s(idle(self.profile, IdleCause.DATA).total_s)
        text = f"for {self.ms(for_data)} of {self.ms(self.step_s)} the GPU waits"
        return f"{text} while the host is in {where or 'a range of data'}; {remedy}."

    def copying(self, whole: str) -> str:
        """How long the GPU only copies, what most of the copies are, and what helps against
        them.
        """
        text = f"for {self.ms(self.copies_s)} of {whole} the GPU copies and runs no kernel"
        for copies in self.profile.copies[:1]:
            text += f", {self.ms(copies.total_s)} {copies.kind}"
            kind = copies.kind or ""
            remedy = next(
                (remedy for start, remedy in _COPIES.items() if kind.startswith(start)), ""
            )
            if remedy and not self.profile.doubts:
                gain = self.ms(copies_gain_s(self.entry))
                text += f": {remedy} (at most {gain} less)"
        return f"{text}."

    def launch_cost(self) -> str:
        """CPU time per launch and duration of a kernel; the CPU is the limit because the first
        is the longer one. Without steps it is not known how long the CPU worked.
        """
        count, calls_s = self.launching()
        if not count or self.profile.is_whole_trace:
            return ""
        launching = [times for times in self.profile.phases if any(times.launches)]
        host_s = total(times.host_s for times in launching)
        kernel_s = self.kernel_s / max(self.launches(), 1)
        who = "Under the profiler the CPU" if self.span.by_clock else "The CPU"
        return (
            f" {who} takes {us(host_s / count)} per launch, "
            f"{us(calls_s / count)} of it in the call itself; a kernel runs "
            f"{us(kernel_s)} on average."
        )
