"""Counts the tokens of a forward pass: integers that the model is given and that embeddings look
up.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .calls import Opaque, Several, Shape, shapes_in


class Embedded(NamedTuple):
    """What an embedding was given."""

    module: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class Counted(NamedTuple):
    """The tokens of a forward pass; None is what was not seen."""

    tokens: int | None = None
    shape: tuple[int, ...] | None = None
    is_named: bool = False
    """Whether the model was given them as `input_ids`."""

    @property
    def is_row(self) -> bool:
        """Whether they are a row of numbers, as positions are."""
        return self.shape is not None and self.tokens == math.prod(self.shape[-1:])


@lru_cache(maxsize=64)
def counted(
    inputs: Several, named: Several, embedded: tuple[Embedded, ...] | None, *, may_embed: bool
) -> Counted:
    """The tokens of a forward pass that was given these; `may_embed` says whether the model has
    modules that may be embeddings.
    """
    values = (*inputs.values, named)
    for mapping in values:
        if isinstance(mapping, Several):
            ids = mapping.get("input_ids")
            if isinstance(ids, Shape):
                return Counted(math.prod(ids.sizes), ids.sizes, is_named=True)
    by_module: dict[int, list[tuple[int, ...]]] = {}
    for module, sizes, dtype in embedded or ():
        if not dtype.is_floating_point:
            by_module.setdefault(module, []).append(sizes)
    if by_module:
        return _of_lookups(by_module.values(), values)
    # no hook runs in a compiled model; where all that may be tokens has one shape, it is theirs
    shapes = {shape.sizes for shape in shapes_in(values) if shape.is_integer}
    if embedded is not None or not may_embed or len(shapes) != 1:
        return Counted()
    (sizes,) = shapes
    return Counted() if _describes(sizes, values) else Counted(math.prod(sizes), sizes)


def _of_lookups(lookups: Iterable[Sequence[tuple[int, ...]]], values: tuple[Any, ...]) -> Counted:
    """The tokens among what embeddings have looked up, of each the shapes: as many as integers that
    the model is given, and else those that are no row, as positions are.

    They are not known where embeddings have looked up several numbers of such.
    """
    if _has_only_floats(values):
        return Counted()  # the model has made what it looked up itself, as the codes of images
    given = {math.prod(shape.sizes) for shape in shapes_in(values) if shape.is_integer}
    from_given: list[Counted] = []
    others: list[Counted] = []
    for shapes in lookups:
        those_given = [sizes for sizes in shapes if math.prod(sizes) in given]
        of_table = those_given or shapes
        if len({math.prod(sizes) == sizes[-1] for sizes in of_table}) > 1:
            return Counted()  # as of a word, and of others that are not beside it
        tokens = Counted(sum(map(math.prod, of_table)), of_table[-1])
        if _describes(of_table[-1], values):
            continue
        # a recurrent model looks up what it is given step by step
        is_given = bool(those_given) or tokens.tokens in given
        (from_given if is_given else others).append(tokens)
    candidates = from_given or others
    candidates = [one for one in candidates if not one.is_row] or candidates
    if len({one.tokens for one in candidates}) != 1:
        return Counted()
    return candidates[0]


def _has_only_floats(values: Iterable[Any]) -> bool:
    """Whether a model is given tensors of floats and nothing that may hold or become tokens."""
    has_floats = False
    for value in values:
        if isinstance(value, Several):
            if value.values and not _has_only_floats(value.values):
                return False
            has_floats |= bool(value.values)
        elif isinstance(value, Shape) and value.dtype.is_floating_point:
            has_floats = True
        elif isinstance(value, Shape | Opaque | str | bytes):
            return False
    return has_floats


def _describes(sizes: tuple[int, ...], values: Iterable[Any]) -> bool:
    """Whether a row of numbers describes floats that the model is given, as the classes of a batch
    of images do, or the positions that a model makes for a series.
    """
    if not sizes or math.prod(sizes) != sizes[-1]:
        return False
    given = list(shapes_in(values))
    batches = [
        shape.sizes[0] for shape in given if shape.dtype.is_floating_point and len(shape.sizes) > 1
    ]
    lengths = [math.prod(shape.sizes) for shape in given if shape.is_integer]
    return bool(batches) and (sizes[-1] not in lengths or sizes in {(size,) for size in batches})
