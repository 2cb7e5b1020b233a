"""Lets compilers tell when they compile, so that a run says what it waits for."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ..config import CompileMode, Device, RunConfig
from ..waits import begin, end, waiting_for


@contextlib.contextmanager
def compilers_told(config: RunConfig) -> Iterator[None]:
    """Context in which torch.compile, if the step is compiled, and Triton are parts of the start
    while they compile.

    Triton calls its hooks around each kernel that this process has not compiled yet, also where its
    cache on disk has the kernel.
    """
    with contextlib.ExitStack() as stack:
        if config.compile is not CompileMode.NONE:
            stack.enter_context(_torch_compile_told())
        if config.device is Device.CUDA:
            stack.enter_context(_triton_told())
        yield


@contextlib.contextmanager
def _torch_compile_told() -> Iterator[None]:
    with waiting_for("importing torch.compile"):
        from torch._dynamo.callback import callback_handler

    def begins(*_: Any) -> None:  # noqa: ANN401
        begin("torch.compile")

    def ends(*_: Any) -> None:  # noqa: ANN401
        end()

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)


@contextlib.contextmanager
def _triton_told() -> Iterator[None]:
    try:
        from triton import knobs
    except ImportError:  # PyTorch for some systems has none
        yield
        return

    def begins(*, fn: Any, **_: Any) -> None:  # noqa: ANN401
        begin("compiling Triton kernels", fn.name)

    def ends(**_: Any) -> None:  # noqa: ANN401
        end()

    hooks = knobs.runtime
    before = hooks.jit_cache_hook, hooks.jit_post_compile_hook
    hooks.jit_cache_hook, hooks.jit_post_compile_hook = begins, ends
    try:
        yield
    finally:
        hooks.jit_cache_hook, hooks.jit_post_compile_hook = before
