"""Peak memory of the fullest rank of a layout, from the tape of one micro-batch.

A rank's tensors are those of the step in one process, of its own blocks, with its share of each:
the tensor group divides matrices and activations, shards divide the state. All the ranks of a step
but the first and the last stage of a pipeline keep less than these two.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ..config import Parallel, Phase, RunConfig
from .blocks import Blocks, block_parameters, blocks_of_model, outside_parameters, plain_model
from .depth import Change, StepByDepth, of_depth, step_by_depth
from .layout import Layout
from .memory import rounded_bytes
from .recipes import cast_bytes
from .shards import FP32_BYTES, LOOKUP, REST, Parameter, Unit, factor_bytes
from .tape import Category, Names, TensorKey
from .traces import axes

MATRICES = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.WEIGHT_COPIES,
    Category.OPTIMIZER_WORKSPACE,
)
"""Categories whose tensors have the shapes of parameters."""
WHOLE = (Category.BUFFERS, Category.LIBRARY_WORKSPACE, Category.GATHERED)
"""Categories of which each rank of a tensor group has all."""
EXPERTS = "experts"
"""Name of the unit of a block's experts, where ranks divide them."""
GATHERED_INPUTS = 2
"""Whole inputs of matmuls that a rank of a tensor group gathers at once: in backward the input, to
be multiplied again, and the gradient of the result.
"""


@lru_cache(maxsize=256)
def _named(sizes: tuple[tuple[str, int], ...]) -> Names:
    """Axes of these sizes, which keep what they have computed."""
    return Names(dict(sizes))


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank of a layout, and what it computes in a micro-batch."""

    config: RunConfig
    """The step of the whole model in one process."""
    layout: Layout

    @cached_property
    def alone(self) -> RunConfig:
        """The step of a model of one block on this rank's micro-batch and part of the context."""
        model = self.config.model
        shortened = replace(model, context_length=model.context_length // self.layout.context)
        return of_depth(
            replace(
                self.config,
                model=shortened,
                batch_size=self.layout.micro_batch,
                checkpoint_blocks=self.layout.checkpoint,
            ).alone,
            1,
        )

    @cached_property
    def steps(self) -> tuple[StepByDepth, ...]:
        """What the rank does in a step, for each kind of blocks."""
        kinds = range(max(self.model.kinds) + 1)
        return tuple(step_by_depth(self.alone, kind) for kind in kinds)

    @cached_property
    def model(self) -> Blocks:
        """The blocks of the whole model."""
        return blocks_of_model(self.config)

    @cached_property
    def names(self) -> Names:
        """Sizes of the axes of a micro-batch, of whole matrices."""
        return _named(tuple(axes(self.alone).items()))

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The kinds of the blocks of the first stage and of the last, or of all blocks."""
        kinds, pipeline = self.model.kinds, self.layout.pipeline
        if pipeline == 1:
            return (kinds,)
        # the last stage has the head, and no more blocks than others
        most, least = -(-len(kinds) // pipeline), len(kinds) // pipeline
        return kinds[:most], kinds[-least:]

    @property
    def blocks(self) -> int:
        """Number of blocks of a stage."""
        return len(self.stages[0])

    @cached_property
    def block_parameters(self) -> tuple[tuple[Parameter, ...], ...]:
        """The parameters of a block of each kind, with this rank's part of each matrix."""
        kinds = range(max(self.model.kinds) + 1)
        return tuple(self._parts(block_parameters(self._plain, kind)) for kind in kinds)

    @cached_property
    def outside_parameters(self) -> tuple[Parameter, ...]:
        """The parameters outside of blocks, with this rank's part of each matrix."""
        return self._parts(outside_parameters(self._plain))

    @cached_property
    def _plain(self) -> RunConfig:
        """A step whose model has the same parameters, whatever the micro-batch."""
        return plain_model(self.config)

    def _parts(self, parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
        """This rank's parts: of experts it has some, and of other matrices a part."""
        parts = []
        for parameter in parameters:
            first, *between = parameter.shape
            if self.has_few(parameter):
                parameter = replace(parameter, shape=(first // self.layout.expert_ranks, *between))
            elif parameter.is_matrix:
                *before, last = parameter.shape
                parameter = replace(parameter, shape=(*before, -(-last // self.layout.tensor)))
            parts.append(parameter)
        return tuple(parts)

    def elements(self, kinds: Iterable[int], *, is_kept: bool, is_dense: bool = False) -> int:
        """Elements of the parameters of a stage with blocks of these kinds, all or those that are
        kept by this rank as its shard, and if `is_dense` without experts that ranks divide; of the
        outside parameters a stage of a pipeline has one table.
        """

        def of(parameter: Parameter) -> int:
            if is_dense and self.has_few(parameter):
                return 0
            if is_kept and parameter.is_matrix:
                return -(-parameter.elements // self.shards_of(parameter))
            return parameter.elements

        outside = [of(one) for one in self.outside_parameters]
        if self.layout.pipeline > 1:
            outside = [max(outside)]
        of_kinds = [sum(map(of, parameters)) for parameters in self.block_parameters]
        return sum(of_kinds[kind] for kind in kinds) + sum(outside)

    def linear_elements(self, kinds: Iterable[int]) -> int:
        """Elements of the matrices of a stage's blocks of these kinds."""
        of_kinds = []
        for parameters in self.block_parameters:
            of_kinds.append(sum(one.elements for one in parameters if one.is_matrix))
        return sum(of_kinds[kind] for kind in kinds)

    def has_few(self, parameter: Parameter) -> bool:
        """Whether the parameter has experts, of which this rank has a part."""
        return parameter.has_experts and self.layout.expert > 1

    def shards_of(self, parameter: Parameter) -> int:
        """Ranks that divide the state of a parameter, where it is divided."""
        return self.layout.expert_shards if self.has_few(parameter) else self.layout.shards

    def units_of(self, kind: int) -> list[Unit]:
        """The units in which a block of this kind is gathered: its experts apart, if other ranks
        divide them.
        """
        names = {False: "block", True: EXPERTS}
        units = []
        for has_few, name in names.items():
            members = [one for one in self.block_parameters[kind] if self.has_few(one) is has_few]
            if members:
                units.append(self.gathered(name, members))
        return units

    def gathered(self, name: str, parameters: Iterable[Parameter]) -> Unit:
        """The unit of the matrices of these parameters, which the same ranks divide, as shards of
        it are gathered.
        """
        parts = []
        for parameter in parameters:
            if parameter.is_matrix:
                parts.append(-(-parameter.elements // self.shards_of(parameter)))
        element_bytes = factor_bytes(self.config.precision)
        if name in (LOOKUP, REST):
            element_bytes = FP32_BYTES
        return Unit(name=name, parts=tuple(parts), element_bytes=element_bytes)


def fullest_rank_bytes(config: RunConfig, layout: Layout) -> int:
    """The most bytes of tensors on a rank in a steady step of a layout: on the first or the last
    stage of a pipeline.

    Remainders of blocks that the allocator does not split off, under 1 MiB each, are left out, and
    so is a gathered embedding, which is there before the first block and after the last.
    """
    rank = Rank(config=config, layout=layout)
    last = len(rank.stages) - 1
    peaks = []
    for place, kinds in enumerate(rank.stages):
        stage = StageMemory(rank, kinds, is_first=place == 0, is_last=place == last)
        peaks.append(stage.peak_bytes())
    return max(peaks)


class StageMemory:
    """The memory of a stage of a pipeline, or of all blocks."""

    def __init__(self, rank: Rank, kinds: Sequence[int], *, is_first: bool, is_last: bool) -> None:
        """`kinds` are those of its blocks, in order."""
        self._rank, self._layout, self._kinds = rank, rank.layout, kinds
        self._is_first, self._is_last = is_first, is_last
        self._shares, self._more_bytes = _shared_out(rank, kinds)
        self._sizes: dict[TensorKey, int] = {}
        self._stacks = set[str]()
        for kind in {*kinds}:
            for parameter in block_parameters(plain_model(rank.config), kind):
                if parameter.has_experts:
                    self._stacks.add(" ".join(map(str, parameter.shape)))
        live = rank.steps[0].live(Phase.FORWARD, 1)
        self._tables = sum(
            count
            for kind, count in live.items()
            if kind[0] is Category.PARAMETERS and rank.model.vocabulary in kind[2].split()
        )

    def peak_bytes(self) -> int:
        """The most bytes of tensors in a step."""
        peak = 0
        for phase, changes in self._rank.steps[0].changes.items():
            level = sum(
                count * self._size(kind) for kind, count in self._live(phase, self._kinds).items()
            )
            peak = max(peak, level)
            kinds = [*self._kinds]
            if phase is not Phase.FORWARD:
                kinds.reverse()
            if 0 in kinds:  # a model of one block has one of this kind already
                kinds.remove(0)
            level, peak = self._walk(changes.of_one[: changes.place], level, peak)
            # from where it begins, a kind's block always goes as high, and ends as high
            courses = {}
            for kind in sorted({*kinds}):
                courses[kind] = self._walk(self._rank.steps[kind].changes[phase].block, 0, 0)
            for kind in kinds:
                more, highest = courses[kind]
                peak = max(peak, level + highest)
                level += more
            _, peak = self._walk(changes.of_one[changes.place :], level, peak)
        return peak + self._more_bytes + self._in_flight_bytes() + self._fp8_bytes()

    def _live(self, phase: Phase, kinds: Iterable[int]) -> Counter[TensorKey]:
        """How many tensors of each kind exist when a phase begins, with blocks of these kinds."""
        counts = self._rank.steps[0].live(phase, 0)
        for kind, times in Counter(kinds).items():
            for tensor, count in self._rank.steps[kind].live_of_block[phase].items():
                counts[tensor] += times * count
        return counts

    def _walk(self, changes: Iterable[Change], level: int, peak: int) -> tuple[int, int]:
        """Bytes after these changes, and the most so far, from bytes before them."""
        for is_freed, kind in changes:
            size = self._sizes.get(kind) or self._size(kind)
            level += -size if is_freed else size
            if level > peak:
                peak = level
        return level, peak

    def kept_bytes(self, kinds: Iterable[int]) -> int:
        """Activations that a micro-batch keeps in blocks of these kinds until its backward pass,
        without logits. A tape has inputs of checkpoints, which a block returns, among its results.
        """
        kept_bytes = 0
        for tensor, count in self._live(Phase.BACKWARD, kinds).items():
            is_kept = tensor[0] in (Category.ACTIVATIONS, Category.LOSS)
            if is_kept and self._rank.model.vocabulary not in tensor[2].split():
                kept_bytes += count * self._size(tensor)
        return kept_bytes

    def _fp8_bytes(self) -> int:
        """What a stage keeps more with linear layers in fp8: casts of weights, less a byte for each
        element of what they read. Attention keeps its result in bf16 as well, so that the input of
        the layer after it takes a byte more.
        """
        rank, layout = self._rank, self._layout
        if layout.fp8 is None:
            return 0
        # weights that are gathered for each micro-batch are cast then
        kinds = self._kinds[:1] if layout.shards_parameters else self._kinds
        more_bytes = cast_bytes(layout.fp8, rank.linear_elements(kinds))
        if layout.checkpoint:
            return more_bytes
        tokens = rank.alone.batch_size * rank.alone.model.context_length
        saved_bytes = tokens * (rank.model.d_model + rank.model.d_ff) // layout.tensor
        in_flight = layout.in_flight if self._is_first else 1.0
        return more_bytes - round(in_flight * len(self._kinds) * saved_bytes)

    def _in_flight_bytes(self) -> int:
        """Activations of micro-batches that wait for their backward pass while another one is at
        the peak; the last stage runs it at once.
        """
        if not self._is_first:
            return 0
        return round((self._layout.in_flight - 1) * self.kept_bytes(self._kinds))

    def _size(self, kind: TensorKey) -> int:
        """Bytes that a rank of this stage has of a tensor of this kind."""
        if kind not in self._sizes:
            self._sizes[kind] = self._computed_size(kind)
        return self._sizes[kind]

    def _computed_size(self, kind: TensorKey) -> int:
        category, _, shape, element_bytes, _ = kind
        words = shape.split()
        is_of_experts = self._layout.expert > 1 and shape in self._stacks
        share = self._shares[is_of_experts].get(category, 1.0)
        if is_of_experts:
            share /= self._layout.expert_ranks
        elif category not in WHOLE and len(words) > 1:
            share /= self._layout.tensor
        if self._rank.model.vocabulary in words and not (self._is_first and self._is_last):
            if category in MATRICES[:3]:
                share /= self._tables
            elif not self._is_last:
                return 0
        whole_bytes = rounded_bytes(self._rank.names.size(shape) * element_bytes)
        return round(share * whole_bytes)


Shares = Mapping[Category, float]
"""The share of each category of tensors that a rank keeps; all of those that are not named."""


def _shared_out(rank: Rank, kinds: Sequence[int]) -> tuple[tuple[Shares, Shares], int]:
    """The shares of tensors that are not of experts and of those that are, and what a rank of a
    stage with blocks of these kinds keeps in addition: whole gradients, gathered blocks, inputs of
    matmuls that a tensor group gathers, tokens that are sent to experts.
    """
    layout = rank.layout
    every, kept = rank.elements(kinds, is_kept=False), rank.elements(kinds, is_kept=True)
    more_bytes = _sent_bytes(rank)
    element_bytes = factor_bytes(rank.config.precision)
    if layout.shards > 1 and not layout.shards_parameters and element_bytes != FP32_BYTES:
        # masters belong to the optimizer's state, and ranks keep copies for matmuls
        more_bytes += element_bytes * every
    if layout.shards_parameters:
        ahead = Parallel.FSDP.exchange.units_ahead
        rest = rank.gathered(REST, tuple(p for p in rank.outside_parameters if p.unit == REST))
        more_bytes += (ahead + 1) * max(_gathered_bytes(rank, kind) for kind in {*kinds})
        more_bytes += rest.gathered_bytes(layout.shards) if rest.parts else 0
        more_bytes += FP32_BYTES * kept if layout.accumulate > 1 else 0
    elif layout.gpus > layout.tensor * layout.pipeline or layout.accumulate > 1:
        # buckets of gradients exist throughout
        more_bytes += FP32_BYTES * (kept if layout.shards > 1 and layout.stage == 2 else every)
    dense = _shares(rank, kinds, has_experts=False)
    return (dense, _shares(rank, kinds, has_experts=True)), more_bytes


def _sent_bytes(rank: Rank) -> int:
    """Whole inputs of matmuls that a rank of a tensor group gathers, and tokens on their way to
    experts, which a rank has as they are sent and as they come.
    """
    layout, alone = rank.layout, rank.alone
    tokens = alone.batch_size * alone.model.context_length
    whole_bytes = tokens * rank.model.d_model * factor_bytes(rank.config.precision)
    sent_bytes = 0
    if layout.tensor > 1:
        sent_bytes += round(GATHERED_INPUTS * whole_bytes * (1 - 1 / layout.tensor))
    if layout.expert > 1:
        sent_bytes += rank.model.experts_per_token * whole_bytes // layout.tensor
    return sent_bytes


def _gathered_bytes(rank: Rank, kind: int) -> int:
    """Bytes of a gathered block of this kind; experts that no other rank has are there already."""
    gathered_bytes = 0
    for unit in rank.units_of(kind):
        shards = rank.layout.shards
        if unit.name == EXPERTS:
            shards = rank.layout.expert_shards
        if shards > 1:
            gathered_bytes += unit.gathered_bytes(shards)
    return gathered_bytes


def _shares(rank: Rank, kinds: Sequence[int], *, has_experts: bool) -> Shares:
    """The share of each category that a rank keeps, of tensors of experts or of others."""
    layout = rank.layout
    has_few = has_experts and layout.expert > 1
    shards = layout.expert_shards if has_few else layout.shards
    shares: dict[Category, float] = {}
    share = 1 / shards
    if not has_few:
        every = rank.elements(kinds, is_kept=False, is_dense=True)
        share = rank.elements(kinds, is_kept=True, is_dense=True) / every
    if shards > 1:
        shares[Category.OPTIMIZER_STATE] = shares[Category.OPTIMIZER_WORKSPACE] = share
    if layout.shards_parameters:
        shares |= {Category.PARAMETERS: share, Category.GRADIENTS: share}
        if shards > 1:
            shares[Category.WEIGHT_COPIES] = 0.0
    elif layout.shards > 1 and factor_bytes(rank.config.precision) != FP32_BYTES:
        shares |= {Category.PARAMETERS: share, Category.WEIGHT_COPIES: 0.0}
    if layout.accumulate > 1 or (
        not layout.shards_parameters and layout.gpus > layout.tensor * layout.pipeline
    ):
        shares[Category.GRADIENTS] = 0.0
    return shares
