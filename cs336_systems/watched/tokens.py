"""What a watched loop sends through its model: tokens, counted where an embedding looks them up,
their lengths, padding, and the precision of the matmuls.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..config import Precision
from .calls import Calls
from .precision import autocast_dtype, computed_in, only_low_dtype, precision_of

TELL_ORDER = (nn.MultiheadAttention, nn.RNNBase)
"""Modules of PyTorch that say whether the batch is the first axis."""
EMBEDDING_WORDS = ("emb", "wte", "wpe", "rope", "rotary", "position")
"""Parts of the names of modules that look tokens up or are given positions."""
FIRST_PASSES = 2
"""Passes in which values are looked at, for which a GPU is waited."""
MAX_HOOKED = 8
"""Most modules that are hooked because of their names, so that hooks cost little."""


@dataclass(slots=True)
class Pass:
    """What one forward pass of the model was given; None is what was not seen."""

    is_training: bool
    """Whether the model was in training mode, or backward has reached what it returned."""
    begin: int
    end: int = -1
    """Indices of the marks of the step at which the pass began and ended."""
    tokens: int | None = None
    shape: tuple[int, ...] | None = None
    """Shape of the tokens."""
    padding: int | Tensor | None = None
    """Tokens that a mask leaves out; of a GPU, a tensor that holds their number once the pass is
    over.
    """
    precision: Precision | None = None
    call: int = -1
    """Index of the call in `Calls.seen`; -1 if that is full."""


@dataclass(slots=True)
class Tokens:
    """What a step sent through the model; None is what was not seen."""

    count: int | None = None
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    """Shapes of the tokens of the forward passes."""
    padding: int | None = None
    """None unless it is known of each forward pass."""
    precision: Precision | None = None
    calls: tuple[int, ...] = ()
    """Of each forward pass, the index of its call in `Calls.seen`."""


NO_TOKENS = Tokens()


@lru_cache(maxsize=64)
def _kept_once(calls: tuple[int, ...]) -> tuple[int, ...]:
    """The same object for equal calls, because thousands of steps are kept."""
    return calls


def tokens_of(passes: Sequence[Pass]) -> Tokens:
    """The sums over the forward passes of a step."""
    if not passes:
        return NO_TOKENS
    sums = Tokens(precision=passes[-1].precision, shapes=tuple([seen.shape for seen in passes]))
    sums.calls = _kept_once(tuple([seen.call for seen in passes]))
    for seen in passes:
        if seen.tokens is not None:
            sums.count = (sums.count or 0) + seen.tokens
    if passes[0].padding is not None:
        paddings = [seen.padding for seen in passes if seen.padding is not None]
        if len(paddings) == len(passes):
            sums.padding = sum(map(int, paddings))
    return sums


class PassReader:
    """Reads forward passes, by hooks before the calls of a few modules within the model.

    These are the modules that may be embeddings or make positions, and one of those of which the
    model has most, for the type of its matmuls. They stay the same, because torch.compile compiles
    again where hooks have gone. Tokens are `input_ids` where the model is given a tensor of that
    name, else those that reach the embedding that gets most of them: positions and types of tokens
    have embeddings too.
    """

    def __init__(self, models: Iterable[nn.Module], device: torch.device) -> None:
        named = [pair for model in models for pair in model.named_modules()]
        self._device = device
        self.counts_padding = True
        """Whether to count the padding of this step's passes."""
        self.loader_batch: int | None = None
        """Batch size of the DataLoader that made the last batch; None if unknown."""
        self.embeddings = WeakSet(_may_embed(named))
        """The modules before whose calls `embeds` is to be called."""
        self._tables = {id(module) for module in self.embeddings if _has_matrix(module)}
        self.matmuls = WeakSet(_usual_matmul([module for _, module in named]))
        """The modules before whose calls `multiplies` is to be called."""
        self.order = AxisOrder([module for _, module in named])
        self._is_open = False
        self.calls = Calls()
        self._arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}
        self._given: tuple[Any, ...] = ()
        self._mappings: list[Mapping[Any, Any]] = []
        self.outer_dtype: torch.dtype | None = None
        self._mark = 0
        self._embedded: dict[int, tuple[int, tuple[int, ...]]] = {}
        """By embedding, the tokens that reached it in this pass, and the shape of the last."""
        self._inner: tuple[torch.dtype | None, torch.dtype] | None = None
        """The type of the matmul that was seen last, and that of autocast around the model then."""
        self.num_seen = 0
        """How often the type of a matmul was seen."""
        self._low_dtype: torch.dtype | None = None
        self._is_inside = False
        """Whether hooks within the model ran in this pass."""

    def begins(self, inputs: tuple[Any, ...], named: Mapping[str, Any], mark: int) -> None:
        """Begin to read a forward pass, which is given these."""
        self._is_open = True
        self._arguments = inputs, named
        self._given, self._mark = (*inputs, named) if named else inputs, mark
        if named or not isinstance(inputs[0] if inputs else None, Tensor):
            self._mappings = [value for value in self._given if isinstance(value, Mapping)]
        self.outer_dtype = autocast_dtype(self._device)
        self._embedded.clear()
        self._is_inside = False

    def embeds(self, module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Count the tokens that a module is given, if it looks them up."""
        if not self._is_open:
            return
        self._is_inside = True
        if self.order.num_passes < FIRST_PASSES:
            self.order.see_positions(tensors_in((*inputs, named)))
        ids = inputs[0] if inputs else next(iter(named.values()), None)
        if id(module) in self._tables and isinstance(ids, Tensor) and not ids.is_floating_point():
            count, _ = self._embedded.get(id(module), (0, ()))
            self._embedded[id(module)] = count + ids.numel(), tuple(ids.shape)

    def multiplies(
        self, _module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        """Note the type that a module is given and, under autocast, computes in."""
        if not self._is_open:
            return
        self._is_inside = True
        for value in (*inputs, *named.values()):
            if isinstance(value, Tensor):
                if value.is_floating_point():
                    self._inner = self.outer_dtype, computed_in(value, self._device)
                    self.num_seen += 1
                return

    def ends(self, model: nn.Module, result: Any) -> Pass:  # noqa: ANN401
        """What the pass was given, which ends now with this result."""
        self._is_open = False
        # a wrapper, as of data parallelism, stays in training mode where its module is evaluated
        first = next(iter(model._modules.values()), None)
        is_training = model.training and (first is None or first.training)
        seen = Pass(is_training=is_training, begin=self._mark)
        seen.call = self.calls.number(model, *self._arguments)
        seen.precision = precision_of(self._dtype(model), self._device)
        seen.shape = self._count(seen)
        if seen.shape is not None:
            self.order.see_batch(seen.shape, self.loader_batch)
            if self.counts_padding:
                seen.padding = _padding(self._mappings, seen.shape)
        self._given, self._mappings, self._arguments = (), [], ((), {})
        self.order.num_passes += 1
        if not seen.is_training:
            reached = [value for value in tensors_in((result,)) if value.grad_fn is not None]
            if reached and reached[0].grad_fn is not None:
                reached[0].grad_fn.register_prehook(Reached(seen))
        return seen

    def _dtype(self, model: nn.Module) -> torch.dtype | None:
        """The type of the matmuls; None if it was not seen."""
        if self._inner is not None and self._inner[0] is self.outer_dtype:
            return self._inner[1]
        if self._low_dtype is None and self.order.num_passes == 0:
            self._low_dtype = only_low_dtype(model)
        return self.outer_dtype or self._low_dtype

    def _count(self, seen: Pass) -> tuple[int, ...] | None:
        """Note the number of tokens, and return their shape; None if none were seen."""
        for values in self._mappings:
            ids = values.get("input_ids")
            if isinstance(ids, Tensor):
                self.order.is_named = True
                seen.tokens = ids.numel()
                return tuple(ids.shape)
        if self._embedded:
            embedded = [pair for pair in self._embedded.values() if not self._describes(pair[1])]
            seen.tokens, shape = max(embedded, default=(None, None))
            return shape
        # no hook runs in a compiled model; where all that may be tokens has one shape, it is theirs
        shapes = {tuple(value.shape) for value in tensors_in(self._given) if _is_integer(value)}
        if self._is_inside or not self.embeddings or len(shapes) != 1:
            return None
        (shape,) = shapes
        if self._describes(shape):
            return None
        seen.tokens = math.prod(shape)
        return shape

    def _describes(self, shape: tuple[int, ...]) -> bool:
        """Whether a row of numbers describes floats that the model is given, as the classes of a
        batch of images do, or the positions that a model makes for a series.
        """
        if not shape or math.prod(shape) != shape[-1]:
            return False
        given = list(tensors_in(self._given))
        batches = [
            value.shape[0] for value in given if value.is_floating_point() and value.ndim > 1
        ]
        lengths = [value.numel() for value in given if _is_integer(value)]
        return bool(batches) and (
            shape[-1] not in lengths or shape in {(size,) for size in batches}
        )


@dataclass(slots=True)
class Reached:
    """A hook of autograd that notes that backward has reached what a pass returned."""

    seen: Pass

    def __call__(self, *_: Any) -> None:  # noqa: ANN401
        self.seen.is_training = True


class AxisOrder:
    """Tells which axis of a batch of tokens is the sequence, from what is seen in the model.

    `input_ids` are (batch, sequence). Other tokens are ordered as PyTorch's own attention and
    recurrent modules say, or as positions, square masks or the DataLoader's batch size have the
    length of one axis and not of the other. Else the order is not known.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.is_named = False
        self.num_passes = 0
        self._axis: int | None = None
        self._lengths: set[int] = set()
        """Lengths of sequences, of positions and of square masks."""
        firsts = set()
        for module in modules:
            if isinstance(module, TELL_ORDER):
                firsts.add(module.batch_first)
            for buffer in module.buffers(recurse=False):
                if buffer.ndim > 1 and buffer.shape[-1] == buffer.shape[-2]:
                    self._lengths.add(buffer.shape[-1])
        if len(firsts) == 1:
            self._axis = int(firsts.pop())

    def see_positions(self, tensors: Iterable[Tensor]) -> None:
        """Note the length of a row of positions, which classes of the sequences are not: positions
        count up.
        """
        for tensor in tensors:
            is_row = tensor.ndim and tensor.shape[-1] == tensor.numel() > 1
            if is_row and not tensor.is_floating_point() and bool((tensor.diff() == 1).all()):
                self._lengths.add(tensor.shape[-1])

    def see_batch(self, shape: tuple[int, ...], loader_batch: int | None) -> None:
        """Compare the shape of tokens with what is known of the lengths of their axes."""
        is_known = self.is_named or self._axis is not None
        if is_known or len(shape) != 2 or shape[0] == shape[1]:
            return
        telling = {axis for axis in (0, 1) if shape[axis] in self._lengths}
        if loader_batch in shape:
            telling.add(1 - shape.index(loader_batch))
        if len(telling) == 1:
            self._axis = telling.pop()

    @property
    def batch_axis(self) -> int:
        """The axis of the sequences of a batch, which is the first unless it was seen otherwise."""
        return 1 if self._axis == 0 and not self.is_named else 0

    def length(self, shape: tuple[int, ...] | None) -> int | None:
        """The length of the sequences of tokens of this shape; None if it is not known."""
        if not shape:
            return None
        if self.is_named:
            return shape[-1]
        return None if self._axis is None or len(shape) != 2 else shape[self._axis]


def _may_embed(named: Iterable[tuple[str, nn.Module]]) -> list[nn.Module]:
    """The modules that are embeddings or positions by their class or name, at most MAX_HOOKED."""
    modules = []
    for path, module in named:
        words = f"{type(module).__name__} {path.rpartition('.')[2]}".lower()
        if isinstance(module, nn.Embedding) or any(word in words for word in EMBEDDING_WORDS):
            modules.append(module)
    return modules[:MAX_HOOKED]


def _usual_matmul(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """One of the modules with a matrix of the shape of which the model has most: one of a block."""
    by_kind: dict[Any, list[nn.Module]] = {}
    for module in modules:
        if _has_matrix(module) and not isinstance(module, nn.Embedding):
            shapes = tuple(tuple(parameter.shape) for parameter in _own_parameters(module))
            by_kind.setdefault((type(module), shapes), []).append(module)
    most = max(by_kind.values(), key=len, default=[])
    return most[:1]


def _own_parameters(module: nn.Module) -> Iterator[Tensor]:
    return (parameter for parameter in module._parameters.values() if parameter is not None)


def _has_matrix(module: nn.Module) -> bool:
    """Whether the module itself, and not one within it, has a parameter of two or more axes; so
    does a linear layer whose parameters are kept elsewhere.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        return True
    return any(parameter.ndim > 1 for parameter in _own_parameters(module))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among what a model is given or returns."""
    for value in values:
        if isinstance(value, Mapping):
            yield from tensors_in(value.values())
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, Tensor):
            yield value


def _is_integer(value: Tensor) -> bool:
    return value.ndim > 0 and value.dtype in (torch.int64, torch.int32)


def _padding(given: Iterable[Mapping[Any, Any]], shape: tuple[int, ...]) -> int | Tensor | None:
    """How many tokens of this shape the mask leaves out; None without one."""
    for values in given:
        mask = values.get("attention_mask")
        if isinstance(mask, Tensor) and tuple(mask.shape) == shape:
            attended = torch.count_nonzero(mask)
            if not attended.is_cuda:
                return mask.numel() - int(attended)
            # the host does not wait: the copy is done once the step is over
            left_out = torch.empty((), dtype=torch.int64, pin_memory=True)
            return left_out.copy_(mask.numel() - attended, non_blocking=True)
    return None
