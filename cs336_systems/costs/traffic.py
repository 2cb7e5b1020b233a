"""The least bytes that one training step must move, in closed form; the rungs of the ladder save some of them."""

from dataclasses import dataclass

from cs336_systems.config import Arch, Mode, ModelConfig, OptimizerKind, Precision, RunConfig
from cs336_systems.costs.accounting import (
    ADAMW_BYTES,
    Component,
    count_parameters,
    forward_flops,
    forward_work,
    parameters_by_component,
    saved_by_moments,
    split_parameters,
)
from cs336_systems.costs.shards import FP32_BYTES, HALF_BYTES

OPTIMIZER_BYTES = {
    OptimizerKind.FUSED: ADAMW_BYTES,
    OptimizerKind.ADAMW: 18 * FP32_BYTES,
    OptimizerKind.FOREACH: 20 * FP32_BYTES,
}
"""Bytes that AdamW moves for each parameter. Tensors read + written, operation by operation: weight decay 1 + 1, first
moment 2 + 1, second moment decayed 1 + 1 and added to 2 + 1, its root 1 + 1, that divided by the bias correction (only
foreach) 1 + 1, epsilon added 1 + 1, update of the parameter 3 + 1."""
_LINEAR = (Component.QKV, Component.OUTPUT, Component.FFN, Component.HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Least bytes that one training step reads and writes. Element-wise work and norms are left out."""

    weights: int
    """Weights that matmuls read in forward and backward, and their gradients; the gradient of the embedding table, and
    its sum with the head's where the two are tied."""
    casts: int
    """Weights that autocast casts to half precision, and gradients that it casts back."""
    optimizer: int
    """Parameters, gradients, moments and low-precision copies."""
    activations: int
    """Factors and results of matmuls other than weights, and their gradients; the scores of attention that is not
    fused."""

    @property
    def state(self) -> int:
        """Everything but the activations, which alone grow with the batch."""
        return self.weights + self.casts + self.optimizer


def traffic(config: RunConfig) -> Traffic | None:
    """Least bytes of a training step of this project's model.

    None for a user's own model, for other modes, and for fp8, whose casts and copies have no closed form here. Biases
    and norms, a thousandth of the parameters, count with the optimizer alone. A vocabulary's padding and recomputation
    between checkpoints are left out.
    """
    if config.model_factory is not None or config.fp8 or config.mode is not Mode.TRAIN:
        return None
    half = config.precision in (Precision.BF16, Precision.FP16)
    size = HALF_BYTES if half else FP32_BYTES
    linear = linear_weights(config.model)
    bytes_per_parameter = OPTIMIZER_BYTES[config.optimizer] - saved_by_moments(config)
    casts = 2 * (FP32_BYTES + HALF_BYTES) * linear if half and not config.cast_once else 0
    return Traffic(
        weights=3 * size * linear + _table_bytes(config),
        casts=casts,
        optimizer=(
            bytes_per_parameter * count_parameters(config.model)
            + _second_gradient_bytes(config)
            - HALF_BYTES * split_parameters(config)
        ),
        activations=_activation_bytes(config, size),
    )


def linear_weights(model: ModelConfig) -> int:
    """Elements of the weights of all linear layers; each takes 2 FLOPs for a token."""
    flops = forward_flops(model, batch_size=1)
    return sum(flops[part] for part in _LINEAR) // (2 * model.context_length)


def _table_bytes(config: RunConfig) -> int:
    """The embedding's gradient, which is dense and in fp32; with tied embeddings it is added to the head's."""
    if config.model.arch is Arch.CS336:
        return FP32_BYTES * parameters_by_component(config.model)[Component.EMBEDDING]
    elements = parameters_by_component(config.model)[Component.HEAD]
    return FP32_BYTES * elements * (1 if config.cast_once else 4)


def _second_gradient_bytes(config: RunConfig) -> int:
    """Tied embeddings whose low-precision copy the head reads have a second gradient and a second copy."""
    if not config.cast_once or config.model.arch is Arch.CS336:
        return 0
    return 2 * HALF_BYTES * parameters_by_component(config.model)[Component.HEAD]


def _activation_bytes(config: RunConfig, size: int) -> int:
    """Three times forward: each of a matmul's two backward matmuls moves tensors of the same three sizes."""
    parameters = parameters_by_component(config.model)
    moved = sum(work.moved_bytes for work in forward_work(config) if work.name != Component.EMBEDDING)
    return 3 * (moved - size * sum(parameters[part] for part in _LINEAR))
