"""Answers about the kernels of a step, from runs under nsys or torch.profiler."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.config import Attention, Mode, Profiler, RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.report.entries import labels
from cs336_systems.report.numbers import between, percent_of
from cs336_systems.report.page.answers.answer import Answer, Material, Runs, best, from_best, is_of_course, is_plain
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.answers import Question, answer, facts_of
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import WHOLE_STEP, class_shares
from cs336_systems.report.sections.kernels.tables import attention, classes, phases, top_kernels
from cs336_systems.report.table import rows_with

LEAST_CONTEXT = 128
"""The course asks for contexts above this."""
NUM_SIZES, NUM_CONTEXTS = 2, 3
"""How many sizes and contexts the course asks for."""
FORWARD = (LaunchPhase.FORWARD, LaunchPhase.LOSS)
"""Phases of a trace that are the clock's forward."""


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
    return _answer(runs, Question.FORWARD_TIME, phases, FORWARD)


@from_best(_STEPS, _is_asked)
def top_kernel(runs: Runs) -> Answer:
    """The kernel with the most time in forward, and in forward and backward."""
    return _answer(runs, Question.TOP_KERNEL, top_kernels, (LaunchPhase.FORWARD,), key="of")


@from_best(_STEPS, _is_asked)
def other_kernels(runs: Runs) -> Answer:
    """Other kernels that matter in forward."""
    return _answer(runs, Question.OTHER_KERNELS, classes, FORWARD)


@from_best(_STEPS, _is_asked)
def _product_share(runs: Runs) -> Answer:
    return _answer(runs, Question.PRODUCT_SHARE, classes, (*FORWARD, WHOLE_STEP))


def product_share(material: Material) -> Answer | None:
    """The share of matrix products in a whole step, in its forward, and in forward alone."""
    found = _product_share(material)
    alone = best(material, _profiled(Mode.INFERENCE, Mode.FORWARD), _is_asked)
    if found is None or alone is None:
        return found
    entries = alone.results.kernels
    of_products = [class_shares(entry.profile, [LaunchPhase.FORWARD]).get(KernelClass.MATMUL) for entry in entries]
    known = {name: share for name, share in zip(labels(entries), of_products, strict=True) if share is not None}
    shares = between(known, percent_of)
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


@from_best(_STEPS, _is_asked)
def softmax(runs: Runs) -> Answer:
    """Softmax against matrix products in attention, in time and FLOPs."""
    return _answer(runs, Question.SOFTMAX, attention, (LaunchPhase.FORWARD,))


def _answer(
    runs: Runs,
    question: Question,
    make: Callable[[Sequence[Explained]], Section],
    shown: Sequence[str],
    key: str = "phase",
) -> Answer:
    """What answers.md says of all traces together, with those rows of its table that are about what is asked."""
    entries = runs.results.kernels
    facts, section = facts_of(dict(zip(labels(entries), entries, strict=True))), make(entries)
    found = runs.answer(
        [answer(question, facts, entries[0].profile)],
        tables=[rows_with(table, key, shown) for table in section.tables],
        place=section.name,
        lacking=", ".join(_lacking(runs)),
    )
    return found if section.tables else replace(found, places=[])


def _lacking(runs: Runs) -> Iterator[str]:
    """What the course asks for and the runs have not: a GPU's sizes, and contexts."""
    configs = [entry.config for entry in runs.results.kernels]
    if len({config.size for config in configs if is_of_course(config)}) < NUM_SIZES:
        yield f"{NUM_SIZES} of its sizes"
    contexts = {config.model.context_length for config in configs if config.model.context_length > LEAST_CONTEXT}
    if len(contexts) < NUM_CONTEXTS:
        more = f"{NUM_CONTEXTS - len(contexts)} {'more ' if contexts else ''}"
        yield f"{more}contexts above {LEAST_CONTEXT}"
