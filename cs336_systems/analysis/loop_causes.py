"""Why steps of a watched loop were slow, in a sentence."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from ..loop_record import Cause, LoopRank, LoopRecord, Pause, SlowStep
from ..record import RunRecord
from ..text import counted

MOST_DETAILS = 4
"""Most details of a cause that a sentence names."""
MIN_SHARE = 0.1
"""Least share of a slow step's excess that a cause with a time must have to be named."""
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
    if record.seen is None or not record.seen.slow_steps:
        return None
    slow = with_later_ranks(record.seen)
    total_s = sum(step.excess_s for step in slow)
    causes = defaultdict[Cause, list[Pause]](list)
    for step in slow:
        for pause in step.pauses:
            causes[pause.cause].append(pause)
    parts = [_part(cause, causes[cause]) for cause in Cause if cause in causes]
    explained_s = sum(pause.seconds or 0.0 for step in slow for pause in step.pauses)
    if total_s - explained_s > MIN_UNEXPLAINED * total_s:
        parts.append(f"{_duration(total_s - explained_s)} not explained, most in {_where(slow)}")
        parts += unseen_ranks(record.seen)
    steps = record.subject.measured_steps
    return f"{len(slow)} of {steps} steps took {_duration(total_s)} more: {'; '.join(parts)}"


def with_later_ranks(seen: LoopRecord) -> tuple[SlowStep, ...]:
    """The slow steps, with the rank that came later than usual to a backward that waits for it.

    This explains no more than by how much the backward took longer on the rank of the record.
    """
    later = _later_ranks(seen)
    first = seen.rank.first_step if seen.rank is not None else 0
    slow_steps = []
    for step in seen.slow_steps:
        pause = later.get(first + step.number)
        if pause is not None:
            pause = replace(pause, seconds=min(pause.seconds or 0.0, step.backward_s))
            step = replace(step, pauses=explained([*step.pauses, pause], step.excess_s))
        slow_steps.append(step)
    return tuple(slow_steps)


def _later_ranks(seen: LoopRecord) -> dict[int, Pause]:
    """The rank that came latest to a step, by the step's number among all measured steps of the
    loop; only where it came later than the slowest rank usually does.

    What makes the rank of the record later too is subtracted, because it waits less then.
    """
    here = seen.rank
    told = _ranks_with_times(seen)
    if here is None or here.own_s is None or len(told) < 2:
        return {}
    usual_s = max(rank.own_s or 0.0 for rank in told)
    late_here = _late_steps(here)
    later: dict[int, Pause] = {}
    for rank in told[1:]:
        for number, step in _late_steps(rank).items():
            more_s = step.excess_s + (rank.own_s or 0.0) - usual_s
            if number in late_here:
                more_s -= late_here[number].excess_s
            if more_s > 0 and (number not in later or more_s > (later[number].seconds or 0.0)):
                later[number] = _pause_of_rank(more_s, rank.rank, step)
    return later


def explained(pauses: Iterable[Pause], excess_s: float) -> tuple[Pause, ...]:
    """The pauses that explain an excess, each up to what is left of it; those within others come
    first, and those that hardly matter are left out.
    """
    left_s, kept = excess_s, []
    order = tuple(Cause)
    for pause in sorted(pauses, key=lambda pause: order.index(pause.cause)):
        if pause.seconds is None:
            kept.append(pause)
            continue
        seconds = min(pause.seconds, left_s)
        if seconds >= MIN_SHARE * excess_s:
            kept.append(replace(pause, seconds=round(seconds, 9)))
            left_s -= seconds
    return tuple(kept)


def _ranks_with_times(seen: LoopRecord) -> list[LoopRank]:
    """The ranks, this one first, whose time outside of waits was seen."""
    if seen.rank is None:
        return []
    return [rank for rank in (seen.rank, *seen.other_ranks) if rank.own_s is not None]


def _late_steps(rank: LoopRank) -> dict[int, SlowStep]:
    """The rank's late steps by their number among all measured steps of the loop."""
    return {rank.first_step + step.number: step for step in rank.late_steps}


def _pause_of_rank(seconds: float, rank: int, late: SlowStep) -> Pause:
    """That this rank came later, with the causes that it saw itself, else the longer phase."""
    reasons = [str(pause.cause) for pause in late.pauses] or [late.where]
    return Pause(cause=Cause.RANK, seconds=seconds, details=(f"rank {rank}: {', '.join(reasons)}",))


def unseen_ranks(seen: LoopRecord) -> list[str]:
    """How many ranks were seen, if not all; a later one among the others would not be named."""
    if seen.rank is None:
        return []
    count, total = len(_ranks_with_times(seen)), seen.rank.world_size
    if count == total:
        return []
    compared = count if count > 1 else 0
    return [f"whether a rank came later was seen of {compared} of {total} ranks"]


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
    notes = list(dict.fromkeys(chain.from_iterable(pause.details for pause in pauses)))
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
