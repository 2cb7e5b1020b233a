"""The questions that CS336 (assignment 2, profiling with nsys) asks of kernel traces, answered for one and for a sweep.

Every number is of one step. A product is a matrix product, with its helpers.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from operator import itemgetter
from typing import TypeAlias

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import (
    IdleCause,
    StepProfile,
)
from cs336_systems.config import Phase
from cs336_systems.report.entries import labels
from cs336_systems.report.numbers import label, significant
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.sections.kernels.facts import (
    FORWARD_AND_BACKWARD,
    TopKernel,
    class_shares,
    forward_wall_s,
    idle_s,
    softmax_cost,
    top_kernel,
)
from cs336_systems.report.sections.kernels.words import launches, ms, terms
from cs336_systems.report.sentences import answers_markdown, percent_of
from cs336_systems.text import counted

NUM_CLASSES = 4
"""Classes to name beside the matrix products."""
SAME_TIME = 0.02
"""Difference between trace and clock that two runs of one program may have."""
Values: TypeAlias = Sequence[tuple[str, float]]
"""A value of each configuration, with its name."""


class Question(Enum):
    """The course's questions, in its order."""

    FORWARD_TIME = "What is the total time of the forward pass, and does the host's clock agree?"
    TOP_KERNEL = (
        "Which kernel takes the most GPU time in the forward pass, how often is it launched in one, and is it the same "
        "one for forward and backward together?"
    )
    OTHER_KERNELS = "Which kernels besides matrix products matter in the forward pass?"
    PRODUCT_SHARE = (
        "Which share of the time goes to matrix products in a forward pass alone, and how does it change in a whole "
        "training step? And the other kernels?"
    )
    SOFTMAX = "Inside attention, how does the softmax compare with the matrix products, in time and in FLOPs?"


def answers(profile: StepProfile, forward_clock_s: float | None = None) -> dict[Question, str]:
    """Each of the questions with its answer; `forward_clock_s` is forward's mean time in the run without a profiler."""
    if not _time_s(profile, [LaunchPhase.FORWARD]) > 0:
        return dict.fromkeys(Question, _no_forward(profile))
    return {
        Question.FORWARD_TIME: _forward_time(profile, forward_clock_s),
        Question.TOP_KERNEL: _top_kernel(profile),
        Question.OTHER_KERNELS: _other_kernels(profile),
        Question.PRODUCT_SHARE: _product_share(profile),
        Question.SOFTMAX: _softmax(profile),
    }


def sweep_answers(entries: Sequence[Profiled]) -> str:
    """Markdown: each question as a heading, what holds over the configurations, then the answer of each."""
    names = labels(entries)
    found = [answers(entry.profile, entry.clock_s(Phase.FORWARD)) for entry in entries]
    sections = []
    for question in Question:
        summary = _SUMMARIES[question](entries, names) if len(entries) > 1 else ""
        own = [(name, texts[question]) for name, texts in zip(names, found, strict=True)]
        sections.append((question.value, [*([("", summary)] if summary else []), *own]))
    return answers_markdown("Where the time goes: the questions of CS336", sections)


def _time_s(profile: StepProfile, phases: Sequence[LaunchPhase]) -> float:
    """Kernel time of the phases, over all steps."""
    return sum(sum(phase.kernel_s) for phase in profile.phases if phase.phase in phases)


def _has(profile: StepProfile, phase: LaunchPhase) -> bool:
    return _time_s(profile, [phase]) > 0


def _no_forward(profile: StepProfile) -> str:
    return (
        f"The file {label(profile.source)} does not tell: nothing in it was launched in a phase called forward. "
        "Name the range around it (cs336 kernels FILE --forward RANGE), or record with --nsys or --profile."
    )


def _forward_time(profile: StepProfile, forward_clock_s: float | None) -> str:
    words, wall = terms(profile), forward_wall_s(profile) or 0.0
    kernel_s = _time_s(profile, (LaunchPhase.FORWARD, LaunchPhase.LOSS)) / profile.num_steps
    text = f"By the trace, forward takes {ms(wall)}, {ms(kernel_s)} of it {words.time} in {words.items}."
    if not forward_clock_s:
        return (
            f"{text} What the clock says without a profiler is not known here: run the same without --nsys, --profile."
        )
    difference = wall / forward_clock_s - 1
    text += f" Without a profiler, the clock says {ms(forward_clock_s)}: the trace is {_signed_percent(difference)}."
    if abs(difference) <= SAME_TIME:
        return f"{text} They agree."
    late_s = idle_s(profile, IdleCause.LATE_LAUNCH, phase=LaunchPhase.FORWARD) / profile.num_steps
    if late_s >= difference * forward_clock_s > 0:
        return (
            f"{text} A profiler makes each launch slower, and for {ms(late_s)} of forward the GPU was idle because the "
            "next kernel was not launched yet."
        )
    return f"{text} They differ by more than {SAME_TIME * 100:g} %: see the warnings of both runs."


def _signed_percent(fraction: float) -> str:
    return f"{significant(abs(fraction) * 100, 3)} % {'longer' if fraction >= 0 else 'shorter'}"


def _kernel_words(profile: StepProfile, kernel: TopKernel, whole_s: float) -> str:
    """Name, class, time and share of a kernel."""
    return (
        f"{label(kernel.short_name)} ({kernel.kind}) with {ms(kernel.total_s / profile.num_steps)}, "
        f"{percent_of(kernel.total_s, whole_s)}, in {launches(kernel.count, profile)}"
    )


def _top_kernel(profile: StepProfile) -> str:
    forward = [LaunchPhase.FORWARD]
    first, both = top_kernel(profile, forward), top_kernel(profile, FORWARD_AND_BACKWARD)
    if first is None or both is None:
        raise ValueError(f"{profile.source}: forward has time and no kernels. Explain the trace again.")
    text = f"In a forward pass, {_kernel_words(profile, first, _time_s(profile, forward))}."
    if not _has(profile, LaunchPhase.BACKWARD):
        return f"{text} There is no backward pass in this run: --mode train has one."
    if both.name == first.name:
        return f"{text} It is the same one for forward and backward together: {_both(profile, both)}."
    return f"{text} For forward and backward together it is another one: {_both(profile, both)}."


def _both(profile: StepProfile, kernel: TopKernel) -> str:
    return _kernel_words(profile, kernel, _time_s(profile, FORWARD_AND_BACKWARD))


def _other_kernels(profile: StepProfile) -> str:
    forward, words = [LaunchPhase.FORWARD], terms(profile)
    shares = class_shares(profile, forward)
    products = shares.pop(KernelClass.MATMUL, 0.0)
    named = [f"{_class_words(profile, kind)} {percent_of(part, 1)}" for kind, part in shares.items()]
    rest = len(named) - NUM_CLASSES
    more = f" and {rest} more class{'es' if rest > 1 else ''}" if rest > 0 else ""
    if not named:
        return f"None: all {words.items} of forward are matrix products."
    return (
        f"Besides matrix products, {percent_of(1 - products, 1)} of forward's {words.time}: "
        f"{'; '.join(named[:NUM_CLASSES])}{more}."
    )


def _class_words(profile: StepProfile, kind: KernelClass) -> str:
    """The class, with the kernel of it that takes longest in forward."""
    rows = [row for row in profile.kernels if row.phase is LaunchPhase.FORWARD and row.kind is kind]
    longest = max(rows, key=lambda row: row.total_s, default=None)
    return f"{kind} ({label(longest.short_name)})" if longest else str(kind)


def _product_share(profile: StepProfile) -> str:
    forward = class_shares(profile, [LaunchPhase.FORWARD])
    text = f"Matrix products take {_product(forward)} of a forward pass"
    if not _has(profile, LaunchPhase.BACKWARD):
        return f"{text}. There is no backward pass in this run: --mode train has one, and an optimizer."
    text += f", {_product(class_shares(profile, [LaunchPhase.BACKWARD]))} of a backward pass"
    if not _has(profile, LaunchPhase.OPTIMIZER):
        both = _product(class_shares(profile, FORWARD_AND_BACKWARD))
        return f"{text} and {both} of both. There is no optimizer in this run: --mode train has one."
    step = class_shares(profile)
    others = sorted(({*forward, *step} - {KernelClass.MATMUL}), key=lambda kind: -step.get(kind, 0.0))
    changes = [
        f"{kind} from {percent_of(forward.get(kind, 0.0), 1)} to {percent_of(step.get(kind, 0.0), 1)}"
        for kind in others[:NUM_CLASSES]
    ]
    said = f" From forward to the step: {'; '.join(changes)}." if changes else ""
    return f"{text} and {_product(step)} of the whole training step.{said}"


def _product(shares: Mapping[KernelClass, float]) -> str:
    return percent_of(shares.get(KernelClass.MATMUL, 0.0), 1)


def _softmax(profile: StepProfile) -> str:
    cost = softmax_cost(profile)
    if cost is None:
        return _no_softmax(profile)
    steps, rest_s = profile.num_steps, cost.whole_s - cost.softmax_s - cost.products_s
    text = (
        f"In a forward pass the softmax takes {ms(cost.softmax_s / steps)} and the matrix products "
        f"{ms(cost.products_s / steps)}: {significant(cost.time_ratio, 3)} of their time."
    )
    if cost.flops_ratio is None or cost.time_per_flop_ratio is None:
        text += " Its FLOPs are not known without the record of the run (cs336 kernels FILE --record JSON)."
    else:
        text += (
            f" It does {significant(cost.flops_ratio, 3)} of their FLOPs, so for each FLOP it takes "
            f"{significant(cost.time_per_flop_ratio, 3)} times as long: it moves the scores through memory and "
            "computes little on them."
        )
    return f"{text} Scaling, masking and copies take another {ms(rest_s / steps)}." if rest_s > 0 else text


def _no_softmax(profile: StepProfile) -> str:
    if any(row.kind is KernelClass.ATTENTION for row in profile.classes):
        return (
            "Attention is fused: one kernel holds scores, softmax and values. Run with --attention naive to see them."
        )
    return (
        f"The file {label(profile.source)} does not tell: it has no ranges around attention's scores, softmax and "
        "values. Run with --attention naive and without --compile, or name the ranges (--scores, --softmax, --values "
        "RANGE)."
    )


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
        (name, 1 - found.get(KernelClass.MATMUL, 0.0))
        for name, entry in zip(names, entries, strict=True)
        if (found := class_shares(entry.profile, [LaunchPhase.FORWARD]))
    ]
    return f"Kernels besides matrix products take {_shares(shares)} of forward." if shares else ""


def _products(entries: Sequence[Profiled], names: Sequence[str]) -> str:
    def shares(among: LaunchPhase, phases: Sequence[LaunchPhase] | None) -> Values:
        return [
            (name, class_shares(entry.profile, phases).get(KernelClass.MATMUL, 0.0))
            for name, entry in zip(names, entries, strict=True)
            if class_shares(entry.profile, [among])
        ]

    forward, step = shares(LaunchPhase.FORWARD, [LaunchPhase.FORWARD]), shares(LaunchPhase.OPTIMIZER, None)
    if not forward:
        return ""
    text = f"Matrix products take {_shares(forward)} of forward"
    return f"{text}, and {_shares(step)} of a whole training step." if step else f"{text}."


def _softmax_ratios(entries: Sequence[Profiled], names: Sequence[str]) -> str:
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
    Question.SOFTMAX: _softmax_ratios,
}
