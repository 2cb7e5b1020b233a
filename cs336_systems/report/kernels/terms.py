"""What the tables of a `StepProfile` share: their words, and how numbers are said."""

from dataclasses import dataclass

from cs336_systems.analysis.kernels.step_profile import StepProfile, Work
from cs336_systems.report.numbers import label, significant

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


def milliseconds(time_s: float) -> str:
    """The time in ms, for a cell."""
    return significant(time_s * 1e3) if time_s else "0"


def microseconds(time_s: float | None) -> str:
    """The time in us, for a cell; empty for None."""
    return "" if time_s is None else significant(time_s * 1e6)


def count_per_step(count: int, num_steps: int) -> str:
    """A whole number where the count divides by the steps, else their mean with two decimals."""
    return f"{count / num_steps:,.2f}" if count % num_steps else f"{count // num_steps:,}"
