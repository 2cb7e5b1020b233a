"""Recipes of training in fp8, as in Transformer Engine and torchao: which parts of a tensor share a
scale, and what a step of a layout computes and keeps for it.

All three matmuls of each linear layer of a block, those of experts too, are in fp8; the head,
attention and what lies between are in bf16. Each factor is cast in both of its layouts, as backward
multiplies by the other one.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

from ..config import FP8_MULTIPLE
from .kernels import FACTOR_BYTES, ProductPrecision
from .tape import FP8_BYTES, RESULT_BYTES, Form, Operation, OperationKind


class Recipe(StrEnum):
    """Parts of a tensor in fp8 that share a scale."""

    TENSOR = "tensor"
    """The whole tensor, by its largest magnitude of this step (current scaling)."""
    BLOCKS = "blocks"
    """128 elements of a row, and squares of a weight (DeepSeek-V3)."""
    MX = "mx"
    """32 elements of a row, with scales of a byte: the MXFP8 of OCP, in hardware from Blackwell
    on.
    """


BF16_BYTES = FACTOR_BYTES[ProductPrecision.BF16]
SCALE_BYTES = {Recipe.TENSOR: 0.0, Recipe.BLOCKS: 4 / 128, Recipe.MX: 1 / 32}
"""Bytes of scales for each element in fp8."""
LAYOUTS = 2
"""Copies of a tensor in fp8: one by rows, one by columns."""


def cast_bytes(recipe: Recipe, elements: int) -> int:
    """Bytes of a tensor of so many elements in fp8, in both layouts, with its scales."""
    return round(LAYOUTS * (FP8_BYTES + SCALE_BYTES[recipe]) * elements)


def casts(recipe: Recipe, elements: int) -> Iterator[Operation]:
    """The kernels that cast a bf16 tensor of so many elements: with one scale for all of it, one
    has to find the largest magnitude first.
    """
    read_bytes = BF16_BYTES * elements
    if recipe is Recipe.TENSOR:
        yield Operation(kind=OperationKind.PASS, moved_bytes=read_bytes)
    moved_bytes = read_bytes + cast_bytes(recipe, elements)
    yield Operation(kind=OperationKind.PASS, moved_bytes=moved_bytes)


def takes_fp8(operation: Operation) -> bool:
    """Whether a linear layer's matmul of bf16 matrices has sides that hardware takes in fp8."""
    is_aligned = not any(side % FP8_MULTIPLE for side in operation.sides)
    is_matmul = operation.kind is OperationKind.MATMUL
    return is_matmul and is_aligned and operation.element_bytes == BF16_BYTES


def in_fp8(operation: Operation) -> Operation:
    """The same matmul with factors in fp8. Hardware has one layout of factors; only forward's sums
    may have fewer bits than fp32.
    """
    rows, inner, columns = operation.sides
    form = Form.FORWARD if operation.form is Form.FORWARD else Form.INPUT
    factor_bytes = FP8_BYTES * inner * (rows + columns)
    moved_bytes = operation.batch * (factor_bytes + RESULT_BYTES * rows * columns)
    return replace(operation, form=form, element_bytes=FP8_BYTES, moved_bytes=moved_bytes)
