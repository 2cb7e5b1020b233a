"""What a step costs, as tables: FLOPs and bytes by part of the model, what the peak of memory holds, what fits."""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from cs336_systems.config import Arch, Mode, Precision, RunConfig
from cs336_systems.costs.accounting import (
    Component,
    Work,
    component_flops,
    forward_work,
    least_time_s,
    optimizer_work,
    parameters_by_component,
    ridge_point,
    state_bytes,
)
from cs336_systems.costs.hardware import DeviceSpec
from cs336_systems.costs.memory import (
    MemoryPrediction,
    Part,
    fits,
    largest_batch,
    largest_context,
    predict_memory,
    residual_stream_bytes,
    saved_by_block,
)
from cs336_systems.costs.napkin import rule_of_thumb_flops
from cs336_systems.report.columns import Column
from cs336_systems.report.numbers import percent, significant
from cs336_systems.report.section import Section
from cs336_systems.report.table import Table, make_table

GIB, MIB = 2**30, 2**20
TERA, GIGA = 10**12, 10**9
ALL = "all"
FULL, CAUSAL = ("forward", "backward", "step", "recomputed", "hardware"), ("forward", "backward", "step")
"""Which FLOPs of a part are shown with attention in full, and which as causal."""
CSV_COLUMNS = (
    "component", "parameters", *(f"{name}_flops" for name in FULL), *(f"{name}_causal_flops" for name in CAUSAL),
    "forward_moved_bytes",
)  # fmt: skip
Numbers = Mapping[str, int]
"""Of one part of the model, by the name of their column; what it has none of is not there."""
UNMEASURED = "No share of a measured ceiling: cs336 ceilings on that device gives one (--ceilings DIR)."
NOT_PREDICTED = "Not predicted: fp32 has no flash and no cuDNN attention."


def account_section(
    config: RunConfig,
    device: DeviceSpec | None,
    step_s: float | None,
    memory_bytes: int | None,
    top: int,
    ceiling_flops_per_s: float | None = None,
) -> Section:
    """What is known of one configuration of this project's model; the CSV has a row for each part of the model.

    `device` adds what its data sheet says, `step_s` the rates of a step that takes so long, `ceiling_flops_per_s` their
    share of what products were measured to reach on this device, `memory_bytes` what fits a GPU of so much; `top`
    limits the tables of the peak and of a block.
    """
    prediction, parts = predict_memory(config), _numbers(config)
    tables = [
        *([_fit_table(config, memory_bytes)] if memory_bytes is not None else ()),
        _cost_table(config, parts[ALL], prediction),
        _flops_table(parts),
        _state_table(config, parts[ALL]),
        _intensity_table(config, device),
        _rule_table(config, parts),
    ]
    if step_s is not None:
        tables.append(_rates_table(config, parts[ALL], device, step_s, ceiling_flops_per_s))
    if prediction is not None:
        tables.append(_peak_table(prediction, top))
        if _saves_blocks(config):
            tables.append(_block_table(config, top))
    rows = [{**dict.fromkeys(CSV_COLUMNS), **row, "component": name} for name, row in parts.items()]
    return Section(name="account", tables=tuple(tables), rows=rows, keys=CSV_COLUMNS)


def account_json(
    config: RunConfig,
    device: DeviceSpec | None,
    step_s: float | None,
    memory_bytes: int | None,
    ceiling_flops_per_s: float | None = None,
) -> dict[str, object]:
    """What `account_section` says, as numbers in SI units; None for what is not asked or not known."""
    parts, state = _numbers(config), state_bytes(config)
    work = [*forward_work(config), *((optimizer_work(config.model),) if config.mode is Mode.TRAIN else ())]
    return {
        "config": config,
        "tokens": _tokens(config),
        "parts": [{"component": name} | {key: row.get(key) for key in CSV_COLUMNS[1:]} for name, row in parts.items()],
        "state": {f"{field.name}_bytes": getattr(state, field.name) for field in fields(state)},
        "work": work,
        "memory": predict_memory(config),
        "saved_by_block": saved_by_block(config) if _saves_blocks(config) else None,
        "device": device,
        "rates": None if step_s is None else _rates(config, parts[ALL], device, step_s, ceiling_flops_per_s),
        "fit": None
        if memory_bytes is None
        else {
            "memory_bytes": memory_bytes,
            "fits": fits(config, memory_bytes),
            "largest_batch_size": largest_batch(config, memory_bytes),
            "longest_context_length": largest_context(config, memory_bytes),
        },
    }


def _rates(
    config: RunConfig, whole: Numbers, device: DeviceSpec | None, step_s: float, ceiling_flops_per_s: float | None
) -> dict[str, float | None]:
    """What a step that takes so long achieves; None for shares of what is not known."""
    peak = device.peak_flops_per_s.get(config.precision) if device else None
    rate = whole["step_flops"] / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": _tokens(config) / step_s,
        "model_flops_per_s": rate,
        "mfu": None if peak is None else rate / peak,
        "mfu_causal": None if peak is None else whole["step_causal_flops"] / step_s / peak,
        "hardware_mfu": None if peak is None else whole["hardware_flops"] / step_s / peak,
        "ceiling_share": None if ceiling_flops_per_s is None else rate / ceiling_flops_per_s,
    }


def _numbers(config: RunConfig) -> dict[str, dict[str, int]]:
    """The rows of the CSV by component, and their sum."""
    rows: dict[str, dict[str, int]] = {component: {} for component in Component}
    for component, count in parameters_by_component(config.model).items():
        rows[component]["parameters"] = count
    for flops in component_flops(config):
        rows[flops.component] |= {f"{name}_flops": getattr(flops, name) for name in FULL}
    for flops in component_flops(config, causal=True):
        rows[flops.component] |= {f"{name}_causal_flops": getattr(flops, name) for name in CAUSAL}
    for work in forward_work(config):
        rows[work.name]["forward_moved_bytes"] = work.moved_bytes
    rows[ALL] = {name: sum(row.get(name, 0) for row in rows.values()) for name in CSV_COLUMNS[1:]}
    return rows


def _cost_table(config: RunConfig, whole: Numbers, prediction: MemoryPrediction | None) -> Table:
    again = whole["recomputed_flops"]
    rows = [
        ("parameters", f"{whole['parameters']:,}", ""),
        ("model FLOPs of a step", _tera(whole["step_flops"]), "TFLOP"),
        ("with attention counted as causal", _tera(whole["step_causal_flops"]), "TFLOP"),
        *([("FLOPs computed again", _tera(again), "TFLOP")] if again else ()),
        ("tokens of a step", f"{_tokens(config):,}", ""),
        ("one tensor of the residual stream", significant(residual_stream_bytes(config) / MIB), "MiB"),
        *(_memory_rows(prediction) if prediction else ()),
    ]
    batch = f"batch {config.batch_size}"
    return Table(
        title=f"One step of {config.label}{'' if batch in config.label else f', {batch}'}",
        headings=(Column("quantity", numeric=False), Column("value"), Column("unit", numeric=False)),
        rows=tuple(rows),
        notes=(
            "FLOPs are those of matrix products, attention in full unless said. Memory: as PyTorch's allocator counts "
            "it, predicted, eager, on Hopper.",
            *(() if prediction else (NOT_PREDICTED,)),
        ),
    )


def _tokens(config: RunConfig) -> int:
    return config.batch_size * config.model.context_length


def _tera(count: int | None) -> str:
    """FLOPs in TFLOP for a cell; empty for None."""
    return "" if count is None else significant(count / TERA) if count else "0"


def _flops_table(parts: Mapping[str, Numbers]) -> Table:
    whole = parts[ALL]
    columns: list[Column[tuple[str, Numbers]]] = [
        Column("part", numeric=False, text=lambda row: row[0]),
        Column(
            "parameters", drop_order=3, text=lambda row: f"{row[1]['parameters']:,}" if "parameters" in row[1] else ""
        ),
        _flops_column("forward", "forward_flops", drop_order=1 if whole["backward_flops"] else 0),
    ]
    notes = ["A multiply-add is 2 FLOPs; causal: only the pairs of a query and a key that is not after it count."]
    if whole["backward_flops"]:
        columns += [_flops_column("backward", "backward_flops", drop_order=2), _flops_column("step", "step_flops")]
    if whole["recomputed_flops"]:
        columns.append(_flops_column("again", "recomputed_flops", drop_order=4))
        notes.append(
            "again: what backward computes once more, between checkpoints or in fused attention. It is no part of the "
            f"model's FLOPs: the hardware's are {_tera(whole['hardware_flops'])} TFLOP."
        )
    columns.append(
        Column(
            "share",
            "%",
            drop_order=1,
            text=lambda row: percent(row[1]["step_flops"], whole["step_flops"]) if "step_flops" in row[1] else "",
        )
    )
    columns.append(_flops_column("forward, causal", "forward_causal_flops", drop_order=6))
    if whole["backward_flops"]:
        columns.append(_flops_column("backward, causal", "backward_causal_flops", drop_order=7))
        columns.append(_flops_column("step, causal", "step_causal_flops", drop_order=5))
    return make_table("FLOPs by part of the model", columns, parts.items(), notes)


def _flops_column(name: str, key: str, drop_order: int = 0) -> Column[tuple[str, Numbers]]:
    return Column(name, "TFLOP", drop_order=drop_order, text=lambda row: _tera(row[1].get(key)))


def _state_table(config: RunConfig, whole: Numbers) -> Table:
    state = state_bytes(config)
    until = "backward has used them" if state.gradients else "forward ends"
    rows = (
        ("parameters", Precision.FP32, state.parameters, "always"),
        ("gradients", Precision.FP32, state.gradients, "from backward to the end of the step"),
        ("optimizer's moments", Precision.FP32, state.optimizer_state, "from the end of the first step"),
        ("autocast's copies of weights", config.precision, state.weight_copies, f"from forward until {until}"),
    )
    columns: list[Column[tuple[str, Precision, int, str]]] = [
        Column("what", numeric=False, text=lambda row: row[0]),
        Column("dtype", numeric=False, drop_order=2, text=lambda row: row[1]),
        Column("size", "GiB", text=lambda row: significant(row[2] / GIB)),
        Column(
            "for each parameter", "byte", drop_order=1, text=lambda row: significant(row[2] / whole["parameters"], 3)
        ),
        Column("held", numeric=False, drop_order=3, text=lambda row: row[3]),
    ]
    return make_table("Memory for parameters, gradients and optimizer state", columns, [row for row in rows if row[2]])


def _intensity_table(config: RunConfig, device: DeviceSpec | None) -> Table:
    update = (optimizer_work(config.model),) if config.mode is Mode.TRAIN else ()
    columns: list[Column[Work]] = [
        Column("part", numeric=False, text=lambda work: work.name),
        Column("FLOPs", "GFLOP", drop_order=3, text=lambda work: significant(work.flops / GIGA) if work.flops else "0"),
        Column("moves at least", "MiB", drop_order=2, text=lambda work: significant(work.moved_bytes / MIB)),
        Column("intensity", "FLOP/byte", text=lambda work: significant(work.intensity) if work.flops else "0"),
    ]
    notes = [
        "Every factor and result of a product moves once; the scores of fused attention do not. Norms, softmax, casts "
        "and the loss come on top."
    ]
    if device is not None:
        columns.append(Column("bound by", numeric=False, drop_order=1, text=lambda work: _bound(work, device)))
        columns.append(Column("takes at least", "ms", text=lambda work: _least_ms(work, device)))
        notes += _ridge_note(device, config.precision)
    title = "Arithmetic intensity of forward and of the optimizer" if update else "Arithmetic intensity of forward"
    return make_table(title, columns, [*forward_work(config), *update], notes)


def _bound(work: Work, device: DeviceSpec) -> str:
    """What sets the time on this device; empty where its peak is not known."""
    ridge = ridge_point(device, work.precision)
    if ridge is None:
        return ""
    return "memory" if work.intensity < ridge else "arithmetic"


def _least_ms(work: Work, device: DeviceSpec) -> str:
    time_s = least_time_s(work, device)
    return "" if time_s is None else significant(time_s * 1e3)


def _ridge_note(device: DeviceSpec, precision: Precision) -> Iterator[str]:
    ridge, name = ridge_point(device, precision), device.names[0]
    if ridge is None:
        yield f"No peak of {name} at {precision} is known."
        return
    yield (
        f"{name}, by its data sheet: {device.peak_flops_per_s[precision] / TERA:g} TFLOP/s at {precision} over "
        f"{device.memory_bandwidth_bytes_per_s / TERA:g} TB/s are {significant(ridge)} FLOP/byte; what has less is "
        "bound by memory."
    )


def _rule_table(config: RunConfig, parts: Mapping[str, Numbers]) -> Table:
    whole = parts[ALL]
    multiplying = whole["parameters"] - parts[Component.EMBEDDING]["parameters"]
    rules = [("2 N T", False, "forward")] + ([("6 N T", True, "step")] if whole["backward_flops"] else [])
    rows = [
        (rule, name, count, rule_of_thumb_flops(count, _tokens(config), backward=backward), key)
        for rule, backward, key in rules
        for name, count in (("all parameters", whole["parameters"]), ("without the embedding", multiplying))
    ]
    columns: list[Column[tuple[str, str, int, float, str]]] = [
        Column("rule of thumb", numeric=False, text=lambda row: f"{row[0]}, {row[4]}"),
        Column("N counts", numeric=False, drop_order=5, text=lambda row: row[1]),
        Column("N", drop_order=4, text=lambda row: f"{row[2]:,}"),
        Column("rule", "TFLOP", drop_order=3, text=lambda row: significant(row[3] / TERA)),
        Column("exact", "TFLOP", drop_order=2, text=lambda row: _tera(whole[f"{row[4]}_flops"])),
        Column("exact / rule", text=lambda row: f"{whole[f'{row[4]}_flops'] / row[3]:.4f}"),
        Column("causal / rule", drop_order=1, text=lambda row: f"{whole[f'{row[4]}_causal_flops'] / row[3]:.4f}"),
    ]
    shared = "positions alone, as its table is the head's" if _is_tied(config) else "the table that tokens look up"
    note = f"T: the {_tokens(config):,} tokens of the batch. The embedding: {shared}. The rule knows no attention."
    return make_table("The rule of thumb against the exact count", columns, rows, [note])


def _is_tied(config: RunConfig) -> bool:
    return config.model.arch is Arch.GPT2


def _rates_table(
    config: RunConfig, whole: Numbers, device: DeviceSpec | None, step_s: float, ceiling_flops_per_s: float | None
) -> Table:
    peak = device.peak_flops_per_s.get(config.precision) if device else None
    rows = [
        ("time of a step", significant(step_s * 1e3), "ms"),
        ("tokens", significant(_tokens(config) / step_s), "per s"),
        ("model FLOPs", significant(whole["step_flops"] / step_s / TERA), "TFLOP/s"),
    ]
    if device is not None and peak is not None:
        rows += [
            (f"peak of {device.names[0]} at {config.precision}", significant(peak / TERA), "TFLOP/s"),
            ("MFU", significant(100 * whole["step_flops"] / step_s / peak), "%"),
            ("with attention counted as causal", significant(100 * whole["step_causal_flops"] / step_s / peak), "%"),
        ]
        if whole["recomputed_flops"]:
            hardware = significant(100 * whole["hardware_flops"] / step_s / peak)
            rows.append(("with what is computed again", hardware, "%"))
    if ceiling_flops_per_s is not None:
        share = whole["step_flops"] / step_s / ceiling_flops_per_s
        rows += [
            (f"measured ceiling at {config.precision}", significant(ceiling_flops_per_s / TERA), "TFLOP/s"),
            ("share of the measured ceiling", significant(100 * share), "%"),
        ]
    unknown = "No MFU: the peak of the GPU at this precision is not known (--device-name)."
    meaning = "MFU: the model's FLOPs, attention in full, over the dense peak that the data sheet promises."
    return Table(
        title="What such a step achieves",
        headings=(Column("quantity", numeric=False), Column("value"), Column("unit", numeric=False)),
        rows=tuple(rows),
        notes=(unknown if peak is None else meaning, *([UNMEASURED] if ceiling_flops_per_s is None else [])),
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
        Column("category", numeric=False, text=lambda part: part.category),
        Column("what", numeric=False, text=lambda part: part.label),
        Column("count", drop_order=3, text=lambda part: f"{part.count:,}"),
        Column("size", "MiB", text=lambda part: significant(part.size_bytes / MIB)),
        Column("share", "%", drop_order=1, text=lambda part: f"{100 * part.size_bytes / whole:.1f}"),
        Column("bytes of each", numeric=False, drop_order=2, text=lambda part: part.formula),
    ]
    more = (f"{len(parts) - len(shown)} more hold {significant(rest / MIB)} MiB.",) if rest else ()
    return make_table(title, columns, shown, notes=(*more, *notes))


def _peak_table(prediction: MemoryPrediction, top: int) -> Table:
    peak = prediction.peak
    title = f"The peak, {significant(peak.allocated_bytes / GIB)} GiB in {peak.phase}"
    return _parts(title, peak.parts, top, ("The sum of all is the peak, to the byte.",))


def _saves_blocks(config: RunConfig) -> bool:
    """Whether what is inside a block is ever kept; between checkpoints only backward does, which computes it again."""
    return config.mode is not Mode.INFERENCE and not (config.mode is Mode.FORWARD and config.checkpoint_blocks)


def _block_table(config: RunConfig, top: int) -> Table:
    parts = saved_by_block(config) or ()
    when = " while it is computed again" if config.checkpoint_blocks else ""
    whole = significant(sum(part.size_bytes for part in parts) / MIB)
    return _parts(f"Saved for backward by one block{when}, {whole} MiB", parts, top, ())


def _fit_table(config: RunConfig, memory_bytes: int) -> Table:
    room = f"{significant(memory_bytes / GIB)} GiB"
    answers = (
        ("this configuration", {True: "fits", False: "does not fit", None: ""}[fits(config, memory_bytes)]),
        (f"largest batch at context {config.model.context_length:,}", _number(largest_batch(config, memory_bytes))),
        (f"longest context at batch {config.batch_size:,}", _number(largest_context(config, memory_bytes))),
    )
    return Table(
        title=f"What fits {room}",
        headings=(Column("question", numeric=False), Column("answer")),
        rows=answers,
        notes=("On an otherwise empty GPU; the CUDA context and fragmentation are counted.",),
    )


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
