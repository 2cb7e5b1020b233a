# ruff: noqa: ANN401 (operators get whatever PyTorch passes)
"""What PyTorch does with CUDA tensors and not with meta tensors: autocast, its fused kernels, its
choice of attention.

All of it hangs on a dispatch key that PyTorch leaves to others. So operators are met where CUDA's
autocast meets them: also those that others are made of, such as the power in `square`. Places are
those in PyTorch's source (2.11 to 2.13).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .internals import (
    DispatchKey,
    DispatchKeySet,
    compiler_internals,
    exclude_key,
    excluding_keys,
    including_keys,
    is_made_of_others,
    operators_of_key,
    without_modes,
)
from .traces import MAX_FLASH_WIDTH

HALF = (torch.bfloat16, torch.float16)
KEY = DispatchKey.AutocastPrivateUse1
_KEYS = DispatchKeySet(KEY)

# ---- autocast (aten/src/ATen/autocast_mode.h). Operators of CUDA's autocast that no list names run
# in fp32.

IN_LOW_PRECISION = frozenset(
    {
        "_convolution",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "prelu",
        "addmm",
        "addmv",
        "addr",
        "matmul",
        "einsum",
        "mm",
        "mv",
        "linalg_vecdot",
        "linear",
        "addbmm",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "linalg_multi_dot",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "_scaled_dot_product_flash_attention",
        "scaled_dot_product_attention",
    }
)
INTO_FP32 = frozenset(
    {
        "prod",
        "softmax",
        "log_softmax",
        "cumprod",
        "cumsum",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "sum",
    }
)
"""They read what they are given, and their results are fp32 unless a type is asked for."""
IN_WIDEST = frozenset(
    {
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "vdot",
        "grid_sampler",
        "index_put",
        "tensordot",
        "scatter_add",
    }
)
"""They run in the widest type of their arguments."""


class _WeightCopies:
    """Autocast's cache: parameters and their copies in low precision, by the parameter's id."""

    def __init__(self) -> None:
        """Start without copies; `on_copy` is called with each copy that is made."""
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.on_copy: Callable[[Tensor], None] = lambda _: None

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """The value, or list of values, with its tensors in this type (cached_cast in
        autocast_mode.cpp).
        """
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(part, dtype) for part in value)
        if not _is_cast(value) or value.dtype is dtype:
            return value
        is_weight = (
            value.is_leaf
            and value.requires_grad
            and value.dtype is torch.float32
            and not value._is_view()
        )
        if not (is_weight and dtype in HALF and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        if id(value) not in self.copies:
            self.copies[id(value)] = (value, value.to(dtype))
            self.on_copy(self.copies[id(value)][1])
        return self.copies[id(value)][1]


_weights = _WeightCopies()


def _is_cast(value: Any) -> bool:
    """Whether autocast would cast this argument: a floating-point tensor without data, unless it is
    in fp64. While torch.compile looks at the model, such tensors are on a GPU.
    """
    is_tensor = isinstance(value, Tensor) and value.device.type in ("meta", "cuda")
    return is_tensor and value.is_floating_point() and value.dtype is not torch.float64


def _autocast(operator: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments as autocast passes them on."""
    if name in INTO_FP32:
        return _with_result_in_fp32(operator, args, kwargs)
    dtype = torch.float32
    if name in IN_LOW_PRECISION or (name in IN_WIDEST and not _has_fp32((*args, *kwargs.values()))):
        dtype = torch.get_autocast_dtype("cuda")
    named = {key: _weights.cast(value, dtype) for key, value in kwargs.items()}
    # C++ evaluates arguments from the last to the first, so that a bias is cast before its weight,
    # and backward makes the weight's gradient first
    positional = [_weights.cast(value, dtype) for value in reversed(args)]
    return tuple(reversed(positional)), named


def _with_result_in_fp32(operator: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with fp32 as the result's type, unless the caller asks for a type."""
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("dtype") is not None or not _is_cast(args[0]):
        return args, kwargs
    return args[: names.index("dtype")], kwargs | {"dtype": torch.float32}


def _has_fp32(values: Iterable[Any]) -> bool:
    """Whether a tensor that autocast would cast is in fp32."""
    return any(_is_cast(value) and value.dtype is torch.float32 for value in values)


# ---- operators that CUDA has and meta decomposes

_library = torch.library.Library("cs336_trace", "DEF")
_library.define("rms_norm(Tensor x, Tensor? weight, int axes) -> (Tensor, Tensor)")
_library.define(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor scale, Tensor? weight) -> (Tensor, "
    "Tensor?)"
)


def _rms_norm_meta(x: Tensor, _: Tensor | None, axes: int) -> tuple[Tensor, Tensor]:
    """Tensors without data for the results of RMSNorm: the output, and 1 / rms of each row. They
    are contiguous whatever the input is, as those of layer_norm (cuda/layer_norm_kernel.cu).
    """
    rows = x.shape[: x.dim() - axes]
    return x.new_empty(x.shape), x.new_empty((*rows, *[1] * axes), dtype=torch.float32)


def _rms_norm_backward_meta(
    _: Tensor, x: Tensor, __: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Tensors without data of the shapes of the gradients of input and weight."""
    return x.new_empty(x.shape), None if weight is None else torch.empty_like(weight)


_library.impl("rms_norm", _rms_norm_meta, "Meta")
_library.impl("rms_norm_backward", _rms_norm_backward_meta, "Meta")


class _RMSNorm(torch.autograd.Function):
    """_fused_rms_norm of CUDA saves its input and 1 / rms
    (aten/src/ATen/native/cuda/layer_norm_kernel.cu).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, axes: int) -> Any:
        """RMSNorm of x over its last `axes` axes, as the CUDA kernel does it: a second result, the
        scale of each row, is saved for backward.
        """
        out, scale = torch.ops.cs336_trace.rms_norm(x, weight, axes)
        ctx.save_for_backward(x, scale, weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Gradients of x and the weight."""
        return *torch.ops.cs336_trace.rms_norm_backward(gradient, *ctx.saved_tensors), None


def _rms_norm(
    call: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """RMSNorm as CUDA computes it: by one fused kernel unless the types of input and weight differ
    (rms_norm_symint in aten/src/ATen/native/layer_norm.cpp).
    """
    if weight is not None and weight.dtype != x.dtype:
        return call(x, shape, weight, eps)
    return _RMSNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]


def _linear(call: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A linear layer. Where no one kernel adds the bias, PyTorch adds it in place, but not within a
    trace (linear in aten/src/ATen/native/Linear.cpp).
    """
    if bias is None or x.dim() == 2 or (x.dim() == 3 and x.is_contiguous()):
        return call(x, weight, bias)
    return torch.matmul(x, weight.t()).add_(bias)


def _dropout(call: Any, x: Tensor, share: float, is_training: bool) -> Any:
    """Dropout as CUDA computes it: one kernel, whose mask has one byte for each element
    (aten/src/ATen/native/Dropout.cpp).
    """
    if is_training and 0 < share < 1 and x.numel():
        return torch.ops.aten.native_dropout(x, share, True)[0]
    return call(x, share, is_training)


def _softmax(call: Any, x: Tensor, dim: int, *args: Any, dtype: torch.dtype | None = None) -> Any:
    """Softmax as CUDA computes it when a type is asked for: from fp16 to fp32 in one kernel, from
    bf16 by a copy first (softmax in aten/src/ATen/native/SoftMax.cpp).
    """
    if x.dtype is torch.float16 and dtype is torch.float32:
        fused = (
            torch.ops.aten._softmax
            if call in (torch.ops.aten.softmax.int, torch.ops.aten.softmax.int.decompose)
            else torch.ops.aten._log_softmax
        )
        return fused(x, dim, True)
    return call(x, dim, *args, **({} if dtype is None else {"dtype": dtype}))


# ---- attention (aten/src/ATen/native/transformers: cuda/sdp_utils.cpp and attention.cpp)


def _can_use_cudnn(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """Whether cuDNN takes this attention; PyTorch asks it first on Hopper, since cuDNN 9.15.1."""
    if not torch.backends.cuda.cudnn_sdp_enabled() or q.dtype not in HALF:
        return False
    widths = q.shape[-1], v.shape[-1]
    has_kernel = max(widths) <= 128 or widths == (192, 128)
    are_aligned = not any(width % 8 for width in widths)
    has_several_keys = k.shape[-2] > 1
    return has_kernel and are_aligned and has_several_keys and (16 * dropout).is_integer()


def _can_use_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether PyTorch's flash attention can compute this on a GPU: its conditions on types, widths
    and mask.
    """
    if not torch.backends.cuda.flash_sdp_enabled() or q.dtype not in HALF or mask is not None:
        return False
    has_kernel = q.shape[-1] == v.shape[-1] <= MAX_FLASH_WIDTH
    return has_kernel and (not is_causal or q.shape[-2] == k.shape[-2])


def _can_use_efficient(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch's memory-efficient attention can compute this; it takes no grouped queries
    (check_batch_size_and_num_heads_dense).
    """
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    if q.dtype not in (torch.float32, *HALF) or not q.shape[1] == k.shape[1] == v.shape[1]:
        return False
    aligned = 16 // q.element_size()
    return all(x.shape[-1] % aligned == 0 and x.stride(-1) == 1 for x in (q, k, v))


def _attention(
    call: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention by the kernel that PyTorch would choose on CUDA, the first that can: cuDNN's,
    flash, the memory-efficient one, or separate operations. What cuDNN saves is what flash saves.
    """
    is_flash, is_cudnn = _can_use_flash(q, k, v, mask, is_causal), _can_use_cudnn(q, k, v, dropout)
    if q.dim() != 4 or not (is_flash or is_cudnn or _can_use_efficient(q, k, v)):
        return call(q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_flash and not is_cudnn:
        return _flash_attention(q, k, v, dropout, is_causal, scale)
    keeps_sums = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    # each call makes a mask of numbers, which its backward keeps
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(
            mask.logical_not(), -torch.inf, torch.zeros((), dtype=q.dtype, device=q.device)
        )
    if is_cudnn:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(q, k, v, mask, keeps_sums, dropout, is_causal, False, scale=scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    if mask is not None:
        mask = _aligned(mask).expand(*q.shape[:3], k.shape[2])
    return efficient(q, k, v, mask, keeps_sums, dropout, is_causal, scale=scale)[0]


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, is_causal: bool, scale: float | None
) -> Any:
    """Attention by flash attention's kernel, for which heads are padded to a multiple of 8."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    width = q.shape[-1]
    if width % 8 == 0:
        return flash(q, k, v, dropout, is_causal, scale=scale)[0]
    if scale is None:
        scale = width**-0.5  # of the heads as they are
    q, k, v = (torch.constant_pad_nd(x, (0, -width % 8)) for x in (q, k, v))
    return flash(q, k, v, dropout, is_causal, scale=scale)[0][..., :width]


def _aligned(mask: Tensor) -> Tensor:
    """A mask whose rows begin at multiples of 16 elements (preprocess_mask in attention.cpp)."""
    *others, last = mask.stride()
    if last == 1 and all(stride % 16 == 0 for stride in others):
        return mask
    keys = mask.shape[-1]
    return torch.constant_pad_nd(mask, (0, 16 - keys % 16))[..., :keys]


_INSTEAD: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    "softmax": _softmax,
    "log_softmax": _softmax,
}
"""What runs in the place of an operator, which is given first."""
_compiling: dict[str, bool] = {}
"""Empty unless AOTAutograd traces. It dispatches in Python, and there an operator that is made of
others is not taken apart once it was met before autograd.
"""


def _kernel_of(operator: Any, name: str, is_autocast: bool) -> Callable[..., Any]:
    """A function to register for meta tensors in the place of CUDA's autocast of an operator."""

    is_composite = is_made_of_others(operator.name(), "CompositeImplicitAutograd")

    def run(*args: Any, **kwargs: Any) -> Any:
        """Run the operator as CUDA would: with arguments cast by autocast, and by another operator
        where CUDA has one.
        """
        with excluding_keys(_KEYS), without_modes():
            if is_autocast and torch.is_autocast_enabled("cuda"):
                args, kwargs = _autocast(operator, name, args, kwargs)
            instead = _INSTEAD.get(name)
            call = operator.decompose if _compiling and is_composite else operator
            return call(*args, **kwargs) if instead is None else instead(call, *args, **kwargs)

    return run


def _register() -> list[torch.library.Library]:
    """Register, for tensors without data, kernels for all operators that CUDA autocasts by
    PyTorch's own list, and for those that run otherwise there.
    """
    others, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, KEY.name)
    registered = operators_of_key("AutocastCUDA")
    # other libraries register operators of their own there, such as torchvision's deform_conv2d
    autocast = {name for name in registered if name.startswith("aten::")}
    for full_name in autocast | {"aten::dropout", "aten::rms_norm"}:
        word, _, overload = full_name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, word), overload or "default")
        aten.impl(operator, _kernel_of(operator, word, full_name in autocast), KEY.name)
    return [others, aten]


_kept = _register()


def clear_copies() -> None:
    """Drop autocast's copies of weights."""
    _weights.copies.clear()


@contextmanager
def as_on_cuda(on_copy: Callable[[Tensor], None]) -> Iterator[None]:
    """While open, operators of meta tensors do what they do on CUDA.

    `on_copy` is given each copy of a weight that autocast makes.
    """
    _weights.on_copy = on_copy
    exclude_key(KEY, False)
    try:
        with including_keys(KEY):
            yield
    finally:
        exclude_key(KEY, True)
        _weights.on_copy = lambda _: None
        clear_copies()


class _DecomposedRMSNorm(torch.autograd.Function):
    """RMSNorm as inductor has it: the fused kernel of CUDA and its backward, each written in
    operations that it fuses with others.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
        """RMSNorm of x over its last axes, which have this shape."""
        out, scale = compiler_internals().rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Gradients of x and the weight."""
        x, scale, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        of_x, of_weight = compiler_internals().rms_norm_backward(
            gradient, x, ctx.shape, scale, weight, wanted
        )
        return of_x, None, of_weight, None


def _rms_norm_to_fuse(
    call: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """RMSNorm in a compiled step, of the same arguments as `_rms_norm`."""
    if x.device.type != "meta" or (weight is not None and weight.dtype != x.dtype):
        return call(x, shape, weight, eps)
    return _DecomposedRMSNorm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]


@contextmanager
def as_decomposed() -> Iterator[None]:
    """While open, operators that inductor fuses with others are written in their parts."""
    with (
        mock.patch.dict(_INSTEAD, rms_norm=_rms_norm_to_fuse),
        mock.patch.dict(_compiling, on=True),
    ):
        yield


def without_autocast() -> AbstractContextManager[None]:
    """Within, operators are those of meta tensors: kernels there are written in operators, and
    on CUDA they are not.
    """
    guard: AbstractContextManager[None] = excluding_keys(_KEYS)
    return guard
