"""Answers about the kernels of a step, from runs under nsys or torch.profiler."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pandas as pd

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.config import Attention, Mode, Profiler, RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.report.columns import Column, Row, three_digits
from cs336_systems.report.entries import labels, rows_of
from cs336_systems.report.identity import identity_columns
from cs336_systems.report.numbers import between, count, label, percent_of
from cs336_systems.report.page.answers.answer import Answer, Material, Runs, best, from_best, is_of_course, is_plain
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.sections.kernels.answers import (
    BOTH,
    FORWARD,
    NUM_CLASSES,
    OPTIMIZER,
    SAME_TIME,
    STEP,
    Question,
    answer,
    facts_of,
)
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.sections.kernels.shares import attention
from cs336_systems.report.sections.kernels.words import ms
from cs336_systems.report.table import Table, make_table
from cs336_systems.text import counted

LEAST_CONTEXT = 128
"""The course asks for contexts above this."""
NUM_SIZES, NUM_CONTEXTS = 2, 3
"""How many sizes and contexts the course asks for."""


def _profiled(*modes: Mode) -> Callable[[Runs], list[RunRecord]]:
    """What chooses the profiled runs of plain steps in these modes."""

    def suiting(own: Runs) -> list[RunRecord]:
        found = [entry.profiled for entry in own.results.kernels if entry.config.mode in modes]
        return [each for each in found if is_plain(each.config) and each.config.model.attention is Attention.NAIVE]

    return suiting


def _is_asked(config: RunConfig) -> bool:
    """The course's models at long contexts, under nsys rather than torch.profiler."""
    is_long = config.model.context_length > LEAST_CONTEXT
    return is_of_course(config) and is_long and config.profiler is Profiler.NSYS


_STEPS = _profiled(Mode.TRAIN, Mode.FORWARD_BACKWARD)
"""Chooses the runs that the questions are about."""


@from_best(_STEPS, _is_asked)
def forward_time(runs: Runs) -> Answer:
    """The forward pass by the trace and by the clock."""
    table = [
        _column("wall", "by the trace", "ms", 1e3),
        _column("in kernels", "of it in kernels", "ms", 1e3),
        _column("clock", "by the clock", "ms", 1e3),
    ]
    return _answer(runs, Question.FORWARD_TIME, "phases", "Time of forward", table, _time_words)


def _time_words(facts: pd.DataFrame) -> Iterator[str]:
    """Forward of several traces by the trace, and where that is what the clock says."""
    yield f"By the trace, forward takes {_between(facts['wall'], ms)}."
    known = facts[facts["clock"].notna()]
    longer = known["wall"] / known["clock"] - 1
    agree = longer.abs() <= SAME_TIME
    if agree.any():
        number = f"{agree.sum()} of {counted(len(facts), 'trace')}"
        yield f"In {number} it matches the clock of a run without a profiler within {100 * SAME_TIME:g} %."
    for name, row in known[~agree].iterrows():
        more = float(row["wall"] / row["clock"] - 1)
        late = (
            ": a profiler makes each launch slower, and the GPU was idle for "
            f"{ms(row['late'])} because the next kernel was not launched yet"
            if more > 0 and row["late"] >= row["wall"] - row["clock"]
            else ""
        )
        how = "longer" if more > 0 else "shorter"
        yield f"In {name} the trace is {percent_of(abs(more))} {how} than the clock says{late}."


@from_best(_STEPS, _is_asked)
def top_kernel(runs: Runs) -> Answer:
    """The kernel with the most time in forward, and in forward and backward."""
    columns: list[Column] = []
    for part in (FORWARD, BOTH):
        columns += [
            Column(f"longest in {part}", key=f"{part} top name", numeric=False, write=str),
            _column(f"{part} top launches", "launches", "", 1, count),
            _column(f"{part} top share", "share", "%", 100),
        ]
    return _answer(runs, Question.TOP_KERNEL, "top_kernels", "Kernels with the most time", columns, _top_words)


def _top_words(facts: pd.DataFrame) -> Iterator[str]:
    """What the longest kernels of several traces are, how much of forward they take, and where backward's differ."""
    kinds = " or ".join(f"a {kind}" for kind in dict.fromkeys(facts[f"{FORWARD} top class"]))
    number = facts[f"{FORWARD} top name"].nunique()
    several = f"; these are {number} different kernels, as the library chooses one by the shape" if number > 1 else ""
    yield f"The longest kernel of forward is {kinds}, with {_shares(facts, FORWARD)} of its GPU time{several}."
    trained = facts[facts[f"{BOTH} time"] > facts[f"{FORWARD} time"]]
    same = trained[f"{FORWARD} top"] == trained[f"{BOTH} top"]
    for chosen, words in ((same, "the same"), (~same, "another")):
        if chosen.any():
            names = ", ".join(map(str, trained[chosen].index))
            yield (
                f"Of forward and backward together it is {words} one for {names}, with "
                f"{_shares(trained[chosen], BOTH)} of their time."
            )


def _shares(facts: pd.DataFrame, part: str) -> str:
    return _between(facts[f"{part} top share"], percent_of)


def _between(values: "pd.Series[float]", text: Callable[[float], str]) -> str:
    return between({str(name): float(value) for name, value in values.items()}, text)


@from_best(_STEPS, _is_asked)
def other_kernels(runs: Runs) -> Answer:
    """Other kernels that matter in forward."""
    facts = _with_forward(runs)
    columns = [_column(f"{FORWARD} {kind}", f"{kind}", "%", 100) for kind in _others(facts, FORWARD)]
    title = "Kernels of forward besides matrix products"
    return _answer(runs, Question.OTHER_KERNELS, "classes", title, columns, _other_words)


def _others(facts: pd.DataFrame, part: str) -> list[KernelClass]:
    """The classes besides matrix products with the largest shares of the part."""
    largest = facts[[f"{part} {kind}" for kind in KernelClass if kind is not KernelClass.MATMUL]].max()
    largest = largest[largest > 0].sort_values(ascending=False)
    return [KernelClass(name.removeprefix(f"{part} ")) for name in largest.index[:NUM_CLASSES]]


def _other_words(facts: pd.DataFrame) -> Iterator[str]:
    """What else forward consists of, over several traces."""
    rest = _between(1 - facts[f"{FORWARD} {KernelClass.MATMUL}"], percent_of)
    told = []
    for kind in _others(facts, FORWARD):
        names = facts[f"longest {kind}"].dropna().unique()
        name = f" ({label(names[0])})" if len(names) == 1 else ""
        told.append(f"{kind}{name} at most {percent_of(facts[f'{FORWARD} {kind}'].max())}")
    yield f"Kernels besides matrix products take {rest} of forward's GPU time: {', '.join(told)}."


@from_best(_STEPS, _is_asked)
def _product_share(runs: Runs) -> Answer:
    facts, parts = _with_forward(runs), (FORWARD, STEP)
    kinds = [KernelClass.MATMUL, *_others(facts, STEP)]
    columns = [_column(f"{part} {kind}", f"{kind}, {part}", "%", 100) for kind in kinds for part in parts]
    title = "Shares of GPU time in forward and in the step"
    return _answer(runs, Question.PRODUCT_SHARE, "classes", title, columns, _share_words)


def product_share(material: Material) -> Answer | None:
    """The share of matrix products in a whole step, in its forward, and in forward alone."""
    found = _product_share(material)
    alone = best(material, _profiled(Mode.INFERENCE, Mode.FORWARD), _is_asked)
    if found is None or alone is None:
        return found
    shares = _between(_with_forward(alone)[f"{FORWARD} {KernelClass.MATMUL}"], percent_of)
    sentence = (
        "In runs of forward alone, without a graph, it is the same."
        if any(f" {shares} of a forward pass" in said for said in found.sentences)
        else f"In runs of forward alone, without a graph, matrix products take {shares} of its time."
    )
    return replace(
        found,
        sentences=[*found.sentences, sentence],
        places=list(dict.fromkeys([*found.places, alone.place("classes")])),
        commands=[*found.commands, command_for(material.collection, alone.directory)],
    )


def _share_words(facts: pd.DataFrame) -> Iterator[str]:
    """How the share of matrix products, and of what grows the most beside it, changes from forward to the step."""
    trained = facts[facts[f"{OPTIMIZER} time"] > 0]
    if trained.empty:
        return
    forward, step = (_between(trained[f"{part} {KernelClass.MATMUL}"], percent_of) for part in (FORWARD, STEP))
    yield f"Matrix products take {forward} of a forward pass and {step} of a whole training step."
    grown = {kind: float((trained[f"{STEP} {kind}"] - trained[f"{FORWARD} {kind}"]).mean()) for kind in KernelClass}
    most = max(grown, key=lambda kind: grown[kind])
    if grown[most] > 0 and not trained[f"{OPTIMIZER} {KernelClass.MATMUL}"].any():
        before, after = (_between(trained[f"{part} {most}"], percent_of) for part in (FORWARD, STEP))
        yield (
            f"Kernels of class {most} take {before} of forward and {after} of the step, as the optimizer has no "
            "matrix products."
        )


@from_best(_STEPS, _is_asked)
def softmax(runs: Runs) -> Answer:
    """Softmax against matrix products in attention, in time and FLOPs."""
    columns = [
        _column("softmax_ms_per_step", "softmax", "ms", 1),
        _column("products_ms_per_step", "matrix products", "ms", 1),
        _column("rest_ms_per_step", "scaling, masking, copies", "ms", 1),
        _column("time_ratio", "softmax over products, time", "", 1),
        _column("flops_ratio", "and FLOPs", "", 1),
    ]
    return _answer(runs, Question.SOFTMAX, "attention", "Attention of a forward pass", columns, _softmax_words)


def _softmax_words(facts: pd.DataFrame) -> Iterator[str]:
    """Softmax beside the matrix products of attention, over several traces."""
    known = facts[facts["time_ratio"].notna() & facts["flops_ratio"].notna()]
    if known.empty:
        return
    times, flops = _between(known["time_ratio"], three_digits), _between(known["flops_ratio"], three_digits)
    yield (
        f"In a forward pass the softmax takes {times} times as long as the matrix products of attention, with {flops} "
        f"times their FLOPs: for each FLOP {_between(known['time_per_flop_ratio'], three_digits)} times as long, as it "
        "moves the scores through memory and computes little on them."
    )
    if (rest := (known["rest_ms_per_step"] / known["products_ms_per_step"]).dropna()).gt(0).all():
        yield f"Scaling, masking and copies take {_between(rest, three_digits)} times as long as the matrix products."


def _column(key: str, name: str, unit: str, scale: float, write: Callable[[float], str] = three_digits) -> Column:
    return Column(name, unit, key=key, scale=scale, write=write)


def _entries(runs: Runs) -> list[Profiled]:
    return list(runs.results.kernels)


def _facts(runs: Runs) -> pd.DataFrame:
    """A row of facts about each trace."""
    entries = _entries(runs)
    facts = facts_of(dict(zip(labels(entries), entries, strict=True)))
    parts = facts[["whole_ms_per_step", "softmax_ms_per_step", "products_ms_per_step"]].astype(float)
    facts["rest_ms_per_step"] = 2 * parts["whole_ms_per_step"] - parts.sum(axis=1, skipna=False)
    return facts


def _answer(
    runs: Runs, question: Question, place: str, title: str, columns: Sequence[Column],
    words: Callable[[pd.DataFrame], Iterator[str]],
) -> Answer:  # fmt: skip
    """The answer over all traces, with a row of the table for each; `words` says it of several, where they tell."""
    facts = _with_forward(runs)
    several = list(words(facts)) if len(facts) > 1 else []
    found = runs.answer(
        several or [answer(question, _facts(runs), _entries(runs)[0].profile)],
        tables=[_table(title, runs, columns)],
        place=place,
        lacking=", ".join(_lacking(runs)),
    )
    return found if place != "attention" or attention(_entries(runs)).tables else replace(found, places=[])


def _with_forward(runs: Runs) -> pd.DataFrame:
    """The facts about traces that have a forward pass."""
    facts = _facts(runs)
    return facts[facts[f"{FORWARD} time"] > 0]


def _table(title: str, runs: Runs, columns: Sequence[Column]) -> Table:
    """The facts below these headings, a row for each trace."""
    entries = _entries(runs)
    known = dict(zip(map(id, entries), _facts(runs).to_dict("records"), strict=True))

    def parts(entry: Profiled) -> Iterator[Row]:
        found = known[id(entry)]
        yield {each.key: None if pd.isna(found.get(each.key)) else found[each.key] for each in columns}

    rows = rows_of(entries, parts)
    return make_table(title, [*identity_columns(rows), *columns], rows)


def _lacking(runs: Runs) -> Iterator[str]:
    """What the course asks for and the runs have not: a GPU's sizes, and contexts."""
    configs = [entry.config for entry in _entries(runs)]
    if len({config.size for config in configs if is_of_course(config)}) < NUM_SIZES:
        yield f"{NUM_SIZES} of its sizes"
    contexts = {config.model.context_length for config in configs if config.model.context_length > LEAST_CONTEXT}
    if len(contexts) < NUM_CONTEXTS:
        more = f"{NUM_CONTEXTS - len(contexts)} {'more ' if contexts else ''}"
        yield f"{more}contexts above {LEAST_CONTEXT}"
