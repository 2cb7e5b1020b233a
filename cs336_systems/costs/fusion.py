"""What kernels move at least that do all between two matmuls of a block at once.

Layers in fp8 run so: those of Transformer Engine, with which Megatron-LM has one kernel each for a
norm, RoPE, SwiGLU, sorting tokens by their experts and adding up experts' results, in bf16
(Megatron-Bridge's performance guide, "Operator Fusion"; `moe_permute_fusion`), and those of
torchao, which without torch.compile are slower than bf16 (pytorch/ao#685).
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from .rank_operations import changes_type_of_weight
from .recipes import BF16_BYTES
from .shards import FP32_BYTES
from .tape import MATMULS_OF, Names, OperationKey, Pass

Passes = Sequence[Sequence[int]]
"""Of each pass the elements of the tensors that it reads, and last of its result."""


def fused(keys: Iterable[OperationKey], names: Names) -> list[OperationKey]:
    """The operations of a block in fp8, where passes that follow each other are one kernel. Casts
    are left out: of weights there is one a step, and between matmuls all is in bf16.
    """
    operations: list[OperationKey] = []
    run: list[Sequence[int]] = []
    multiplied = 0
    for key in keys:
        _, make, *arguments = key
        if make == "passes":
            if not (changes_type_of_weight(make, arguments) or _is_cast(*arguments)):
                run.append([_elements(tensor, names) for tensor in arguments[0]])
            continue
        if run:
            operations.append(_as_one(run, multiplied))
            run, multiplied = [], 0
        operations.append(key)
        multiplied += _made_elements(arguments, names)
    if run:
        operations.append(_as_one(run, multiplied))
    return operations


def moved_elements(run: Passes, multiplied: int) -> int:
    """Elements that one kernel reads and writes for all these passes: what they read and none of
    them makes, and what they make and none of them reads. `multiplied` elements of what it may read
    are of matmuls that ran since the kernel before.

    A tape does not say which tensors are the same. Reads of equally many elements are taken to be
    of one tensor, unless a pass reads several or matmuls made more; a result that is read here and
    once more later is left out. So this is the least that fits.
    """
    at_once: Counter[int] = Counter()
    in_all: Counter[int] = Counter()
    made: Counter[int] = Counter()
    unread: Counter[int] = Counter()
    for *sources, result in run:
        needed = Counter(sources)
        from_outside = needed - made
        at_once |= from_outside
        in_all += from_outside
        unread -= needed
        unread[result] += 1
        made[result] += 1
    moved = sum(unread.elements())
    for elements, times in in_all.items():
        moved += elements * max(at_once[elements], min(times, multiplied // max(1, elements)))
    return moved


def _as_one(run: Passes, multiplied: int) -> OperationKey:
    """The kernel that does what all these passes do."""
    moved = str(moved_elements(run, multiplied))
    return (0, "passes", ((moved, BF16_BYTES),), str(Pass.FUSED))


def _is_cast(tensors: Sequence[tuple[str, int]], *_: object) -> bool:
    """Whether a pass does nothing but change between bf16 and fp32."""
    if len(tensors) != len(("read", "written")):
        return False
    (read, read_bytes), (written, written_bytes) = tensors
    return read == written and {read_bytes, written_bytes} == {BF16_BYTES, FP32_BYTES}


def _elements(tensor: tuple[str, int], names: Names) -> int:
    """Elements of a tensor, of which a complex number is two."""
    shape, element_bytes = tensor
    return names.size(shape) * max(1, element_bytes // FP32_BYTES)


def _made_elements(arguments: Sequence[object], names: Names) -> int:
    """Elements of the result of a matmul; fused attention has rows of the inner side."""
    form, rows, inner, columns, _, batch, *_ = map(str, arguments)
    width = inner if form in MATMULS_OF else columns
    return names.size(batch) * names.size(rows) * names.size(width)
