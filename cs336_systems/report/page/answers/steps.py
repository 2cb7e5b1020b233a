"""Answers about the time of a step: its phases, its spread, warm-up, mixed precision, and the compiled model."""

from collections.abc import Iterable, Sequence

from cs336_systems.config import CompileMode, Mode, Precision, RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.report.columns import Column, column, three_digits
from cs336_systems.report.identity import by_name, identity_columns
from cs336_systems.report.numbers import between
from cs336_systems.report.page.answers.answer import (
    CONTEXT,
    Answer,
    Row,
    Runs,
    at_one_context,
    from_best,
    is_of_course,
    is_plain,
    lacking_sizes,
    pairs,
    plain_runs,
    ratios,
    with_several,
)
from cs336_systems.report.sections.steps_answers import (
    choice_answers,
    phase_answers,
    precision_answers,
    spread_answers,
    texts,
    warmup_answers,
)
from cs336_systems.report.table import Table, make_table

MEASURED_STEPS = 10
"""Number of steps that the course measures."""
PHASES = ("forward_mean_ms", "backward_mean_ms", "optimizer_mean_ms", "step_mean_ms")


def _table(title: str, rows: Sequence[Row], keys: Iterable[str | Column], always: Sequence[str] = ("size",)) -> Table:
    columns = [key if isinstance(key, Column) else column(key, drop_order=0) for key in keys]
    return make_table(title, [*identity_columns(rows, always), *columns], rows)


def _trained(runs: Runs) -> list[RunRecord]:
    return [record for record in plain_runs(runs) if record.config.mode is Mode.TRAIN]


def _timed(runs: Runs) -> list[RunRecord]:
    """Training steps after most warm-up, in fp32 as the course's; in other precisions where there are none."""
    trained = _trained(runs)
    most = max((record.config.warmup_steps for record in trained), default=0)
    found = [record for record in trained if record.config.warmup_steps == most and _has_phases(record)]
    return [record for record in found if record.config.precision is Precision.FP32] or found


def _has_phases(record: RunRecord) -> bool:
    """Whether the record has times of phases that do not contradict the step."""
    return all(record.measurement(phase) for phase in record.config.phases)


def _is_timed_by_course(config: RunConfig) -> bool:
    """The course's model and context, with enough steps to say how they vary."""
    is_enough = config.measured_steps >= MEASURED_STEPS
    in_full = config.precision is Precision.FP32
    return is_of_course(config) and config.model.context_length == CONTEXT and is_enough and in_full


@from_best(_timed, _is_timed_by_course)
def script(runs: Runs) -> Answer:
    """Forward alone, forward and backward, and the whole step."""
    runs = at_one_context(runs)
    rows = runs.rows

    def over_forward(*keys: str) -> str:
        found = by_name(rows, lambda row: sum(row[key] for key in keys) / row[keys[0]], always=("size",))
        return between(found, three_digits)

    both, whole = over_forward(*PHASES[:2]), over_forward(*PHASES[:3])
    sentences = [
        f"Forward and backward together take {both} times as long as forward alone, and the whole step, with the "
        f"optimizer, {whole} times.",
        "Backward has two matrix products for each one of forward, for the gradients of its two factors, so 3 times is "
        "expected of forward and backward together. The times of each size are in the table of b.",
        "Each whole step is timed between two synchronisations; on a GPU the phases within it by CUDA events, which do "
        "not slow it (--sync-phases synchronises after each phase, as the course's handout does). --warmup-steps and "
        "--measured-steps choose w and n, --mode inference, forward, forward-backward or train the part of the step.",
    ]
    return runs.answer(sentences, lacking=lacking_sizes(runs))


@from_best(_timed, _is_timed_by_course)
def times(runs: Runs) -> Answer:
    """Means and deviations of the phases, and whether the spread is small."""
    runs = at_one_context(runs)
    rows = runs.rows
    table = _table("Times of forward, backward and the optimizer", rows, [*PHASES, "step_cv"])
    same = ("context_length",)
    sentences = [*texts(phase_answers(rows, *same)), *texts(spread_answers(rows, *same))]
    return runs.answer(sentences, tables=[table], lacking=lacking_sizes(runs))


@from_best(
    lambda own: with_several(_trained(own), "warmup_steps"),
    lambda config: is_of_course(config) and config.model.context_length == CONTEXT,
)
def warmup(runs: Runs) -> Answer:
    """How step times change without warm-up, or with too little of it."""
    rows = runs.rows
    first = Column("first measured step", "ms", key="first_step_ms")
    columns = (column("step_mean_ms"), column("step_cv"), first)
    table = _table("Steps after more and less warm-up", rows, columns, ("size", "warmup_steps"))
    there = {record.config.warmup_steps for record in runs.results.records}
    lacking = ", ".join(f"{count} warm-up steps" for count in (0, 1, 2, 5) if count not in there)
    return runs.answer(texts(warmup_answers(rows)), tables=[table], place="warmup", lacking=lacking)


def _in_both_precisions(own: Runs) -> list[RunRecord]:
    both = (Precision.FP32, Precision.BF16)
    return with_several([each for each in _trained(own) if each.config.precision in both], "precision")


@from_best(_in_both_precisions)
def mixed_precision(runs: Runs) -> Answer:
    """Times with and without bf16, and the trend over sizes."""
    rows = at_one_context(runs).rows
    gains = [row["speed_up"] for row in rows if row["speed_up"]]
    sentences = texts(precision_answers(runs.rows))
    if len(gains) > 1 and gains == sorted(gains):
        sentences.append(
            "A larger model gains more because its matrix products, which bf16 makes faster, are a larger part of the "
            "step: the optimizer stays in fp32, and a small model waits for the host to launch kernels, of which bf16 "
            "has no fewer."
        )
    keys = ["forward_mean_ms", "backward_mean_ms", "step_mean_ms", "speed_up"]
    table = _table("Times in fp32 and in bf16", rows, keys, ("size", "precision"))
    return runs.answer(sentences, tables=[table], lacking=lacking_sizes(runs))


def _eager_and_compiled(own: Runs) -> list[RunRecord]:
    is_left = (CompileMode.NONE, CompileMode.DEFAULT)
    found = [each for each in own.finished if is_plain(each.config, "compile") and each.config.compile in is_left]
    return with_several([each for each in found if each.config.mode is Mode.TRAIN], "compile")


@from_best(_eager_and_compiled, lambda config: config.model.context_length == CONTEXT)
def compiled_model(runs: Runs) -> Answer:
    """The whole model compiled against eager: forward, backward, step."""
    rows = runs.rows
    table = _table("The whole model eager and compiled", rows, [*PHASES, "compile_speed_up"], ("size", "compile"))
    both = [(eager, compiled) for compiled, eager in pairs(rows, "compile", CompileMode.NONE)]
    parts = dict(zip(("forward", "backward", "the optimizer's step"), PHASES, strict=False))
    found = {part: ratios(both, key, ("size",)) for part, key in parts.items()}
    said = [f"{part} {between(gains, three_digits)} times" for part, gains in found.items() if gains]
    sentences = texts(choice_answers(rows))
    sentences += [f"By phase: {', '.join(said)} as fast. The optimizer is not compiled."] if said else []
    return runs.answer(sentences, tables=[table], lacking=lacking_sizes(runs))
