"""Sentences about what limits a profiled step, and about what takes time in it that can be saved.

All numbers are per step. A finding is reported only if it costs at least the share that its threshold below gives.
"""

import math
import re
from collections.abc import Iterator
from typing import TypeAlias

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import Gap, IdleCause, KernelTimes, StepProfile, Work
from cs336_systems.analysis.warnings import OF_PRECISION, Remedy, against_launches, remedies
from cs336_systems.config import Precision, RunConfig
from cs336_systems.costs.hardware import faster_precisions, find_device
from cs336_systems.report.sections.kernels.tables import (
    added,
    collectives_s,
    copies_alone_s,
    idle,
    kernel_s,
    num_launches,
    path_text,
    terms,
    wall_s,
)
from cs336_systems.report.words import label, percent_of, significant

MIN_LATE_SHARE = 0.2
"""Share of the wall time that the GPU is idle because the next kernel was launched late. A step that the GPU limits has
a percent or two, at its start; one that the CPU limits half and more."""
MIN_BUSY_SHARE = 0.8
"""Smallest share of the wall time that the GPU must be busy to be called the limit of the step."""
MIN_SHARE = 0.01
"""Smallest reported share of a step: of idle times in the wall time (a hiccup of a millisecond in ten steps stays
below), of kernels in no phase or of unknown class in the kernels' time, of communication and its exposed part."""
MIN_LARGE_SHARE = 0.25
"""Smallest reported share of what every step has some of: of kernels that move values in forward and backward, of fp32
products, for which tensor cores need a tenth of the time, and of waits for other ranks in the exposed time."""
MIN_STEADY_SHARE = 0.9
"""Smallest share of the steps in which the same rank must come last to be named."""
MIN_GAP_SHARE, TIMES_MEDIAN, MAX_GAPS = 0.05, 10, 2
"""An idle time stands out from this share of a step and this many times the median of its phase and cause; the two
longest are told."""
MIN_OPTIMIZER_SHARE = 0.1
"""Smallest reported share of the wall time. A fused AdamW moves 28 bytes a parameter, a few percent of a step."""

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
_WAITING = (LaunchPhase.FORWARD, LaunchPhase.LOSS, LaunchPhase.BACKWARD, LaunchPhase.COMMUNICATION,
            LaunchPhase.OPTIMIZER)  # fmt: skip
"""Phases in which the host has no reason to wait; a timed step synchronises only before and after them."""
_MOVING = (KernelClass.ELEMENT_WISE, KernelClass.COPY_AND_FILL, KernelClass.NORMALISATION, KernelClass.REDUCTION)
_BOUNDS = {
    IdleCause.LATE_LAUNCH: ("waiting for launches", Remedy.GRAPHS),
    IdleCause.HOST_WAITED: ("waits of the host for the device", None),
    IdleCause.HOST_PAUSE: ("pauses of the host", None),
    IdleCause.BETWEEN_KERNELS: ("idle time between kernels", Remedy.COMPILE),
    IdleCause.END_OF_STEP: ("idle time after the last kernel", None),
}
"""What the step would be without, for each cause of idle time, and the remedy against it."""
_FULL_PRECISION = re.compile(r"sgemm|f32f32_f32f32_f32")
"""Part of the names of fp32 products of cuBLAS and CUTLASS: ampere_sgemm_, simt_sgemm, xmma_gemm_f32f32_f32f32_f32_."""
_HAS_TF32 = re.compile(r"ampere|hopper|blackwell|(sm|cutlass_?|cutlass_sm)(8|9|1\d)\d")
"""Part of the names of kernels that need at least an Ampere GPU, whose tensor cores have TF32 and bf16."""


Finding: TypeAlias = tuple[float, str]
"""The time over all steps that a problem costs, and a sentence."""


def findings(profile: StepProfile, config: RunConfig | None = None) -> tuple[str, ...]:
    """Sentences in order: what limits the step, what idle time costs it at most, then the rest, the largest cost first.

    With the `config` of the run, the advice leaves out what the run does already.
    """
    own = _Findings(profile, config)
    long = [*own.late_phases(), *own.waits(), *own.pauses(), *own.unknown(), *own.unattributed(), *own.communication(),
            *own.copies(), *own.full_precision(), *own.optimizer(), *own.moving()]  # fmt: skip
    by_cost = sorted(long, key=lambda finding: -finding[0])
    return (*own.limit(), *own.gaps(), *own.bounds(), *(text for _, text in by_cost))


ANSWER = 3
"""Number of sentences that answer where the time goes, before all tables."""


def answer(profile: StepProfile, config: RunConfig | None = None) -> tuple[str, ...]:
    """The first ANSWER sentences; where there are fewer findings, which kernel and which phase take longest."""
    own, found = _Findings(profile, config), findings(profile, config)
    return (*found, *own.longest())[:ANSWER]


def is_launch_bound(profile: StepProfile) -> bool:
    """Whether the device often has nothing to run because the host launches too slowly."""
    return idle(profile, IdleCause.LATE_LAUNCH).total_s >= MIN_LATE_SHARE * wall_s(profile) > 0


class _Findings:
    """Makes the findings of one profile. Times are sums over all steps; sentences give them per step."""

    def __init__(self, profile: StepProfile, config: RunConfig | None) -> None:
        """The `config` is that of the run, if it is known."""
        self.profile, self.config = profile, config
        self.item, self.time = terms(profile)
        self.on_device = profile.work is Work.KERNELS
        self.wall_s, self.kernel_s = wall_s(profile), kernel_s(profile)
        self.kernels = [row for row in profile.kernels if row.phase is None]
        self.copies_s = copies_alone_s(profile) if self.on_device else 0.0
        if self.copies_s and self.copies_s >= MIN_SHARE * self.wall_s:
            self.time = "kernels' time"  # not all of the GPU's

    def ms(self, total_s: float) -> str:
        """The time per step, of a time over all steps."""
        return _ms(total_s / self.profile.num_steps)

    def of_wall(self, total_s: float) -> str:
        """Share of the wall time."""
        return percent_of(total_s, self.wall_s)

    def of_work(self, total_s: float) -> str:
        """Share of the time of all kernels or operators, as `40 % of the GPU time`."""
        return f"{percent_of(total_s, self.kernel_s)} of the {self.time}"

    def count(self, count: int, noun: str) -> str:
        """How many there are in a step: `4 kernels`, `1 launch`, `0.500 launches`."""
        per_step = count / self.profile.num_steps
        plural = "" if per_step == 1 else "es" if noun.endswith("ch") else "s"
        return f"{significant(per_step, 3) if per_step % 1 else f'{per_step:,.0f}'} {noun}{plural}"

    def advice(self, *candidates: Remedy) -> str:
        """The flags of the ways that are open to the run, in brackets after a space; empty if there are none."""
        named = remedies(self.config, *candidates)
        return f" ({named})" if named else ""

    def limit(self) -> Iterator[str]:
        """Whether host, GPU, communication or copies limit the step; for a CPU, the operator that takes longest."""
        if not self.on_device:
            for row in self.kernels[:1]:
                yield (
                    f"The operator {label(row.short_name)} ({row.kind}) takes {self.of_work(row.total_s)}, "
                    f"{self.ms(row.total_s)} in {self.count(row.count, 'call')}."
                )
        if not self.on_device or not self.wall_s:
            return
        verdict = self.verdict()
        if self.profile.doubts:
            verdict = (
                f"In doubt is what limits the step: {'; '.join(self.profile.doubts)}. By the file's times: {verdict}"
            )
        yield verdict

    def verdict(self) -> str:
        """What limits the step on a GPU."""
        busy_s = sum(sum(phase.busy_s) for phase in self.profile.phases)
        late_s, host_s = idle(self.profile, IdleCause.LATE_LAUNCH).total_s, sum(self.profile.step_s)
        told = f"{self.of_wall(busy_s)} of the step's {self.ms(self.wall_s)}"
        if late_s >= MIN_SHARE * self.wall_s:
            told += f", and idle {self.of_wall(late_s)} because the next kernel was not launched yet"
        told += "."
        if is_launch_bound(self.profile):
            return (
                f"The CPU is the limit: the GPU is busy {told}{self.launch_cost()} A profiler makes each launch "
                f"slower: without one it is less. A faster GPU does not help; use {against_launches(self.config)}."
            )
        if self.copies_s >= MIN_LATE_SHARE * self.wall_s:
            return (
                f"Copies limit the step: for {self.ms(self.copies_s)} of {self.ms(self.wall_s)} the GPU copies and "
                f"runs no kernel{self.copy_advice()}."
            )
        if busy_s < MIN_BUSY_SHARE * self.wall_s:
            return f"The GPU is busy only {told}"
        if busy_s - collectives_s(self.profile, exposed=True) < MIN_BUSY_SHARE * self.wall_s:
            return f"Communication is a limit: the GPU computes less than it seems to. It is busy {told}"
        if host_s < MIN_BUSY_SHARE * self.wall_s:
            return (
                f"The GPU is the limit, and the host runs ahead of it: it is busy {self.of_wall(busy_s)} of the "
                f"{self.ms(self.wall_s)} from step to step, while the host's step lasts {self.ms(host_s)}."
            )
        return f"The GPU is the limit: it is busy {told}"

    def copy_advice(self) -> str:
        """What most of the copies are, and what helps against them."""
        for row in self.profile.copies[:1]:
            helps = {
                "host to device, pageable": "pin it (pin_memory=True) and copy with non_blocking=True",
                "device to host, pageable": "copy less often, or into pinned memory",
                "host to device": "copy on a stream of its own while the step before computes",
                "device to host": "copy less often",
            }
            found = next((text for kind, text in helps.items() if row.kind and row.kind.startswith(kind)), "")
            return f", {self.ms(row.total_s)} {row.kind}" + (f": {found}" if found else "")
        return ""

    def copies(self) -> Iterator[Finding]:
        """Copies that do not limit the step, and cost time in which no kernel runs."""
        if self.profile.copies and MIN_SHARE * self.wall_s <= self.copies_s < MIN_LATE_SHARE * self.wall_s:
            text = f"For {self.ms(self.copies_s)} of the step the GPU copies and runs no kernel{self.copy_advice()}."
            yield self.copies_s, text

    def longest(self) -> Iterator[str]:
        """The kernel and the phases that take longest, where little else is to be said."""
        for row in self.kernels[:1] if self.on_device else ():
            yield (
                f"The {self.item} that takes longest is {label(row.short_name)} ({row.kind}), "
                f"{self.of_work(row.total_s)} in {self.count(row.count, 'launch')}."
            )
        shares = {phase.phase: sum(phase.kernel_s) for phase in self.profile.phases if sum(phase.kernel_s)}
        if len(shares) > 1:
            parts = [f"{WHERE[phase]} {percent_of(time_s, self.kernel_s)}" for phase, time_s in shares.items()]
            yield f"Of the {self.time}, {', '.join(parts)}."

    def standing_out(self) -> list[Gap]:
        """Idle times that are much longer than others of their phase and cause, and a part of a step."""
        medians = {(row.phase, row.cause): row.median_s for row in self.profile.idle}
        least_s = MIN_GAP_SHARE * self.wall_s / self.profile.num_steps
        return [gap for gap in self.profile.gaps if gap.duration_s >= max(
                least_s, TIMES_MEDIAN * (medians.get((gap.phase, gap.cause)) or math.inf))]  # fmt: skip

    def gaps(self) -> Iterator[str]:
        """The idle times that stand out: where they are, and what the host did."""
        for gap in self.standing_out()[:MAX_GAPS]:
            row = next(row for row in self.profile.idle if (row.phase, row.cause) == (gap.phase, gap.cause))
            doing = f"the host was in {label(gap.host_call)}" if gap.host_call else "the host made no call"
            if gap.cause is IdleCause.BETWEEN_KERNELS:
                doing = (
                    "the next kernel had been launched, so the host is not at fault (another program on the GPU, a "
                    "migrated page, or lost events may be)"
                )
            yield (
                f"One idle time of {_ms(gap.duration_s)} stands out among {row.count:,} of {_us(row.median_s or 0)} "
                f"(median): in step {gap.step}, {WHERE[gap.phase]}, between {label(gap.before) or 'the start'} and "
                f"{label(gap.after) or 'the end'}; {doing}."
            )

    def launch_cost(self) -> str:
        """CPU time per launch and duration of a kernel; the CPU is the limit because the first is the longer one."""
        calls = added(call for call in self.profile.host_calls if call.is_launch)
        if not calls.count:
            return ""
        host_s = sum(sum(phase.host_s) for phase in self.profile.phases)
        kernel_s = self.kernel_s / max(num_launches(*self.profile.phases), 1)
        return (
            f" The CPU takes {_us(host_s / calls.count)} per launch, {_us(calls.total_s / calls.count)} of it in "
            f"CUDA's own call; a kernel runs {_us(kernel_s)} on average."
        )

    def bounds(self) -> Iterator[str]:
        """How much shorter the step could be at most without the idle time of each cause."""
        apart = self.standing_out()
        lost_s = {
            cause: idle(self.profile, cause).total_s - sum(gap.duration_s for gap in apart if gap.cause is cause)
            for cause in _BOUNDS
        }
        told = []
        for cause in sorted(lost_s, key=lambda cause: -lost_s[cause]):
            if lost_s[cause] >= MIN_SHARE * self.wall_s > 0:
                without_what, remedy = _BOUNDS[cause]
                flags = self.advice(remedy) if remedy else ""
                told.append(f"{self.ms(lost_s[cause])} less without {without_what}{flags}")
        if told:
            yield f"The step would take at most {', '.join(told)}."

    def late_phases(self) -> Iterator[Finding]:
        """Phases that the host limits, in a step that it does not limit."""
        for phase in self.profile.phases if not is_launch_bound(self.profile) else ():
            late_s, whole_s = idle(self.profile, IdleCause.LATE_LAUNCH, phase.phase).total_s, sum(phase.wall_s)
            # every step starts idle, because nothing is launched yet; so it must also matter for the whole step
            if late_s >= MIN_LATE_SHARE * whole_s > 0 and late_s >= MIN_SHARE * self.wall_s:
                text = (
                    f"In {WHERE[phase.phase]} the CPU is the limit: of {self.ms(whole_s)} the GPU is idle "
                    f"{percent_of(late_s, whole_s)}, because the next of its "
                    f"{self.count(num_launches(phase), 'kernel')} was not launched yet."
                )
                yield late_s, text

    def waits(self) -> Iterator[Finding]:
        """Synchronisations within a phase that has kernels. None is needed, so each is reported."""
        launched = {phase.phase for phase in self.profile.phases if any(phase.launches)}
        for phase in (phase for phase in _WAITING if phase in launched):
            calls = [call for call in self.profile.host_calls if call.is_wait and call.phase is phase]
            # a copy that is waited for is followed by the call that waits, unless it does both itself
            waits = [call for call in calls if not (call.is_launch and call.name.endswith("Async"))]
            if not (count := added(waits).count):
                continue
            lost_s = idle(self.profile, IdleCause.HOST_WAITED, phase).total_s
            names = ", ".join(dict.fromkeys(label(call.name) for call in waits))
            copies = " after a copy to the host" if len(waits) < len(calls) else ""
            is_for_all = all(call.name.endswith("DeviceSynchronize") for call in waits)
            text = (
                f"The host waits for the device in {WHERE[phase]}, {self.count(count, 'time')} a step "
                f"({names}{copies}): {self.ms(added(calls).total_s)} a step, after which the GPU idles "
                f"{self.ms(lost_s)} until the next launch. Is there "
                f"{'a torch.cuda.synchronize()' if is_for_all else 'an .item(), a .cpu() or a print of a tensor'}?"
            )
            yield lost_s, text

    def pauses(self) -> Iterator[Finding]:
        """Times in which the host did nothing with CUDA, by phase, with the longest of them."""
        for phase in WHERE:
            paused_s = idle(self.profile, IdleCause.HOST_PAUSE, phase).total_s
            if not paused_s or paused_s < MIN_SHARE * self.wall_s:
                continue
            gaps = [gap for gap in self.profile.gaps if gap.cause is IdleCause.HOST_PAUSE and gap.phase is phase]
            longest = ""
            for gap in gaps[:1]:
                place = f" in {path_text(gap.module)}" if gap.module else ""
                longest = f"; the longest time, {_ms(gap.duration_s)}, before {label(gap.after)}{place}"
            text = (
                f"The GPU idles {self.ms(paused_s)} in {WHERE[phase]} while the host pauses{longest}. The host made no "
                "CUDA call meanwhile: it slept, read data, compiled or computed on the CPU."
            )
            yield paused_s, text

    def unknown(self) -> Iterator[Finding]:
        """Kernels of unknown class, if they matter, with the longest by name."""
        rows = [row for row in self.kernels if row.kind is KernelClass.OTHER]
        total_s = added(rows).total_s
        if total_s and total_s >= MIN_SHARE * self.kernel_s:
            longest, *others = rows
            more = f"; {len(others)} more such have {self.ms(added(others).total_s)}" if others else ""
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
                f"{self.of_work(lost_s)}, {self.ms(lost_s)}, was launched in no phase: put it inside a range, or say "
                "which ranges are the phases (--forward, --backward, --optimizer)."
            )
            yield lost_s, text

    def communication(self) -> Iterator[Finding]:
        """Time in which collectives run, what of it is exposed, and the rank for which the others wait."""
        ran_s, lost_s = (collectives_s(self.profile, exposed=exposed) for exposed in (False, True))
        if ran_s and ran_s >= MIN_SHARE * self.wall_s:
            is_large = lost_s >= MIN_SHARE * self.wall_s
            more = f"{self.advice(Remedy.OVERLAP)}.{self.last_rank(lost_s)}" if is_large else "."
            text = (
                f"Communication takes {self.ms(ran_s)}, and for {self.ms(lost_s)} of that, {self.of_wall(lost_s)} of "
                f"the step, the GPU computes nothing{more}"
            )
            yield lost_s, text

    def last_rank(self, lost_s: float) -> str:
        """The rank for which the others wait in nearly all steps, if that takes a large part of the exposed time."""
        waited = {own.rank: own.waited_s for own in self.profile.ranks if own.waited_s is not None}
        if len(waited) < 2:
            return ""
        longest_s, last = max(map(sum, waited.values())), min(waited, key=lambda rank: sum(waited[rank]))
        steps = list(zip(*waited.values(), strict=True))
        count = sum(min(times) == own for times, own in zip(steps, waited[last], strict=True) if any(times))
        if longest_s < max(MIN_LARGE_SHARE * lost_s, 1e-9) or count < MIN_STEADY_SHARE * len(steps):
            return ""
        return (
            f" The others wait for rank {last} in {count} of {len(steps)} steps, up to {self.ms(longest_s)}: what "
            "slows it down?"
        )

    def full_precision(self) -> Iterator[Finding]:
        """Products in true fp32 on a device with tensor cores that take them in TF32 or in half precision."""
        matmuls = (row for row in self.kernels if row.kind is KernelClass.MATMUL)
        rows = [row for row in matmuls if _FULL_PRECISION.search(row.name) and "tf32" not in row.name]
        full_s, faster = added(rows).total_s, self.faster(rows)
        if faster and full_s >= MIN_LARGE_SHARE * (self.kernel_s + (self.copies_s if self.profile.copies else 0)):
            text = (
                f"Matrix products in true fp32 take {self.of_work(full_s)}, {self.ms(full_s)}, and leave the tensor "
                f"cores idle{self.advice(*(OF_PRECISION[precision] for precision in faster))}."
            )
            yield full_s, text

    def faster(self, rows: list[KernelTimes]) -> tuple[Precision, ...]:
        """Precisions with tensor cores on the device, for a run with these fp32 products; empty if none is known."""
        if not self.on_device or not rows or (self.config and self.config.precision is not Precision.FP32):
            return ()
        if device := next(filter(None, map(find_device, self.profile.device_names)), None):
            return faster_precisions(device)
        return (Precision.TF32, Precision.BF16) if any(_HAS_TF32.search(row.name) for row in rows) else ()

    def optimizer(self) -> Iterator[Finding]:
        """A large optimizer."""
        phases = [phase for phase in self.profile.phases if phase.phase is LaunchPhase.OPTIMIZER]
        whole_s = sum(sum(phase.wall_s) for phase in phases)
        if whole_s and whole_s >= MIN_OPTIMIZER_SHARE * self.wall_s:
            own = [row for row in self.profile.classes if row.phase is LaunchPhase.OPTIMIZER]
            fused_s = added(row for row in own if row.kind is KernelClass.OPTIMIZER).total_s
            flags = self.advice(Remedy.OPTIMIZER) if fused_s < added(own).total_s / 2 else ""
            text = (
                f"The optimizer takes {self.ms(whole_s)}, {self.of_wall(whole_s)} of the step, in "
                f"{self.count(num_launches(*phases), self.item)}{flags}."
            )
            yield whole_s, text

    def moving(self) -> Iterator[Finding]:
        """Element-wise work and the like, which a compiler fuses."""
        rows = [row for row in self.profile.classes if row.phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)]
        moving_s, whole_s = added(row for row in rows if row.kind in _MOVING).total_s, added(rows).total_s
        if moving_s and moving_s >= MIN_LARGE_SHARE * whole_s:
            text = (
                f"In forward and backward, {percent_of(moving_s, whole_s)} of the {self.time}, {self.ms(moving_s)}, "
                "goes to element-wise work, norms, sums and copies, which move values more than they compute"
                f"{self.advice(Remedy.COMPILE)}."
            )
            yield moving_s, text


def _ms(time_s: float) -> str:
    """The time in ms, to three digits."""
    return f"{significant(time_s * 1e3, 3)} ms"


def _us(time_s: float) -> str:
    """The time in µs, to three digits."""
    return f"{significant(time_s * 1e6, 3)} µs"
