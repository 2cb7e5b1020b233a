"""Names of sightings, and the block of the model that a name belongs to."""

import re

from ...ranges import Range
from .notes import Sighting, SightingKind

SEPARATOR = " > "
_AROUND = frozenset({Range.WARMUP, Range.MEASURE, Range.STEP, Range.FORWARD, Range.BACKWARD})
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\s|$)")
_BLOCK = re.compile(r"^block\.(\d+|\*)$")


def sighting_name(sighting: Sighting) -> str:
    """The name of a tensor that was seen, without the ranges around the whole model."""
    if sighting.kind is not SightingKind.SAVED:
        return sighting.name
    return SEPARATOR.join(part for part in sighting.name.split(SEPARATOR) if part not in _AROUND)


def like_name(name: str) -> str:
    """The name with a star in place of block numbers, so that like tensors of all blocks have
    the same name.
    """
    return _NUMBER.sub("*", name)


def block_of_ranges(name: str) -> int | None:
    """The number of the block whose range is among the ranges; None if there is none."""
    for part in name.split(SEPARATOR):
        block = _BLOCK.match(part)
        if block and block[1] != "*":
            return int(block[1])
    return None


def block_of_parameter(name: str) -> int | None:
    """The number of the block that a parameter belongs to, the first number in its name; None if
    it has none.
    """
    number = _NUMBER.search(name)
    return int(number[0]) if number else None


def within_block(name: str) -> str:
    """The ranges within the block, empty for the block itself; the whole name outside of blocks."""
    parts = name.split(SEPARATOR)
    for index, part in enumerate(parts, start=1):
        if _BLOCK.match(part):
            return SEPARATOR.join(parts[index:])
    return name
