"""What a step costs, as tables: parameters and FLOPs, the peak of memory and what it holds, what fits."""

from collections.abc import Iterator

from cs336_systems.accounting import count_parameters, step_flops
from cs336_systems.config import RunConfig
from cs336_systems.memory_model import (
    MemoryPrediction,
    Part,
    fits,
    largest_batch,
    largest_context,
    predict_memory,
    residual_stream_bytes,
    saved_by_block,
)
from cs336_systems.report.formats import Column, Heading, Table, make_table, significant

GIB, MIB = 2**30, 2**20
NOT_PREDICTED = "Not predicted: fp32 has no flash and no cuDNN attention."


def account_tables(config: RunConfig, memory_bytes: int | None, top: int) -> list[Table]:
    """The tables of one configuration; `memory_bytes` adds what fits a GPU of so much, `top` limits the long ones."""
    prediction = predict_memory(config)
    tables = [_cost_table(config, prediction)]
    if prediction is not None:
        tables += [_peak_table(prediction, top), _block_table(saved_by_block(config) or (), top)]
    if memory_bytes is not None:
        tables.append(_fit_table(config, memory_bytes))
    return tables


def _cost_table(config: RunConfig, prediction: MemoryPrediction | None) -> Table:
    flops = step_flops(config) or 0
    rows = [
        ("parameters", f"{count_parameters(config.model):,}", ""),
        ("model FLOPs of a step", significant(flops / 1e12), "TFLOP"),
        ("tokens of a step", f"{config.batch_size * config.model.context_length:,}", ""),
        ("one tensor of the residual stream", significant(residual_stream_bytes(config) / MIB), "MiB"),
        *(_memory_rows(prediction) if prediction else ()),
    ]
    return Table(
        title=f"One step of {config.label}, batch {config.batch_size}",
        headings=(Heading("quantity", numeric=False), Heading("value"), Heading("unit", numeric=False)),
        rows=tuple(rows),
        notes=(
            "Causal attention counts as full. Memory: as PyTorch's allocator counts it, predicted, eager, on Hopper.",
            *(() if prediction else (NOT_PREDICTED,)),
        ),
    )


def _memory_rows(prediction: MemoryPrediction) -> Iterator[tuple[str, str, str]]:
    peak = prediction.peak
    yield f"peak memory, in {peak.phase}", significant(peak.allocated_bytes / GIB), "GiB"
    yield "peak memory of the first step", significant(prediction.first_step_peak.allocated_bytes / GIB), "GiB"
    yield "reserved", significant(prediction.reserved_bytes / GIB), "GiB"
    yield "allocated when a step begins", significant(prediction.start_bytes / GIB), "GiB"
    for phase, num_bytes in prediction.after_bytes.items():
        yield f"allocated after {phase}", significant(num_bytes / GIB), "GiB"


def _parts(title: str, parts: tuple[Part, ...], top: int, notes: tuple[str, ...]) -> Table:
    whole = sum(part.size_bytes for part in parts)
    shown = sorted(parts, key=lambda part: -part.size_bytes)[:top]
    rest = whole - sum(part.size_bytes for part in shown)
    columns: list[Column[Part]] = [
        Column(Heading("category", numeric=False), lambda part: part.category),
        Column(Heading("what", numeric=False), lambda part: part.label),
        Column(Heading("count"), lambda part: f"{part.count:,}"),
        Column(Heading("size", "MiB"), lambda part: significant(part.size_bytes / MIB)),
        Column(Heading("share", "%"), lambda part: f"{100 * part.size_bytes / whole:.1f}"),
        Column(Heading("bytes of each", numeric=False), lambda part: part.formula),
    ]
    more = (f"{len(parts) - len(shown)} more hold {significant(rest / MIB)} MiB.",) if rest else ()
    return make_table(title, columns, shown, notes=(*more, *notes))


def _peak_table(prediction: MemoryPrediction, top: int) -> Table:
    peak = prediction.peak
    title = f"The peak, {significant(peak.allocated_bytes / GIB)} GiB in {peak.phase}"
    return _parts(title, peak.parts, top, ("The sum of all is the peak, to the byte.",))


def _block_table(parts: tuple[Part, ...], top: int) -> Table:
    whole = sum(part.size_bytes for part in parts)
    return _parts(f"Saved for backward by one block, {significant(whole / MIB)} MiB", parts, top, ())


def _fit_table(config: RunConfig, memory_bytes: int) -> Table:
    room = f"{significant(memory_bytes / GIB)} GiB"
    answers = (
        ("this configuration", {True: "fits", False: "does not fit", None: ""}[fits(config, memory_bytes)]),
        (f"largest batch at context {config.model.context_length:,}", _number(largest_batch(config, memory_bytes))),
        (f"longest context at batch {config.batch_size:,}", _number(largest_context(config, memory_bytes))),
    )
    return Table(
        title=f"What fits {room}",
        headings=(Heading("question", numeric=False), Heading("answer")),
        rows=answers,
        notes=("On an otherwise empty GPU; the CUDA context and fragmentation are counted.",),
    )


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
