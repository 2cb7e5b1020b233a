"""Peak memory of the fullest rank of a layout, from the tape of one micro-batch.

A rank's tensors are those of the step in one process, of its own blocks, with its share of each:
the tensor group divides matrices and activations, shards divide the state. All the ranks of a step
but the first and the last stage of a pipeline keep less than these two.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..config import Parallel, Phase, RunConfig
from .depth import Change, StepByDepth, of_depth, step_by_depth
from .layout import Layout
from .memory import rounded_bytes
from .shards import FP32_BYTES, LOOKUP, REST, Parameter, Unit, factor_bytes, is_block, parameters_of
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
VOCABULARY = "vocabulary"
GATHERED_INPUTS = 2
"""Whole inputs of matmuls that a rank of a tensor group gathers at once: in backward the input, to
be multiplied again, and the gradient of the result.
"""


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
    def step(self) -> StepByDepth:
        """What the rank does in a step."""
        return step_by_depth(self.alone)

    @cached_property
    def names(self) -> Names:
        """Sizes of the axes of a micro-batch, of whole matrices."""
        return Names(axes(self.alone))

    @property
    def blocks(self) -> int:
        """Number of blocks of a stage."""
        return self.config.model.num_layers // self.layout.pipeline

    @cached_property
    def block_parameters(self) -> tuple[Parameter, ...]:
        """The parameters of one block, with this rank's part of each matrix."""
        return tuple(one for one in self._parameters if is_block(one.unit))

    @cached_property
    def outside_parameters(self) -> tuple[Parameter, ...]:
        """The parameters outside of blocks, with this rank's part of each matrix."""
        return tuple(one for one in self._parameters if not is_block(one.unit))

    @cached_property
    def _parameters(self) -> list[Parameter]:
        parts = []
        for parameter in parameters_of(self.alone):
            *before, last = parameter.shape
            if parameter.is_matrix:
                parameter = replace(parameter, shape=(*before, -(-last // self.layout.tensor)))
            parts.append(parameter)
        return parts

    def elements(self, *, is_kept: bool) -> int:
        """Elements of the parameters of a stage, all or those that are kept by this rank as its
        shard; of the outside parameters a stage of a pipeline has one table.
        """

        def of(parameter: Parameter) -> int:
            if is_kept and parameter.is_matrix:
                return -(-parameter.elements // self.layout.shards)
            return parameter.elements

        outside = [of(one) for one in self.outside_parameters]
        if self.layout.pipeline > 1:
            outside = [max(outside)]
        return self.blocks * sum(map(of, self.block_parameters)) + sum(outside)

    def gathered(self, name: str, parameters: Iterable[Parameter]) -> Unit:
        """The unit of the matrices of these parameters, as shards of it are gathered."""
        parts = []
        for parameter in parameters:
            if parameter.is_matrix:
                parts.append(-(-parameter.elements // self.layout.shards))
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
    if layout.pipeline == 1:
        return StageMemory(rank, is_first=True, is_last=True).peak_bytes()
    first = StageMemory(rank, is_first=True, is_last=False)
    last = StageMemory(rank, is_first=False, is_last=True)
    return max(first.peak_bytes(), last.peak_bytes())


class StageMemory:
    """The memory of a stage of a pipeline, or of all blocks."""

    def __init__(self, rank: Rank, *, is_first: bool, is_last: bool) -> None:
        self._rank, self._layout = rank, rank.layout
        self._is_first, self._is_last = is_first, is_last
        self._shares, self._more_bytes = _shared_out(rank)
        self._sizes: dict[TensorKey, int] = {}
        live = rank.step.live(Phase.FORWARD, 1)
        self._tables = sum(
            count
            for kind, count in live.items()
            if kind[0] is Category.PARAMETERS and VOCABULARY in kind[2].split()
        )

    def peak_bytes(self) -> int:
        """The most bytes of tensors in a step."""
        step, blocks = self._rank.step, self._rank.blocks
        peak = 0
        for phase, changes in step.changes.items():
            level = sum(
                count * self._size(kind) for kind, count in step.live(phase, blocks).items()
            )
            peak = max(peak, level)
            # a block begins with as much more than the one before as all do, so that the first and
            # the last have the peak
            first = changes.of_depth(min(blocks, 2))
            level, peak = self._walk(first[: changes.place], level, peak)
            if blocks > 2:
                after, peak = self._walk(changes.block, level, peak)
                level += (blocks - 2) * (after - level)
            _, peak = self._walk(first[changes.place :], level, peak)
        return peak + self._more_bytes + self._in_flight_bytes()

    def _walk(self, changes: Iterable[Change], level: int, peak: int) -> tuple[int, int]:
        """Bytes after these changes, and the most so far, from bytes before them."""
        for is_freed, kind in changes:
            level += -self._size(kind) if is_freed else self._size(kind)
            if level > peak:
                peak = level
        return level, peak

    def kept_bytes(self, blocks: int) -> int:
        """Activations that a micro-batch keeps in so many blocks until its backward pass, without
        logits. A tape has inputs of checkpoints, which a block returns, among its results.
        """
        kept_bytes = 0
        for kind, count in self._rank.step.live(Phase.BACKWARD, blocks).items():
            is_kept = kind[0] in (Category.ACTIVATIONS, Category.LOSS)
            if is_kept and VOCABULARY not in kind[2].split():
                kept_bytes += count * self._size(kind)
        return kept_bytes

    def _in_flight_bytes(self) -> int:
        """Activations of micro-batches that wait for their backward pass while another one is at
        the peak; the last stage runs it at once.
        """
        if not self._is_first:
            return 0
        return round((self._layout.in_flight - 1) * self.kept_bytes(self._rank.blocks))

    def _size(self, kind: TensorKey) -> int:
        """Bytes that a rank of this stage has of a tensor of this kind."""
        if kind not in self._sizes:
            self._sizes[kind] = self._computed_size(kind)
        return self._sizes[kind]

    def _computed_size(self, kind: TensorKey) -> int:
        category, _, shape, element_bytes, _ = kind
        words = shape.split()
        share = self._shares.get(category, 1.0)
        if category not in WHOLE and len(words) > 1:
            share /= self._layout.tensor
        if VOCABULARY in words and not (self._is_first and self._is_last):
            if category in MATRICES[:3]:
                share /= self._tables
            elif not self._is_last:
                return 0
        whole_bytes = rounded_bytes(self._rank.names.size(shape) * element_bytes)
        return round(share * whole_bytes)


def _shared_out(rank: Rank) -> tuple[Mapping[Category, float], int]:
    """The share of each category that a rank keeps, and what it keeps in addition: whole gradients,
    gathered blocks, inputs of matmuls that a tensor group gathers.
    """
    layout = rank.layout
    every, kept = rank.elements(is_kept=False), rank.elements(is_kept=True)
    shares: dict[Category, float] = {}
    more_bytes = 0
    if layout.tensor > 1:
        tokens = rank.alone.batch_size * rank.alone.model.context_length
        whole_bytes = tokens * rank.config.model.d_model * factor_bytes(rank.config.precision)
        more_bytes += round(GATHERED_INPUTS * whole_bytes * (1 - 1 / layout.tensor))
    share = kept / every
    if layout.shards > 1:
        shares[Category.OPTIMIZER_STATE] = shares[Category.OPTIMIZER_WORKSPACE] = share
        element_bytes = factor_bytes(rank.config.precision)
        if not layout.shards_parameters and element_bytes != FP32_BYTES:
            # masters belong to the optimizer's state, and ranks keep copies for matmuls
            shares |= {Category.PARAMETERS: share, Category.WEIGHT_COPIES: 0.0}
            more_bytes += element_bytes * every
    if layout.shards_parameters:
        shares |= {Category.PARAMETERS: share, Category.GRADIENTS: share}
        shares[Category.WEIGHT_COPIES] = 0.0
        ahead = Parallel.FSDP.exchange.units_ahead
        block = rank.gathered("block", rank.block_parameters)
        rest = rank.gathered(REST, tuple(p for p in rank.outside_parameters if p.unit == REST))
        more_bytes += (ahead + 1) * block.gathered_bytes(layout.shards)
        more_bytes += rest.gathered_bytes(layout.shards) if rest.parts else 0
    elif layout.gpus > layout.tensor * layout.pipeline or layout.accumulate > 1:
        # buckets of gradients exist throughout
        shares[Category.GRADIENTS] = 0.0
        more_bytes += FP32_BYTES * (kept if layout.shards > 1 and layout.stage == 2 else every)
    if layout.shards_parameters and layout.accumulate > 1:
        shares[Category.GRADIENTS] = 0.0
        more_bytes += FP32_BYTES * kept
    return shares, more_bytes
