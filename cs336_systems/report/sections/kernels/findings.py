"""Sentences about what limits a profiled step, and about what takes time in it that can be saved.

All numbers are per step. Where a run without a profiler timed the step, shares and gains are of
that time: a profiler makes launches slower, so that its step has more idle time. A finding is
reported only if it costs at least the share that its threshold below gives.
"""

import math
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import TypeAlias

from ....analysis.kernels.classes import KernelClass
from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import Gap, IdleCause, KernelTimes, Work
from ....analysis.remedies import OF_PRECISION, Remedy, against_launches, remedies
from ....config import Precision
from ....costs.hardware import faster_precisions, find_device
from ....record import WarningCode
from ...words import label, percent_of, significant
from ..plugged import added_findings
from .entry import Explained
from .sums import (
    added,
    collectives_s,
    copies_alone_s,
    idle,
    kernel_s,
    num_launches,
    path_text,
    terms,
    total,
)

MIN_LATE_SHARE = 0.2
"""Share of the step that the GPU is idle because the next kernel was launched late. A step that the
GPU limits has a percent or two, at its start; one that the CPU limits half and more.
"""
MIN_BUSY_SHARE = 0.8
"""Smallest share of the step that the GPU must be busy to be called the limit of the step."""
MIN_SHARE = 0.01
"""Smallest reported share of a step: of idle times in the step (a hiccup of a millisecond in ten
steps stays below), of kernels in no phase or of unknown class in the kernels' time, of
communication and its exposed part.
"""
MIN_LARGE_SHARE = 0.25
"""Smallest reported share of what every step has some of: of kernels that move values in forward
and backward, of fp32 products, for which tensor cores need a tenth of the time, and of waits for
other ranks in the exposed time.
"""
MIN_STEADY_SHARE = 0.9
"""Smallest share of the steps in which the same rank must come last to be named."""
MIN_GAP_SHARE, TIMES_MEDIAN, MAX_GAPS = 0.05, 10, 2
"""An idle time stands out from this share of a step and this many times the median of its phase and
cause; the two longest are told.
"""
MIN_OPTIMIZER_SHARE = 0.1
"""Smallest reported share of the step. A fused AdamW moves 28 bytes a parameter, a few percent
of a step.
"""

WHERE = {
    LaunchPhase.FORWARD: "forward",
    LaunchPhase.LOSS: "the loss",
    LaunchPhase.BACKWARD: "backward",
    LaunchPhase.COMMUNICATION: "communication",
    LaunchPhase.OPTIMIZER: "the optimizer",
    LaunchPhase.DATA: "the making of the batch",
    LaunchPhase.UNATTRIBUTED: "no phase",
}
"""Names of phases in sentences."""
_WAITING = (
    LaunchPhase.FORWARD,
    LaunchPhase.LOSS,
    LaunchPhase.BACKWARD,
    LaunchPhase.COMMUNICATION,
    LaunchPhase.OPTIMIZER,
)
"""Phases in which the host has no reason to wait; a timed step synchronises only before and
after them.
"""
_MOVING = (
    KernelClass.ELEMENT_WISE,
    KernelClass.COPY_AND_FILL,
    KernelClass.NORMALISATION,
    KernelClass.REDUCTION,
)
_BOUNDS = {
    IdleCause.LATE_LAUNCH: ("waiting for launches", Remedy.GRAPHS),
    IdleCause.HOST_WAITED: ("waits of the host for the device", None),
    IdleCause.HOST_PAUSE: ("pauses of the host", None),
    IdleCause.BETWEEN_KERNELS: ("idle time between kernels", Remedy.COMPILE),
    IdleCause.END_OF_STEP: ("idle time after the last kernel", None),
}
"""What the step would be without, for each cause of idle time, and the remedy against it."""
_FULL_PRECISION = re.compile(r"sgemm|f32f32_f32f32_f32")
"""Part of the names of fp32 products of cuBLAS and CUTLASS: ampere_sgemm_, simt_sgemm,
xmma_gemm_f32f32_f32f32_f32_.
"""
_HAS_TF32 = re.compile(r"ampere|hopper|blackwell|(sm|cutlass_?|cutlass_sm)(8|9|1\d)\d")
"""Part of the names of kernels that need at least an Ampere GPU, whose tensor cores have TF32
and bf16.
"""
_COPIES = {
    "host to device, pageable": "pin it (pin_memory=True) and copy with non_blocking=True",
    "device to host, pageable": "copy less often, or into pinned memory",
    "host to device": "copy on a stream of its own while the step before computes",
    "device to host": "copy less often",
}
"""What helps against copies whose kind begins with these words; the first that fits is told."""
Finding: TypeAlias = tuple[float, str]
"""The time over all steps that a problem costs, and a sentence."""
ANSWER = 3
"""Number of sentences that answer where the time goes, before all tables."""


def findings(entry: Explained) -> tuple[str, ...]:
    """Sentences in order: what limits the step, what idle time costs it at most, then the rest, the
    largest cost first.

    Where the configuration of the run is known, the advice leaves out what the run does already.
    """
    finder = _Findings(entry)
    problems = [
        *finder.late_phases(),
        *finder.waits(),
        *finder.pauses(),
        *finder.unknown(),
        *finder.unattributed(),
        *finder.communication(),
        *finder.copies(),
        *finder.full_precision(),
        *finder.optimizer(),
        *finder.moving(),
    ]
    problems.sort(key=lambda problem: -problem[0])
    sentences = [*finder.limit(), *finder.gaps(), *finder.bounds()]
    sentences += [text for _, text in problems]
    return (*sentences, *added_findings(entry))


def answer(entry: Explained) -> tuple[str, ...]:
    """The first ANSWER sentences; where there are fewer findings, which kernel and which phase
    take longest.
    """
    return (*findings(entry), *_Findings(entry).longest())[:ANSWER]


class Limit(StrEnum):
    """What limits a step on a GPU."""

    GPU = "the GPU"
    LAUNCHES = "the host's launches"
    COPIES = "copies"
    COMMUNICATION = "communication"
    IDLE = "idle times of several causes"
    DOUBT = "in doubt"


def limit_of(entry: Explained) -> Limit | None:
    """What limits the step; None for a trace of a CPU or without time."""
    limit = _limit(entry)
    return Limit.DOUBT if limit is not None and _doubts(entry, limit) else limit


def _limit(entry: Explained) -> Limit | None:
    """What limits the step, if nothing puts the times in doubt."""
    profile, span = entry.profile, entry.span()
    if profile.work is not Work.KERNELS or not span.whole_s:
        return None
    is_busy = span.busy_s >= MIN_BUSY_SHARE * span.whole_s
    if late_s(entry) >= MIN_LATE_SHARE * span.whole_s or (_was_launch_bound(entry) and not is_busy):
        return Limit.LAUNCHES
    if copies_alone_s(profile) >= MIN_LATE_SHARE * span.whole_s:
        return Limit.COPIES
    if not is_busy:
        return Limit.IDLE
    computing_s = span.busy_s - collectives_s(profile, exposed=True)
    return Limit.GPU if computing_s >= MIN_BUSY_SHARE * span.whole_s else Limit.COMMUNICATION


def late_s(entry: Explained, phase: LaunchPhase | None = None) -> float:
    """Idle time because of late launches in the step or phase.

    By the clock without a profiler it is what the other causes, which a profiler makes no shorter,
    leave of the time that the device does not work.
    """
    span = entry.span(phase)
    late = idle(entry.profile, IdleCause.LATE_LAUNCH, phase).total_s
    if not span.by_clock:
        return late
    others = added(
        times
        for times in entry.profile.idle
        if times.cause is not IdleCause.LATE_LAUNCH and phase in (None, times.phase)
    )
    return min(late, max(span.idle_s - others.total_s, 0.0))


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


def _matters(part: float, least_share: float, whole: float) -> bool:
    """Whether there is a part at all, and it is at least this share of the whole."""
    return part > 0 and part >= least_share * whole


class _Findings:
    """Makes the findings of one profile. Times are sums over all steps; sentences give them per
    step.
    """

    def __init__(self, entry: Explained) -> None:
        self.entry, self.profile, self.config = entry, entry.profile, entry.config
        profile = entry.profile
        self.item, self.time = terms(profile)
        self.on_device = profile.work is Work.KERNELS
        self.span, self.kernel_s = entry.span(), kernel_s(profile)
        self.step_s = self.span.whole_s
        # of the whole step; rows with a phase have the same launches again
        self.kernels = [kernel for kernel in profile.kernels if kernel.phase is None]
        self.copies_s = copies_alone_s(profile) if self.on_device else 0.0
        if _matters(self.copies_s, MIN_SHARE, self.step_s):
            self.time = "kernels' time"  # not all of the GPU's

    def ms(self, total_s: float) -> str:
        """The time per step, of a time over all steps."""
        return _ms(total_s / self.profile.num_steps)

    def of_step(self, total_s: float) -> str:
        """Share of the step, of which nothing is more than the whole."""
        return percent_of(min(total_s, self.step_s), self.step_s)

    def of_work(self, total_s: float) -> str:
        """Share of the time of all kernels or operators, as `40 % of the GPU time`."""
        return f"{percent_of(total_s, self.kernel_s)} of the {self.time}"

    def count(self, count: int, noun: str) -> str:
        """How many there are in a step: `4 kernels`, `1 launch`, `0.500 launches`."""
        per_step = count / self.profile.num_steps
        number = significant(per_step, 3) if per_step % 1 else f"{per_step:,.0f}"
        if per_step == 1:
            return f"{number} {noun}"
        return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"

    def advice(self, *candidates: Remedy) -> str:
        """The flags of the ways that are open to the run, in brackets after a space; empty if
        there are none.
        """
        named = remedies(self.config, *candidates)
        return f" ({named})" if named else ""

    def limit(self) -> Iterator[str]:
        """Whether host, GPU, communication or copies limit the step; for a CPU, the operator
        that takes longest.
        """
        if not self.on_device:
            for kernel in self.kernels[:1]:
                yield (
                    f"The operator {label(kernel.short_name)} ({kernel.kind}) takes "
                    f"{self.of_work(kernel.total_s)}, {self.ms(kernel.total_s)} in "
                    f"{self.count(kernel.count, 'call')}."
                )
        limit = _limit(self.entry)
        if limit is None:
            return
        doubts, verdict = _doubts(self.entry, limit), self.verdict(limit)
        if doubts:
            verdict = (
                f"In doubt is what limits the step: {'; '.join(doubts)}. By the file's "
                f"times: {verdict}"
            )
        yield verdict

    def verdict(self, limit: Limit) -> str:
        """What limits the step on a GPU."""
        if limit is Limit.COPIES:
            return f"Copies limit the step: {self.copying(self.ms(self.step_s))}"
        busy = self.busy()
        if limit is Limit.LAUNCHES:
            slower = " A profiler makes each launch slower: without one it is less."
            if self.span.by_clock:
                slower = ""
            return (
                f"The CPU is the limit: the GPU is busy {busy}{self.launch_cost()}{slower} A "
                f"faster GPU does not help; use {against_launches(self.config)}."
            )
        if limit is Limit.IDLE:
            return f"The GPU is busy only {busy}"
        if limit is Limit.COMMUNICATION:
            return (
                "Communication is a limit: the GPU computes less than it seems to. It is busy "
                f"{busy}"
            )
        host_s = sum(self.profile.step_s)
        if not self.span.by_clock and host_s < MIN_BUSY_SHARE * self.step_s:
            return (
                "The GPU is the limit, and the host runs ahead of it: it is busy "
                f"{self.of_step(self.span.busy_s)} of the {self.ms(self.step_s)} from step to "
                f"step, while the host's step lasts {self.ms(host_s)}."
            )
        return f"The GPU is the limit: it is busy {busy}"

    def busy(self) -> str:
        """How much of the step the GPU is busy, with the profiler's own times beside those of the
        clock, and how much it is idle because of late launches.
        """
        span, at_most = self.span, ""
        text = f"{percent_of(span.busy_share)} of the step's {self.ms(self.step_s)}"
        if span.by_clock:
            at_most = "at most "
            text += (
                f" ({percent_of(span.busy_s, span.profiled_s)} of {self.ms(span.profiled_s)} "
                "under the profiler)"
            )
        late = idle(self.profile, IdleCause.LATE_LAUNCH).total_s
        if late >= MIN_SHARE * self.step_s:
            late_share = self.of_step(span.gain_s(late))
            text += f", and idle {at_most}{late_share} because the next kernel was not launched yet"
        return f"{text}."

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
            if remedy:
                text += f": {remedy}"
        return f"{text}."

    def copies(self) -> Iterator[Finding]:
        """Copies that do not limit the step, and cost time in which no kernel runs."""
        if (
            self.profile.copies
            and MIN_SHARE * self.step_s <= self.copies_s < MIN_LATE_SHARE * self.step_s
        ):
            text = self.copying("the step")
            yield self.copies_s, f"{text[0].upper()}{text[1:]}"

    def longest(self) -> Iterator[str]:
        """The kernel and the phases that take longest, where little else is to be said."""
        for kernel in self.kernels[:1] if self.on_device else ():
            yield (
                f"The {self.item} that takes longest is {label(kernel.short_name)} "
                f"({kernel.kind}), {self.of_work(kernel.total_s)} in "
                f"{self.count(kernel.count, 'launch')}."
            )
        times_s = {times.phase: sum(times.kernel_s) for times in self.profile.phases}
        shares = [
            f"{WHERE[phase]} {percent_of(time_s, self.kernel_s)}"
            for phase, time_s in times_s.items()
            if time_s
        ]
        if len(shares) > 1:
            yield f"Of the {self.time}, {', '.join(shares)}."

    def standing_out(self) -> list[Gap]:
        """Idle times that are much longer than others of their phase and cause, and a part of a
        step.
        """
        least_s = MIN_GAP_SHARE * self.span.profiled_s / self.profile.num_steps
        medians_s = {(times.phase, times.cause): times.median_s for times in self.profile.idle}
        gaps = []
        for gap in self.profile.gaps:
            # where no median is known, nothing stands out of it
            median_s = medians_s.get((gap.phase, gap.cause)) or math.inf
            if gap.duration_s >= max(least_s, TIMES_MEDIAN * median_s):
                gaps.append(gap)
        return gaps

    def gaps(self) -> Iterator[str]:
        """The idle times that stand out: where they are, and what the host did."""
        alike = {(times.phase, times.cause): times for times in self.profile.idle}
        for gap in self.standing_out()[:MAX_GAPS]:
            times = alike[gap.phase, gap.cause]
            doing = "the host made no call"
            if gap.cause is IdleCause.BETWEEN_KERNELS:
                doing = (
                    "the next kernel had been launched, so the host is not at fault (another "
                    "program on the GPU, a migrated page, or lost events may be)"
                )
            elif gap.host_call:
                doing = f"the host was in {label(gap.host_call)}"
            yield (
                f"One idle time of {_ms(gap.duration_s)} stands out among {times.count:,} of "
                f"{_us(times.median_s or 0)} (median): in step {gap.step}, {WHERE[gap.phase]}, "
                f"between {label(gap.before) or 'the start'} and {label(gap.after) or 'the end'}; "
                f"{doing}."
            )

    def launch_cost(self) -> str:
        """CPU time per launch and duration of a kernel; the CPU is the limit because the first
        is the longer one.
        """
        calls = added(call for call in self.profile.host_calls if call.is_launch)
        if not calls.count:
            return ""
        host_s = total(times.host_s for times in self.profile.phases)
        kernel_s = self.kernel_s / max(num_launches(*self.profile.phases), 1)
        who = "Under the profiler the CPU" if self.span.by_clock else "The CPU"
        return (
            f" {who} takes {_us(host_s / calls.count)} per launch, "
            f"{_us(calls.total_s / calls.count)} of it in CUDA's own call; a kernel runs "
            f"{_us(kernel_s)} on average."
        )

    def bounds(self) -> Iterator[str]:
        """How much shorter the step could be at most without the idle time of each cause."""
        # a time that stands out has a sentence of its own
        lost_s = {cause: idle(self.profile, cause).total_s for cause in _BOUNDS}
        for gap in self.standing_out():
            lost_s[gap.cause] -= gap.duration_s
        gains_s = {cause: self.span.gain_s(time_s) for cause, time_s in lost_s.items()}
        bounds = []
        for cause in sorted(lost_s, key=lambda cause: -lost_s[cause]):
            if gains_s[cause] >= MIN_SHARE * self.step_s > 0:
                without_what, remedy = _BOUNDS[cause]
                flags = self.advice(remedy) if remedy else ""
                bounds.append(f"{self.ms(gains_s[cause])} less without {without_what}{flags}")
        if not bounds:
            return
        text = f"The step would take at most {', '.join(bounds)}"
        if len(bounds) > 1 and self.span.by_clock and sum(gains_s.values()) > self.span.idle_s:
            text += f", and in all at most {self.ms(self.span.idle_s)} less"
        yield f"{text}."

    def late_phases(self) -> Iterator[Finding]:
        """Phases that the host limits, in a step that it does not limit."""
        if _limit(self.entry) is Limit.LAUNCHES:
            return
        for times in self.profile.phases:
            phase = times.phase
            lost_s, whole_s = late_s(self.entry, phase), self.entry.span(phase).whole_s
            # every step starts idle, because nothing is launched yet; so it must also matter for
            # the whole step
            if lost_s >= MIN_LATE_SHARE * whole_s > 0 and lost_s >= MIN_SHARE * self.step_s:
                text = (
                    f"In {WHERE[phase]} the CPU is the limit: of {self.ms(whole_s)} the GPU "
                    f"is idle {percent_of(lost_s, whole_s)}, because the next of its "
                    f"{self.count(num_launches(times), 'kernel')} was not launched yet."
                )
                yield lost_s, text

    def waits(self) -> Iterator[Finding]:
        """Synchronisations within a phase that has kernels. None is needed, so each is reported."""
        launched = {times.phase for times in self.profile.phases if any(times.launches)}
        for phase in (phase for phase in _WAITING if phase in launched):
            calls = [
                call for call in self.profile.host_calls if call.is_wait and call.phase is phase
            ]
            # a copy that is waited for is followed by the call that waits, unless it does both
            # itself
            waits = [call for call in calls if not (call.is_launch and call.name.endswith("Async"))]
            if not (count := added(waits).count):
                continue
            lost_s = self.span.gain_s(idle(self.profile, IdleCause.HOST_WAITED, phase).total_s)
            names = ", ".join(dict.fromkeys(label(call.name) for call in waits))
            copies = " after a copy to the host" if len(waits) < len(calls) else ""
            cause = "an .item(), a .cpu() or a print of a tensor"
            if all(call.name.endswith("DeviceSynchronize") for call in waits):
                cause = "a torch.cuda.synchronize()"
            text = (
                f"The host waits for the device in {WHERE[phase]}, {self.count(count, 'time')} a "
                f"step ({names}{copies}): {self.ms(added(calls).total_s)} a step, after which the "
                f"GPU idles {self.ms(lost_s)} until the next launch. Is there {cause}?"
            )
            yield lost_s, text

    def pauses(self) -> Iterator[Finding]:
        """Times in which the host did nothing with CUDA, by phase, with the longest of them."""
        cause = IdleCause.HOST_PAUSE
        for phase in WHERE:
            paused_s = self.span.gain_s(idle(self.profile, cause, phase).total_s)
            if not _matters(paused_s, MIN_SHARE, self.step_s):
                continue
            gaps = (gap for gap in self.profile.gaps if (gap.cause, gap.phase) == (cause, phase))
            longest = ""
            if gap := next(gaps, None):
                place = f" in {path_text(gap.module)}" if gap.module else ""
                longest = (
                    f"; the longest time, {_ms(gap.duration_s)}, before {label(gap.after)}{place}"
                )
            text = (
                f"The GPU idles {self.ms(paused_s)} in {WHERE[phase]} while the host "
                f"pauses{longest}. The host made no CUDA call meanwhile: it slept, read data, "
                "compiled or computed on the CPU."
            )
            yield paused_s, text

    def unknown(self) -> Iterator[Finding]:
        """Kernels of unknown class, if they matter, with the longest by name."""
        kernels = [kernel for kernel in self.kernels if kernel.kind is KernelClass.OTHER]
        unknown_s = added(kernels).total_s
        if _matters(unknown_s, MIN_SHARE, self.kernel_s):
            longest, *others = kernels
            more = ""
            if others:
                more = f"; {len(others)} more such have {self.ms(added(others).total_s)}"
            text = (
                f"The {self.item} {label(longest.short_name)}, of a kind that no rule knows, takes "
                f"{self.of_work(longest.total_s)}: {self.ms(longest.total_s)} in "
                f"{self.count(longest.count, 'launch' if self.on_device else 'call')}{more}."
            )
            yield unknown_s, text

    def unattributed(self) -> Iterator[Finding]:
        """Kernels in a step and in no phase."""
        lost_s = kernel_s(self.profile, [LaunchPhase.UNATTRIBUTED])
        if _matters(lost_s, MIN_SHARE, self.kernel_s):
            text = (
                f"{self.of_work(lost_s)}, {self.ms(lost_s)}, was launched in no phase: put it "
                "inside a range, or say which ranges are the phases (--forward, --backward, "
                "--optimizer)."
            )
            yield lost_s, text

    def communication(self) -> Iterator[Finding]:
        """Time in which collectives run, what of it is exposed, and the rank for which the
        others wait.
        """
        ran_s = collectives_s(self.profile)
        lost_s = collectives_s(self.profile, exposed=True)
        if _matters(ran_s, MIN_SHARE, self.step_s):
            more = "."
            if lost_s >= MIN_SHARE * self.step_s:
                more = f"{self.advice(Remedy.OVERLAP)}.{self.last_rank(lost_s)}"
            text = (
                f"Communication takes {self.ms(ran_s)}, and for {self.ms(lost_s)} of that, "
                f"{self.of_step(lost_s)} of the step, the GPU computes nothing{more}"
            )
            yield lost_s, text

    def last_rank(self, lost_s: float) -> str:
        """The rank for which the others wait in nearly all steps, if that takes a large part of
        the exposed time.
        """
        waited_s = {
            times.rank: times.waited_s for times in self.profile.ranks if times.waited_s is not None
        }
        if len(waited_s) < 2:
            return ""
        sums_s = {rank: sum(times_s) for rank, times_s in waited_s.items()}
        # the others wait for the rank that waits least itself
        longest_s, last = max(sums_s.values()), min(sums_s, key=sums_s.__getitem__)
        steps = list(zip(*waited_s.values(), strict=True))
        count = sum(
            any(times_s) and min(times_s) == time_s
            for times_s, time_s in zip(steps, waited_s[last], strict=True)
        )
        if longest_s < max(MIN_LARGE_SHARE * lost_s, 1e-9) or count < MIN_STEADY_SHARE * len(steps):
            return ""
        return (
            f" The others wait for rank {last} in {count} of {len(steps)} steps, up to "
            f"{self.ms(longest_s)}: what slows it down?"
        )

    def full_precision(self) -> Iterator[Finding]:
        """Products in true fp32 on a device with tensor cores that take them in TF32 or in half
        precision.
        """
        kernels = [
            kernel
            for kernel in self.kernels
            if kernel.kind is KernelClass.MATMUL
            and _FULL_PRECISION.search(kernel.name)
            and "tf32" not in kernel.name
        ]
        full_s, faster = added(kernels).total_s, self.faster(kernels)
        whole_s = self.kernel_s
        if self.profile.copies:
            whole_s += self.copies_s
        if faster and full_s >= MIN_LARGE_SHARE * whole_s:
            flags = self.advice(*(OF_PRECISION[precision] for precision in faster))
            text = (
                f"Matrix products in true fp32 take {self.of_work(full_s)}, {self.ms(full_s)}, "
                f"and leave the tensor cores idle{flags}."
            )
            yield full_s, text

    def faster(self, kernels: list[KernelTimes]) -> tuple[Precision, ...]:
        """Precisions with tensor cores on the device, for a run with these fp32 products; empty
        if none is known.
        """
        if not self.on_device or not kernels:
            return ()
        subject = self.entry.subject
        if subject is not None and subject.precision is not Precision.FP32:
            return ()
        for device in filter(None, map(find_device, self.profile.device_names)):
            return faster_precisions(device)
        if any(_HAS_TF32.search(kernel.name) for kernel in kernels):
            return Precision.TF32, Precision.BF16
        return ()

    def optimizer(self) -> Iterator[Finding]:
        """A large optimizer."""
        phase = LaunchPhase.OPTIMIZER
        phases = [times for times in self.profile.phases if times.phase is phase]
        whole_s = self.entry.span(phase).whole_s if phases else 0.0
        if _matters(whole_s, MIN_OPTIMIZER_SHARE, self.step_s):
            classes = [times for times in self.profile.classes if times.phase is phase]
            fused = added(times for times in classes if times.kind is KernelClass.OPTIMIZER)
            is_fused = fused.total_s >= added(classes).total_s / 2
            flags = "" if is_fused else self.advice(Remedy.OPTIMIZER)
            text = (
                f"The optimizer takes {self.ms(whole_s)}, {self.of_step(whole_s)} of the step, in "
                f"{self.count(num_launches(*phases), self.item)}{flags}."
            )
            yield whole_s, text

    def moving(self) -> Iterator[Finding]:
        """Element-wise work and the like, which a compiler fuses."""
        computing = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)
        classes = [times for times in self.profile.classes if times.phase in computing]
        moving_s = added(times for times in classes if times.kind in _MOVING).total_s
        whole_s = added(classes).total_s
        if _matters(moving_s, MIN_LARGE_SHARE, whole_s):
            text = (
                f"In forward and backward, {percent_of(moving_s, whole_s)} of the {self.time}, "
                f"{self.ms(moving_s)}, goes to element-wise work, norms, sums and copies, which "
                f"move values more than they compute{self.advice(Remedy.COMPILE)}."
            )
            yield moving_s, text


def _ms(time_s: float) -> str:
    """The time in ms, to three digits."""
    return f"{significant(time_s * 1e3, 3)} ms"


def _us(time_s: float) -> str:
    """The time in µs, to three digits."""
    return f"{significant(time_s * 1e6, 3)} µs"
