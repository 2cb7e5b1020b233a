"""Weights kept twice: fp32 masters that the optimizer updates, and low-precision copies that the model reads.

Under autocast every step casts each weight, and each gradient back. Products see the same rounded weights either way,
and gradients come out of them in low precision either way, so this is the same training with fewer bytes moved. The
model's parameters are the masters, and its state dict knows nothing of copies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cs336_systems.model.layers import Copies, Linear, LMHead
from cs336_systems.model.transformer import SelfAttention, SwiGLU

ALIGNMENT = 16
"""Bytes at which the parts of a joint weight must begin, as a kernel's threads read so many at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor that is trained."""

    master: nn.Parameter
    """The model's parameter, in fp32."""
    source: Tensor | None = None
    """Leaf that has the copy among its rows, and gathers its gradient; None where the model reads the master alone."""
    rows: slice | None = None
    """Those of the copy; None where there is none."""

    @property
    def copy(self) -> Tensor | None:
        """The copy in low precision, of the master's shape."""
        return None if self.source is None else self.source.detach()[self.rows]

    def gradients(self) -> list[Tensor]:
        """Gradients whose sum is that of the weight: the master's own and the copy's, as far as there are any."""
        own = [] if self.master.grad is None else [self.master.grad]
        copied = [] if self.source is None or self.source.grad is None else [self.source.grad[self.rows]]
        return own + copied

    def refresh(self) -> None:
        """Make the copy that of the master again."""
        if (copy := self.copy) is not None:
            copy.copy_(self.master.detach())


def drop_gradients(weights: Iterable[Weight]) -> None:
    """Of the copies; the masters' are the optimizer's or the model's to drop."""
    for weight in weights:
        if weight.source is not None:
            weight.source.grad = None


def cast_linear_weights(model: nn.Module, dtype: torch.dtype, *, fp8: bool = False) -> tuple[Weight, ...]:
    """Give the linear layers of `model` copies in `dtype`; return all weights of the model, once each.

    Layers that read the same tensor share one copy, and so one product: q_proj, k_proj and v_proj; w1 and w3. That of
    the head is padded to the multiple that it computes. With `fp8` all but the head compute in fp8, from copies in
    `dtype`.
    """
    found: dict[nn.Parameter, Weight] = {}
    for module in list(model.modules()):
        if isinstance(module, SelfAttention):
            module.joint = _join((module.q_proj, module.k_proj, module.v_proj), dtype, found, fp8)
        elif isinstance(module, SwiGLU):
            module.joint = _join((module.w1, module.w3), dtype, found, fp8)
    for module in model.modules():
        if isinstance(module, Linear) and module.weight not in found:
            is_head = isinstance(module, LMHead)
            surplus = -len(module.weight) % module.multiple if isinstance(module, LMHead) else 0
            weight = _copy([module.weight], dtype, found, surplus)
            bias = None if module.bias is None else _copy([module.bias], dtype, found)
            module.copies = Copies(weight, bias, in_fp8=fp8 and not is_head)
    weights = tuple(found.get(parameter) or Weight(master=parameter) for parameter in model.parameters())
    model.register_load_state_dict_post_hook(lambda _model, _keys: _refresh(weights))
    return weights


def _join(
    layers: Sequence[Linear], dtype: torch.dtype, found: dict[nn.Parameter, Weight], in_fp8: bool
) -> Copies | None:
    """One weight and bias for all layers; None where a part would not be aligned."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if any(part.numel() * dtype.itemsize % ALIGNMENT for part in (*weights, *biases)):
        return None
    bias = _copy(biases, dtype, found) if biases else None
    return Copies(_copy(weights, dtype, found), bias, in_fp8)


def _copy(
    masters: Sequence[nn.Parameter], dtype: torch.dtype, found: dict[nn.Parameter, Weight], surplus: int = 0
) -> Tensor:
    """A leaf with copies of the masters one below the other, and `surplus` rows of 0; `found` learns of them."""
    first = masters[0]
    num_rows = sum(len(master) for master in masters)
    source = torch.zeros(num_rows + surplus, *first.shape[1:], dtype=dtype, device=first.device, requires_grad=True)
    start = 0
    for master in masters:
        found[master] = Weight(master=master, source=source, rows=slice(start, start + len(master)))
        found[master].refresh()
        start += len(master)
    return source


def _refresh(weights: Iterable[Weight]) -> None:
    for weight in weights:
        weight.refresh()
