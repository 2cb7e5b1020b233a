"""What the work of a `StepProfile` is called, and how tables and sentences say its times, counts and places."""

from dataclasses import dataclass

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import StepProfile, Work
from cs336_systems.report.numbers import label, significant

WHERE = {
    LaunchPhase.DATA: "the making of the batch",
    LaunchPhase.FORWARD: "forward",
    LaunchPhase.LOSS: "the loss",
    LaunchPhase.BACKWARD: "backward",
    LaunchPhase.OPTIMIZER: "the optimizer",
    LaunchPhase.UNATTRIBUTED: "no phase",
}
"""How a sentence says where something happened."""
WHOLE_STEP = "step"
"""What stands in the place of a phase for all phases together."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the work of a profile is called."""

    item: str
    time: str

    @property
    def items(self) -> str:
        """The plural."""
        return f"{self.item}s"


def terms(profile: StepProfile) -> Terms:
    """Kernels and GPU time; operators and CPU time where the trace is of a CPU."""
    return Terms("operator", "CPU time") if profile.work is Work.OPERATORS else Terms("kernel", "GPU time")


def about(profile: StepProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    kind = "warm-up step" if profile.is_warmup else "step"
    steps = f"{profile.num_steps} {kind}" + ("s" if profile.num_steps != 1 else "")
    steps = "no steps in the file, so the whole of it counts as one" if profile.is_whole_trace else steps
    return f"{', '.join([*map(label, (profile.source, *profile.device_names)), steps])}."


def ms(time_s: float) -> str:
    """The time in ms for a sentence, to three digits."""
    return f"{significant(time_s * 1e3, 3)} ms"


def us(time_s: float) -> str:
    """The time in µs for a sentence, to three digits."""
    return f"{significant(time_s * 1e6, 3)} µs"


def per_step(count: int, profile: StepProfile) -> str:
    """A count per step: whole, or to three digits."""
    steps = profile.num_steps
    return significant(count / steps, 3) if count % steps else f"{count // steps:,}"


def launches(count: int, profile: StepProfile) -> str:
    """How often one kernel or operator ran per step: `4 launches`."""
    word = "call" if profile.work is Work.OPERATORS else "launch"
    plural = "s" if profile.work is Work.OPERATORS else "es"
    return f"{per_step(count, profile)} {word}{'' if count == profile.num_steps else plural}"


def items(count: int, profile: StepProfile) -> str:
    """How many kernels or operators there were per step: `4 kernels`, `1 kernel`."""
    words = terms(profile)
    return f"{per_step(count, profile)} {words.item if count == profile.num_steps else words.items}"
