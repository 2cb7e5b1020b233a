"""Short names of kernels, for tables."""

import re
from collections.abc import Iterator

from .classes import MAX_NAME, classify_kernel

MAX_WORDS = 64
"""Words of a template's arguments that `short_name` considers."""

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
    name = name[:MAX_NAME]
    wanted = classify_kernel(name)
    # the last candidate is the name itself
    return next(short for short in _candidates(name) if classify_kernel(short) is wanted)


def _candidates(name: str) -> Iterator[str]:
    """Names to use for `name`, the most readable first."""
    if cute := _CUTE.match(name):
        yield cute[1]
    function, arguments = _split(name)
    if function:
        words = list(dict.fromkeys(re.findall(r"\w+", arguments)))[:MAX_WORDS]
        if _ANY_OPERATOR.search(function):
            for operator in filter(None, map(_operator, words)):
                is_name = operator.startswith("cutlass_")
                yield operator if is_name else f"{function}<{operator}>"
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
    match = _OPERATOR.fullmatch(word)
    if match is None or _WRAPPER.fullmatch(word):
        return None
    operator = match["named"] or match["ended"] or match["whole"]
    return operator.lower() if re.fullmatch(r"[A-Z][a-z]+", operator) else operator
