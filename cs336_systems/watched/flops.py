"""FLOPs of a watched loop: each call that was seen is made again on a copy of the model whose
tensors have no data, and the matmuls, convolutions and attentions in it are counted.
"""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..config import Phase
from ..costs.internals import FakeTensor
from ..costs.tape import MATMULS_OF, Form
from ..loop_record import LoopFlops
from ..torch_needed import lacking_torch
from .calls import MAX_CALLS, Call
from .dataless import NotTracedError, saying_why_not_traced, tracing_copy
from .kept_state import kept_state
from .marks import WatchedStep
from .sharded import rank_copy
from .tokens import tensors_in

LIMIT_S = 5.0
"""Longest time that tracing a loop may take."""
RECOMPUTED_IN_BACKWARD = 1 / MATMULS_OF[Form.ATTENTION_BACKWARD]
"""Share of the backward of fused attention that computes the scores again, one of its matmuls."""
COUNTED_ELSEWHERE = (
    "aten",
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "profiler",
    "rngprims",
    "cs336",
    "cs336_trace",
)
"""Namespaces of operators that are known: they multiply no matrices unless there is a formula."""


class LoopTracer:
    """Traces the calls that a loop makes, each once."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._traced: dict[tuple[int, bool], FlopCounter] = {}
        self._reason = ""
        """Why a call could not be traced; then no other is tried."""
        self.num_traced = 0
        """Calls that were traced, or tried."""
        self.last: LoopFlops | None = None
        """The last answer."""

    def flops(self, steps: Collection[WatchedStep]) -> tuple[LoopFlops | None, str]:
        """The FLOPs of the mean of these steps, or None and the reason why they are not known."""
        self.last = None
        counts = Counter(number for step in steps for number in step.tokens.calls)
        reason = self._reason or lacking_torch()
        if not counts:
            reason = "no training forward pass was seen"
        elif -1 in counts:
            reason = f"the model is called with more than {MAX_CALLS} different shapes"
        if reason:
            return None, reason
        has_backward = any(Phase.BACKWARD in step.times.phases_s for step in steps)
        executed = recomputed = 0.0
        try:
            self._trace(counts, has_backward)
        except NotTracedError as error:
            self._reason = str(error)
            return None, self._reason
        for number, count in counts.items():
            counter = self._traced[number, has_backward]
            executed += count * counter.executed
            recomputed += count * counter.recomputed
        if not executed:
            return None, "the model computes no matmul, convolution or attention"
        per_step = (executed - recomputed) / len(steps)
        self.last = LoopFlops(per_step=per_step, recomputed_per_step=recomputed / len(steps))
        return self.last, ""

    def _trace(self, numbers: Collection[int], has_backward: bool) -> None:
        """Trace those of the calls that were not yet."""
        new = [number for number in numbers if (number, has_backward) not in self._traced]
        if not new:
            return
        models = [self._calls[number].model() for number in new]
        with kept_state([model for model in models if model is not None]):
            for number in new:
                self.num_traced += 1
                self._traced[number, has_backward] = _traced(
                    self._calls[number], has_backward=has_backward, limit_s=LIMIT_S / len(numbers)
                )


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of the operators that PyTorch has a formula for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled; True would import torch.compile

    def __init__(self, forbidden: Iterable[Tensor]) -> None:
        """`forbidden` are the loop's own parameters, whose gradients a trace must not change."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._forbidden = set(map(id, forbidden))
        self.executed = self.recomputed = 0.0
        self.phase = Phase.FORWARD
        self.unknown: set[str] = set()
        """Operators of which nobody knows what they compute."""

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 (any operator, with any arguments)
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        # a function in the place of a module's forward may know the module itself
        if any(id(parameter) in self._forbidden for parameter in _parameters_in(args)):
            raise NotTracedError("a function computes with the model's parameters themselves")
        # with which DTensor finds how results are sharded
        if any(issubclass(kind, FakeTensor) for kind in types):
            return function(*args, **(kwargs or {}))
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            if torch.Tag.nondeterministic_seeded in function.tags:
                raise NotTracedError(f"{function} draws numbers that all ranks share")
            return NotImplemented  # such as DTensor, whose operations on its parts come here next
        out = function(*args, **(kwargs or {}))
        flops = self._flops(function, args, kwargs or {}, out)
        self.executed += flops
        if self.phase is Phase.BACKWARD:
            name = str(function)
            # autograd computes without gradients, and what a checkpoint computes again has some
            if torch.is_grad_enabled():
                self.recomputed += flops
            elif "attention" in name and "backward" in name:
                self.recomputed += flops * RECOMPUTED_IN_BACKWARD
        return out

    def _flops(
        self,
        function: Any,  # noqa: ANN401
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,  # noqa: ANN401
    ) -> float:
        packet = function._overloadpacket
        formula = flop_registry.get(packet)
        if formula is not None:
            return float(formula(*args, **kwargs, out_val=out))
        if packet is getattr(torch.ops.aten, "_grouped_mm", None):
            return _of_grouped_matmul(args[0].shape, args[1].shape)
        if function.namespace not in COUNTED_ELSEWHERE:
            self.unknown.add(str(packet))
        return 0.0


class _StayingHere(TorchFunctionMode):
    """Leaves tensors without data where they are, where a model on a CPU moves them to the CPU: a
    trace shows them on a GPU.
    """

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if function in (Tensor.to, Tensor.cpu) and args[0].is_cuda:
            args = tuple(value for value in args if not _is_host(value))
            kwargs = {name: value for name, value in kwargs.items() if not _is_host(value)}
            if function is Tensor.cpu or not (args[1:] or kwargs):
                return args[0]
        return function(*args, **kwargs)


def _staying(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Keeps tensors where they are if the model is on a CPU."""
    devices = {parameter.device.type for parameter in model.parameters()}
    return _StayingHere() if devices == {"cpu"} else contextlib.nullcontext()


def _is_host(value: object) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cpu")


def _parameters_in(args: Iterable[Any]) -> Iterator[nn.Parameter]:
    """The parameters among the arguments of an operator, and in its lists of tensors."""
    for value in args:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parameters_in(value)


def _of_grouped_matmul(a: Sequence[int], b: Sequence[int]) -> float:
    """FLOPs of matmuls of groups: all rows (or columns) of the groups lie one after the other,
    unless both factors have an axis of groups.
    """
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2.0 * groups * a[-2] * a[-1] * b[-1]


def _traced(call: Call, *, has_backward: bool, limit_s: float) -> FlopCounter:
    """The FLOPs of one forward pass, and of its backward; raise NotTracedError with the reason."""
    model = call.model()
    if model is None:
        raise NotTracedError(
            "the watched model exists no more: its name was given to another one before the report"
        )
    counter = FlopCounter(model.parameters())
    with saying_why_not_traced():
        inputs, named = call.arguments()
        traced_model = rank_copy(model)
        with tracing_copy(model, limit_s) as trace, _staying(model), counter:
            trace.begin(Phase.FORWARD)
            loss = loss_of(traced_model(*inputs, **named))
            if has_backward and loss is not None:
                trace.begin(Phase.BACKWARD)
                counter.phase = Phase.BACKWARD
                loss.backward()
            unknown = sorted(counter.unknown | trace.unknown_kernels)
    if unknown:
        raise NotTracedError(f"nobody knows the FLOPs of {', '.join(unknown[:3])}")
    return counter


def loss_of(result: Any) -> Tensor | None:  # noqa: ANN401
    """A number from which backward runs: the model's own loss, which is its only result with a
    single value, else the sum of its results; None where nothing has a gradient.
    """
    tensors = [value for value in tensors_in((result,)) if value.requires_grad]
    numbers = [value for value in tensors if value.ndim == 0]
    if len(numbers) == 1:
        return numbers[0]
    total: Tensor | None = None
    for tensor in tensors:
        total = tensor.sum() if total is None else total + tensor.sum()
    return total
