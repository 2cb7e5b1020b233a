"""The tensors that a step makes and frees, in order, with reference counts that decide when each one is freed."""

from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One kind of tensor, with its bytes as a number and as a formula."""

    category: Category
    label: str
    formula: str
    """Names of axes and the element size, such as `batch x heads x T x T x 4`."""
    size_bytes: int
    stream: str = ""
    """CUDA stream on which it is made, if it is not the usual one: memory of one stream is of no use to another."""


class Tape:
    """Records tensors as they are made and freed; a tensor lives while Python or autograd's graph refers to it."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.specs: list[TensorSpec] = []
        """Kind of each tensor, by its handle: tensors are numbered in the order in which they are made."""
        self.events: list[int | Phase] = []
        """A handle when its tensor is made, its complement (~handle) when it is freed, a phase when it begins."""
        self._references: list[int] = []

        @cache
        def specify(category: Category, label: str, shape: str, element_bytes: int, stream: str) -> TensorSpec:
            names = shape.split()
            sizes = (int(name) if name.isdigit() else axes[name] for name in names)
            formula = " x ".join([*names, str(element_bytes)])
            size_bytes = prod(sizes) * element_bytes
            return TensorSpec(category=category, label=label, formula=formula, size_bytes=size_bytes, stream=stream)

        self._specify = specify

    def new(self, category: Category, label: str, shape: str, element_bytes: int, stream: str = "") -> int:
        """Make a tensor with one reference; `shape` consists of axis names and numbers, such as `2 batch T`."""
        handle = len(self.specs)
        self.specs.append(self._specify(category, label, shape, element_bytes, stream))
        self._references.append(1)
        self.events.append(handle)
        return handle

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
