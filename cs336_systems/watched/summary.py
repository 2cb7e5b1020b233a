"""What the record of a watched loop says of its steps."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..config import Mode, Phase
from ..loop_record import LoopRecord
from ..record import Measurement
from ..subject import WatchedLoop
from .marks import WatchedStep
from .tokens import AxisOrder


def measurements(steps: Sequence[Mapping[Phase, float]]) -> tuple[Measurement, ...]:
    """The times of each phase that any step has, 0 in those that do not have it.

    The optimizer's are those of the steps that have it. Where no forward pass was seen, nothing is
    known but the time that waited for data.
    """
    has_forward = any(Phase.FORWARD in times_s for times_s in steps)
    measured = []
    for phase in Phase:
        having = [times_s for times_s in steps if phase in times_s]
        if not having or not (has_forward or phase is Phase.DATA):
            continue
        counted = having if phase is Phase.OPTIMIZER else steps
        times_s = tuple(times_s.get(phase, 0.0) for times_s in counted)
        measured.append(Measurement(phase, times_s))
    return tuple(measured)


def all_measurements(steps: Sequence[WatchedStep]) -> tuple[Measurement, ...]:
    """The times of the phases, then those of the whole steps."""
    phases = measurements([step.times.phases_s for step in steps])
    return (*phases, Measurement(Phase.STEP, tuple(step.times.step_s for step in steps)))


def seen_of(steps: Sequence[WatchedStep], order: AxisOrder) -> LoopRecord:
    """What was seen besides times."""
    tokens = [step.tokens.count or 0 for step in steps]
    lengths = context_lengths(steps, order)
    later = [step for step in steps if step.between_s is not None]
    masked = [step for step in steps if step.tokens.padding is not None]
    return LoopRecord(
        tokens=tuple(tokens) if any(tokens) else (),
        context_lengths=(min(lengths), max(lengths)) if lengths else None,
        padding_tokens=sum(step.tokens.padding or 0 for step in masked) if masked else None,
        masked_tokens=sum(step.tokens.count or 0 for step in masked) if masked else None,
        between_data_s=tuple(step.between_data_s for step in later),
    )


def context_lengths(steps: Sequence[WatchedStep], order: AxisOrder) -> set[int]:
    """The lengths of the sequences of all forward passes; empty unless all are known."""
    shapes = {shape for step in steps for shape in step.tokens.shapes}
    lengths = {order.length(shape) for shape in shapes}
    known = {length for length in lengths if length is not None}
    return known if len(known) == len(lengths) else set()


def described(loop: WatchedLoop, steps: Sequence[WatchedStep], order: AxisOrder) -> WatchedLoop:
    """The loop with what was seen of it; what differs from step to step is left out."""
    phases = {phase for step in steps for phase in step.times.phases_s}
    tokens = [step.tokens.count or 0 for step in steps]
    lengths = context_lengths(steps, order)
    precisions = {step.tokens.precision for step in steps} - {None}
    return replace(
        loop,
        measured_steps=len(steps),
        mode=_mode(phases),
        precision=precisions.pop() if len(precisions) == 1 else None,
        context_length=lengths.pop() if len(lengths) == 1 else None,
        tokens_per_step=statistics.median_low(tokens) or None,
    )


def _mode(phases: set[Phase]) -> Mode | None:
    """How much of a training step the loop runs; None if no forward pass was seen."""
    if Phase.FORWARD not in phases:
        return None
    if Phase.OPTIMIZER in phases:
        return Mode.TRAIN
    return Mode.FORWARD_BACKWARD if Phase.BACKWARD in phases else Mode.FORWARD
