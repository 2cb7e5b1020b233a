"""The questions that CS336 (assignment 2, profiling with nsys) asks of kernel traces, of one trace or several.

Every number is of one step; where several traces differ, it is the least and the largest, with the configurations that
have them. Matrix products include their helpers. The page of all results has the same answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

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
from cs336_systems.report.sections.kernels.facts import class_shares, forward_wall_s, idle, kernel_s, top_kernel
from cs336_systems.report.sections.kernels.shares import attention_rows
from cs336_systems.report.sections.kernels.words import launches, ms, terms
from cs336_systems.text import counted

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
NO_OPTIMIZER = "There is no optimizer in this run: --mode train has one."
NO_CLOCK = "What the clock says without a profiler is not known here: run the same without --nsys, --profile."
NO_FLOPS = "Its FLOPs are not known without the record of the run (cs336 kernels FILE --record JSON)."


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
        own = [(name, " ".join(answer(question, facts.iloc[[i]], entries[i].profile))) for i, name in enumerate(names)]
        together = [("", " ".join(answer(question, facts, entries[0].profile)))] if len(own) > 1 else []
        sections.append((question.value, [*together, *own]))
    return answers_markdown("Where the time goes: the questions of CS336", sections)


def answer(question: Question, facts: pd.DataFrame, profile: StepProfile) -> list[str]:
    """Sentences about the traces that have a forward pass; the `profile` of one of them says whether it has kernels."""
    found = facts[facts[f"{FORWARD} time"] > 0]
    if found.empty:
        return [
            f"The file {label(profile.source)} does not tell: nothing in it was launched in a phase called forward. "
            "Name the range around it (cs336 kernels FILE --forward RANGE), or record with --nsys or --profile."
        ]
    of_one, of_several = _ANSWERS[question]
    return [of_one(found.iloc[0], profile)] if len(found) == 1 else list(of_several(found, profile))


def facts_of(named: Mapping[str, Explained]) -> pd.DataFrame:
    """The facts about all traces: a row for each, whose index is its name."""
    return pd.DataFrame([_facts(entry) for entry in named.values()], index=list(named))


def _facts(entry: Explained) -> Row:
    """All numbers about one trace in the answers: seconds and launches per step, shares of the kernels' time."""
    profile, steps = entry.profile, entry.profile.num_steps
    found: Row = {
        "wall": forward_wall_s(profile),
        "in kernels": kernel_s(profile, (LaunchPhase.FORWARD, LaunchPhase.LOSS)) / steps,
        "clock": entry.clock_s(Phase.FORWARD) or None,
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
    rows = [row for row in attention_rows(entry) if row["phase"] == FORWARD and row["time_ratio"]]
    for name in ("softmax_ms_per_step", "products_ms_per_step", "whole_ms_per_step", "time_ratio", "flops_ratio",
                 "time_per_flop_ratio"):  # fmt: skip
        found[name] = rows[0][name] if rows else None
    softmax_ms, products_ms, whole_ms = (found[f"{part}_ms_per_step"] for part in ("softmax", "products", "whole"))
    found["rest_ms_per_step"] = whole_ms - softmax_ms - products_ms if rows else None
    return found


def _range(values: "pd.Series[float]", text: Callable[[float], str]) -> str:
    """The least and the largest with their names; one value if they read the same, empty without any."""
    return between({str(name): float(value) for name, value in values.dropna().items()}, text)


def share_range(facts: pd.DataFrame, part: str, of: str = KernelClass.MATMUL) -> str:
    """The least and the largest share that matrix products, or what else is named, have in the part of a step."""
    return _range(facts[f"{part} {of}"], _percent)


def _percent(share: float) -> str:
    return percent_of(share, 1)


def _is_late(facts: "pd.Series[Any]") -> bool:
    """Whether launches that a profiler made late account for what the trace is longer than the clock says."""
    longer_s = facts["wall"] - facts["clock"]
    return bool(0 < longer_s <= facts["late"])


def _forward_time(facts: "pd.Series[Any]", profile: StepProfile) -> str:
    words, wall_s, clock_s = terms(profile), facts["wall"], facts["clock"]
    text = f"By the trace, forward takes {ms(wall_s)}, {ms(facts['in kernels'])} of it {words.time} in {words.items}."
    if pd.isna(clock_s):
        return f"{text} {NO_CLOCK}"
    longer = wall_s / clock_s - 1
    how = f"{significant(abs(longer) * 100, 3)} % {'longer' if longer >= 0 else 'shorter'}"
    text += f" Without a profiler, the clock says {ms(clock_s)}: the trace is {how}."
    if abs(longer) <= SAME_TIME:
        return f"{text} They agree within {SAME_TIME * 100:g} %."
    if _is_late(facts):
        return (
            f"{text} A profiler makes each launch slower, and for {ms(facts['late'])} of forward the GPU was idle "
            "because the next kernel was not launched yet."
        )
    return f"{text} They differ by more than {SAME_TIME * 100:g} %: see the warnings of both runs."


def _forward_times(facts: pd.DataFrame, _: StepProfile) -> Iterator[str]:
    """Forward of several traces by the trace, and where that is what the clock says."""
    yield f"By the trace, forward takes {_range(facts['wall'], ms)}."
    known = facts[facts["clock"].notna()]
    if known.empty:
        yield NO_CLOCK
    agree = (known["wall"] / known["clock"] - 1).abs() <= SAME_TIME
    if agree.any():
        number = f"{agree.sum()} of {counted(len(facts), 'trace')}"
        yield f"In {number} it matches the clock of a run without a profiler within {100 * SAME_TIME:g} %."
    for name, row in known[~agree].iterrows():
        more = float(row["wall"] / row["clock"] - 1)
        late = (
            ": a profiler makes each launch slower, and the GPU was idle for "
            f"{ms(row['late'])} because the next kernel was not launched yet"
            if _is_late(row)
            else ""
        )
        how = "longer" if more > 0 else "shorter"
        yield f"In {name} the trace is {_percent(abs(more))} {how} than the clock says{late}."


def _top_kernel(facts: "pd.Series[Any]", profile: StepProfile) -> str:
    text = f"In a forward pass, {_kernel_words(facts, FORWARD, profile)}."
    if not facts[f"{BACKWARD} time"]:
        return f"{text} {NO_BACKWARD}."
    is_same = facts[f"{FORWARD} top"] == facts[f"{BOTH} top"]
    said = (
        "It is the same one for forward and backward together"
        if is_same
        else "For forward and backward together it is another one"
    )
    return f"{text} {said}: {_kernel_words(facts, BOTH, profile)}."


def _kernel_words(facts: "pd.Series[Any]", part: str, profile: StepProfile) -> str:
    """The longest kernel of the part, with its time, share and launches."""
    top = {name: facts[f"{part} top {name}"] for name in ("name", "class", "time", "share", "launches")}
    often = launches(top["launches"], profile)
    return f"{top['name']} ({top['class']}) with {ms(top['time'])}, {_percent(top['share'])}, in {often}"


def _top_kernels(facts: pd.DataFrame, profile: StepProfile) -> Iterator[str]:
    """What the longest kernels of several traces are, how much of forward they take, and where backward's differ."""
    words = terms(profile)
    kinds = " or ".join(f"a {kind}" for kind in dict.fromkeys(facts[f"{FORWARD} top class"]))
    names = facts[f"{FORWARD} top name"].unique()
    name = f" ({names[0]})" if len(names) == 1 else ""
    several = f"; these are {len(names)} different {words.items}, as the library chooses one by the shape"
    yield (
        f"The longest {words.item} of forward is {kinds}{name}, with {share_range(facts, FORWARD, 'top share')} of its "
        f"{words.time}{'' if name else several}."
    )
    trained = facts[facts[f"{BACKWARD} time"] > 0]
    if trained.empty:
        yield f"{NO_BACKWARD}."
    same = trained[f"{FORWARD} top"] == trained[f"{BOTH} top"]
    for chosen, said in ((same, "the same"), (~same, "another")):
        if chosen.any():
            whose = "" if chosen.all() else f" for {', '.join(map(str, trained[chosen].index))}"
            yield (
                f"Of forward and backward together it is {said} one{whose}, with "
                f"{share_range(trained[chosen], BOTH, 'top share')} of their time."
            )


def other_classes(facts: pd.DataFrame, part: str) -> list[KernelClass]:
    """Classes besides matrix products that ran in forward or in the part, the largest share in the part first."""
    largest = {kind: float(facts[f"{part} {kind}"].max()) for kind in KernelClass}
    largest.pop(KernelClass.MATMUL)
    found = [kind for kind, share in largest.items() if share or facts[f"{FORWARD} {kind}"].any()]
    return sorted(found, key=lambda kind: -largest[kind])


def _other_kernels(facts: "pd.Series[Any]", profile: StepProfile) -> str:
    words, kinds = terms(profile), other_classes(facts.to_frame().T, FORWARD)
    if not kinds:
        return f"None: all {words.items} of forward are matrix products."
    told = [f"{kind} ({label(facts[f'longest {kind}'])}) {_percent(facts[f'{FORWARD} {kind}'])}"
            if facts[f"longest {kind}"] else f"{kind} {_percent(facts[f'{FORWARD} {kind}'])}"
            for kind in kinds]  # fmt: skip
    rest = len(told) - NUM_CLASSES
    more = f" and {rest} more class{'es' if rest > 1 else ''}" if rest > 0 else ""
    return (
        f"Besides matrix products, {_percent(1 - facts[f'{FORWARD} {KernelClass.MATMUL}'])} of forward's {words.time}: "
        f"{'; '.join(told[:NUM_CLASSES])}{more}."
    )


def _others_of_several(facts: pd.DataFrame, profile: StepProfile) -> Iterator[str]:
    """What else forward consists of, over several traces."""
    words, rest = terms(profile), _range(1 - facts[f"{FORWARD} {KernelClass.MATMUL}"], _percent)
    told = []
    for kind in other_classes(facts, FORWARD)[:NUM_CLASSES]:
        names = facts[f"longest {kind}"].dropna().unique()
        name = f" ({label(names[0])})" if len(names) == 1 else ""
        told.append(f"{kind}{name} at most {_percent(facts[f'{FORWARD} {kind}'].max())}")
    named = f": {', '.join(told)}" if told else ""
    yield f"{words.items.capitalize()} besides matrix products take {rest} of forward's {words.time}{named}."


def _product_share(facts: "pd.Series[Any]", _: StepProfile) -> str:
    def share(part: str) -> str:
        return f"{_percent(facts[f'{part} {KernelClass.MATMUL}'])} of "

    text = f"Matrix products take {share(FORWARD)}a forward pass"
    if not facts[f"{BACKWARD} time"]:
        return f"{text}. {NO_BACKWARD}, and an optimizer."
    text += f", {share(BACKWARD)}a backward pass"
    if not facts[f"{OPTIMIZER} time"]:
        return f"{text} and {share(BOTH)}both. {NO_OPTIMIZER}"
    changes = [
        f"{kind} {_percent(facts[f'{FORWARD} {kind}'])} and {_percent(facts[f'{STEP} {kind}'])}"
        for kind in other_classes(facts.to_frame().T, STEP)[:NUM_CLASSES]
    ]
    text += f" and {share(STEP)}the whole training step."
    return f"{text} The others, of forward and of the step: {'; '.join(changes)}." if changes else text


def _product_shares(facts: pd.DataFrame, _: StepProfile) -> Iterator[str]:
    """How the share of matrix products, and of what grows the most beside it, changes from forward to the step."""
    trained = facts[facts[f"{OPTIMIZER} time"] > 0]
    if trained.empty:
        both = facts[facts[f"{BACKWARD} time"] > 0]
        more = "" if both.empty else f" and {share_range(both, BOTH)} of forward and backward together"
        yield f"Matrix products take {share_range(facts, FORWARD)} of a forward pass{more}. {NO_OPTIMIZER}"
        return
    forward, step = (share_range(trained, part) for part in (FORWARD, STEP))
    yield f"Matrix products take {forward} of a forward pass and {step} of a whole training step."
    grown = {kind: float((trained[f"{STEP} {kind}"] - trained[f"{FORWARD} {kind}"]).mean()) for kind in KernelClass}
    most = max(grown, key=lambda kind: grown[kind])
    if grown[most] > 0 and not trained[f"{OPTIMIZER} {KernelClass.MATMUL}"].any():
        before, after = (share_range(trained, part, most) for part in (FORWARD, STEP))
        yield (
            f"Kernels of class {most} take {before} of forward and {after} of the step, as the optimizer has no "
            "matrix products."
        )


def _softmax(facts: "pd.Series[Any]", profile: StepProfile) -> str:
    softmax_ms, products_ms, rest_ms = (facts[f"{part}_ms_per_step"] for part in ("softmax", "products", "rest"))
    if pd.isna(softmax_ms):
        return _no_softmax(profile)
    text = (
        f"In a forward pass the softmax takes {ms(softmax_ms / 1e3)} and the matrix products {ms(products_ms / 1e3)}: "
        f"{_ratio(facts['time_ratio'])} of their time."
    )
    if facts["flops_ratio"]:
        text += (
            f" It does {_ratio(facts['flops_ratio'])} of their FLOPs, so for each FLOP it takes "
            f"{_ratio(facts['time_per_flop_ratio'])} times as long: it moves the scores through memory and computes "
            "little on them."
        )
    else:
        text += f" {NO_FLOPS}"
    return f"{text} Scaling, masking and copies take another {ms(rest_ms / 1e3)}." if rest_ms > 0 else text


def _softmax_of_several(facts: pd.DataFrame, profile: StepProfile) -> Iterator[str]:
    """Softmax beside the matrix products of attention, over several traces."""
    known = facts[facts["time_ratio"].notna()]
    if known.empty:
        yield _no_softmax(profile)
        return
    ratios = {name: _range(known[f"{name}_ratio"], _ratio) for name in ("time", "flops", "time_per_flop")}
    text = f"In a forward pass the softmax takes {ratios['time']} times as long as the matrix products of attention"
    if ratios["flops"]:
        yield (
            f"{text}, with {ratios['flops']} times their FLOPs: for each FLOP {ratios['time_per_flop']} times as long, "
            "as it moves the scores through memory and computes little on them."
        )
    else:
        yield f"{text}. {NO_FLOPS}"
    rest = known["rest_ms_per_step"] / known["products_ms_per_step"]
    if rest.gt(0).all():
        yield f"Scaling, masking and copies take {_range(rest, _ratio)} times as long as the matrix products."


def _ratio(value: float) -> str:
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


_ANSWERS: Mapping[
    Question,
    tuple[Callable[["pd.Series[Any]", StepProfile], str], Callable[[pd.DataFrame, StepProfile], Iterator[str]]],
] = {
    Question.FORWARD_TIME: (_forward_time, _forward_times),
    Question.TOP_KERNEL: (_top_kernel, _top_kernels),
    Question.OTHER_KERNELS: (_other_kernels, _others_of_several),
    Question.PRODUCT_SHARE: (_product_share, _product_shares),
    Question.SOFTMAX: (_softmax, _softmax_of_several),
}
"""What answers each question of one trace, and of several."""
