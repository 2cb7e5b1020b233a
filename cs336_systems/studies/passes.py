"""Timed passes of a function, forward and backward, on inputs that take turns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch._dynamo
from jaxtyping import Float
from torch import Tensor

from ..config import Phase, Precision
from ..measure.clock import Clock
from .cell import DTYPES, normal

OpFunction = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What goes into one pass: the inputs of forward, and the gradient of its output."""

    forward: tuple[Tensor, ...]
    upstream: Tensor


class Passes:
    """Forward and backward of a function on sets of inputs that take turns. Gradients are returned,
    not accumulated.

    Forward alone once `has_backward` is set to False; there are no gradients then.
    """

    def __init__(self, function: OpFunction, *sets: Inputs) -> None:
        """`function` is applied to one of the `sets` of inputs in each pass, in turns."""
        self._function = function
        self.sets = sets
        self.has_backward = True

    def forward(self, turn: int = 0) -> Tensor:
        """Output for the set of inputs of this turn."""
        return self._function(*self.sets[turn % len(self.sets)].forward)

    def backward(self, output: Tensor, turn: int = 0) -> tuple[Tensor, ...]:
        """Gradients of all inputs of this turn."""
        if not self.has_backward:
            return ()
        inputs = self.sets[turn % len(self.sets)]
        return torch.autograd.grad(output, inputs.forward, inputs.upstream)

    def both(self) -> tuple[Tensor, ...]:
        """The output, and the gradients."""
        output = self.forward()
        return (output, *self.backward(output))

    def timed(self, clock: Clock, turn: int = 0, head_start_cycles: int = 0) -> dict[Phase, float]:
        """Times in seconds of one forward and one backward pass, between two synchronisations of
        the device.

        A GPU waits so many of its cycles first, in a phase of its own (data), so that the host is
        ahead and the times are the device's.
        """
        clock.start()
        if head_start_cycles:
            torch.cuda._sleep(head_start_cycles)
            clock.lap(Phase.DATA)
        output = self.forward(turn)
        clock.lap(Phase.FORWARD)
        if self.has_backward:
            self.backward(output, turn)
            clock.lap(Phase.BACKWARD)
        return clock.stop().phases_s


def make_inputs(
    shapes: Sequence[tuple[int, ...]], precision: Precision, generator: torch.Generator
) -> Inputs:
    """Normally distributed inputs of these shapes; the output is taken to have the first shape."""
    *inputs, upstream = normal(generator, (*shapes, shapes[0]), DTYPES[precision])
    return Inputs(tuple(tensor.requires_grad_() for tensor in inputs), upstream)


def full_attention(
    q: Float[Tensor, "*batch queries d_head"],
    k: Float[Tensor, "*batch keys d_head"],
    v: Float[Tensor, "*batch keys d_head"],
) -> Float[Tensor, "*batch queries d_head"]:
    """Written-out attention to all keys (Vaswani et al. 2017, eq. 1), as naive_attention
    computes it when causal.
    """
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return scores.softmax(dim=-1) @ v


def compiled(function: OpFunction) -> OpFunction:
    """The function under torch.compile, which compiles when it is first called."""
    torch._dynamo.reset()  # otherwise it refuses the ninth shape of one function
    return cast("OpFunction", torch.compile(function, dynamic=False, fullgraph=True))


def distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """The largest distance of an element from the exact one, over all pairs; None if any is not
    finite.
    """
    errors = [(tensor.detach().double() - exact.detach()).abs().max() for tensor, exact in pairs]
    largest = float(torch.stack(errors).max())  # NaN if any is
    return largest if math.isfinite(largest) else None
