"""Warnings about the times of a watched loop, with advice for somebody's own loop: it has no flags,
and its steps may grow, evaluate and wait.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..config import Phase
from ..loop_record import LoopRank, MemoryGrowth
from ..record import Measurement, RunWarning, WarningCode
from .warnings import LOOP_STEPS, MIN_DRIFT_STEPS, timing_warnings

MOST_OF_IT = 0.8
"""Least share of the growth of the steps for a phase to have grown alone."""
MIN_BETWEEN = 0.1
"""Least share of a loop's time between its steps, without data, to say that it limits the loop."""
MIN_LAG = 0.1
"""Least share of its own time by which a rank is slow."""
GROWTH = {
    Phase.FORWARD: "look for hooks that pile up, a history or a cache that is kept, longer "
    "sequences",
    Phase.BACKWARD: "look for a graph that is kept from step to step (a hidden state that is not "
    "detached), longer sequences",
    Phase.OPTIMIZER: "look for parameters or groups that are added from step to step",
    Phase.DATA: "look at what the data set keeps, and at its files",
    Phase.OTHER: "look for lists that grow: logged losses, metrics over all steps so far",
}
"""What may make a phase longer from step to step."""
IN_NO_PHASE = "look at the clocks and the temperature, and at other programs"
"""What makes all phases longer alike."""
FALLING = "the first steps are slower: give watch(...) more warmup_steps"


def loop_warnings(
    measurements: Sequence[Measurement], launched_s: Mapping[Phase, float]
) -> tuple[RunWarning, ...]:
    """The warnings about the times of the phases and of the whole steps, which come last.

    `launched_s` are the times of the phases that wait for launches.
    """
    times_s = measurements[-1].times_s
    told = []
    for warning in timing_warnings(times_s, launched_s, repeated=LOOP_STEPS):
        if warning.code is WarningCode.DRIFT:
            message = warning.message.removesuffix(LOOP_STEPS.advice)
            warning = replace(warning, message=message + growth_advice(measurements))
        told.append(warning)
    return tuple(told)


def growth_advice(measurements: Sequence[Measurement]) -> str:
    """Where steps that change from the first to the last ones do so, and what to look at."""
    grown_s = {
        measurement.phase: _growth_s(measurement.times_s)
        for measurement in measurements
        if len(measurement.times_s) >= MIN_DRIFT_STEPS
    }
    step_s = grown_s.pop(Phase.STEP, 0.0)
    if step_s <= 0:
        return FALLING
    if not grown_s:
        return IN_NO_PHASE
    phase = max(grown_s, key=grown_s.__getitem__)
    share = grown_s[phase] / step_s
    if share < MOST_OF_IT:
        return IN_NO_PHASE
    return f"{min(share, 1):.0%} of the growth is in {phase}: {GROWTH[phase]}"


def between_verdict(step_s: float, between_s: float) -> str | None:
    """That the time between steps, without waits for data, limits the loop; None if it does not.

    Both are means of a step.
    """
    if between_s < MIN_BETWEEN * (step_s + between_s):
        return None
    return (
        f"{1e3 * between_s:.3g} ms between steps of {1e3 * step_s:.3g} ms limit the loop: look at "
        "what it does outside of its steps (evaluation, logging, saving, preparing batches)"
    )


def memory_sentence(growth: MemoryGrowth) -> str:
    """By how much a step the memory rises, since when, and what may hold it."""
    text = (
        f"memory rises by {_bytes(growth.bytes_per_step)} a step since measured step "
        f"{growth.since_step + 1}"
    )
    if not growth.holders:
        return f"{text}; what holds it was not seen"
    advice = "keep their values, not the tensors"
    if any("graphs" in holder for holder in growth.holders):
        advice = "keep loss.item() or loss.detach() instead"
    return f"{text}: {', '.join(growth.holders)} are alive: {advice}"


def rank_sentence(ranks: Sequence[LoopRank]) -> str | None:
    """Which rank is slow by itself; None where none is, or fewer than two have told."""
    told = [(rank.own_s, rank.rank) for rank in ranks if rank.own_s is not None]
    if len(told) < 2:
        return None
    slowest_s, slowest = max(told)
    others_s = statistics.median([own_s for own_s, rank in told if rank != slowest])
    if slowest_s - others_s < MIN_LAG * slowest_s:
        return None
    return (
        f"rank {slowest} is slow: {1e3 * slowest_s:.4g} ms a step outside of backward and the "
        f"optimizer, {1e3 * others_s:.4g} ms on the others, which wait for it"
    )


def _bytes(count: float) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**19 else f"{count / 2**10:.3g} KiB"


def _growth_s(times_s: Sequence[float]) -> float:
    """How much longer the second half is than the first one, by their medians."""
    half = len(times_s) // 2
    return statistics.median(times_s[-half:]) - statistics.median(times_s[:half])
