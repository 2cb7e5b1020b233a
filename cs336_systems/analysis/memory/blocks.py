"""The memory of each block of the model in one step."""

from collections.abc import Callable, Sequence

import numpy as np

from ...config import Phase
from ...ranges import block_range
from ..columns import Mask
from .categories import NOT_SIGHTED
from .groups import LabelledSnapshot
from .names import block_of_parameter, block_of_ranges, sighting_name, within_block
from .notes import SightingKind
from .profile import CATEGORY_CODES, BlockMemory, Category, SavedTensor


def block_memory(snapshot: LabelledSnapshot) -> tuple[BlockMemory, ...]:
    """The blocks in the first step in which any of them saved a tensor; empty if none ever did.

    A storage counts once, for the block that saved it first. Saved parameters and buffers, such as
    the mask, take no memory of their own and are left out. The input that a checkpoint keeps counts
    for its first block; what backward computes again, for its own block.
    """
    row_of = snapshot.row_of
    category = np.append(snapshot.category, -1)[row_of]  # NOT_SIGHTED is the last
    is_saved = category == CATEGORY_CODES[Category.SAVED]
    saved = _by_block(snapshot, SightingKind.SAVED, is_saved, block_of_ranges)
    if not saved:
        return ()
    first = min(min(indices) for indices in saved.values())
    steps = np.array(snapshot.phases.steps)[snapshot.phases.at(snapshot.sighted_at)]
    is_of_step = steps == steps[first]
    is_any = np.ones_like(is_saved)
    saved = _by_block(snapshot, SightingKind.SAVED, is_saved & is_of_step, block_of_ranges)
    parameters = _by_block(snapshot, SightingKind.PARAMETER, is_any, block_of_parameter)
    gradients = _by_block(snapshot, SightingKind.GRADIENT, is_of_step, block_of_parameter)

    def num_bytes(indices: Sequence[int]) -> int:
        """Requested bytes of the tensors that were seen under these indices."""
        return int(snapshot.replay.allocations.requested_bytes[row_of[list(indices)]].sum())

    memory = []
    for block, indices in sorted(saved.items()):
        of_block = BlockMemory(
            name=block_range(block),
            saved_bytes=num_bytes(indices),
            saved=_saved_tensors(snapshot, indices),
            parameter_bytes=num_bytes(parameters.get(block, ())),
            gradient_bytes=num_bytes(gradients.get(block, ())),
        )
        memory.append(of_block)
    return tuple(memory)


def _by_block(
    snapshot: LabelledSnapshot,
    kind: SightingKind,
    is_chosen: Mask,
    block_of: Callable[[str], int | None],
) -> dict[int, list[int]]:
    """The chosen sightings of one kind (tensors that hooks saw and named), grouped by the block of
    the model that their name is in; those outside of blocks are left out.

    Values are indices into `snapshot.sightings`. Where several sightings are of one allocation, the
    row of the snapshot's table, only the first counts.
    """
    by_block: dict[int, list[int]] = {}
    seen_rows = set[int]()
    for index in np.flatnonzero(is_chosen & (snapshot.row_of != NOT_SIGHTED)).tolist():
        sighting, row = snapshot.sightings[index], int(snapshot.row_of[index])
        block = block_of(sighting.name)
        if sighting.kind is kind and block is not None and row not in seen_rows:
            seen_rows.add(row)
            by_block.setdefault(block, []).append(index)
    return by_block


def _saved_tensors(snapshot: LabelledSnapshot, indices: Sequence[int]) -> tuple[SavedTensor, ...]:
    """The tensors of these sightings, the largest first."""
    tensors, rows, phases = [], snapshot.replay.allocations, snapshot.phases
    for index in indices:
        sighting, row = snapshot.sightings[index], snapshot.row_of[index]
        phase = phases.names[int(phases.at(rows.start[row]))]
        tensor = SavedTensor(
            name=within_block(sighting_name(sighting)),
            shape=sighting.shape,
            dtype=sighting.dtype,
            num_bytes=int(rows.requested_bytes[row]),
            is_recomputed=phase == Phase.BACKWARD,
        )
        tensors.append(tensor)
    return tuple(sorted(tensors, key=lambda tensor: -tensor.num_bytes))
