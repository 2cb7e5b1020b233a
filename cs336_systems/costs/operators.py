"""What each operator of PyTorch launches on CUDA.

An operator without an entry is one kernel that reads its arguments and writes its results. Each
entry that says otherwise has its place in PyTorch's source.
"""

from collections.abc import Mapping
from fractions import Fraction

from torch import Tensor

from .on_cuda import HALF
from .tape import Form, Pass
from .trace import BATCH, Dispatch, Launcher, StepTrace, tensors_in

LOOKUPS = frozenset(["embedding", "index", "index_select", "gather"])
FAST_ACCUM = 5
"""Place of use_fast_accum among the arguments of _scaled_mm after the factors."""
MATMULS = frozenset(["mm", "addmm", "bmm", "baddbmm"])


def one_pass(trace: StepTrace, call: Dispatch) -> None:
    """Record any operation without an entry of its own: one kernel that reads its arguments and
    writes its results.
    """
    name, ins, outs = call.name, call.ins, call.outs or call.ins[:1]
    if name in LOOKUPS:
        ins = outs  # of what they read from, as many elements as they write
    elif name.startswith("nll_loss"):
        ins = ()  # they read or write one element of each row, and backward writes zeros
    # by identity, as an argument that is given twice is read once
    ins = [*{id(tensor): tensor for tensor in ins}.values()]
    how = Pass.COPY
    widest = max((tensor.element_size() for tensor in ins), default=8)
    if "softmax" in name and "log" not in name:
        how = Pass.SOFTMAX
    elif name == "masked_fill_":
        how = Pass.MASKED
    elif name in ("clone", "copy_", "_to_copy") and ins and ins[-1].stride() != outs[0].stride():
        how = Pass.STRIDED
    elif outs and outs[0].element_size() > widest:
        how = Pass.WIDEN
    trace.moves([*ins, *outs], how)


def _form(a: Tensor, b: Tensor) -> Form:
    """The form of the matmul a x b, told by which factor is a transposed matrix, whose columns are
    contiguous: b in forward, a in the weight's gradient, neither in the input's gradient.
    """
    if b.stride(-2) == 1 and b.shape[-2] > 1:
        return Form.FORWARD
    if a.stride(-2) == 1 and a.shape[-2] > 1:
        return Form.WEIGHT
    return Form.INPUT


def _matmul(trace: StepTrace, call: Dispatch) -> None:
    """Record one matmul, or a batch of them."""
    a, b = call.ins[-2:]
    sides = a.shape[-2], a.shape[-1], b.shape[-1]
    trace.matmul(_form(a, b), sides, a.element_size(), batch=len(a) if a.dim() == 3 else 1)
    # as many rows as the tokens that an expert was given: taken for a matmul of that expert
    if trace.is_first_forward and sides[0] in trace.routing.counts:
        trace.routing.note_experts(sides[0], b.numel())


def _scaled_matmul(trace: StepTrace, call: Dispatch) -> None:
    """Record a matmul of factors in fp8, which the hardware takes in one layout only; the form says
    how many bits its sums keep.
    """
    a, b, *others = call.args
    use_fast_accum = len(others) > FAST_ACCUM and others[FAST_ACCUM]
    form = Form.FORWARD if use_fast_accum else Form.INPUT
    trace.matmul(form, (a.shape[0], a.shape[1], b.shape[1]), a.element_size())


def _grouped_matmul(trace: StepTrace, call: Dispatch) -> None:
    """Record the matmuls of a mixture of experts, one for each expert. Their sizes depend on data;
    they are taken to be as equal as they can be.
    """
    a, b = call.ins[:2]
    form, sides = _form(a, b), [a.shape[-2], a.shape[-1], b.shape[-1]]
    groups = next(len(tensor) for tensor in (b, a, call.outs[0]) if tensor.dim() == 3)
    if a.dim() == b.dim() == 3:
        trace.matmul(form, sides, a.element_size(), groups, "experts")
        return
    trace.routing.is_assumed = True
    divided = 1  # in the gradients of weights, the rows of all tokens are the inner side
    if a.dim() != b.dim():
        divided = 0 if a.dim() == 2 else 2
    if trace.is_first_forward:
        trace.routing.note_experts(Fraction(sides[divided], groups), b.numel())
    # of a named batch each sequence has as many tokens for each expert, rounded up
    unit = trace.names.axes.get(BATCH, 1)
    least, more = divmod(sides[divided] // unit, groups)
    if unit > 1 and more:
        least, more = least + 1, 0
    for size, count in ((least, groups - more), (least + 1, more)):
        sides[divided] = unit * size
        if size and count:
            trace.matmul(form, sides, a.element_size(), count, "experts")


def _attention(trace: StepTrace, form: Form, q: Tensor, k: Tensor) -> None:
    """Record a kernel of fused attention, of queries and keys as (batch, heads, positions,
    d_head).
    """
    batch, heads, queries, d_head = q.shape
    trace.attention(form, batch * heads, (queries, d_head, k.shape[2]), q.element_size())


def _attention_kernel(trace: StepTrace, call: Dispatch) -> None:
    """Count a fused attention kernel, whose first two inputs are the queries and the keys."""
    _attention(trace, Form.ATTENTION, *call.ins[:2])


def _attention_backward_kernel(trace: StepTrace, call: Dispatch) -> None:
    """Record the backward kernel of fused attention and its buffers.

    Flash sums the queries' gradient in fp32 (flash_attn/flash_api.cpp); the efficient kernel
    multiplies output and gradient (cuda/attention_backward.cu). cuDNN's workspace is not
    documented; that of flash is assumed.
    """
    q, k = call.ins[1:3]
    batch, heads, queries, d_head = q.shape
    rows = f"{trace.names.product(batch * heads)} {trace.names.product(queries)}^128"
    trace.workspace("row sums of output x gradient", rows, 4)
    padded = f"{rows} {trace.names.product(d_head)}^32"
    if q.dtype not in HALF:
        padded = trace.names.product(q.numel())
    trace.workspace("workspace of fused attention", padded, 4)
    _attention(trace, Form.ATTENTION_BACKWARD, q, k)


def _softmax_backward(trace: StepTrace, call: Dispatch) -> None:
    """Record softmax's backward: CUDA multiplies gradient and output first
    (softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu).
    """
    gradient, output = call.ins[:2]
    trace.workspace("gradient x softmax", *trace.moved(gradient))
    trace.moves([gradient, output, gradient])
    trace.moves([gradient, output, call.outs[0]], is_dispatched=False)


def _norm_backward(trace: StepTrace, call: Dispatch) -> None:
    """Record a norm's backward: one kernel for the gradient of the input, one for those of the
    parameters (cuda/layer_norm_kernel.cu).
    """
    trace.moves([*call.ins[:2], call.outs[0]])
    trace.moves(call.ins[:2], is_dispatched=False)


def _foreach(trace: StepTrace, call: Dispatch) -> None:
    """Record one pass over lists of tensors, of which one may be given twice."""
    lists = {}
    for argument in call.args:
        if isinstance(argument, (list, tuple)) and any(True for _ in tensors_in(argument)):
            lists[id(argument[0])] = argument
    if lists:
        first = next(iter(lists.values()))
        shapes = tuple(trace.names.product(tensor.numel()) for tensor in first)
        trace.launch("foreach", len(lists) + 1, first[0].element_size(), shapes)


LAUNCHERS: Mapping[str, Launcher] = {
    **dict.fromkeys(MATMULS, _matmul),
    "_scaled_mm": _scaled_matmul,
    "_grouped_mm": _grouped_matmul,
    "_scaled_grouped_mm": _grouped_matmul,
    "_scaled_dot_product_flash_attention": _attention_kernel,
    "_scaled_dot_product_flash_attention_backward": _attention_backward_kernel,
    "_scaled_dot_product_cudnn_attention": _attention_kernel,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward_kernel,
    "_scaled_dot_product_efficient_attention": _attention_kernel,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward_kernel,
    "_softmax_backward_data": _softmax_backward,
    "rms_norm_backward": _norm_backward,
    "native_layer_norm_backward": _norm_backward,
    "_fused_adamw_": lambda trace, call: trace.launch(
        "adamw", 28, tuple(trace.names.product(tensor.numel()) for tensor in call.args[0])
    ),
    **{
        f"_foreach_{name}": _foreach
        for name in (
            "mul_",
            "add_",
            "lerp_",
            "addcmul_",
            "sqrt",
            "div_",
            "addcdiv_",
            "sub_",
            "neg",
            "reciprocal_",
        )
    },
}
