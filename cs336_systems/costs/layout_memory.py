"""Peak memory of the fullest rank of a layout, from the tape of one micro-batch.

A rank's tensors are those of the step in one process, of its own blocks, with its share of each:
the tensor group divides matrices and activations, shards divide the state. All the ranks of a step
but the first and the last stage of a pipeline keep less than these two.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from ..config import Parallel, Phase, RunConfig
from .blocks import Blocks, block_parameters, blocks_of_model, outside_parameters, plain_model
from .compiled import uncompiled
from .compiled_blocks import rank_step, stream_width
from .depth import Change, StepByDepth, of_depth
from .layout import SELECTIVE, Layout
from .memory import rounded_bytes
from .rank_operations import rank_operations
from .recipes import cast_bytes
from .selective import kept_bytes
from .shards import FP32_BYTES, LOOKUP, REST, Parameter, Unit, factor_bytes
from .tape import Category, Names, Operation, TensorKey
from .traces import axes, is_compiled

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
ADAMW_TENSORS = 3
"""Tensors of a parameter's size that AdamW keeps in its type: itself and both moments."""
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
                checkpoint_blocks=min(self.layout.checkpoint, 1),
            ).alone,
            1,
        )

    @cached_property
    def steps(self) -> tuple[StepByDepth, ...]:
        """What the rank does in a step, for each kind of blocks."""
        kinds = range(max(self.model.kinds) + 1)
        casts: tuple[str, ...] = ()
        if self.layout.shards > 1 and factor_bytes(self.config.precision) != FP32_BYTES:
            matrices = [one for one in block_parameters(self._plain, 0) if one.is_matrix]
            casts = tuple(" ".join(map(str, one.shape)) for one in matrices)
        return tuple(rank_step(self.alone, kind, casts) for kind in kinds)

    @property
    def vocabulary(self) -> str:
        """The side of matrices that is the vocabulary, in formulas of the rank's tapes."""
        config = self.config
        return str(config.model.vocab_size) if is_compiled(config) else self.model.vocabulary

    def operations(self, kind: int) -> list[Operation]:
        """The operations of a block's forward pass of this kind."""
        keys = self.steps[kind].launches[Phase.FORWARD].block
        layout = self.layout
        width = stream_width(self.alone, self.model.d_model)
        return rank_operations(
            keys, self.names, layout.tensor, layout.context, layout.expert, width
        )

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


@lru_cache(maxsize=8192)
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


def least_rank_bytes(config: RunConfig, layout: Layout) -> int:
    """Bytes that a rank of the first stage has at least in a steady step of a layout: parameters
    and both moments of AdamW, and what the layout keeps beside them. It takes a tenth of the time
    that `fullest_rank_bytes` takes, which is never less.
    """
    rank = Rank(config=config, layout=layout)
    kinds = rank.stages[0]
    every, kept = (rank.elements(kinds, is_kept=is_kept) for is_kept in (False, True))
    # shards are rounded up one by one, and the state is divided as a whole
    rounded = len(rank.outside_parameters) + len(kinds) * max(map(len, rank.block_parameters))
    state_bytes = ADAMW_TENSORS * _parameter_bytes(uncompiled(config)) * (kept - rounded)
    return state_bytes + _beside_state_bytes(layout, factor_bytes(config.precision), every, kept)


@lru_cache(maxsize=64)
def _parameter_bytes(config: RunConfig) -> int:
    """The size of an element of the parameters, or the smallest of several."""
    steps = Rank(config=config, layout=Layout()).steps
    sizes = []
    for category, _, _, element_bytes, _ in _numbered(steps).tensors:
        if category == Category.PARAMETERS:
            sizes.append(element_bytes)
    return min(sizes)


@dataclass(frozen=True, slots=True, eq=False)
class _NumberedSteps:
    """The steps of a model's kinds of blocks, with numbers in place of kinds of tensors, so that
    the bytes of many layouts are sums of few numbers.
    """

    tensors: tuple[TensorKey, ...]
    """The kinds of tensors, by their number."""
    before: Mapping[Phase, Sequence[int]]
    """Changes of each phase of a model of one block until further blocks come: the number of what
    is made, or its complement (~number) if it is freed.
    """
    after: Mapping[Phase, Sequence[int]]
    blocks: Sequence[Mapping[Phase, Sequence[int]]]
    """The changes of a further block of each kind."""
    live: Mapping[Phase, Counter[int]]
    """Tensors that exist when a phase begins, of a model without blocks."""
    live_of_blocks: Sequence[Mapping[Phase, Counter[int]]]
    """What a block of each kind adds to these."""


@lru_cache(maxsize=256)
def _numbered(steps: tuple[StepByDepth, ...]) -> _NumberedSteps:
    """The numbers of these steps, which are those of one model."""
    numbers: dict[TensorKey, int] = {}

    def number(tensor: TensorKey) -> int:
        return numbers.setdefault(tensor, len(numbers))

    def changes(changed: Iterable[Change]) -> tuple[int, ...]:
        return tuple(
            ~number(tensor) if is_freed else number(tensor) for is_freed, tensor in changed
        )

    def counts(live: Counter[TensorKey]) -> Counter[int]:
        return Counter({number(tensor): count for tensor, count in live.items()})

    before, after = {}, {}
    for phase, repeated in steps[0].changes.items():
        before[phase] = changes(repeated.of_one[: repeated.place])
        after[phase] = changes(repeated.of_one[repeated.place :])
    blocks, live_of_blocks = [], []
    for step in steps:
        blocks.append({phase: changes(part.block) for phase, part in step.changes.items()})
        live_of_blocks.append({phase: counts(live) for phase, live in step.live_of_block.items()})
    live = {phase: counts(steps[0].live(phase, 0)) for phase in steps[0].changes}
    return _NumberedSteps(tuple(numbers), before, after, blocks, live, live_of_blocks)


@dataclass(frozen=True, slots=True)
class _Traits:
    """What decides which share of a tensor a rank has."""

    category: Category
    is_of_experts: bool
    """Whether it has the shape of a parameter with experts."""
    is_matrix: bool
    has_vocabulary: bool


@lru_cache(maxsize=256)
def _traits(
    steps: _NumberedSteps, vocabulary: str, stacks: Set[str]
) -> tuple[tuple[_Traits, ...], tuple[int, ...]]:
    """All traits, and the number of those of each kind of tensors; `stacks` are the shapes of
    parameters with experts.
    """
    numbers: dict[_Traits, int] = {}
    of_tensors = []
    for category, _, shape, *_ in steps.tensors:
        words = shape.split()
        traits = _Traits(category, shape in stacks, len(words) > 1, vocabulary in words)
        of_tensors.append(numbers.setdefault(traits, len(numbers)))
    return tuple(numbers), tuple(of_tensors)


@lru_cache(maxsize=1024)
def _whole_bytes(steps: _NumberedSteps, names: Names) -> tuple[int, ...]:
    """Bytes of each kind of tensors where one rank has all, as the allocator rounds them."""
    sizes = []
    for _, _, shape, element_bytes, _ in steps.tensors:
        sizes.append(rounded_bytes(names.size(shape) * element_bytes))
    return tuple(sizes)


class StageMemory:
    """The memory of a stage of a pipeline, or of all blocks."""

    def __init__(self, rank: Rank, kinds: Sequence[int], *, is_first: bool, is_last: bool) -> None:
        """`kinds` are those of its blocks, in order."""
        self._rank, self._layout, self._kinds = rank, rank.layout, kinds
        self._is_first, self._is_last = is_first, is_last
        self._shares, self._more_bytes = _shared_out(rank, kinds)
        self._steps = _numbered(rank.steps)
        stacks = set[str]()
        for kind in {*kinds}:
            for parameter in block_parameters(plain_model(rank.config), kind):
                if parameter.has_experts:
                    stacks.add(" ".join(map(str, parameter.shape)))
        self._traits, self._of_tensors = _traits(self._steps, rank.vocabulary, frozenset(stacks))
        self._sizes = self._rank_sizes()
        # so that the complement of a number gives what is freed
        self._changed = [*self._sizes, *(-size for size in reversed(self._sizes))]

    def peak_bytes(self) -> int:
        """The most bytes of tensors in a step."""
        peak, steps = 0, self._steps
        for phase in steps.before:
            level = self._bytes(self._live(phase, self._kinds))
            peak = max(peak, level)
            kinds = [*self._kinds]
            if phase is not Phase.FORWARD:
                kinds.reverse()
            if 0 in kinds:  # a model of one block has one of this kind already
                kinds.remove(0)
            more, highest = self._walk(steps.before[phase])
            peak, level = max(peak, level + highest), level + more
            # from where it begins, a kind's block always goes as high, and ends as high
            courses = {kind: self._walk(steps.blocks[kind][phase]) for kind in {*kinds}}
            for kind in kinds:
                more, highest = courses[kind]
                peak = max(peak, level + highest)
                level += more
            _, highest = self._walk(steps.after[phase])
            peak = max(peak, level + highest)
        more_bytes = self._more_bytes + self._fp8_bytes() + self._selective_bytes()
        return peak + self._in_flight_bytes() + more_bytes

    def _live(self, phase: Phase, kinds: Iterable[int]) -> Counter[int]:
        """How many tensors of each kind exist when a phase begins, with blocks of these kinds."""
        counts = Counter(self._steps.live[phase])
        for kind, times in Counter(kinds).items():
            for tensor, count in self._steps.live_of_blocks[kind][phase].items():
                counts[tensor] += times * count
        return counts

    def _bytes(self, live: Counter[int]) -> int:
        """Bytes of so many tensors of each kind."""
        return sum(count * self._sizes[tensor] for tensor, count in live.items())

    def _walk(self, changes: Iterable[int]) -> tuple[int, int]:
        """How many bytes more there are after these changes than before, and at most."""
        levels = [*accumulate(map(self._changed.__getitem__, changes), initial=0)]
        return levels[-1], max(levels)

    def kept_bytes(self, kinds: Iterable[int]) -> int:
        """Activations that a micro-batch keeps in blocks of these kinds until its backward pass,
        without logits. A tape has inputs of checkpoints, which a block returns, among its results.
        """
        kept = Counter[int]()
        for tensor, count in self._live(Phase.BACKWARD, kinds).items():
            traits = self._traits[self._of_tensors[tensor]]
            is_kept = traits.category in (Category.ACTIVATIONS, Category.LOSS)
            if is_kept and not traits.has_vocabulary:
                kept[tensor] = count
        return self._bytes(kept)

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

    def _selective_bytes(self) -> int:
        """What selective checkpoints keep beside the inputs of blocks, of all but the one whose
        backward pass is at the peak, which has all of its tensors there.
        """
        if self._layout.checkpoint != SELECTIVE:
            return 0
        of_kinds = [
            kept_bytes(self._rank.operations(kind)) for kind in range(len(self._rank.steps))
        ]
        in_flight = self._layout.in_flight if self._is_first else 1.0
        all_bytes = sum(of_kinds[kind] for kind in self._kinds)
        return round(in_flight * all_bytes) - max(of_kinds[kind] for kind in self._kinds)

    def _rank_sizes(self) -> list[int]:
        """Bytes that a rank of this stage has of a tensor of each kind."""
        live = self._live(Phase.FORWARD, (0,))
        tables = 0
        for tensor, number in enumerate(self._of_tensors):
            traits = self._traits[number]
            if traits.category is Category.PARAMETERS and traits.has_vocabulary:
                tables += live[tensor]
        shares = [self._share(traits, tables) for traits in self._traits]
        whole_bytes = _whole_bytes(self._steps, self._rank.names)
        sizes = zip(self._of_tensors, whole_bytes, strict=True)
        return [round(shares[number] * size) for number, size in sizes]

    def _share(self, traits: _Traits, tables: int) -> float:
        """The share of a tensor that a rank of this stage has, of a model with so many tables of
        the vocabulary.
        """
        category = traits.category
        is_of_experts = self._layout.expert > 1 and traits.is_of_experts
        share = self._shares[is_of_experts].get(category, 1.0)
        if is_of_experts:
            share /= self._layout.expert_ranks
        elif category not in WHOLE and traits.is_matrix:
            share /= self._layout.tensor
        if traits.has_vocabulary and not (self._is_first and self._is_last):
            if category in MATRICES[:3]:
                share /= tables
            elif not self._is_last:
                return 0.0
        return share


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
    more_bytes += _beside_state_bytes(layout, factor_bytes(rank.config.precision), every, kept)
    if layout.shards_parameters:
        ahead = Parallel.FSDP.exchange.units_ahead
        rest = rank.gathered(REST, tuple(p for p in rank.outside_parameters if p.unit == REST))
        more_bytes += (ahead + 1) * max(_gathered_bytes(rank, kind) for kind in {*kinds})
        more_bytes += rest.gathered_bytes(layout.shards) if rest.parts else 0
    dense = _shares(rank, kinds, has_experts=False)
    return (dense, _shares(rank, kinds, has_experts=True)), more_bytes


def _beside_state_bytes(layout: Layout, element_bytes: int, every: int, kept: int) -> int:
    """Bytes of what a rank has throughout a step beside its shard of the state: copies of
    parameters for matmuls, with elements of `element_bytes`, and gradients. `every` is the number
    of parameters of its stage, and `kept` that of its shard.
    """
    if layout.shards_parameters:
        return FP32_BYTES * kept if layout.accumulate > 1 else 0
    beside_bytes = 0
    if layout.shards > 1 and element_bytes != FP32_BYTES:
        # masters belong to the optimizer's state, and ranks keep copies for matmuls
        beside_bytes += element_bytes * every
    if layout.gpus > layout.tensor * layout.pipeline or layout.accumulate > 1:
        # buckets of gradients exist throughout
        beside_bytes += FP32_BYTES * (kept if layout.shards > 1 and layout.stage == 2 else every)
    return beside_bytes


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
