"""Sentences about what limits a profiled step, and about what takes time in it that can be saved.

All numbers are per step. A finding is reported only if it costs at least the share that its threshold below gives.
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cs336_systems.analysis.advice import OF_PRECISION, Remedy, remedies
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import IdleCause, KernelTimes, StepProfile, Work
from cs336_systems.config import Attention, Precision, RunConfig
from cs336_systems.costs.hardware import faster_precisions, find_device
from cs336_systems.report.sections.kernels.facts import (
    MIN_LATE_SHARE,
    WHERE,
    added,
    collectives_s,
    exposed_s,
    idle,
    is_launch_bound,
    items,
    kernel_s,
    last_ranks,
    launches,
    ms,
    num_launches,
    path_text,
    terms,
    times,
    us,
    wall_s,
)
from cs336_systems.report.words import label, percent_of
from cs336_systems.text import counted

MIN_TIMES = 20
"""Smallest ratio of a one-off call to the median call of its kernel."""
MIN_SHARE = 0.01
"""Smallest share of the wall time that all one-offs of a phase must take to be reported."""
MIN_SHARE_EACH = 0.001
"""Smallest share of the wall time of a single one-off."""


@dataclass(frozen=True, slots=True)
class OneOff:
    """A kernel that took longer in a phase of one step than in the same phase of the other steps."""

    kernel: KernelTimes
    phase: LaunchPhase
    step: int
    excess_s: float
    """How much longer it took than in the other steps."""


def find_one_offs(profile: StepProfile) -> list[OneOff]:
    """Find all one-offs, the longest first; a single step has none, because there is no other to compare it with.

    The longest step of a phase is examined. It must exceed the median of the others by half of its one-offs' time.
    """
    found: list[OneOff] = []
    for phase in profile.phases:
        times_s = phase.kernel_s
        if len(times_s) < 2:
            continue
        step = times_s.index(max(times_s))
        longer_s = times_s[step] - statistics.median(times_s[:step] + times_s[step + 1 :])
        # a collective that takes long waits for another rank, which may happen in any step
        kernels = [each for each in profile.kernels
                   if each.phase is phase.phase and each.kind is not KernelClass.COMMUNICATION]  # fmt: skip
        excesses = [(kernel, _excess_s(kernel, times_s, step)) for kernel in kernels]
        own = [OneOff(kernel, phase.phase, step, excess_s) for kernel, excess_s in excesses
               if excess_s >= MIN_SHARE_EACH * wall_s(profile) > 0]  # fmt: skip
        total_s = sum(one_off.excess_s for one_off in own)
        if own and total_s >= MIN_SHARE * wall_s(profile) and longer_s >= total_s / 2:
            found += own
    return sorted(found, key=lambda one_off: -one_off.excess_s)


def _excess_s(kernel: KernelTimes, times_s: Sequence[float], step: int) -> float:
    """By how much the kernel made the phase of that step longer; 0 if it may have been the same in all steps.

    A profile has no times of single calls, so this is inferred from sums. A kernel with fewer calls than steps did not
    run in every step: all of its time counts. A kernel whose total exceeds the time of the phase in the other steps,
    scaled to all steps, was longer in this one. A call far longer than the median is a one-off if the kernel's other
    calls together are too short to hold one as long in half of the other steps.
    """
    num_steps, others_s = len(times_s), sum(times_s) - times_s[step]
    if kernel.count < num_steps:
        return kernel.total_s
    has_no_like = kernel.total_s - kernel.max_s < kernel.max_s * (num_steps - 1) / 2
    is_alone = has_no_like and kernel.max_s >= MIN_TIMES * kernel.median_s
    no_room_s = kernel.total_s - others_s * num_steps / (num_steps - 1)
    return max(no_room_s, kernel.max_s - kernel.median_s if is_alone else 0.0, 0.0)


def without(profile: StepProfile, one_offs: Iterable[OneOff]) -> StepProfile:
    """The profile as it would be without the excess time of these one-offs."""
    for one_off in one_offs:
        kernel, phase, excess_s = one_off.kernel, one_off.phase, one_off.excess_s
        profile = replace(
            profile,
            kernels=tuple(
                replace(row, total_s=row.total_s - excess_s)
                if row.name == kernel.name and row.phase in (None, phase)
                else row
                for row in profile.kernels
            ),
            classes=tuple(
                replace(row, total_s=row.total_s - excess_s) if (row.kind, row.phase) == (kernel.kind, phase) else row
                for row in profile.classes
            ),
            phases=tuple(
                replace(row, kernel_s=_less(row.kernel_s, one_off.step, excess_s)) if row.phase is phase else row
                for row in profile.phases
            ),
        )
    return profile


def _less(times_s: tuple[float, ...], step: int, excess_s: float) -> tuple[float, ...]:
    return (*times_s[:step], times_s[step] - excess_s, *times_s[step + 1 :])


MIN_BUSY_SHARE = 0.8
"""Smallest share of the wall time that the GPU must be busy to be called the limit of the step."""
MIN_PAUSE_SHARE = 0.01
"""Smallest share of the wall time of a reported pause. A single hiccup of a millisecond in ten steps stays below."""
MIN_BETWEEN_SHARE = 0.05
"""Smallest share of the wall time between kernels for which fewer kernels are advised."""
MIN_UNKNOWN_SHARE = 0.02
"""Smallest reported share of the kernels' time in kernels of unknown class. Less would change no other share much."""
MIN_LEFT_SHARE = 0.01
"""Smallest reported share of the kernels' time that is in no phase, recomputed, or spent on communication."""
MIN_EXPOSED_SHARE = 0.02
"""Smallest reported share of exposed communication in the wall time, and of a phase in all exposed communication."""
MIN_WAITED_SHARE = 0.25
"""Smallest reported share of waits for other ranks in the exposed time."""
MIN_STEADY_SHARE = 0.9
"""Smallest share of the steps in which the same rank must come last to be named."""
MIN_OPTIMIZER_SHARE = 0.1
"""Smallest reported share of the wall time. A fused AdamW moves 28 bytes a parameter, a few percent of a step."""
MIN_MOVING_SHARE = 0.25
"""Smallest reported share of forward and backward in kernels that move values and compute next to nothing."""

MIN_FULL_PRECISION_SHARE = 0.25
"""Smallest reported share of the kernels' time in fp32 products, for which tensor cores need a tenth of the time."""
MIN_MAIN_SHARE = 0.25
"""Smallest share of the CPU time with which an operator is reported whatever it does."""

_WAITING = tuple(phase for phase in WHERE if phase not in (LaunchPhase.DATA, LaunchPhase.UNATTRIBUTED))
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


@dataclass(frozen=True, slots=True)
class _Finding:
    """A sentence, and the time over all steps that the problem costs."""

    cost_s: float
    text: str


def findings(profile: StepProfile, config: RunConfig | None = None) -> tuple[str, ...]:
    """Sentences in order: one-offs, what limits the step, what would shorten it, idle times, other findings.

    Idle times and other findings are sorted by cost, the largest first. With the `config` of the run, the advice leaves
    out what the run does already.
    """
    one_offs = find_one_offs(profile)
    found, steady = _Findings(profile, config), _Findings(without(profile, one_offs), config)
    first = [*found.one_offs(one_offs), *found.limit(), *steady.main_operators(), *found.bounds(), *steady.proposals()]
    idle = [*found.late_phases(), *found.waits(), *found.pauses()]
    long = [*steady.unknown(), *steady.unattributed(), *steady.recomputed(), *steady.communication(),
            *steady.full_precision(), *found.optimizer(), *steady.moving()]  # fmt: skip
    return (*first, *_texts(idle), *_texts(long))


def _texts(found: Iterable[_Finding]) -> Iterator[str]:
    return (finding.text for finding in sorted(found, key=lambda finding: -finding.cost_s))


def _from(least_s: float, cost_s: float, text: str) -> Sequence[_Finding]:
    """The finding, unless it costs nothing or less than `least_s`."""
    return (_Finding(cost_s, text),) if cost_s and cost_s >= least_s else ()


class _Findings:
    """Makes the findings of one profile. Times are sums over all steps; sentences give them per step."""

    def __init__(self, profile: StepProfile, config: RunConfig | None) -> None:
        """The `config` is that of the run, if it is known."""
        self.profile, self.config, self.words = profile, config, terms(profile)
        self.on_device = profile.work is Work.KERNELS
        self.wall_s, self.kernel_s = wall_s(profile), kernel_s(profile)
        self.kernels = [row for row in profile.kernels if row.phase is None]

    def ms(self, total_s: float) -> str:
        """The time per step, of a time over all steps."""
        return ms(total_s / self.profile.num_steps)

    def of_wall(self, total_s: float) -> str:
        """Share of the wall time."""
        return percent_of(total_s, self.wall_s)

    def of_work(self, total_s: float) -> str:
        """Share of the time of all kernels or operators, as `40 % of the GPU time`."""
        return f"{percent_of(total_s, self.kernel_s)} of the {self.words.time}"

    def items(self, count: int) -> str:
        """Kernels or operators per step."""
        return items(count / self.profile.num_steps, self.profile)

    def calls(self, row: KernelTimes) -> str:
        """Time and launches of the kernel per step."""
        return f"{self.ms(row.total_s)} in {launches(row.count / self.profile.num_steps, self.profile)}"

    def times(self, count: int) -> str:
        """How often per step."""
        return times(count / self.profile.num_steps)

    def limit(self) -> Iterator[str]:
        """Whether host, GPU, communication or copies limit the step; nothing for a trace of a CPU, which is both."""
        if not self.on_device or not self.wall_s:
            return
        busy_s = sum(sum(phase.busy_s) for phase in self.profile.phases)
        late = self.of_wall(idle(self.profile, IdleCause.LATE_LAUNCH).total_s)
        told = (
            f"{self.of_wall(busy_s)} of the step's {self.ms(self.wall_s)}, and idle {late} because the next kernel was "
            "not launched yet."
        )
        if is_launch_bound(self.profile):
            yield (
                f"The CPU is the limit: the GPU is busy {told}{self.launch_cost()} A larger model or batch helps, a "
                "faster GPU does not. A profiler makes each launch slower: without one it is less."
            )
        elif busy_s >= MIN_BUSY_SHARE * self.wall_s > busy_s - exposed_s(self.profile):
            yield f"Communication is a limit: the GPU computes less than it seems to. It is busy {told}"
        elif busy_s >= MIN_BUSY_SHARE * self.wall_s > self.kernel_s:
            yield f"Copies limit the GPU: {self.ms(busy_s - self.kernel_s)} or more without a kernel. It is busy {told}"
        elif busy_s >= MIN_BUSY_SHARE * self.wall_s:
            yield f"The GPU is the limit: it is busy {told}"
        else:
            yield f"The GPU is busy only {told}"

    def launch_cost(self) -> str:
        """CPU time per launch and duration of a kernel; the CPU is the limit because the first is the longer one."""
        calls = added(call for call in self.profile.host_calls if call.is_launch)
        if not calls.count:
            return ""
        host_s = sum(sum(phase.host_s) for phase in self.profile.phases)
        return (
            f" The CPU takes {us(host_s / calls.count)} per launch, {us(calls.total_s / calls.count)} of it in CUDA's "
            f"own call; the median of {self.items(added(self.kernels).count)} runs {us(_median_s(self.kernels))}."
        )

    def one_offs(self, found: Sequence[OneOff]) -> Iterator[str]:
        """Calls that took far longer than the others of their kernel, once."""
        for longest in found[:1]:
            kernel, total_s = longest.kernel, sum(one_off.excess_s for one_off in found)
            more = f" So did {counted(len(found) - 1, f'other {self.words.item}')}." if len(found) > 1 else ""
            yield (
                f"{label(kernel.short_name)} took {ms(longest.excess_s)} more in {WHERE[longest.phase]} of step "
                f"{longest.step} than in the others (its longest call {ms(kernel.max_s)}, their median "
                f"{ms(kernel.median_s)}).{more} That is a one-off, such as a first call, for which code is compiled or "
                f"loaded: {self.of_wall(total_s)} of the time of all steps, and gone after more warm-up steps. What is "
                f"said of {self.words.time} below leaves it out."
            )

    def main_operators(self) -> Iterator[str]:
        """Where the time of a CPU goes: operators that take a large part of it, whatever they do."""
        for row in self.kernels if not self.on_device else ():
            if row.total_s >= MIN_MAIN_SHARE * self.kernel_s > 0:
                is_product = row.kind is KernelClass.MATMUL
                why = ": arithmetic, which neither fewer nor fused operators shorten" if is_product else ""
                yield (
                    f"The operator {label(row.short_name)} ({row.kind}) takes {self.of_work(row.total_s)}, "
                    f"{self.calls(row)}{why}."
                )

    def late_phases(self) -> Iterator[_Finding]:
        """Phases that the host limits, in a step that it does not limit."""
        for phase in self.profile.phases if not is_launch_bound(self.profile) else ():
            late_s, whole_s = idle(self.profile, IdleCause.LATE_LAUNCH, phase.phase).total_s, sum(phase.wall_s)
            # every step starts idle, because nothing is launched yet; so it must also matter for the whole step
            if late_s >= MIN_LATE_SHARE * whole_s > 0 and late_s >= MIN_PAUSE_SHARE * self.wall_s:
                yield _Finding(
                    late_s,
                    f"In {WHERE[phase.phase]} the CPU is the limit: of {self.ms(whole_s)} the GPU is idle "
                    f"{percent_of(late_s, whole_s)}, because the next of its {self.items(num_launches(phase))} was not "
                    "launched yet.",
                )

    def waits(self) -> Iterator[_Finding]:
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
            yield _Finding(
                lost_s,
                f"The host waits for the device in {WHERE[phase]}, {self.times(count)} ({names}{copies}): "
                f"{self.ms(added(calls).total_s)} a step, after which the GPU idles {self.ms(lost_s)} until the next "
                "launch. Is there "
                f"{'a torch.cuda.synchronize()' if is_for_all else 'an .item(), a .cpu() or a print of a tensor'}?",
            )

    def pauses(self) -> Iterator[_Finding]:
        """Times in which the host did nothing with CUDA, by phase, with the longest of them."""
        for phase in WHERE:
            paused_s = idle(self.profile, IdleCause.HOST_PAUSE, phase).total_s
            if not paused_s or paused_s < MIN_PAUSE_SHARE * self.wall_s:
                continue
            idles = f"The GPU idles {_rounded_ms(paused_s / self.profile.num_steps)} in {WHERE[phase]}"
            gaps = [gap for gap in self.profile.gaps if gap.cause is IdleCause.HOST_PAUSE and gap.phase is phase]
            longest = ""
            for gap in gaps[:1]:
                place = f" in {path_text(gap.module)}" if gap.module else ""
                longest = f"; the longest time, {_rounded_ms(gap.duration_s)}, before {label(gap.after)}{place}"
            yield _Finding(
                paused_s,
                f"{idles} while the host pauses{longest}. The host made no CUDA call meanwhile: it slept, read data, "
                "compiled or computed on the CPU.",
            )

    def unknown(self) -> Sequence[_Finding]:
        """Kernels of unknown class, if they matter, with the longest by name."""
        rows = sorted((row for row in self.kernels if row.kind is KernelClass.OTHER), key=lambda row: -row.total_s)
        if not rows:
            return ()
        longest, *others = rows
        more = f"; {len(others)} more such have {self.ms(added(others).total_s)}" if others else ""
        return _from(
            MIN_UNKNOWN_SHARE * self.kernel_s,
            added(rows).total_s,
            f"The {self.words.item} {label(longest.short_name)}, of a kind that no rule knows, takes "
            f"{self.of_work(longest.total_s)}: {self.calls(longest)}{more}.",
        )

    def unattributed(self) -> Sequence[_Finding]:
        """Kernels in a step and in no phase."""
        phases = [phase for phase in self.profile.phases if phase.phase is LaunchPhase.UNATTRIBUTED]
        lost_s = kernel_s(self.profile, [LaunchPhase.UNATTRIBUTED])
        return _from(
            MIN_LEFT_SHARE * self.kernel_s,
            lost_s,
            f"{self.of_work(lost_s)}, {self.ms(lost_s)} in {self.items(num_launches(*phases))}, was launched in no "
            "phase: put it inside a range, or say which ranges are the phases (--forward, --backward, --optimizer).",
        )

    def recomputed(self) -> Sequence[_Finding]:
        """Work of forward that backward repeats."""
        again_s = sum(sum(phase.recomputed_s) for phase in self.profile.phases)
        return _from(
            MIN_LEFT_SHARE * self.kernel_s,
            again_s,
            f"Backward does {self.ms(again_s)} of forward's work again (checkpointing), "
            f"{percent_of(again_s, self.kernel_s)} of the step's {self.words.time}.",
        )

    def communication(self) -> Sequence[_Finding]:
        """Kernels that send and receive, and what of their time is exposed."""
        sent_s = added(row for row in self.profile.classes if row.kind is KernelClass.COMMUNICATION).total_s
        ran_s, lost_s = collectives_s(self.profile), exposed_s(self.profile)
        if not ran_s:
            text = f"Communication takes {self.ms(sent_s)}, {self.of_work(sent_s)}; it may run beside other kernels."
            return _from(MIN_LEFT_SHARE * self.kernel_s, sent_s, text)
        if lost_s < MIN_EXPOSED_SHARE * self.wall_s:
            text = f"Communication takes {self.ms(ran_s)}, all but {self.ms(lost_s)} of it beside other kernels."
            return _from(MIN_LEFT_SHARE * self.kernel_s, ran_s, text)
        of_phases = {phase: exposed_s(self.profile, phase) for phase in WHERE}
        longest = sorted(of_phases, key=lambda phase: -of_phases[phase])
        parts = [f"{self.ms(of_phases[phase])} in {WHERE[phase]}"
                 for phase in longest if of_phases[phase] >= MIN_EXPOSED_SHARE * lost_s]  # fmt: skip
        return (
            _Finding(
                lost_s,
                f"Communication takes {self.ms(ran_s)}, and for {self.ms(lost_s)} of that, {self.of_wall(lost_s)} of "
                f"the step, the GPU computes nothing: {', '.join(parts)}.{self.waits_for_ranks(lost_s)}",
            ),
        )

    def waits_for_ranks(self, lost_s: float) -> str:
        """How long ranks wait for each other, if that is a large part of the exposed time, and for which if for one."""
        waits = {own.rank: sum(own.waited_s) for own in self.profile.ranks if own.waited_s is not None}
        last = last_ranks(self.profile).most_common(1)
        if not last or max(waits.values()) < MIN_WAITED_SHARE * lost_s:
            return ""
        named = {rank: waits[rank] for rank in (min(waits, key=waits.__getitem__), max(waits, key=waits.__getitem__))}
        parts = [f"rank {rank} for {self.ms(waited_s)}" for rank, waited_s in named.items()]
        ((rank, count),) = last
        steady = f" The others wait for rank {rank} in {count} of {self.profile.num_steps} steps: what slows it down?"
        return (
            f" In it, ranks wait for another that comes later, {' and '.join(parts)}."
            f"{steady if count >= MIN_STEADY_SHARE * self.profile.num_steps else ''}"
        )

    def full_precision(self) -> Sequence[_Finding]:
        """Products in true fp32 on a device with tensor cores that take them in TF32 or in half precision."""
        faster = self.faster()
        full_s = added(self.full_precision_kernels()).total_s if faster else 0.0
        return _from(
            MIN_FULL_PRECISION_SHARE * self.kernel_s,
            full_s,
            f"Matrix products in true fp32 take {self.of_work(full_s)}, {self.ms(full_s)}, and leave the tensor cores "
            f"idle, which have {' and '.join(faster)}.",
        )

    def faster(self) -> tuple[Precision, ...]:
        """Precisions with tensor cores on the device, for a run in fp32; empty if that is not known."""
        rows = self.full_precision_kernels()
        is_full = bool(rows) if self.config is None else self.config.precision is Precision.FP32
        device = next(filter(None, map(find_device, self.profile.device_names)), None)
        if not self.on_device or not is_full:
            return ()
        if device is not None:
            return faster_precisions(device)
        return (Precision.TF32, Precision.BF16) if any(_HAS_TF32.search(row.name) for row in rows) else ()

    def full_precision_kernels(self) -> list[KernelTimes]:
        """The matmuls in true fp32."""
        matmuls = (row for row in self.kernels if row.kind is KernelClass.MATMUL)
        return [row for row in matmuls if _FULL_PRECISION.search(row.name) and "tf32" not in row.name]

    def optimizer_s(self) -> float:
        """Wall time of the optimizer."""
        return sum(sum(phase.wall_s) for phase in self.profile.phases if phase.phase is LaunchPhase.OPTIMIZER)

    def optimizer(self) -> Sequence[_Finding]:
        """A large optimizer."""
        phases = [phase for phase in self.profile.phases if phase.phase is LaunchPhase.OPTIMIZER]
        whole_s = self.optimizer_s()
        return _from(
            MIN_OPTIMIZER_SHARE * self.wall_s,
            whole_s,
            f"The optimizer takes {self.ms(whole_s)}, {self.of_wall(whole_s)} of the step, in "
            f"{self.items(num_launches(*phases))}.",
        )

    def moving_s(self) -> tuple[float, float]:
        """Time in forward and backward of kernels that move values, and of all."""
        rows = [row for row in self.profile.classes if row.phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)]
        return added(row for row in rows if row.kind in _MOVING).total_s, added(rows).total_s

    def moving(self) -> Sequence[_Finding]:
        """Element-wise work and the like, which a compiler fuses."""
        moving_s, whole_s = self.moving_s()
        return _from(
            MIN_MOVING_SHARE * whole_s,
            moving_s,
            f"In forward and backward, {percent_of(moving_s, whole_s)} of the {self.words.time}, {self.ms(moving_s)}, "
            "goes to element-wise work, norms, sums and copies, which move values more than they compute.",
        )

    def bounds(self) -> Iterator[str]:
        """How much shorter the step could be at most without the idle time of each cause."""
        lost_s = {cause: idle(self.profile, cause).total_s for cause in _BOUNDS}
        told = []
        for cause in sorted(lost_s, key=lambda cause: -lost_s[cause]):
            if lost_s[cause] >= MIN_PAUSE_SHARE * self.wall_s > 0:
                without_what, remedy = _BOUNDS[cause]
                flags = "" if remedy is None else remedies(self.config, remedy)
                told.append(f"{self.ms(lost_s[cause])} less without {without_what}{f' ({flags})' if flags else ''}")
        if told:
            yield f"The step would take at most {', '.join(told)}."

    def proposals(self) -> Iterator[str]:
        """What may shorten the step besides, with the flags that do it."""
        evident = self.evident()
        if named := remedies(self.config, *(remedy for remedy in Remedy if remedy in evident)):
            yield f"What may shorten the step, by how much this profile does not tell: {named}."

    def evident(self) -> set[Remedy]:
        """Ways that would shorten the step according to these sums, which do not show by how much."""
        moving_s, computed_s = self.moving_s()
        late_s, between_s = (
            idle(self.profile, cause).total_s for cause in (IdleCause.LATE_LAUNCH, IdleCause.BETWEEN_KERNELS)
        )
        fewer = {Remedy.COMPILE, Remedy.OPTIMIZER}
        full_s = added(self.full_precision_kernels()).total_s
        least_s = [
            (late_s, MIN_LATE_SHARE * self.wall_s, fewer | {Remedy.ATTENTION}),
            (between_s, MIN_BETWEEN_SHARE * self.wall_s, fewer),
            (moving_s, MIN_MOVING_SHARE * computed_s, {Remedy.COMPILE}),
            (self.optimizer_s(), MIN_OPTIMIZER_SHARE * self.wall_s, {Remedy.OPTIMIZER}),
            (full_s, MIN_FULL_PRECISION_SHARE * self.kernel_s, {OF_PRECISION[each] for each in self.faster()}),
            (exposed_s(self.profile), MIN_EXPOSED_SHARE * self.wall_s, {Remedy.OVERLAP}),
        ]
        ways = {way for cost_s, floor_s, ways in least_s if cost_s and cost_s >= floor_s for way in ways}
        return ways.difference(self.useless())

    def useless(self) -> Iterator[Remedy]:
        """Ways that would change none of these kernels."""
        compute = {row.kind for row in self.profile.classes if row.phase is not LaunchPhase.OPTIMIZER}
        if compute.isdisjoint((*_MOVING, KernelClass.SOFTMAX)):
            yield Remedy.COMPILE
        if not self.profile.attention and (self.config is None or self.config.model.attention is not Attention.NAIVE):
            yield Remedy.ATTENTION
        own = [row for row in self.profile.classes if row.phase is LaunchPhase.OPTIMIZER]
        if added(row for row in own if row.kind is KernelClass.OPTIMIZER).total_s >= added(own).total_s / 2:
            yield Remedy.OPTIMIZER


def _median_s(kernels: Iterable[KernelTimes]) -> float:
    """Median duration of all launches, each taken to last as long as the median of its kernel."""
    ordered = sorted(kernels, key=lambda kernel: kernel.median_s)
    middle = sum(kernel.count for kernel in ordered) / 2
    for kernel in ordered:
        middle -= kernel.count
        if middle <= 0:
            return kernel.median_s
    return 0.0


def _rounded_ms(time_s: float) -> str:
    """The time in ms, without decimals from 10 ms on: pauses vary by more than that."""
    return f"{time_s * 1e3:,.0f} ms" if time_s >= 10e-3 else ms(time_s)
