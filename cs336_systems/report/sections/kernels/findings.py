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
from ....analysis.warnings import OF_PRECISION, Remedy, against_launches, remedies
from ....config import Precision
from ....costs.hardware import faster_precisions, find_device
from ....record import WarningCode
from ...words import label, percent_of, significant
from .tables import (
    Explained,
    added,
    collectives_s,
    copies_alone_s,
    idle,
    kernel_s,
    num_launches,
    path_text,
    terms,
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


Finding: TypeAlias = tuple[float, str]
"""The time over all steps that a problem costs, and a sentence."""


def findings(entry: Explained) -> tuple[str, ...]:
    """Sentences in order: what limits the step, what idle time costs it at most, then the rest, the
    largest cost first.

    Where the configuration of the run is known, the advice leaves out what the run does already.
    """
    own = _Findings(entry)
    long = [
        *own.late_phases(),
        *own.waits(),
        *own.pauses(),
        *own.unknown(),
        *own.unattributed(),
        *own.communication(),
        *own.copies(),
        *own.full_precision(),
        *own.optimizer(),
        *own.moving(),
    ]
    by_cost = sorted(long, key=lambda finding: -finding[0])
    return (*own.limit(), *own.gaps(), *own.bounds(), *(text for _, text in by_cost))


ANSWER = 3
"""Number of sentences that answer where the time goes, before all tables."""


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
    span, rows = (
        entry.span(phase),
        [row for row in entry.profile.idle if phase in (None, row.phase)],
    )
    late = added(row for row in rows if row.cause is IdleCause.LATE_LAUNCH).total_s
    others = added(row for row in rows if row.cause is not IdleCause.LATE_LAUNCH).total_s
    return min(late, max(span.idle_s - others, 0.0)) if span.by_clock else late


def _was_launch_bound(entry: Explained) -> bool:
    """Whether the record of the run without a profiler says that its launches were the limit."""
    return entry.plain is not None and WarningCode.LAUNCH_BOUND in {
        warning.code for warning in entry.plain.warnings
    }


def _doubts(entry: Explained, limit: Limit) -> list[str]:
    """Why it is not sure that this limits the step."""
    differs = _was_launch_bound(entry) and limit is not Limit.LAUNCHES
    of_clock = (
        "by its own clock the run without a profiler was limited by its launches (launch-bound)"
    )
    return [*entry.profile.doubts, *([of_clock] if differs else [])]


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
        self.kernels = [row for row in profile.kernels if row.phase is None]
        self.copies_s = copies_alone_s(profile) if self.on_device else 0.0
        if self.copies_s and self.copies_s >= MIN_SHARE * self.step_s:
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
        plural = "" if per_step == 1 else "es" if noun.endswith("ch") else "s"
        return f"{significant(per_step, 3) if per_step % 1 else f'{per_step:,.0f}'} {noun}{plural}"

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
            for row in self.kernels[:1]:
                yield (
                    f"The operator {label(row.short_name)} ({row.kind}) takes "
                    f"{self.of_work(row.total_s)}, {self.ms(row.total_s)} in "
                    f"{self.count(row.count, 'call')}."
                )
        if (limit := _limit(self.entry)) is not None:
            verdict = self.verdict(limit)
            if doubts := _doubts(self.entry, limit):
                verdict = (
                    f"In doubt is what limits the step: {'; '.join(doubts)}. By the file's "
                    f"times: {verdict}"
                )
            yield verdict

    def verdict(self, limit: Limit) -> str:
        """What limits the step on a GPU, with the profiler's own times beside those of the
        clock.
        """
        late = idle(self.profile, IdleCause.LATE_LAUNCH).total_s
        told = f"{percent_of(self.span.busy_share)} of the step's {self.ms(self.step_s)}"
        at_most = ""
        if self.span.by_clock:
            profiled_s, at_most = self.span.profiled_s, "at most "
            told += (
                f" ({percent_of(self.span.busy_s, profiled_s)} of {self.ms(profiled_s)} under "
                "the profiler)"
            )
        if late >= MIN_SHARE * self.step_s:
            late_share = self.of_step(self.span.gain_s(late))
            told += f", and idle {at_most}{late_share} because the next kernel was not launched yet"
        told += "."
        if limit is Limit.LAUNCHES:
            slower = (
                ""
                if self.span.by_clock
                else " A profiler makes each launch slower: without one it is less."
            )
            return (
                f"The CPU is the limit: the GPU is busy {told}{self.launch_cost()}{slower} A "
                f"faster GPU does not help; use {against_launches(self.config)}."
            )
        if limit is Limit.COPIES:
            return (
                f"Copies limit the step: for {self.ms(self.copies_s)} of {self.ms(self.step_s)} "
                f"the GPU copies and runs no kernel{self.copy_advice()}."
            )
        if limit is Limit.IDLE:
            return f"The GPU is busy only {told}"
        if limit is Limit.COMMUNICATION:
            return (
                "Communication is a limit: the GPU computes less than it seems to. It is busy "
                f"{told}"
            )
        host_s = sum(self.profile.step_s)
        if not self.span.by_clock and host_s < MIN_BUSY_SHARE * self.step_s:
            return (
                "The GPU is the limit, and the host runs ahead of it: it is busy "
                f"{self.of_step(self.span.busy_s)} of the {self.ms(self.step_s)} from step to "
                f"step, while the host's step lasts {self.ms(host_s)}."
            )
        return f"The GPU is the limit: it is busy {told}"

    def copy_advice(self) -> str:
        """What most of the copies are, and what helps against them."""
        for row in self.profile.copies[:1]:
            helps = {
                "host to device, pageable": (
                    "pin it (pin_memory=True) and copy with non_blocking=True"
                ),
                "device to host, pageable": "copy less often, or into pinned memory",
                "host to device": "copy on a stream of its own while the step before computes",
                "device to host": "copy less often",
            }
            found = next(
                (text for kind, text in helps.items() if row.kind and row.kind.startswith(kind)), ""
            )
            return f", {self.ms(row.total_s)} {row.kind}" + (f": {found}" if found else "")
        return ""

    def copies(self) -> Iterator[Finding]:
        """Copies that do not limit the step, and cost time in which no kernel runs."""
        if (
            self.profile.copies
            and MIN_SHARE * self.step_s <= self.copies_s < MIN_LATE_SHARE * self.step_s
        ):
            text = (
                f"For {self.ms(self.copies_s)} of the step the GPU copies and runs no "
                f"kernel{self.copy_advice()}."
            )
            yield self.copies_s, text

    def longest(self) -> Iterator[str]:
        """The kernel and the phases that take longest, where little else is to be said."""
        for row in self.kernels[:1] if self.on_device else ():
            yield (
                f"The {self.item} that takes longest is {label(row.short_name)} ({row.kind}), "
                f"{self.of_work(row.total_s)} in {self.count(row.count, 'launch')}."
            )
        shares = {
            phase.phase: sum(phase.kernel_s) for phase in self.profile.phases if sum(phase.kernel_s)
        }
        if len(shares) > 1:
            parts = [
                f"{WHERE[phase]} {percent_of(time_s, self.kernel_s)}"
                for phase, time_s in shares.items()
            ]
            yield f"Of the {self.time}, {', '.join(parts)}."

    def standing_out(self) -> list[Gap]:
        """Idle times that are much longer than others of their phase and cause, and a part of a
        step.
        """
        medians = {(row.phase, row.cause): row.median_s for row in self.profile.idle}
        least_s = MIN_GAP_SHARE * self.span.profiled_s / self.profile.num_steps
        return [
            gap
            for gap in self.profile.gaps
            if gap.duration_s
            >= max(least_s, TIMES_MEDIAN * (medians.get((gap.phase, gap.cause)) or math.inf))
        ]

    def gaps(self) -> Iterator[str]:
        """The idle times that stand out: where they are, and what the host did."""
        for gap in self.standing_out()[:MAX_GAPS]:
            row = next(
                row for row in self.profile.idle if (row.phase, row.cause) == (gap.phase, gap.cause)
            )
            doing = (
                f"the host was in {label(gap.host_call)}"
                if gap.host_call
                else "the host made no call"
            )
            if gap.cause is IdleCause.BETWEEN_KERNELS:
                doing = (
                    "the next kernel had been launched, so the host is not at fault (another "
                    "program on the GPU, a migrated page, or lost events may be)"
                )
            yield (
                f"One idle time of {_ms(gap.duration_s)} stands out among {row.count:,} of "
                f"{_us(row.median_s or 0)} (median): in step {gap.step}, {WHERE[gap.phase]}, "
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
        host_s = sum(sum(phase.host_s) for phase in self.profile.phases)
        kernel_s = self.kernel_s / max(num_launches(*self.profile.phases), 1)
        who = "Under the profiler the CPU" if self.span.by_clock else "The CPU"
        return (
            f" {who} takes {_us(host_s / calls.count)} per launch, "
            f"{_us(calls.total_s / calls.count)} of it in CUDA's own call; a kernel runs "
            f"{_us(kernel_s)} on average."
        )

    def bounds(self) -> Iterator[str]:
        """How much shorter the step could be at most without the idle time of each cause."""
        apart = self.standing_out()
        lost_s = {
            cause: idle(self.profile, cause).total_s
            - sum(gap.duration_s for gap in apart if gap.cause is cause)
            for cause in _BOUNDS
        }
        told, gains_s = [], {cause: self.span.gain_s(time_s) for cause, time_s in lost_s.items()}
        for cause in sorted(lost_s, key=lambda cause: -lost_s[cause]):
            if gains_s[cause] >= MIN_SHARE * self.step_s > 0:
                without_what, remedy = _BOUNDS[cause]
                flags = self.advice(remedy) if remedy else ""
                told.append(f"{self.ms(gains_s[cause])} less without {without_what}{flags}")
        if told:
            is_more = self.span.by_clock and sum(gains_s.values()) > self.span.idle_s
            in_all = (
                f", and in all at most {self.ms(self.span.idle_s)} less"
                if len(told) > 1 and is_more
                else ""
            )
            yield f"The step would take at most {', '.join(told)}{in_all}."

    def late_phases(self) -> Iterator[Finding]:
        """Phases that the host limits, in a step that it does not limit."""
        for phase in self.profile.phases if _limit(self.entry) is not Limit.LAUNCHES else ():
            lost_s, whole_s = late_s(self.entry, phase.phase), self.entry.span(phase.phase).whole_s
            # every step starts idle, because nothing is launched yet; so it must also matter for
            # the whole step
            if lost_s >= MIN_LATE_SHARE * whole_s > 0 and lost_s >= MIN_SHARE * self.step_s:
                text = (
                    f"In {WHERE[phase.phase]} the CPU is the limit: of {self.ms(whole_s)} the GPU "
                    f"is idle {percent_of(lost_s, whole_s)}, because the next of its "
                    f"{self.count(num_launches(phase), 'kernel')} was not launched yet."
                )
                yield lost_s, text

    def waits(self) -> Iterator[Finding]:
        """Synchronisations within a phase that has kernels. None is needed, so each is reported."""
        launched = {phase.phase for phase in self.profile.phases if any(phase.launches)}
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
            is_for_all = all(call.name.endswith("DeviceSynchronize") for call in waits)
            cause = "an .item(), a .cpu() or a print of a tensor"
            if is_for_all:
                cause = "a torch.cuda.synchronize()"
            text = (
                f"The host waits for the device in {WHERE[phase]}, {self.count(count, 'time')} a "
                f"step ({names}{copies}): {self.ms(added(calls).total_s)} a step, after which the "
                f"GPU idles {self.ms(lost_s)} until the next launch. Is there {cause}?"
            )
            yield lost_s, text

    def pauses(self) -> Iterator[Finding]:
        """Times in which the host did nothing with CUDA, by phase, with the longest of them."""
        for phase in WHERE:
            paused_s = self.span.gain_s(idle(self.profile, IdleCause.HOST_PAUSE, phase).total_s)
            if not paused_s or paused_s < MIN_SHARE * self.step_s:
                continue
            gaps = [
                gap
                for gap in self.profile.gaps
                if gap.cause is IdleCause.HOST_PAUSE and gap.phase is phase
            ]
            longest = ""
            for gap in gaps[:1]:
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
        rows = [row for row in self.kernels if row.kind is KernelClass.OTHER]
        total_s = added(rows).total_s
        if total_s and total_s >= MIN_SHARE * self.kernel_s:
            longest, *others = rows
            more = (
                f"; {len(others)} more such have {self.ms(added(others).total_s)}" if others else ""
            )
            text = (
                f"The {self.item} {label(longest.short_name)}, of a kind that no rule knows, takes "
                f"{self.of_work(longest.total_s)}: {self.ms(longest.total_s)} in "
                f"{self.count(longest.count, 'launch' if self.on_device else 'call')}{more}."
            )
            yield total_s, text

    def unattributed(self) -> Iterator[Finding]:
        """Kernels in a step and in no phase."""
        lost_s = kernel_s(self.profile, [LaunchPhase.UNATTRIBUTED])
        if lost_s and lost_s >= MIN_SHARE * self.kernel_s:
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
        ran_s, lost_s = (collectives_s(self.profile, exposed=exposed) for exposed in (False, True))
        if ran_s and ran_s >= MIN_SHARE * self.step_s:
            is_large = lost_s >= MIN_SHARE * self.step_s
            more = f"{self.advice(Remedy.OVERLAP)}.{self.last_rank(lost_s)}" if is_large else "."
            text = (
                f"Communication takes {self.ms(ran_s)}, and for {self.ms(lost_s)} of that, "
                f"{self.of_step(lost_s)} of the step, the GPU computes nothing{more}"
            )
            yield lost_s, text

    def last_rank(self, lost_s: float) -> str:
        """The rank for which the others wait in nearly all steps, if that takes a large part of
        the exposed time.
        """
        waited = {own.rank: own.waited_s for own in self.profile.ranks if own.waited_s is not None}
        if len(waited) < 2:
            return ""
        longest_s, last = (
            max(map(sum, waited.values())),
            min(waited, key=lambda rank: sum(waited[rank])),
        )
        steps = list(zip(*waited.values(), strict=True))
        count = sum(
            min(times) == own for times, own in zip(steps, waited[last], strict=True) if any(times)
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
        matmuls = (row for row in self.kernels if row.kind is KernelClass.MATMUL)
        rows = [
            row for row in matmuls if _FULL_PRECISION.search(row.name) and "tf32" not in row.name
        ]
        full_s, faster = added(rows).total_s, self.faster(rows)
        if faster and full_s >= MIN_LARGE_SHARE * (
            self.kernel_s + (self.copies_s if self.profile.copies else 0)
        ):
            text = (
                f"Matrix products in true fp32 take {self.of_work(full_s)}, {self.ms(full_s)}, "
                "and leave the tensor cores "
                f"idle{self.advice(*(OF_PRECISION[precision] for precision in faster))}."
            )
            yield full_s, text

    def faster(self, rows: list[KernelTimes]) -> tuple[Precision, ...]:
        """Precisions with tensor cores on the device, for a run with these fp32 products; empty
        if none is known.
        """
        subject = self.entry.subject
        if (
            not self.on_device
            or not rows
            or (subject is not None and subject.precision is not Precision.FP32)
        ):
            return ()
        if device := next(filter(None, map(find_device, self.profile.device_names)), None):
            return faster_precisions(device)
        return (
            (Precision.TF32, Precision.BF16)
            if any(_HAS_TF32.search(row.name) for row in rows)
            else ()
        )

    def optimizer(self) -> Iterator[Finding]:
        """A large optimizer."""
        phases = [phase for phase in self.profile.phases if phase.phase is LaunchPhase.OPTIMIZER]
        whole_s = self.entry.span(LaunchPhase.OPTIMIZER).whole_s if phases else 0.0
        if whole_s and whole_s >= MIN_OPTIMIZER_SHARE * self.step_s:
            own = [row for row in self.profile.classes if row.phase is LaunchPhase.OPTIMIZER]
            fused_s = added(row for row in own if row.kind is KernelClass.OPTIMIZER).total_s
            flags = self.advice(Remedy.OPTIMIZER) if fused_s < added(own).total_s / 2 else ""
            text = (
                f"The optimizer takes {self.ms(whole_s)}, {self.of_step(whole_s)} of the step, in "
                f"{self.count(num_launches(*phases), self.item)}{flags}."
            )
            yield whole_s, text

    def moving(self) -> Iterator[Finding]:
        """Element-wise work and the like, which a compiler fuses."""
        rows = [
            row
            for row in self.profile.classes
            if row.phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)
        ]
        moving_s, whole_s = (
            added(row for row in rows if row.kind in _MOVING).total_s,
            added(rows).total_s,
        )
        if moving_s and moving_s >= MIN_LARGE_SHARE * whole_s:
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
