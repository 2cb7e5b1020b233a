"""What each operator of PyTorch launches on CUDA.

An operator without an entry is one kernel that reads its arguments and writes its results. Each
entry that says otherwise has its place in PyTorch's source.
"""

from collections.abc import Mapping
from fractions import Fraction

from torch import Tensor

from .allocator import round_up
from .hopper import HOPPER
from .on_cuda import HALF
from .tape import Form, Pass
from .trace import BATCH, Dispatch, Launcher, StepTrace, tensors_in

LOOKUPS = frozenset(["embedding", "index", "index_select", "gather"])
FAST_ACCUM = 5
"""Place of use_fast_accum among the arguments of _scaled_mm after the factors."""
MATMULS = frozenset(["mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"])
CUBLASLT_WORKSPACE_BYTES = 2**20
"""PyTorch's default, for products to which a bias is added (aten/src/ATen/cuda/CUDABlas.cpp)."""


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
    batch = len(a) if a.dim() == 3 else 1
    trace.matmul(_form(a, b), sides, a.element_size(), batch=batch)
    if call.name == "addmm" and call.ins[0].dim() == 1:
        trace.claim_workspace("cuBLASLt workspace", CUBLASLT_WORKSPACE_BYTES)
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


def _flash_attention_backward(trace: StepTrace, call: Dispatch) -> None:
    """Record flash's backward kernel of attention and its buffers: it sums the queries' gradient
    in fp32 (flash_attn/flash_api.cpp).
    """
    q, k = call.ins[1:3]
    batch, heads, queries, d_head = q.shape
    rows = f"{trace.names.product(batch * heads)} {trace.names.product(queries)}^128"
    trace.workspace("row sums of output x gradient", rows, 4)
    padded = f"{rows} {trace.names.product(d_head)}^32"
    trace.workspace("workspace of fused attention", padded, 4)
    _attention(trace, Form.ATTENTION_BACKWARD, q, k)


def _efficient_attention_backward(trace: StepTrace, call: Dispatch) -> None:
    """Record the backward pass of the memory-efficient attention and its buffers: as sizes and in
    the order in which an H200 makes them for 216 shapes (PyTorch 2.11).

    In fp32 the product of output and gradient is summed before the kernel, and copied
    (cuda/attention_backward.cu).
    """
    q, k = call.ins[1:3]
    batch, heads, queries, d_head = q.shape
    pairs = trace.names.product(batch * heads)
    sums = ("row sums of output x gradient", f"{pairs} {trace.names.product(queries)}", 4)
    if q.dtype not in HALF:
        product = ("output x gradient", trace.names.product(q.numel()), 4)
        trace.workspaces([product, sums, sums])
    padded, width = f"{pairs} {trace.names.product(queries)}^64 {trace.names.product(d_head)}^64", 4
    if not trace.names.axes:  # one allocation, whose size is no product of axes
        padded, width = str(batch * heads * _efficient_bytes(q, k)), 1
    trace.workspaces([sums, ("workspace of fused attention", padded, width)])
    _attention(trace, Form.ATTENTION_BACKWARD, q, k)


def _efficient_bytes(q: Tensor, k: Tensor) -> int:
    """Bytes of the workspace for each head of each sequence.

    The queries' gradient is summed in tiles with 16 bytes of locks. Beyond 128 columns in half
    precision, so are those of keys and values, whose blocks of keys are shared out to at most 200
    blocks of threads (workspace_size in cuda/mem_eff_attention/kernel_backward.h, and
    cuda/attention_backward.cu).
    """
    batch, heads, queries, d_head = q.shape
    is_half = q.dtype in HALF
    rows, columns = 64, 64
    if d_head > 64:
        rows, columns = 128, 128 if is_half and d_head <= 128 else 64
    tiles = -(-queries // rows) * -(-d_head // columns)
    size = tiles * (16 + 4 * rows * columns)
    if is_half and d_head > 128:
        splits = max(1, min(-(-k.shape[2] // columns), 200 // (batch * heads)))
        size += 2 * splits * columns * round_up(d_head, rows) * 4
    return size


def _cudnn_attention_backward(trace: StepTrace, call: Dispatch) -> None:
    """Record cuDNN's backward kernel of attention and its workspace.

    That holds the queries' gradient and the row sums in fp32, and gradients of keys and values for
    each head of the queries where heads share them: with 256 bytes more, exactly what cuDNN 9.19
    takes on an H200 for 81 shapes.
    """
    q, k = call.ins[1:3]
    batch, heads, queries, _ = q.shape
    rows = f"{trace.names.product(batch * heads)} {trace.names.product(queries)}"
    elements = trace.names.product(q.numel())
    parts = [("queries' gradient in fp32", elements, 4), ("row sums", rows, 4)]
    if heads > k.shape[1]:
        parts += 2 * [("gradient for each head", elements, q.element_size())]
    if not trace.names.axes:  # one allocation, whose size is no product of axes
        size = 256 + sum(trace.names.size(shape) * width for _, shape, width in parts)
        parts = [("workspace of fused attention", str(size), 1)]
    trace.workspaces(parts)
    _attention(trace, Form.ATTENTION_BACKWARD, q, k)


def _reduction(trace: StepTrace, call: Dispatch) -> None:
    """Record a sum or a mean, and the buffer through which thread blocks add up."""
    source, total = call.ins[0], call.outs[0]
    sides = zip(source.stride(), source.shape, range(source.dim()), strict=True)
    axes = sorted(side for side in sides if side[1] > 1)
    dims = call.args[1] if len(call.args) > 1 else None
    reduced = {dim % source.dim() for dim in dims} if dims else {*range(source.dim())}
    columns = 1
    for _, size, axis in axes:
        if axis in reduced:
            break
        columns *= size
    # a tape with named axes serves sizes with which blocks would share the work otherwise
    if 1 < total.numel() < source.numel() and columns > 1 and not trace.names.axes:
        size = _buffer_bytes(source.numel() // total.numel(), total.numel(), columns, source)
        if size:
            trace.workspace("buffer of a sum", str(size), 1)
    one_pass(trace, call)


def _buffer_bytes(rows: int, outputs: int, columns: int, source: Tensor) -> int:
    """Bytes in which thread blocks leave partial sums, where each adds up so many rows of some of
    the outputs, of which so many are neighbours in memory; 0 if each output has one block.

    Follows setReduceConfig and global_memory_size in aten/src/ATen/native/cuda/Reduce.cuh.
    """
    while (
        rows > 1 and rows * outputs * source.element_size() >= 2**31
    ):  # kernels index with 32 bits
        rows = -(-rows // 2)
    vector = next(width for width in (4, 2, 1) if columns % width == 0)
    most = MOST_THREADS // vector
    wide, high = _power_of_2(outputs // vector, most), _power_of_2(rows, most)
    width = min(wide, HOPPER.warp_size)
    height = min(high, most // width)
    width = min(wide, most // height)
    if rows < min(16 * height, MOST_VALUES):
        return 0
    values = -(-rows // height)
    grid = -(-(outputs // vector) // width)
    wanted = HOPPER.multi_processor_count * (
        HOPPER.max_threads_per_multi_processor // (width * height)
    )
    if values < MOST_VALUES or grid > wanted:
        return 0
    blocks = max(min(-(-wanted // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    sum_bytes = max(4, source.element_size())
    return sum_bytes * outputs * blocks * width * vector if blocks > 1 else 0


def _power_of_2(number: int, most: int) -> int:
    """The largest power of 2 that is not above the number, or `most`."""
    return most if number >= most else 1 << (max(number, 1).bit_length() - 1)


MOST_UNSORTED = 3072
"""Tokens up to which a table's gradient is summed without sorting them."""
MOST_THREADS = 512
"""Threads of a block that adds up."""
LEAST_VALUES, MOST_VALUES = 16, 256
"""Values that a thread adds up at least if blocks share a sum, and from which on they share it."""


def _embedding_backward(trace: StepTrace, call: Dispatch) -> None:
    """Record the gradient of a table. Beyond 3,072 tokens it is summed by parts, of which there are
    as many as tokens in tens and words at most (cuda/EmbeddingBackwardKernel.cu).
    """
    tokens, (words, width) = call.ins[1].numel(), call.outs[0].shape
    if tokens > MOST_UNSORTED and not trace.names.axes:
        parts = tokens // 10 + min(tokens, words)
        trace.workspace("sums by parts", f"{parts} {width}^{HOPPER.warp_size}", 4)
    one_pass(trace, call)


def _convolution(trace: StepTrace, call: Dispatch) -> None:
    """Record a convolution with cuDNN's workspace: copies of what it reads and writes, channels
    last and in half precision a multiple of 8, as on an H200 (cuDNN 9.19). Backward does so twice,
    one gradient after the other.
    """
    copied = call.ins[:3] if "backward" in call.name else [*call.ins[:2], call.outs[0]]
    if not trace.names.axes:
        trace.workspace("channels last", str(sum(map(_channels_last_bytes, copied))), 1)
    one_pass(trace, call)


def _channels_last_bytes(tensor: Tensor) -> int:
    """Bytes of a copy of activations (batch, channels, ...) or of weights, channels last."""
    multiple = 8 if tensor.dtype in HALF else 1
    channels = tensor.shape[1]
    return tensor.nbytes // channels * round_up(channels, multiple)


def _loss(trace: StepTrace, call: Dispatch) -> None:
    """Record a loss; one that is reduced makes the losses of all elements first."""
    if call.outs[0].dim() == 0:
        largest = max(call.ins, key=Tensor.numel)
        trace.workspace("losses of all elements", *trace.moved(largest))
    one_pass(trace, call)


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
    "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_cudnn_attention": _attention_kernel,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "_scaled_dot_product_efficient_attention": _attention_kernel,
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    **dict.fromkeys(["convolution", "convolution_backward"], _convolution),
    **dict.fromkeys(["sum", "mean"], _reduction),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(["mse_loss", "smooth_l1_loss", "huber_loss"], _loss),
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
