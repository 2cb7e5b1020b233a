"""The user's own attention (--own): how it is imported and called, and what is wrong with what it returns."""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.config import Precision
from cs336_systems.model.own import load_callable
from cs336_systems.studies.attention_records import (
    ROUNDING,
    TOLERANCE,
    AttentionCell,
    ExactError,
    wrong_quantities,
)
from cs336_systems.studies.cell import Inputs

Own = Callable[..., Any]
_NEEDS_GPU = (
    r"0 active drivers|cannot be accessed from Triton|No module named 'triton'|Torch not compiled with CUDA|"
    r"Found no NVIDIA driver|No CUDA GPUs are available"
)
"""Errors of Triton and of PyTorch where a kernel for a GPU is loaded without one, or called with tensors of a CPU."""


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


class NoBackwardError(Exception):
    """The output is as it must be, and backward raised NotImplementedError, which is the cause."""


def fault_of(function: Callable[..., Any], inputs: Inputs) -> str | None:
    """What is wrong with the output or the gradients of one pass, as a predicate; None if nothing is.

    Inaccurate numbers are not a fault, because errors are measured. Raises NoBackwardError, or whatever the function
    raises.
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
    for name, gradient in zip("qkv", _gradients(output, inputs), strict=True):
        if gradient is None:
            return f"returned an output that has no gradient with respect to {name}"
        if fault := _not_finite(f"a gradient of {name}", gradient):
            return fault
    return None


def _gradients(output: Tensor, inputs: Inputs) -> tuple[Tensor | None, ...]:
    try:
        return torch.autograd.grad(output, inputs.forward, inputs.upstream, allow_unused=True)
    except NotImplementedError as error:
        raise NoBackwardError from error


def why_gpu_needed(error: BaseException) -> str | None:
    """The error of a kernel that cannot run on a CPU, in one line; None for an error of another kind."""
    text = str(error) or type(error).__name__
    if re.search(_NEEDS_GPU, text):
        return text.splitlines()[0]
    return None if error.__cause__ is None else why_gpu_needed(error.__cause__)


def wrong_in_words(
    cell: AttentionCell, found: Sequence[ExactError], kernel: Sequence[ExactError], likeness: str | None
) -> str:
    """A predicate that says how far each wrong quantity is off, and what was computed instead, if that is known."""
    wrong, of_kernel = wrong_quantities(cell, found, kernel), {each.quantity: each.relative or 0 for each in kernel}
    errors = {each.quantity: each.relative or math.inf for each in found if each.quantity in wrong}
    is_tf32 = cell.precision is Precision.FP32 and max(errors.values()) < TOLERANCE * ROUNDING[Precision.TF32]
    tf32 = "rounds as products in tf32 do, not in fp32 (tl.dot needs input_precision='ieee')"
    said = (f"{name} {error:.2g} (PyTorch's {of_kernel[name]:.2g})" for name, error in errors.items())
    return (
        f"{likeness or (tf32 if is_tf32 else 'computes something else')}; "
        f"errors against float64, over the largest magnitude: {', '.join(said)}"
    )


def _not_finite(what: str, tensor: Tensor) -> str | None:
    bad = tensor.numel() - int(tensor.isfinite().sum())
    return f"computed {what} of which {bad} of {tensor.numel()} elements are NaN or infinite" if bad else None


def _is_autograd_function(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, torch.autograd.Function)
