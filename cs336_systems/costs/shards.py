"""What a rank keeps of each parameter: its share of the optimizer's state, and its parts of
sharded parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..config import Arch, ModelConfig, Parallel, Precision, RunConfig

FP32_BYTES, HALF_BYTES = 4, 2
"""Bytes of an element in fp32, and in bf16 or fp16."""
LOOKUP, HEAD, REST = "embedding", "lm_head", "rest"
"""Names of FSDP's units besides the blocks, whose names are their indices; REST has what several
units use.
"""
ALIGNMENT_BYTES = 128
"""Parameters of a unit begin at multiples of this, a line of a GPU's cache; matmuls and NCCL
need 16.
"""

AHEAD = 2
"""Units that fsdp gathers ahead of the one that computes."""


def axes(config: RunConfig) -> dict[str, int]:
    """Sizes of the axes that occur in formulas; d_model is heads x d_head, and a batch is cut
    from T+1 tokens.
    """
    model = config.model
    return {
        "batch": config.batch_size,
        "heads": model.num_heads,
        "T": model.context_length,
        "T+1": model.context_length + 1,
        "vocabulary": model.vocab_size,
        "d_ff": model.d_ff,
        "d_head": model.d_head,
    }


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by its name, in the order in which the model makes and the optimizer
    updates them.

    A parameter of a block begins with the block's index. The head of gpt2 is the embedding.
    """
    gpt2, table = model.arch is Arch.GPT2, (model.vocab_size, model.d_model)
    narrow, wide, back = (
        (model.d_model, model.d_model),
        (model.d_ff, model.d_model),
        (model.d_model, model.d_ff),
    )
    block = {
        "ln1": (model.d_model,),
        **dict.fromkeys(("q", "k", "v", "output"), narrow),
        "ln2": (model.d_model,),
        "w1": wide,
        "w2": back,
        **({} if gpt2 else {"w3": wide}),
    }
    layers = {
        f"{index}.{name}": shape
        for index in range(model.num_layers)
        for name, shape in block.items()
    }
    layers["ln_final"] = (model.d_model,)
    if not gpt2:
        return {"embedding": table, **layers, "lm_head": table}
    biased = {
        f"{name}{end}": own
        for name, shape in layers.items()
        for end, own in (("", shape), (".bias", shape[:1]))
    }
    return {"embedding": table, "positions": (model.context_length, model.d_model), **biased}


def factor_bytes(precision: Precision) -> int:
    """Bytes per element of a matmul's factors."""
    return HALF_BYTES if precision in (Precision.BF16, Precision.FP16) else FP32_BYTES


def parameter_elements(config: RunConfig) -> dict[str, int]:
    """Elements of every parameter, by its name."""
    return {name: prod(shape) for name, shape in parameter_shapes(config.model).items()}


def kept_elements(config: RunConfig) -> dict[str, int]:
    """Elements of each parameter, and of its gradient, that a rank keeps; the same on every rank,
    because of padding.

    fsdp and fsdp-push shard the elements of matrices, fsdp2 the rows of matrices and the elements
    of vectors.
    """
    counts = parameter_elements(config)
    if config.parallel.is_fsdp:
        for unit in units(config):
            counts |= dict(zip(unit.counts, unit.lengths, strict=True))
    elif config.parallel is Parallel.FSDP2:
        for name, (rows, *columns) in parameter_shapes(config.model).items():
            counts[name] = -(-rows // config.ranks) * prod(columns)
    return counts


def updated_elements(config: RunConfig) -> dict[str, int]:
    """Elements of each parameter that a rank's optimizer updates; with a sharded one, on the
    rank that has most.
    """
    kept = kept_elements(config)
    if not config.shard_optimizer:
        return kept
    return {name: kept[name] for name in _shares(kept, config.ranks)[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered, freed and averaged together."""

    name: str
    counts: Mapping[str, int]
    """Elements of each parameter."""
    element_bytes: int
    """Bytes per element of the type in which parameters are gathered and gradients averaged."""
    ranks: int

    @property
    def lengths(self) -> list[int]:
        """Elements of each parameter's part; all ranks' parts are equally long."""
        return [-(-count // self.ranks) for count in self.counts.values()]

    @property
    def gathered_elements(self) -> int:
        """Elements of the tensor into which the parts of all ranks are gathered."""
        return sum(aligned([self.ranks * length for length in self.lengths], self.element_bytes))


def units(config: RunConfig) -> list[Unit]:
    """The units of `fsdp`, in the order of forward; the last is REST, which may be empty.
    Vectors are in none.
    """
    is_low = config.precision is Precision.BF16
    is_gpt2 = config.model.arch is Arch.GPT2
    shapes, members = parameter_shapes(config.model), dict[str, dict[str, int]]()
    for name, count in parameter_elements(config).items():
        if len(shapes[name]) > 1:
            unit = name.partition(".")[0]
            # the table is tied to the head, and the module of the lookup has the positions
            if is_gpt2:
                unit = {"embedding": REST, "positions": LOOKUP}.get(unit, unit)
            members.setdefault(unit, {})[name] = count
    rest = {REST: members.pop(REST, {})}
    return [
        Unit(
            name=name,
            counts=own,
            element_bytes=HALF_BYTES if is_low and name not in (LOOKUP, REST) else FP32_BYTES,
            ranks=config.ranks,
        )
        for name, own in (members | rest).items()
    ]


def _shares(counts: Mapping[str, int], ranks: int) -> tuple[int, tuple[str, ...]]:
    """The rank to which a sharded optimizer gives most, and the parameters that it gets.

    Each parameter goes to the rank that has the fewest elements so far, as in
    `parallel/sharded_optimizer.py`.
    """
    owned: list[list[str]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for name, count in counts.items():
        owner = totals.index(min(totals))
        owned[owner].append(name)
        totals[owner] += count
    largest = totals.index(max(totals))
    return largest, tuple(owned[largest])


def largest_rank(config: RunConfig) -> int:
    """The rank that keeps most: the one to which a sharded optimizer gives most; all others keep
    equally much.
    """
    return _shares(kept_elements(config), config.ranks)[0] if config.shard_optimizer else 0


def aligned(lengths: Sequence[int], element_bytes: int) -> list[int]:
    """Sizes to split a tensor by: the lengths (elements), and between every two the gap that
    aligns the second.
    """
    multiple = ALIGNMENT_BYTES // element_bytes
    return [size for length in lengths for size in (length, -length % multiple)][:-1]
