"""The questions that CS336 (assignment 2, profiling with nsys) asks of kernel traces, of one trace or several.

Every number is of one step; where several traces differ, it is the least and the largest, with the configurations that
have them. Matrix products include their helpers.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import pandas as pd

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import IdleCause, StepProfile
from cs336_systems.config import Phase
from cs336_systems.report.columns import Row
from cs336_systems.report.entries import labels
from cs336_systems.report.formats import answers_markdown
from cs336_systems.report.numbers import between, label, percent_of, significant
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import (
    class_shares,
    forward_wall_s,
    idle,
    kernel_s,
    launches,
    ms,
    terms,
    top_kernel,
)
from cs336_systems.report.sections.kernels.tables import attention_part_rows

FORWARD, BACKWARD, BOTH, OPTIMIZER, STEP = "forward", "backward", "forward and backward", "optimizer", "step"
PARTS: Mapping[str, Sequence[LaunchPhase]] = {
    FORWARD: [LaunchPhase.FORWARD],
    BACKWARD: [LaunchPhase.BACKWARD],
    BOTH: [LaunchPhase.FORWARD, LaunchPhase.LOSS, LaunchPhase.BACKWARD],
    OPTIMIZER: [LaunchPhase.OPTIMIZER],
    STEP: [*LaunchPhase],
}
"""Parts of a step that the questions are about."""
NUM_CLASSES = 4
"""Most classes that are named besides the matrix products."""
SAME_TIME = 0.02
"""Largest relative difference between trace and clock that counts as agreement, since both are runs of their own."""
NO_BACKWARD = "There is no backward pass in this run: --mode train has one"


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
    names = labels(entries) if is_known else ["this file"]
    facts, sections = facts_of(dict(zip(names, entries, strict=True))), []
    for question in Question:
        own = [(name, answer(question, facts.iloc[[i]], entries[i].profile)) for i, name in enumerate(names)]
        together = [("", answer(question, facts, entries[0].profile))] if len(own) > 1 else []
        sections.append((question.value, [*together, *own]))
    return answers_markdown("Where the time goes: the questions of CS336", sections)


def answer(question: Question, facts: pd.DataFrame, profile: StepProfile) -> str:
    """The answer over the traces that have a forward pass; the `profile` of one of them says whether it has kernels."""
    found = facts[facts[f"{FORWARD} time"] > 0]
    if not found.empty:
        return _ANSWERS[question](found, profile)
    return (
        f"The file {label(profile.source)} does not tell: nothing in it was launched in a phase called forward. "
        "Name the range around it (cs336 kernels FILE --forward RANGE), or record with --nsys or --profile."
    )


def facts_of(named: Mapping[str, Explained]) -> pd.DataFrame:
    """The facts about all traces: a row for each, whose index is its name."""
    return pd.DataFrame([_facts(entry) for entry in named.values()], index=list(named))


def _facts(entry: Explained) -> Row:
    """All numbers about one trace in the answers: seconds and launches per step, shares of the kernels' time."""
    profile, steps = entry.profile, entry.profile.num_steps
    found: Row = {
        "wall": forward_wall_s(profile),
        "in kernels": kernel_s(profile, (LaunchPhase.FORWARD, LaunchPhase.LOSS)) / steps,
        "clock": entry.clock_s(Phase.FORWARD, entry.plain) or None,
        "late": idle(profile, IdleCause.LATE_LAUNCH, LaunchPhase.FORWARD).total_s / steps,
    }
    for part, chosen in PARTS.items():
        time_s, shares, top = kernel_s(profile, chosen), class_shares(profile, chosen), top_kernel(profile, chosen)
        if time_s > 0 and top is None and part == FORWARD:
            raise ValueError(f"{profile.source}: {part} has time and no kernels. Explain the trace again.")
        found[f"{part} time"] = time_s
        found |= {f"{part} {kind}": shares.get(kind, 0.0) for kind in KernelClass}
        if top is not None and time_s > 0:
            found |= {f"{part} top": top.name, f"{part} top name": label(top.short_name), f"{part} top class": top.kind,
                      f"{part} top time": top.total_s / steps, f"{part} top share": top.total_s / time_s,
                      f"{part} top launches": top.count / steps}  # fmt: skip
    own = sorted((row for row in profile.kernels if row.phase == FORWARD), key=lambda row: row.total_s)
    found |= {f"longest {kind}": None for kind in KernelClass} | {f"longest {row.kind}": row.short_name for row in own}
    rows = [row for row in attention_part_rows(entry) if row["phase"] == FORWARD and row["time_ratio"]]
    for name in ("softmax_ms_per_step", "products_ms_per_step", "whole_ms_per_step", "time_ratio", "flops_ratio",
                 "time_per_flop_ratio"):  # fmt: skip
        found[name] = rows[0][name] if rows else None
    return found


def _range(values: "pd.Series[float]", text: Callable[[float], str]) -> str:
    """The least and the largest with their names; one value if they read the same, empty without any."""
    return between({str(name): float(value) for name, value in values.dropna().items()}, text)


def _shares(values: "pd.Series[float]") -> str:
    return _range(values, percent_of)


def _ratios(values: "pd.Series[float]") -> str:
    return _range(values, lambda ratio: significant(ratio, 3))


def _in(part: "pd.Series[bool]", sentence: str) -> str:
    """The sentence, which begins with the number of its traces if these are not all; empty without any."""
    if not part.any():
        return ""
    return f" {sentence[0].upper()}{sentence[1:]}" if part.all() else f" In {part.sum()} of {len(part)} {sentence}"


def _forward_time(facts: pd.DataFrame, profile: StepProfile) -> str:
    words = terms(profile)
    text = (
        f"By the trace, forward takes {_range(facts['wall'], ms)}, {_range(facts['in kernels'], ms)} of it "
        f"{words.time} in {words.items}."
    )
    known = facts[facts["clock"].notna()]
    if known.empty:
        return (
            f"{text} What the clock says without a profiler is not known here: run the same without --nsys, --profile."
        )
    longer = known["wall"] / known["clock"] - 1
    agree = longer.abs() <= SAME_TIME
    late = ~agree & (longer > 0) & (known["late"] >= longer * known["clock"])
    return (
        f"{text} Without a profiler, the clock says {_range(known['clock'], ms)}: the trace is "
        f"{_range(longer, _longer)}."
        + _in(agree, f"they agree within {SAME_TIME * 100:g} %.")
        + _in(late, f"a profiler makes each launch slower, and for {_range(known['late'][late], ms)} of forward the "
                    "GPU was idle because the next kernel was not launched yet.")
        + _in(~agree & ~late, f"they differ by more than {SAME_TIME * 100:g} %: see the warnings of both runs.")
    )  # fmt: skip


def _longer(fraction: float) -> str:
    return f"{significant(abs(fraction) * 100, 3)} % {'longer' if fraction >= 0 else 'shorter'}"


def _top_kernel(facts: pd.DataFrame, profile: StepProfile) -> str:
    text = f"In a forward pass, {_kernel_words(facts, FORWARD, profile)}."
    trained = facts[facts[f"{BACKWARD} time"] > 0]
    if trained.empty:
        return f"{text} {NO_BACKWARD}."
    same = trained[f"{FORWARD} top"] == trained[f"{BOTH} top"]
    for chosen, said in ((same, "it is the same one for forward and backward together"),
                         (~same, "for forward and backward together it is another one")):  # fmt: skip
        text += _in(chosen, f"{said}: {_kernel_words(trained[chosen], BOTH, profile)}.") if chosen.any() else ""
    return text


def _kernel_words(facts: pd.DataFrame, part: str, profile: StepProfile) -> str:
    """The longest kernel of the part and its share; with time and launches if it is the same in all traces."""
    names, shares = facts[f"{part} top name"].unique(), _shares(facts[f"{part} top share"])
    classes = " or ".join(sorted(facts[f"{part} top class"].unique()))
    if len(names) > 1:
        return f"one of {len(names)} kernels ({classes}) with {shares}"
    often = _range(facts[f"{part} top launches"], lambda count: launches(count, profile))
    return f"{names[0]} ({classes}) with {_range(facts[f'{part} top time'], ms)}, {shares}, in {often}"


def _other_classes(facts: pd.DataFrame, part: str) -> list[KernelClass]:
    """Classes besides matrix products that ran in forward or in the part, the largest share in the part first."""
    largest = {kind: float(facts[f"{part} {kind}"].max()) for kind in KernelClass}
    largest.pop(KernelClass.MATMUL)
    found = [kind for kind, share in largest.items() if share or facts[f"{FORWARD} {kind}"].any()]
    return sorted(found, key=lambda kind: -largest[kind])


def _other_kernels(facts: pd.DataFrame, profile: StepProfile) -> str:
    words, kinds = terms(profile), _other_classes(facts, FORWARD)
    if not kinds:
        return f"None: all {words.items} of forward are matrix products."
    longest = {kind: facts[f"longest {kind}"].dropna().unique() for kind in kinds}
    names = {kind: f" ({label(found[0])})" if len(found) == 1 else "" for kind, found in longest.items()}
    told = [f"{kind}{names[kind]} {_shares(facts[f'{FORWARD} {kind}'])}" for kind in kinds]
    rest = len(told) - NUM_CLASSES
    more = f" and {rest} more class{'es' if rest > 1 else ''}" if rest > 0 else ""
    return (
        f"Besides matrix products, {_shares(1 - facts[f'{FORWARD} {KernelClass.MATMUL}'])} of forward's {words.time}: "
        f"{'; '.join(told[:NUM_CLASSES])}{more}."
    )


def _product_share(facts: pd.DataFrame, _: StepProfile) -> str:
    def share(of: pd.DataFrame, part: str) -> str:
        return f"{_shares(of[f'{part} {KernelClass.MATMUL}'])} of "

    trained, whole = (facts[facts[f"{part} time"] > 0] for part in (BACKWARD, OPTIMIZER))
    text = f"Matrix products take {share(facts, FORWARD)}a forward pass"
    if trained.empty:
        return f"{text}. {NO_BACKWARD}, and an optimizer."
    text += f", {share(trained, BACKWARD)}a backward pass"
    if whole.empty:
        return f"{text} and {share(trained, BOTH)}both. There is no optimizer in this run: --mode train has one."
    changes = [
        f"{kind} {_shares(whole[f'{FORWARD} {kind}'])} and {_shares(whole[f'{STEP} {kind}'])}"
        for kind in _other_classes(whole, STEP)[:NUM_CLASSES]
    ]
    text += f" and {share(whole, STEP)}the whole training step."
    return f"{text} The others, of forward and of the step: {'; '.join(changes)}." if changes else text


def _softmax(facts: pd.DataFrame, profile: StepProfile) -> str:
    softmax, products, whole = (
        facts[f"{part}_ms_per_step"].dropna().astype(float) / 1e3 for part in ("softmax", "products", "whole")
    )
    if softmax.empty:
        return _no_softmax(profile)
    text = (
        f"In a forward pass the softmax takes {_range(softmax, ms)} and the matrix products {_range(products, ms)}: "
        f"{_ratios(facts['time_ratio'])} of their time."
    )
    if facts["flops_ratio"].any():
        text += (
            f" It does {_ratios(facts['flops_ratio'])} of their FLOPs, so for each FLOP it takes "
            f"{_ratios(facts['time_per_flop_ratio'])} times as long: it moves the scores through memory and computes "
            "little on them."
        )
    else:
        text += " Its FLOPs are not known without the record of the run (cs336 kernels FILE --record JSON)."
    rest = whole - softmax - products
    return f"{text} Scaling, masking and copies take another {_range(rest[rest > 0], ms)}." if rest.max() > 0 else text


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


_ANSWERS: Mapping[Question, Callable[[pd.DataFrame, StepProfile], str]] = {
    Question.FORWARD_TIME: _forward_time,
    Question.TOP_KERNEL: _top_kernel,
    Question.OTHER_KERNELS: _other_kernels,
    Question.PRODUCT_SHARE: _product_share,
    Question.SOFTMAX: _softmax,
}
