"""What the sentences about a profile are made of: numbers per step in words, and advice that looks
at what the file shows to be in use.
"""

from collections.abc import Collection

from ....analysis.kernels.classes import KernelClass, is_generated
from ....analysis.kernels.phases import LaunchPhase, PhaseSource
from ....analysis.kernels.step_profile import StepProfile, Work
from ....analysis.remedies import Remedy, remedies
from ...section import Finding
from ...words import percent_of, significant
from .entry import Explained
from .gains import gain_s
from .sums import added, collectives_s, copies_alone_s, kernel_s, num_launches, terms

MIN_SHARE = 0.01
"""Smallest reported share of a step: of idle times in the step (a hiccup of a millisecond in ten
steps stays below), of kernels in no phase or of unknown class in the kernels' time, of
communication and its exposed part.
"""
MIN_IN_USE = 0.5
"""Smallest share of the kernels from CUDA graphs, or of the time of collectives beside others, that
shows these to be in use.
"""

WHERE = {
    LaunchPhase.FORWARD: "forward",
    LaunchPhase.LOSS: "the loss",
    LaunchPhase.BACKWARD: "backward",
    LaunchPhase.WEIGHT_GRADIENTS: "the weights' gradients",
    LaunchPhase.COMMUNICATION: "communication",
    LaunchPhase.OPTIMIZER: "the optimizer",
    LaunchPhase.DATA: "the making of the batch",
    LaunchPhase.UNATTRIBUTED: "no phase",
}
"""Names of phases in sentences."""


_OF_ALL_COMPUTATION = ", the time of all kernels of forward and backward"
_SHORTENS = {Remedy.BF16: _OF_ALL_COMPUTATION, Remedy.FP16: _OF_ALL_COMPUTATION}
"""What remedies shorten, where that is more than the kernels that the sentence is about."""


def matters(part: float, least_share: float, whole: float) -> bool:
    """Whether there is a part at all, and it is at least this share of the whole."""
    return part > 0 and part >= least_share * whole


def ms(time_s: float) -> str:
    """The time in ms, to three digits."""
    return f"{significant(time_s * 1e3, 3)} ms"


def us(time_s: float) -> str:
    """The time in µs, to three digits."""
    return f"{significant(time_s * 1e6, 3)} µs"


def in_use(profile: StepProfile) -> set[Remedy]:
    """What the file shows that the program does already, or has no use for."""
    seen = set()
    kernels = profile.kernels_of(None)
    if profile.is_compiled or any(is_generated(kernel.name) for kernel in kernels):
        seen.add(Remedy.COMPILE)
    kinds = {kernel.kind for kernel in kernels}
    if KernelClass.ATTENTION in kinds or KernelClass.SOFTMAX not in kinds:
        seen.add(Remedy.ATTENTION)
    phases = {times.phase for times in profile.phases if any(times.launches)}
    if KernelClass.OPTIMIZER in kinds or LaunchPhase.OPTIMIZER not in phases:
        seen.add(Remedy.OPTIMIZER)
    if profile.graph_share >= MIN_IN_USE:
        seen.add(Remedy.GRAPHS)
    whole_s, exposed_s = collectives_s(profile), collectives_s(profile, exposed=True)
    # without a backward there is nothing to run beside
    if LaunchPhase.BACKWARD not in phases or whole_s - exposed_s >= MIN_IN_USE * whole_s:
        seen.add(Remedy.OVERLAP)
    return seen


class Figures:
    """The numbers of one profile, in words. Times are sums over all steps; sentences give them per
    step.
    """

    def __init__(self, entry: Explained) -> None:
        self.entry, self.profile, self.config = entry, entry.profile, entry.config
        profile = entry.profile
        self.item, self.time = terms(profile)
        self.whole = "recording" if profile.is_whole_trace else "step"
        self.on_device = profile.work is Work.KERNELS
        self.span = entry.span()
        self.kernel_s = kernel_s(profile)
        self.step_s = self.span.whole_s
        # of the whole step; rows with a phase have the same launches again
        self.kernels = profile.kernels_of(None)
        self.copies_s = copies_alone_s(profile) if self.on_device else 0.0
        self.has_backward = any(times.phase is LaunchPhase.BACKWARD for times in profile.phases)
        self.in_use: Collection[Remedy] | None = None
        if self.on_device and self.config is None:  # a configuration knows better
            self.in_use = in_use(profile)
        if matters(self.copies_s, MIN_SHARE, self.step_s):
            self.time = "kernels' time"  # not all of the GPU's

    def ms(self, total_s: float) -> str:
        """The time per step, of a time over all steps."""
        return ms(total_s / self.profile.num_steps)

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
        plural = "es" if noun.endswith("ch") else "s"
        return f"{number} {noun}{plural}"

    def advice(self, *candidates: Remedy) -> str:
        """The flags of the ways that are open to the run, with the most that each gains, in
        brackets after a space; empty if there are none, or if the times are in doubt.
        """
        ways: list[str] = []
        if self.profile.lacks_device or self.profile.doubts:
            return ""
        for remedy in candidates:
            named = remedies(self.config, remedy, in_use=self.in_use)
            # what else is advised, a larger batch, makes no step shorter
            if named and (self.config is None or remedy.applied_to(self.config) is not None):
                named += f": at most {self.ms(gain_s(self.entry, remedy))} less"
                named += _SHORTENS.get(remedy, "")
            if named:
                ways.append(named)
        return f" ({', '.join(ways)})" if ways else ""

    def where(self, phase: LaunchPhase) -> str:
        """The name of the phase in a sentence; without ranges of it, forward is all that comes
        before backward.
        """
        if phase is LaunchPhase.FORWARD and PhaseSource.THREADS in self.profile.phases_from:
            return "forward (the time before backward)" if self.has_backward else "forward"
        return WHERE[phase]

    def finding(self, code: str, text: str, cost_s: float = 0.0, **total: float) -> Finding:
        """A finding whose numbers are these totals over all steps: those that end in `_s` and in
        `_count` per step, others as they are.
        """
        steps = self.profile.num_steps
        numbers = {}
        for name, value in total.items():
            is_total = name.endswith(("_s", "_count"))
            numbers[name] = value / steps if is_total else value
        return Finding(code=code, text=text, cost=cost_s, numbers=numbers)

    def launches(self) -> int:
        """Number of kernels in all steps."""
        return num_launches(*self.profile.phases)

    def launching(self) -> tuple[int, float]:
        """Number and time of the host's calls that launch."""
        calls = added(call for call in self.profile.host_calls if call.is_launch)
        return calls.count, calls.total_s
