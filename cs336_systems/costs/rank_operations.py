"""The operations of a rank of a layout, from those of whole matrices."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from .recipes import BF16_BYTES, Recipe, casts, in_fp8, takes_fp8
from .shards import FP32_BYTES
from .tape import Form, Names, Operation, OperationKey, OperationKind, OperationMaker


def rank_operations(
    keys: Iterable[OperationKey],
    names: Names,
    tensor: int,
    context: int,
    expert: int = 1,
    width: str = "d_model",
    recipe: Recipe | None = None,
    factor_bytes: int = FP32_BYTES,
) -> list[Operation]:
    """The operations of a rank of a tensor group, of a ring of so many contexts and of a group that
    divides experts, from those of whole matrices on the rank's part of the context. `width` is the
    side of matrices that is the residual stream's. With a `recipe`, matmuls are in fp8, and their
    factors are cast before. Experts' matmuls have factors of at most `factor_bytes`: autocast
    leaves them in fp32, and ranks that keep or gather copies of weights have these for them too.

    A tensor group divides the hidden layer and the heads, as Megatron-LM does: the first matrix by
    columns and the last by rows; what lies between matrices is divided by tokens. Experts stay
    whole where ranks divide them: a rank has fewer, with the tokens of all its group.
    """
    operations: list[Operation] = []
    maker = OperationMaker(names)
    made: dict[Any, tuple[Operation, Operation]] = {}
    is_after_attention = is_forward = is_row = False
    is_new = True
    for views, make, *arguments in keys:
        if recipe is not None and changes_type_of_weight(make, arguments):
            continue  # weights are cast once a step, and matmuls add up their gradients in fp32
        if make == "attention":
            is_after_attention = True
        elif make == "experts" and expert > 1:
            _, is_row = _is_of_stream(arguments, width)
            arguments = _of_experts(arguments, names, tensor, expert)
        elif make in ("matmul", "experts"):
            # between checkpoints, backward computes forward again
            if is_forward is not (arguments[0] == Form.FORWARD):
                is_forward, is_after_attention = not is_forward, False
            # in forward the projection after attention is divided by rows, and those before it by
            # columns; backward meets them in the other order
            is_row = is_after_attention is is_forward
            reads, writes = _is_of_stream(arguments, width)
            if not (reads and writes):
                is_row = writes
                is_after_attention &= not writes
            if tensor > 1:
                arguments = _divided(arguments, names, tensor, is_row)
        if make == "experts":
            form, *sides, element_bytes, batch = arguments
            most_bytes = factor_bytes if recipe is None else BF16_BYTES
            arguments = [form, *sides, min(element_bytes, most_bytes), batch]
        key = (views, make, *arguments)
        if key not in made:
            whole = getattr(maker, make)(*arguments)
            if views:
                whole = replace(whole, views=views)
            in_recipe = in_fp8(whole) if recipe is not None and takes_fp8(whole) else whole
            made[key] = whole, _of_rank(in_recipe, tensor, context)
        whole, operation = made[key]
        if recipe is not None and takes_fp8(whole):
            is_forward_matmul = whole.form is Form.FORWARD
            if is_row or is_new or not is_forward_matmul:
                operations += _casts(recipe, whole, is_row, tensor)
            # matmuls that make heads, or hidden activations, of one input follow each other
            is_new = is_row or not is_forward_matmul
        operations.append(operation)
    return operations


def with_sums(
    operations: Iterable[Operation], context: int, *, gathers: bool = False
) -> Iterator[Operation]:
    """The operations with the passes by which a ring of so many ranks adds what attention makes of
    each other rank's keys to what it made before, in fp32: its result, or in backward the gradients
    of queries, keys and values, as Transformer Engine does. With `gathers` these are PyTorch's.
    """
    for operation in operations:
        yield operation
        if operation.kind is not OperationKind.ATTENTION or context == 1:
            continue
        rows, width, _ = operation.sides
        elements = operation.batch * rows * width
        is_forward = operation.form is Form.ATTENTION
        if gathers:
            yield from _eager_sums(elements, context, is_forward)
            continue
        element_bytes = (operation.element_bytes or FP32_BYTES) + 2 * FP32_BYTES
        yield Operation(
            kind=OperationKind.PASS,
            moved_bytes=element_bytes * elements,
            launches=(context - 1) * (1 if is_forward else 3),
        )


EAGER_SUMS = {True: ((10, 40.5), (4, 20.0)), False: ((11, 58.5), (12, 100.0))}
"""Passes in forward, and in backward, and the bytes that all of them move for each element of
queries, by which PyTorch's `_templated_ring_attention` adds up: in each step after the first, and
besides. In half of the steps a rank has all queries and half of the keys, else half of the queries.
A step joins keys and values (8), widens its result (6, or 3 of a half) and merges it (32, or 16 and
a copy of 8), or adds its gradients (33 or 34) and joins those of keys and values (16).
"""


def _eager_sums(elements: int, context: int, is_forward: bool) -> Iterator[Operation]:
    """The passes of PyTorch's ring for queries of so many elements."""
    of_step, besides = EAGER_SUMS[is_forward]
    for times, (passes, element_bytes) in ((context - 1, of_step), (1, besides)):
        yield Operation(
            kind=OperationKind.PASS,
            moved_bytes=round(element_bytes * elements / passes),
            launches=times * passes,
        )


def changes_type_of_weight(make: str, arguments: Sequence[Any]) -> bool:
    """Whether an operation is a pass that casts a weight for its matmul, or the gradient back."""
    if make != "passes" or len(arguments[0]) != 2:
        return False
    (shape, read_bytes), (written, written_bytes) = arguments[0]
    words = shape.split()
    is_matrix = len([word for word in words if not word.isdigit()]) > 1
    is_cast = shape == written and {read_bytes, written_bytes} == {2, 4}
    return is_cast and is_matrix and not {"batch", "T", "T+1"} & {*words}


def _casts(recipe: Recipe, matmul: Operation, is_row: bool, tensor: int) -> Iterable[Operation]:
    """The casts before a matmul of a rank: of a layer's input, and of its result's gradient; that
    of the weight has both already. A tensor group casts what it gathers before it does.
    """
    if matmul.form is Form.WEIGHT:
        return ()
    rows, inner, _ = matmul.sides
    is_gathered = is_row is (matmul.form is Form.INPUT)
    return casts(recipe, matmul.batch * rows * inner // (tensor if is_gathered else 1))


def _of_rank(operation: Operation, tensor: int, context: int) -> Operation:
    """The part of an operation that a rank has, whose matmuls are divided already."""
    is_whole = tensor == context == 1
    if is_whole or operation.kind is OperationKind.MATMUL:
        return operation
    moved_bytes = max(1, operation.moved_bytes // tensor)
    if operation.kind is OperationKind.PASS:
        return replace(operation, moved_bytes=moved_bytes)
    # attention has one kernel for the keys of each rank of the ring
    return replace(
        operation,
        batch=max(1, operation.batch // tensor),
        moved_bytes=moved_bytes,
        launches=operation.launches * context,
    )


def _is_of_stream(arguments: Sequence[Any], width: str) -> tuple[bool, bool]:
    """Whether a matrix of a matmul reads the residual stream, and whether it writes to it."""
    form, *sides = arguments
    reads, writes = (sides[_head_side(Form(form), is_row)] for is_row in (True, False))
    return reads == width, writes == width


def _divided(arguments: Sequence[Any], names: Names, tensor: int, is_row: bool) -> list[Any]:
    """The arguments of a matmul of which each rank of a tensor group has a part: of the hidden
    layer, the vocabulary or the heads.
    """
    form, *sides, element_bytes, batch = arguments
    if names.size(batch) > 1 and names.size(batch) % tensor == 0:
        batch = str(names.size(batch) // tensor)
    else:
        place = _head_side(Form(form), is_row)
        sides[place] = str(max(1, names.size(sides[place]) // tensor))
    return [form, *sides, element_bytes, batch]


def _of_experts(arguments: Sequence[Any], names: Names, tensor: int, expert: int) -> list[Any]:
    """The arguments of the matmuls of a rank's experts, which get the tokens of all ranks that
    divide the experts; a tensor group has divided the tokens before.
    """
    form, *sides, element_bytes, batch = arguments
    tokens = 1 if form == Form.WEIGHT else 0
    sides[tokens] = f"{sides[tokens]} {expert}"
    return [form, *sides, element_bytes, str(max(1, names.size(batch) // (expert * tensor)))]


def _head_side(form: Form, is_row: bool) -> int:
    """Which side of a matmul has the heads: 0 for rows, 1 for the inner side, 2 for columns.

    A matrix that is divided by columns makes heads of the residual stream, and one by rows takes
    them back.
    """
    if form is Form.FORWARD:
        return 1 if is_row else 2
    if form is Form.INPUT:
        return 2 if is_row else 1
    return 2 if is_row else 0
