"""Time of a step of a layout: the kernels of the slowest stage, the collectives that they wait for,
the pipeline's bubble, the optimizer.

Collectives of a tensor group are never hidden; keys and values that go round while attention
computes are, as far as attention takes, and so is what interleaved stages send; gathers and
reductions of the state run beside kernels, as in `ranks_time`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import exp, hypot, log

from ..config import Parallel, Phase, RunConfig
from .accounting import ADAMW_BYTES
from .blocks import blocks_of_model
from .communication import Collective, CollectiveCall, Stage
from .compiled_blocks import rank_step, stream_width
from .curves import Curves, interpolated, with_backend
from .depth import StepByDepth
from .fusion import fused
from .layout import SELECTIVE, Layout
from .layout_memory import EXPERTS, Rank
from .rank_operations import rank_operations, with_sums
from .ranks_time import SPEED_BESIDE, Links, Timeline
from .recipes import Recipe, casts
from .selective import run_again
from .shards import FP32_BYTES, LOOKUP, Unit, factor_bytes
from .tape import FP8_BYTES, Names, Operation, OperationKey, OperationKind
from .time import DEVICE_SPREAD, call_time_s, kernel_spread, kernel_time, spread_of
from .traces import axes

_PHASES = (Phase.FORWARD, Phase.BACKWARD)
TENSOR_CALLS = 2
"""Pairs of an all-gather and a reduce-scatter in a block's forward pass, and as many in backward:
around attention and around the feed-forward network (Korthikanti et al. 2022).
"""
EXPERT_CALLS = 2
"""All-to-alls of a block in a pass: one brings tokens to their experts, one brings the results
back.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTime:
    """Seconds of a step, and of what it consists."""

    compute_s: float
    """Kernels of forward and backward of all micro-batches on the slowest stage."""
    exposed_s: Mapping[str, float]
    """Communication for which kernels wait, or that slows them, by the kind of group."""
    bubble_s: float
    optimizer_s: float
    spread: float
    """Nine of ten such steps take between the time divided and multiplied by this, as far as it
    depends on kernels.
    """
    spread_below: float | None = None
    """What the time is divided by for that, where it is another factor."""
    shortest_block_s: Mapping[Phase, float]
    """Kernels of the block that takes least in a micro-batch, by phase."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + sum(self.exposed_s.values()) + self.bubble_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of operations."""

    step_s: float
    """The longer of the device's time and the host's, or both if the host waits."""
    attention_s: float
    """Kernels of fused attention."""


def layout_time(rank: Rank, curves: Curves, links: Links) -> LayoutTime:
    """The time of a step of a rank's layout. Raises DepthError if the model's blocks differ."""
    curves = with_backend(curves, rank.config.model.sdpa_backend)
    return _LayoutTimer(rank, curves, links).time()


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Times of the kernels of a micro-batch, by phase."""

    blocks: Sequence[Mapping[Phase, _Work]]
    """Work of one block of each kind."""
    outside_s: Mapping[Phase, float]
    """Seconds of the embedding, the head and the loss."""
    spread: float
    """Nine of ten take between their time divided and multiplied by this."""


@lru_cache(maxsize=4096)
def _kernels(alone: RunConfig, layout: Layout, curves: Curves) -> _Kernels:
    """The kernels of a rank of a tensor, a context and an expert group; `alone` is the step of one
    block on this rank's micro-batch. The head is in bf16 where blocks are in fp8.
    """
    tensor, context, expert, recipe = layout.tensor, layout.context, layout.expert, layout.fp8
    names, model = Names(axes(alone)), blocks_of_model(alone)
    divided = partial(
        rank_operations,
        names=names,
        tensor=tensor,
        context=context,
        expert=expert,
        width=stream_width(alone, model.d_model),
        factor_bytes=factor_bytes(alone.precision) if layout.shards > 1 else FP32_BYTES,
    )
    if layout.checkpoint == SELECTIVE:  # what runs again is added below
        alone = replace(alone, checkpoint_blocks=0)
    blocks: list[dict[Phase, _Work]] = []
    every: list[Operation] = []
    for kind in range(max(model.kinds) + 1):
        step = rank_step(alone, kind)
        launched = _launched(step, names, recipe)
        of_phases = {phase: divided(launched[phase], recipe=recipe) for phase in _PHASES}
        if layout.checkpoint == SELECTIVE:
            again = run_again(of_phases[Phase.FORWARD])
            of_phases[Phase.BACKWARD] = [*again, *of_phases[Phase.BACKWARD]]
        blocks.append({phase: _work(of_phases[phase], layout, alone, curves) for phase in _PHASES})
        for operations in of_phases.values():
            every += operations
    outside_s = {}
    for phase in _PHASES:
        # what a second block adds to a model of one block, and what that one has besides
        launched_of_one = rank_step(alone).launches[phase]
        of_one = _work(divided(launched_of_one.of_one), layout, alone, curves)
        of_block = blocks[0][phase]
        if recipe is not None or layout.checkpoint == SELECTIVE:
            of_block = _work(divided(launched_of_one.block), layout, alone, curves)
        outside_s[phase] = max(0.0, of_one.step_s - of_block.step_s)
    spread = kernel_spread(every, alone.precision, curves, step_spread=1.0).factor
    return _Kernels(tuple(blocks), outside_s, spread)


def _launched(
    step: StepByDepth, names: Names, recipe: Recipe | None
) -> Mapping[Phase, Sequence[OperationKey]]:
    """The operations of a block, whose passes are fused in fp8."""
    launched = {}
    for phase in _PHASES:
        keys = step.launches[phase].block
        launched[phase] = keys if recipe is None else tuple(fused(keys, names))
    return launched


def _work(
    launched: Iterable[Operation], layout: Layout, config: RunConfig, curves: Curves
) -> _Work:
    """The time of operations of a rank of a layout's ring, which the host launches and the device
    runs at the same time, until an operation for which the host waits.
    """
    operations = [*with_sums(launched, layout.context, gathers=layout.gathers_context)]
    call_s = call_time_s(config, curves)
    kernels_s = {
        operation: kernel_time(operation, config.precision, curves).time_s
        for operation in set(operations)
    }
    step_s = device_s = host_s = attention_s = 0.0
    for operation in operations:
        if operation.waits:
            step_s += max(device_s, host_s)
            device_s = host_s = 0.0
        device_s += operation.launches * (kernels_s[operation] + curves.gap_s)
        host_s += operation.launches * operation.host_calls * call_s
        if operation.kind is OperationKind.ATTENTION:
            attention_s += operation.launches * kernels_s[operation]
    return _Work(step_s + max(device_s, host_s), attention_s)


class _LayoutTimer:
    """Times of one layout on one kind of GPU."""

    def __init__(self, rank: Rank, curves: Curves, links: Links) -> None:
        self._rank, self._layout = rank, rank.layout
        self._curves, self._links = curves, links
        layout = rank.layout
        of_kernels = Layout(
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
            shard=min(layout.shard, 2),
            checkpoint=layout.checkpoint,
            fp8=layout.fp8,
            gathers_context=layout.gathers_context,
        )
        self._kernels = _kernels(rank.alone, of_kernels, curves)
        self._calls_s: dict[CollectiveCall, float] = {}
        phases_s = [self._phases_of(place) for place in range(len(rank.stages))]
        slowest = max(range(len(phases_s)), key=lambda place: sum(phases_s[place].values()))
        self._kinds = rank.stages[slowest]
        """Kinds of the blocks of the slowest stage."""
        self._phases_s = phases_s[slowest]
        """Kernels of a micro-batch on it."""
        if layout.shards_parameters:
            for phase, copied_s in zip(_PHASES, self._copied_s(), strict=True):
                self._phases_s[phase] += copied_s

    def time(self) -> LayoutTime:
        """All parts of the step's time."""
        layout = self._layout
        compute_s = sum(self._phases_s.values())
        tensor_s = self._tensor_s()
        context_s = sum(map(self._context_s, self._kinds))
        expert_s = self._expert_s()
        if layout.overlaps_experts:
            # kernels beside are slower, and wait for the rest
            expert_s = max((1 - SPEED_BESIDE) * expert_s, expert_s - compute_s)
        if layout.shards_parameters:
            compute_s += (2 + bool(layout.checkpoint)) * self._weight_casts_s()
        data_s, last_s = self._data_s()
        micro_s = compute_s + tensor_s + context_s + expert_s + data_s
        exposed_s = {
            "tensor": layout.accumulate * tensor_s,
            "context": layout.accumulate * context_s,
            "expert": layout.accumulate * expert_s,
            "data": layout.accumulate * data_s + last_s,
            "pipeline": self._pipeline_s(),
        }
        return LayoutTime(
            compute_s=layout.accumulate * compute_s + self._besides_s(),
            exposed_s={kind: time_s for kind, time_s in exposed_s.items() if time_s},
            bubble_s=layout.bubble * layout.accumulate * micro_s,
            optimizer_s=self._optimizer_s(),
            spread=exp(hypot(log(self._kernels.spread), log(self._step_spread))),
            shortest_block_s=self._shortest_block_s(),
        )

    def _shortest_block_s(self) -> dict[Phase, float]:
        """Kernels of the block that takes least, by phase."""
        shortest_s = {}
        for phase in _PHASES:
            shortest_s[phase] = min(block[phase].step_s for block in self._kernels.blocks)
        return shortest_s

    @property
    def _step_spread(self) -> float:
        """How far the step is off beside its kernels. Of several GPUs the slowest decides, and
        ceilings that come with the program are of other ones.
        """
        is_elsewhere = self._curves.is_shipped and self._layout.gpus > 1
        return max(spread_of(self._curves), DEVICE_SPREAD if is_elsewhere else 1.0)

    def _besides_s(self) -> float:
        """Passes over gradients of a step beside those of each micro-batch."""
        once_s = 0.0 if self._layout.shards_parameters else sum(self._copied_s())
        return once_s + self._added_up_s()

    def _copied_s(self) -> list[float]:
        """FSDP's passes over whole parameters and gradients, in forward and in backward."""
        elements = self._rank.elements(self._kinds, is_kept=False)
        copied_bytes = self._layout.copied_bytes
        return [self._curves.pass_s(one * elements) if one else 0.0 for one in copied_bytes]

    def _added_up_s(self) -> float:
        """Passes that add the gradients of each micro-batch but the first to those before; with a
        recipe, weights' matmuls add to these themselves, as Transformer Engine's do.
        """
        if self._layout.fp8 is not None:
            return 0.0
        is_kept = self._layout.shards_parameters
        elements = self._rank.elements(self._kinds, is_kept=is_kept)
        moved_bytes = 3 * FP32_BYTES * elements
        return (self._layout.accumulate - 1) * self._curves.pass_s(moved_bytes)

    def _phases_of(self, place: int) -> dict[Phase, float]:
        """Kernels of a micro-batch on the first stage or the last, which has the head and the loss;
        lookups of the embedding take next to nothing.
        """
        stages, kernels = self._rank.stages, self._kernels
        is_last = place == len(stages) - 1
        phases_s = {}
        for phase in _PHASES:
            blocks_s = sum(kernels.blocks[kind][phase].step_s for kind in stages[place])
            phases_s[phase] = blocks_s + is_last * kernels.outside_s[phase]
        return phases_s

    # collectives

    def _call_s(self, kind: Collective, num_bytes: float, axis: str) -> float:
        """Seconds of a collective in a group of this axis."""
        ranks = getattr(self._layout, axis)
        in_node = self._layout.neighbours(axis, self._links.gpus_per_node)
        return self._links.call_s(CollectiveCall(kind, round(num_bytes)), ranks, in_node)

    @property
    def _stream_bytes(self) -> int:
        """Bytes of a micro-batch's input of a block, in the type of matmuls."""
        alone = self._rank.alone
        tokens = alone.batch_size * alone.model.context_length
        return tokens * self._rank.model.d_model * factor_bytes(alone.precision)

    def _tensor_s(self) -> float:
        """All-gathers and reduce-scatters of a tensor group in a micro-batch. Those that gather a
        matmul's input once more for its weight's gradient run beside another matmul.
        """
        if self._layout.tensor == 1:
            return 0.0
        gathered_bytes: float = self._stream_bytes
        gather_s = self._call_s(Collective.ALL_GATHER, gathered_bytes, "tensor")
        scatter_s = self._call_s(Collective.REDUCE_SCATTER, self._stream_bytes, "tensor")
        outside_s = gather_s + scatter_s
        if self._layout.fp8 is not None:  # inputs and gradients are cast before they are gathered
            gathered_bytes *= FP8_BYTES / factor_bytes(self._rank.alone.precision)
            gather_s = self._call_s(Collective.ALL_GATHER, gathered_bytes, "tensor")
        of_call_s = 2 * (gather_s + scatter_s)
        if self._layout.checkpoint:
            of_call_s += gather_s
        if self._layout.checkpoint == 1:  # selective ones keep what is scattered
            of_call_s += scatter_s
        outside = 2  # around the embedding and the head
        return of_call_s * len(self._kinds) * TENSOR_CALLS + outside * outside_s

    def _expert_s(self) -> float:
        """All-to-alls of a micro-batch that bring tokens to the ranks of their experts and back, in
        forward and, with their gradients, in backward.
        """
        layout, model = self._layout, self._rank.model
        if layout.expert == 1:
            return 0.0
        # ranks of a tensor group have a part of the tokens each
        sent_bytes = model.experts_per_token * self._stream_bytes // layout.tensor
        call = CollectiveCall(Collective.ALL_TO_ALL, sent_bytes)
        node = self._links.gpus_per_node
        in_node = layout.neighbours("tensor", node) * layout.neighbours("expert", node)
        one_s = self._links.call_s(call, layout.expert_ranks, in_node)
        blocks = sum(self._has_experts(kind) for kind in self._kinds)
        return EXPERT_CALLS * (2 + bool(layout.checkpoint)) * blocks * one_s

    def _has_experts(self, kind: int) -> bool:
        """Whether a block of this kind has experts that ranks divide."""
        return any(map(self._rank.has_few, self._rank.block_parameters[kind]))

    def _context_s(self, kind: int) -> float:
        """Keys and values of a block that go round for longer than attention computes, in forward
        and, with their gradients, in backward.
        """
        ranks = self._layout.context
        if ranks == 1:
            return 0.0
        if self._layout.gathers_context:
            return self._gathered_context_s(kind)
        model = self._rank.model
        keys_bytes = self._stream_bytes / self._layout.tensor
        if model.num_kv_heads:
            keys_bytes *= model.num_kv_heads / model.num_heads
        sent_s = self._send_s(2 * keys_bytes, "context")
        exposed_s = 0.0
        for phase, times in ((Phase.FORWARD, 1), (Phase.BACKWARD, 2)):
            computed_s = self._kernels.blocks[kind][phase].attention_s / ranks
            exposed_s += (ranks - 1) * max(0.0, times * sent_s - computed_s)
        return exposed_s

    def _gathered_context_s(self, kind: int) -> float:
        """The same of keys and values that are gathered beside the first kernel of each pass, and
        of their gradients, which go round in fp32: each waits for the next kernel, and the last for
        none.
        """
        layout, ranks = self._layout, self._layout.context
        keys_bytes = 2 * self._stream_bytes / layout.tensor
        gather_s = self._call_s(Collective.ALL_GATHER, ranks * keys_bytes, "context")
        in_fp32 = FP32_BYTES / factor_bytes(self._rank.alone.precision)
        send_s = self._send_s(in_fp32 * keys_bytes, "context")
        forward_s, backward_s = (
            self._kernels.blocks[kind][phase].attention_s / ranks for phase in _PHASES
        )
        runs_again = layout.checkpoint == 1
        backward_s -= runs_again * forward_s
        exposed_s = (1 + runs_again) * max(0.0, gather_s - forward_s)
        exposed_s += max(0.0, gather_s - backward_s)
        return exposed_s + (ranks - 1) * max(0.0, send_s - backward_s) + send_s

    def _send_s(self, num_bytes: float, axis: str) -> float:
        """Seconds in which a rank sends to its neighbour in a group."""
        stays = self._layout.neighbours(axis, self._links.gpus_per_node) == getattr(
            self._layout, axis
        )
        network = self._links.network_bytes_per_s
        rate = self._links.node_bytes_per_s
        if not stays and network is not None:
            rate = min(rate, network)
        return num_bytes / rate

    def _pipeline_s(self) -> float:
        """Activations and gradients that stages send to each other, for which they wait: for all,
        unless chunks of a stage take turns. Then another chunk computes meanwhile, but while the
        pipeline fills and empties (NeMo's guide, "Pipeline-parallel Communication Overlap").
        """
        layout = self._layout
        if layout.pipeline == 1:
            return 0.0
        one_s = self._send_s(self._stream_bytes / layout.tensor, "pipeline")
        if layout.chunks == 1:
            return 2 * one_s * (layout.accumulate + layout.pipeline - 1)
        every = layout.chunks * layout.accumulate
        waited = min(layout.chunks_ahead, every)
        computed_s = self._phases_s[Phase.FORWARD] / layout.chunks
        return 2 * (waited * one_s + (every - waited) * max(0.0, one_s - computed_s))

    def _data_s(self) -> tuple[float, float]:
        """What gathers and reductions of the state add to each micro-batch, and to a step."""
        layout = self._layout
        if layout.data * layout.shards == 1:
            return 0.0, 0.0
        if not layout.shards_parameters:
            return 0.0, self._beside_s(gathers=layout.shards > 1, reduces=True)
        each_s = self._beside_s(gathers=True, reduces=False)
        return each_s, self._beside_s(gathers=True, reduces=True) - each_s

    def _beside_s(self, *, gathers: bool, reduces: bool) -> float:
        """How much longer a micro-batch takes if its blocks' parameters are gathered, and their
        gradients reduced over all replicas, beside its kernels.
        """
        line = Timeline(Parallel.FSDP.exchange, self._group_s)
        more_s = line.run(self._stages(gathers, reduces), self._phases_s)
        return sum(more_s.values())

    def _group_s(self, call: CollectiveCall) -> float:
        """Seconds of an all-reduce among replicas, or of another collective among shards."""
        if call not in self._calls_s:
            self._calls_s[call] = self._computed_group_s(call)
        return self._calls_s[call]

    def _computed_group_s(self, call: CollectiveCall) -> float:
        """The same, computed."""
        layout = self._layout
        is_reduce = call.collective is Collective.ALL_REDUCE
        ranks, in_node = layout.data, layout.neighbours("data", self._links.gpus_per_node)
        if not is_reduce:
            ranks = layout.expert_shards
            in_node = layout.neighbours("shard", self._links.gpus_per_node)
            in_node *= layout.neighbours("context", self._links.gpus_per_node)
            if not isinstance(call, _OfExperts):
                ranks = layout.shards
                in_node *= layout.neighbours("expert", self._links.gpus_per_node)
        return self._links.call_s(call, ranks, min(in_node, ranks))

    def _stages(self, gathers: bool, reduces: bool) -> list[Stage]:
        """What is computed and exchanged in a micro-batch, block by block."""
        rank = self._rank
        lookups = [one for one in rank.outside_parameters if not one.multiplied_elements]
        heads = [one for one in rank.outside_parameters if one.multiplied_elements]
        of_kinds = [rank.units_of(kind) for kind in range(len(rank.block_parameters))]
        of_blocks = [of_kinds[kind] for kind in self._kinds]
        first, last = rank.gathered(LOOKUP, lookups), rank.gathered("head", heads)
        places: list[Sequence[Unit]] = [[first], *of_blocks, [last]]
        again = gathers and rank.layout.shards_parameters
        stages = []
        for phase, ordered in ((Phase.FORWARD, places), (Phase.BACKWARD, places[::-1])):
            for units in ordered:
                gathered: list[CollectiveCall] = []
                sends: list[CollectiveCall] = []
                for unit in units:
                    if gathers and (phase is Phase.FORWARD or again):
                        gathered += self._gathers(unit)
                    if phase is Phase.BACKWARD:
                        sends += self._reductions(unit, reduces)
                stages.append(
                    Stage(
                        phase=phase,
                        multiplied_elements=sum(map(self._multiplied, units)),
                        gathers=tuple(gathered),
                        sends=tuple(sends),
                    )
                )
        return stages

    def _shards(self, unit: Unit) -> int:
        """Ranks that divide the state of a unit."""
        return self._layout.expert_shards if unit.name == EXPERTS else self._layout.shards

    def _multiplied(self, unit: Unit) -> int:
        """Elements of a unit's matrices as often as a token multiplies them on average."""
        elements = self._shards(unit) * sum(unit.parts)
        if unit.name == EXPERTS:
            model = self._rank.model
            chosen = model.experts_per_token * self._layout.expert_ranks
            return elements * chosen // model.experts
        return 0 if unit.name == LOOKUP else elements

    def _gathers(self, unit: Unit) -> Iterable[CollectiveCall]:
        """The collective that gathers the parameters of a unit."""
        if (shards := self._shards(unit)) > 1:
            num_bytes = unit.element_bytes * sum(unit.parts) * shards
            yield _call_of(unit, Collective.ALL_GATHER, num_bytes)

    def _reductions(self, unit: Unit, reduces: bool) -> Iterable[CollectiveCall]:
        """The collectives that reduce a unit's gradients: FSDP scatters those of each micro-batch,
        and replicas average once in a step.
        """
        layout, elements, shards = self._layout, sum(unit.parts), self._shards(unit)
        is_half = layout.stage == 3 and not layout.fp32_reductions
        sharded_bytes = unit.element_bytes if is_half else FP32_BYTES
        if shards > 1 and (reduces or layout.shards_parameters):
            num_bytes = sharded_bytes * elements * shards
            yield _call_of(unit, Collective.REDUCE_SCATTER, num_bytes)
        if reduces and layout.data > 1:
            yield _call_of(unit, Collective.ALL_REDUCE, FP32_BYTES * elements)

    def _optimizer_s(self) -> float:
        """AdamW's update of what a rank has of the parameters, in one pass, and casts of weights to
        fp8, which all micro-batches use; weights that are gathered for each are cast there.
        """
        elements = self._rank.elements(self._kinds, is_kept=self._layout.shards > 1)
        update_s = interpolated(self._curves.adamw, ADAMW_BYTES * elements)
        return update_s if self._layout.shards_parameters else update_s + self._weight_casts_s()

    def _weight_casts_s(self) -> float:
        """Casts of the weights of a stage's blocks to fp8."""
        if self._layout.fp8 is None:
            return 0.0
        operations = casts(self._layout.fp8, self._rank.linear_elements(self._kinds))
        return sum(self._curves.pass_s(operation.moved_bytes) for operation in operations)


@dataclass(frozen=True, slots=True)
class _OfExperts(CollectiveCall):
    """A collective among the ranks that have the same experts."""


def _call_of(unit: Unit, collective: Collective, num_bytes: int) -> CollectiveCall:
    """A collective of a unit's tensors, among the ranks that share them."""
    make = _OfExperts if unit.name == EXPERTS else CollectiveCall
    return make(collective, num_bytes)
