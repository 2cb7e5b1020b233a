"""Answers about the memory of a step: over time, peaks, allocations, and what a block keeps."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from cs336_systems.config import SIZES, Device, Mode, Precision, RunConfig
from cs336_systems.costs.memory import predicted_peak_bytes
from cs336_systems.costs.shards import FP32_BYTES
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.columns import Column, Row, column, three_digits
from cs336_systems.report.entries import labels
from cs336_systems.report.frame import order
from cs336_systems.report.numbers import between
from cs336_systems.report.page.answers.answer import (
    Answer,
    Material,
    Place,
    Runs,
    best,
    is_of_course,
    is_plain,
    pairs,
    ratios,
)
from cs336_systems.report.sections.memory.allocations import contributors
from cs336_systems.report.sections.memory.allocations import largest as largest_section
from cs336_systems.report.sections.memory.answers import block_answer, largest_answers, mixed_answers, timeline_answer
from cs336_systems.report.sections.memory.entries import MemoryEntry
from cs336_systems.report.sections.memory.words import largest_words, size, typical
from cs336_systems.report.sections.study import across, pivoted
from cs336_systems.report.table import Table, make_table
from cs336_systems.report.words import status_text

ALONE = (Mode.INFERENCE, Mode.FORWARD)
"""Modes of forward alone: without a graph, and with what backward would need."""
COURSE = {"2.7B": (128, 2048)}
"""The size and the contexts of the course's questions on memory, edition 2026."""
ON_PAPER = {"xl": (128, 512, 2048), "2.7B": (128, 512, 2048)}
BATCH_SIZE = 4
NUM_LARGEST = 1
"""How many of the largest sizes of allocations an answer names; its table has more."""
PEAK = "peak_allocated_gib"
NAMES = {Mode.INFERENCE: "forward without a graph", Mode.FORWARD: "forward with its graph", Mode.TRAIN: "whole step"}


class Pair(NamedTuple):
    """A recorded forward pass alone, and a recorded training step of the same model."""

    runs: Runs
    alone: MemoryEntry
    step: MemoryEntry


def timelines(material: Material) -> Answer | None:
    """How memory runs over forward alone and over a whole step, and whether the stages can be told."""
    if (pair := _best_pair(material)) is None:
        return None
    sentences = [
        f"Forward alone, {name_of(pair.alone)}: {timeline_answer(pair.alone.profile)}",
        f"Whole step, {name_of(pair.step)}: {timeline_answer(pair.step.profile)}",
        *_stages(pair),
    ]
    found = _answer(pair, sentences, "memory-phases")
    pictures = [_picture(material, pair.runs, entry) for entry in (pair.alone, pair.step)]
    return replace(found, pictures=list(zip(("forward alone", "whole step"), pictures, strict=True)))


def _picture(material: Material, runs: Runs, entry: MemoryEntry) -> Place:
    """The picture of memory over time of this run, which is numbered among those of the same part of the page."""
    [every] = [own for own in material.runs if (own.directory, own.ending) == (runs.directory, runs.ending)]
    number = sorted(order(own.config) for own in every.results.memory).index(order(entry.config))
    return runs.place(f"figure-{entry.config.key}_timeline{f'-{number}' if number else ''}")


def name_of(entry: MemoryEntry) -> str:
    """Size, context, mode and precision of a run."""
    config = entry.config
    return f"{config.size} ctx {config.model.context_length} {config.mode} {config.precision}"


def _stages(pair: Pair) -> Iterator[str]:
    """How the stages of a step are told in its curve."""
    steps = [phase.step for phase in pair.step.profile.phases]
    phases = {phase.phase: phase for phase in pair.step.profile.phases if phase.step == steps[-1]}
    if not {"forward", "backward", "optimizer"} <= set(phases):
        return
    forward, backward = phases["forward"], phases["backward"]
    if forward.end_bytes > forward.begin_bytes and backward.end_bytes < backward.begin_bytes:
        yield (
            "The stages can be told: memory rises through forward, block after block, as activations are saved "
            f"({size(forward.begin_bytes)} to {size(forward.end_bytes)}), falls through backward, which frees them "
            f"while gradients come (to {size(backward.end_bytes)}), and in the optimizer rises by the temporary "
            "tensors of one parameter after the other until the gradients are freed."
        )
    if pair.alone.config.mode is Mode.INFERENCE:
        yield "Forward alone keeps nothing for backward, so its curve is a row of equal teeth, one for each block."


def peaks(material: Material) -> Answer | None:
    """Peaks of forward alone and of a whole step in fp32."""
    return _peaks(material, (Precision.FP32,))


def mixed_peaks(material: Material) -> Answer | None:
    """Peaks in mixed precision, and what it changes."""
    return _peaks(material, (Precision.FP32, Precision.BF16))


def _peaks(material: Material, precisions: Sequence[Precision]) -> Answer | None:
    def suiting(own: Runs) -> list[RunRecord]:
        """Plain runs with a peak, or that ran out of memory, if there are some of forward alone and of a whole step."""
        found = [each for each in own.results.published if _has_peak(each) and each.config.precision in precisions]
        kept = [each for each in found if is_plain(each.config) and each.config.mode in (*ALONE, Mode.TRAIN)]
        modes = {record.config.mode for record in kept}
        has_all = len({record.config.precision for record in kept}) == len(precisions)
        return kept if has_all and Mode.TRAIN in modes and modes & {*ALONE} else []

    runs = best(material, suiting)
    if runs is None:
        return None
    rows = runs.rows
    in_low = len(precisions) > 1
    title = "Peaks in fp32 and in mixed precision" if in_low else "Peaks of forward alone and of a whole step"
    sentences = [*_peak_words(rows, in_low), *(mixed_answers(_of_records(runs)) if in_low else ())]
    lacking = _lacking({(row["size"], row["context_length"]) for row in rows})
    return runs.answer(sentences, tables=[_peak_table(title, rows)], lacking=lacking)


def _lacking(there: Collection[tuple[str, int]]) -> str:
    """Which of the course's contexts are not among these sizes and contexts."""
    missing = [(name, [str(each) for each in all_of if (name, each) not in there]) for name, all_of in COURSE.items()]
    return ", ".join(f"{name} at context {' and '.join(contexts)}" for name, contexts in missing if contexts)


def _of_records(runs: Runs) -> list[MemoryEntry]:
    """The recorded runs of the same directory."""
    wanted = {record.config.configuration for record in runs.results.published}
    found = runs.collection.sweeps[runs.directory].memory
    return [entry for entry in found if is_plain(entry.config) and entry.config.unprofiled.configuration in wanted]


def _has_peak(record: RunRecord) -> bool:
    return record.status is Status.OOM or (record.status is Status.OK and record.memory is not None)


def _peak_table(title: str, rows: Sequence[Row]) -> Table:
    """A row for each size, context and precision, with the peak of each mode, or how the run ended."""
    index = ("size", "context_length", "precision")
    shown = [Column("size", key="size", numeric=False, write=str), Column("context", key="context_length", write=str)]
    if len({row["precision"] for row in rows}) > 1:
        shown.append(Column("precision", key="precision", numeric=False, write=str))
    peak = column(PEAK, drop_order=0, instead="ended")
    modes = {mode: name for mode, name in NAMES.items() if any(row["mode"] == mode for row in rows)}
    columns = [replace(across(mode, peak), name=name) for mode, name in modes.items()]
    ended = [row | {"ended": status_text(row["status"])} for row in rows]
    return make_table(title, [*shown, *columns], pivoted(ended, index, "mode"))


def _peak_words(rows: Sequence[Row], in_low: bool) -> Iterator[str]:
    if in_low:
        both = pairs(rows, "precision", Precision.FP32)
        step, alone = (
            ratios([pair for pair in both if pair[0]["mode"] == mode], PEAK) for mode in (Mode.TRAIN, Mode.INFERENCE)
        )
        if step:
            yield (
                f"In mixed precision the peak of a whole step is {between(step, three_digits)} times that in fp32: "
                "parameters, gradients and the optimizer's state stay in fp32, and the copies of "
                "the weights in bf16, which autocast keeps, take about what the smaller activations save."
            )
        if alone:
            yield (
                f"That of {NAMES[Mode.INFERENCE]} is {between(alone, three_digits)} times that in fp32: few "
                "activations are alive at once, and autocast keeps its copies of the weights until the pass ends."
            )
        return
    steps = [row for row in rows if row["mode"] == Mode.TRAIN]
    least = next((mode for mode in ALONE if any(row["mode"] == mode and row[PEAK] for row in rows)), ALONE[0])
    over = ratios([pair for pair in pairs(rows, "mode", least) if pair[0]["mode"] == Mode.TRAIN], PEAK)
    if over:
        yield (
            f"The peak of a whole step is {between(over, three_digits)} times that of "
            f"{NAMES[least]}: to the parameters it adds gradients, AdamW's two states, and what each block saves for "
            "backward, which grows with the context and, for the softmax, with its square."
        )
    failed = [(row["size"], row["context_length"]) for row in steps if row["status"] != Status.OK]
    if failed:
        needed = [f"{name}: {' and '.join(map(size, known))}" for name, known in _predicted(failed)]
        predicted = f" Its predicted peak there, and that with --checkpoint-blocks 1, are {'; '.join(needed)}."
        named = ", ".join(f"{name} ctx {context}" for name, context in failed)
        yield f"The whole step ran out of memory at {named}.{predicted if needed else ''}"


def _predicted(models: Collection[tuple[str, int]]) -> Iterator[tuple[str, list[int]]]:
    """The predicted peaks of a training step in fp32 without checkpoints and with one for each block."""
    for name, context in sorted(models, key=lambda model: (list(SIZES).index(model[0]), model[1])):
        config = RunConfig(size=name, model=replace(SIZES[name], context_length=context), device=Device.CUDA)
        both = [predicted_peak_bytes(replace(config, checkpoint_blocks=blocks)) for blocks in (0, 1)]
        known = [each for each in both if each is not None]
        if len(known) == len(both):
            yield f"{name} ctx {context}", known


def residual_stream(material: Material) -> Answer:
    """The size of one activation of the residual stream in fp32."""
    said = [
        f"{name} {', '.join(f'{size(residual_bytes(name, context))} at context {context}' for context in contexts)}"
        for name, contexts in ON_PAPER.items()
    ]
    sentences = [
        "One tensor of the residual stream takes batch x context x d_model x 4 bytes in fp32: "
        f"with a batch of {BATCH_SIZE}, {'; '.join(said)}."
    ]
    pair = _best_pair(material)
    if pair is None:
        return Answer(sentences=sentences, lacking="that of a recorded step")
    measured = pair.step.profile.residual_stream_bytes
    if measured is not None:
        context = pair.step.config.model.context_length
        sentences.append(
            f"In the recorded step of {pair.step.config.size} at context {context} it is {size(measured)}."
        )
    return replace(_answer(pair, sentences, "memory-peaks"), lacking="")


def residual_bytes(name: str, context_length: int, batch_size: int = BATCH_SIZE) -> int:
    """One tensor of the residual stream of this size in fp32."""
    return batch_size * context_length * SIZES[name].d_model * FP32_BYTES


def largest(material: Material) -> Answer | None:
    """The largest allocations of a step, and where they come from."""
    if (pair := _best_pair(material)) is None or not pair.step.profile.largest:
        return None
    sentences = [
        f"{name_of(pair.step)}: {largest_words(pair.step.profile.largest, NUM_LARGEST)}.",
        *largest_answers(pair.runs.results.memory),
    ]
    return _answer(pair, sentences, "memory-largest", largest_section([pair.step]).tables)


def block(material: Material) -> Answer | None:
    """What one block saves for backward, and the gradients that it makes."""
    if (pair := _best_pair(material)) is None or not pair.step.profile.blocks:
        return None
    kept = [entry for entry in pair.runs.results.memory if entry.profile.blocks]
    others = {
        name: typical(entry.profile.blocks).saved_bytes for name, entry in zip(labels(kept), kept, strict=True)
    }  # fmt: skip
    over = f"Over all recorded runs a block saves {between(others, lambda found: size(int(found)))}."
    sentences = [
        f"{name_of(pair.step)}: {block_answer(pair.step.profile)}",
        *([over] if len(others) > 1 else []),
    ]
    return _answer(pair, sentences, "memory-peaks", [contributors(pair.step.profile.blocks)])


def _best_pair(material: Material) -> Pair | None:
    """The recorded runs of forward alone and of a whole step, of one model in fp32, at the longest context."""

    def suiting(own: Runs) -> list[RunRecord]:
        recorded = {entry.config for entry in own.results.memory}
        records = [record for record in own.results.records if record.config in recorded]
        return records if _pairs(own) else []

    def wanted(config: RunConfig) -> bool:
        return is_of_course(config) and config.size in ON_PAPER

    runs = best(material, suiting, wanted)
    if runs is None:
        return None
    alone, step = _pairs(runs)[-1]
    return Pair(runs, alone, step)


def _pairs(runs: Runs) -> list[tuple[MemoryEntry, MemoryEntry]]:
    """Forward alone and whole step of the same model, by the context; those of larger models after smaller ones."""
    entries = [entry for entry in runs.results.memory if is_plain(entry.config) and not entry.is_out_of_memory]
    full = [entry for entry in entries if entry.config.precision is Precision.FP32]
    steps = {entry.config.model: entry for entry in full if entry.config.mode is Mode.TRAIN}
    found = [
        (entry, steps[entry.config.model])
        for mode in reversed(ALONE)
        for entry in full
        if entry.config.mode is mode and entry.config.model in steps
    ]
    return sorted(found, key=lambda pair: (pair[1].config.model.d_model, pair[1].config.model.context_length))


def _answer(pair: Pair, sentences: list[str], place: str, tables: Sequence[Table] = ()) -> Answer:
    there = {
        (own.config.size, own.config.model.context_length)
        for own in pair.runs.results.memory
        if own.config.mode is Mode.TRAIN
    }
    lacking = f"recordings of {missing}" if (missing := _lacking(there)) else ""
    return pair.runs.answer(sentences, tables=tables, place=place, lacking=lacking)
