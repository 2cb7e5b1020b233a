"""The kernels of QuACK and FlashAttention 4, compiled side by side in processes of their own where
the packages have kept none yet.

Each of these kernels takes seconds of one core. In a step they would be compiled one after the
other, as each is called for the first time; what a process has compiled, the packages keep in their
caches, where this process finds it.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import Arch, Device, RunConfig
from ...files import user_cache
from ...tried_imports import call_elsewhere
from ...waits import waiting_for

CACHES = {
    "packed_attention": ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "flash_attention_4"),
    "fused_activations": ("QUACK_CACHE_DIR", "quack"),
}
"""By the setting that needs a package: the variable that names the folder of its kernels, and that
folder's name in the user's cache, where it is if the variable is not set.
"""
MIN_CORES = 4
"""Fewest cores on which kernels are compiled side by side."""
MAX_S = 120.0
"""Longest time that is waited for them."""
DTYPE = torch.bfloat16


def kernel_cache(setting: str) -> Path:
    """The folder in which the package of this setting keeps its kernels."""
    variable, name = CACHES[setting]
    return Path(os.environ.get(variable) or user_cache() / name)


def keep_kernels(setting: str) -> None:
    """Let this setting's package keep its kernels there; call it before the package is imported."""
    os.environ.setdefault(CACHES[setting][0], str(kernel_cache(setting)))


@contextlib.contextmanager
def compiling_ahead(config: RunConfig) -> Iterator[None]:
    """Context of work beside which the kernels that the step will call are compiled; it ends when
    they are.

    They are compiled if a package has kept none, and if another process has had to try the
    packages' imports: they are there in processes that are forked off it. If one fails or takes
    longer than MAX_S, the step's first call compiles what is missing, and raises what is wrong.
    """
    names = _missing(config) if config.device is Device.CUDA else []
    process = call_elsewhere(
        [[__name__, "compile_kernels", *_words(name, config)] for name in names]
    )
    if process is None:
        yield
        return
    with process:  # which closes its streams, and waits for its end
        try:
            yield
            with (
                waiting_for("compiling kernels side by side", ", ".join(names)),
                contextlib.suppress(subprocess.TimeoutExpired),
            ):
                process.wait(MAX_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _missing(config: RunConfig) -> list[str]:
    """What is to be compiled side by side: nothing on few cores, which processes would share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if cores < MIN_CORES:
        return []
    return [
        call.__name__
        for setting, calls in CALLS.items()
        if getattr(config, setting) and not _has_kernels(kernel_cache(setting))
        for call in calls
    ]


def _has_kernels(folder: Path) -> bool:
    """Whether a compiled kernel is kept in the folder."""
    return any(folder.rglob("*.o"))


def _words(name: str, config: RunConfig) -> list[str]:
    """What `compile_kernels` is told of the configuration."""
    model = config.model
    sizes = config.batch_size, model.context_length, model.d_model, model.d_ff, model.num_heads
    activation = "gelu" if model.arch is Arch.GPT2 else "swiglu"
    return [name, config.device.value, activation, *map(str, sizes)]


class Shapes(NamedTuple):
    """The shapes of a block of a model, and tensors of zeros in them."""

    device: str
    is_gelu: bool
    batch: int
    seq: int
    d_model: int
    d_ff: int
    num_heads: int

    @property
    def bias_type(self) -> torch.dtype | None:
        return DTYPE if self.is_gelu else None

    @property
    def hidden(self) -> int:
        """Columns of the feed-forward network's first matmul."""
        return self.d_ff if self.is_gelu else 2 * self.d_ff

    def zeros(self, *sizes: int, dtype: torch.dtype = DTYPE) -> Tensor:
        """A tensor of zeros."""
        return torch.zeros(sizes, device=self.device, dtype=dtype)

    def rows(self, columns: int) -> Tensor:
        """A row for each token of the batch."""
        return self.zeros(self.batch * self.seq, columns)


def attention(shapes: Shapes) -> None:
    """Call the kernels of packed attention, forward and backward."""
    from .packed import _attend, _attend_backward

    heads, seq = shapes.num_heads, shapes.seq
    packed = shapes.zeros(shapes.batch, seq, 3 * shapes.d_model)
    rotations = None
    if not shapes.is_gelu:  # models with SwiGLU rotate q and k
        rotations = shapes.zeros(seq, shapes.d_model // heads // 2, 2, dtype=torch.float32)
    values, lse = _attend(packed, heads)
    _attend_backward(values, packed, values, lse, rotations, heads, shapes.bias_type, False)


def expand(shapes: Shapes) -> None:
    """Call the kernel of the feed-forward network's first matmul, with its activation."""
    from .packed import _expand

    bias = shapes.zeros(shapes.d_ff) if shapes.is_gelu else None
    _expand(shapes.rows(shapes.d_model), shapes.zeros(shapes.hidden, shapes.d_model), bias)


def contract_backward(shapes: Shapes) -> None:
    """Call the kernel of the gradient of the activation's input."""
    from .packed import _contract_backward

    weight = shapes.zeros(shapes.d_model, shapes.d_ff)
    slopes = shapes.rows(shapes.hidden)
    _contract_backward(shapes.rows(shapes.d_model), weight, slopes, shapes.bias_type)


CALLS: Mapping[str, Sequence[Callable[[Shapes], None]]] = {
    "packed_attention": (attention,),
    "fused_activations": (expand, contract_backward),
}
"""By the setting that needs a package: what is called, each in a process of its own."""


def compile_kernels(name: str, device: str, activation: str, *sizes: str) -> None:
    """Compile the kernels of this name by calling them; sizes are in the order of `Shapes`."""
    (call,) = (call for calls in CALLS.values() for call in calls if call.__name__ == name)
    call(Shapes(device, activation == "gelu", *map(int, sizes)))
