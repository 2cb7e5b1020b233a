"""AdamW for fp32 masters and their copies: one launch per kind of weight, also in CUDA graphs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ...config import RunConfig
from ..optimizer import DEFAULTS, EagerOptimizer, Hyperparameters
from .weights import Weight, drop_gradients

if TYPE_CHECKING:
    from .adamw_kernel import ChunkedAdamW


class _Kind(NamedTuple):
    """What the weights that one kernel launch updates have in common."""

    bucket: int
    has_copy: bool
    is_split: bool
    has_largest: bool
    gradient_types: tuple[torch.dtype, ...]


class Storage(NamedTuple):
    """How masters and moments are stored."""

    moments: torch.dtype = torch.float32
    splits: bool = False
    """Whether masters that the model does not read itself are split (weights.py).

    These parameters become empty tensors; `Weight.values` has their values.
    """


IN_FP32 = Storage()


def storage_of(config: RunConfig) -> Storage:
    """The storage that the configuration asks for."""
    return Storage(torch.bfloat16 if config.bf16_moments else torch.float32, config.split_masters)


class MasterAdamW(EagerOptimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) that updates fp32 masters and writes their
    copies.

    The update is that of torch.optim.AdamW, up to rounding. Steps are counted on the device, so
    that a graph's replays count too. Weights can be frozen only before the first step.

    Moments in bf16 are rounded up or down at random, after the update, so that they are right on
    average. Rounded to nearest, the second moment would not change at all where a step changes it
    by less than a 512th: mostly so with a beta2 of 0.999, and with 0.95 where it is near the mean
    squared gradient.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        storage: Storage = IN_FP32,
        **hyperparameters: Unpack[Hyperparameters],
    ) -> None:
        """`storage` says how masters and moments are kept; masters are split here if it says so."""
        for weight in weights if storage.splits else ():
            if weight.read is None:
                weight.split()
        super().__init__([weight.master for weight in weights], {**DEFAULTS, **hyperparameters})
        self.weights, self._moments = weights, storage.moments
        self._noise = torch.Generator().manual_seed(0)
        self._steps = torch.zeros((), device=weights[0].master.device)
        self._kernels: dict[_Kind, ChunkedAdamW] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all trained weights that have a gradient: the same weights in every step."""
        del closure
        self._steps += 1
        self._update(self.weights)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of masters and copies."""
        super().zero_grad(set_to_none)
        drop_gradients(self.weights)

    def captured(self) -> None:
        """Copy addresses to the device, after a CUDA graph has captured this step."""
        for kernel in self._kernels.values():
            kernel.upload()

    def _update(self, weights: Sequence[Weight], bucket: int = 0) -> None:
        """Update these weights; the same `bucket` must always come with the same weights."""
        kinds: dict[_Kind, list[Weight]] = {}
        for weight in weights:
            if weight.is_trained and (gradients := weight.gradients()):
                types = tuple(gradient.dtype for gradient in gradients)
                kind = _Kind(
                    bucket,
                    weight.copy is not None,
                    weight.remainder is not None,
                    weight.largest is not None,
                    types,
                )
                kinds.setdefault(kind, []).append(weight)
                if not (state := self.state[weight.master]):
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = weight.master.new_zeros(weight.shape, dtype=self._moments)
        for kind, same in kinds.items():
            if self._steps.is_cuda:
                self._launch(kind, same)
            else:
                for weight in same:
                    self._update_one(weight)

    def _launch(self, kind: _Kind, weights: Sequence[Weight]) -> None:
        """Update these weights by one kernel; all are of one kind, as `ChunkedAdamW` needs it."""
        # Triton, which only comes with PyTorch for GPUs
        from .adamw_kernel import ChunkedAdamW

        if kind not in self._kernels:
            states = [self.state[weight.master] for weight in weights]
            masters = [weight.master for weight in weights]
            remainders = [weight.remainder for weight in weights if weight.remainder is not None]
            self._kernels[kind] = ChunkedAdamW(
                remainders or masters,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [weight.copy.values for weight in weights if weight.copy is not None],
                [weight.largest for weight in weights if weight.largest is not None],
                kind.gradient_types,
            )
        self._kernels[kind](
            [weight.gradients() for weight in weights], self._steps, **self._settings
        )

    @property
    def _settings(self) -> dict[str, Any]:
        """The hyperparameters, which are those of the only group."""
        (group,) = self.param_groups
        return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}

    def _update_one(self, weight: Weight) -> None:
        """Update one weight by PyTorch's operators, which is how it is done on a CPU."""
        settings, state = self._settings, self.state[weight.master]
        lr, (beta1, beta2) = settings["lr"], settings["betas"]
        values = weight.values()
        gradient = sum(
            (gradient.float() for gradient in weight.gradients()), start=torch.zeros_like(values)
        )
        first: Tensor = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        second: Tensor = (
            state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        )
        denominator = (second / (1 - beta2**self._steps)).sqrt_().add_(settings["eps"])
        values.mul_(1 - lr * settings["weight_decay"])
        values.sub_(lr / (1 - beta1**self._steps) * first / denominator)
        weight.store(values)
        if self._moments is torch.bfloat16:
            for name, values in (("exp_avg", first), ("exp_avg_sq", second)):
                state[name].copy_(rounded_at_random(values, self._noise))


def rounded_at_random(values: Tensor, noise: torch.Generator) -> Tensor:
    """fp32 values in bf16, each rounded to one of its two neighbours, so that it is right on
    average.

    Random bits are added to the 16 bits that bf16 lacks, and these are cut off; NaN is kept.
    """
    bits = values.view(torch.int32) + torch.randint(
        2**16, values.shape, generator=noise, dtype=torch.int32
    )
    cut_off = bits.bitwise_and_(-(2**16)).view(torch.float32)
    return torch.where(values.isnan(), values, cut_off).bfloat16()
