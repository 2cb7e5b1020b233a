"""The tensors that a step makes and frees, in order, with reference counts that decide when each one is freed.

Beside them stand the operations that read and write them, in the order in which the host launches them.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any

from cs336_systems.config import Phase


from cs336_systems.costs.tape import MATMULS_OF, Category, Form, Kind, Operation, Pass, TensorSpec  # noqa

LIKE_ITSELF = -1
"""In `reads`, stands for a tensor of the same kind as the one that is made."""


class Tape:
    """Records tensors as they are made and freed; a tensor lives while Python or autograd's graph refers to it.

    Layers repeat, so thousands of tensors and operations are of few kinds, which are numbered.
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.specs: list[TensorSpec] = []
        """Each kind of tensor by its number."""
        self.tensors: list[int] = []
        """The number of each tensor's kind, by its handle: tensors are numbered in the order in which they are made."""
        self.events: list[int] = []
        """A handle when its tensor is made, its complement (~handle) when it is freed."""
        self.operations: list[Operation] = []
        """Each operation by its number."""
        self.launches: list[int] = []
        """The number of each operation, in the order of their launches."""
        self.steps: list[list[tuple[Phase, int, int]]] = []
        """The phases of each step, with the numbers of events and of launches before them."""
        self._references: list[int] = []
        self._axes = axes
        self._views = 0
        """Number of views that the host has made since the last launch."""
        self._kinds: dict[tuple[Category, str, str, int, str], int] = {}
        """The number of each kind of tensor, by the arguments that define it."""
        self._made: dict[tuple[Any, ...], int] = {}
        """The number of each operation, by the arguments that define it."""

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

        With `reads`, one kernel is launched that reads these tensors and writes the new one.
        """
        made_of = (category, label, shape, element_bytes, stream)
        if (kind := self._kinds.get(made_of)) is None:
            kind = self._kinds[made_of] = len(self.specs)
            self.specs.append(self._spec(*made_of))
        handle = len(self.tensors)
        self.tensors.append(kind)
        self._references.append(1)
        self.events.append(handle)
        if reads is not None:
            self.launch(_pass, (kind, *[kind if read == LIKE_ITSELF else self.tensors[read] for read in reads]), how, 1)
        return handle

    def _spec(self, category: Category, label: str, shape: str, element_bytes: int, stream: str) -> TensorSpec:
        formula = " x ".join([*shape.split(), str(element_bytes)])
        size_bytes = self.size(shape) * element_bytes
        return TensorSpec(category=category, label=label, formula=formula, size_bytes=size_bytes, stream=stream)

    def spec(self, handle: int) -> TensorSpec:
        """The kind of a tensor."""
        return self.specs[self.tensors[handle]]

    def pass_over(self, *handles: int, calls: int = 1, how: Pass = Pass.COPY) -> None:
        """Launch a kernel that reads or writes these tensors, each as often as it is given."""
        self.launch(_pass, tuple([self.tensors[handle] for handle in handles]), how, calls)

    def pass_of(self, moved_bytes: int, shape: str = "") -> None:
        """Launch a kernel that moves so many bytes, or so many for each element of the shape."""
        self.launch(_pass_of, moved_bytes, shape)

    def matmul(self, form: Form, rows: str, inner: str, columns: str, element_bytes: int, batch: str = "1") -> None:
        """Launch a matmul of (rows, inner) by (inner, columns) matrices; the sides are products of axes."""
        self.launch(_matmul, form, rows, inner, columns, element_bytes, batch)

    def attention(self, form: Form, moved: str, element_bytes: int) -> None:
        """Launch fused attention; `moved` is the shape of what it moves."""
        self.launch(_attention, form, moved, element_bytes)

    def launch(self, make: Callable[..., Operation], *arguments: object) -> None:
        """Launch the operation `make(tape, *arguments)`, which is made again for a resized tape."""
        made_of: tuple[Any, ...] = (self._views, make, *arguments)
        if (number := self._made.get(made_of)) is None:
            number = self._made[made_of] = len(self.operations)
            self.operations.append(self._operation(*made_of))
        self.launches.append(number)
        self._views = 0

    def _operation(self, views: int, make: Callable[..., Operation], *arguments: object) -> Operation:
        return replace(make(self, *arguments), views=views)

    def views(self, count: int) -> None:
        """Count views that the host makes before the next launch, or other calls that take as long."""
        self._views += count

    def size(self, shape: str) -> int:
        """Number of elements of a shape, which consists of axis names and numbers."""
        return prod(int(name) if name.isdigit() else self._axes[name] for name in shape.split())

    def resized(self, axes: Mapping[str, int]) -> "Tape":
        """The same tensors and operations for other sizes of the axes; nothing can be added to this tape."""
        other = copy(self)
        other._axes = axes
        other.specs = [other._spec(*made_of) for made_of in self._kinds]
        other.operations = [other._operation(*made_of) for made_of in self._made]
        return other

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
        assert not self._views
        if phase is Phase.FORWARD:
            self.steps.append([])
        self.steps[-1].append((phase, len(self.events), len(self.launches)))

    def repeat(self) -> None:
        """Append a repetition of the last step; nothing can be added afterwards.

        The repetition frees the tensors that the step before has left, and leaves equal ones.
        """
        _, begin, first = self.steps[-1][0]
        events, launches = self.events[begin:], self.launches[first:]
        start, end = min(event for event in events if event >= 0), len(self.tensors)
        old = sorted(~event for event in events if event < 0 and ~event < start)
        new = [handle for handle in range(start, end) if self._references[handle]]
        assert [self.tensors[handle] for handle in old] == [self.tensors[handle] for handle in new]
        freed = {~before: ~after for before, after in zip(old, new, strict=True)}
        made = end - start
        self.events += [event + made if event >= 0 else freed.get(event, event - made) for event in events]
        self.tensors += self.tensors[start:]
        self.launches += launches
        self.steps.append([(phase, at + len(events), of + len(launches)) for phase, at, of in self.steps[-1]])


def _pass(tape: Tape, moved: tuple[int, ...], how: Pass, calls: int) -> Operation:
    moved_bytes = sum(tape.specs[kind].size_bytes for kind in moved)
    return Operation(kind=Kind.PASS, how=how, moved_bytes=moved_bytes, calls=calls)


def _pass_of(tape: Tape, moved_bytes: int, shape: str) -> Operation:
    return Operation(kind=Kind.PASS, moved_bytes=moved_bytes * tape.size(shape))


def _matmul(tape: Tape, form: Form, rows: str, inner: str, columns: str, element_bytes: int, batch: str) -> Operation:
    m, k, n = sides = (tape.size(rows), tape.size(inner), tape.size(columns))
    count = tape.size(batch)
    return Operation(
        kind=Kind.MATMUL,
        form=form,
        moved_bytes=element_bytes * count * (m * k + k * n + m * n),
        sides=sides,
        batch=count,
        element_bytes=element_bytes,
    )


def _attention(tape: Tape, form: Form, moved: str, element_bytes: int) -> Operation:
    return Operation(
        kind=Kind.ATTENTION,
        moved_bytes=element_bytes * tape.size(moved),
        sides=(tape.size("T"), tape.size("d_head"), tape.size("T")),
        batch=tape.size("batch heads"),
        form=form,
        element_bytes=element_bytes,
    )
