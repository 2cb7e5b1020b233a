"""What a watched loop sends through its model: tokens, counted where an embedding looks them up,
their lengths, padding, and the precision of the matmuls.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from ..config import Precision
from .calls import Call, Calls, Several, Shape, call_of, new, shapes_in

TELL_ORDER = (nn.MultiheadAttention, nn.RNNBase)
"""Modules of PyTorch that say whether the batch is the first axis."""
EMBEDDING_WORDS = ("emb", "wte", "wpe", "rope", "rotary", "position")
"""Parts of the names of modules that look tokens up or are given positions."""
FIRST_PASSES = 2
"""Passes in which values are looked at, for which a GPU is waited."""
MAX_HOOKED = 8
"""Most modules that are hooked because of their names, so that hooks cost little."""


PRECISIONS = {torch.bfloat16: Precision.BF16, torch.float16: Precision.FP16}


class Embedded(NamedTuple):
    """What an embedding was given."""

    module: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class Counted(NamedTuple):
    """The tokens of a forward pass; None is what was not seen."""

    tokens: int | None = None
    shape: tuple[int, ...] | None = None
    is_named: bool = False
    """Whether the model was given them as `input_ids`."""


@dataclass(slots=True)
class Pass:
    """What one forward pass of the model was given, as its hooks saw it: what follows from that is
    computed later.
    """

    call: Call
    begin: int
    end: int = -1
    """Indices of the marks of the step at which the pass began and ended."""
    is_training: bool = True
    """Whether the model was in training mode, or backward has reached what it returned."""
    embedded: list[Embedded] | None = None
    """What the embeddings were given; None where no hook within the model ran."""
    loader_batch: int | None = None
    """Batch size of the DataLoader that made the batch; None if unknown."""
    padding: int | Tensor | None = None
    """Tokens that a mask leaves out; of a GPU, a tensor that holds their number once the pass is
    over.
    """
    precision: Precision | None = None


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
def counted(
    inputs: Several, named: Several, embedded: tuple[Embedded, ...] | None, *, may_embed: bool
) -> Counted:
    """The tokens of a forward pass that was given these; `may_embed` says whether the model has
    modules that may be embeddings.
    """
    values = (*inputs.values, named)
    for mapping in values:
        if isinstance(mapping, Several):
            ids = mapping.get("input_ids")
            if isinstance(ids, Shape):
                return Counted(math.prod(ids.sizes), ids.sizes, is_named=True)
    by_module: dict[int, tuple[int, tuple[int, ...]]] = {}
    for module, sizes, dtype in embedded or ():
        if not dtype.is_floating_point:
            count, _ = by_module.get(module, (0, ()))
            by_module[module] = count + math.prod(sizes), sizes
    if by_module:
        looked_up = [pair for pair in by_module.values() if not _describes(pair[1], values)]
        return Counted(*max(looked_up, default=(None, None)))
    # no hook runs in a compiled model; where all that may be tokens has one shape, it is theirs
    shapes = {shape.sizes for shape in shapes_in(values) if shape.is_integer}
    if embedded is not None or not may_embed or len(shapes) != 1:
        return Counted()
    (sizes,) = shapes
    return Counted() if _describes(sizes, values) else Counted(math.prod(sizes), sizes)


def _describes(sizes: tuple[int, ...], values: Iterable[Any]) -> bool:
    """Whether a row of numbers describes floats that the model is given, as the classes of a batch
    of images do, or the positions that a model makes for a series.
    """
    if not sizes or math.prod(sizes) != sizes[-1]:
        return False
    given = list(shapes_in(values))
    batches = [
        shape.sizes[0] for shape in given if shape.dtype.is_floating_point and len(shape.sizes) > 1
    ]
    lengths = [math.prod(shape.sizes) for shape in given if shape.is_integer]
    return bool(batches) and (sizes[-1] not in lengths or sizes in {(size,) for size in batches})


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
        self._device_type = device.type
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
        self.calls = Calls()
        self._open: Pass | None = None
        """The pass that is open."""
        self._masks: list[Tensor] = []
        """The masks that it is given."""
        self.outer_dtype: torch.dtype | None = None
        self._inner: tuple[torch.dtype | None, torch.dtype] | None = None
        """The type of the matmul that was seen last, and that of autocast around the model then."""
        self.num_seen = 0
        """How often the type of a matmul was seen."""
        self._low_dtype: torch.dtype | None = None
        self._last_passes: Sequence[Pass] = ()
        self._last = NO_TOKENS
        """The tokens of the last step with these passes, which are kept once for equal steps:
        thousands are kept.
        """

    def begins(
        self, model: "ref[nn.Module]", inputs: tuple[Any, ...], named: Mapping[str, Any], mark: int
    ) -> None:
        """Begin to read a forward pass, which is given these."""
        call = call_of(model, inputs, named)
        self._open = Pass(call, mark)
        self.outer_dtype = autocast_dtype(self._device_type)
        self._masks = []
        for value in (*inputs, named) if named else inputs:
            if isinstance(value, Mapping):
                mask = value.get("attention_mask")
                if isinstance(mask, Tensor):
                    self._masks.append(mask)

    def embeds(self, module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note what a module is given, if it looks tokens up."""
        seen = self._open
        if seen is None:
            return
        if seen.embedded is None:
            seen.embedded = []
        if self.order.num_passes < FIRST_PASSES:
            self.order.see_positions(tensors_in((*inputs, named)))
        ids = inputs[0] if inputs else next(iter(named.values()), None)
        if id(module) in self._tables and isinstance(ids, Tensor):
            seen.embedded.append(new(Embedded, (id(module), ids.shape, ids.dtype)))

    def multiplies(
        self, _module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        """Note the type that a module is given and, under autocast, computes in."""
        if self._open is None:
            return
        if self._open.embedded is None:
            self._open.embedded = []
        for value in (*inputs, *named.values()):
            if isinstance(value, Tensor):
                if value.is_floating_point():
                    self._inner = self.outer_dtype, computed_in(value, self._device_type)
                    self.num_seen += 1
                return

    def ends(self, model: nn.Module, result: Any) -> Pass:  # noqa: ANN401
        """What the pass was given, which ends now with this result."""
        seen, self._open = self._open, None
        assert seen is not None
        # a wrapper, as of data parallelism, stays in training mode where its module is evaluated
        first = next(iter(model._modules.values()), None)
        seen.is_training = model.training and (first is None or first.training)
        seen.precision = precision_of(self._dtype(model), self._device_type)
        seen.loader_batch = self.loader_batch
        if self._masks and self.counts_padding:
            seen.padding = _padding(self._masks, self._counted(seen).shape)
        self.order.num_passes += 1
        if not seen.is_training:
            reached = [value for value in tensors_in((result,)) if value.grad_fn is not None]
            if reached and reached[0].grad_fn is not None:
                reached[0].grad_fn.register_prehook(Reached(seen))
        return seen

    def tokens(self, passes: Sequence[Pass]) -> Tokens:
        """The sums over the forward passes of a step, which are over."""
        # by then all is known that may tell the order of the axes
        if passes == self._last_passes and self.order.num_passes > FIRST_PASSES + len(passes):
            return self._last
        sums, shapes, calls, paddings = Tokens(), [], [], []
        for seen in passes:
            tokens, shape, is_named = self._counted(seen)
            self.order.is_named |= is_named
            if shape is not None:
                self.order.see_batch(shape, seen.loader_batch)
            if tokens is not None:
                sums.count = (sums.count or 0) + tokens
            if seen.padding is not None:
                paddings.append(int(seen.padding))
            sums.precision = seen.precision
            shapes.append(shape)
            calls.append(self.calls.number(seen.call))
        if passes and len(paddings) == len(passes):
            sums.padding = sum(paddings)
        sums.shapes, sums.calls = tuple(shapes), tuple(calls)
        self._last_passes = passes
        if sums != self._last:
            self._last = sums
        return self._last

    def _counted(self, seen: Pass) -> Counted:
        embedded = None if seen.embedded is None else tuple(seen.embedded)
        return counted(seen.call.inputs, seen.call.named, embedded, may_embed=bool(self.embeddings))

    def _dtype(self, model: nn.Module) -> torch.dtype | None:
        """The type of the matmuls; None if it was not seen."""
        if self._inner is not None and self._inner[0] is self.outer_dtype:
            return self._inner[1]
        if self._low_dtype is None and self.order.num_passes == 0:
            self._low_dtype = only_low_dtype(model)
        return self.outer_dtype or self._low_dtype


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


def _padding(masks: Iterable[Tensor], shape: tuple[int, ...] | None) -> int | Tensor | None:
    """How many tokens of this shape the mask leaves out; None without one."""
    for mask in masks:
        if mask.shape == shape:
            attended = torch.count_nonzero(mask)
            if not attended.is_cuda:
                return mask.numel() - int(attended)
            # the host does not wait: the copy is done once the step is over
            left_out = torch.empty((), dtype=torch.int64, pin_memory=True)
            return left_out.copy_(mask.numel() - attended, non_blocking=True)
    return None


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that autocast computes in here; None without autocast."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def precision_of(dtype: torch.dtype | None, device_type: str) -> Precision | None:
    """The precision of matmuls of this type; None of a type that no setting has, or unknown."""
    if dtype is not torch.float32:
        return None if dtype is None else PRECISIONS.get(dtype)
    is_tf32 = device_type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return Precision.TF32 if is_tf32 else Precision.FP32


def only_low_dtype(model: nn.Module) -> torch.dtype | None:
    """The type of all parameters, if it is one of 16 bits: then matmuls are in it, also those of a
    compiled model, in which no hook looks. Parameters of fp32 do not tell: autocast may run within.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return dtypes.pop() if len(dtypes) == 1 and dtypes < set(PRECISIONS) else None


def computed_in(value: Tensor, device_type: str) -> torch.dtype:
    """The type of a matmul that is given this value, where the hook stands."""
    return autocast_dtype(device_type) or value.dtype
