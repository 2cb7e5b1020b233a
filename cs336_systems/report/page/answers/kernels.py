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
from cs336_systems.report.numbers import count
from cs336_systems.report.page.answers.answer import Answer, Material, Runs, best, is_of_course, is_plain
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.sections.kernels.answers import (
    BOTH,
    FORWARD,
    NUM_CLASSES,
    STEP,
    Question,
    answer,
    facts_of,
    other_classes,
    share_range,
)
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.sections.kernels.shares import attention
from cs336_systems.report.table import Table, make_table

LEAST_CONTEXT = 128
"""The course asks for contexts above this."""
NUM_SIZES, NUM_CONTEXTS = 2, 3
"""How many sizes and contexts the course asks for."""


def forward_time(material: Material) -> Answer | None:
    """The forward pass by the trace and by the clock."""
    table = [
        _column("wall", "by the trace", "ms", 1e3),
        _column("in kernels", "of it in kernels", "ms", 1e3),
        _column("clock", "by the clock", "ms", 1e3),
    ]
    return _answer(material, Question.FORWARD_TIME, "phases", "Time of forward", table)


def top_kernel(material: Material) -> Answer | None:
    """The kernel with the most time in forward, and in forward and backward."""
    columns: list[Column] = []
    for part in (FORWARD, BOTH):
        columns += [
            Column(f"longest in {part}", key=f"{part} top name", numeric=False, write=str),
            _column(f"{part} top launches", "launches", "", 1, count),
            _column(f"{part} top share", "share", "%", 100),
        ]
    return _answer(material, Question.TOP_KERNEL, "top_kernels", "Kernels with the most time", columns)


def other_kernels(material: Material) -> Answer | None:
    """Other kernels that matter in forward."""
    if (runs := _best(material)) is None:
        return None
    kinds = other_classes(_with_forward(runs), FORWARD)[:NUM_CLASSES]
    columns = [_column(f"{FORWARD} {kind}", f"{kind}", "%", 100) for kind in kinds]
    return _answer(material, Question.OTHER_KERNELS, "classes", "Kernels of forward besides matrix products", columns)


def product_share(material: Material) -> Answer | None:
    """The share of matrix products in a whole step, in its forward, and in forward alone."""
    if (runs := _best(material)) is None:
        return None
    kinds = [KernelClass.MATMUL, *other_classes(_with_forward(runs), STEP)[:NUM_CLASSES]]
    columns = [_column(f"{part} {kind}", f"{kind}, {part}", "%", 100) for kind in kinds for part in (FORWARD, STEP)]
    found = _answer(
        material, Question.PRODUCT_SHARE, "classes", "Shares of GPU time in forward and in the step", columns
    )
    alone = _best(material, (Mode.INFERENCE, Mode.FORWARD))
    if found is None or alone is None:
        return found
    shares = share_range(_with_forward(alone), FORWARD)
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


def softmax(material: Material) -> Answer | None:
    """Softmax against matrix products in attention, in time and FLOPs."""
    columns = [
        _column("softmax_ms_per_step", "softmax", "ms", 1),
        _column("products_ms_per_step", "matrix products", "ms", 1),
        _column("rest_ms_per_step", "scaling, masking, copies", "ms", 1),
        _column("time_ratio", "softmax over products, time", "", 1),
        _column("flops_ratio", "and FLOPs", "", 1),
    ]
    return _answer(material, Question.SOFTMAX, "attention", "Attention of a forward pass", columns)


def _column(key: str, name: str, unit: str, scale: float, write: Callable[[float], str] = three_digits) -> Column:
    return Column(name, unit, key=key, scale=scale, write=write)


def _best(material: Material, modes: Sequence[Mode] = (Mode.TRAIN, Mode.FORWARD_BACKWARD)) -> Runs | None:
    """The profiled runs that the questions are about: plain steps, under nsys rather than torch.profiler."""

    def suiting(own: Runs) -> list[RunRecord]:
        found = [entry.profiled for entry in own.results.kernels if entry.config.mode in modes]
        return [each for each in found if is_plain(each.config) and each.config.model.attention is Attention.NAIVE]

    def wanted(config: RunConfig) -> bool:
        is_long = config.model.context_length > LEAST_CONTEXT
        return is_of_course(config) and is_long and config.profiler is Profiler.NSYS

    return best(material, suiting, wanted)


def _entries(runs: Runs) -> list[Profiled]:
    return list(runs.results.kernels)


def _facts(runs: Runs) -> pd.DataFrame:
    """A row of facts about each trace."""
    entries = _entries(runs)
    return facts_of(dict(zip(labels(entries), entries, strict=True)))


def _answer(material: Material, question: Question, place: str, title: str, columns: Sequence[Column]) -> Answer | None:
    """The answer over all traces, with a row of the table for each."""
    runs = _best(material)
    if runs is None:
        return None
    found = runs.answer(
        answer(question, _facts(runs), _entries(runs)[0].profile),
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
