"""Classes of kernels, by their names."""

import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path

from ...files import FileError
from ...plugins import load

MAX_NAME = 8192
"""Characters of a name that are read. Real names are at most a few thousand long, and their
beginning decides.
"""


class KernelClass(StrEnum):
    """What a kernel does."""

    MATMUL = "matrix product"
    """Matmuls, with helpers such as the sum over split-K parts."""
    CONVOLUTION = "convolution"
    ATTENTION = "fused attention"
    """Scores, softmax and values in one kernel, with its helpers. Naive attention is matmuls and
    a softmax.
    """
    RECURRENCE = "recurrence"
    """State-space models, delta rules and linear attention, with their steps over chunks."""
    SOFTMAX = "softmax"
    """Includes log-softmax and cross-entropy, with PyTorch's separate kernel for gather and mean
    (nll_loss).
    """
    NORMALISATION = "normalisation"
    ELEMENT_WISE = "element-wise"
    """Includes dropout, masks and random numbers."""
    REDUCTION = "reduction"
    """Includes scatter-add, and the gradient of an embedding."""
    SORT = "sort and select"
    """Sorts, the largest of many (top-k), and the choice of experts for each token."""
    OPTIMIZER = "optimizer"
    """Kernels of fused and foreach optimizers. An optimizer of tensor operations runs
    element-wise kernels.
    """
    COPY_AND_FILL = "copy and fill"
    """Moves, casts, quantises, sets or gathers values (the embedding) without computing."""
    COMMUNICATION = "communication"
    OTHER = "other"
    """Kernels that no rule matches."""


class KernelRules:
    """Classes of kernels by patterns (regular expressions) of their names.

    The first pattern found anywhere in a name decides, so narrow ones come before wide ones.
    Patterns ignore case.
    """

    def __init__(self, classes: Mapping[str, object]) -> None:
        """Raise ValueError for a pattern that is none, and for the class of one that is none."""
        self.rules = [
            (_pattern(pattern), _kernel_class(pattern, kind)) for pattern, kind in classes.items()
        ]

    def find(self, name: str) -> KernelClass | None:
        """The class of the kernel of this name; None if no pattern is in the name."""
        return next((kind for pattern, kind in self.rules if pattern.search(name)), None)


def _pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE | re.ASCII)
    except re.error as error:
        raise ValueError(f"rule {pattern!r} is no regular expression: {error}") from error


def _kernel_class(pattern: str, kind: object) -> KernelClass:
    for kernel_class in KernelClass:
        if kernel_class == kind:
            return kernel_class
    raise ValueError(f"rule {pattern!r} needs one of {', '.join(KernelClass)}; got {kind!r}")


def read_rules(path: Path) -> KernelRules:
    """Read rules from a TOML file with a line `'pattern' = "class"` for each; raise FileError for
    a file with anything else.
    """
    try:
        return KernelRules(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise FileError(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # those of tomllib and of UTF-8 are such errors too
        raise FileError(
            path, f"needed lines like 'flash_.*' = \"fused attention\": {error}"
        ) from error


@cache
def own_rules() -> KernelRules:
    """The rules of this program, read when the first kernel is classified."""
    return read_rules(Path(__file__).with_name("rules.toml"))


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
_SORTING_OPS = re.compile(r"_(?:sort|topk|argsort)(?=_|$)")
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
    operators that only supply the kernel's input. So a matmul outside a template counts only if the
    kernel reduces and no other operator of the name does; the loss and the embedding's gradient
    count only if there is no other operator.
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
    others = _LOSS_OPS.sub("", _EMBEDDING_OPS.sub("", ops))
    computing = _MOVING_OPS.sub("", others)
    if others != ops and not computing:
        return KernelClass.REDUCTION if _EMBEDDING_OPS.search(ops) else KernelClass.SOFTMAX
    if reduces:
        if _SORTING_OPS.search(ops):
            return KernelClass.SORT
        is_matmul = _MATMUL_OPS.search(ops) and not _REDUCING_OPS.search(ops)
        return KernelClass.MATMUL if is_matmul else KernelClass.REDUCTION
    if kind == "unk":
        return KernelClass.OTHER
    named = ops.strip("_0123456789")
    return KernelClass.COPY_AND_FILL if named and not computing else KernelClass.ELEMENT_WISE


def is_generated(name: str) -> bool:
    """Whether torch.compile generated the kernel of this name."""
    return _INDUCTOR.search(name[:MAX_NAME]) is not None


# what names say of the phase, beside the class
_ADAM = r"(?-i:Adam(?:w|ax)?(?![a-z])|(?<![a-zA-Z])adam(?:w|ax)?(?![a-z])|ADAM)"
"""The optimizer as a word of its own: `hadamard` and `madam` have its letters."""
OF_OPTIMIZER = re.compile(
    rf"{_ADAM}|sgd|lamb(?!da|ert)|adagrad|adadelta|adafactor|rmsprop|muon|optimizer"
    r"|Pointwise\w{0,20}Op\w{0,20}Functor|Lerp\w{0,20}Functor",
    re.I,
)
"""Part of the names of kernels that update parameters: fused optimizers, and the addcmul, addcdiv
and lerp of foreach ones. Kernels that clip or unscale gradients are others.
"""
OF_BACKWARD = re.compile(r"backward|bwd|[dw]grad", re.I)
OF_TRAINING = re.compile(rf"{OF_BACKWARD.pattern}|multi_tensor_apply|{_ADAM}|nll_loss", re.I)
"""Part of the names of kernels that only training runs."""

_rules_of_others: list[KernelRules] = []


def use_rules(*given: KernelRules) -> None:
    """From now on, let these rules, then those of plug-ins (`cs336.kernel_rules`), decide before
    the rules of this module.
    """
    _rules_of_others[:] = [*given, *load("cs336.kernel_rules", KernelRules)]
    classify_kernel.cache_clear()


@lru_cache(maxsize=4096)
def classify_kernel(name: str) -> KernelClass:
    """What the kernel of this name does: CUDA's demangled, short or mangled names, Triton's, a
    CPU's operators.

    The class follows from the name alone; it is `other` if no rule matches. Rules that `use_rules`
    was given decide first, then those for kernels of torch.compile, then `own_rules`.
    """
    name = name[:MAX_NAME]
    for rules in _rules_of_others:
        if (kind := rules.find(name)) is not None:
            return kind
    if generated := _INDUCTOR.search(name):
        return _inductor_class(generated["kind"], generated["ops"])
    return own_rules().find(name) or KernelClass.OTHER
