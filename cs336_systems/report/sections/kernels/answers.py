"""The questions that CS336 (assignment 2, profiling with nsys) asks of kernel traces, of one trace or several.

Every number is of one step; where several traces differ, it is the least and the largest, with the configurations that
have them. Matrix products include their helpers.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from operator import itemgetter
from typing import TypeAlias

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import IdleCause, KernelTimes, StepProfile
from cs336_systems.config import Phase
from cs336_systems.report.entries import labels
from cs336_systems.report.numbers import label, significant
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import (
    BACKWARD,
    FORWARD,
    FORWARD_AND_BACKWARD,
    class_shares,
    forward_wall_s,
    idle,
    kernel_s,
    top_kernel,
)
from cs336_systems.report.sections.kernels.shares import attention_rows
from cs336_systems.report.sections.kernels.words import launches, ms, terms
from cs336_systems.report.sentences import answers_markdown, percent_of

NUM_CLASSES = 4
"""Classes to name beside the matrix products."""
SAME_TIME = 0.02
"""Difference between trace and clock that two runs of one program may have."""
NO_BACKWARD = "There is no backward pass in this run: --mode train has one"
Named: TypeAlias = Mapping[str, Explained]
"""Traces by the names of their configurations."""


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


def answers(entries: Sequence[Explained]) -> str:
    """Markdown: each question as a heading, the answer over all configurations, then that of each."""
    is_known = all(entry.config for entry in entries)
    named = dict(zip(labels(entries) if is_known else ["this file"], entries, strict=True))
    sections = [
        (
            question.value,
            [*([("", answer(question, named))] if len(named) > 1 else []),
             *((name, answer(question, {name: entry})) for name, entry in named.items())],
        )
        for question in Question
    ]  # fmt: skip
    return answers_markdown("Where the time goes: the questions of CS336", sections)


def answer(question: Question, named: Named) -> str:
    """The answer over those traces that have a forward pass."""
    found = _with_time(named, FORWARD)
    if found:
        return _ANSWERS[question](found)
    return (
        f"The file {label(_first(named).source)} does not tell: nothing in it was launched in a phase called forward. "
        "Name the range around it (cs336 kernels FILE --forward RANGE), or record with --nsys or --profile."
    )


def _first(named: Named) -> StepProfile:
    return next(iter(named.values())).profile


def _with_time(named: Named, chosen: Sequence[LaunchPhase]) -> Named:
    """The traces in which a kernel ran in one of the phases."""
    return {name: entry for name, entry in named.items() if kernel_s(entry.profile, chosen) > 0}


def _each(named: Named, value: Callable[[Explained], float | None]) -> dict[str, float]:
    """The value of each trace that has one."""
    found = {name: value(entry) for name, entry in named.items()}
    return {name: value for name, value in found.items() if value is not None}


def _range(values: Mapping[str, float], text: Callable[[float], str]) -> str:
    """The least and the largest with their names; one value where they read the same."""
    low, high = min(values.items(), key=itemgetter(1)), max(values.items(), key=itemgetter(1))
    if text(low[1]) == text(high[1]):
        return text(low[1])
    return f"{text(low[1])} ({low[0]}) to {text(high[1])} ({high[0]})"


def _shares(values: Mapping[str, float]) -> str:
    return _range(values, lambda share: percent_of(share, 1))


def _in(part: Mapping[str, object], whole: Mapping[str, object], sentence: str) -> str:
    """The sentence, with the number of traces that it is about where that is not all of them; nothing for none."""
    if not part:
        return ""
    return (
        f" {sentence[0].upper()}{sentence[1:]}"
        if len(part) == len(whole)
        else f" In {len(part)} of {len(whole)} {sentence}"
    )


def _forward_time(named: Named) -> str:
    words = terms(_first(named))
    kernels_s = _each(named, lambda e: kernel_s(e.profile, (*FORWARD, LaunchPhase.LOSS)) / e.profile.num_steps)
    text = (
        f"By the trace, forward takes {_range(_each(named, lambda e: forward_wall_s(e.profile)), ms)}, "
        f"{_range(kernels_s, ms)} of it {words.time} in {words.items}."
    )
    differences = _each(named, _longer_than_clock)
    if not differences:
        return (
            f"{text} What the clock says without a profiler is not known here: run the same without --nsys, --profile."
        )
    clocks_s = _each(named, lambda e: e.clock_s(Phase.FORWARD) or None)
    text += f" Without a profiler, the clock says {_range(clocks_s, ms)}: the trace is {_range(differences, _longer)}."
    late_s = _each(named, lambda e: idle(e.profile, IdleCause.LATE_LAUNCH, *FORWARD).total_s / e.profile.num_steps)
    agree = {name: value for name, value in differences.items() if abs(value) <= SAME_TIME}
    late = {name: late_s[name] for name, value in differences.items()
            if name not in agree and late_s[name] >= value * clocks_s[name] > 0}  # fmt: skip
    rest = {name: value for name, value in differences.items() if name not in agree and name not in late}
    text += _in(agree, differences, f"they agree within {SAME_TIME * 100:g} %.")
    idle_for = _range(late, ms) if late else ""
    text += _in(
        late,
        differences,
        f"a profiler makes each launch slower, and for {idle_for} of forward the GPU was idle because the next kernel "
        "was not launched yet.",
    )
    return text + _in(
        rest, differences, f"they differ by more than {SAME_TIME * 100:g} %: see the warnings of both runs."
    )


def _longer_than_clock(entry: Explained) -> float | None:
    clock_s = entry.clock_s(Phase.FORWARD)
    return (forward_wall_s(entry.profile) or 0.0) / clock_s - 1 if clock_s else None


def _longer(fraction: float) -> str:
    return f"{significant(abs(fraction) * 100, 3)} % {'longer' if fraction >= 0 else 'shorter'}"


def _top_kernel(named: Named) -> str:
    text = f"In a forward pass, {_kernel_words(named, FORWARD)}."
    trained = _with_time(named, BACKWARD)
    if not trained:
        return f"{text} {NO_BACKWARD}."
    same = {name: entry for name, entry in trained.items() if _has_one_top(entry.profile)}
    others = {name: entry for name, entry in trained.items() if name not in same}
    for own, said in ((same, "it is the same one for forward and backward together"),
                      (others, "for forward and backward together it is another one")):  # fmt: skip
        text += _in(own, trained, f"{said}: {_kernel_words(own, FORWARD_AND_BACKWARD)}.") if own else ""
    return text


def _has_one_top(profile: StepProfile) -> bool:
    """Whether the longest kernel of forward is that of forward and backward together."""
    return _top(profile, FORWARD).name == _top(profile, FORWARD_AND_BACKWARD).name


def _top(profile: StepProfile, chosen: Sequence[LaunchPhase]) -> KernelTimes:
    if kernel := top_kernel(profile, chosen):
        return kernel
    raise ValueError(f"{profile.source}: a phase has time and no kernels. Explain the trace again.")


def _kernel_words(named: Named, chosen: Sequence[LaunchPhase]) -> str:
    """The longest kernel of the phases, with its share; where it is one in all traces with time and launches."""
    tops = {name: (entry.profile.num_steps, _top(entry.profile, chosen)) for name, entry in named.items()}
    shares = _shares({name: top.total_s / kernel_s(named[name].profile, chosen) for name, (_, top) in tops.items()})
    kernels, kinds = ({getattr(top, name) for _, top in tops.values()} for name in ("short_name", "kind"))
    classes = " or ".join(sorted(kinds))
    if len(kernels) > 1:
        return f"one of {len(kernels)} kernels ({classes}) with {shares}"
    times = _range({name: top.total_s / steps for name, (steps, top) in tops.items()}, ms)
    counts = {name: top.count / steps for name, (steps, top) in tops.items()}
    often = _range(counts, lambda count: launches(count, _first(named)))
    return f"{label(kernels.pop())} ({classes}) with {times}, {shares}, in {often}"


def _product_shares(named: Named, chosen: Sequence[LaunchPhase]) -> dict[str, float]:
    return _class_shares(named, KernelClass.MATMUL, chosen)


def _class_shares(named: Named, kind: KernelClass, chosen: Sequence[LaunchPhase]) -> dict[str, float]:
    return _each(named, lambda e: class_shares(e.profile, chosen).get(kind, 0.0))


def _other_classes(named: Named, chosen: Sequence[LaunchPhase]) -> list[KernelClass]:
    """Classes besides matrix products that ran in the phases, the one with the largest share first."""
    largest = {kind: max(_class_shares(named, kind, chosen).values()) for kind in KernelClass}
    found = [kind for kind in KernelClass if largest[kind] and kind is not KernelClass.MATMUL]
    return sorted(found, key=lambda kind: -largest[kind])


def _other_kernels(named: Named) -> str:
    words, kinds = terms(_first(named)), _other_classes(named, FORWARD)
    if not kinds:
        return f"None: all {words.items} of forward are matrix products."
    shares = {name: 1 - share for name, share in _product_shares(named, FORWARD).items()}
    told = [f"{_class_words(named, kind)} {_shares(_class_shares(named, kind, FORWARD))}" for kind in kinds]
    rest = len(told) - NUM_CLASSES
    more = f" and {rest} more class{'es' if rest > 1 else ''}" if rest > 0 else ""
    return (
        f"Besides matrix products, {_shares(shares)} of forward's {words.time}: {'; '.join(told[:NUM_CLASSES])}{more}."
    )


def _class_words(named: Named, kind: KernelClass) -> str:
    """The class, with the kernel of it that takes longest in forward, if that is one in all traces."""
    longest = set()
    for entry in named.values():
        rows = [row for row in entry.profile.kernels if row.phase in FORWARD and row.kind is kind]
        longest |= {label(max(rows, key=lambda row: row.total_s).short_name)} if rows else set()
    return f"{kind} ({longest.pop()})" if len(longest) == 1 else str(kind)


def _product_share(named: Named) -> str:
    step = tuple(LaunchPhase)
    trained, whole = _with_time(named, BACKWARD), _with_time(named, (LaunchPhase.OPTIMIZER,))
    chosen: list[tuple[str, Named, Sequence[LaunchPhase]]]
    chosen = [("of a forward pass", named, FORWARD), ("of a backward pass", trained, BACKWARD)]
    chosen += [("of the whole training step", whole, step)] if whole else [("of both", trained, FORWARD_AND_BACKWARD)]
    parts = [f"{_shares(_product_shares(own, phases))} {what}" for what, own, phases in chosen if own]
    text = f"Matrix products take {' and '.join(filter(None, (', '.join(parts[:-1]), parts[-1])))}."
    if not trained:
        return f"{text} {NO_BACKWARD}, and an optimizer."
    if not whole:
        return f"{text} There is no optimizer in this run: --mode train has one."
    kinds = sorted(
        {*_other_classes(whole, FORWARD), *_other_classes(whole, step)},
        key=lambda kind: -max(_class_shares(whole, kind, step).values()),
    )
    changes = [
        f"{kind} {_shares(_class_shares(whole, kind, FORWARD))} and {_shares(_class_shares(whole, kind, step))}"
        for kind in kinds[:NUM_CLASSES]
    ]
    return f"{text} The others, of forward and of the step: {'; '.join(changes)}." if changes else text


def _softmax(named: Named) -> str:
    rows = {name: row for name, entry in named.items() for row in attention_rows(entry)
            if row["phase"] in FORWARD and row["time_ratio"]}  # fmt: skip
    if not rows:
        return _no_softmax(_first(named))

    def over(key: str) -> dict[str, float]:
        return {name: row[key] for name, row in rows.items() if row[key]}

    softmax, products, whole = (over(f"{part}_ms_per_step") for part in ("softmax", "products", "whole"))
    text = (
        f"In a forward pass the softmax takes {_range(softmax, _ms)} and the matrix products {_range(products, _ms)}: "
        f"{_range(over('time_ratio'), _digits)} of their time."
    )
    if over("flops_ratio"):
        text += (
            f" It does {_range(over('flops_ratio'), _digits)} of their FLOPs, so for each FLOP it takes "
            f"{_range(over('time_per_flop_ratio'), _digits)} times as long: it moves the scores through memory and "
            "computes little on them."
        )
    else:
        text += " Its FLOPs are not known without the record of the run (cs336 kernels FILE --record JSON)."
    rest = {name: whole[name] - softmax[name] - products[name] for name in whole}
    some = {name: time_ms for name, time_ms in rest.items() if time_ms > 0}
    return f"{text} Scaling, masking and copies take another {_range(some, _ms)}." if some else text


def _ms(time_ms: float) -> str:
    return ms(time_ms / 1e3)


def _digits(value: float) -> str:
    return significant(value, 3)


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


_ANSWERS: Mapping[Question, Callable[[Named], str]] = {
    Question.FORWARD_TIME: _forward_time,
    Question.TOP_KERNEL: _top_kernel,
    Question.OTHER_KERNELS: _other_kernels,
    Question.PRODUCT_SHARE: _product_share,
    Question.SOFTMAX: _softmax,
}
