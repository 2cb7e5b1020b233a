"""The memory of each block of the model in one step."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...config import Phase
from ...ranges import block_range
from ..columns import Ints
from .categories import NOT_SIGHTED
from .groups import LabelledSnapshot
from .names import block_of_parameter, block_of_ranges, sighting_name, within_block
from .notes import SightingKind
from .profile import CATEGORY_CODES, BlockMemory, Category, SavedTensor


def block_memory(known: LabelledSnapshot, row_of: Ints, moments: Ints) -> tuple[BlockMemory, ...]:
    """The blocks in the first step in which any of them saved a tensor; empty if none ever did.

    `row_of` and `moments` give the allocation and the moment of each sighting. A storage counts
    once, for the block that saved it first. Saved parameters and buffers, such as the mask, take no
    memory of their own and are left out. The input that a checkpoint keeps counts for its first
    block; what backward computes again, for its own block.
    """

    def of_kind(kind: SightingKind) -> list[int]:
        return [
            i
            for i in np.flatnonzero(row_of != NOT_SIGHTED).tolist()
            if known.sightings[i].kind is kind
        ]

    saved = [
        i
        for i in of_kind(SightingKind.SAVED)
        if known.category[row_of[i]] == CATEGORY_CODES[Category.SAVED]
        and block_of_ranges(known.sightings[i].name) is not None
    ]
    if not saved:
        return ()
    steps = np.array(known.phases.steps, dtype=np.int64)[known.phases.at(moments)]
    is_of_step = steps == steps[saved[0]]
    saved_by = _by_block(known, row_of, (i for i in saved if is_of_step[i]), block_of_ranges)
    parameters = _by_block(known, row_of, of_kind(SightingKind.PARAMETER), block_of_parameter)
    gradients = _by_block(
        known,
        row_of,
        (i for i in of_kind(SightingKind.GRADIENT) if is_of_step[i]),
        block_of_parameter,
    )
    num_bytes = known.replay.allocations.requested_bytes
    return tuple(
        BlockMemory(
            name=block_range(block),
            saved_bytes=int(num_bytes[row_of[indices]].sum()),
            saved=_saved_tensors(known, row_of, indices),
            parameter_bytes=int(num_bytes[row_of[parameters.get(block, [])]].sum()),
            gradient_bytes=int(num_bytes[row_of[gradients.get(block, [])]].sum()),
        )
        for block, indices in sorted(saved_by.items())
    )


def _by_block(
    known: LabelledSnapshot,
    row_of: Ints,
    indices: Iterable[int],
    block_of: Callable[[str], int | None],
) -> dict[int, list[int]]:
    """The sightings of each block; of several sightings of a storage the first."""
    first_of_row: dict[int, int] = {}
    for index in indices:
        first_of_row.setdefault(int(row_of[index]), index)
    by_block: dict[int, list[int]] = {}
    for index in first_of_row.values():
        if (block := block_of(known.sightings[index].name)) is not None:
            by_block.setdefault(block, []).append(index)
    return by_block


def _saved_tensors(
    known: LabelledSnapshot, row_of: Ints, indices: Sequence[int]
) -> tuple[SavedTensor, ...]:
    """The largest first."""
    tensors, rows, phases = [], known.replay.allocations, known.phases
    for index in indices:
        sighting, row = known.sightings[index], row_of[index]
        tensors.append(
            SavedTensor(
                name=within_block(sighting_name(sighting)),
                shape=sighting.shape,
                dtype=sighting.dtype,
                num_bytes=int(rows.requested_bytes[row]),
                is_recomputed=phases.names[int(phases.at(rows.start[row]))] == Phase.BACKWARD,
            )
        )
    return tuple(sorted(tensors, key=lambda tensor: -tensor.num_bytes))
