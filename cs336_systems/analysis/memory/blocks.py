"""What each block of the model holds in one step: tensors saved for backward, parameters, gradients."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cs336_systems.analysis.columns import Ints
from cs336_systems.analysis.memory.categories import CODES, NOT_SIGHTED
from cs336_systems.analysis.memory.groups import Known, explain_sighting
from cs336_systems.analysis.memory.names import block_of_parameter, block_of_ranges, short_name, within_block
from cs336_systems.analysis.memory.notes import Kind
from cs336_systems.analysis.memory.profile import BlockMemory, Category, SavedTensor
from cs336_systems.config import Phase
from cs336_systems.ranges import block_range


def block_memory(known: Known, row_of: Ints, moments: Ints) -> tuple[BlockMemory, ...]:
    """The blocks in the first step in which any of them saved a tensor; empty if none ever did.

    `row_of` and `moments` give the allocation and the moment of each sighting. A storage counts once, for the block
    that saved it first. Saved parameters and buffers, such as the mask, take no memory of their own and are left out.
    The input that a checkpoint keeps counts for its first block; what backward computes again, for its own block.
    """

    def of_kind(kind: Kind) -> list[int]:
        return [i for i in np.flatnonzero(row_of != NOT_SIGHTED).tolist() if known.sightings[i].kind is kind]

    saved = [
        i
        for i in of_kind(Kind.SAVED)
        if known.contents.category[row_of[i]] == CODES[Category.SAVED]
        and block_of_ranges(known.sightings[i].name) is not None
    ]
    if not saved:
        return ()
    steps = np.array(known.phases.steps, dtype=np.int64)[known.phases.at(moments)]
    is_of_step = steps == steps[saved[0]]
    saved_by = _by_block(known, row_of, (i for i in saved if is_of_step[i]), block_of_ranges)
    parameters = _by_block(known, row_of, of_kind(Kind.PARAMETER), block_of_parameter)
    gradients = _by_block(known, row_of, (i for i in of_kind(Kind.GRADIENT) if is_of_step[i]), block_of_parameter)
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
    known: Known, row_of: Ints, indices: Iterable[int], block_of: Callable[[str], int | None]
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


def _saved_tensors(known: Known, row_of: Ints, indices: Sequence[int]) -> tuple[SavedTensor, ...]:
    """The largest first."""
    tensors, rows, phases = [], known.replay.allocations, known.phases
    for index in indices:
        sighting, name = known.sightings[index], short_name(known.sightings[index])
        row = row_of[index]
        tensors.append(
            SavedTensor(
                name=within_block(name),
                shape=sighting.shape,
                dtype=sighting.dtype,
                num_bytes=int(rows.requested_bytes[row]),
                explanation=explain_sighting(known.formulas, sighting, name),
                is_recomputed=phases.names[int(phases.at(rows.start[row]))] == Phase.BACKWARD,
            )
        )
    return tuple(sorted(tensors, key=lambda tensor: -tensor.num_bytes))
