"""What low precision does to a sum and to layer norm, and which data types autocast chooses, as
observed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.functional import cross_entropy, layer_norm

from ..config import SIZES, Arch, Device, Precision
from ..measure.precision import autocast
from ..model.transformer import TransformerLM
from . import records
from .cell import OperationObserver

SHORT_NAMES = MappingProxyType(
    {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
)


def run_precision_study(
    devices: Sequence[Device], status: Callable[[str], None]
) -> records.PrecisionStudy:
    """Observe sums, layer norm, and autocast on each of the devices; `status` is called with a
    text for each part.
    """
    status("adding up in low precision")
    sums = accumulation_study()
    status("layer norm in low precision")
    norms = tuple(normalise(*kind, dtype) for kind in ACTIVATIONS for dtype in SHORT_NAMES)
    status(f"data types under autocast on {' and '.join(devices)}")
    return records.PrecisionStudy(
        torch=str(torch.__version__),
        gpu=torch.cuda.get_device_name() if Device.CUDA in devices else None,
        accumulation=sums,
        dtypes=tuple(dtype_study(devices)),
        layer_norm=norms,
    )


def accumulate(
    sum_dtype: torch.dtype,
    addend_dtype: torch.dtype,
    *,
    cast: bool = False,
    addend: float = 0.01,
    count: int = 1000,
) -> records.Accumulation:
    """Add `addend`, stored as `addend_dtype`, to a sum kept as `sum_dtype`, `count` times."""
    total = torch.zeros((), dtype=sum_dtype)
    term = torch.tensor(addend, dtype=addend_dtype)
    growing_additions = 0
    for step in range(1, count + 1):
        before = total.item()
        total += term.to(sum_dtype) if cast else term
        if total.item() != before:
            growing_additions = step
    return records.Accumulation(
        sum_dtype=short_name(sum_dtype),
        addend_dtype=short_name(addend_dtype),
        cast=cast,
        addend=addend,
        count=count,
        total=total.item(),
        stored_addend=term.item(),
        growing_additions=growing_additions,
    )


def accumulation_study() -> tuple[records.Accumulation, ...]:
    """The course's four ways to add 0.01 a thousand times, then the same with bf16 in place of
    fp16.
    """
    sums = [accumulate(torch.float32, torch.float32)]
    for low in (torch.float16, torch.bfloat16):
        sums.append(accumulate(low, low))
        sums.append(accumulate(torch.float32, low))
        sums.append(accumulate(torch.float32, low, cast=True))
    return tuple(sums)


ACTIVATIONS = ((0.0, 1e-4), (0.0, 1.0), (0.0, 300.0), (1024.0, 1.0))
"""Centre and scale: the square underflows in fp16, fits, overflows in fp16; the deviation is
lost in bf16.
"""
NORM_EPS = 1e-5
"""Added to the variance, as in torch.nn.LayerNorm."""
NUM_ACTIVATIONS = 8


def normalise(centre: float, scale: float, dtype: torch.dtype) -> records.NormalisedActivations:
    """Layer norm on the CPU, with every operation in this data type, beside the same in fp64 and
    PyTorch's own.
    """
    exact_variance, exact_output, _ = _normalised(centre, scale, torch.float64)
    variance, output, library_output = _normalised(centre, scale, dtype)
    return records.NormalisedActivations(
        centre=centre,
        scale=scale,
        dtype=short_name(dtype),
        variance=_finite(variance),
        exact_variance=exact_variance,
        output=_finite(output),
        exact_output=exact_output,
        library_output=_finite(library_output),
    )


def _normalised(centre: float, scale: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """Variance, first normalised value, and that of PyTorch's layer norm."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(NUM_ACTIVATIONS // 2)
    x = (centre + scale * signs).to(dtype)
    deviation = x - x.mean()
    variance = (deviation * deviation).mean()
    output = deviation / (variance + NORM_EPS).sqrt()
    library = layer_norm(x, x.shape, eps=NORM_EPS)
    return variance.item(), output[0].item(), library[0].item()


def _finite(value: float) -> float | None:
    """The value, or None if it is infinite or NaN."""
    return value if math.isfinite(value) else None


def short_name(dtype: torch.dtype) -> str:
    """`fp32` for torch.float32, and so on."""
    return SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


class ToyModel(nn.Module):
    """The course's example for autocast: two linear layers with a ReLU and a layer norm between
    them.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        """The course's toy model: two linear layers with ReLU and layer norm between them."""
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)

    def forward(self, x: Float[Tensor, "batch in_features"]) -> Float[Tensor, "batch out_features"]:
        """Logits of each row of `x`."""
        logits: Tensor = self.fc2(self.ln(self.relu(self.fc1(x))))
        return logits


SCORES, SOFTMAX, WEIGHTS = (
    "attention's scores",
    "attention's softmax",
    "weights applied to the values",
)
TOY_OUTPUTS = MappingProxyType(
    {"first linear's output (fc1)": "fc1", records.NORM_INPUT: "relu", records.NORM_OUTPUT: "ln"}
)
"""For each quantity, the module of the toy model whose output it is."""

TRANSFORMER_OUTPUTS = MappingProxyType(
    {
        "embedding's output": "token_embeddings",
        "first norm's output (ln1)": "layers.0.ln1",
        "first linear's output (q_proj)": "layers.0.attn.q_proj",
        "attention's output": "layers.0.attn",
        "feed-forward's output": "layers.0.ffn",
        "residual stream after block 0": "layers.0",
        "last norm's output (ln_final)": "ln_final",
    }
)
"""The same for both architectures of TransformerLM."""

BATCH_SIZE = 2


def observed_dtypes(
    model: nn.Module, inputs: Tensor, precision: Precision, outputs: Mapping[str, str]
) -> dict[str, str]:
    """Run forward and backward under autocast on the device of `inputs`; return data types in order
    of execution.

    `outputs` names, for each quantity to observe, the module whose output it is. Parameters,
    logits, loss and gradients are observed always; attention's scores, softmax and weights if the
    model computes them as separate operations.
    """
    seen = {"parameters": _names(parameter.dtype for parameter in model.parameters())}
    hooks = [
        model.get_submodule(name).register_forward_hook(partial(_note_output, seen, quantity))
        for quantity, name in outputs.items()
    ]
    try:
        with autocast(precision, Device(inputs.device.type)), AttentionOps(seen):
            logits = model(inputs)
            targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
            loss = cross_entropy(logits.flatten(0, -2), targets.flatten())
        torch.autograd.backward(loss)
    finally:
        for hook in hooks:
            hook.remove()
    seen |= {"logits": short_name(logits.dtype), "loss": short_name(loss.dtype)}
    seen["gradients"] = _names(
        parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None
    )
    return seen


def _note_output(
    seen: dict[str, str], quantity: str, _module: nn.Module, _inputs: object, output: Tensor
) -> None:
    """Hook of a module that notes the data type of its first output in `seen`."""
    seen.setdefault(quantity, short_name(output.dtype))


def _names(dtypes: Iterable[torch.dtype]) -> str:
    """The names of these data types, sorted, each once."""
    return ", ".join(sorted({short_name(dtype) for dtype in dtypes}))


MATMULS = frozenset(
    {"aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default"}
)


class AttentionOps(OperationObserver):
    """Notes in `seen` the data types around the first softmax: the matmul before it, its output,
    the matmul after it.

    Operands are seen after autocast has cast them.
    """

    def __init__(self, seen: dict[str, str]) -> None:
        """`seen` is filled with the data type, by name, of each of attention's quantities."""
        super().__init__()
        self._seen = seen
        self._last_matmul: torch.dtype | None = None

    def observe(
        self, func: OpOverload[..., object], operands: Sequence[object], output: object
    ) -> None:
        """Note the operation's data type if it is one of attention's."""
        if not isinstance(output, Tensor):
            return
        if str(func) in MATMULS:
            self._last_matmul = output.dtype
            factor = operands[-2]
            if SOFTMAX in self._seen and isinstance(factor, Tensor):
                self._seen.setdefault(WEIGHTS, short_name(factor.dtype))
        elif str(func) == "aten._softmax.default" and SOFTMAX not in self._seen:
            if self._last_matmul is not None:
                self._seen[SCORES] = short_name(self._last_matmul)
            self._seen[SOFTMAX] = short_name(output.dtype)


def dtype_study(devices: Sequence[Device]) -> tuple[records.ObservedDtype, ...]:
    """Observe the toy model and both architectures of TransformerLM under fp16 and bf16 autocast
    on each device.
    """
    rows = []
    for device, arch, precision in product(devices, (None, *Arch), records.MIXED_PRECISIONS):
        name = "ToyModel" if arch is None else f"TransformerLM, {arch}"
        with torch.device(device.value):
            seen = _observe(arch, precision)
        for quantity, dtype in seen.items():
            rows.append(records.ObservedDtype(name, device, precision, quantity, dtype))
    return tuple(rows)


def _observe(arch: Arch | None, precision: Precision) -> dict[str, str]:
    """The data types in the TransformerLM of this architecture, or without one in the toy model."""
    if arch is None:
        x = torch.randn(BATCH_SIZE, 20)
        return observed_dtypes(ToyModel(20, 5), x, precision, TOY_OUTPUTS)
    config = replace(SIZES["tiny"], arch=arch, context_length=16)
    tokens = torch.randint(config.vocab_size, (BATCH_SIZE, config.context_length))
    return observed_dtypes(TransformerLM(config), tokens, precision, TRANSFORMER_OUTPUTS)
