"""FLOPs of a watched loop: each call that was seen is made again on a copy of the model whose
tensors have no data, and the matmuls, convolutions and attentions in it are counted.
"""

import contextlib
import functools
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
from .graph import results_in
from .kept_state import kept_state
from .marks import WatchedStep
from .sharded import rank_copy
from .tokens import Passed, PassReader

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

    def __init__(self, reader: PassReader) -> None:
        self._reader = reader
        self._traced: dict[Passed, FlopCounter] = {}
        self._reason = ""
        """Why a call could not be traced; then no other is tried."""
        self.num_traced = 0
        """Calls that were traced, or tried."""
        self.last: LoopFlops | None = None
        """The last answer."""

    def flops(self, steps: Collection[WatchedStep]) -> tuple[LoopFlops | None, str]:
        """The FLOPs of the mean of these steps, or None and the reason why they are not known."""
        self.last = None
        passes = [one for step in steps for one in step.tokens.calls]
        # backward may run outside of the steps
        if not any(Phase.BACKWARD in step.times.phases_s for step in steps):
            passes = [one._replace(reached=()) for one in passes]
        counts = Counter(passes)
        executed = recomputed = 0.0
        if reason := self._why_not(counts):
            return None, reason
        try:
            self._trace(counts)
        except NotTracedError as error:
            self._reason = str(error)
            return None, self._reason
        for one, count in counts.items():
            counter = self._traced[one]
            executed += count * counter.executed
            recomputed += count * counter.recomputed
        if not executed:
            return None, "the model computes no matmul, convolution or attention"
        self.last = LoopFlops(
            per_step=(executed - recomputed) / len(steps),
            recomputed_per_step=recomputed / len(steps),
            modules_with_hooks=self._num_hooked(counts),
        )
        return self.last, ""

    def _num_hooked(self, passes: Iterable[Passed]) -> int:
        """Modules of the models of these passes that have forward hooks of others."""
        models = {self._reader.calls.seen[one.call].model() for one in passes}
        hooked: set[nn.Module] = set()
        for model in models:
            if model is not None:
                hooked.update(filter(has_hooks_of_others, model.modules()))
        return len(hooked)

    def _why_not(self, passes: Collection[Passed]) -> str:
        """Why the FLOPs of these passes are not known; empty if a trace tells them."""
        if reason := self._reason or lacking_torch():
            return reason
        if not passes:
            return "no training forward pass was seen"
        if any(one.call < 0 for one in passes):
            return f"the model is called with more than {MAX_CALLS} different shapes"
        for one in passes:
            if isinstance(one.reached, str):
                return one.reached
            self._reader.limits.see_trained(self._reader.calls.seen[one.call].model)
        return self._reader.limits.reason

    def _trace(self, passes: Collection[Passed]) -> None:
        """Trace those of the passes that were not yet."""
        new = [one for one in passes if one not in self._traced]
        if not new:
            return
        calls = {one: self._reader.calls.seen[one.call] for one in new}
        models = [call.model() for call in calls.values()]
        with kept_state([model for model in models if model is not None]):
            for one, call in calls.items():
                self.num_traced += 1
                assert not isinstance(one.reached, str)
                self._traced[one] = _traced(call, one.reached, limit_s=LIMIT_S / len(passes))


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


def has_hooks_of_others(module: nn.Module) -> bool:
    """Whether a forward hook of the module is neither this program's nor PyTorch's."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        function = hook.func if isinstance(hook, functools.partial) else hook
        owner = getattr(function, "__module__", None) or type(function).__module__
        if owner.partition(".")[0] not in ("torch", __name__.partition(".")[0]):
            return True
    return False


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


def _traced(call: Call, reached: Collection[int], *, limit_s: float) -> FlopCounter:
    """The FLOPs of one forward pass, and of the backward that reaches these of its results; raise
    NotTracedError with the reason.
    """
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
            results = enumerate(results_in((traced_model(*inputs, **named),)))
            loss = _sum_of([result for place, result in results if place in reached])
            if loss is not None:
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
    tensors = [value for value in results_in((result,)) if value.requires_grad]
    numbers = [value for value in tensors if value.ndim == 0]
    return numbers[0] if len(numbers) == 1 else _sum_of(tensors)


def _sum_of(tensors: Iterable[Tensor]) -> Tensor | None:
    """The sum of all that have a gradient; None without any."""
    total: Tensor | None = None
    for tensor in tensors:
        if tensor.requires_grad:
            total = tensor.sum() if total is None else total + tensor.sum()
    return total
