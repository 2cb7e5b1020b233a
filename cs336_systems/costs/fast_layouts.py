"""Layouts of a training step with `--fast`: those that this program runs itself, by one GPU or by
ranks that share a step in one of its own ways, with the forecasts of the very steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Parallel, Phase, RunConfig
from ..text import counted, print_aside
from .curves import Curves
from .fast_memory import FastMemory
from .fit import fits
from .layout import MAX_MICRO_BATCH, SELECTIVE, Layout, powers
from .layout_cost import LayoutCost, sequence_flops
from .layout_time import LayoutTime
from .memory import is_fast_step, predict_memory, why_not_predicted
from .ranks_time import Links, ranks_step_time
from .recipes import Recipe
from .time import prepare_forecasts, step_time, steps_to_trace
from .traces import is_at_hand, require_tape

MakeStep = Callable[[Mapping[str, Any]], RunConfig]
"""Makes the step that `--fast` chooses for these settings; raises ValueError for settings that do
not go together.
"""
CLOSED_FORM_SPREAD = 1.05
"""How far the peak in closed form may be off, where it alone decides that a step is not traced. Of
xl on four GPUs it is 2.5 % smaller to 1.6 % larger than the traced one, so that two ways to share a
step may be 4.2 % apart. Of models of a few MiB it says little.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastStep:
    """A layout, and the step that runs it."""

    layout: Layout
    config: RunConfig
    asked: tuple[tuple[str, object], ...]
    """What is asked of `--fast` beside the model."""

    @property
    def closed_form_bytes(self) -> int:
        """About the bytes of its peak."""
        return FastMemory(self.config).peak_bytes


Reasons = dict[str, None]
"""Why some layouts are not foretold, in order."""


def fast_steps(
    make: MakeStep, gpus: int, sequences: int, links: Links, recipe: Recipe | None
) -> tuple[list[FastStep], Reasons]:
    """The steps of so many sequences on so many GPUs, each once; and why others are none."""
    steps, reasons = dict[RunConfig, FastStep](), Reasons()
    if gpus > links.gpus_per_node and links.network_bytes_per_s is None:
        return [], {f"{gpus} GPUs need several nodes, whose network is not known": None}
    if sequences % gpus:
        return [], {f"{sequences:,} sequences are not shared equally by {gpus:,} GPUs": None}
    for asked in _asked(gpus, sequences // gpus, links):
        if recipe is not None:
            asked["fp8"] = True
        try:
            config = make(asked)
        except ValueError as error:
            reasons[str(error)] = None
            continue
        if not is_fast_step(config):
            reasons["--fast fuses no blocks of such a model"] = None
            continue
        layout = _layout(config, recipe)
        step = FastStep(layout=layout, config=config, asked=tuple(asked.items()))
        steps.setdefault(config, step)
    return [*steps.values()], reasons


def _asked(gpus: int, sequences: int, links: Links) -> Iterator[dict[str, Any]]:
    """Settings of all ways to compute the sequences of a rank: alone or shared, several at once,
    with the checkpoints that `--fast` chooses, or with each block a checkpoint.
    """
    for ways in _ways(gpus, links):
        for micro_batch in powers(MAX_MICRO_BATCH):
            if sequences % micro_batch:
                continue
            asked = {"batch_size": micro_batch} | ways
            if micro_batch < sequences:
                asked["accumulate_steps"] = sequences // micro_batch
            yield asked
            yield asked | {"checkpoint_blocks": 1}


def _ways(gpus: int, links: Links) -> Iterator[dict[str, Any]]:
    """How ranks share a step of the fast model; copies into other ranks' memory stay in a node."""
    if gpus == 1:
        yield {}
        return
    for way in Parallel:
        is_near = gpus <= links.gpus_per_node or not way.writes_to_others
        if way is Parallel.NONE or not (way.takes_any_tensor and is_near):
            continue
        yield {"parallel": way, "ranks": gpus}
        if not way.shards_parameters:
            yield {"parallel": way, "ranks": gpus, "shard_optimizer": True}


def _layout(config: RunConfig, recipe: Recipe | None) -> Layout:
    """How the ranks of a step share it."""
    data, shard = config.ranks, 1
    if config.parallel.shards_parameters or config.shard_optimizer:
        data, shard = 1, config.ranks
    checkpoint = SELECTIVE if config.selective_checkpoints else config.checkpoint_blocks
    return Layout(
        data=data,
        shard=shard,
        stage=1 if config.shard_optimizer else 3,
        way=config.parallel if config.is_shared else None,
        micro_batch=config.batch_size,
        accumulate=config.accumulate_steps,
        checkpoint=checkpoint,
        fp8=recipe,
    )


TimedStep = tuple[FastStep, LayoutTime]


def timed_steps(
    steps: Iterable[FastStep], memory_bytes: int, curves: Curves, links: Links
) -> tuple[list[TimedStep], Reasons]:
    """The steps that seem to fit this memory, with their times, without those that are slower than
    another one and clearly need no less; and why some have none.
    """
    reasons = Reasons()
    likely = []
    for step in steps:
        if step.closed_form_bytes < CLOSED_FORM_SPREAD * memory_bytes:
            likely.append(step)
    _prepare([step.config.alone for step in likely])
    times: list[TimedStep] = []
    for step in likely:
        time = _time(step.config, curves, links)
        if time is None:
            why = why_not_predicted(step.config.alone)
            reasons[why or "no measured matmul is large enough for such a micro-batch"] = None
        else:
            times.append((step, time))
    return [*_unbeaten(times)], reasons


def fast_costs(
    steps: Iterable[FastStep], memory_bytes: int, curves: Curves, links: Links
) -> tuple[list[LayoutCost], Reasons]:
    """The forecasts of those of the steps that fit this memory; and why some have none."""
    timed, reasons = timed_steps(steps, memory_bytes, curves, links)
    _prepare([step.config for step, _ in timed])
    costs = []
    for step, time in timed:
        peak_bytes = step_bytes(step)
        if peak_bytes is None:
            reasons[why_not_predicted(step.config)] = None
        if peak_bytes is None or fits(step.config, memory_bytes) is False:
            continue
        costs.append(
            LayoutCost(
                layout=step.layout,
                time=time,
                peak_bytes=peak_bytes,
                flops=step.layout.global_batch * sequence_flops(step.config.without_shortcuts),
                asked=step.asked,
            )
        )
    return costs, reasons


def step_bytes(step: FastStep) -> int | None:
    """Bytes of a rank's tensors at the peak; None if the step cannot be traced."""
    prediction = predict_memory(step.config)
    return None if prediction is None else prediction.peak.allocated_bytes


def _unbeaten(times: Iterable[TimedStep]) -> Iterator[TimedStep]:
    """The steps that no other beats in both time and memory, as far as the closed form tells."""
    least_bytes: float | None = None
    for step, time in sorted(times, key=lambda one: one[1].step_s):
        if least_bytes is None or step.closed_form_bytes < CLOSED_FORM_SPREAD * least_bytes:
            least_bytes = min(step.closed_form_bytes, least_bytes or step.closed_form_bytes)
            yield step, time


def _prepare(configs: Iterable[RunConfig]) -> None:
    """Trace what forecasts of these steps need, and say what is being waited for."""
    configs = [*configs]
    missing = set[RunConfig]()
    for config in configs:
        missing |= {step for step in steps_to_trace(config) if not is_at_hand(step)}
    if missing:
        for step in missing:
            require_tape(step)
        steps = counted(len(missing), "step")
        print_aside(f"tracing {steps} of --fast, which come without a trace: about 3 s for each")
    prepare_forecasts(configs)


def _time(config: RunConfig, curves: Curves, links: Links) -> LayoutTime | None:
    """The time of a step, as `account` has it; None if it is not foretold."""
    compute = whole = step_time(config, curves)
    if config.is_shared:
        shared = ranks_step_time(config, curves, links)
        whole = None if shared is None else shared.time
    if compute is None or whole is None:
        return None
    assert whole.low_s is not None
    assert whole.high_s is not None
    optimizer_s = compute.phases_s[Phase.OPTIMIZER]
    exposed_s = whole.step_s - compute.step_s
    return LayoutTime(
        compute_s=compute.step_s - optimizer_s,
        exposed_s={"data": exposed_s} if config.is_shared else {},
        bubble_s=0.0,
        optimizer_s=optimizer_s,
        spread=whole.high_s / whole.step_s,
        spread_below=whole.step_s / whole.low_s,
        shortest_block_s={},
    )
