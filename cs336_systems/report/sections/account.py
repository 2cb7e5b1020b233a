"""What a step costs, as tables: FLOPs and bytes by part of the model, collectives, time; tables of
its memory are in `account_memory.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from ...config import UNSIZED, Mode, Phase, RunConfig
from ...costs import accounting, fit, memory
from ...costs.communication import Collective, CollectiveCall, calls, sent_share
from ...costs.compiled import predict_step_memory, why_not_foretold
from ...costs.curves import CollectiveTimes, time_s
from ...costs.curves import Curves as DeviceCurves
from ...costs.hardware import DeviceSpec
from ...costs.kernels import ProductPrecision
from ...costs.ranks_time import Links, predicted_time
from ...costs.shards import FP32_BYTES
from ...costs.time import (
    NO_CONVOLUTIONS,
    StepLimit,
    TimePrediction,
    costs_by_module,
    has_convolutions,
)
from ...costs.traces import idle_parameters, is_compiled, own_parameters
from ...studies.ceilings_files import REFERENCE
from ..charts import Bar, Chart, Panel, Style
from ..columns import Column, Row, column, columns_of
from ..identity import SHAPE
from ..section import Section, Table, make_table, quantity_table
from ..words import (
    DOUBTED_FORECAST,
    GIB,
    MIB,
    SHIPPED,
    TERA,
    milliseconds,
    ratio,
    rounded,
    significant,
)
from .account_memory import (
    CATEGORIES,
    categories_table,
    checkpoints_tables,
    fit_table,
    fit_values,
    peak_table,
    sizes_at_peak,
)
from .steps import PARTS

ALL = "all"
FLOPS = ("forward", "backward", "step")
CSV_COLUMNS = (
    "component",
    "parameters",
    *(f"{name}_flops" for name in FLOPS),
    "step_causal_flops",
    "forward_moved_bytes",
    "backward_moved_bytes",
)
BALANCED = (
    "Which experts a token chooses is data: each expert is taken to be chosen as often as any "
    "other."
)


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
    collective_times: CollectiveTimes = field(default_factory=dict)
    """Measured times of collectives among such devices."""
    curves: DeviceCurves | None = None
    """From which the time of the step is predicted."""
    device_name: str | None = None
    """The device of the predicted time."""
    links: Links | None = None
    """How several ranks are joined; None if that is not known, or not asked for."""
    link_source: str = ""
    """What the rates of the links stand on, or why they are not known, in words."""

    @property
    def time(self) -> TimePrediction | None:
        """The predicted time of the step."""
        if self.curves is None or (self.config.is_shared and self.links is None):
            return None
        return predicted_time(self.config, self.curves, self.links)


def account_section(account: Account, top: int) -> Section:
    """The cost of one configuration; the CSV has a row for each part of the model.

    `top` is the most rows of the table of the peak.
    """
    config = account.config
    prediction, parts = predict_step_memory(config), _parts(config)
    tables = []
    if account.memory_bytes is not None:
        tables.append(fit_table(config, account.memory_bytes))
    tables.append(_cost_table(config, parts[ALL], prediction))
    if config.model_factory is None:
        tables.append(_flops_table(parts))
        if calls(config):
            tables.append(_collectives_table(config, account.collective_times))
        tables.append(_least_table(config, account.device))
    else:
        tables.append(_modules_table(parts))
    tables += _time_tables(account)
    tables += checkpoints_tables(config)
    if prediction is not None:
        tables += [categories_table(prediction), peak_table(prediction, top)]
    return Section(
        name="account",
        tables=tuple(tables),
        rows=list(parts.values()),
        keys=CSV_COLUMNS,
        pictures=tuple(_charts(account, prediction)),
    )


def _charts(account: Account, prediction: memory.MemoryPrediction | None) -> Iterator[Chart]:
    """The predicted time of a step by phase, and what the predicted peak consists of."""
    config = account.config
    if account.time is not None:
        times = {str(phase): 1e3 * time_s for phase, time_s in account.time.phases_s.items()}
        yield _of_one_bar("time", "Predicted time of a step (ms)", config.label, times, PARTS)
    if prediction is not None:
        sizes = sizes_at_peak(prediction)
        sizes_gib = {str(category): size_bytes / GIB for category, size_bytes in sizes.items()}
        title = "What the predicted peak consists of (GiB)"
        yield _of_one_bar("peak", title, config.label, sizes_gib, CATEGORIES)


def _of_one_bar(
    name: str, title: str, label: str, parts: Mapping[str, float], styles: Mapping[str, Style]
) -> Chart:
    """A chart of a single bar, whose unit stands in the title."""
    panel = Panel(label=title, bars=[Bar(name=label, parts=parts)])
    return Chart(name=name, title=title, settings=label, panels=[panel], styles=styles)


def account_answer(account: Account) -> Iterator[str]:
    """Whether the step fits the GPU, with its peak, and then how long it takes; nothing of what is
    not foretold.
    """
    config, prediction = account.config, predict_step_memory(account.config)
    has_bytes = account.memory_bytes
    if has_bytes is None and account.device is not None:
        has_bytes = account.device.memory_bytes
    does_fit = None if has_bytes is None else fit.fits(config, has_bytes)
    if prediction is not None:
        peak = f"{significant(prediction.peak.allocated_bytes / GIB)} GiB"
        verdict = {True: "Fits: the peak", False: "Does not fit: the peak", None: "The peak"}
        whole = "" if has_bytes is None else f" of {significant(has_bytes / GIB)} GiB"
        yield f"{verdict[does_fit]} is {peak}{whole}, in {prediction.peak.phase}."
    if account.time is not None:
        would = "would take" if does_fit is False else "takes"
        yield (
            f"A step {would} {milliseconds(1e3 * account.time.step_s)} on {account.device_name}"
            f"{_interval(account.time)}."
        )
        if account.curves is not None:
            kernels = times_of_kernels(account.curves, account.device_name)
            in_fp8 = f"; {times_in_fp8(account.curves)}" if config.fp8 else ""
            links = f"; {account.link_source}" if config.is_shared else ""
            yield f"The time stands on {kernels}{in_fp8}{links}."
    elif account.device is not None:
        yield f"The time is not foretold: {_why_no_time(account)}."


def _why_no_time(account: Account) -> str:
    """Why the time of the step on a known device is not foretold."""
    config, curves = account.config, account.curves
    if reason := why_not_foretold(config):
        return reason
    if curves is None or config.precision not in curves.matmuls:
        return f"nothing is known of {account.device_name} at {config.precision}"
    if config.is_shared and account.links is None:
        return account.link_source
    reason = "" if is_compiled(config) else memory.why_not_predicted(config)
    if not reason and has_convolutions(config):
        reason = NO_CONVOLUTIONS
    return reason or "a kernel of the step has no time"


def _interval(time: TimePrediction) -> str:
    """The interval in which nine of ten steps lie; empty without one."""
    if time.low_s is None or time.high_s is None:
        return ""
    low, high = rounded(1e3 * time.low_s), rounded(1e3 * time.high_s)
    return f", nine of ten {low} to {high} ms"


def times_of_kernels(curves: DeviceCurves, device_name: str | None) -> str:
    """Where the times of kernels come from: this machine, another device of the kind, or a data
    sheet.
    """
    if curves.is_shipped:
        return f"kernels measured on another {device_name}, whose ceilings come with the program"
    if curves.is_measured:
        return f"kernels measured on {device_name} here"
    return f"the data sheet of {device_name}, and the efficiencies of an {REFERENCE}"


def times_in_fp8(curves: DeviceCurves) -> str:
    """Where the times of matmuls in fp8 come from."""
    if not curves.has_fp8:
        return "matmuls in fp8 as efficient as those in bf16, at the peak of the data sheet"
    count = len(curves.matmuls.get(ProductPrecision.FP8, ()))
    where = "" if curves.is_measured else f" on an {REFERENCE}"
    return f"{count} matmuls in fp8 were measured{where}"


def summary_tables(account: Account, section: Section) -> list[Table]:
    """The first tables: what fits, if that is asked for, and the amounts of the step."""
    return list(section.tables[: 1 if account.memory_bytes is None else 2])


def account_json(account: Account) -> dict[str, object]:
    """The costs of one configuration as numbers in SI units, to be written as JSON; None for what
    is not asked for or not known.
    """
    config, memory_bytes, time = account.config, account.memory_bytes, account.time
    parts = []
    for row in _parts(config).values():
        parts.append({key: row[key] for key in CSV_COLUMNS})
    values = {
        "config": _config_values(config),
        "tokens": _tokens(config),
        "active_parameters": _active_parameters(config),
        "parts": parts,
        "work": None,
        "memory": predict_step_memory(config),
        "collectives": None,
        "time": time,
        "time_is_measured": None,
        "device": account.device,
        "fit": None,
    }
    if config.model_factory is None:
        values["work"] = _work(config)
    if calls(config):
        values["collectives"] = _collectives(config, account.collective_times)
    if account.curves is not None and time is not None:
        values["time_is_measured"] = account.curves.is_measured
    if memory_bytes is not None:
        values["fit"] = {"memory_bytes": memory_bytes, **fit_values(config, memory_bytes)}
    return values


def _config_values(config: RunConfig) -> dict[str, Any]:
    """The settings of the step, with None for the shape of a user's own model, which is not
    known.
    """
    values: dict[str, Any] = msgspec.to_builtins(config)
    if config.model_factory is not None:
        values["model"] |= dict.fromkeys(("arch", "num_kv_heads", "rope_theta", *SHAPE))
    if config.size == UNSIZED:
        values["model"]["vocab_size"] = None
    return values


def _parts(config: RunConfig) -> dict[str, Row]:
    """Parameters, FLOPs and bytes of each part of the model by its name, and of all together.
    Values that a part does not have are None.

    The parts of a user's own model are its modules.
    """
    rows: dict[str, Row] = {}
    if config.model_factory is not None:
        for path, costs in costs_by_module(config).items():
            step_flops = sum_of_known([costs.forward_flops, costs.backward_flops])
            rows[path] = dict.fromkeys(CSV_COLUMNS) | {"component": path} | asdict(costs)
            rows[path]["step_flops"] = step_flops
        return _with_sum(rows)
    for name in accounting.Component:
        rows[name] = dict.fromkeys(CSV_COLUMNS) | {"component": name}
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
    """Add the row of sums to the rows, and to each row its share in the FLOPs of the step."""
    sums = {}
    for name in CSV_COLUMNS[1:]:
        sums[name] = sum_of_known(row.get(name) for row in rows.values())
    rows[ALL] = {"component": ALL, **sums}
    for row in rows.values():
        row["share"] = ratio(row["step_flops"], sums["step_flops"])
    return rows


def sum_of_known(values: Iterable[float | None]) -> float | None:
    """The sum of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _work(config: RunConfig) -> list[accounting.PartWork]:
    """FLOPs and bytes of each matmul of forward and, in training, of the optimizer's update."""
    work = list(accounting.forward_work(config))
    if config.mode is Mode.TRAIN:
        work.append(accounting.optimizer_work(config))
    return work


def _tokens(config: RunConfig) -> int:
    """Tokens of one step of one rank, of all its micro-batches."""
    return config.tokens_per_step // config.ranks


def _active_parameters(config: RunConfig) -> int | None:
    """Parameters of the user's own model that each token uses, if it is a mixture of experts; else
    None.
    """
    if config.model_factory is None or (idle := idle_parameters(config.alone)) is None:
        return None
    return sum(own_parameters(config.alone).values()) - idle


def _cost_table(config: RunConfig, whole: Row, prediction: memory.MemoryPrediction | None) -> Table:
    """Parameters, FLOPs, tokens and memory of one step; `whole` is the sum of all parts."""
    is_own, active = config.model_factory is not None, _active_parameters(config)
    parameters = whole["parameters"]
    rows = [("parameters", parameters, "")]
    if active is not None:
        rows.append(("active for each token", active, ""))
    if whole["step_flops"]:
        name = "FLOPs of a step" if is_own else "model FLOPs of a step"
        rows.append((name, whole["step_flops"] / TERA, "TFLOP"))
    if not is_own:
        causal = whole["step_causal_flops"] / TERA
        rows.append(("with attention counted as causal", causal, "TFLOP"))
    rows.append(("tokens of a step", _tokens(config), ""))
    if is_own and prediction is None:
        # what is known of the memory of a step that cannot be traced: its state in fp32
        parameters_gib = FP32_BYTES * parameters / GIB
        rows.append(("parameters", parameters_gib, "GiB"))
        if config.mode is Mode.TRAIN:
            rows.append(("moments of AdamW", 2 * parameters_gib, "GiB"))
    if not is_own:
        stream_mib = memory.residual_stream_bytes(config) / MIB
        rows.append(("one tensor of the residual stream", stream_mib, "MiB"))
    rows += [(name, num_bytes / GIB, "GiB") for name, num_bytes in _predicted(prediction)]
    notes = list(_cost_notes(config, prediction))
    if active is not None:
        notes.append(BALANCED)
    label, batch = config.label, f"batch {config.batch_size}"
    if is_own:
        label = (
            f"{config.model_factory}, {config.mode}, {config.precision}, context "
            f"{config.model.context_length}"
        )
    if batch not in label:
        label += f", {batch}"
    return quantity_table(f"One step of {label}", rows, notes)


def _cost_notes(config: RunConfig, prediction: memory.MemoryPrediction | None) -> Iterator[str]:
    """How FLOPs are counted, and how memory is predicted or why it is not."""
    flops = "FLOPs are those of matrix multiplications, attention in full unless said."
    if has_convolutions(config):
        flops += " Those of convolutions are not counted."
    if prediction is None:
        yield flops
        reason = why_not_foretold(config) or memory.why_not_predicted(config)
        yield f"Memory is not foretold: {reason}."
        return
    how = "eager"
    if prediction.compiler:
        how = f"compiled by PyTorch {prediction.compiler}"
    elif config.fused_blocks:
        how = "by --fast"
    yield f"{flops} Memory: as PyTorch's allocator counts it, predicted, {how}, on Hopper."


def _predicted(prediction: memory.MemoryPrediction | None) -> Iterator[tuple[str, int]]:
    """Name and bytes of each predicted amount of memory: peaks, reserved memory, and allocated
    memory at the start and after each phase.
    """
    if prediction is None:
        return
    yield f"peak memory, in {prediction.peak.phase}", prediction.peak.allocated_bytes
    yield "peak memory of the first step", prediction.first_step_peak.allocated_bytes
    if prediction.reserved_bytes is not None:
        yield "reserved", prediction.reserved_bytes
    yield "allocated when a step begins", prediction.start_bytes
    for phase, num_bytes in prediction.after_bytes.items():
        yield f"allocated after {phase}", num_bytes


def _flops_table(parts: Mapping[str, Row]) -> Table:
    """The table of FLOPs by part (attention, feed-forward network and so on) of one of this
    program's models.
    """
    columns = [*_flops_columns(parts), column("step_causal_flops")]
    note = (
        "A multiply-add is 2 FLOPs; causal: only the pairs of a query and a key that is not after "
        "it count."
    )
    return make_table("FLOPs by part of the model", columns, parts.values(), [note])


def _modules_table(parts: Mapping[str, Row]) -> Table:
    """FLOPs and moved bytes by module of a user's own model, as far as its step was traced."""
    if not parts[ALL]["forward_flops"]:
        columns = columns_of("component", "parameters")
        return make_table("Parameters by module", columns, parts.values())
    columns = [*_flops_columns(parts), column("forward_moved_bytes")]
    if parts[ALL]["backward_flops"]:
        columns.append(column("backward_moved_bytes"))
    note = (
        "A multiply-add is 2 FLOPs; what is computed again counts again. Moved: what each kernel "
        "reads and writes. --module-depth shows more."
    )
    return make_table("FLOPs by module", columns, parts.values(), [note])


def _flops_columns(parts: Mapping[str, Row]) -> list[Column]:
    """The columns that both tables of FLOPs begin with; without a backward pass forward is the
    whole step.
    """
    if not parts[ALL]["backward_flops"]:
        forward = column("forward_flops", drop_order=0)
        return columns_of("component", "parameters", forward, "share")
    forward = column("forward_flops", drop_order=1)
    return columns_of("component", "parameters", forward, "backward_flops", "step_flops", "share")


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
    notes = [
        "Every factor and result of a matrix multiplication moves once. Fused attention moves no "
        "scores, and computes only those of causal pairs. Norms, softmax, casts and the loss come "
        "on top."
    ]
    if device is not None and config.precision not in device.peak_flops_per_s:
        device = None
    rows: list[Row] = []
    for work in _work(config):
        row: Row = {
            "what": work.name,
            "flops": work.flops,
            "moved_mib": work.moved_bytes / MIB,
            "flops_per_byte": work.intensity,
        }
        if device is not None:
            least_s = accounting.least_time_s(work, device)
            moves_s = work.moved_bytes / device.memory_bandwidth_bytes_per_s
            bound_by = "memory" if least_s == moves_s else "arithmetic"
            row |= {"bound_by": least_s and bound_by, "least_s": least_s}
        rows.append(row)
    if device is not None:
        columns += columns_of("bound_by", "least_s")
        notes.append(f"The least time is that of {device.names[0]} by its data sheet.")
    update = " and of the optimizer" if config.mode is Mode.TRAIN else ""
    return make_table(f"Arithmetic intensity of forward{update}", columns, rows, notes)


def _collectives(config: RunConfig, times: CollectiveTimes) -> list[Row]:
    """A row for each kind and size of the collectives of a step, sorted by kind and size. Bytes are
    those of one call; `sent_bytes` are what a rank sends in all calls.
    """
    counts: Mapping[CollectiveCall, int] = calls(config) or {}
    rows: list[Row] = []
    for call, count in counts.items():
        row = {
            "collective": call.collective,
            "count": count,
            "num_bytes": call.num_bytes,
            "sent_bytes": count * call.num_bytes * sent_share(call.collective, config.ranks),
            "time_s": time_s({call: count}, times),
        }
        rows.append(row)
    kinds = list(Collective)
    rows.sort(key=lambda row: (kinds.index(row["collective"]), row["num_bytes"]))
    return rows


def _collectives_table(config: RunConfig, times: CollectiveTimes) -> Table:
    """The collectives of a step and their sum, with their times where all are known."""
    rows = _collectives(config, times)
    called = column("count", name="calls", about="Calls in a step.", drop_order=0)
    columns = columns_of("collective", called, "num_bytes", "sent_bytes")
    notes = ["Tensors: those of one call together. Sent: by each rank, if all form a ring."]
    sums: Row = {"collective": ALL, "num_bytes": None, "time_s": None}
    for key in ("count", "sent_bytes"):
        sums[key] = sum(row[key] for row in rows)
    if all(row["time_s"] is not None for row in rows):
        sums["time_s"] = sum(row["time_s"] for row in rows)
        about = "Time of all these calls, by measured times of such collectives."
        columns.append(column("time_s", name="predicted", about=about, scale=1e3, drop_order=0))
        notes.append(
            "Time: one call after the other, interpolated between measured sizes; nothing "
            "computes meanwhile."
        )
    else:
        notes.append(
            f"No time: cs336 ceilings among {config.ranks} such devices gives one (--ceilings DIR)."
        )
    return make_table("Collectives of a step", columns, [*rows, sums], notes)


def _time_tables(account: Account) -> Iterator[Table]:
    """The table of the predicted time of each phase, and of its kernels without launches; nothing
    if no time is predicted.
    """
    curves, time = account.curves, account.time
    if curves is None or time is None:
        return
    predicted_s = {**time.phases_s, Phase.STEP: time.step_s}
    kernels_s = {**time.kernels_s, Phase.STEP: sum(time.kernels_s.values())}
    rows = [
        {
            "phase": phase,
            "predicted_ms": 1e3 * predicted_s[phase],
            "kernels_ms": 1e3 * kernels_s[phase],
            "prediction_is_doubted": curves.is_in_doubt,
        }
        for phase in predicted_s
    ]
    notes = [*_limit_notes(time), *_source_notes(account, curves)]
    columns = columns_of("phase", "predicted_ms", "kernels_ms")
    yield make_table("Predicted time of a step", columns, rows, notes)


def _limit_notes(time: TimePrediction) -> Iterator[str]:
    """What limits the step, how sure its time is, and which part of it is extrapolated."""
    limit = "The GPU is the limit"
    if time.limit is StepLimit.LAUNCHES:
        limit = f"Launches are the limit, which take the CPU {rounded(1e3 * time.launch_s)} ms"
    yield f"{limit}; the GPU is busy for {100 * time.busy_share:.0f} % of the step."
    if interval := _interval(time):
        yield f"The step takes {rounded(1e3 * time.step_s)} ms{interval}."
    if time.extrapolated_share > 0:
        share = max(1, round(100 * time.extrapolated_share))
        yield f"{share} % of the time of kernels is of shapes unlike all measured ones."


def _source_notes(account: Account, curves: DeviceCurves) -> Iterator[str]:
    """What the predicted times stand on, and whether it is in doubt."""
    if curves.is_measured or account.device is None:
        of_device = f"the ceilings of {account.device_name}" if account.device_name else "ceilings"
        yield (
            f"From the configuration and {of_device} alone; cs336 report DIR says how far it is "
            "from measured steps."
        )
    else:
        yield by_data_sheet(account.device.names[0])
    if curves.is_shipped:
        yield SHIPPED
    if curves.is_in_doubt:
        yield DOUBTED_FORECAST


def by_data_sheet(device_name: str) -> str:
    """The note below predicted times that come from a data sheet, since the device has no measured
    ceilings.
    """
    return (
        f"There are no ceilings of {device_name} with matmuls of such a size: by its data sheet "
        f"and the efficiencies of an {REFERENCE}."
    )
