"""How sentences about a `StepProfile` say times, shares and places."""

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import StepProfile, Work
from cs336_systems.report.kernels.terms import terms
from cs336_systems.report.numbers import significant

WHERE = {
    LaunchPhase.DATA: "the making of the batch",
    LaunchPhase.FORWARD: "forward",
    LaunchPhase.LOSS: "the loss",
    LaunchPhase.BACKWARD: "backward",
    LaunchPhase.OPTIMIZER: "the optimizer",
    LaunchPhase.UNATTRIBUTED: "no phase",
}
"""How a sentence says where something happened."""


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
