"""The course's questions answered for every configuration of a sweep, with what they have in common."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TypeAlias

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.config import Phase
from cs336_systems.report.entries import labels
from cs336_systems.report.kernels.answers import SAME_TIME, Question, answers
from cs336_systems.report.kernels.entries import Profiled
from cs336_systems.report.kernels.facts import (
    FORWARD_AND_BACKWARD,
    class_shares,
    forward_wall_s,
    softmax_cost,
    top_kernel,
)
from cs336_systems.report.numbers import significant
from cs336_systems.report.sentences import answers_markdown, percent_of
from cs336_systems.text import counted

Values: TypeAlias = Sequence[tuple[str, float]]
"""A value of each configuration, with its name."""


def sweep_answers(entries: Sequence[Profiled]) -> str:
    """Markdown: each question as a heading, what holds over the configurations, then the answer of each."""
    names = labels(entries)
    found = [
        {answer.question: answer.text for answer in answers(entry.profile, entry.clock_s(Phase.FORWARD))}
        for entry in entries
    ]
    sections = []
    for question in Question:
        summary = _SUMMARIES[question](entries, names) if len(entries) > 1 else ""
        own = [(name, texts[question]) for name, texts in zip(names, found, strict=True)]
        sections.append((question.value, [*([("", summary)] if summary else []), *own]))
    return answers_markdown("Where the time goes: the questions of CS336", sections)


def _forward_times(entries: Sequence[Profiled], names: Sequence[str]) -> str:
    differences = []
    for name, entry in zip(names, entries, strict=True):
        wall_s, clock_s = forward_wall_s(entry.profile), entry.clock_s(Phase.FORWARD)
        if wall_s and clock_s:
            differences.append((name, wall_s / clock_s - 1))
    if not differences:
        return ""
    agree = sum(abs(difference) <= SAME_TIME for _, difference in differences)
    name, largest = max(differences, key=lambda pair: abs(pair[1]))
    direction = "longer" if largest > 0 else "shorter"
    told = counted(len(differences), "configuration")
    return (
        f"Trace and clock agree within {SAME_TIME * 100:g} % in {agree} of {told}; they "
        f"differ most in {name}, where the trace is {percent_of(abs(largest), 1)} {direction}."
    )


def _top_kernels(entries: Sequence[Profiled], _: Sequence[str]) -> str:
    pairs = []
    for entry in entries:
        first, both = (top_kernel(entry.profile, phases) for phases in ([LaunchPhase.FORWARD], [*FORWARD_AND_BACKWARD]))
        if first and both:
            pairs.append((first, both))
    if not pairs:
        return ""
    kinds = " or ".join(dict.fromkeys(first.kind for first, _ in pairs))
    same = sum(first.name == both.name for first, both in pairs)
    different = len({first.name for first, _ in pairs})
    where = f"all {len(pairs)} configurations" if len(pairs) > 1 else "the one configuration that has any"
    return (
        f"The longest kernel of forward is of class {kinds} in {where} "
        f"({different} different kernel{'s' if different > 1 else ''}); it is also the longest of forward and backward "
        f"together in {same}."
    )


def _others(entries: Sequence[Profiled], names: Sequence[str]) -> str:
    shares = [
        (name, 1 - found.get(KernelClass.MATRIX_PRODUCT, 0.0))
        for name, entry in zip(names, entries, strict=True)
        if (found := class_shares(entry.profile, [LaunchPhase.FORWARD]))
    ]
    return f"Kernels besides matrix products take {_shares(shares)} of forward." if shares else ""


def _products(entries: Sequence[Profiled], names: Sequence[str]) -> str:
    def shares(among: LaunchPhase, phases: Sequence[LaunchPhase] | None) -> Values:
        return [
            (name, class_shares(entry.profile, phases).get(KernelClass.MATRIX_PRODUCT, 0.0))
            for name, entry in zip(names, entries, strict=True)
            if class_shares(entry.profile, [among])
        ]

    forward, step = shares(LaunchPhase.FORWARD, [LaunchPhase.FORWARD]), shares(LaunchPhase.OPTIMIZER, None)
    if not forward:
        return ""
    text = f"Matrix products take {_shares(forward)} of forward"
    return f"{text}, and {_shares(step)} of a whole training step." if step else f"{text}."


def _softmax(entries: Sequence[Profiled], names: Sequence[str]) -> str:
    ratios = [
        (name, cost.time_per_flop_ratio)
        for name, entry in zip(names, entries, strict=True)
        if (cost := softmax_cost(entry.profile)) and cost.time_per_flop_ratio
    ]
    if not ratios:
        return ""
    times = _range(ratios, lambda ratio: significant(ratio, 3))
    return f"For each FLOP the softmax takes {times} times as long as the matrix products."


def _shares(shares: Values) -> str:
    return _range(shares, lambda share: percent_of(share, 1))


def _range(values: Values, text: Callable[[float], str]) -> str:
    """The least and the largest with their names; one value where they read the same."""
    low, high = min(values, key=itemgetter(1)), max(values, key=itemgetter(1))
    if text(low[1]) == text(high[1]):
        return text(low[1])
    return f"{text(low[1])} ({low[0]}) to {text(high[1])} ({high[0]})"


_SUMMARIES: Mapping[Question, Callable[[Sequence[Profiled], Sequence[str]], str]] = {
    Question.FORWARD_TIME: _forward_times,
    Question.TOP_KERNEL: _top_kernels,
    Question.OTHER_KERNELS: _others,
    Question.PRODUCT_SHARE: _products,
    Question.SOFTMAX: _softmax,
}
