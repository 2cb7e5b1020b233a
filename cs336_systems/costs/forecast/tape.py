"""The tensors that a step makes and frees, in order, with reference counts that decide when each one is freed.

Beside them stand the operations that read and write them, in the order in which the host launches them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import prod

from cs336_systems.config import Phase


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
    """One kind of tensor, with its bytes as a number and as a formula. Alike ones of a tape are one object."""

    category: Category
    label: str
    formula: str
    """Names of axes and the element size, such as `batch x heads x T x T x 4`."""
    size_bytes: int
    stream: str = ""
    """CUDA stream on which it is made, if it is not the usual one: memory of one stream is of no use to another."""


class Kind(StrEnum):
    """What an operation does, which decides from which ceiling its time is known."""

    MATMUL = "matmul"
    ATTENTION = "fused attention"
    PASS = "pass over memory"
    ADAMW = "fused AdamW"
    VIEWS = "views"
    """No kernel: views, of which the host makes one in about the time of a launch."""


class Form(StrEnum):
    """How the factors of a matmul lie in memory, or that it is one kernel of fused attention."""

    FORWARD = "forward"
    """x W^T, as in a linear layer: the second factor is transposed."""
    INPUT = "input"
    """g W, the gradient of a layer's input: none is."""
    WEIGHT = "weight"
    """g^T x, the gradient of its weight: the first is."""
    ATTENTION = "attention"
    """Causal attention as one kernel, with the sides of its scores."""
    ATTENTION_BACKWARD = "attention backward"


MATMULS_OF = {Form.ATTENTION: 2, Form.ATTENTION_BACKWARD: 5}
"""Matmuls of fused attention: scores and values; the scores again, and two for each of these (Dao 2023)."""


class Pass(StrEnum):
    """How a kernel goes over memory, which decides its bandwidth."""

    COPY = "copy"
    """One element after the other, all of one type, or narrower ones written."""
    WIDEN = "widen"
    """Written in a wider type, for which PyTorch's kernels do not read several elements at once."""
    STRIDED = "strided"
    """In another order than they lie in memory, as when heads change places with positions."""
    MASKED = "masked"
    """In place where a mask says so, which all heads share."""
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """What PyTorch dispatches at once: one kernel, or several equal ones. Alike ones of a tape are one object."""

    kind: Kind
    how: Pass = Pass.COPY
    form: Form = Form.FORWARD
    moved_bytes: int = 0
    """Read and written by each kernel, if nothing is read twice."""
    sides: tuple[int, int, int] = (0, 0, 0)
    """Rows, inner side and columns of a matmul, or of the scores of fused attention."""
    batch: int = 1
    """Matmuls of a batched one, or heads of all sequences."""
    element_bytes: int = 4
    """Of a matmul's factors."""
    launches: int = 1
    """Kernels, one after the other."""
    calls: int = 1
    """Operations and views that the host dispatches."""


ADAMW_BYTES = 7 * 4
"""Of an element: parameter, gradient and both moments are read, and all but the gradient written, in fp32."""
LIKE_ITSELF = -1
"""Stands for a tensor that is as large as the one that is made of it."""


class Tape:
    """Records tensors as they are made and freed; a tensor lives while Python or autograd's graph refers to it."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.specs: list[TensorSpec] = []
        """Kind of each tensor, by its handle: tensors are numbered in the order in which they are made."""
        self.events: list[int | Phase] = []
        """A handle when its tensor is made, its complement (~handle) when it is freed, a phase when it begins."""
        self.operations: list[Operation | Phase] = []
        """Operations in the order of their launches, and a phase where it begins."""
        self._references: list[int] = []
        self._axes = axes
        self._recipes: dict[Operation, Callable[[Tape], Operation]] = {}
        """How to make each operation for other sizes of the axes."""

        @cache
        def specify(category: Category, label: str, shape: str, element_bytes: int, stream: str) -> TensorSpec:
            formula = " x ".join([*shape.split(), str(element_bytes)])
            size_bytes = self.size(shape) * element_bytes
            return TensorSpec(category=category, label=label, formula=formula, size_bytes=size_bytes, stream=stream)

        self._specify = specify
        # layers repeat, so that of thousands of operations few are different
        self._make_pass, self._make_pass_of = cache(self._pass), cache(self._pass_of)
        self._make_matmul, self._make_attention = cache(self._matmul), cache(self._attention)

    def new(
        self,
        category: Category,
        label: str,
        shape: str,
        element_bytes: int,
        stream: str = "",
        reads: Sequence[int] | None = None,
        how: Pass = Pass.COPY,
    ) -> int:
        """Make a tensor with one reference; `shape` consists of axis names and numbers, such as `2 batch T`.

        One kernel writes it if there are `reads`, the tensors that this kernel reads.
        """
        handle, spec = len(self.specs), self._specify(category, label, shape, element_bytes, stream)
        self.specs.append(spec)
        self._references.append(1)
        self.events.append(handle)
        if reads is not None:
            moved = (spec, *[spec if read == LIKE_ITSELF else self.specs[read] for read in reads])
            self.operations.append(self._make_pass(moved, how, 1))
        return handle

    def pass_over(self, *handles: int, calls: int = 1, how: Pass = Pass.COPY) -> None:
        """Launch a kernel that reads or writes these tensors, each as often as it is given."""
        self.operations.append(self._make_pass(tuple([self.specs[handle] for handle in handles]), how, calls))

    def _pass(self, moved: tuple[TensorSpec, ...], how: Pass, calls: int) -> Operation:
        moved_bytes = sum(spec.size_bytes for spec in moved)
        made = Operation(kind=Kind.PASS, how=how, moved_bytes=moved_bytes, calls=calls)
        self._recipes[made] = lambda other: other._make_pass(tuple(map(other._like, moved)), how, calls)
        return made

    def pass_of(self, moved_bytes: int, shape: str = "") -> None:
        """Launch a kernel that moves so many bytes, or so many for each element of the shape."""
        self.operations.append(self._make_pass_of(moved_bytes, shape))

    def _pass_of(self, moved_bytes: int, shape: str) -> Operation:
        made = Operation(kind=Kind.PASS, moved_bytes=moved_bytes * self.size(shape))
        self._recipes[made] = lambda other: other._make_pass_of(moved_bytes, shape)
        return made

    def launch(self, make: "Callable[[Tape], Operation]") -> None:
        """Launch what `make` makes of a tape's axes."""
        made = make(self)
        self._recipes[made] = make
        self.operations.append(made)

    def matmul(self, form: Form, rows: str, inner: str, columns: str, element_bytes: int, batch: str = "1") -> None:
        """Launch a matmul of (rows, inner) by (inner, columns) matrices; the sides are products of axes."""
        self.operations.append(self._make_matmul(form, rows, inner, columns, element_bytes, batch))

    def _matmul(self, form: Form, rows: str, inner: str, columns: str, element_bytes: int, batch: str) -> Operation:
        m, k, n = self.size(rows), self.size(inner), self.size(columns)
        count = self.size(batch)
        moved_bytes = element_bytes * count * (m * k + k * n + m * n)
        made = Operation(
            kind=Kind.MATMUL,
            form=form,
            moved_bytes=moved_bytes,
            sides=(m, k, n),
            batch=count,
            element_bytes=element_bytes,
        )
        self._recipes[made] = lambda other: other._make_matmul(form, rows, inner, columns, element_bytes, batch)
        return made

    def attention(self, form: Form, moved: str, element_bytes: int) -> None:
        """Launch fused attention; `moved` is the shape of what it moves."""
        self.operations.append(self._make_attention(form, moved, element_bytes))

    def _attention(self, form: Form, moved: str, element_bytes: int) -> Operation:
        made = Operation(
            kind=Kind.ATTENTION,
            moved_bytes=element_bytes * self.size(moved),
            sides=(self.size("T"), self.size("d_head"), self.size("T")),
            batch=self.size("batch heads"),
            form=form,
            element_bytes=element_bytes,
        )
        self._recipes[made] = lambda other: other._make_attention(form, moved, element_bytes)
        return made

    def views(self, count: int) -> None:
        """Let the host make views, for which nothing is launched."""
        self.operations.append(_views(count))

    def size(self, shape: str) -> int:
        """Number of elements of a shape, which consists of axis names and numbers."""
        return prod(int(name) if name.isdigit() else self._axes[name] for name in shape.split())

    def resized(self, axes: Mapping[str, int]) -> "Tape":
        """The same tensors and operations for other sizes of the axes; nothing can be added to this tape."""
        other = Tape(axes)
        alike = {id(spec): other._like(spec) for spec in set(self.specs)}
        made: dict[Operation | Phase, Operation] = {each: recipe(other) for each, recipe in self._recipes.items()}
        other.specs = [alike[id(spec)] for spec in self.specs]
        other.events = self.events
        other.operations = [made.get(each) or each for each in self.operations]
        return other

    def _like(self, spec: TensorSpec) -> TensorSpec:
        """The tensor with the sizes of this tape's axes."""
        *shape, element_bytes = spec.formula.split(" x ")
        return self._specify(spec.category, spec.label, " ".join(shape), int(element_bytes), spec.stream)

    def keep(self, handle: int) -> int:
        """Add a reference to the tensor; return its handle."""
        assert self._references[handle] > 0
        self._references[handle] += 1
        return handle

    def drop(self, *handles: int) -> None:
        """Drop one reference to each tensor; a tensor without references is freed."""
        for handle in handles:
            self._references[handle] -= 1
            assert self._references[handle] >= 0
            if not self._references[handle]:
                self.events.append(~handle)

    def begin(self, phase: Phase) -> None:
        """Begin `phase` of a step here; STEP is the time between two steps."""
        self.events.append(phase)
        self.operations.append(phase)


@cache
def _views(count: int) -> Operation:
    return Operation(kind=Kind.VIEWS, launches=0, calls=count)
