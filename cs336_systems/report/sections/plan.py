"""What a training takes on many GPUs, in three sentences, a table of layouts and a picture."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from ...config import (
    MAX_MEASURED_RANKS,
    SETTINGS,
    SIZES,
    Arch,
    CompileMode,
    Parallel,
    Phase,
    RunConfig,
)
from ...costs.blocks import blocks_of_model
from ...costs.layout import SELECTIVE, tensor_misfits
from ...costs.layout_cost import LayoutCost
from ...costs.layout_time import LayoutTime
from ...costs.training import DAY_S, TrainingPlan
from ...measure.inputs import parameters_of
from ...settings import flag_of, non_defaults
from ...text import command_line, counted
from ..charts import (
    COMPUTING_COLOUR,
    PHASE_COLOURS,
    REST_COLOUR,
    Bar,
    Chart,
    Panel,
    Style,
    distinct,
)
from ..columns import Row, columns_of
from ..section import Section, Table, make_table
from ..words import DOUBTED_FORECAST, GIB, ratio, significant
from .account import times_in_fp8, times_of_kernels

CSV_COLUMNS = (
    "layout",
    *("data", "shard", "stage", "tensor", "pipeline", "chunks", "context", "expert"),
    *("micro_batch", "accumulate", "checkpoint"),
    *("step_ms", "compute_ms", "exposed_ms", "bubble_ms", "optimizer_ms"),
    *("peak_gib", "mfu", "run_by"),
)
UNITS = (("days", DAY_S), ("hours", 3600), ("minutes", 60), ("s", 1), ("ms", 1e-3))
"""Units of the time of a training, the largest first."""
NOT_RUN = "not run here"
OF_COMPILED_BLOCKS = (
    "Blocks are compiled one by one, for one rank; a rank of TP or CP is taken to have its part of "
    "each of these kernels."
)
OF_FAST = (
    "TP, PP, CP, EP and HSDP are left out, as no such step is run here; PyTorch's ddp and fsdp2 "
    "too, whose blocks are not fused."
)
CHECKPOINTS = {1: ", each block a checkpoint", SELECTIVE: ", selective checkpoints"}
TOP = 12
"""Layouts of the table and of the picture."""
PARTS = {
    "computing": Style(colour=COMPUTING_COLOUR),
    "exposed communication": Style(colour=PHASE_COLOURS[Phase.COMMUNICATION]),
    "bubble": Style(colour=REST_COLOUR),
    "optimizer": Style(colour=PHASE_COLOURS[Phase.OPTIMIZER]),
    "memory": Style(colour="#4A4A6A"),
}


def plan_answer(plan: TrainingPlan) -> Iterator[str]:
    """Whether the training fits, how long it takes, how much it costs, and on what this stands."""
    training, best = plan.training, plan.best
    if (sizes := _parameters(plan)) is not None:
        yield sizes
    if best is None:
        yield _why_it_does_not_fit(plan)
        yield f"On what this stands: {_evidence(plan)}"
        return
    layout = best.layout
    used = significant(training.used_bytes(best.peak_bytes) / GIB, 3)
    memory = f"{training.memory_bytes / GIB:.3g} GiB"
    checkpoints = CHECKPOINTS.get(layout.checkpoint, "")
    sequences = counted(training.sequences, "sequence")
    yield (
        f"Fits: {used} of {memory} in the fastest layout, {layout.label}: batch "
        f"{layout.micro_batch} a rank, {layout.accumulate} accumulated{checkpoints}; a step of "
        f"{sequences} of {training.config.model.context_length:,} has {training.step_tokens:,} "
        "tokens."
    )
    assert plan.training_s is not None
    assert plan.gpu_hours is not None
    step = f"a step takes {in_time(best.step_s, best.time)}"
    if training.tokens is None:
        yield f"How long: {step}."
    else:
        steps = counted(training.steps, "step")
        yield (
            f"How long: {in_time(plan.training_s, best.time)}; {steps}; {step}; "
            f"{_to_three(training.step_tokens / best.step_s)} tokens/s."
        )
    price = ""
    if training.price is not None:
        price = f"; {_to_three(training.price * plan.gpu_hours)} at {training.price:g} an hour"
    if training.tokens is not None:
        yield f"How much: {_to_three(plan.gpu_hours)} GPU-hours{price}."
    if training.days is not None:
        yield _gpus_in_days(plan)
    yield f"On what this stands: {_evidence(plan)}"
    how = run_by(training.config, best, training.links.gpus_per_node)
    if how.startswith(NOT_RUN):
        yield f"A step of this layout is {how}."
    else:
        yield f"To measure a step: {how}"


def _to_three(value: float) -> str:
    """The value to three digits, as more are not known: 72,800 instead of 72,802."""
    return significant(float(f"{value:.3g}"), 3)


def _parameters(plan: TrainingPlan) -> str | None:
    """How many parameters a model of one's own has, and how many a token multiplies; None of this
    project's, whose size says so.
    """
    if plan.training.config.model_factory is None or plan.smallest is None:
        return None
    model = blocks_of_model(plan.training.config)
    active = ""
    if model.active_parameters < model.parameters:
        active = f", of which a token multiplies {model.active_parameters:,}"
    return f"Parameters: {model.parameters:,}{active}."


def _gpus_in_days(plan: TrainingPlan) -> str:
    """How many GPUs end in the days asked for."""
    training = plan.training
    if plan.gpus_in_days is None:
        return (
            f"No number of GPUs, up to one for each sequence of a step, ends in {training.days:g} "
            "days."
        )
    end = "GPU ends" if plan.gpus_in_days == 1 else "GPUs end"
    return f"{plan.gpus_in_days:,} such {end} in {training.days:g} days."


def _why_it_does_not_fit(plan: TrainingPlan) -> str:
    """The first sentence where no layout fits, or none is foretold."""
    training = plan.training
    has_room = False
    if plan.smallest is not None:
        has_room = training.used_bytes(plan.smallest[1]) <= training.memory_bytes
    if plan.smallest is None or has_room:
        reasons = plan.reasons
        if not reasons:
            sequences = counted(training.sequences, "sequence")
            unshared = f"{sequences} cannot be shared by {counted(training.gpus, 'GPU')}"
            reasons = (unshared, *tensor_misfits(training.config, training.gpus, training.links))
        return f"No layout is foretold: {'; '.join(reasons)}."
    layout, peak_bytes = plan.smallest
    used_gib = training.used_bytes(peak_bytes) / GIB
    ways = ["more GPUs", "a smaller --context-length"]
    # accumulated micro-batches take no memory of their own
    if layout.micro_batch > 1:
        ways.append("a smaller --global-batch")
    return (
        f"Does not fit: the smallest layout, {layout.label}, takes "
        f"{significant(used_gib, 3)} of {training.memory_bytes / GIB:.3g} GiB; take "
        f"{' or '.join(ways)}."
    )


def _evidence(plan: TrainingPlan) -> str:
    """Where the times of kernels and links come from."""
    training = plan.training
    kernels = times_of_kernels(training.curves, training.device_name)
    links = f"; {training.link_source}" if training.gpus > 1 else ""
    in_fp8 = ""
    if training.recipe is not None:
        in_fp8 = f"; {times_in_fp8(training.curves)}, casts are passes over memory"
    return f"{kernels}{in_fp8}{links}."


def in_time(seconds: float, time: LayoutTime) -> str:
    """Seconds of steps with this time in the largest unit of which there is one or more, with the
    interval in which nine of ten lie.
    """
    below = time.spread_below or time.spread
    unit, unit_s = next((unit for unit in UNITS if seconds >= unit[1]), UNITS[-1])

    def times(factor: float) -> str:
        return significant(seconds * factor / unit_s, 3)

    return f"{times(1.0)} {unit}, {times(1 / below)} to {times(time.spread)}"


def plan_section(plan: TrainingPlan) -> Section:
    """The layouts of which none other is as fast and as small; the CSV has a row for each."""
    rows = [_row(plan, cost) for cost in plan.front]
    return Section(
        name="plan",
        tables=(_front_table(plan, rows),) if rows else (),
        rows=rows,
        keys=CSV_COLUMNS,
        pictures=(_chart(plan),) if rows else (),
    )


def plan_json(plan: TrainingPlan) -> dict[str, object]:
    """The plan as numbers in SI units; None for what is not asked for or not known."""
    training = plan.training
    front = []
    for cost in plan.front:
        layout = {
            "layout": cost.layout,
            "time": cost.time,
            "step_s": cost.step_s,
            "used_bytes": training.used_bytes(cost.peak_bytes),
            "flops": cost.flops,
        }
        front.append(layout)
    return {
        "config": training.config,
        "gpus": training.gpus,
        "device_name": training.device_name,
        "tokens": training.tokens,
        "step_tokens": training.step_tokens,
        "memory_bytes": training.memory_bytes,
        "is_measured": training.curves.is_measured,
        "links": training.link_source,
        "training_s": plan.training_s,
        "gpu_hours": plan.gpu_hours,
        "gpus_in_days": plan.gpus_in_days,
        "front": front,
        "reasons": plan.reasons,
    }


def _row(plan: TrainingPlan, cost: LayoutCost) -> Row:
    """The values of one layout."""
    layout, time, training = cost.layout, cost.time, plan.training
    row: Row = {key: getattr(layout, key) for key in CSV_COLUMNS[1:12]}
    return row | {
        "layout": layout.label,
        "step_ms": 1e3 * cost.step_s,
        "compute_ms": 1e3 * time.compute_s,
        "exposed_ms": 1e3 * sum(time.exposed_s.values()),
        "bubble_ms": 1e3 * time.bubble_s,
        "optimizer_ms": 1e3 * time.optimizer_s,
        "peak_gib": training.used_bytes(cost.peak_bytes) / GIB,
        "mfu": ratio(cost.gpu_flops_per_s, training.peak_flops_per_s),
        "run_by": run_by(training.config, cost, training.links.gpus_per_node),
        "prediction_is_doubted": training.curves.is_in_doubt,
    }


def run_by(config: RunConfig, cost: LayoutCost, gpus_per_node: int) -> str:
    """The command that runs a step of the layout here, or what of it is not run here."""
    layout = cost.layout
    if cost.asked is not None:
        if layout.gpus > min(gpus_per_node, MAX_MEASURED_RANKS):
            return f"{NOT_RUN}: several nodes"
        return _command(config, dict(cost.asked))
    others = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP"}
    lacking = [word for axis, word in others.items() if getattr(layout, axis) > 1]
    if layout.fp8 is not None:
        lacking.append("fp8 without --fast")
    if layout.shard > 1 and layout.data > 1:
        lacking.append("HSDP")
    if layout.shard > 1 and layout.stage < 3:
        lacking.append(f"ZeRO-{layout.stage}")
    if layout.gpus > min(gpus_per_node, MAX_MEASURED_RANKS):
        lacking.append("several nodes")
    if lacking:
        return f"{NOT_RUN}: {', '.join(lacking)}"
    way = Parallel.NONE
    if layout.gpus > 1:
        way = Parallel.FSDP if layout.shard > 1 else Parallel.DDP
    try:
        step = replace(
            config,
            batch_size=layout.micro_batch,
            accumulate_steps=layout.accumulate,
            checkpoint_blocks=layout.checkpoint,
            parallel=way,
            ranks=layout.gpus,
        )
    except ValueError as error:
        return f"{NOT_RUN}: {error}"
    return _command(step)


def _command(config: RunConfig, asked: Mapping[str, object] | None = None) -> str:
    """The command line that measures a step: its size, and what differs from it; with `asked` one
    of --fast, of which these settings are asked for besides.
    """
    words = ["cs336", "benchmark"]
    usual_size = "gpt2" if config.model.arch is Arch.GPT2 else None
    size = config.size if config.size in SIZES else usual_size
    values = non_defaults(config.model)
    if size is not None:
        words += ["--size", size]
        preset = asdict(SIZES[size])
        of_model = asdict(config.model).items()
        values = {name: value for name, value in of_model if value != preset[name]}
    taken = None if config.model_factory is None else parameters_of(config.model_factory)
    if taken is not None:  # other sizes are nothing to the model, and benchmark refuses them
        obeyed = taken | {"vocab_size"}
        values = {name: value for name, value in values.items() if name in obeyed}
    values |= non_defaults(config)
    if asked is not None:
        words.append("--fast")
        left = {name: values[name] for name in values if not SETTINGS[name].chosen_by_fast}
        values = left | dict(asked)
    for name, value in values.items():
        if name not in ("size", "context_length", "device"):
            words.append(flag_of(name, SETTINGS[name]))
            if value is not True:  # a switch takes no value
                words.append(str(value))
    words += ["--context-length", str(config.model.context_length)]
    return command_line(words)


def _front_table(plan: TrainingPlan, rows: list[Row]) -> Table:
    """The layouts, the fastest first."""
    training = plan.training
    keys = ["layout", "micro_batch", "accumulate", "checkpoint"]
    keys += ["step_ms", "compute_ms", "exposed_ms", "bubble_ms", "peak_gib", "mfu", "run_by"]
    notes = [
        "Each layout is faster, or takes less memory, than all others. A step takes the sum of "
        "computing, exposed communication, the pipeline's bubble and the optimizer. Memory: the "
        "fullest rank, with CUDA's context and NCCL; fragmentation is left out.",
        "DP: replicas. FSDP, ZeRO-1: replicas that divide the model's state, or the optimizer's "
        "alone. TP: ranks that divide every matrix. PP: stages. CP: ranks that divide each "
        "sequence.",
    ]
    if len(rows) > TOP:
        notes.append(f"{len(rows) - TOP} more are slower and smaller: the CSV file has them.")
    if training.config.compile is not CompileMode.NONE:
        notes.append(OF_COMPILED_BLOCKS)
    if training.fast is not None:
        notes.append(OF_FAST)
    if training.config.compile is not CompileMode.NONE or training.fast is not None:
        notes += [f"Others are not foretold: {reason}." for reason in plan.reasons]
    if training.curves.is_in_doubt:
        notes.append(DOUBTED_FORECAST)
    title = (
        f"Layouts of {training.label} on {training.gpus:,} {training.device_name}, "
        f"{training.sequences:,} sequences a step"
    )
    return make_table(title, columns_of(*keys), rows[:TOP], notes)


def _chart(plan: TrainingPlan) -> Chart:
    """Time and memory of each layout."""
    training = plan.training
    costs = plan.front[:TOP]
    labels = []
    for cost in costs:
        checkpoint = ", checkpoints" if cost.layout.checkpoint else ""
        labels.append(f"{cost.layout.label}, batch {cost.layout.micro_batch}{checkpoint}")
    times, memories = [], []
    for name, cost in zip(distinct(labels), costs, strict=True):
        parts = {
            "computing": cost.time.compute_s,
            "exposed communication": sum(cost.time.exposed_s.values()),
            "bubble": cost.time.bubble_s,
            "optimizer": cost.time.optimizer_s,
        }
        step = (f"{significant(1e3 * cost.step_s)} ms",)
        parts_ms = {key: 1e3 * part_s for key, part_s in parts.items()}
        times.append(Bar(name=name, parts=parts_ms, figures=step))
        used_gib = training.used_bytes(cost.peak_bytes) / GIB
        used = (f"{significant(used_gib, 3)} GiB",)
        memories.append(Bar(name=name, parts={"memory": used_gib}, figures=used))
    return Chart(
        name="layouts",
        title=f"Layouts of {training.label}",
        settings=f"{training.gpus:,} {training.device_name}, {training.sequences:,} sequences",
        panels=(Panel(label="step (ms)", bars=times), Panel(label="memory (GiB)", bars=memories)),
        styles=PARTS,
    )
