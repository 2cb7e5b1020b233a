"""AdamW, written out or from PyTorch, behind one factory."""

import inspect
import math
from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ..config import OptimizerKind


class Hyperparameters(TypedDict, total=False):
    """AdamW's, as torch.optim.AdamW names them; DEFAULTS has those that are left out."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


DEFAULTS = Hyperparameters(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)


class EagerOptimizer(torch.optim.Optimizer):
    """An optimizer that is never compiled.

    PyTorch wraps the two methods below to hide them from torch.compile; the first call imports
    torch._dynamo (2 s).
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(EagerOptimizer):
    """Adam with decoupled weight decay, one tensor at a time (Loshchilov and Hutter 2019, algorithm
    2).

    The decay is scaled by the learning rate, and bias corrections are folded into two host scalars,
    as in torch.optim.AdamW. Seven kernels per parameter and step (six without decay) move 28 bytes
    per parameter at the very least. The step count stays on the host, so nothing waits for the
    device.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        **hyperparameters: Unpack[Hyperparameters],
    ) -> None:
        super().__init__(params, {**DEFAULTS, **hyperparameters})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter; its state is made in the first step."""
        if gradient.is_sparse:
            raise ValueError(
                f"AdamW needs dense gradients, got a sparse one of shape {tuple(gradient.shape)}"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        first, second, lr = state["exp_avg"], state["exp_avg_sq"], group["lr"]
        beta1, beta2 = group["betas"]
        correction1 = 1 - beta1 ** state["step"]
        correction2 = math.sqrt(1 - beta2 ** state["step"])

        if group["weight_decay"]:
            parameter.mul_(1 - lr * group["weight_decay"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # m / c1 / (sqrt(v) / c2 + eps), multiplied out so that the corrections cost no kernel
        denominator = second.sqrt().add_(group["eps"] * correction2)
        parameter.addcdiv_(first, denominator, value=-lr * correction2 / correction1)


def make_optimizer(
    kind: OptimizerKind,
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    *,
    capturable: bool = False,
    **hyperparameters: Unpack[Hyperparameters],
) -> torch.optim.Optimizer:
    """AdamW of the given kind: the same update, to rounding, in many small kernels or in few.

    With `capturable` the fused one counts its steps on the device, as a CUDA graph needs.
    """
    settings: Hyperparameters = {**DEFAULTS, **hyperparameters}
    match kind:
        case OptimizerKind.ADAMW:
            return AdamW(parameters, **settings)
        case OptimizerKind.FOREACH:
            return torch.optim.AdamW(parameters, **settings, foreach=True)
        case OptimizerKind.FUSED:
            return torch.optim.AdamW(parameters, **settings, fused=True, capturable=capturable)
        case OptimizerKind.OWN:
            raise ValueError("an own optimizer is made by own_optimizer")
