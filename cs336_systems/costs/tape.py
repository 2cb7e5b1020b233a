"""What a step does, as a list: tensors that it makes and frees, and operations in the order in
which it launches them.

`trace.py` writes such a tape from the real step. Sizes stand in it as products of named axes, such
as `batch T d_model`, so that one tape serves all sizes of a model with as many layers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import prod
from operator import not_
from typing import Any

import msgspec

from ..config import Phase
from .allocator import round_up


class Category(StrEnum):
    """Purpose of a tensor on the device. Tables list the categories in this order."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GATHERED = "gathered parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    WEIGHT_COPIES = "autocast weight copies"
    ACTIVATIONS = "activations"
    LOSS = "logits and loss"
    TEMPORARIES = "temporaries"
    OPTIMIZER_WORKSPACE = "optimizer workspace"
    LIBRARY_WORKSPACE = "library workspace"
    UNSPLIT = "unsplit rest of blocks"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorSpec:
    """One kind of tensor, with its bytes as a number and as a formula. A tape has one object for
    equal tensors.
    """

    category: Category
    label: str
    formula: str
    """Names of axes and the element size, such as `batch x heads x T x T x 4`."""
    size_bytes: int
    stream: str = ""
    """CUDA stream on which the tensor is made, if not the main one; the allocator keeps memory
    apart by stream.
    """


FP8_BYTES, RESULT_BYTES = 1, 2
"""Bytes of an element of a factor of a matmul in fp8, and of its result, which is in bf16."""


class OperationKind(StrEnum):
    """What an operation does, which decides the ceiling that gives its time."""

    MATMUL = "matmul"
    ATTENTION = "fused attention"
    PASS = "pass over memory"
    ADAMW = "fused AdamW"


class Form(StrEnum):
    """Memory layout of a matmul's factors, or a kernel of fused attention."""

    FORWARD = "forward"
    """x W^T, as in a linear layer: the second factor is transposed. In fp8 all forms are, and this
    one alone adds up with fewer bits than fp32 has.
    """
    INPUT = "input"
    """g W, the gradient of a layer's input: no factor is transposed."""
    WEIGHT = "weight"
    """g^T x, the gradient of a layer's weight: the first factor is transposed."""
    ATTENTION = "attention"
    """Causal attention as one kernel, with the sides of its scores."""
    ATTENTION_BACKWARD = "attention backward"


MATMULS_OF = {Form.ATTENTION: 2, Form.ATTENTION_BACKWARD: 5}
"""Matmuls in fused attention: scores and values; in backward the scores again, and two gradients
of each (Dao 2023).
"""


class Pass(StrEnum):
    """Memory access pattern of a kernel, which decides its bandwidth."""

    COPY = "copy"
    """Contiguous, with results of the same type or a narrower one."""
    WIDEN = "widen"
    """Contiguous, with results of a wider type, for which PyTorch's kernels do not vectorise
    their loads.
    """
    STRIDED = "strided"
    """Reads and writes in different orders, as when heads and positions are transposed."""
    MASKED = "masked"
    """Writes in place where a mask is set, which all heads share."""
    SOFTMAX = "softmax"
    FUSED = "fused"
    """Several operations in one kernel, as torch.compile writes them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """One PyTorch operator: one kernel, or several equal ones. A tape has one object for equal
    operations.
    """

    kind: OperationKind
    how: Pass = Pass.COPY
    form: Form = Form.FORWARD
    moved_bytes: int = 0
    """Bytes that each kernel reads and writes, if nothing is read twice."""
    sides: tuple[int, int, int] = (0, 0, 0)
    """Rows, inner side and columns of a matmul, or of the scores of fused attention."""
    batch: int = 1
    """Number of matmuls in a batched one; for attention, heads of all sequences."""
    element_bytes: int | None = None
    """Size of an element of a matmul's factors; None for what is no matmul."""
    launches: int = 1
    """Number of kernels, one after the other."""
    calls: int = 1
    """Number of operations that the host dispatches."""
    views: int = 0
    """Number of views before the operation, and of other calls; each takes the host about as
    long as a launch.
    """
    waits: bool = False
    """Whether the host waits for the device before it launches the kernels, to read numbers."""

    @property
    def host_calls(self) -> int:
        """Calls by which the host launches each kernel."""
        return self.views + self.calls

    @property
    def is_matmul(self) -> bool:
        """Whether the operation multiplies matrices, as a matmul or within fused attention."""
        return self.kind in (OperationKind.MATMUL, OperationKind.ATTENTION)

    @property
    def multiplications(self) -> int:
        """Multiplications of all matmuls of a batch; of fused attention, those of its scores."""
        return self.batch * prod(self.sides)


class TraceError(ValueError):
    """The step does something that cannot be traced without data."""


REPEATED = ".*"
"""Stands in a label for the number of a module in a list of modules."""


def path_of(name: str) -> str:
    """The path of a module with a star in place of the number in a list, so that all modules of a
    list have the same path.
    """
    return re.sub(r"(^|\.)\d+", r"\1*", name)


ROUNDED = re.compile(r"([A-Za-z_]+|\d+)\^(\d+)")
"""A size rounded up to a multiple, such as `T^128`."""


WIDTHS = (
    ("d_model", ("heads", "d_head")),
    ("d_model", ("kv_heads", "group", "d_head")),
    ("d_kv", ("kv_heads", "d_head")),
)
"""Widths and the axes that they are products of. With grouped queries there are `kv_heads` groups
of `group` heads of queries each.
"""


class Names:
    """Named axes with their sizes, in the order in which formulas name them."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        """`axes` gives the size of each axis by its name."""
        self.axes = axes
        self.product = cache(self._product)
        """Writes a number as a product of axes, which must be coprime, and of the integer that
        is left.
        """
        self.size = cache(self._size)
        """Gives the number of elements of a shape, which consists of names of axes and numbers."""

    def _product(self, number: int) -> str:
        """Write a number as a product of names of axes, after the integer that is left, if any: `4
        seq d_model`.

        Factors of WIDTHS that occur together are written as one width.
        """
        names: list[str] = []
        left = number
        for name, size in self.axes.items():
            while size > 1 and left and left % size == 0:
                names.append(name)
                left //= size
        for width, factors in WIDTHS:
            while all(factor in names for factor in factors):
                *others, last = factors
                for factor in others:
                    names.remove(factor)
                names[names.index(last)] = width
        if left != 1 or not names:
            names.insert(0, str(left))
        return " ".join(names)

    def _size(self, shape: str) -> int:
        """Number of elements of a shape, whose axes are separated by spaces."""
        return prod(map(self._factor, shape.split()))

    def _factor(self, word: str) -> int:
        """The size of one axis of a shape, which is a name, a number, or either rounded up to a
        multiple.
        """
        if (match := ROUNDED.fullmatch(word)) is not None:
            return round_up(self._factor(match[1]), int(match[2]))
        for width, factors in WIDTHS:
            if word == width and all(factor in self.axes for factor in factors):
                return prod(self.axes[factor] for factor in factors)
        return int(word) if word.isdigit() else self.axes[word]


TensorKey = tuple[Category, str, str, int, str]
"""Category, label, shape, bytes per element and stream of a kind of tensor."""
OperationKey = tuple[Any, ...]
"""Views before the operation, the name of the method of OperationMaker that makes it, and that
method's arguments.
"""


class Tape(msgspec.Struct, eq=False, dict=True):
    """Tensors and operations of some steps, of few kinds, which are numbered because layers
    repeat.

    One that comes with the program has no `places`, `owners`, `again` and `graphs`, and those of
    several ranks and of fast models have no `parameters`.
    """

    axes: Mapping[str, int] = {}
    kinds: list[TensorKey] = []
    makes: list[OperationKey] = []
    tensors: list[int] = []
    """The number of each tensor's kind, by its handle: tensors are numbered in the order in which
    they are made.
    """
    events: list[int] = []
    """A handle when its tensor is made, its complement (~handle) when it is freed."""
    launches: list[int] = []
    """The number of each operation, in the order of their launches."""
    steps: list[list[tuple[Phase, int, int]]] = []
    """The phases of each step, with the numbers of events and of launches before them; STEP is
    between two steps
    """
    places: list[str | None] = []
    """Of a user's own model, the path of the module that launches each operation; None outside of
    the model.
    """
    owners: list[str | None] = []
    """Likewise the path of the module that makes each tensor, or that has it: a parameter, its
    gradient, its state in the optimizer.
    """
    again: list[int] = []
    """Places of launches in backward that run again what a checkpoint has dropped."""
    graphs: list[dict[str, int]] = []
    """Nodes of autograd that are left at the end of each step, by the path of the module that made
    them: of losses that are kept, for example.
    """
    parameters: list[tuple[list[str], list[str]]] = []
    """The model's parameters in its order: the names of each, of which a tied one has several,
    and the sizes of its axes.
    """
    gradient_order: list[int] = []
    """Places of parameters in that list, in the order in which backward makes gradients."""
    failure: str = ""
    """Why the steps could not be traced; then there are none."""
    idle_parameters: int | None = None
    """Parameters of experts that a token does not choose, if experts were taken to be chosen
    equally often.
    """
    blocks: list[int] = []
    """Of the whole model of which the step has a few blocks, the number of each block's kind."""
    compiler: str = ""
    """Version of PyTorch whose torch.compile has compiled the step; empty for an eager one."""

    @cached_property
    def names(self) -> Names:
        """The axes of the tape's shapes with their sizes, to compute numbers of elements."""
        return Names(self.axes)

    @cached_property
    def specs(self) -> list[TensorSpec]:
        """Each kind of tensor by its number."""
        specs = []
        for category, label, shape, element_bytes, stream in self.kinds:
            spec = TensorSpec(
                category=category,
                label=label,
                formula=" x ".join([*shape.split(), str(element_bytes)]),
                size_bytes=self.names.size(shape) * element_bytes,
                stream=stream,
            )
            specs.append(spec)
        return specs

    @cached_property
    def operations(self) -> list[Operation]:
        """Each operation by its number."""
        maker, operations = OperationMaker(self.names), []
        for views, make, *arguments in self.makes:
            operations.append(replace(getattr(maker, make)(*arguments), views=views))
        return operations

    def spec(self, handle: int) -> TensorSpec:
        """The kind of a tensor."""
        return self.specs[self.tensors[handle]]

    def bytes_of(self, category: Category) -> int:
        """Bytes of all tensors of a category that the steps make."""
        return sum(
            spec.size_bytes
            for spec in map(self.spec, range(len(self.tensors)))
            if spec.category is category
        )

    @property
    def is_steady(self) -> bool:
        """Whether the last step leaves as much as it frees of the step before; one that appends its
        loss to a list does not.
        """
        old, new = self._exchanged()
        return [self.tensors[handle] for handle in old] == [self.tensors[handle] for handle in new]

    def _exchanged(self) -> tuple[list[int], list[int]]:
        """Tensors of earlier steps that the last step frees, and those of its own that it
        leaves.
        """
        _, first_event, _ = self.steps[-1][0]
        events = self.events[first_event:]
        start, end = min(event for event in events if event >= 0), len(self.tensors)
        freed = {~event for event in self.events if event < 0}
        old = sorted(~event for event in events if event < 0 and ~event < start)
        return old, [handle for handle in range(start, end) if handle not in freed]

    def repeat(self) -> None:
        """Append a copy of the last step: where that frees a tensor of the step before, the copy
        frees the tensor of the same kind that the last step left.
        """
        _, first_event, first_launch = self.steps[-1][0]
        events, launches = self.events[first_event:], self.launches[first_launch:]
        start, end = min(event for event in events if event >= 0), len(self.tensors)
        assert self.is_steady, "the last step is not in the steady state"
        old, new = self._exchanged()
        successors = {~before: ~after for before, after in zip(old, new, strict=True)}
        made = end - start
        self.events += [
            event + made if event >= 0 else successors.get(event, event - made) for event in events
        ]
        self.tensors += self.tensors[start:]
        self.launches += launches
        self.places += self.places[first_launch:]
        self.owners += self.owners[start:]
        self.again += [place + len(launches) for place in self.again if place >= first_launch]
        self.steps.append(
            [(phase, at + len(events), of + len(launches)) for phase, at, of in self.steps[-1]]
        )

    def to_json(self) -> bytes:
        """The tape as JSON. An event is 0 for a tensor that is made, and the age of one that is
        freed.
        """
        made, ages = 0, []
        for event in self.events:
            made += event >= 0
            ages.append(0 if event >= 0 else made - ~event)
        return msgspec.json.encode(msgspec.structs.replace(self, events=ages))

    @classmethod
    def from_json(cls, kept: bytes) -> "Tape":
        """The tape that `to_json` has made."""
        values = msgspec.json.decode(kept)
        # in shipped tapes of several ranks this is an empty object
        values["parameters"] = [*values.get("parameters", ())]
        tape = msgspec.convert(values, cls)
        made = accumulate(map(not_, tape.events), initial=0)
        ages = zip(tape.events, made, strict=False)
        tape.events = [~(count - age) if age else count for age, count in ages]
        return tape


@dataclass(frozen=True)
class OperationMaker:
    """Makes operations for the sizes of axes, from the names of methods and their arguments,
    which are kept as JSON.
    """

    names: Names

    def passes(
        self, moved: Sequence[tuple[str, int]], how: str, launches: int = 1, calls: int = 1
    ) -> Operation:
        """Kernels that each move these shapes, with the bytes of an element."""
        moved_bytes = sum(self.names.size(shape) * element_bytes for shape, element_bytes in moved)
        return Operation(
            kind=OperationKind.PASS,
            how=Pass(how),
            moved_bytes=moved_bytes,
            launches=launches,
            calls=calls,
        )

    def matmul(
        self, form: str, rows: str, inner: str, columns: str, element_bytes: int, batch: str
    ) -> Operation:
        """The matmul of (rows x inner) and (inner x columns) matrices, `batch` of them. Each side
        is a product of names of axes and numbers; moved bytes are both factors and the result, once
        each.
        """
        m, k, n = sides = (self.names.size(rows), self.names.size(inner), self.names.size(columns))
        count = self.names.size(batch)
        factor_bytes = element_bytes * count * (m * k + k * n)
        result_bytes = max(RESULT_BYTES, element_bytes) * count * m * n
        return Operation(
            kind=OperationKind.MATMUL,
            form=Form(form),
            moved_bytes=factor_bytes + result_bytes,
            sides=sides,
            batch=count,
            element_bytes=element_bytes,
        )

    def experts(
        self, form: str, rows: str, inner: str, columns: str, element_bytes: int, batch: str
    ) -> Operation:
        """The matmuls of `batch` experts, each with the tokens that chose it: one kernel in half
        precision. In fp32, where PyTorch has no such kernel, the host reads how many tokens each
        expert has, and launches the matmuls one after the other.
        """
        if element_bytes <= RESULT_BYTES:
            return self.matmul(form, rows, inner, columns, element_bytes, batch)
        of_one = self.matmul(form, rows, inner, columns, element_bytes, "1")
        return replace(of_one, launches=self.names.size(batch), waits=True)

    def attention(
        self,
        form: str,
        rows: str,
        inner: str,
        columns: str,
        element_bytes: int,
        batch: str,
        moved: Sequence[str],
    ) -> Operation:
        """A fused attention kernel, which is a batched matmul but for the bytes it moves: those of
        the tensors of the shapes `moved`.
        """
        moved_bytes = element_bytes * sum(map(self.names.size, moved))
        like_one = self.matmul(form, rows, inner, columns, element_bytes, batch)
        return replace(like_one, kind=OperationKind.ATTENTION, moved_bytes=moved_bytes)

    def adamw(self, moved_bytes: int, shapes: Sequence[str]) -> Operation:
        """A fused update that moves so many bytes for each element of these shapes."""
        return Operation(
            kind=OperationKind.ADAMW, moved_bytes=moved_bytes * sum(map(self.names.size, shapes))
        )

    def foreach(self, tensors: int, element_bytes: int, shapes: Sequence[str]) -> Operation:
        """A pass of a foreach operation over lists of tensors of these shapes, of which it reads or
        writes `tensors` lists.

        One launch of PyTorch covers a limited number of elements; the operation's `moved_bytes` are
        those of one launch.
        """
        counts = [*map(self.names.size, shapes)]
        launches = -(-sum(-(-count // FOREACH_CHUNK) for count in counts) // FOREACH_BLOCKS)
        moved_bytes = tensors * element_bytes * sum(counts) // launches
        return Operation(kind=OperationKind.PASS, moved_bytes=moved_bytes, launches=launches)


FOREACH_CHUNK = 65_536
"""Elements per thread block of a foreach kernel (kChunkSize of PyTorch's MultiTensorApply.cuh)."""
FOREACH_BLOCKS = 320
"""Thread blocks in one launch of a foreach kernel (depth_to_max_blocks of the same file)."""


def phases_of(tape: Tape, step: int) -> list[tuple[Phase, tuple[int, int], tuple[int, int]]]:
    """The phases of a step, with the ranges of their events and of their launches."""
    last = (Phase.STEP, len(tape.events), len(tape.launches))
    return [
        (phase, (begin, end), (first, stop))
        for (phase, begin, first), (_, end, stop) in pairwise([*tape.steps[step], last])
    ]


def interpolated(tapes: Mapping[int, Tape], number: int) -> Tape:
    """An estimate for a number, from tapes for others: a polynomial through the bytes of each
    tensor.
    """
    shares = []  # Lagrange's basis polynomials
    for traced in tapes:
        others = [other for other in tapes if other != traced]
        shares.append(prod(Fraction(number - other, traced - other) for other in others))
    kinds: dict[tuple[int, ...], int] = {}
    rows = zip(*(tape.tensors for tape in tapes.values()), strict=True)
    tensors = [kinds.setdefault(row, len(kinds)) for row in rows]
    *_, last = tapes.values()
    estimate = msgspec.structs.replace(last, tensors=tensors)
    estimate.specs = []
    for row in kinds:
        specs = [tape.specs[kind] for tape, kind in zip(tapes.values(), row, strict=True)]
        size = sum(share * spec.size_bytes for share, spec in zip(shares, specs, strict=True))
        estimate.specs.append(replace(specs[-1], size_bytes=max(1, round(size))))
    return estimate
