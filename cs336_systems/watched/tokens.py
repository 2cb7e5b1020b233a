"""What a watched loop sends through its model: tokens, counted where an embedding looks them up,
their lengths, padding, and the precision of the matmuls.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from ..config import Precision
from .calls import NOTHING, Call, Calls, Several, call_of, new
from .counting import Counted, Embedded, counted
from .graph import TRANSFORMED, TWICE, UNSEEN, TraceLimits, multiplied_in, see_reached

TELL_LENGTH = (nn.MultiheadAttention, nn.RNNBase)
"""Modules of PyTorch that say which axis of what they are given is the sequence."""
EMBEDDING_WORDS = ("emb", "wte", "wpe", "rope", "rotary", "position")
"""Parts of the names of modules that look tokens up or are given positions."""
FIRST_PASSES = 2
"""Passes in which values are looked at, for which a GPU is waited."""
ENOUGH_MATMULS = 3
"""How often the type of a matmul is looked at; later, autocast around the model must be the same.
"""
MAX_HOOKED = 8
"""Most modules that are hooked because of their names, so that hooks cost little."""


PRECISIONS = {torch.bfloat16: Precision.BF16, torch.float16: Precision.FP16}


@dataclass(slots=True)
class Pass:
    """What one forward pass of the model was given, as its hooks saw it: what follows from that is
    computed later.
    """

    call: Call
    begin: int
    end: int = -1
    """Indices of the marks of the step at which the pass began and ended."""
    is_in_training_mode: bool = True
    embedded: list[Embedded] | None = None
    """What the embeddings were given; None where no hook within the model ran."""
    loader_batch: tuple[int, int] | None = None
    """The axis of the batch that the DataLoader's batch has, and its size; None if unknown."""
    padding: int | Tensor | None = None
    """Tokens that a mask leaves out; of a GPU, a tensor that holds their number once the pass is
    over.
    """
    precision: Precision | None = None
    reached: list[tuple[int, ...]] | None = None
    """Places of the results that backward has reached, each time that it did; None if no tensor
    was found in what the model returned.
    """

    lengths: set[int] = field(default_factory=set)
    """Lengths of sequences that were seen within the model, in the first passes."""

    @property
    def is_training(self) -> bool:
        """Whether the model was in training mode, or backward has reached what it returned."""
        return self.is_in_training_mode or bool(self.reached)

    def see_positions(self, tensors: Iterable[Tensor]) -> None:
        """Note the length of a row of positions, which classes of the sequences are not: positions
        count up.
        """
        for tensor in tensors:
            is_row = tensor.ndim and tensor.shape[-1] == tensor.numel() > 1
            if is_row and not tensor.is_floating_point() and bool((tensor.diff() == 1).all()):
                self.lengths.add(tensor.shape[-1])

    @property
    def reached_results(self) -> tuple[int, ...] | str:
        """The places of the results that backward has reached, or why they do not tell what it
        computed.
        """
        if self.reached is None:
            return UNSEEN
        reached = set(self.reached)
        if len(reached) < len(self.reached):
            return TWICE
        return tuple(sorted(place for places in reached for place in places))


class Passed(NamedTuple):
    """A forward pass as it can be traced."""

    call: int
    """The index of its call in `Calls.seen`."""
    reached: tuple[int, ...] | str
    """The results that backward reached, or why they do not tell what it computed."""


@dataclass(slots=True)
class Tokens:
    """What a step sent through the model; None is what was not seen."""

    count: int | None = None
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    """Shapes of the tokens of the forward passes."""
    padding: int | None = None
    """None unless it is known of each forward pass."""
    precision: Precision | None = None
    calls: tuple[Passed, ...] = ()
    """The forward passes."""


NO_TOKENS = Tokens()
NO_ARGUMENTS = Several(list, None, ())


class PassReader:
    """Reads forward passes, by hooks before the calls of a few modules within the model.

    These are the modules that may be embeddings or make positions, and one of those of which the
    model has most, for the type of its matmuls. They stay the same, because torch.compile compiles
    again where hooks have gone. Tokens are `input_ids` where the model is given a tensor of that
    name, else the integers that it is given and that reach an embedding.
    """

    def __init__(self, models: Iterable[nn.Module], device: torch.device) -> None:
        models = tuple(models)
        named = [pair for model in models for pair in model.named_modules()]
        self._device_type = device.type
        self.counts_padding = self.looks_closely = True
        """Whether to count the padding of this step's passes, and to look at what is trained."""
        self.loader_batch: tuple[int, int] | None = None
        """The axis of the batch that the last DataLoader's batch has, and its size; None if
        unknown.
        """
        self.limits = TraceLimits(models)
        self._given: set[int] = set()
        """Addresses of the tensors that the model is given, in the first passes."""
        self._is_transformed = False
        """Whether the pass is within a transform of torch.func, which shows it other shapes."""
        self.embeddings = WeakSet(_may_embed(named))
        """The modules before whose calls `embeds` is to be called."""
        self.mixers = WeakSet(_mixers(named))
        """The modules before whose calls `mixes` is to be called."""
        self._tables = {id(module) for module in self.embeddings if _has_matrix(module)}
        self.matmuls = WeakSet(_usual_matmul([module for _, module in named]))
        """The modules after whose calls `multiplies` is to be called."""
        self.order = AxisOrder()
        self.calls = Calls()
        self.open_pass: Pass | None = None
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
        self._masks = []
        self._is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if self._is_transformed:
            self.limits.reason = TRANSFORMED
            self.open_pass = Pass(new(Call, (model, NO_ARGUMENTS, NOTHING)), mark, embedded=[])
            return
        self.open_pass = Pass(call_of(model, inputs, named), mark)
        if self.looks_closely:
            self.limits.see_trained(model)
        if self.order.num_passes < FIRST_PASSES:
            self._given = {tensor.data_ptr() for tensor in tensors_in((*inputs, named))}
        self.outer_dtype = autocast_dtype(self._device_type)
        for value in (*inputs, named) if named else inputs:
            if isinstance(value, Mapping):
                mask = value.get("attention_mask")
                if isinstance(mask, Tensor):
                    self._masks.append(mask)

    def embeds(self, module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note what a module is given, if it looks tokens up."""
        seen = self.open_pass
        if seen is None or self._is_transformed:
            return
        if seen.embedded is None:
            seen.embedded = []
        if self.order.num_passes < FIRST_PASSES:
            made = tensors_in((*inputs, named))
            seen.see_positions(one for one in made if one.data_ptr() not in self._given)
        ids = inputs[0] if inputs else next(iter(named.values()), None)
        if id(module) in self._tables and isinstance(ids, Tensor):
            seen.embedded.append(new(Embedded, (id(module), ids.shape, ids.dtype)))

    def mixes(self, module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note the length of the sequences that PyTorch's attention or recurrence is given."""
        seen = self.open_pass
        if seen is None or self._is_transformed or self.order.num_passes >= FIRST_PASSES:
            return
        given = inputs[0] if inputs else next(iter(named.values()), None)
        assert isinstance(module, TELL_LENGTH)
        if isinstance(given, Tensor) and given.ndim == 3:
            seen.lengths.add(given.shape[1 if module.batch_first else 0])

    def multiplies(self, module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401
        """Note the type that a module has computed in: by autograd's graph of its result, and where
        it has none, by what one of PyTorch's own layers was given.
        """
        if self.open_pass is None:
            return
        if self.open_pass.embedded is None:
            self.open_pass.embedded = []
        if self.num_seen >= ENOUGH_MATMULS:
            return
        self.num_seen += 1
        dtype = multiplied_in(result)
        given = next(iter(inputs), None)
        if dtype is None and is_of_pytorch(module) and isinstance(given, Tensor):
            dtype = computed_in(given, self._device_type)
        self._note_dtype(dtype)

    def _note_dtype(self, dtype: torch.dtype | None) -> None:
        """Keep the type of a matmul, unless it is not known."""
        if dtype is not None:
            self._inner = self.outer_dtype, dtype

    def ends(self, model: nn.Module, result: Any) -> Pass:  # noqa: ANN401
        """What the pass was given, which ends now with this result."""
        seen, self.open_pass = self.open_pass, None
        assert seen is not None
        # a wrapper, as of data parallelism, stays in training mode where its module is evaluated
        first = next(iter(model._modules.values()), None)
        seen.is_in_training_mode = model.training and (first is None or first.training)
        if self._inner is None and self.order.num_passes < FIRST_PASSES:
            # where hooks may see blocks, the nearest matmul, that of the head, does not tell theirs
            has_seen = seen.embedded is not None or all(one is model for one in self.matmuls)
            self._note_dtype(multiplied_in(result) if has_seen else None)
        seen.precision = precision_of(self._dtype(model, seen), self._device_type)
        seen.loader_batch = self.loader_batch
        seen.reached = see_reached(result)
        if self._masks and self.counts_padding:
            seen.padding = _padding(self._masks, self._counted(seen).shape)
        self.order.num_passes += 1
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
                self.order.see_batch(shape, seen.lengths, seen.loader_batch)
            if tokens is not None:
                sums.count = (sums.count or 0) + tokens
            if seen.padding is not None:
                paddings.append(int(seen.padding))
            sums.precision = seen.precision
            shapes.append(shape)
            calls.append(Passed(self.calls.number(seen.call), seen.reached_results))
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

    def _dtype(self, model: nn.Module, seen: Pass) -> torch.dtype | None:
        """The type of the matmuls; None if it was not seen."""
        if self._inner is not None and self._inner[0] is self.outer_dtype:
            return self._inner[1]
        if self._low_dtype is None and self.order.num_passes == 0:
            self._low_dtype = only_low_dtype(model)
        # no hook runs in a compiled model, around which autocast is
        is_compiled = seen.embedded is None
        return (self.outer_dtype if is_compiled else None) or self._low_dtype


class AxisOrder:
    """Tells which axis of a batch of tokens is the sequence, from what is seen in the model.

    `input_ids` are (batch, sequence). Other tokens are ordered as lengths of the same pass say, of
    positions that the model makes and of what PyTorch's own attention and recurrence are given, or
    as the batch that a DataLoader made, if that is the length of one axis and not of the other.
    Else the order is not known.
    """

    def __init__(self) -> None:
        self.is_named = False
        self.num_passes = 0
        self._axis: int | None = None

    def see_batch(
        self, shape: tuple[int, ...], lengths: set[int], loader_batch: tuple[int, int] | None
    ) -> None:
        """Compare the shape of tokens with what is known of the lengths of their axes."""
        is_known = self.is_named or self._axis is not None
        if is_known or len(shape) != 2 or shape[0] == shape[1]:
            return
        telling = {axis for axis in (0, 1) if shape[axis] in lengths}
        if loader_batch is not None and shape[loader_batch[0]] == loader_batch[1]:
            telling.add(1 - loader_batch[0])
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


def _mixers(named: Iterable[tuple[str, nn.Module]]) -> list[nn.Module]:
    """The first of PyTorch's own attentions and recurrences; the others are given as much."""
    for _, module in named:
        if isinstance(module, TELL_LENGTH):
            return [module]
    return []


def batch_of(size: int | None, batch: Any) -> tuple[int, int] | None:  # noqa: ANN401
    """The axis of the sequences in what a DataLoader of this batch size has made, and the size;
    None unless each tensor with two axes has them in the same one only.
    """
    axes = set()
    for tensor in tensors_in((batch,)):
        if tensor.ndim == 2 and size in tensor.shape:
            axes |= {axis for axis in (0, 1) if tensor.shape[axis] == size}
    return None if size is None or len(axes) != 1 else (axes.pop(), size)


def _usual_matmul(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """One of the modules with a matrix of the shape of which the model has most: one of a block."""
    by_kind: dict[Any, list[nn.Module]] = {}
    for module in modules:
        if _has_matrix(module) and not isinstance(module, nn.Embedding | nn.EmbeddingBag):
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
    """How many tokens of this shape the mask leaves out, by zeros; None without such a mask. One of
    floats is added to scores, and in one of booleans either may be left out.
    """
    for mask in masks:
        is_of_zeros = not mask.is_floating_point() and mask.dtype is not torch.bool
        if is_of_zeros and mask.shape == shape:
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


def is_of_pytorch(module: nn.Module) -> bool:
    """Whether the module computes as PyTorch's own class says, in the type that it is given."""
    return type(module).__module__.startswith("torch.nn.modules") and "forward" not in vars(module)


def computed_in(value: Tensor, device_type: str) -> torch.dtype:
    """The type of a matmul that is given this value, where the hook stands."""
    return autocast_dtype(device_type) or value.dtype
