"""Sentences about what limits a profiled step, and about what takes time in it that can be saved.

All numbers are per step. Where a run without a profiler timed the step, shares and gains are of
that time: a profiler makes launches slower, so that its step has more idle time. A finding is
reported only if it costs at least the share that its threshold below gives.
"""

import math
import re
import statistics
from collections.abc import Iterator, Sequence

from ....analysis.kernels.classes import KernelClass
from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import Awaited, Gap, HostCalls, IdleCause, KernelTimes
from ....analysis.remedies import OF_PRECISION, Remedy, remedies
from ....config import Precision
from ....costs.hardware import faster_precisions, find_device
from ...section import Finding
from ...words import label, percent_of
from ..plugged import added_findings
from .entry import Explained
from .figures import MIN_SHARE, WHERE, matters, ms, us
from .gains import (
    allocations_gain_s,
    between_gain_s,
    calls_gain_s,
    copies_gain_s,
    data_gain_s,
    gain_s,
    is_full_precision,
    waits_gain_s,
)
from .kinds import step_kinds, wall_by_step_s
from .limits import MIN_LATE_SHARE, Verdict
from .recorded import activity_finding
from .sums import added, collectives_s, idle, kernel_s, num_launches, path_text

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
    IdleCause.DATA: "waiting for data",
    IdleCause.ALLOCATION: "allocations of memory",
    IdleCause.LATE_LAUNCH: "waiting for launches",
    IdleCause.HOST_WAITED: "waits of the host for the device",
    IdleCause.BETWEEN_KERNELS: "idle time between kernels",
}
"""What the step would be without, for causes of idle time of which the file shows what goes with
them.
"""
_WAITS_FOR = {
    Awaited.TO_HOST: "an .item(), a .cpu() or a print of a tensor",
    Awaited.TO_DEVICE: "a .to(device) of memory that is not pinned",
}
"""What makes a program of PyTorch wait for copies in each direction."""
_HAS_TF32 = re.compile(r"ampere|hopper|blackwell|(sm|cutlass_?|cutlass_sm)(8|9|1\d)\d")
"""Part of the names of kernels that need at least an Ampere GPU, whose tensor cores have TF32
and bf16.
"""
ANSWER = 3
"""Number of sentences that answer where the time goes, before all tables."""


def findings(entry: Explained) -> tuple[Finding, ...]:
    """Sentences in order: what limits the step, what idle time costs it at most, then the rest, the
    largest cost first.

    Where the configuration of the run is known, the advice leaves out what the run does already.
    """
    finder = _Findings(entry)
    problems = [
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
    problems.sort(key=lambda problem: -problem.cost)
    of_step = [*finder.limit(), *finder.uneven(), *finder.kinds()]
    if not entry.profile.doubts:  # else events may lie in what seems to be idle time
        of_step += [*finder.gaps(), *finder.bounds()]
    of_others = [Finding(code="plug-in", text=text) for text in added_findings(entry)]
    return (*of_step, *problems, *activity_finding(finder), *of_others)


def answer(entry: Explained) -> tuple[Finding, ...]:
    """The first ANSWER sentences."""
    return findings(entry)[:ANSWER]


class _Findings(Verdict):
    """Makes the findings of one profile."""

    def uneven(self) -> Iterator[Finding]:
        """A step so long that the mean is like none of the steps, as a first one that loads code
        is. The clock of a run without a profiler did not time it.
        """
        walls_s = wall_by_step_s(self.profile)
        longest_s = max(walls_s)
        step = walls_s.index(longest_s)
        others_s = [*walls_s[:step], *walls_s[step + 1 :]]
        if self.span.by_clock or not others_s:
            return
        usual_s = statistics.median(others_s)
        if longest_s >= TIMES_MEDIAN * usual_s:
            text = (
                f"No step is like the mean: step {step} takes {ms(longest_s)}, and the median of "
                f"the others is {ms(usual_s)}."
            )
            numbers = {"step": float(step), "longest": longest_s, "usual": usual_s}
            yield Finding(code="uneven", text=text, numbers=numbers)

    def kinds(self) -> Iterator[Finding]:
        """How many steps of which kind there are, and how long they take; how many passes make a
        step of the optimizer.
        """
        walls_s = wall_by_step_s(self.profile)
        parts: list[str] = []
        numbers: dict[str, float] = {}
        for kind in step_kinds(self.profile):
            steps = len(kind.steps)
            mean_s = sum(kind.of(walls_s)) / len(kind.steps)
            parts.append(f"{steps} {kind.name} of {ms(mean_s)}")
            numbers |= {f"{kind.name} steps": steps, f"{kind.name} mean": mean_s}
        if parts:
            text = f"The steps by their ranges: {', '.join(parts)}."
            yield Finding(code="kinds", text=text, numbers=numbers)
        passes = self.profile.passes_per_step or 1
        if passes > 1:
            text = f"Each step of the optimizer takes {passes} passes of backward."
            yield Finding(code="passes", text=text, numbers={"passes": passes})

    def copies(self) -> Iterator[Finding]:
        """Copies that do not limit the step, and cost time in which no kernel runs, if it is sure
        that none runs.
        """
        if (
            self.profile.copies
            and not self.profile.doubts
            and MIN_SHARE * self.step_s <= self.copies_s < MIN_LATE_SHARE * self.step_s
        ):
            text = self.copying(f"the {self.whole}")
            text = f"{text[0].upper()}{text[1:]}"
            numbers = {"copies_s": self.copies_s, "gain_s": copies_gain_s(self.entry)}
            yield self.finding("copies", text, self.copies_s, **numbers)

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

    def gaps(self) -> Iterator[Finding]:
        """The idle times that stand out: where they are, and what the host did."""
        alike = {(times.phase, times.cause): times for times in self.profile.idle}
        for gap in self.standing_out()[:MAX_GAPS]:
            times = alike[gap.phase, gap.cause]
            before, after = label(gap.before) or "the start", label(gap.after) or "the end"
            text = (
                f"One idle time of {ms(gap.duration_s)} stands out among {times.count:,} of "
                f"{us(times.median_s or 0)} (median): in step {gap.step}, {self.where(gap.phase)}, "
                f"between {before} and {after}; {doing(gap)}."
            )
            numbers = {"idle": gap.duration_s, "step": float(gap.step)}
            yield Finding(code=f"gap {gap.cause}", text=text, numbers=numbers)

    def bounds(self) -> Iterator[Finding]:
        """How much shorter the step could be at most without what makes the device idle."""
        gains_s = {
            IdleCause.DATA: data_gain_s(self.entry),
            IdleCause.ALLOCATION: allocations_gain_s(self.entry),
            IdleCause.LATE_LAUNCH: gain_s(self.entry, Remedy.GRAPHS),
            IdleCause.HOST_WAITED: waits_gain_s(self.entry),
            IdleCause.BETWEEN_KERNELS: between_gain_s(self.entry),
        }
        lost_s = {cause: self.span.gain_s(idle(self.profile, cause).total_s) for cause in _BOUNDS}
        told, bounds = {}, []
        for cause in sorted(lost_s, key=lambda cause: -lost_s[cause]):
            if matters(lost_s[cause], MIN_SHARE, self.step_s):
                told[f"{cause} gain_s"] = gains_s[cause]
                flags = ""
                if cause is IdleCause.LATE_LAUNCH and self.has_many_short(cause):
                    named = remedies(self.config, Remedy.GRAPHS, in_use=self.in_use)
                    flags = f" ({named})" if named else ""
                bounds.append(f"{self.ms(gains_s[cause])} less without {_BOUNDS[cause]}{flags}")
        if not bounds:
            return
        text = f"The {self.whole} would take at most {', '.join(bounds)}"
        if sum(told.values()) > self.span.idle_s:
            text += f", and in all at most {self.ms(self.span.idle_s)} less"
        yield self.finding("bounds", f"{text}.", **told)

    def waits(self) -> Iterator[Finding]:
        """Synchronisations within a phase that has kernels. None is needed, so each is reported."""
        launched = {times.phase for times in self.profile.phases if any(times.launches)}
        for phase in _WAITING:
            if phase not in launched:
                continue
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
            question = _asked(waits)
            times = self.count(count, "time")
            gain = calls_gain_s(self.entry, calls)
            idles = ""
            if lost_s:
                idles = f", after which the GPU idles {self.ms(lost_s)} until the next launch"
            text = (
                f"The host waits for the device in {self.where(phase)}, {times} a {self.whole} "
                f"({names}{copies}): {self.ms(added(calls).total_s)} a {self.whole}{idles}."
                f"{question}"
            )
            if not self.profile.doubts:
                text += f" Without it the {self.whole} takes at most {self.ms(gain)} less."
            numbers = {
                "idle_s": lost_s,
                "wait_count": count,
                "wait_s": added(calls).total_s,
                "gain_s": gain,
            }
            yield self.finding(f"waits in {phase}", text, lost_s, **numbers)

    def pauses(self) -> Iterator[Finding]:
        """Times in which the host did nothing with CUDA, by phase, with the longest of them."""
        cause = IdleCause.HOST_PAUSE
        for phase in WHERE:
            paused_s = self.span.gain_s(idle(self.profile, cause, phase).total_s)
            if not matters(paused_s, MIN_SHARE, self.step_s):
                continue
            gaps = (gap for gap in self.profile.gaps if (gap.cause, gap.phase) == (cause, phase))
            longest = ""
            if gap := next(gaps, None):
                place = f" in {path_text(gap.module)}" if gap.module else ""
                longest = (
                    f"; the longest time, {ms(gap.duration_s)}, before {label(gap.after)}{place}: "
                    f"{doing(gap)}"
                )
            where = self.where(phase)
            text = (
                f"The GPU idles {self.ms(paused_s)} before kernels of {where} while the host "
                f"makes no call to the device{longest}."
            )
            yield self.finding(f"pauses in {phase}", text, paused_s, idle_s=paused_s)

    def unknown(self) -> Iterator[Finding]:
        """Kernels of unknown class, if they matter, with the longest by name."""
        kernels = [kernel for kernel in self.kernels if kernel.kind is KernelClass.OTHER]
        unknown_s = added(kernels).total_s
        if matters(unknown_s, MIN_SHARE, self.kernel_s):
            longest, *others = kernels
            called = self.count(longest.count, "launch" if self.on_device else "call")
            more = ""
            if others:
                more = f"; {len(others)} more such have {self.ms(added(others).total_s)}"
            text = (
                f"The {self.item} {label(longest.short_name)}, of a kind that no rule knows, takes "
                f"{self.of_work(longest.total_s)}: {self.ms(longest.total_s)} in {called}{more}."
            )
            yield self.finding("unknown kernels", text, unknown_s, kernel_s=unknown_s)

    def unattributed(self) -> Iterator[Finding]:
        """Kernels in a step that were launched in no phase; without calls nothing was seen to be
        launched.
        """
        if self.on_device and not self.profile.host_calls:
            return
        lost_s = kernel_s(self.profile, [LaunchPhase.UNATTRIBUTED])
        if matters(lost_s, MIN_SHARE, self.kernel_s):
            text = (
                f"{self.of_work(lost_s)}, {self.ms(lost_s)}, was launched in no phase: put it "
                "inside a range, or say which ranges are the phases (--forward, --backward, "
                "--optimizer)."
            )
            yield self.finding("no phase", text, lost_s, kernel_s=lost_s)

    def communication(self) -> Iterator[Finding]:
        """Time in which collectives run, what of it is exposed, and the rank for which the
        others wait.
        """
        ran_s = collectives_s(self.profile)
        lost_s = collectives_s(self.profile, exposed=True)
        if matters(ran_s, MIN_SHARE, self.step_s):
            more = "."
            if lost_s >= MIN_SHARE * self.step_s:
                more = f"{self.advice(Remedy.OVERLAP)}.{self.last_rank(lost_s)}"
            what = "Communication"
            if all(times.waited_s is None for times in self.profile.ranks):
                what = "Communication, with waiting for other ranks,"
            text = (
                f"{what} takes {self.ms(ran_s)}, and for {self.ms(lost_s)} of that, "
                f"{self.of_step(lost_s)} of the {self.whole}, the GPU computes nothing{more}"
            )
            numbers = {"total_s": ran_s, "exposed_s": lost_s}
            yield self.finding("communication", text, lost_s, **numbers)

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
        longest_s = max(sums_s.values())
        # the others wait for the rank that waits least itself
        last = min(sums_s, key=sums_s.__getitem__)
        num_steps = len(waited_s[last])
        count = 0
        for last_s, *step_s in zip(waited_s[last], *waited_s.values(), strict=True):
            if any(step_s) and last_s == min(step_s):
                count += 1
        is_long = longest_s >= max(MIN_LARGE_SHARE * lost_s, 1e-9)
        is_steady = count >= MIN_STEADY_SHARE * num_steps
        if not is_long or not is_steady:
            return ""
        return (
            f" The others wait for rank {last} in {count} of {num_steps} steps, up to "
            f"{self.ms(longest_s)}: what slows it down?"
        )

    def full_precision(self) -> Iterator[Finding]:
        """Products in true fp32 on a device with tensor cores that take them in TF32 or in half
        precision.
        """
        kernels = [kernel for kernel in self.kernels if is_full_precision(kernel)]
        full_s = added(kernels).total_s
        faster = self.faster(kernels)
        whole_s = self.kernel_s
        if self.profile.copies:
            whole_s += self.copies_s
        if faster and full_s >= MIN_LARGE_SHARE * whole_s:
            flags = self.advice(*(OF_PRECISION[precision] for precision in faster))
            text = (
                f"Matrix multiplications in true fp32 take {self.of_work(full_s)}, "
                f"{self.ms(full_s)}, and leave the tensor cores idle{flags}."
            )
            gain = gain_s(self.entry, OF_PRECISION[faster[0]])
            yield self.finding("full precision", text, full_s, kernel_s=full_s, gain_s=gain)

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
        if matters(whole_s, MIN_OPTIMIZER_SHARE, self.step_s):
            classes = [times for times in self.profile.classes if times.phase is phase]
            fused = added(times for times in classes if times.kind is KernelClass.OPTIMIZER)
            is_fused = fused.total_s >= added(classes).total_s / 2
            flags = "" if is_fused else self.advice(Remedy.OPTIMIZER)
            text = (
                f"The optimizer takes {self.ms(whole_s)}, {self.of_step(whole_s)} of the "
                f"{self.whole}, in {self.count(num_launches(*phases), self.item)}{flags}."
            )
            gain = gain_s(self.entry, Remedy.OPTIMIZER)
            yield self.finding("optimizer", text, whole_s, wall_s=whole_s, gain_s=gain)

    def moving(self) -> Iterator[Finding]:
        """Element-wise work and the like, which a compiler fuses."""
        computing = (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)
        classes = [times for times in self.profile.classes if times.phase in computing]
        moving_s = added(times for times in classes if times.kind in _MOVING).total_s
        whole_s = added(classes).total_s
        if not self.profile.lacks_device and matters(moving_s, MIN_LARGE_SHARE, whole_s):
            where = " and ".join(dict.fromkeys(str(times.phase) for times in classes))
            text = (
                f"In {where}, {percent_of(moving_s, whole_s)} of the {self.time}, "
                f"{self.ms(moving_s)}, goes to element-wise work, norms, sums and copies, which "
                f"move values more than they compute{self.advice(Remedy.COMPILE)}."
            )
            gain = gain_s(self.entry, Remedy.COMPILE)
            yield self.finding("moving", text, moving_s, kernel_s=moving_s, gain_s=gain)


def _asked(waits: Sequence[HostCalls]) -> str:
    """What the program may do that makes these calls, as a question after a space; empty where
    nothing in the file shows it.
    """
    if all(call.name.endswith("DeviceSynchronize") for call in waits):
        return " Is there a torch.cuda.synchronize()?"
    awaited = {call.awaited for call in waits}
    causes = [cause for copy, cause in _WAITS_FOR.items() if copy in awaited]
    return f" Is there {' or '.join(causes)}?" if causes else ""


def doing(gap: Gap) -> str:
    """What the host did during most of an idle time, as far as the file shows it."""
    if gap.cause is IdleCause.BETWEEN_KERNELS:
        return (
            "the next kernel had been launched, so the host is not at fault (another program on "
            "the GPU, a migrated page, or lost events may be)"
        )
    inside = f", in {label(gap.host_range)}" if gap.host_range else ""
    # a pause is what passes outside of calls of CUDA
    call = gap.library_call
    if gap.host_call and gap.cause is not IdleCause.HOST_PAUSE:
        call = gap.host_call
    if call:
        return f"the host was in {label(call)}{inside}"
    if inside:
        return f"the host was{inside.replace(',', '', 1)}"
    return "what the host did is not in the file"
