"""Parameters, FLOPs and MFU in closed form, from the configuration alone.

FLOPs are those of matmuls, in which a multiply-add counts as two. Norms, softmax, RoPE, the loss and the optimizer are
left out, as is usual (Chowdhery et al. 2022, appendix B), unless a name says otherwise.
"""

from dataclasses import dataclass
from enum import StrEnum

from cs336_systems.config import Arch, Mode, ModelConfig, Precision, RunConfig
from cs336_systems.costs.hardware import find_device
from cs336_systems.costs.shards import FP32_BYTES, kept_elements, updated_elements


class Component(StrEnum):
    """A part of the model, in all layers together."""

    EMBEDDING = "embedding"
    NORMS = "norms"
    QKV = "QKV"
    SCORES = "scores"
    VALUES = "values"
    OUTPUT = "output"
    FFN = "feed-forward"
    HEAD = "head"


def parameters_by_component(model: ModelConfig) -> dict[Component, int]:
    """Trainable parameters of each part that has any. A table shared by embedding and head counts for the head.

    cs336: no biases, RMSNorm (d_model each), SwiGLU. gpt2: biases, LayerNorm (2 d_model each), learned positions, tied.
    """
    d_model, d_ff, num_layers = model.d_model, model.d_ff, model.num_layers
    gpt2 = model.arch is Arch.GPT2
    biases = num_layers if gpt2 else 0
    weights = _weights(model)
    return {
        Component.EMBEDDING: (model.context_length if gpt2 else model.vocab_size) * d_model,
        Component.NORMS: (2 * num_layers + 1) * d_model * (2 if gpt2 else 1),
        Component.QKV: weights[Component.QKV] + biases * 3 * d_model,
        Component.OUTPUT: weights[Component.OUTPUT] + biases * d_model,
        Component.FFN: weights[Component.FFN] + biases * (d_ff + d_model),
        Component.HEAD: weights[Component.HEAD],
    }


def count_parameters(model: ModelConfig) -> int:
    """Trainable parameters of the whole model; tied embeddings count once."""
    return sum(parameters_by_component(model).values())


def _weights(model: ModelConfig) -> dict[Component, int]:
    """Weights of the linear layers, without biases."""
    d_model, num_layers = model.d_model, model.num_layers
    return {
        Component.QKV: num_layers * 3 * d_model**2,
        Component.OUTPUT: num_layers * d_model**2,
        Component.FFN: num_layers * _ffn_matrices(model) * d_model * model.d_ff,
        Component.HEAD: model.vocab_size * d_model,
    }


def _ffn_matrices(model: ModelConfig) -> int:
    """Number of weight matrices in one feed-forward layer: w1, w2 and, in SwiGLU, w3."""
    return 3 if model.arch is Arch.CS336 else 2


def forward_flops(model: ModelConfig, batch_size: int, *, causal: bool = False) -> dict[Component, int]:
    """FLOPs of each part in one forward pass; the embedding is a lookup and has none.

    Attention counts in full, all T x T pairs, as in a matmul of whole matrices. With `causal` only the T (T + 1) / 2
    pairs count in which the key is not after the query, the fewest that are needed.
    """
    context_length = model.context_length
    tokens = batch_size * context_length
    pairs = context_length * (context_length + 1) // 2 if causal else context_length**2
    attention = 2 * model.num_layers * batch_size * pairs * model.d_model
    linear = {component: 2 * tokens * weights for component, weights in _weights(model).items()}
    return {Component.EMBEDDING: 0, Component.SCORES: attention, Component.VALUES: attention, **linear}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentFlops:
    """FLOPs of one part in one step of a run's mode."""

    component: Component
    forward: int
    backward: int
    """Twice forward, one matmul for the gradient of each factor; 0 in a mode without backward."""

    @property
    def step(self) -> int:
        return self.forward + self.backward


def component_flops(config: RunConfig, *, causal: bool = False) -> tuple[ComponentFlops, ...]:
    """FLOPs of one step of this project's model, part by part; `causal` as in forward_flops.

    Left out: what backward computes again, between checkpoints or in fused attention, and the surplus of a padded
    vocabulary. Raises ValueError for a user's own model.
    """
    if config.model_factory is not None:
        raise ValueError(f"FLOPs are known only of this project's model, got model_factory {config.model_factory!r}")
    forward = forward_flops(config.model, config.batch_size, causal=causal)
    passes = 2 if config.mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN) else 0
    return tuple(
        ComponentFlops(component=part, forward=forward[part], backward=passes * forward[part])
        for part in Component
        if part in forward
    )


def step_flops(config: RunConfig) -> int | None:
    """Model FLOPs of one step in the run's mode; None for a user's own model, whose matmuls are not known.

    Attention counts in full. Recomputation is left out: these are the model's FLOPs, not the hardware's.
    """
    return None if config.model_factory is not None else sum(part.step for part in component_flops(config))


def mfu(flops_per_s: float, device_name: str, precision: Precision) -> float | None:
    """Model FLOPs/s over the data sheet's dense peak at `precision`; None if no peak is known.

    Causal attention counts in full, as in step_flops (Chowdhery et al. 2022, section 4.1).
    """
    device = find_device(device_name)
    peak = device.peak_flops_per_s.get(precision) if device else None
    return None if peak is None else flops_per_s / peak


SOFTMAX_FORWARD_FLOPS = 5
"""For each score: compare with the row's maximum, subtract it, exponentiate, add to the row's sum, divide by it."""
SOFTMAX_BACKWARD_FLOPS = 4
"""For each weight: multiply by its gradient, add to the row's sum, subtract the sum from the gradient, multiply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFlops:
    """FLOPs of the parts of attention, in all layers of one forward or backward pass."""

    scores: int
    softmax: int
    values: int


def attention_forward_flops(model: ModelConfig, batch_size: int) -> AttentionFlops:
    """FLOPs of naive attention in one forward pass, without the linear layers around it.

    Every operation of the softmax counts as one. Attention counts in full; scaling and masking are left out.
    """
    flops = forward_flops(model, batch_size)
    weights = model.num_layers * batch_size * model.num_heads * model.context_length**2
    softmax = SOFTMAX_FORWARD_FLOPS * weights
    return AttentionFlops(scores=flops[Component.SCORES], softmax=softmax, values=flops[Component.VALUES])


def attention_backward_flops(model: ModelConfig, batch_size: int) -> AttentionFlops:
    """FLOPs of attention in one backward pass, counted as in attention_forward_flops, with two matmuls for each one."""
    forward = attention_forward_flops(model, batch_size)
    softmax = forward.softmax // SOFTMAX_FORWARD_FLOPS * SOFTMAX_BACKWARD_FLOPS
    return AttentionFlops(scores=2 * forward.scores, softmax=softmax, values=2 * forward.values)


def parameter_bytes(config: RunConfig) -> int:
    """Bytes of the parameters in fp32 that a rank keeps; not valid for `cast_once`."""
    if config.parallel.shards_parameters:
        return FP32_BYTES * sum(kept_elements(config).values())
    return FP32_BYTES * count_parameters(config.model)


def updated_parameters(config: RunConfig) -> int:
    """Number of parameters that a rank's optimizer updates: all, or the share of the rank that has most."""
    if config.parallel.shards_parameters or config.shard_optimizer:
        return sum(updated_elements(config).values())
    return count_parameters(config.model)


FORWARD_FLOPS = 2
"""Forward FLOPs for each parameter and token: one multiply-add."""
TRAINING_FLOPS = 6
"""FLOPs of a step for each parameter and token: backward has two matmuls for each one of forward."""
SECONDS_PER_DAY = 86_400


def rule_of_thumb_flops(parameters: float, tokens: float) -> float:
    """6 N T: every parameter multiplies every token, and nothing else is counted."""
    return TRAINING_FLOPS * parameters * tokens


def training_days(*, parameters: float, tokens: float, peak_flops_per_s: float, count: int, mfu: float) -> float:
    """Days until `count` devices have trained on `tokens` tokens, each at the share `mfu` of its peak."""
    flops_per_s = count * peak_flops_per_s * mfu
    return rule_of_thumb_flops(parameters, tokens) / flops_per_s / SECONDS_PER_DAY
