"""Words for the times, counts and places of a `StepProfile` in tables and sentences."""

from dataclasses import dataclass

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import StepProfile, Work
from cs336_systems.report.numbers import label, significant
from cs336_systems.text import inert_line

WHERE = {
    LaunchPhase.DATA: "the making of the batch",
    LaunchPhase.FORWARD: "forward",
    LaunchPhase.LOSS: "the loss",
    LaunchPhase.BACKWARD: "backward",
    LaunchPhase.COMMUNICATION: "communication",
    LaunchPhase.OPTIMIZER: "the optimizer",
    LaunchPhase.UNATTRIBUTED: "no phase",
}
"""Names of phases in sentences."""
WHOLE_STEP = "step"
"""Name of all phases together in the column of phases."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Names of the work of a profile."""

    item: str
    time: str

    @property
    def items(self) -> str:
        """The plural."""
        return f"{self.item}s"


def terms(profile: StepProfile) -> Terms:
    """Kernels and GPU time, or operators and CPU time for a trace of a CPU."""
    return Terms("operator", "CPU time") if profile.work is Work.OPERATORS else Terms("kernel", "GPU time")


def about(profile: StepProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    kind = "warm-up step" if profile.is_warmup else "step"
    steps = f"{profile.num_steps} {kind}" + ("s" if profile.num_steps != 1 else "")
    steps = "no steps in the file, so the whole of it counts as one" if profile.is_whole_trace else steps
    return f"{', '.join([*map(label, (profile.source, *profile.device_names)), steps])}."


def path_text(path: tuple[str, ...], cut: bool = True) -> str:
    """Ranges around a launch as `block.3 > ffn`; each name is `cut` to what a table has room for."""
    return " > ".join(label(inert_line(name)) if cut else name for name in path) or "outside of all ranges"


def ms(time_s: float) -> str:
    """The time in ms for a sentence, to three digits."""
    return f"{significant(time_s * 1e3, 3)} ms"


def us(time_s: float) -> str:
    """The time in µs for a sentence, to three digits."""
    return f"{significant(time_s * 1e6, 3)} µs"


def number(per_step: float) -> str:
    """A count per step: whole, or to three digits."""
    return significant(per_step, 3) if per_step % 1 else f"{per_step:,.0f}"


def times(per_step: float) -> str:
    """How often something happens in a step: `once a step`, `4 times a step`."""
    return "once a step" if per_step == 1 else f"{number(per_step)} times a step"


def launches(per_step: float, profile: StepProfile) -> str:
    """How often kernels or operators ran in a step: `4 launches`, `1 call`."""
    one, many = ("call", "calls") if profile.work is Work.OPERATORS else ("launch", "launches")
    return f"{number(per_step)} {one if per_step == 1 else many}"


def items(per_step: float, profile: StepProfile) -> str:
    """How many kernels or operators there were in a step: `4 kernels`, `1 kernel`."""
    words = terms(profile)
    return f"{number(per_step)} {words.item if per_step == 1 else words.items}"
