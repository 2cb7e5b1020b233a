"""What stands out in a `StepProfile`, in sentences: what limits the step, and what takes time that it need not.

All numbers are per step. A finding is told only where it costs at least the share that its threshold below says.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cs336_systems.analysis.advice import NOT_IN_USE, Remedy, against_launches, remedies, use_of
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import HostCalls, IdleCause, KernelTimes, PhaseTimes, StepProfile, Work
from cs336_systems.config import Precision, RunConfig
from cs336_systems.costs.hardware import DeviceSpec, faster_precisions, find_device
from cs336_systems.report.numbers import label
from cs336_systems.report.sections.kernels.facts import MIN_LATE_SHARE, idle_s, is_launch_bound, kernel_s, wall_s
from cs336_systems.report.sections.kernels.one_offs import OneOff, find_one_offs, without
from cs336_systems.report.sections.kernels.places import path_text
from cs336_systems.report.sections.kernels.words import WHERE, items, launches, ms, per_step, terms, us
from cs336_systems.report.sentences import percent_of
from cs336_systems.text import counted

MIN_BUSY_SHARE = 0.8
"""Of the wall time, for the GPU to be what limits the step."""
MIN_PAUSE_SHARE = 0.01
"""Of the wall time: a hiccup of the machine, a millisecond in one of ten steps, stays below."""
MIN_BETWEEN_SHARE = 0.05
"""Of the wall time, in the microsecond or two that the device takes from one kernel to the next."""
MIN_UNKNOWN_SHARE = 0.02
"""Of the kernels' time, for the kernels that no rule knows: less would change no other share that matters."""
MIN_LEFT_SHARE = 0.01
"""Of the kernels' time, outside of all phases, recomputed or in communication."""
MIN_OPTIMIZER_SHARE = 0.1
"""Of the wall time. A fused AdamW reads and writes 28 bytes a parameter, a few percent of a step's time."""
MIN_MOVING_SHARE = 0.25
"""Of the kernels' time in forward and backward, in kernels that compute next to nothing on each value they move."""

MIN_FULL_PRECISION_SHARE = 0.25
"""Of the kernels' time, in matrix products that tensor cores would take in a tenth of the time."""
MIN_MAIN_SHARE = 0.25
"""Of the operators' time on a CPU, for an operator that is named whatever it is: there is no GPU to be the limit."""
_FULL_PRECISION = re.compile(r"sgemm|f32f32_f32f32_f32")
"""In the names of true fp32 products of cuBLAS and CUTLASS: ampere_sgemm_, simt_sgemm, xmma_gemm_f32f32_f32f32_f32_."""
_HAS_TF32 = re.compile(r"ampere|hopper|blackwell|(sm|cutlass_?|cutlass_sm)(8|9|1\d)\d")
"""In the names of kernels that run on GPUs from Ampere on alone, whose tensor cores all have TF32 and bf16."""

_WAITING = tuple(phase for phase in WHERE if phase not in (LaunchPhase.DATA, LaunchPhase.UNATTRIBUTED))
"""Phases in which the host has no reason to wait: before and after them, a step that is timed synchronises."""
_MOVING = (KernelClass.ELEMENT_WISE, KernelClass.COPY_AND_FILL, KernelClass.NORMALISATION, KernelClass.REDUCTION)


@dataclass(frozen=True, slots=True)
class _Finding:
    """A sentence, and how long what it tells of takes in all steps together."""

    cost_s: float
    text: str


def findings(profile: StepProfile, config: RunConfig | None = None) -> tuple[str, ...]:
    """What happened once and what limits the step; then where the device idles and what else takes long, by its time.

    With the `config` of the run, nothing is advised that it does already.
    """
    one_offs = find_one_offs(profile)
    steady = without(profile, one_offs)
    idle = [*_late_phases(profile), *_waits(profile), *_pauses(profile), *_between(profile, config)]
    long = [*_unknown(steady), *_unattributed(steady), *_recomputed(steady),
            *_communication(steady), *_full_precision(steady, config), *_optimizer(profile, config),
            *_moving(steady, config)]  # fmt: skip
    first = [*_told_one_offs(profile, one_offs), *_limit(profile, config), *_main_operators(steady)]
    return (*first, *_texts(idle), *_texts(long))


def _texts(found: Iterable[_Finding]) -> Iterator[str]:
    return (finding.text for finding in sorted(found, key=lambda finding: -finding.cost_s))


def _limit(profile: StepProfile, config: RunConfig | None) -> Iterator[str]:
    """Whether the host or the device limits the step; nothing of a trace of a CPU, on which they are one."""
    whole_s = wall_s(profile)
    if profile.work is Work.OPERATORS or not whole_s:
        return
    busy_s = sum(sum(phase.busy_s) for phase in profile.phases)
    busy = percent_of(busy_s, whole_s)
    late_s = idle_s(profile, IdleCause.LATE_LAUNCH)
    if is_launch_bound(profile):
        yield (
            f"The CPU is the limit: the GPU is busy {busy} of the step's {ms(whole_s / profile.num_steps)}, and idle "
            f"{percent_of(late_s, whole_s)} because the next kernel was not launched yet.{_launch_cost(profile)} "
            f"What helps is {against_launches(config)}; a faster GPU does not. A profiler makes each launch slower: "
            "without one it is less."
        )
    else:
        verdict = "The GPU is the limit: it is busy" if busy_s / whole_s >= MIN_BUSY_SHARE else "The GPU is busy only"
        yield (
            f"{verdict} {busy} of the step's {ms(whole_s / profile.num_steps)}, and idle "
            f"{percent_of(late_s, whole_s)} because the next kernel was not launched yet."
        )


def _launch_cost(profile: StepProfile) -> str:
    """CPU time per launch beside the kernels' own: which of the two is longer is the reason."""
    calls = [call for call in profile.host_calls if call.is_launch]
    if not (num_launches := sum(call.count for call in calls)):
        return ""
    kernels = [kernel for kernel in profile.kernels if kernel.phase is None]
    host_s = sum(sum(phase.host_s) for phase in profile.phases)
    call_s, num_kernels = sum(call.total_s for call in calls), sum(kernel.count for kernel in kernels)
    return (
        f" The CPU takes {us(host_s / num_launches)} per launch, {us(call_s / num_launches)} of it in CUDA's own "
        f"call; the median of {items(num_kernels, profile)} runs {us(_median_s(kernels))}."
    )


def _median_s(kernels: Iterable[KernelTimes]) -> float:
    """Median duration of all launches, each taken to last as long as the median of its kernel."""
    ordered = sorted(kernels, key=lambda kernel: kernel.median_s)
    middle = sum(kernel.count for kernel in ordered) / 2
    for kernel in ordered:
        middle -= kernel.count
        if middle <= 0:
            return kernel.median_s
    return 0.0


def _told_one_offs(profile: StepProfile, one_offs: Sequence[OneOff]) -> Iterator[str]:
    if not one_offs:
        return
    longest, total_s = one_offs[0], sum(one_off.excess_s for one_off in one_offs)
    kernel, words = longest.kernel, terms(profile)
    more = f" So did {counted(len(one_offs) - 1, f'other {words.item}')}." if len(one_offs) > 1 else ""
    yield (
        f"{label(kernel.short_name)} took {ms(longest.excess_s)} more in {WHERE[longest.phase]} of step {longest.step} "
        f"than in the others (its longest call {ms(kernel.max_s)}, their median {ms(kernel.median_s)}).{more} That is "
        "a one-off, such as a first call, for which code is compiled or loaded: "
        f"{percent_of(total_s, wall_s(profile))} of the time of all steps, and gone after more warm-up steps. What is "
        f"said of {words.time} below leaves it out."
    )


def _main_operators(profile: StepProfile) -> Iterator[str]:
    """Where the time of a CPU goes: operators that take a large part of it, whatever they do."""
    whole_s = kernel_s(profile)
    for row in profile.kernels if profile.work is Work.OPERATORS and whole_s else ():
        if row.phase is None and row.total_s / whole_s >= MIN_MAIN_SHARE:
            is_product = row.kind is KernelClass.MATMUL
            why = ": arithmetic, which neither fewer nor fused operators shorten" if is_product else ""
            yield (
                f"The operator {label(row.short_name)} ({row.kind}) takes {percent_of(row.total_s, whole_s)} of the "
                f"CPU time, {ms(row.total_s / profile.num_steps)} in {launches(row.count, profile)}{why}."
            )


def _late_phases(profile: StepProfile) -> Iterator[_Finding]:
    """Phases that the host limits, in a step that it does not limit."""
    for phase in profile.phases if not is_launch_bound(profile) else ():
        late_s, whole_s = idle_s(profile, IdleCause.LATE_LAUNCH, phase=phase.phase), sum(phase.wall_s)
        # at the start of a step nothing is launched yet, whatever the phase: that is a matter of the whole step
        if whole_s and late_s / whole_s >= MIN_LATE_SHARE and late_s / wall_s(profile) >= MIN_PAUSE_SHARE:
            yield _Finding(
                late_s,
                f"In {WHERE[phase.phase]} the CPU is the limit: of {ms(whole_s / profile.num_steps)} the GPU is idle "
                f"{percent_of(late_s, whole_s)}, because the next of its "
                f"{items(sum(phase.launches), profile)} was not launched yet.",
            )


def _waits(profile: StepProfile) -> Iterator[_Finding]:
    """Synchronisations within a phase that has kernels, whatever they cost: none is needed."""
    launched = {phase.phase for phase in profile.phases if any(phase.launches)}
    for phase in (phase for phase in _WAITING if phase in launched):
        calls = [call for call in profile.host_calls if call.is_wait and call.phase is phase]
        # a copy that is waited for is followed by the call that waits, unless it does both itself
        waits = [call for call in calls if not (call.is_launch and call.name.endswith("Async"))]
        if not (count := sum(call.count for call in waits)):
            continue
        waited_s = sum(call.total_s for call in calls)
        lost_s = idle_s(profile, IdleCause.HOST_WAITED, phase=phase)
        is_for_all = all(call.name.endswith("DeviceSynchronize") for call in waits)
        yield _Finding(
            lost_s,
            f"The host waits for the device in {WHERE[phase]}, {_times_per_step(count, profile)} "
            f"({_names(waits, len(waits) < len(calls))}): {ms(waited_s / profile.num_steps)} a step, after which the "
            f"GPU idles {ms(lost_s / profile.num_steps)} until the next launch. Is there "
            f"{'a torch.cuda.synchronize()' if is_for_all else 'an .item(), a .cpu() or a print of a tensor'}?",
        )


def _names(waits: Iterable[HostCalls], after_copy: bool) -> str:
    names = ", ".join(dict.fromkeys(label(call.name) for call in waits))
    return f"{names} after a copy to the host" if after_copy else names


def _times_per_step(count: int, profile: StepProfile) -> str:
    return "once a step" if count == profile.num_steps else f"{per_step(count, profile)} times a step"


def _pauses(profile: StepProfile) -> Iterator[_Finding]:
    """Times in which the host did nothing with CUDA, by phase, with the longest of them."""
    for phase in WHERE:
        paused_s = idle_s(profile, IdleCause.HOST_PAUSE, phase=phase)
        if not paused_s or paused_s < MIN_PAUSE_SHARE * wall_s(profile):
            continue
        gaps = [gap for gap in profile.gaps if gap.cause is IdleCause.HOST_PAUSE and gap.phase is phase]
        text = f"The GPU idles {_rounded_ms(paused_s / profile.num_steps)} in {WHERE[phase]} while the host pauses"
        if gaps:
            place = f" in {path_text(gaps[0].module)}" if gaps[0].module else ""
            text += f"; the longest time, {_rounded_ms(gaps[0].duration_s)}, before {label(gaps[0].after)}{place}"
        yield _Finding(
            paused_s,
            f"{text}. The host made no CUDA call meanwhile: it slept, read data, compiled or computed on the CPU.",
        )


def _rounded_ms(time_s: float) -> str:
    """Whole milliseconds from ten on: a sleep is no more exact than that."""
    return f"{time_s * 1e3:,.0f} ms" if time_s >= 10e-3 else ms(time_s)


def _between(profile: StepProfile, config: RunConfig | None) -> Iterator[_Finding]:
    advice = remedies(config, Remedy.COMPILE, Remedy.OPTIMIZER)
    lost_s = idle_s(profile, IdleCause.BETWEEN_KERNELS)
    count = sum(row.count for row in profile.idle if row.cause is IdleCause.BETWEEN_KERNELS)
    if lost_s and lost_s >= MIN_BETWEEN_SHARE * wall_s(profile):
        yield _Finding(
            lost_s,
            f"Between kernels that were launched in time the GPU idles {ms(lost_s / profile.num_steps)}, "
            f"{percent_of(lost_s, wall_s(profile))} of the step: {us(lost_s / count)} each, "
            f"{_times_per_step(count, profile)}. Fewer and longer kernels have less of it"
            f"{f' ({advice})' if advice else ''}.",
        )


def _unknown(profile: StepProfile) -> Iterator[_Finding]:
    """Kernels of unknown class, if they matter, with the longest by name."""
    rows = [kernel for kernel in profile.kernels if kernel.phase is None and kernel.kind is KernelClass.OTHER]
    total_s, whole_s, words = sum(row.total_s for row in rows), kernel_s(profile), terms(profile)
    if not rows or not whole_s or total_s / whole_s < MIN_UNKNOWN_SHARE:
        return
    longest = max(rows, key=lambda row: row.total_s)
    more = f"; {len(rows) - 1} more such have {ms((total_s - longest.total_s) / profile.num_steps)}"
    yield _Finding(
        total_s,
        f"The {words.item} {label(longest.short_name)}, of a kind that no rule knows, takes "
        f"{percent_of(longest.total_s, whole_s)} of the {words.time}: {ms(longest.total_s / profile.num_steps)} in "
        f"{launches(longest.count, profile)}{more if len(rows) > 1 else ''}.",
    )


def _phase(profile: StepProfile, phase: LaunchPhase) -> PhaseTimes | None:
    return next((row for row in profile.phases if row.phase is phase), None)


def _unattributed(profile: StepProfile) -> Iterator[_Finding]:
    phase, whole_s, words = _phase(profile, LaunchPhase.UNATTRIBUTED), kernel_s(profile), terms(profile)
    if phase is None or not whole_s or sum(phase.kernel_s) / whole_s < MIN_LEFT_SHARE:
        return
    lost_s = sum(phase.kernel_s)
    yield _Finding(
        lost_s,
        f"{percent_of(lost_s, whole_s)} of the {words.time}, {ms(lost_s / profile.num_steps)} in "
        f"{items(sum(phase.launches), profile)}, was launched in no phase: put it inside a range, or "
        "say which ranges are the phases (--forward, --backward, --optimizer).",
    )


def _recomputed(profile: StepProfile) -> Iterator[_Finding]:
    again_s = sum(sum(phase.recomputed_s) for phase in profile.phases)
    whole_s, words = kernel_s(profile), terms(profile)
    if again_s and again_s / whole_s >= MIN_LEFT_SHARE:
        yield _Finding(
            again_s,
            f"Backward does {ms(again_s / profile.num_steps)} of forward's work again (checkpointing), "
            f"{percent_of(again_s, whole_s)} of the step's {words.time}.",
        )


def _communication(profile: StepProfile) -> Iterator[_Finding]:
    sent_s = sum(row.total_s for row in profile.classes if row.kind is KernelClass.COMMUNICATION)
    whole_s = kernel_s(profile)
    if sent_s and sent_s / whole_s >= MIN_LEFT_SHARE:
        yield _Finding(
            sent_s,
            f"Communication takes {ms(sent_s / profile.num_steps)}, {percent_of(sent_s, whole_s)} of the "
            f"{terms(profile).time}; it may run beside other kernels.",
        )


def _full_precision(profile: StepProfile, config: RunConfig | None) -> Iterator[_Finding]:
    """Products in true fp32 on a device with tensor cores that take them in TF32 or in half precision."""
    if profile.work is Work.OPERATORS or (config is not None and config.precision is not Precision.FP32):
        return
    rows = [row for row in profile.kernels if row.phase is None and _is_full_precision(row)]
    full_s, whole_s = sum(row.total_s for row in rows), kernel_s(profile)
    if not full_s or full_s / whole_s < MIN_FULL_PRECISION_SHARE:
        return
    device = next(filter(None, map(find_device, profile.device_names)), None)
    if device is not None:
        faster = faster_precisions(device)
    else:
        faster = (Precision.TF32, Precision.BF16) if any(_HAS_TF32.search(row.name) for row in rows) else ()
    if faster:
        ways = " or ".join(use_of(precision, config) for precision in faster)
        yield _Finding(
            full_s,
            f"Matrix products in true fp32 take {percent_of(full_s, whole_s)} of the GPU time, "
            f"{ms(full_s / profile.num_steps)}, and leave the tensor cores idle: {ways} would use them"
            f"{'' if device is None else _promised(device, faster)}.",
        )


def _is_full_precision(row: KernelTimes) -> bool:
    return row.kind is KernelClass.MATMUL and _FULL_PRECISION.search(row.name) is not None and "tf32" not in row.name


def _promised(device: DeviceSpec, faster: Iterable[Precision]) -> str:
    """What the data sheet says of the precisions, beside fp32."""
    rates = {precision: device.peak_flops_per_s.get(precision) for precision in (*faster, Precision.FP32)}
    named = [f"{precision} {rate / 1e12:g}" for precision, rate in rates.items() if rate is not None]
    return f" ({device.names[0]}, by its data sheet: {', '.join(named)} TFLOP/s)"


def _optimizer(profile: StepProfile, config: RunConfig | None) -> Iterator[_Finding]:
    """A large optimizer; what to do depends on whether it is fused already, as its kernels and the run say."""
    phase, whole_s = _phase(profile, LaunchPhase.OPTIMIZER), wall_s(profile)
    if phase is None or not whole_s or sum(phase.wall_s) / whole_s < MIN_OPTIMIZER_SHARE:
        return
    fused_s = sum(row.total_s for row in profile.classes
                  if row.phase is phase.phase and row.kind is KernelClass.OPTIMIZER)  # fmt: skip
    is_written_out = fused_s < sum(phase.kernel_s) / 2 and Remedy.OPTIMIZER.is_open_to(config)
    remedy = f"; {Remedy.OPTIMIZER.named_for(config)} does the same in few" if is_written_out else ""
    yield _Finding(
        sum(phase.wall_s),
        f"The optimizer takes {ms(sum(phase.wall_s) / profile.num_steps)}, {percent_of(sum(phase.wall_s), whole_s)} of "
        f"the step, in {items(sum(phase.launches), profile)}{remedy}.",
    )


def _moving(profile: StepProfile, config: RunConfig | None) -> Iterator[_Finding]:
    """Work that a compiler fuses."""
    fuses = f": {Remedy.COMPILE.named_for(config)} fuses them" if Remedy.COMPILE.is_open_to(config) else ""
    fuses += f", {NOT_IN_USE}" if config is None else ""
    rows = [row for row in profile.classes if row.phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD)]
    moving_s, whole_s = sum(row.total_s for row in rows if row.kind in _MOVING), sum(row.total_s for row in rows)
    if moving_s and moving_s / whole_s >= MIN_MOVING_SHARE:
        yield _Finding(
            moving_s,
            f"In forward and backward, {percent_of(moving_s, whole_s)} of the {terms(profile).time}, "
            f"{ms(moving_s / profile.num_steps)}, goes to element-wise work, norms, sums and copies, which move values "
            f"more than they compute{fuses}.",
        )
