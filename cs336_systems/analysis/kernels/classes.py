"""What a name tells: the class of a kernel, the kind of a collective, what a call of the runtime
does; short names.
"""

import re
from collections.abc import Iterator, Sequence
from enum import Enum, StrEnum
from functools import lru_cache

import numpy as np

from ...costs.communication import Collective
from ..columns import Ints, Mask
from .phases import Codes
from .trace import of_names

MAX_NAME = 8192
"""Characters of a name that are read. Real names are at most a few thousand long, and their
beginning decides.
"""
MAX_WORDS = 64
"""Words of a template's arguments that `short_name` considers."""


class KernelClass(StrEnum):
    """What a kernel does."""

    MATMUL = "matrix product"
    """Matmuls, with helpers such as the sum over split-K parts."""
    CONVOLUTION = "convolution"
    ATTENTION = "fused attention"
    """Scores, softmax and values in one kernel, with its helpers. Naive attention is matmuls and
    a softmax.
    """
    SOFTMAX = "softmax"
    """Includes log-softmax and cross-entropy, with PyTorch's separate kernel for gather and mean
    (nll_loss).
    """
    NORMALISATION = "normalisation"
    ELEMENT_WISE = "element-wise"
    """Includes dropout, masks and random numbers."""
    REDUCTION = "reduction"
    """Includes scatter-add, and the gradient of an embedding with the sort before it."""
    OPTIMIZER = "optimizer"
    """Kernels of fused and foreach optimizers. An optimizer of tensor operations runs
    element-wise kernels.
    """
    COPY_AND_FILL = "copy and fill"
    """Moves, casts, sets or gathers values (the embedding) without computing."""
    COMMUNICATION = "communication"
    OTHER = "other"
    """Kernels that no rule matches, among them sorts."""


# The first pattern found anywhere in the name decides, so narrow rules come before wide ones.
# Patterns ignore case. They are alternatives of plain words without unbounded repetition, so
# matching takes linear time for any name.
RULES: tuple[tuple[str, KernelClass], ...] = (
    # NCCL and RCCL (ncclDevKernel_AllReduce_Sum_f32_RING_LL), NVSHMEM, Transformer Engine
    (r"nccl|nvshmem|userbuffers|^c10d::|record_param_comms", KernelClass.COMMUNICATION),
    # PyTorch's symmetric memory, vLLM and SGLang (cross_device_reduce_1stage)
    (
        r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce",
        KernelClass.COMMUNICATION,
    ),
    # FlashAttention 2 and 3, PyTorch's copy of it (pytorch_flash::), course work that is called the
    # same
    (r"flash_(?:fwd|bwd)|flash::|flash_?attn", KernelClass.ATTENTION),
    # xFormers and PyTorch's efficient backend (fmha_cutlassF_...), cuDNN
    # (cudnn_generated_fort_native_sdpa_...) and the helpers of its backward
    # (compute_dot_do_o_specialized, convert_dq_to_16bits) AMD's CK and AITER (FmhaFwdKernel,
    # aiter::mla_..., aiter::pa_bf16_...)
    (
        r"fmha|sdpa|scaled_dot_product|compute_dot_do_o|convert_dq_to|aiter.{0,8}?(?:mla|pa)_",
        KernelClass.ATTENTION,
    ),
    # Triton's tutorial and what grew from it (_attn_fwd), FlashInfer, vLLM
    (r"attention|(?<![a-z])attn(?![a-z])", KernelClass.ATTENTION),
    # the CUDA driver: "Memcpy DtoH (Device -> Pageable)" in Kineto, "[CUDA memset]" in nsys
    (r"memcpy|memset|__amd_rocclr_(?:copy|fill)", KernelClass.COPY_AND_FILL),
    # FBGEMM's tables of embeddings and permutations; its name says nothing about what a kernel does
    (r"split_embedding|embedding_bag", KernelClass.REDUCTION),
    (r"fbgemm_gpu::\w{0,40}(?:permute|transpose|jagged|index_select)", KernelClass.COPY_AND_FILL),
    # PyTorch's foreach copy and zero, before the other foreach kernels
    (
        r"multi_tensor_apply_kernel.{0,200}?(?:CopyFunctor|ZeroFunctor|::Copy<|<copy>|<zero>)",
        KernelClass.COPY_AND_FILL,
    ),
    # PyTorch's foreach norm by the largest magnitude (NormType 2), as for the scales of fp8; others
    # clip gradients
    (r"(?:LpNormFunctor|lpnorm_cleanup)<.{0,60}?NormType\)2,", KernelClass.REDUCTION),
    # PyTorch: fused and foreach optimizers, GradScaler, gradient clipping; Apex and Transformer
    # Engine say the same
    (
        r"multi_tensor_apply|_foreach_|lpnorm_cleanup|amp_update_scale|adam(?!ard)|^Optimizer\.",
        KernelClass.OPTIMIZER,
    ),
    # PyTorch: copies and casts are element-wise kernels around a copy functor, fills around
    # FillFunctor
    (
        r"direct_copy|float(?:16|8\w{0,12})_copy|FillFunctor|<fill>|(?<!masked_)fill_kernel",
        KernelClass.COPY_AND_FILL,
    ),
    # PyTorch: cat, split, index, gather, embedding
    (
        r"CatArrayBatchedCopy|chunk_cat|split_with_sizes_copy|copy_device_to_device",
        KernelClass.COPY_AND_FILL,
    ),
    (r"^_(?:cut_heads_grads|cast_part)$", KernelClass.COPY_AND_FILL),  # this project's
    (
        r"indexSelect|vectorized_gather|index_elementwise|TensorAssign|roll_cuda|flip_cuda",
        KernelClass.COPY_AND_FILL,
    ),
    # PyTorch (cunn_SoftMaxForward, softmax_warp_backward), Apex, cuDNN; the loss: PyTorch, Liger
    (r"softmax|logsumexp|nll_loss|cross_?entropy", KernelClass.SOFTMAX),
    # PyTorch, Apex (cuApplyLayerNorm), Transformer Engine (ln_fwd_tuned_kernel), Liger, vLLM, cuDNN
    # (bn_fw_tr_...)
    (
        r"(?:layer|rms|batch|group|instance|weight|add)_?norm|(?<![a-z])(?:ln|bn)_[fb]wd?_",
        KernelClass.NORMALISATION,
    ),
    # PyTorch's layer norm and group norm, kernel by kernel
    (
        r"RowwiseMoments|GammaBetaBackward|ComputeInternalGradients|Compute\w{0,9}FusedParams",
        KernelClass.NORMALISATION,
    ),
    (
        r"ComputeGradOutputCoeff|cuCompute(?:GradInput|(?:Part)?GradGammaBeta)",
        KernelClass.NORMALISATION,
    ),
    # cuDNN (volta_scudnn_..., implicit_convolve_sgemm, winograd, xmma_fprop_implicit_gemm),
    # CUTLASS, CK, MIOpen (miopenSp3AsmConv, igemm_fwd_gtcx3), and PyTorch's operators and kernels
    # for depthwise ones
    (
        r"scudnn|cudnn_infer|winograd|convol|(?<![a-z])conv[123]d|conv_(?:transpose|depthwise)"
        r"|implicit_(?:con|gemm)|fprop|(?<![a-z])[dw]grad(?:_(?!gemm)|[123]d|$)|cutlass(?:::|_)conv"
        r"|grouped_conv|AsmConv|naive_conv|igemm_(?:fwd|bwd|wrw)|im2col|col2im|(?:slow|thnn"
        r"|mkldnn)_conv",
        KernelClass.CONVOLUTION,
    ),
    # cuBLAS and cuBLASLt: ampere_sgemm_128x64_tn, sm80_xmma_gemm_..., nvjet_tst_... from Hopper on,
    # gemvNSP_kernel, splitKreduce_kernel; CUTLASS: Kernel2<cutlass_80_simt_sgemm_...>,
    # device_kernel<...gemm...> AMD's Tensile (Cijk_Ailk_Bljk_...) and its mixtures of experts
    (
        r"(?<!fb)gemm|gemv|nvjet|xmma|splitKreduce|cublas|cutlass_\d|cutlass::Kernel|^Kernel2$",
        KernelClass.MATMUL,
    ),
    (r"Cijk_|wv_?splitk|fused_moe|fmoe|moe_gemm", KernelClass.MATMUL),
    # Triton kernels of people and of Inductor's templates (matmul_kernel_persistent, bmm,
    # decompose_k_mm)
    (
        r"matmul|(?<![a-z])(?:add|badd)?b?mm(?![a-z])|linear_(?:fwd|bwd|forward|backward)",
        KernelClass.MATMUL,
    ),
    # PyTorch's operators, where a trace of a CPU has no kernels
    (
        r"^aten::(?:addm[mv]_?|mv|dot|vdot|matmul|linear|linear_backward|einsum|addbmm_?)$",
        KernelClass.MATMUL,
    ),
    # PyTorch: sums by TensorIterator, scans, scatter-add, index-add
    (
        r"reduce_kernel|scan_(?:innermost|outer)|ReduceAdd|scatter_add|index_?add",
        KernelClass.REDUCTION,
    ),
    # PyTorch: the gradients of indexing and of embeddings, with CUB's sort of the rows; this
    # project's of the latter
    (r"indexing_backward|embedding_(?:dense_)?backward|lookup_grads", KernelClass.REDUCTION),
    (
        r"compute_grad_weight|sum_and_scatter|krn_partial|num_of_(?:partial_)?segments"
        r"|DeviceRadixSort|UniqueByKey|DeviceCompactInit",
        KernelClass.REDUCTION,
    ),
    # CUB, and people's own
    (r"DeviceScan|reduce|reduction|cumsum|cumprod", KernelClass.REDUCTION),
    (
        r"^aten::(?:sum|mean|a?max|a?min|argmax|argmin|prod|var|var_mean|std|norm"
        r"|linalg_vector_norm|any|all)$",
        KernelClass.REDUCTION,
    ),
    # PyTorch: TensorIterator's kernels, around any functor that no rule above knows; masks
    (r"elementwise|pointwise|triu_tril", KernelClass.ELEMENT_WISE),
    # PyTorch (fused_dropout_kernel_vec), Liger, vLLM and people's own Triton kernels
    (r"swiglu|geglu|gelu|silu|relu|sigmoid|act_and_mul|dropout", KernelClass.ELEMENT_WISE),
    (r"rotary|(?<![a-z])rope(?![a-z])", KernelClass.ELEMENT_WISE),
    (
        r"^aten::(?:add|sub|rsub|mul|div|neg|exp|log|sqrt|rsqrt|pow|abs|sin|cos|tanh|tanh_backward"
        r"|where|masked_fill|lerp|addcmul|addcdiv|clamp|clamp_min|maximum|minimum|reciprocal|eq|ne"
        r"|lt|le|gt|ge|bitwise_\w{1,9}|logical_\w{1,9}|tril|triu|square)_?$",
        KernelClass.ELEMENT_WISE,
    ),
    # layout changes of cuBLAS, cuDNN and Transformer Engine (transpose_readWrite_alignment_kernel,
    # nchwToNhwcKernel)
    (r"transpose_|_transpose|nchwToNhwc|nhwcToNchw|copy_kernel|_copy_", KernelClass.COPY_AND_FILL),
    (
        r"^aten::(?:copy|clone|contiguous|to|_to_copy|cat|stack|fill|zero|zeros|ones|full"
        r"|zeros_like|ones_like|full_like|arange|index|index_select|index_put|_index_put_impl"
        r"|gather|scatter|embedding|repeat|roll|flip)_?$",
        KernelClass.COPY_AND_FILL,
    ),
)

# Inductor (torch.compile) names a Triton kernel after its kind and the operators it fuses, in
# alphabetical order: triton_per_fused__softmax_add_2. Kinds: poi(ntwise), red(uction), per(sistent
# reduction), tem(plate), for(each), spl(it scan), coo(perative reduction), mix (order reduction),
# unk(nown); cpp_fused_... is C++, of any kind.
_INDUCTOR = re.compile(r"(?:^|_)(?:triton_(?P<kind>[a-z]{3})|cpp)_fused(?P<ops>\w*)")
_REDUCING_KINDS = frozenset({"red", "per", "coo", "mix", "spl"})

_MATMUL_OPS = re.compile(r"_(?:(?:add|badd|_scaled_|_grouped_)?b?mm|mv|dot)(?=_|$)")
_CONVOLUTION_OPS = re.compile(r"_convolution")
_FLEX_OPS = re.compile(r"flex_(?:attention|decoding)")
_SOFTMAX_OPS = re.compile(r"softmax|logsumexp")
_NORM_OPS = re.compile(r"_(?:layer|rms|batch|group|instance)_norm|_rsqrt(?=_|$)")
_EXP_OP = re.compile(r"_exp(?=_|$)")
_MAX_OP = re.compile(r"_a?max(?=_|$)")
_REDUCING_OPS = re.compile(
    r"_(?:sum|mean|a?max|a?min|argmax|argmin|prod|var|std|norm|linalg_vector_norm|any|all"
    r"|cumsum)(?=_|$)"
)
_EMBEDDING_OPS = re.compile(r"_embedding_dense_backward(?=_|$)")
_LOSS_OPS = re.compile(r"_nll_loss\w{0,2}?(?:_forward|_backward)?(?=_|$)")
_MOVING_OPS = re.compile(
    r"_(?:b?mm|mv|_scaled_dot_product_(?:flash|efficient|cudnn)_attention(?:_backward)?|_to_copy"
    r"|_unsafe_view|_unsafe_index|alias|arange|as_strided|cat|clone|constant_pad_nd|contiguous"
    r"|copy_?|detach|embedding|empty(?:_like)?|expand|fill|flip|full(?:_like)?|gather|index"
    r"|index_put|index_select|lift_fresh|new_(?:empty|full|ones|zeros)|ones(?:_like)?|permute"
    r"|repeat|reshape|roll|scalar_tensor|select(?:_backward|_scatter)?|slice(?:_backward|_scatter)?"
    r"|split(?:_with_sizes)?|squeeze|stack|t|transpose|unbind|unsqueeze|view(?:_as_complex"
    r"|_as_real)?|zeros(?:_like)?|\d{1,9})(?=_|$)"
)


def _inductor_class(kind: str | None, ops: str) -> KernelClass:
    """Class of a kernel that torch.compile generated: the heaviest of the operators that it fuses.

    From heavy to light: softmax, normalisation, reduction, element-wise, copy. A name also lists
    operators that only supply the kernel's input, so - a matmul outside a template counts only if
    the kernel reduces and no other operator of the name does, - the loss and the embedding's
    gradient count only if there is no other operator.
    """
    if kind == "for":  # foreach: the operators of a compiled optimizer
        return KernelClass.OPTIMIZER
    if kind == "tem":
        if _FLEX_OPS.search(ops):
            return KernelClass.ATTENTION
        if _CONVOLUTION_OPS.search(ops):
            return KernelClass.CONVOLUTION
        return KernelClass.MATMUL if _MATMUL_OPS.search(ops) else KernelClass.OTHER
    reduces = kind in _REDUCING_KINDS or (kind != "poi" and _REDUCING_OPS.search(ops) is not None)
    # written out: exp(x - max) over its sum
    if _SOFTMAX_OPS.search(ops) or (reduces and _EXP_OP.search(ops) and _MAX_OP.search(ops)):
        return KernelClass.SOFTMAX
    # written out: nothing else in a Transformer takes 1 / sqrt
    if _NORM_OPS.search(ops):
        return KernelClass.NORMALISATION
    own = _LOSS_OPS.sub("", _EMBEDDING_OPS.sub("", ops))
    computing = _MOVING_OPS.sub("", own)
    if own != ops and not computing:
        return KernelClass.REDUCTION if _EMBEDDING_OPS.search(ops) else KernelClass.SOFTMAX
    if reduces:
        is_matmul = _MATMUL_OPS.search(ops) and not _REDUCING_OPS.search(ops)
        return KernelClass.MATMUL if is_matmul else KernelClass.REDUCTION
    if kind == "unk":
        return KernelClass.OTHER
    named = ops.strip("_0123456789")
    return KernelClass.COPY_AND_FILL if named and not computing else KernelClass.ELEMENT_WISE


def classify_kernel(name: str) -> KernelClass:
    """What the kernel of this name does: CUDA's demangled, short or mangled names, Triton's, a
    CPU's operators.

    The class follows from the name alone; it is `other` if no rule matches.
    """
    return _classify(name[:MAX_NAME])


@lru_cache(maxsize=4096)
def _classify(name: str) -> KernelClass:
    if found := _INDUCTOR.search(name):
        return _inductor_class(found["kind"], found["ops"])
    return next(
        (kind for pattern, kind in RULES if re.search(pattern, name, re.I | re.A)),
        KernelClass.OTHER,
    )


_UNNAMED = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\(anonymous\)::")
_FUNCTION = re.compile(r"[\w:]+[<(]")
_SHORT = re.compile(r"[\w:]+(?:<\w+>)?")
_CUTE = re.compile(r"kernel_cutlass_[a-z\d_]+([A-Z]\w*?)_object_at_")
"""A kernel written in CuTe DSL: module and class without dots between them, then its arguments."""
# functions that run any operator: their template's arguments say which
_ANY_OPERATOR = re.compile(
    r"elementwise|reduce_kernel|multi_tensor_apply|^Kernel2?$|device_kernel|distribution_"
)
_WRAPPER = re.compile(
    r"(?:[AB]?Unary|Binary|(?:Unary|Binary|Pointwise|Ternary)Op\w{0,40})Functor"
    r"|(?:opmath_)?gpu_\w{0,40}|_cuda_scatter_gather_internal_kernel|distribution_\w{0,40}"
    r"|elementwise_kernel_helper"
)
_OPERATOR = re.compile(
    r"(?:CUDAFunctor(?:OnSelf)?_|launch_)(?P<named>\w+)|(?P<ended>\w+?)(?:_kernel_cuda|_kernel_impl"
    r"|_kernel|_cuda_out|_cuda_|(?:CUDA)?KernelImpl|(?:Math)?Functor(?:MP)?|_functor"
    r"|Ops)|(?P<whole>ReduceAdd|TensorAssign|plus|minus|multiplies|divides|cutlass_\d\w*|Flash\w+"
    r"|Gemm\w+)"
)


def short_name(name: str) -> str:
    """The kernel's name for a table: the function, and the operator where the function runs any.

    `void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,
    ...>(...)` becomes `vectorized_elementwise_kernel<add>`. The class of the short name is that of
    the whole name, so no two kernels of different classes share one. Kernels that differ in type or
    shape alone may.
    """
    return _shorten(name[:MAX_NAME])


@lru_cache(maxsize=4096)
def _shorten(name: str) -> str:
    wanted = _classify(name)
    # the last candidate is the name itself
    return next(candidate for candidate in _candidates(name) if _classify(candidate) is wanted)


def _candidates(name: str) -> Iterator[str]:
    """Names to use for `name`, the most readable first."""
    if cute := _CUTE.match(name):
        yield cute[1]
    function, arguments = _split(name)
    if function:
        words = list(dict.fromkeys(match.group() for match in re.finditer(r"\w+", arguments)))[
            :MAX_WORDS
        ]
        operators = (
            [word for word in map(_operator, words) if word]
            if _ANY_OPERATOR.search(function)
            else []
        )
        for word in operators:
            yield word if word.startswith("cutlass_") else f"{function}<{word}>"
        yield function
        yield from (f"{function}<{word}>" for word in words)
    yield name


def _split(name: str) -> tuple[str, str]:
    """Function and the rest of a demangled C++ name, both without namespaces that say nothing;
    or nothing.
    """
    # the name of a copy or an operator has no brackets, or only after a space: Memcpy HtoD
    # (Pageable -> Device)
    is_typed = ("<" in name or "(" in name) and (name.startswith("void ") or "::" in name)
    if _SHORT.fullmatch(name) or not (is_typed or _FUNCTION.match(name)):
        return "", ""
    name = _UNNAMED.sub("", name)
    outside: list[str] = []
    depth = 0
    for character in name:
        if character == "(" and not depth:
            break
        if character in "<([{":
            depth += 1
        elif character in ">)]}":
            depth = max(depth - 1, 0)
        elif not depth:
            outside.append(character)
    # what a function returns stands before it: `void f`, `std::enable_if<...>::type f`
    path = "".join(outside).split()[-1:]
    parts = path[0].split("::") if path else [""]
    function = parts[-1]
    if function in ("kernel", "Kernel") and len(parts) > 1:  # internal::gemvx::kernel
        function = f"{parts[-2]}::{function}"
    return function, name.partition(function)[2] if function else ""


def _operator(word: str) -> str | None:
    """`mul` of `MulFunctor`, `sqrt` of `sqrt_kernel_cuda`; None for a word that names no
    operator.
    """
    if _WRAPPER.fullmatch(word) or not (found := _OPERATOR.fullmatch(word)):
        return None
    operator = found["named"] or found["ended"] or found["whole"]
    return operator.lower() if re.fullmatch(r"[A-Z][a-z]+", operator) else operator


COLLECTIVES = tuple(Collective)
NO_COLLECTIVE = -1

# The first pattern that is found in the name decides. NCCL:
# ncclDevKernel_AllReduce_Sum_f32_RING_LL, before 2.19 ncclKernel_AllReduce_RING_LL_Sum_float; vLLM:
# cross_device_reduce_1stage; PyTorch's symmetric memory: all_reduce.
_PATTERNS = (
    (r"all_?reduce|cross_device_reduce", Collective.ALL_REDUCE),
    (r"all_?gather", Collective.ALL_GATHER),
    (r"reduce_?scatter", Collective.REDUCE_SCATTER),
    (r"broadcast", Collective.BROADCAST),
    (r"all_?to_?all", Collective.ALL_TO_ALL),
    (r"send_?recv", Collective.POINT_TO_POINT),
    (r"reduce", Collective.REDUCE),
)
_COPY_TO_PEERS = re.compile(r"memcpy (?:PtoP|Peer-to-Peer)", re.IGNORECASE | re.ASCII)
"""Beginning of the names of such copies in torch.profiler's traces and in nsys's reports."""


@lru_cache(maxsize=4096)
def collective_of(name: str) -> Collective | None:
    """The collective that the kernel or copy of this name is a part of; None if it is of none."""
    if _COPY_TO_PEERS.match(name):
        return Collective.COPY_TO_PEERS
    if classify_kernel(name) is not KernelClass.COMMUNICATION:
        return None
    name = name[:MAX_NAME]
    return next(
        (kind for pattern, kind in _PATTERNS if re.search(pattern, name, re.I | re.A)),
        Collective.OTHER,
    )


def collective_codes(names: Ints, strings: Sequence[str]) -> Codes:
    """The collective of each kernel or copy, as an index into `COLLECTIVES`; NO_COLLECTIVE for
    others.
    """

    def code(name: str) -> int:
        kind = collective_of(name)
        return NO_COLLECTIVE if kind is None else COLLECTIVES.index(kind)

    return of_names(names, strings, code, np.int8)


# nsys appends the version of the interface, and both profilers the variant for per-thread default
# streams: cudaLaunchKernel_v7000, cudaMemcpyAsync_ptsz_v7000
_VARIANT = re.compile(r"(?:_ptsz|_ptds|_spt|_v\d{1,6})+$")


class Call(Enum):
    """What a call of CUDA's, HIP's or Level Zero's runtime or driver does, as a pattern of the
    function's name.
    """

    ONE_KERNEL = (
        r"(?:cuda|cu|hip)(?:Ext)?(?:Module)?Launch(?:Cooperative|ByPtr)?(?:Kernel|$)"
        r"|urEnqueue\w*KernelLaunch"
    )
    """Launches one kernel: cudaLaunchKernelExC, cuLaunchKernelEx, hipExtModuleLaunchKernel."""
    KERNELS = rf"{ONE_KERNEL}|(?:cuda|cu|hip)GraphLaunch"
    LAUNCH = rf"{KERNELS}|(?:cuda|cu|hip)Mem(?:cpy|set)|urEnqueueUSM"
    """Launches kernels, copies or fills."""
    WAIT = (
        r"(?:cuda|cu|hip)(?:\w{0,40}Synchronize$|Memcpy(?!\w{0,40}Async))|ur(?:QueueFinish"
        r"|EventWait)$"
    )
    """Returns when the device has finished some work: synchronisations, and copies that are not
    asynchronous.
    """
    WAIT_FOR_DEVICE = r"(?:cuda|cu|hip)(?:Device|Ctx)Synchronize$"
    STREAM_WAIT = r"(?:cuda|cu|hip)StreamWaitEvent$"
    """Makes a stream, and not the host, wait for the work of another stream."""
    BEGIN_CAPTURE = r"(?:cuda|cu|hip)StreamBeginCapture"
    END_CAPTURE = r"(?:cuda|cu|hip)StreamEndCapture"

    def is_done_by(self, name: str) -> bool:
        """Whether the function of this name does it."""
        return re.match(self.value, call_name(name)) is not None

    def among(self, names: Ints, strings: Sequence[str]) -> Mask:
        """Whether each of these calls does it."""
        return of_names(names, strings, self.is_done_by, np.bool_)


TO_HOST = re.compile(r"Device-?to-?Host|DtoH|D2H", re.I)


def call_name(name: str) -> str:
    """The function's name without suffixes for version and variant."""
    return _VARIANT.sub("", name)
