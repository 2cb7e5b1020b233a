"""Explains a number of bytes by the tensor of the model that has this size, such as `batch x T x d_model x 4`.

Different tensors may be equally large: with d_ff = 4 d_model and a batch of 4, the logits of a context of 256 are as
large as a weight. So everything known of an allocation narrows the choice; if several tensors are left, all are listed.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from itertools import permutations
from typing import TypeVar

from cs336_systems.config import Arch, ModelConfig

FLOAT_BYTES = (4, 2)
BOOL_BYTES, HALF_BYTES, INTEGER_BYTES = 1, 2, 8
_BITS = re.compile(r"\d+")
OR = " or "
"""Stands between formulas if any of them may be the right one."""
T = TypeVar("T")


class Role(Enum):
    """What the size of a tensor grows with."""

    ACTIVATION = auto()
    """The size grows with the batch or the context."""
    WEIGHT = auto()
    """The size grows with the model only."""


Axes = tuple[tuple[str, int], ...]
"""Name and size of each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A kind of tensor that the model has."""

    axes: Axes
    role: Role
    what: str
    element_bytes: tuple[int, ...] = FLOAT_BYTES
    """Bytes of an element that are tried if the data type is not known."""
    functions: tuple[str, ...] = ()
    """Parts of names of functions that make this tensor and no other of the same size."""

    @property
    def num_elements(self) -> int:
        return math.prod(size for _, size in self.axes)

    def formula(self, element_bytes: int) -> str:
        """The product of the axes and the bytes of an element."""
        return " x ".join([*(name for name, _ in self.axes), str(element_bytes)])

    def has_shape(self, shape: Sequence[int], *, in_order: bool) -> bool:
        """Whether joining neighbouring axes, those of size 1 left out, gives the shape."""
        sizes, wanted = [size for _, size in self.axes if size > 1], [size for size in shape if size > 1]
        return any(_joins(order, wanted) for order in ([sizes] if in_order else permutations(sizes)))


def _joins(sizes: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether products of neighbouring `sizes` give `wanted`."""
    product, left = 1, list(wanted)
    for size in sizes:
        product *= size
        if left and product == left[0]:
            product = 1
            left.pop(0)
    return product == 1 and not left


def candidates(model: ModelConfig, batch_size: int) -> Iterator[Candidate]:
    """The tensors of a training step of the model."""
    batch, heads, context = ("batch", batch_size), ("heads", model.num_heads), ("T", model.context_length)
    d_model, d_ff, vocabulary = ("d_model", model.d_model), ("d_ff", model.d_ff), ("vocabulary", model.vocab_size)
    scores, one_per_token = (batch, heads, context, context), (batch, context)
    with_bool, with_integers = (*FLOAT_BYTES, BOOL_BYTES), (*FLOAT_BYTES, INTEGER_BYTES)
    for axes, what, sizes, functions in (
        ((batch, context, d_model), "one vector of d_model for each token", FLOAT_BYTES, ()),
        ((("2", 2), batch, context, d_model), "queries and keys", FLOAT_BYTES, ()),
        (scores, "attention scores", with_bool, ("attention", "softmax")),
        ((batch, heads, context), "one number for each query", FLOAT_BYTES, ()),
        ((batch, context, d_ff), "feed-forward", FLOAT_BYTES, ("silu", "gelu", "swiglu", "mlp", "ffn")),
        ((batch, context, vocabulary), "logits", FLOAT_BYTES, ("lm_head", "cross_entropy")),
        ((context, context), "mask", with_bool, ()),
        (one_per_token, "one number for each token", with_integers, ()),
    ):
        yield Candidate(axes=axes, role=Role.ACTIVATION, what=what, element_bytes=sizes, functions=functions)
    is_gpt2, d_head = model.arch is Arch.GPT2, ("d_head", model.d_head)
    weights: tuple[tuple[Axes, str], ...] = (
        ((context, d_model), "positions") if is_gpt2 else ((context, d_head), "rotations"),
        ((vocabulary, d_model), "embedding, head"),
        ((d_model, d_ff), "feed-forward weight"),
        ((d_model, d_model), "attention weight"),
        ((d_model,), "one number for each of d_model"),
        ((d_ff,), "one number for each of d_ff"),
    )
    for shape, name in weights:
        yield Candidate(axes=shape, role=Role.WEIGHT, what=name)


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element of a data type of PyTorch, such as `bfloat16`; None for unknown types."""
    if dtype == "bool":
        return 1
    bits = _BITS.search(dtype)
    return int(bits.group()) // 8 or None if bits else None


class Formulas:
    """Explains bytes by the tensors of one model, or by shapes alone if the model is not known."""

    def __init__(self, model: ModelConfig | None, batch_size: int | None) -> None:
        self._candidates = () if model is None or batch_size is None else tuple(candidates(model, batch_size))
        self.sighted, self.unsighted = cache(self._sighted), cache(self._unsighted)

    def _sighted(self, num_bytes: int, shape: tuple[int, ...], dtype: str, role: Role, what: str) -> str:
        """Explain a storage in which a tensor of this shape and type was seen; `what` says what it is, if known."""
        size = element_bytes(dtype)
        if size is None or math.prod(shape) < 2:
            return ""
        fitting = [c for c in self._candidates if c.num_elements * size == num_bytes]
        fitting = _narrowed(fitting, [c for c in fitting if c.has_shape(shape, in_order=False)])
        fitting = _narrowed(fitting, [c for c in fitting if c.has_shape(shape, in_order=True)])
        fitting = _narrowed(fitting, [c for c in fitting if c.role is role])
        if fitting:
            return OR.join(_explained(c.formula(size), what or c.what) for c in fitting)
        return _explained(" x ".join(map(str, (*shape, size))), what) if math.prod(shape) * size == num_bytes else ""

    def _unsighted(self, requested_bytes: int, role: Role | None, function: str, has_half: bool) -> str:
        """Explain an allocation by its size, and by its role and the function that made it, if known.

        `has_half` tells whether any tensor may have elements of 2 bytes.
        """
        fitting = [
            (c, size)
            for c in self._candidates
            for size in c.element_bytes
            if c.num_elements * size == requested_bytes and (has_half or size != HALF_BYTES)
        ]
        fitting = _narrowed(fitting, [(c, size) for c, size in fitting if c.role is role])
        fitting = _narrowed(fitting, [(c, size) for c, size in fitting if any(f in function for f in c.functions)])
        return OR.join(_explained(c.formula(size), c.what) for c, size in fitting)


def _narrowed(choice: list[T], narrower: list[T]) -> list[T]:
    return narrower or choice


def _explained(formula: str, what: str) -> str:
    return f"{formula}: {what}" if what else formula
