"""The least bytes that one step of training has to move, in closed form: what the rungs of the ladder save."""

from dataclasses import dataclass

from cs336_systems.config import Arch, Mode, ModelConfig, OptimizerKind, Precision, RunConfig
from cs336_systems.costs.accounting import (
    ADAMW_BYTES,
    FP32_BYTES,
    HALF_BYTES,
    Component,
    count_parameters,
    forward_flops,
    forward_work,
    parameters_by_component,
)

OPTIMIZER_BYTES = {
    OptimizerKind.FUSED: ADAMW_BYTES,
    OptimizerKind.ADAMW: 18 * FP32_BYTES,
    OptimizerKind.FOREACH: 20 * FP32_BYTES,
}
"""For each parameter. Operation by operation, reads + writes: decay 1 + 1, first moment 2 + 1, second moment decays
1 + 1 and gains 2 + 1, root 1 + 1, foreach divides it by the bias correction 1 + 1, epsilon 1 + 1, update 3 + 1."""
_LINEAR = (Component.QKV, Component.OUTPUT, Component.FFN, Component.HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes read and written in one step of training, at the very least. Element-wise work and norms are left out."""

    weights: int
    """By the products: weights read in forward and in backward, their gradients written. A table of embeddings: its
    gradient, and where the head shares it the sum of the two."""
    casts: int
    """Autocast's: of weights to half precision, of their gradients back."""
    optimizer: int
    """Parameters, gradients, moments and low-precision copies."""
    activations: int
    """Factors and results of the products that are no weights, and their gradients; attention's scores, where they are
    written at all."""

    @property
    def state(self) -> int:
        """All but the activations: what does not depend on the batch."""
        return self.weights + self.casts + self.optimizer


def traffic(config: RunConfig) -> Traffic | None:
    """What a step of this project's model moves at least; None for a user's own, for a step that does not train, and
    for fp8, whose casts and copies are not counted here.

    Biases and norms, a thousandth of the parameters, count with the optimizer only; what pads a vocabulary and what
    checkpointing computes again is left out.
    """
    if config.model_factory is not None or config.fp8 or config.mode is not Mode.TRAIN:
        return None
    half = config.precision in (Precision.BF16, Precision.FP16)
    size = HALF_BYTES if half else FP32_BYTES
    linear = linear_weights(config.model)
    casts = 2 * (FP32_BYTES + HALF_BYTES) * linear if half and not config.cast_once else 0
    return Traffic(
        weights=3 * size * linear + _table_bytes(config),
        casts=casts,
        optimizer=OPTIMIZER_BYTES[config.optimizer] * count_parameters(config.model) + _second_gradient_bytes(config),
        activations=_activation_bytes(config, size),
    )


def linear_weights(model: ModelConfig) -> int:
    """Elements of the matrices that tokens are multiplied by: each takes 2 FLOPs for a token."""
    flops = forward_flops(model, batch_size=1)
    return sum(flops[part] for part in _LINEAR) // (2 * model.context_length)


def _table_bytes(config: RunConfig) -> int:
    """The gradient of the embedding: dense, and in fp32. Tied, it is added to that of the head."""
    if config.model.arch is Arch.CS336:
        return FP32_BYTES * parameters_by_component(config.model)[Component.EMBEDDING]
    elements = parameters_by_component(config.model)[Component.HEAD]
    return FP32_BYTES * elements * (1 if config.cast_once else 4)


def _second_gradient_bytes(config: RunConfig) -> int:
    """A tied table whose copy the head reads has two gradients, and is written twice."""
    if not config.cast_once or config.model.arch is Arch.CS336:
        return 0
    return 2 * HALF_BYTES * parameters_by_component(config.model)[Component.HEAD]


def _activation_bytes(config: RunConfig, size: int) -> int:
    """Of a product with three tensors each of the two backward products reads two and writes one of the same sizes."""
    parameters = parameters_by_component(config.model)
    moved = sum(work.moved_bytes for work in forward_work(config) if work.name != Component.EMBEDDING)
    return 3 * (moved - size * sum(parameters[part] for part in _LINEAR))
