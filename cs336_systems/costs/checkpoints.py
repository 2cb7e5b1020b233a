"""What blocks keep for backward if checkpoints keep the inputs of some of them only: in none, in
groups of one level, nested, and selective.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..config import RunConfig
from .depth import DepthError
from .layout import Layout
from .layout_cost import why_unknown
from .layout_memory import Rank, StageMemory
from .selective import kept_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A way to place checkpoints in N blocks."""

    name: str
    expression: str
    """Bytes that are kept at most, with s of a block's input and A of all that a block keeps."""
    kept_bytes: int
    again: int
    """Blocks whose forward pass runs again in a step."""


def schedules(blocks: int, input_bytes: int, block_bytes: int) -> Iterator[Schedule]:
    """No checkpoints, one before each block, the best groups of equal blocks, and nested ones.

    Nested checkpoints halve the blocks: backward keeps the input of the second half, which it does
    first in the same way, and runs the first half again to find it. A block alone runs again and
    keeps everything. So log2 N inputs are kept beside the first, for N / 2 blocks more in each of
    log2 N levels (Griewank and Walther 2000 have the best schedules).
    """
    yield Schedule(name="none", expression="N A", kept_bytes=blocks * block_bytes, again=0)
    yield Schedule(
        name="before each block",
        expression="N s + A",
        kept_bytes=blocks * input_bytes + block_bytes,
        again=blocks,
    )
    sizes = {}
    for size in range(1, blocks + 1):
        sizes[size] = -(-blocks // size) * input_bytes + size * block_bytes
    best = min(sizes, key=sizes.__getitem__)
    yield Schedule(
        name=f"before each group of {best}, the best of one level",
        expression=f"N / {best} s + {best} A",
        kept_bytes=sizes[best],
        again=blocks,
    )
    levels = (blocks - 1).bit_length()
    yield Schedule(
        name="nested",
        expression="(log2 N + 1) s + A",
        kept_bytes=(levels + 1) * input_bytes + block_bytes,
        again=_nested_again(blocks),
    )


def _nested_again(blocks: int) -> int:
    """Blocks that run again in nested checkpoints of so many."""
    if blocks == 1:
        return 1
    first = blocks // 2
    return first + _nested_again(first) + _nested_again(blocks - first)


def checkpoint_schedules(config: RunConfig) -> list[Schedule]:
    """The schedules of a training step's blocks, whose bytes are those of its tapes with
    checkpoints and without; none where these are not foretold.
    """
    if why_unknown(config):
        return []
    kept = []
    for checkpoint in (1, 0):
        layout = Layout(micro_batch=config.batch_size, checkpoint=checkpoint)
        rank = Rank(config=replace(config.alone, checkpoint_blocks=0), layout=layout)
        try:
            memory = StageMemory(rank, rank.stages[0], is_first=True, is_last=True)
        except DepthError:
            return []
        kept.append(memory.kept_bytes((0, 0)) - memory.kept_bytes((0,)))
    blocks, (input_bytes, block_bytes) = config.model.num_layers, kept
    results_bytes = kept_bytes(rank.operations(0))
    selective = Schedule(
        name="selective",
        expression="N (s + r) + A - r",
        kept_bytes=blocks * (input_bytes + results_bytes) + block_bytes - results_bytes,
        again=blocks,
    )
    return [*schedules(blocks, input_bytes, block_bytes), selective]
