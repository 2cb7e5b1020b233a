"""What a step costs, as tables: FLOPs and bytes by part of the model, what the peak of memory
holds, what fits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from ...config import Mode, Phase, RunConfig
from ...costs import accounting, fit, memory
from ...costs.communication import Collective, CollectiveCall, calls, sent_share
from ...costs.curves import MATMUL_EFFICIENCY, MEMORY_EFFICIENCY, time_s
from ...costs.curves import Curves as DeviceCurves
from ...costs.hardware import DeviceSpec
from ...costs.ranks_time import predicted_time
from ...costs.shards import FP32_BYTES
from ...costs.tape import Category
from ...costs.time import StepLimit, TimePrediction, costs_by_module
from ...costs.traces import idle_parameters, own_parameters, why_untraced
from ..columns import Row, column, columns_of
from ..section import Section, Table, make_table, quantity_table
from ..words import DOUBTED_FORECAST, GIB, MIB, SHIPPED, TERA, amount, ratio, rounded, significant

ALL = "all"
QUANTITY_KEYS = ("quantity", "amount", "unit", "how")
FLOPS = ("forward", "backward", "step")
CSV_COLUMNS = (
    "component",
    "parameters",
    *(f"{name}_flops" for name in FLOPS),
    "step_causal_flops",
    "forward_moved_bytes",
    "backward_moved_bytes",
)
KINDS = tuple(Collective)
Curves = Mapping[Collective, Mapping[int, float]]
"""Measured times of collectives, by bytes."""
NOT_TRACED = "Not predicted beyond that: the step cannot be traced."
BALANCED = (
    "Which experts a token chooses is data: each expert is taken to be chosen as often as any "
    "other."
)
NOT_PREDICTED = "Not predicted: fp32 has no flash and no cuDNN attention."


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A configuration whose cost is asked for, with what is known besides; a user's own model is
    traced already.
    """

    config: RunConfig
    device: DeviceSpec | None = None
    """Data sheet of the device, if it has one."""
    memory_bytes: int | None = None
    """Memory that the step must fit into."""
    collective_times: Curves = field(default_factory=dict)
    """Measured times of collectives among such devices."""
    curves: DeviceCurves | None = None
    """From which the time of the step is predicted."""
    device_name: str | None = None
    """The device of the predicted time."""

    @property
    def time(self) -> TimePrediction | None:
        """The predicted time of the step."""
        return None if self.curves is None else predicted_time(self.config, self.curves)


def account_section(account: Account, top: int) -> Section:
    """The cost of one configuration; the CSV has a row for each part of the model.

    `top` is the most rows of the table of the peak.
    """
    config, is_own = account.config, account.config.model_factory is not None
    prediction, parts = memory.predict_memory(config), _parts(config)
    whole = parts[ALL]
    tables = [
        *([_fit_table(config, account.memory_bytes)] if account.memory_bytes is not None else ()),
        _cost_table(config, whole, prediction),
        _flops_table(parts, is_own=is_own),
        *(
            [_collectives_table(config, account.collective_times)]
            if not is_own and calls(config)
            else ()
        ),
        *(() if is_own else [_least_table(config, account.device)]),
        *_time_tables(account),
    ]
    if prediction is not None:
        tables += [_categories_table(prediction), _peak_table(prediction, top)]
    return Section(
        name="account", tables=tuple(tables), rows=list(parts.values()), keys=CSV_COLUMNS
    )


def account_json(account: Account) -> dict[str, object]:
    """What `account_section` says, as numbers in SI units; None for what is not asked or not
    known.
    """
    config, memory_bytes, is_own = (
        account.config,
        account.memory_bytes,
        account.config.model_factory is not None,
    )
    return {
        "config": config,
        "tokens": _tokens(config),
        "active_parameters": _active_parameters(config),
        "parts": [{key: row[key] for key in CSV_COLUMNS} for row in _parts(config).values()],
        "work": None if is_own else _work(config),
        "memory": memory.predict_memory(config),
        "collectives": _collectives(config, account.collective_times) if calls(config) else None,
        "time": account.time,
        "time_is_measured": account.curves.is_measured if account.curves and account.time else None,
        "device": account.device,
        "fit": None
        if memory_bytes is None
        else {"memory_bytes": memory_bytes, **_fit(config, memory_bytes)},
    }


def _parts(config: RunConfig) -> dict[str, Row]:
    """A row for each part of the model by its name, and one for their sum; None for what a part has
    none of.

    The parts of a user's own model are its modules.
    """
    if config.model_factory is not None:
        return _with_sum(
            {
                path: dict.fromkeys(CSV_COLUMNS)
                | {"component": path}
                | asdict(costs)
                | {"step_flops": sum_of_known([costs.forward_flops, costs.backward_flops])}
                for path, costs in costs_by_module(config).items()
            }
        )
    rows: dict[str, Row] = {
        name: dict.fromkeys(CSV_COLUMNS) | {"component": name} for name in accounting.Component
    }
    for component, count in accounting.parameters_by_component(config.model).items():
        rows[component]["parameters"] = count
    for flops in accounting.component_flops(config):
        rows[flops.component] |= {f"{name}_flops": getattr(flops, name) for name in FLOPS}
    for flops in accounting.component_flops(config, causal=True):
        rows[flops.component]["step_causal_flops"] = flops.step
    for work in accounting.forward_work(config):
        rows[work.name]["forward_moved_bytes"] = work.moved_bytes
    return _with_sum(rows)


def _with_sum(rows: dict[str, Row]) -> dict[str, Row]:
    sums = {name: sum_of_known(row.get(name) for row in rows.values()) for name in CSV_COLUMNS[1:]}
    rows[ALL] = {"component": ALL, **sums}
    for row in rows.values():
        row["share"] = ratio(row["step_flops"], sums["step_flops"])
    return rows


def sum_of_known(values: Iterable[float | None]) -> float | None:
    """The sum of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _work(config: RunConfig) -> list[accounting.PartWork]:
    """The matrix products of forward, and the update of a training step."""
    return [
        *accounting.forward_work(config),
        *([accounting.optimizer_work(config)] if config.mode is Mode.TRAIN else []),
    ]


def _tokens(config: RunConfig) -> int:
    return config.batch_size * config.model.context_length


def _active_parameters(config: RunConfig) -> int | None:
    """Parameters that are multiplied by a token, or looked up; None of a model without experts."""
    idle = None if config.model_factory is None else idle_parameters(config.alone)
    return None if idle is None else sum(own_parameters(config.alone).values()) - idle


def _cost_table(config: RunConfig, whole: Row, prediction: memory.MemoryPrediction | None) -> Table:
    batch = f"batch {config.batch_size}"
    is_own = config.model_factory is not None
    active = _active_parameters(config)
    moments = 2 * FP32_BYTES * whole["parameters"] if config.mode is Mode.TRAIN else 0
    state = [
        ("parameters", FP32_BYTES * whole["parameters"] / GIB, "GiB"),
        *([("moments of AdamW", moments / GIB, "GiB")] if moments else ()),
    ]
    rows = [
        ("parameters", whole["parameters"], ""),
        *([] if active is None else [("active for each token", active, "")]),
        *(
            [(f"{'' if is_own else 'model '}FLOPs of a step", whole["step_flops"] / TERA, "TFLOP")]
            if whole["step_flops"]
            else ()
        ),
        *(
            ()
            if is_own
            else [("with attention counted as causal", whole["step_causal_flops"] / TERA, "TFLOP")]
        ),
        ("tokens of a step", _tokens(config), ""),
        *(state if is_own and not prediction else ()),
        *(
            ()
            if is_own
            else [
                (
                    "one tensor of the residual stream",
                    memory.residual_stream_bytes(config) / MIB,
                    "MiB",
                )
            ]
        ),
        *((name, num_bytes / GIB, "GiB") for name, num_bytes in _predicted(prediction)),
    ]
    notes = (
        "FLOPs are those of matrix products, attention in full unless said. Memory: as PyTorch's "
        "allocator counts it, predicted, eager, on Hopper.",
        *(() if prediction else (NOT_TRACED if is_own else NOT_PREDICTED,)),
        *(() if active is None else (BALANCED,)),
    )
    own = (
        f"{config.model_factory}, {config.mode}, {config.precision}, context "
        f"{config.model.context_length}"
    )
    label = own if is_own else config.label
    return quantity_table(
        f"One step of {label}{'' if batch in label else f', {batch}'}", rows, notes
    )


def _predicted(prediction: memory.MemoryPrediction | None) -> Iterator[tuple[str, int]]:
    """Bytes at the moments of a step."""
    if prediction is None:
        return
    yield f"peak memory, in {prediction.peak.phase}", prediction.peak.allocated_bytes
    yield "peak memory of the first step", prediction.first_step_peak.allocated_bytes
    yield "reserved", prediction.reserved_bytes
    yield "allocated when a step begins", prediction.start_bytes
    yield from (
        (f"allocated after {phase}", num_bytes)
        for phase, num_bytes in prediction.after_bytes.items()
    )


def _flops_table(parts: Mapping[str, Row], *, is_own: bool) -> Table:
    backward = parts[ALL]["backward_flops"]
    if not parts[ALL]["forward_flops"]:  # the step of a user's own model was not traced
        return make_table(
            "Parameters by module", [column("component"), column("parameters")], parts.values()
        )
    moved = ("forward_moved_bytes", *(["backward_moved_bytes"] if backward else ()))
    shown = columns_of(
        "component",
        "parameters",
        column("forward_flops", drop_order=1 if backward else 0),
        *(["backward_flops", "step_flops"] if backward else ()),
        "share",
        *(moved if is_own else ["step_causal_flops"]),
    )
    causal = "causal: only the pairs of a query and a key that is not after it count."
    own = (
        "what is computed again counts again. Moved: what each kernel reads and writes. "
        "--module-depth shows more."
    )
    notes = [f"A multiply-add is 2 FLOPs; {own if is_own else causal}"]
    return make_table(
        f"FLOPs by {'module' if is_own else 'part of the model'}", shown, parts.values(), notes
    )


def _least_table(config: RunConfig, device: DeviceSpec | None) -> Table:
    """The least bytes that each part of forward moves, and the least time on the device, if it
    is known.
    """
    columns = [
        column("what", name="part"),
        column("flops", name="FLOPs", drop_order=3, write=rounded),
        column("moved_mib", name="moves at least", drop_order=2),
        column("flops_per_byte", drop_order=0, write=rounded),
    ]
    rows: list[Row] = [
        {
            "what": work.name,
            "flops": work.flops,
            "moved_mib": work.moved_bytes / MIB,
            "flops_per_byte": work.intensity,
        }
        for work in _work(config)
    ]
    notes = [
        "Every factor and result of a product moves once. Fused attention moves no scores, and "
        "computes only those of causal pairs. Norms, softmax, casts and the loss come on top."
    ]
    if device is not None and config.precision in device.peak_flops_per_s:
        columns += [column("bound_by"), column("least_s")]
        for row, work in zip(rows, _work(config), strict=True):
            least_s = accounting.least_time_s(work, device)
            moves_s = work.moved_bytes / device.memory_bandwidth_bytes_per_s
            row |= {
                "bound_by": least_s and ("memory" if least_s == moves_s else "arithmetic"),
                "least_s": least_s,
            }
        notes.append(f"The least time is that of {device.names[0]} by its data sheet.")
    update = " and of the optimizer" if config.mode is Mode.TRAIN else ""
    return make_table(f"Arithmetic intensity of forward{update}", columns, rows, notes)


def _collectives(config: RunConfig, curves: Curves) -> list[Row]:
    """A row for each kind and size of the collectives of a step; those of one kind stand
    together.
    """
    found: Mapping[CollectiveCall, int] = calls(config) or {}
    return [
        {
            "collective": call.collective,
            "count": count,
            "num_bytes": call.num_bytes,
            "sent_bytes": count * call.num_bytes * sent_share(call.collective, config.ranks),
            "time_s": time_s({call: count}, curves),
        }
        for call, count in sorted(
            found.items(), key=lambda each: (KINDS.index(each[0].collective), each[0].num_bytes)
        )
    ]


def _collectives_table(config: RunConfig, curves: Curves) -> Table:
    rows = _collectives(config, curves)
    has_times = all(row["time_s"] is not None for row in rows)
    sums = {
        key: sum(row[key] for row in rows)
        for key in ("count", "sent_bytes", *(["time_s"] if has_times else []))
    }
    whole = {"collective": ALL, "num_bytes": None, "time_s": None} | sums
    columns = columns_of("collective", "calls", "call_mib", "calls_sent_mib")
    notes = ["Tensors: those of one call together. Sent: by each rank, if all form a ring."]
    if has_times:
        columns.append(column("calls_ms"))
        notes.append(
            "Time: one call after the other, interpolated between measured sizes; nothing "
            "computes meanwhile."
        )
    else:
        notes.append(
            f"No time: cs336 ceilings among {config.ranks} such devices gives one (--ceilings DIR)."
        )
    shown = [
        {
            "collective": row["collective"],
            "calls": row["count"],
            "call_mib": ratio(row["num_bytes"], MIB),
            "calls_sent_mib": row["sent_bytes"] / MIB,
            "calls_ms": ratio(row["time_s"], 1e-3),
        }
        for row in (*rows, whole)
    ]
    return make_table("Collectives of a step", columns, shown, notes)


def _time_tables(account: Account) -> Iterator[Table]:
    """The predicted time of each phase, and of its kernels alone; no table if it is not
    predicted.
    """
    curves, time = account.curves, account.time
    if curves is None or time is None:
        return
    rows = [
        *(
            {
                "phase": phase,
                "predicted_ms": 1e3 * time_s,
                "kernels_ms": 1e3 * time.kernels_s[phase],
            }
            for phase, time_s in time.phases_s.items()
        ),
        {
            "phase": Phase.STEP,
            "predicted_ms": 1e3 * time.step_s,
            "kernels_ms": 1e3 * sum(time.kernels_s.values()),
        },
    ]
    limit = {
        StepLimit.DEVICE: "The GPU is the limit",
        StepLimit.LAUNCHES: (
            f"Launches are the limit, which take the CPU {rounded(1e3 * time.launch_s)} ms"
        ),
    }[time.limit]
    of_device = f"the ceilings of {account.device_name}" if account.device_name else "ceilings"
    notes = (
        f"{limit}; the GPU is busy for {100 * time.busy_share:.0f} % of the step.",
        (
            f"From the configuration and {of_device} alone; cs336 report DIR says how far it is "
            "from measured steps."
        )
        if curves.is_measured or account.device is None
        else by_data_sheet(account.device.names[0]),
        *([SHIPPED] if curves.is_shipped else []),
        *([DOUBTED_FORECAST] if curves.is_in_doubt else []),
    )
    doubt = {"prediction_is_doubted": curves.is_in_doubt}
    keys = ("phase", "predicted_ms", "kernels_ms")
    yield make_table(
        "Predicted time of a step", columns_of(*keys), [row | doubt for row in rows], notes
    )


def by_data_sheet(device_name: str) -> str:
    """A note below times of a device without ceilings."""
    return (
        f"There are no ceilings of {device_name} with matmuls of such a size: by its data sheet, "
        f"with stated efficiencies of {100 * MATMUL_EFFICIENCY:.0f} % in matmuls and "
        f"{100 * MEMORY_EFFICIENCY:.0f} % of the memory bandwidth."
    )


def _categories_table(prediction: memory.MemoryPrediction) -> Table:
    peak = prediction.peak
    sizes = {category: peak.bytes_of(category) for category in Category}
    rows = [
        {"category": category, "size_bytes": size, "share": size / peak.allocated_bytes}
        for category, size in sizes.items()
        if size
    ]
    return make_table("The peak by category", columns_of("category", "size_bytes", "share"), rows)


def _peak_table(prediction: memory.MemoryPrediction, top: int) -> Table:
    """The largest parts of the peak; how many more there are is said below."""
    peak = prediction.peak
    shown = sorted(peak.parts, key=lambda part: -part.size_bytes)[:top]
    rest = peak.allocated_bytes - sum(part.size_bytes for part in shown)
    rows = [
        asdict(part) | {"what": part.label, "share": part.size_bytes / peak.allocated_bytes}
        for part in shown
    ]
    columns = (
        column("category", drop_order=0),
        column("what"),
        column("count", drop_order=3),
        column("size_bytes"),
        column("share"),
        column("formula"),
    )
    more = (
        (f"{len(peak.parts) - len(shown)} more hold {significant(rest / MIB)} MiB.",)
        if rest
        else ()
    )
    title = f"The peak, {significant(peak.allocated_bytes / GIB)} GiB in {peak.phase}"
    return make_table(
        title, columns, rows, notes=(*more, "The sum of all is the peak, to the byte.")
    )


def _fit(config: RunConfig, memory_bytes: int) -> Row:
    """What fits; None where it is not predicted."""
    return {
        "fits": fit.fits(config, memory_bytes),
        "largest_batch_size": fit.largest_batch(config, memory_bytes),
        "longest_context_length": fit.largest_context(config, memory_bytes),
    }


def _fit_table(config: RunConfig, memory_bytes: int) -> Table:
    found = _fit(config, memory_bytes)
    rows = [
        ("this configuration", {True: "fits", False: "does not fit", None: None}[found["fits"]]),
        (f"largest batch at context {config.model.context_length:,}", found["largest_batch_size"]),
        (f"longest context at batch {config.batch_size:,}", found["longest_context_length"]),
    ]
    notes = ["On an otherwise empty GPU; the CUDA context and fragmentation are counted."]
    if (longest := found["longest_context_length"]) is not None:
        longer = replace(config, model=replace(config.model, context_length=longest + 1))
        if reason := why_untraced(longer):
            notes.append(f"A context of {longest + 1:,} cannot be traced: {reason}")
    return quantity_table(
        f"What fits {significant(memory_bytes / GIB)} GiB", rows, notes, ("question", "answer")
    )


def days_table(
    *,
    parameters: float,
    tokens: float,
    peak_flops_per_s: float,
    peak_source: str,
    count: int,
    mfu: float,
) -> Table:
    """How many days training takes, or hours, minutes, seconds; `peak_source` says where the
    peak comes from.
    """
    flops, flops_per_s = (
        accounting.rule_of_thumb_flops(parameters, tokens),
        count * peak_flops_per_s * mfu,
    )
    days = accounting.training_days(
        parameters=parameters,
        tokens=tokens,
        peak_flops_per_s=peak_flops_per_s,
        count=count,
        mfu=mfu,
    )
    # the largest unit of which the time is one or more, seconds for less than all
    units = (("days", accounting.SECONDS_PER_DAY), ("hours", 3600), ("minutes", 60))
    unit, unit_s = next(
        (unit for unit in units if days * accounting.SECONDS_PER_DAY >= unit[1]), ("s", 1)
    )
    time = days * accounting.SECONDS_PER_DAY / unit_s
    backward = accounting.TRAINING_FLOPS - accounting.FORWARD_FLOPS
    rows = (
        ("parameters N", parameters, "", "given"),
        ("tokens T", tokens, "", "given"),
        ("FLOPs of the training", flops, "FLOP", f"{accounting.TRAINING_FLOPS} N T"),
        ("peak of one device", peak_flops_per_s, "FLOP/s", peak_source),
        ("devices", count, "", "given"),
        ("MFU", mfu, "", "given"),
        ("FLOPs per second", flops_per_s, "FLOP/s", "devices x peak x MFU"),
        ("time", flops / flops_per_s, "s", "FLOPs / FLOPs per second"),
        *([("time", time, unit, f"seconds / {unit_s:,}")] if unit_s > 1 else ()),
    )
    note = (
        f"Each parameter takes {accounting.TRAINING_FLOPS} FLOPs per token: "
        f"{accounting.FORWARD_FLOPS} in forward, a multiply-add, and {backward} in backward, one "
        "product for the gradient of the input and one for that of the weight. MFU is the share "
        "of the promised dense peak that is put to these FLOPs. Attention's scores and values "
        "come on top, and so do restarts."
    )
    return quantity_table(f"Training takes {amount(time)} {unit}", rows, [note], QUANTITY_KEYS)
