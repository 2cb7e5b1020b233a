"""Bytes that a rank sends in a step, in closed form, for the ways of `parallel/`.

Collectives run in a ring: of S bytes that all n ranks have in the end, an all-gather makes each rank send (n - 1) / n,
a reduce-scatter and a broadcast as many, an all-reduce twice as many (Patarasuk and Yuan 2009).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cs336_systems.config import Arch, ModelConfig, Parallel, Precision, RunConfig
from cs336_systems.costs.accounting import count_parameters

FP32_BYTES, BF16_BYTES = 4, 2
BUCKET_BYTES = 25 * 2**20
"""Gradients that are averaged together while backward goes on, in ddp-overlap and in PyTorch's way."""
FIRST_BUCKET_BYTES = 2**20
"""The first bucket of PyTorch's DistributedDataParallel, which is smaller so that its all-reduce starts early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrices:
    """Matrices of one size that are sharded."""

    count: int
    elements: int
    is_looked_up: bool = False
    """Gathered in fp32 whatever the precision."""
    gathers: int = 2
    """How often they are gathered in a step: for forward and for backward, or once if they stay in between."""


def sent_bytes(config: RunConfig) -> int | None:
    """Bytes that each rank sends in a step.

    None for a run in one process, for the user's own model, and for PyTorch's fully_shard, which pads as it likes.
    """
    if not config.is_shared or config.model_factory is not None or config.parallel is Parallel.FSDP2:
        return None
    ranks, parameters = config.ranks, count_parameters(config.model)
    if config.parallel is Parallel.DDP_PUSH:
        return _pushed_bytes(config)
    if config.cast_once and not config.parallel.is_fsdp:
        return round(2 * _bytes_with_copies(config) * (ranks - 1) / ranks)
    if not config.parallel.is_fsdp:
        times = 3 if config.shard_optimizer else 2  # the broadcasts of what each rank has updated
        return round(times * FP32_BYTES * parameters * (ranks - 1) / ranks)
    found = _matrices(config.model)
    vectors = parameters - sum(each.count * each.elements for each in found)
    payload = 2 * FP32_BYTES * vectors
    if config.parallel is Parallel.FSDP_PUSH:  # ranks wait for each other twice, by an all-reduce of one element
        payload += 2 * 2 * FP32_BYTES
    if config.cast_once:
        found = _copied_matrices(config)
        payload -= 2 * (FP32_BYTES - BF16_BYTES) * (vectors - _norm_elements(config.model))
    for each in found:
        is_low = config.precision is Precision.BF16 and not each.is_looked_up
        padded = -(-each.elements // ranks) * ranks
        # gathered, and the gradient scattered in the same type
        payload += (each.gathers + 1) * each.count * padded * (BF16_BYTES if is_low else FP32_BYTES)
    return round(payload * (ranks - 1) / ranks)


def _pushed_bytes(config: RunConfig) -> int:
    """Every rank copies what another one averages to it, and all-reduces 4 bytes to say so, and to hear it was used.

    Of the shared optimizer's copies, each rank copies its part to every other one.
    """
    ranks, parameters = config.ranks, count_parameters(config.model)
    flags = 2 * 2 * 4 * (ranks - 1) / ranks
    if not config.cast_once:
        broadcasts = FP32_BYTES * parameters * (ranks - 1) / ranks if config.shard_optimizer else 0
        return round((ranks - 1) * FP32_BYTES * parameters + flags + broadcasts)
    every = _bytes_with_copies(config)
    if not config.shard_optimizer:
        return round((ranks - 1) * every + flags)
    model = config.model
    biases = model.num_layers * (5 * model.d_model + model.d_ff) if model.arch is Arch.GPT2 else 0
    vectors = FP32_BYTES * _norm_elements(model) + BF16_BYTES * biases
    return round((ranks - 1) * vectors + 2 * (every - vectors) * (ranks - 1) / ranks + 1.5 * flags)


def _bytes_with_copies(config: RunConfig) -> int:
    """Bytes of the tensors of the fast model whose gradients are averaged.

    The optimizer's shares are scattered averages and gathered copies, so of matrices as much is sent in either case,
    but for the rows that pad the head, which are averaged and not shared out.
    """
    model = config.model
    is_gpt2 = model.arch is Arch.GPT2
    table = model.vocab_size * model.d_model
    read = _norm_elements(model) + table + (model.context_length * model.d_model if is_gpt2 else 0)
    copied = count_parameters(model) - read + (table if is_gpt2 else 0)
    if not config.shard_optimizer:
        copied += -model.vocab_size % config.pad_vocabulary * model.d_model
    return FP32_BYTES * read + BF16_BYTES * copied


def _norm_elements(model: ModelConfig) -> int:
    return (2 * model.num_layers + 1) * model.d_model * (2 if model.arch is Arch.GPT2 else 1)


def _copied_matrices(config: RunConfig) -> list[_Matrices]:
    """What is sharded of the fast model: copies, some packed, of which that of the head is padded; and the tables.

    Packed ones are taken for single ones, which the padding to a multiple of the ranks may make a few bytes larger.
    """
    *of_blocks_and_tables, last = _matrices(config.model)
    head = (-(-config.model.vocab_size // config.pad_vocabulary)) * config.pad_vocabulary * config.model.d_model
    if config.model.arch is Arch.CS336:
        return [*of_blocks_and_tables, replace(last, elements=head)]
    *of_blocks, table = of_blocks_and_tables
    return [*of_blocks, replace(table, elements=head), last, replace(table, elements=head, is_looked_up=False)]


def _matrices(model: ModelConfig) -> list[_Matrices]:
    """What is sharded. The unit that ends forward stays for backward, and a lookup needs no weights there."""
    d_model, layers, vocabulary = model.d_model, model.num_layers, model.vocab_size * model.d_model
    is_gpt2 = model.arch is Arch.GPT2
    of_block = [(4, d_model**2), (2 if is_gpt2 else 3, d_model * model.d_ff)]
    if not is_gpt2:
        return [
            *(_Matrices(count=count * layers, elements=elements) for count, elements in of_block),
            _Matrices(count=1, elements=vocabulary, is_looked_up=True, gathers=1),
            _Matrices(count=1, elements=vocabulary, gathers=1),
        ]
    # the tied table belongs to no layer alone, so the last block ends forward
    return [
        *(_Matrices(count=count * (layers - 1), elements=elements) for count, elements in of_block),
        *(_Matrices(count=count, elements=elements, gathers=1) for count, elements in of_block),
        _Matrices(count=1, elements=vocabulary, is_looked_up=True, gathers=1),
        _Matrices(count=1, elements=model.context_length * d_model, is_looked_up=True, gathers=1),
    ]


def buckets_of(sizes: Mapping[str, int], bucket_bytes: int, first_bytes: int | None = None) -> list[list[str]]:
    """The names in their order, in buckets that end with the one that fills them; `first_bytes` fill the first."""
    buckets: list[list[str]] = []
    filled, limit = 0, 0
    for name, size in sizes.items():
        if filled >= limit:
            limit = bucket_bytes if buckets or first_bytes is None else first_bytes
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
