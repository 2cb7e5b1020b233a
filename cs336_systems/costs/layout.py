"""How many GPUs share a training step in which way, and which ways are sensible for a model.

Neighbouring ranks form a tensor group; then come context, expert, shard, data and pipeline groups.
So the groups that send most lie within a node.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod

from ..config import CompileMode, Parallel, RunConfig
from .blocks import blocks_of_model
from .ranks_time import Links
from .recipes import Recipe

AXES = ("tensor", "context", "expert", "shard", "data", "pipeline")
"""The ways to share a step, those first whose ranks are neighbours."""
SELECTIVE = 2
"""Of `checkpoint`: selective ones."""
FSDP_PASSES = {"fully_shard": (4, 4 + 6), "FullyShardedDataParallel": (0, 4 + 6 + 8)}
"""`copied_bytes` where parameters are gathered in bf16 and gradients reduced in fp32. PyTorch's
`fully_shard` copies what it gathered out of one tensor, in forward and in backward
(`split_with_sizes_copy`), and gradients into one in fp32 (`chunk_cat`). The older class gathers in
place; autograd joins gradients, which are cast, and divided before they are reduced.
"""
MAX_MICRO_BATCH = 32
"""Most sequences of a micro-batch that are tried: more hardly makes matmuls faster."""
MOST_CONTEXT = 16
"""Most ranks that are tried to share a context."""
MOST_UNEVEN = 0.15
"""Stages of a model of one's own may be longer by this part than the mean: 61 blocks, as DeepSeek's
have, have no equal stages.
"""
TOKENS_OF_CONTEXT = 8192
"""Fewest tokens that a rank keeps where a context is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers of ranks that share a step in each way, and how a rank divides its sequences."""

    data: int = 1
    """Replicas of the whole model, or of its shards (HSDP)."""
    shard: int = 1
    """Ranks that divide the state of the model, `stage` says which."""
    stage: int = 3
    """What `shard` divides: 1 is the optimizer's state, 2 the gradients too, 3 also the parameters
    (FSDP); the stages of ZeRO (Rajbhandari et al. 2020).
    """
    tensor: int = 1
    """Ranks that divide every matrix, and the tokens between the matrices (sequence parallel)."""
    pipeline: int = 1
    """Stages of blocks."""
    chunks: int = 1
    """Parts of a stage that take turns (interleaved 1F1B), also called virtual stages."""
    context: int = 1
    """Ranks that divide each sequence; keys and values go round in a ring."""
    expert: int = 1
    """Ranks that divide the experts of each block; for all else they are replicas, and divide the
    state as `stage` says.
    """
    micro_batch: int = 1
    """Sequences of one forward pass."""
    accumulate: int = 1
    """Micro-batches of a step, one after the other."""
    checkpoint: int = 0
    """1: each block keeps its input only, and backward computes the rest again; SELECTIVE: it also
    keeps the results of attention and of every second linear layer; 0: all is kept.
    """
    fp8: Recipe | None = None
    """How linear layers of blocks are computed in fp8; None: in the precision of the step."""
    fp32_reductions: bool = False
    """Whether FSDP reduces gradients in fp32, as torchtitan's and Composer's does; else in the type
    of matmuls, as PyTorch's does by itself.
    """
    copied_bytes: tuple[int, int] = (0, 0)
    """Bytes that FSDP's passes move in forward, and in backward, for each parameter that it
    gathers, to have what it sends in one tensor and in its type: none by ours, `FSDP_PASSES` by
    PyTorch's.
    """
    overlaps_experts: bool = False
    """Whether tokens get to their experts and back beside another micro-batch's kernels, as with
    Megatron-Core's `overlap_moe_expert_parallel_comm`; else kernels wait for them.
    """
    gathers_context: bool = False
    """Whether ranks that share a context gather the keys and values of all heads of queries at
    once, and add up by one pass for each operation, as PyTorch's `context_parallel` does; else
    these go round in a ring, and one kernel adds up.
    """
    way: Parallel | None = None
    """The way of `--parallel` by which ranks share the step; None: any, or none."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that are no layout."""
        for name in (*AXES, "stage", "chunks", "micro_batch", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.stage > 3 or self.checkpoint not in (0, 1, SELECTIVE):
            raise ValueError(
                f"needed stage 1 to 3 and checkpoint 0 to {SELECTIVE}, got {self.stage} and "
                f"{self.checkpoint}"
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise ValueError(f"chunks need several stages of a pipeline, got {self.chunks} of one")

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        ranks: list[int] = [getattr(self, axis) for axis in AXES]
        return prod(ranks)

    @property
    def replicas(self) -> int:
        """Number of ranks, or groups of ranks, that have other sequences than all others."""
        return self.data * self.shard * self.expert

    @property
    def global_batch(self) -> int:
        """Sequences of a step on all ranks together."""
        return self.replicas * self.micro_batch * self.accumulate

    @property
    def shards(self) -> int:
        """Number of ranks among which the sharded state is divided, of all but experts: those that
        share a context or experts have the same parameters, and so divide them too.
        """
        return self.shard * self.context * self.expert

    @property
    def expert_shards(self) -> int:
        """Number of ranks that have the same experts, and divide their sharded state."""
        return self.shard * self.context

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that divide the experts of a block: those of a tensor group do so too,
        and leave each expert's matrices whole.
        """
        return self.expert * self.tensor if self.expert > 1 else 1

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps its shard of the parameters alone."""
        return self.shards > 1 and self.stage == 3

    @property
    def bubble(self) -> float:
        """Idle time of a pipeline over the time in which it computes, (p - 1) / (v m), for p
        stages of v chunks and m micro-batches (Narayanan et al. 2021).
        """
        return (self.pipeline - 1) / (self.chunks * self.accumulate)

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations the first stage keeps at once."""
        if self.chunks == 1:
            return min(self.pipeline, self.accumulate)
        return min((self.chunks_ahead + 1) / self.chunks, self.accumulate)

    @property
    def chunks_ahead(self) -> int:
        """Forward passes of chunks that fill an interleaved pipeline before passes alternate, as
        Megatron-LM schedules them; as many backward passes empty it.
        """
        return 2 * (self.pipeline - 1) + (self.chunks - 1) * self.pipeline

    def neighbours(self, axis: str, gpus_per_node: int) -> int:
        """How many ranks of a group of this axis a node has."""
        stride: int = prod(getattr(self, nearer) for nearer in AXES[: AXES.index(axis)])
        ranks: int = getattr(self, axis)
        return max(1, min(ranks, gpus_per_node // stride))

    @property
    def label(self) -> str:
        """The ways in the usual short words, such as `FSDP 8 x TP 2`."""
        names = {
            "tensor": "TP",
            "context": "CP",
            "expert": "EP",
            "shard": "FSDP" if self.stage == 3 else f"ZeRO-{self.stage}",
            "data": "DP",
            "pipeline": "PP",
        }
        words = []
        for axis in reversed(AXES):
            if (ranks := getattr(self, axis)) > 1:
                words.append(f"{names[axis]} {ranks}")
        if self.chunks > 1:
            words.append(f"{self.chunks} chunks")
        if self.way is not None:
            words = [f"{self.way} {self.gpus}"]
            if not self.way.shards_parameters and self.shard > 1:
                words.append("sharded optimizer")
        label = " x ".join(words) or "one GPU"
        return label if self.fp8 is None else f"{label}, fp8 by {self.fp8}"


def misfit(config: RunConfig, layout: Layout) -> str:
    """Why a model cannot be shared so; empty if it can."""
    model = blocks_of_model(config)
    divided = {
        "tensor": (model.num_heads, "heads"),
        "context": (config.model.context_length, "tokens of context"),
    }
    for axis, (whole, of_what) in divided.items():
        if whole % (ranks := getattr(layout, axis)):
            return f"{axis} {ranks} does not divide {whole:,} {of_what}"
    if model.num_kv_heads % layout.tensor:
        return f"tensor {layout.tensor} does not divide {model.num_kv_heads} heads of keys"
    if model.d_ff % layout.tensor:
        return f"tensor {layout.tensor} does not divide d_ff {model.d_ff:,}"
    for side in model.inner_sides:
        if side % layout.tensor:
            return f"tensor {layout.tensor} does not divide the side of {side:,} of a matrix"
    parts = layout.pipeline * layout.chunks
    most = 0.0 if config.model_factory is None else MOST_UNEVEN
    # the embedding and the head may stand for a layer each, so that the first part and the last
    # have one less (Megatron-LM's account-for-embedding-in-pipeline-split)
    has_ends = (len(model.kinds) + 2) % parts == 0
    if uneven_blocks(len(model.kinds), parts) > most and not has_ends:
        return f"{layout.pipeline} stages of {layout.chunks} chunks do not divide the layers"
    if layout.chunks > 1 and layout.accumulate % layout.pipeline:
        return "interleaved stages need micro-batches that are a multiple of them"
    if layout.expert > 1 and not model.experts:
        return "the model has no experts to divide, each with its part of one parameter"
    if layout.expert > 1 and model.experts % layout.expert_ranks:
        return f"{layout.expert_ranks} ranks do not divide {model.experts} experts"
    return ""


def tensor_misfits(config: RunConfig, gpus: int, links: Links) -> list[str]:
    """Why the GPUs of a node, or some of them, cannot divide the matrices of a model."""
    ways = [ranks for ranks in powers(min(gpus, links.gpus_per_node)) if gpus % ranks == 0]
    reasons = [misfit(config, Layout(tensor=ranks)) for ranks in ways]
    return [reason for reason in reasons if reason]


def uneven_blocks(blocks: int, stages: int) -> float:
    """How much longer the longest stage is than one of an equal share, as a part of that."""
    return -(-blocks // stages) * stages / blocks - 1


def layouts(config: RunConfig, gpus: int, global_batch: int, links: Links) -> Iterator[Layout]:
    """The sensible layouts of a step of `global_batch` sequences on so many GPUs.

    Tensor ranks stay within a node, contexts are shared only where they are long, experts by the
    ranks of a node or by as many as divide them. Stages of a pipeline share the optimizer's state
    alone (ZeRO-1), as gathering for each micro-batch would take long, and FSDP shards over all GPUs
    or, in several nodes, over one node (HSDP).
    """
    node = min(gpus, links.gpus_per_node)
    for tensor, context, pipeline in product(powers(node), powers(MOST_CONTEXT), powers(gpus)):
        ways = tensor * context * pipeline
        tokens = config.model.context_length // context
        if gpus % ways or global_batch % (gpus // ways):
            continue
        if context > 1 and tokens < TOKENS_OF_CONTEXT:
            continue
        base = Layout(tensor=tensor, context=context, pipeline=pipeline)
        if misfit(config, base):
            continue
        replicas = gpus // ways
        in_node = node // min(node, tensor * context)
        for expert in _expert_groups(config, tensor, replicas, in_node):
            base = replace(base, expert=expert)
            for shared in _shared(base, replicas // expert, in_node // min(in_node, expert)):
                yield from _divided(config, shared, global_batch // replicas)


def rank_layouts(config: RunConfig, links: Links) -> Iterator[Layout]:
    """The layouts of one step of one group, without replicas and stages, that differ in what a
    rank computes.
    """
    experts = blocks_of_model(config).experts or 1
    of_experts = [ranks for ranks in range(1, experts + 1) if experts % ranks == 0]
    in_node = range(1, links.gpus_per_node + 1)
    numbers = product(in_node, powers(MOST_CONTEXT), of_experts, powers(MAX_MICRO_BATCH))
    for tensor, context, expert, micro_batch in numbers:
        if context > 1 and config.model.context_length // context < TOKENS_OF_CONTEXT:
            continue
        layout = Layout(tensor=tensor, context=context, expert=expert, micro_batch=micro_batch)
        if not misfit(config, layout):
            yield layout


def _expert_groups(config: RunConfig, tensor: int, replicas: int, in_node: int) -> Iterator[int]:
    """Numbers of ranks that divide experts: one, those of a node, and as many as there are."""
    yield 1
    experts = blocks_of_model(config).experts
    most = gcd(experts, tensor * replicas) // tensor
    for ranks in sorted({gcd(most, in_node), most}):
        if ranks > 1 and replicas % ranks == 0:
            yield ranks


def powers(most: int) -> list[int]:
    """Powers of 2 up to this number, and the number itself."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def _shared(base: Layout, replicas: int, in_node: int) -> Iterator[Layout]:
    """Ways in which replicas keep the state: each all of it, or divided."""
    if base.pipeline > 1:
        base = replace(base, stage=1)
    yield replace(base, data=replicas)
    if replicas == 1:
        return
    if base.pipeline > 1:
        yield replace(base, shard=replicas)
        return
    yield replace(base, shard=replicas)
    if 1 < in_node < replicas and replicas % in_node == 0:
        yield replace(base, shard=in_node, data=replicas // in_node)


def _divided(config: RunConfig, layout: Layout, sequences: int) -> Iterator[Layout]:
    """Ways in which a rank computes its sequences: several at once, with checkpoints or without,
    and chunks of a stage.
    """
    # blocks are compiled for each size
    tried = powers(MAX_MICRO_BATCH)
    if config.compile is CompileMode.NONE:
        tried = [*range(1, MAX_MICRO_BATCH + 1)]
    sizes = [size for size in tried if sequences % size == 0]
    for micro_batch, checkpoint, chunks in product(sizes, (0, 1), (1, 2)):
        divided = replace(
            layout,
            micro_batch=micro_batch,
            accumulate=sequences // micro_batch,
            checkpoint=checkpoint,
        )
        if chunks > 1 and layout.pipeline > 1:
            divided = replace(divided, chunks=chunks)
        elif chunks > 1:
            continue
        # a pipeline of fewer micro-batches than stages is mostly empty
        if not misfit(config, divided) and divided.accumulate >= divided.pipeline:
            yield divided
