"""What each block of the model holds in one step: saved for backward, parameters, gradients."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cs336_systems.analysis.columns import Ints
from cs336_systems.analysis.memory.categories import CODES, NOT_SIGHTED
from cs336_systems.analysis.memory.groups import Known, explain_sighting
from cs336_systems.analysis.memory.names import block_of_parameter, block_of_ranges, short_name, within_block
from cs336_systems.analysis.memory.notes import Kind, Sighting
from cs336_systems.analysis.memory.profile import BlockMemory, Category, SavedTensor
from cs336_systems.config import Phase
from cs336_systems.ranges import block_range


def block_memory(known: Known, row_of: Ints, moments: Ints) -> tuple[BlockMemory, ...]:
    """The blocks in the first step that saved anything; `row_of` and `moments` are those of the sightings.

    A storage counts once, for the block that saved it first. What is saved and is a parameter or a buffer, such as the
    mask, takes no memory of its own. Of a checkpoint, its input counts for its first block, and what backward computes
    again for the block that it is of.
    """
    steps = np.array(known.phases.steps, dtype=np.int64)[known.phases.at(moments)]
    in_blocks = [
        index
        for index, sighting in enumerate(known.sightings)
        if sighting.kind is Kind.SAVED
        and row_of[index] != NOT_SIGHTED
        and known.contents.category[row_of[index]] == CODES[Category.SAVED]
        and block_of_ranges(sighting.name) is not None
    ]
    if not in_blocks:
        return ()
    of_step = [index for index in in_blocks if steps[index] == steps[in_blocks[0]]]
    first_of_row: dict[int, int] = {}
    for index in of_step:
        first_of_row.setdefault(int(row_of[index]), index)
    saved = _by_block(known.sightings, first_of_row.values(), ranges=True)
    parameters = _of_kind(known, row_of, Kind.PARAMETER, range(len(known.sightings)))
    gradients = _of_kind(known, row_of, Kind.GRADIENT, np.flatnonzero(steps == steps[in_blocks[0]]).tolist())
    num_bytes = known.replay.allocations.requested_bytes
    return tuple(
        BlockMemory(
            name=block_range(block),
            saved_bytes=int(num_bytes[row_of[indices]].sum()),
            saved=_saved_tensors(known, row_of, indices),
            parameter_bytes=int(num_bytes[row_of[parameters.get(block, [])]].sum()),
            gradient_bytes=int(num_bytes[row_of[gradients.get(block, [])]].sum()),
        )
        for block, indices in sorted(saved.items())
    )


def _of_kind(known: Known, row_of: Ints, kind: Kind, indices: Iterable[int]) -> Mapping[int, list[int]]:
    """The sightings that tell what a parameter's or gradient's storage is, each storage once, by block."""
    telling = {
        int(row_of[index]): index
        for index in indices
        if known.sightings[index].kind is kind and row_of[index] != NOT_SIGHTED
    }
    return _by_block(known.sightings, telling.values(), ranges=False)


def _by_block(sightings: Sequence[Sighting], indices: Iterable[int], *, ranges: bool) -> dict[int, list[int]]:
    by_block: dict[int, list[int]] = {}
    for index in indices:
        name = sightings[index].name
        if (block := block_of_ranges(name) if ranges else block_of_parameter(name)) is not None:
            by_block.setdefault(block, []).append(index)
    return by_block


def _saved_tensors(known: Known, row_of: Ints, indices: Sequence[int]) -> tuple[SavedTensor, ...]:
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
