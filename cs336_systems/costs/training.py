"""A whole training: its best layouts, how long it takes, and what it costs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from ..config import RunConfig
from .compiled_blocks import compile_missing
from .curves import Curves
from .fast_layouts import MakeStep, fast_costs, fast_steps, step_bytes
from .fit import CUDA_CONTEXT_BYTES, NCCL_BYTES
from .layout import Layout, layouts
from .layout_cost import LayoutCost, layout_bytes, layout_cost, least_gpu_s
from .layout_memory import Rank, least_rank_bytes
from .ranks_time import Links
from .recipes import Recipe

DAY_S, HOUR_S = 86_400, 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The sequences of a step on all GPUs, as they are asked for."""

    wanted: float
    """Number of sequences."""
    is_tokens: bool
    """Whether it was given in tokens, so that nearby numbers do as well."""

    def sequences(self, gpus: int) -> int:
        """The nearest number that so many GPUs can share; of tokens one that they can also divide
        in micro-batches.
        """
        # fewer sequences than GPUs can be shared by dividing the model only
        multiple = gpus if self.wanted >= gpus else 1
        shares = self.wanted / multiple
        return multiple * (_divisible(shares) if self.is_tokens else max(1, round(shares)))


SHARED_CHANGE = 0.05
"""Largest change of a batch given in tokens, so that the sequences of each GPU have more divisors:
122 of them can be halved once only, and 128 seven times.
"""


def _divisible(number: float) -> int:
    """The multiple of the largest power of 2 that is near enough to the number; 1 at least."""
    power = 1 << int(number).bit_length()
    while power > 1:
        multiple = power * round(number / power)
        if abs(multiple - number) <= SHARED_CHANGE * number:
            return multiple
        power //= 2
    return max(1, round(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is asked: a model, its tokens and the GPUs, with what is known of these."""

    config: RunConfig
    """The step of one process."""
    gpus: int
    device_name: str
    batch: GlobalBatch
    tokens: float | None
    """Tokens of the training; None: one step."""
    price: float | None
    """Price of an hour of one GPU."""
    days: float | None
    """Days in which the training has to end, if they are asked for."""
    memory_bytes: int
    """Memory of each GPU."""
    peak_flops_per_s: float | None
    """Of a GPU, by its data sheet."""
    curves: Curves
    links: Links
    recipe: Recipe | None = None
    """How blocks are computed in fp8; None: in the precision of the step."""
    fast: MakeStep | None = None
    """Chooses steps by --fast; None: steps are eager, or of compiled blocks."""
    link_source: str
    """What the rates of the links stand on, in words."""

    @property
    def label(self) -> str:
        """The step in a few words."""
        return self.config.label if self.fast is None else f"{self.config.label} --fast"

    @property
    def sequences(self) -> int:
        """Sequences of a step on all GPUs."""
        return self.batch.sequences(self.gpus)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step on all GPUs."""
        return self.sequences * self.config.model.context_length

    @property
    def steps(self) -> int:
        """Steps of the training; its last one is whole, too."""
        return 1 if self.tokens is None else ceil(self.tokens / self.step_tokens)

    def used_bytes(self, peak_bytes: int) -> int:
        """Memory that a rank with tensors of so many bytes takes of its GPU, with the CUDA context
        and NCCL.
        """
        return peak_bytes + CUDA_CONTEXT_BYTES + (NCCL_BYTES if self.gpus > 1 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The answer: the layouts of which none other is faster and smaller, the fastest first."""

    training: Training
    front: tuple[LayoutCost, ...]
    """Layouts that fit; empty if none does."""
    smallest: tuple[Layout, int] | None
    """The layout that takes the least memory, whether it fits or not, and the bytes of its fullest
    rank; None if no layout is foretold.
    """
    reasons: tuple[str, ...]
    """Why some layouts are not foretold."""
    gpus_in_days: int | None = None
    """The fewest GPUs that train in the days that are asked for, if such a number was tried."""

    @property
    def best(self) -> LayoutCost | None:
        """The fastest layout that fits."""
        return self.front[0] if self.front else None

    @property
    def training_s(self) -> float | None:
        """Seconds of the whole training in the fastest layout."""
        return None if self.best is None else self.training.steps * self.best.step_s

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs together."""
        if self.training_s is None:
            return None
        return self.training.gpus * self.training_s / HOUR_S


def plan_training(training: Training) -> TrainingPlan:
    """The plan of a training, from the forecasts of all sensible layouts."""
    if training.fast is not None:
        return _fast_plan(training, training.fast)
    peaks, reasons = _peaks(training)
    smallest = min(peaks, key=peaks.__getitem__, default=None)
    gpus = None if training.days is None else _gpus_in_days(training)
    costs, untimed = _fitting(training, peaks)
    return TrainingPlan(
        training=training,
        front=tuple(pareto(costs)),
        smallest=None if smallest is None else (smallest, peaks[smallest]),
        reasons=(*reasons, *untimed),
        gpus_in_days=gpus,
    )


def _fast_plan(training: Training, make: MakeStep) -> TrainingPlan:
    """The plan of a training with --fast."""
    steps, reasons = fast_steps(
        make, training.gpus, training.sequences, training.links, training.recipe
    )
    costs, untimed = fast_costs(steps, training.memory_bytes, training.curves, training.links)
    fitting = []
    for cost in costs:
        if _fits(training, cost.peak_bytes):
            fitting.append(cost)
    smallest = None
    if steps and not fitting:
        least = min(steps, key=lambda step: step.closed_form_bytes)
        least_bytes = step_bytes(least)
        smallest = None if least_bytes is None else (least.layout, least_bytes)
    return TrainingPlan(
        training=training,
        front=tuple(pareto(fitting)),
        smallest=smallest,
        reasons=(*reasons, *untimed),
    )


def _peaks(training: Training) -> tuple[dict[Layout, int], tuple[str, ...]]:
    """Bytes of the fullest rank of the sensible layouts that may fit, or of the smallest if none
    does; and the reasons why some have none.
    """
    least, reasons = dict[Layout, int](), dict[str, None]()
    for tried in layouts(training.config, training.gpus, training.sequences, training.links):
        layout = replace(tried, fp8=training.recipe)
        bound = layout_bytes(training.config, layout, training.links, least_rank_bytes)
        if isinstance(bound, str):
            reasons[bound] = None
        else:
            least[layout] = bound
    may_fit = [layout for layout in least if _fits(training, least[layout])]
    peaks = _exact(training, may_fit, reasons)
    if not any(_fits(training, peak_bytes) for peak_bytes in peaks.values()):
        others = [layout for layout in least if layout not in peaks]
        for layout in sorted(others, key=least.__getitem__):
            # of the rest, none is smaller
            if peaks and least[layout] > min(peaks.values()):
                break
            peaks |= _exact(training, [layout], reasons)
    return peaks, tuple(reasons)


def _fits(training: Training, peak_bytes: int) -> bool:
    """Whether a rank with tensors of so many bytes fits into a GPU."""
    return training.used_bytes(peak_bytes) <= training.memory_bytes


def _exact(
    training: Training, asked: Sequence[Layout], reasons: dict[str, None]
) -> dict[Layout, int]:
    """Bytes of the fullest rank of these layouts; the reasons why some have none are added."""
    compile_missing(Rank(config=training.config, layout=layout).alone for layout in asked)
    peaks = {}
    for layout in asked:
        peak_bytes = layout_bytes(training.config, layout, training.links)
        if isinstance(peak_bytes, str):
            reasons[peak_bytes] = None
        else:
            peaks[layout] = peak_bytes
    return peaks


def _fitting(
    training: Training, peaks: Mapping[Layout, int]
) -> tuple[list[LayoutCost], tuple[str, ...]]:
    """The forecasts of the layouts that fit, and the reasons why some of these have no time; the
    times of others are not asked for.
    """
    costs: list[LayoutCost] = []
    reasons = dict[str, None]()
    for layout, peak_bytes in peaks.items():
        if _fits(training, peak_bytes):
            cost = layout_cost(training.config, layout, training.curves, training.links)
            if isinstance(cost, str):
                reasons[cost] = None
            else:
                costs.append(cost)
    return costs, tuple(reasons)


def pareto(costs: Iterable[LayoutCost]) -> Iterator[LayoutCost]:
    """The layouts of which no other is as fast and takes less memory, the fastest first."""
    least_bytes: int | None = None
    for cost in sorted(costs, key=lambda cost: (cost.step_s, cost.peak_bytes)):
        if least_bytes is None or cost.peak_bytes < least_bytes:
            least_bytes = cost.peak_bytes
            yield cost


def _gpus_in_days(training: Training) -> int | None:
    """The fewest GPUs, of whole nodes beyond one, that end in the days asked for; none are tried
    beyond one for each sequence of a step.
    """
    limit_s = (training.days or 0) * DAY_S
    sequence_s = least_gpu_s(training.config, training.curves, training.links, training.recipe)
    for gpus in _numbers_of_gpus(training):
        asked = replace(training, gpus=gpus, days=None)
        # before any layout is foretold: GPUs that do nothing but compute the sequences
        if asked.steps * asked.sequences * sequence_s > limit_s * gpus:
            continue
        peaks, _ = _peaks(asked)
        costs, _ = _fitting(asked, peaks)
        if any(asked.steps * cost.step_s <= limit_s for cost in costs):
            return gpus
    return None


def _numbers_of_gpus(training: Training) -> Iterator[int]:
    """Those of one node, and then of whole nodes, if their network is known."""
    most, node = int(training.batch.wanted), training.links.gpus_per_node
    yield from range(1, min(node, most) + 1)
    if training.links.network_bytes_per_s is not None:
        yield from range(2 * node, most + 1, node)
