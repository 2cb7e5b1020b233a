"""Answers about activation checkpointing: which strategy needs least memory, and which group of blocks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cs336_systems.config import SIZES, Device, Mode, Precision, RunConfig
from cs336_systems.costs.memory import predicted_peak_bytes
from cs336_systems.record import RunRecord
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.identity import identity_columns
from cs336_systems.report.numbers import GIB, significant
from cs336_systems.report.page.answers.answer import (
    Answer,
    Material,
    Place,
    Runs,
    best,
    is_of_course,
    is_plain,
    with_several,
)
from cs336_systems.report.page.answers.memory import residual_bytes
from cs336_systems.report.sections.memory.words import size, typical
from cs336_systems.report.sections.steps_answers import checkpoint_answers, texts
from cs336_systems.report.table import Table, make_table
from cs336_systems.text import counted

CONTEXT = 2048
"""The context of the course's questions on checkpointing."""
GROUPS = (0, 1, 2, 3, 4, 6, 8)
"""Blocks per checkpoint whose peak is predicted; 0 is no checkpoint."""
PREDICTED = ("xl", "2.7B")


def strategy(material: Material) -> Answer:
    """The strategy of least memory, in closed form."""
    sentences = [
        "Let one of N blocks have an input of r bytes and save s bytes for backward. Without checkpoints N s bytes are "
        "kept; with one for every block N r + s; with one for every K blocks (N / K) r + K s, which is least at "
        "K = sqrt(N r / s), and then grows as sqrt(N).",
        "Nested checkpointing needs the least memory: keep the input of the second half of the blocks only, and when "
        "backward comes to a half, treat it in the same way. Then log2(N) inputs and one block are kept, "
        "log2(N) r + s, so memory grows as log N, and each of the log2(N) levels computes forward once more: N log N.",
        *_for_size(material),
    ]
    places = [place for _, _, place in _saved(material)]
    lacking = "" if places else "numbers, for which a recorded step says what a block saves"
    return Answer(sentences=sentences, places=places[:1], lacking=lacking)


def _for_size(material: Material) -> Iterator[str]:
    """The closed forms with numbers, at the longest context at which the memory of a block was recorded."""
    for config, saved_bytes, _ in list(_saved(material))[:1]:
        input_bytes = residual_bytes(config.size, config.model.context_length, config.batch_size)
        blocks = config.model.num_layers
        each, nested = blocks * input_bytes + saved_bytes, math.log2(blocks) * input_bytes + saved_bytes
        yield (
            f"For {config.size} at context {config.model.context_length}, N = {blocks}, r = {size(input_bytes)} and, "
            f"as recorded, s = {size(saved_bytes)}: {size(blocks * saved_bytes)} without checkpoints, {size(each)} "
            f"with one for every block, {size(round(nested))} nested. Of one level, the formula gives K = "
            f"{significant(math.sqrt(blocks * input_bytes / saved_bytes), 2)}."
        )


def _saved(material: Material) -> list[tuple[RunConfig, int, Place]]:
    """What a block of a recorded step in fp32 saved, and where that is shown; the longest context first."""
    runs = best(material, _recorded)
    found = [
        (entry.config, typical(entry.profile.blocks).saved_bytes, runs.place("memory-peaks"))
        for entry in (runs.results.memory if runs else ())
        if runs is not None
    ]
    return sorted(found, key=lambda each: -each[0].model.context_length)


def _recorded(own: Runs) -> list[RunRecord]:
    configs = {
        entry.config
        for entry in own.results.memory
        if entry.profile.blocks and entry.config.precision is Precision.FP32 and entry.config.mode is Mode.TRAIN
        and is_of_course(entry.config)
    }  # fmt: skip
    return [record for record in own.results.records if record.config in configs]


def groups(material: Material) -> Answer:
    """The best group of blocks for one level of checkpoints: measured, and predicted where it was not measured."""
    found = best(material, _checkpointed, lambda config: config.model.context_length == CONTEXT)
    tables = [_predicted_table()]
    predicted = (
        f"Predicted for a batch of 4 at context {CONTEXT} in fp32: {'; '.join(_predicted_words(tables[0].values))}. A "
        "block saves far more than its input, so each block more that backward computes again at once costs more than "
        "the inputs that it saves."
    )
    lacking = f"context {CONTEXT}, with a checkpoint for every block and for every 2 to 8"
    if found is None:
        return Answer(sentences=[predicted], tables=tables, lacking=lacking)
    rows = found.rows
    at_context = {record.config.model.context_length for record in found.results.records} == {CONTEXT}
    sentences = [*texts(checkpoint_answers(rows)), predicted]
    return found.answer(sentences, tables=[_table(rows), *tables], lacking="" if at_context else lacking)


def _checkpointed(own: Runs) -> list[RunRecord]:
    """Steps of one precision, fp32 if there are any, that differ in their checkpoints."""
    found = [record for record in own.finished if is_plain(record.config, "checkpoint_blocks") and record.memory]
    found = [record for record in found if record.config.mode is Mode.TRAIN]
    full = [record for record in found if record.config.precision is Precision.FP32]
    return with_several(full, "checkpoint_blocks") or with_several(found, "checkpoint_blocks")


def _table(rows: Sequence[Row]) -> Table:
    keys = ("step_mean_ms", "peak_allocated_gib", "predicted_peak_gib")
    columns = [*identity_columns(rows, ("size", "context_length", "checkpoint_blocks")), *map(column, keys)]
    return make_table("Peak and time by the blocks of a checkpoint, measured", columns, rows)


def _predicted_table() -> Table:
    rows = [
        {"blocks": group, **{name: _predicted_bytes(name, group) for name in PREDICTED}}
        for group in GROUPS
    ]  # fmt: skip
    columns = [
        Column("blocks per checkpoint", key="blocks", write=str),
        *(Column(f"{name}, peak", "GiB", key=name, scale=1 / GIB) for name in PREDICTED),
    ]
    note = "0 is no checkpoint. From the configuration alone, for a GPU like the H200; batch 4, fp32, AdamW."
    return make_table(f"Peak by the blocks of a checkpoint at context {CONTEXT}, predicted", columns, rows, [note])


def _predicted_bytes(name: str, group: int) -> int | None:
    model = replace(SIZES[name], context_length=CONTEXT)
    return predicted_peak_bytes(RunConfig(size=name, model=model, checkpoint_blocks=group, device=Device.CUDA))


def _predicted_words(rows: Sequence[Row]) -> Iterator[str]:
    for name in PREDICTED:
        known = {row["blocks"]: row[name] for row in rows if row[name] is not None and row["blocks"]}
        if known:
            least = min(known, key=known.__getitem__)
            beside = [other for other in (least - 1, least + 1) if other in known]
            others = " and ".join(f"{size(known[other])} with {other}" for other in beside)
            group = counted(least, "block")
            yield f"{name} has its least peak, {size(known[least])}, with {group} per checkpoint ({others})"
