"""Why steps of a watched loop were slow, in a sentence."""

from collections import defaultdict
from collections.abc import Sequence

from ..loop_record import Cause, Pause, SlowStep
from ..record import RunRecord
from ..text import counted

MOST_DETAILS = 4
"""Most details of a cause that a sentence names."""
MIN_UNEXPLAINED = 0.05
"""Least share of the excess to say that it is not explained."""
NOUNS = {
    Cause.COLLECTION: "garbage collection",
    Cause.SAVING: "torch.save call",
    Cause.COMPILATION: "compilation",
    Cause.EVALUATION: "evaluation",
}
"""Nouns of causes that are counted."""
REMEDIES = {
    Cause.COLLECTION: "gc.freeze() after the warm-up, or gc.collect() where it does not matter",
    Cause.COMPILATION: "pad, or mark the dimension dynamic",
    Cause.DATA: "more workers or prefetching",
    Cause.ALLOCATOR: "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lengths of few kinds",
}
"""What helps against a cause, where that is known."""


def slow_sentence(record: RunRecord) -> str | None:
    """How many steps were slow, and what was seen in them; None if none was."""
    slow = record.seen.slow_steps if record.seen else ()
    if not slow:
        return None
    total_s = sum(step.excess_s for step in slow)
    causes = defaultdict[Cause, list[Pause]](list)
    for step in slow:
        for pause in step.pauses:
            causes[pause.cause].append(pause)
    parts = [_part(cause, causes[cause]) for cause in Cause if cause in causes]
    explained_s = sum(pause.seconds or 0.0 for step in slow for pause in step.pauses)
    if total_s - explained_s > MIN_UNEXPLAINED * total_s:
        parts.append(f"{_duration(total_s - explained_s)} not explained, most in {_where(slow)}")
    steps = record.subject.measured_steps
    return f"{len(slow)} of {steps} steps took {_duration(total_s)} more: {'; '.join(parts)}"


def _part(cause: Cause, pauses: Sequence[Pause]) -> str:
    """One cause with its count, time, details and remedy."""
    seconds = [pause.seconds for pause in pauses if pause.seconds is not None]
    noun = NOUNS.get(cause)
    if noun is None:
        text = f"{cause} in {counted(len(pauses), 'step')}"
    else:
        text = counted(sum(pause.count for pause in pauses), noun)
    if seconds:
        text += f" {_duration(sum(seconds))}"
    notes = list(dict.fromkeys(detail for pause in pauses for detail in pause.details))
    if len(notes) > MOST_DETAILS:
        notes[MOST_DETAILS:] = ["..."]
    details = ", ".join(notes)
    remedy = REMEDIES.get(cause)
    inside = ": ".join(filter(None, (details, remedy)))
    return f"{text} ({inside})" if inside else text


def _where(slow: Sequence[SlowStep]) -> str:
    """The part in which most of the steps with an unexplained excess took longer."""
    excess_s: defaultdict[str, float] = defaultdict(float)
    for step in slow:
        explained_s = sum(pause.seconds or 0.0 for pause in step.pauses)
        excess_s[step.where] += step.excess_s - explained_s
    return max(excess_s, key=excess_s.__getitem__)


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
