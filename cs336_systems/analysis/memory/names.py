"""Names of tensors as tables show them: without the ranges around all operators, and alike for like blocks."""

import re

from cs336_systems.analysis.memory.notes import Kind, Sighting
from cs336_systems.ranges import Range

SEPARATOR = " > "
_AROUND = frozenset({Range.WARMUP, Range.MEASURE, Range.STEP, Range.FORWARD, Range.BACKWARD})
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\s|$)")
_BLOCK = re.compile(r"^block\.(\d+|\*)$")


def short_name(sighting: Sighting) -> str:
    """The name without the ranges around the whole model."""
    if sighting.kind is not Kind.SAVED:
        return sighting.name
    return SEPARATOR.join(part for part in sighting.name.split(SEPARATOR) if part not in _AROUND)


def like_name(name: str) -> str:
    """The name with a star in place of block numbers, so that like tensors of all blocks have the same name."""
    return _NUMBER.sub("*", name)


def block_of_ranges(name: str) -> int | None:
    """The number of the block whose range is among the ranges; None if there is none."""
    for part in name.split(SEPARATOR):
        if (found := _BLOCK.match(part)) and found.group(1) != "*":
            return int(found.group(1))
    return None


def block_of_parameter(name: str) -> int | None:
    """The number of the block that a parameter belongs to, the first number in its name; None if it has none."""
    return int(found.group()) if (found := _NUMBER.search(name)) else None


def within_block(name: str) -> str:
    """The ranges within the block, empty for the block itself; the whole name outside of blocks."""
    parts = name.split(SEPARATOR)
    inner = [index + 1 for index, part in enumerate(parts) if _BLOCK.match(part)]
    return SEPARATOR.join(parts[inner[0] :]) if inner else name


def what_saved(name: str) -> str:
    """The innermost range and its block, such as `softmax of block 17`."""
    parts = name.split(SEPARATOR)
    blocks = [found.group(1) for part in parts if (found := _BLOCK.match(part))]
    innermost = "" if _BLOCK.match(parts[-1]) else parts[-1].removeprefix(f"{Range.ATTENTION}.")
    block = "" if not blocks else "the blocks" if blocks[0] == "*" else f"block {blocks[0]}"
    return " of ".join(text for text in (innermost, block) if text)
