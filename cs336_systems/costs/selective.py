"""What selective checkpoints compute again and what they keep, from the operations of a block's
forward pass: torchtitan's, which keep the results of attention and of every second linear layer,
and run all else again (PyTorch's `create_selective_checkpoint_contexts`).
"""

from collections.abc import Iterable, Iterator

from .tape import RESULT_BYTES, Operation, OperationKind

LOGARITHM_BYTES = 4
"""What fused attention keeps of each row of scores beside its result, in fp32."""


def _kept(operations: Iterable[Operation]) -> Iterator[tuple[Operation, bool]]:
    """The operations, and whether checkpoints keep the result of each."""
    is_kept = False
    for operation in operations:
        if operation.kind is OperationKind.MATMUL and operation.batch == 1:
            is_kept = not is_kept
            yield operation, is_kept
        else:
            yield operation, operation.kind is OperationKind.ATTENTION


def run_again(forward: Iterable[Operation]) -> list[Operation]:
    """The operations that backward runs again: none from the last matmul on, whose result it does
    not need.
    """
    again: list[Operation] = []
    before_matmul = 0
    for operation, is_kept in _kept(forward):
        if operation.is_matmul:
            before_matmul = len(again)
        if not is_kept:
            again.append(operation)
    return again[:before_matmul]


def kept_bytes(forward: Iterable[Operation]) -> int:
    """Bytes of the results that a block keeps beside its input."""
    total_bytes = 0
    for operation, is_kept in _kept(forward):
        if not is_kept or operation.element_bytes is None:
            continue
        rows, inner, columns = operation.sides
        result_bytes = max(RESULT_BYTES, operation.element_bytes)
        if operation.kind is OperationKind.ATTENTION:
            of_row = inner * result_bytes + LOGARITHM_BYTES
            total_bytes += operation.batch * rows * of_row
        else:
            total_bytes += rows * columns * result_bytes
    return total_bytes
