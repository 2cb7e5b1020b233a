"""Operators of the fast model: a kernel on a GPU, PyTorch's own operators elsewhere."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from ...waits import waiting_for


def operator(
    kernel: str = "", mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a custom operator of a function that computes it by PyTorch's operators.

    This function computes it on a CPU, and gives the shapes of its results where tensors have no
    data. On a GPU `kernel`, a "module.function" beside this module, takes the same arguments, if
    there is one. Its module is imported on first use: Triton only comes with PyTorch for GPUs, and
    other packages take seconds. An operator that `mutates` arguments returns nothing. Functions
    declare no shapes, because PyTorch reads a schema from their types.
    """
    module, _, name = kernel.partition(".")

    @functools.cache
    def imported() -> Callable[..., Any]:
        """The function of the kernel's module."""
        function: Callable[..., Any]
        with waiting_for("importing kernels", module):
            function = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return function

    def run(*given: Any) -> Any:
        """Call the kernel; its first call compiles it, for which a run waits."""
        if imported.cache_info().currsize:
            return imported()(*given)
        with waiting_for("first calls of kernels", name):
            return imported()(*given)

    def make(plain: Callable[..., Any]) -> CustomOpDef:
        """Register the operator, its kernel, and its shapes without data."""
        label = f"cs336::{plain.__name__.lstrip('_')}"
        # no device here: a kernel that this registers imports torch.compile when it is called
        made = torch.library.custom_op(label, plain, mutates_args=mutates, device_types=())
        torch.library.impl(label, "cpu" if kernel else "default", plain)
        if kernel:
            torch.library.impl(label, "cuda", run)
        made.register_fake((lambda *_: None) if mutates else plain)
        return made

    return make
