"""The user's own attention (--own): how it is imported and called, and what is wrong with what it returns."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.model.factory import load_callable
from cs336_systems.studies.cell import Inputs

Own = Callable[..., Any]


def load_own(name: str) -> Own:
    """Import the function, or `apply` of the torch.autograd.Function; raise ValueError where it is not there."""
    found: Any = load_callable(name, "--own", "a function or a torch.autograd.Function")
    own: Own = found.apply if _is_autograd_function(found) else found
    return own


def call_own(own: Own, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Any:  # noqa: ANN401 (whatever it returns)
    """Call it as the course calls its flash attention."""
    return own(q, k, v, causal)


def described(name: str) -> str:
    """Name, file and line of the user's function; the name alone of one that has no line."""
    own = load_own(name)
    owner: Any = getattr(own, "__self__", None)
    function = inspect.unwrap(owner.forward if _is_autograd_function(owner) else own)
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    path = Path(code.co_filename)
    here = Path.cwd()
    return f"{name} ({path.relative_to(here) if path.is_relative_to(here) else path.name}, line {code.co_firstlineno})"


def fault_of(function: Callable[..., Any], inputs: Inputs) -> str | None:
    """What is wrong with the output or the gradients of one pass, as a predicate; None if nothing is.

    Inaccurate numbers are not a fault, because errors are measured. Raises whatever the function raises.
    """
    q = inputs.forward[0]
    output: object = function(*inputs.forward)
    if not isinstance(output, Tensor):
        return f"must return a tensor, got {type(output).__name__}"
    for what, needed, got in (
        ("shape", tuple(q.shape), tuple(output.shape)),
        ("data type", q.dtype, output.dtype),
        ("device", q.device, output.device),
    ):
        if needed != got:
            return f"must return a tensor of {what} {needed}, got {got}"
    if fault := _not_finite("an output", output):
        return fault
    if not output.requires_grad:
        return "returned an output without gradients: use operations of PyTorch, or a torch.autograd.Function"
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        output, inputs.forward, inputs.upstream, allow_unused=True
    )
    for name, gradient in zip("qkv", gradients, strict=True):
        if gradient is None:
            return f"returned an output that has no gradient with respect to {name}"
        if fault := _not_finite(f"a gradient of {name}", gradient):
            return fault
    return None


def _not_finite(what: str, tensor: Tensor) -> str | None:
    bad = tensor.numel() - int(tensor.isfinite().sum())
    return f"computed {what} of which {bad} of {tensor.numel()} elements are NaN or infinite" if bad else None


def _is_autograd_function(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, torch.autograd.Function)
