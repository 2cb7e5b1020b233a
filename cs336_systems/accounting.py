"""Parameters, FLOPs and MFU in closed form, from the configuration alone."""

from dataclasses import dataclass

from cs336_systems.config import Arch, Mode, ModelConfig, Precision, RunConfig
from cs336_systems.hardware import find_device


def count_parameters(model: ModelConfig) -> int:
    """Trainable parameters of the whole model; tied embeddings count once.

    cs336: no biases, RMSNorm (d_model each), SwiGLU. gpt2: biases, LayerNorm (2 d_model each), learned positions, tied.
    """
    d_model, d_ff, num_layers = model.d_model, model.d_ff, model.num_layers
    vocabulary = model.vocab_size * d_model
    matrices = num_layers * _matrix_parameters_per_block(model)
    if model.arch is Arch.CS336:
        norms = (2 * num_layers + 1) * d_model
        return 2 * vocabulary + matrices + norms
    biases = num_layers * (4 * d_model + d_ff + d_model)
    norms = (2 * num_layers + 1) * 2 * d_model
    positions = model.context_length * d_model
    return vocabulary + positions + matrices + biases + norms


def _matrix_parameters_per_block(model: ModelConfig) -> int:
    """Weights of one block's linear layers: q, k, v, output; w1, w2 and, in SwiGLU, w3. Biases are left out."""
    ffn_matrices = 3 if model.arch is Arch.CS336 else 2
    return 4 * model.d_model**2 + ffn_matrices * model.d_model * model.d_ff


def forward_matmul_flops(model: ModelConfig, batch_size: int) -> int:
    """FLOPs of the matrix products in one forward pass.

    A multiply-add counts as 2 FLOPs. Causal attention counts as full: the kernel computes the masked half too.
    Norms, softmax, RoPE and the embedding lookup are left out (Chowdhery et al. 2022, appendix B).
    """
    tokens = batch_size * model.context_length
    linears = model.num_layers * _matrix_parameters_per_block(model) + model.vocab_size * model.d_model
    scores_and_values = model.num_layers * 2 * model.context_length * model.d_model
    return 2 * tokens * (linears + scores_and_values)


SOFTMAX_FORWARD_FLOPS = 5
"""For each score: compare with the largest of its row, subtract that, exponentiate, add to the sum, divide by it."""
SOFTMAX_BACKWARD_FLOPS = 4
"""For each weight: times its gradient, add to the row's sum, subtract that from the gradient, times the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFlops:
    """FLOPs of the parts of attention, in all layers of one pass."""

    scores: int
    softmax: int
    values: int


def attention_forward_flops(model: ModelConfig, batch_size: int) -> AttentionFlops:
    """FLOPs of attention in one forward pass, written out, without the linear layers around it.

    A multiply-add counts as 2 FLOPs, every operation of the softmax as one. Causal attention counts as full, as in
    forward_matmul_flops; scaling and masking the scores are left out.
    """
    weights = model.num_layers * batch_size * model.num_heads * model.context_length**2
    product = 2 * weights * model.d_head
    return AttentionFlops(scores=product, softmax=SOFTMAX_FORWARD_FLOPS * weights, values=product)


def attention_backward_flops(model: ModelConfig, batch_size: int) -> AttentionFlops:
    """FLOPs of attention in one backward pass, counted as in attention_forward_flops: the products twice."""
    forward = attention_forward_flops(model, batch_size)
    softmax = forward.softmax // SOFTMAX_FORWARD_FLOPS * SOFTMAX_BACKWARD_FLOPS
    return AttentionFlops(scores=2 * forward.scores, softmax=softmax, values=2 * forward.values)


def step_flops(config: RunConfig) -> int | None:
    """Model FLOPs of one step in the run's mode, or None for the user's own model, whose products are not known.

    Backward is twice forward: one product for the gradient of each factor. The loss, the optimizer and anything
    computed again (by a compiler or a fused kernel) are left out: these are the model's FLOPs, not the hardware's.
    """
    if config.model_factory is not None:
        return None
    has_backward = config.mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN)
    return (3 if has_backward else 1) * forward_matmul_flops(config.model, config.batch_size)


def mfu(flops_per_s: float, device_name: str, precision: Precision) -> float | None:
    """Model FLOPs/s over the promised dense peak at `precision`, or None where no peak is known.

    As step_flops counts causal attention as full, so does this (Chowdhery et al. 2022, section 4.1).
    """
    device = find_device(device_name)
    peak = device.peak_flops_per_s.get(precision) if device else None
    return None if peak is None else flops_per_s / peak
