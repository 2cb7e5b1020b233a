"""Parameters, bytes, FLOPs and MFU in closed form, from the configuration alone.

FLOPs are those of matmuls, in which a multiply-add counts as two. Norms, softmax, RoPE, the loss
and the optimizer are left out, as is usual (Chowdhery et al. 2022, appendix B), unless a name says
otherwise.
"""

from dataclasses import dataclass
from enum import StrEnum

from ..config import Arch, Attention, Mode, ModelConfig, Precision, RunConfig, SdpaBackend
from .hardware import DeviceSpec, find_device
from .shards import FP32_BYTES, factor_bytes, updated_elements

INT64_BYTES = 8


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
    """Trainable parameters of each part that has any. A table shared by embedding and head counts
    for the head.

    cs336: no biases, RMSNorm (d_model each), SwiGLU. gpt2: biases, LayerNorm (2 d_model each),
    learned positions, tied.
    """
    d_model, d_ff, num_layers = model.d_model, model.d_ff, model.num_layers
    rows_of_embedding, vectors_of_norm, biases = model.vocab_size, 1, 0
    if model.arch is Arch.GPT2:
        rows_of_embedding, vectors_of_norm, biases = model.context_length, 2, num_layers
    weights = _weights(model)
    return {
        Component.EMBEDDING: rows_of_embedding * d_model,
        Component.NORMS: (2 * num_layers + 1) * vectors_of_norm * d_model,
        Component.QKV: weights[Component.QKV] + biases * (d_model + 2 * model.kv_width),
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
        Component.QKV: num_layers * d_model * (d_model + 2 * model.kv_width),
        Component.OUTPUT: num_layers * d_model**2,
        Component.FFN: num_layers * ffn_matrices(model) * d_model * model.d_ff,
        Component.HEAD: model.vocab_size * d_model,
    }


def ffn_matrices(model: ModelConfig) -> int:
    """Number of weight matrices in one feed-forward layer: w1, w2 and, in SwiGLU, w3."""
    return 3 if model.arch is Arch.CS336 else 2


def forward_flops(
    model: ModelConfig, batch_size: int, *, causal: bool = False
) -> dict[Component, int]:
    """FLOPs of each part in one forward pass; the embedding is a lookup and has none.

    Attention counts in full, all T x T pairs, as in a matmul of whole matrices. With `causal` only
    the T (T + 1) / 2 pairs count in which the key is not after the query, the fewest that are
    needed.
    """
    context_length = model.context_length
    tokens = batch_size * context_length
    pairs = context_length**2
    if causal:
        pairs = context_length * (context_length + 1) // 2
    attention = 2 * model.num_layers * batch_size * pairs * model.d_model
    linear = {component: 2 * tokens * weights for component, weights in _weights(model).items()}
    return {
        Component.EMBEDDING: 0,
        Component.SCORES: attention,
        Component.VALUES: attention,
        **linear,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentFlops:
    """FLOPs of one part in one step of a run's mode."""

    component: Component
    forward: int
    backward: int
    """Twice forward, one matmul for the gradient of each factor; 0 in a mode without backward."""

    @property
    def step(self) -> int:
        """FLOPs of forward and backward together."""
        return self.forward + self.backward


def component_flops(config: RunConfig, *, causal: bool = False) -> tuple[ComponentFlops, ...]:
    """FLOPs of one step of this project's model, part by part; `causal` as in forward_flops.

    Left out: what backward computes again, between checkpoints or in fused attention, and the
    surplus of a padded vocabulary. Raises ValueError for a user's own model.
    """
    if config.model_factory is not None:
        raise ValueError(
            "FLOPs are known only of this project's model, got model_factory "
            f"{config.model_factory!r}"
        )
    sequences = config.accumulate_steps * config.batch_size
    forward = forward_flops(config.model, sequences, causal=causal)
    passes = 2 if config.mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN) else 0
    flops = []
    for part in Component:
        if part in forward:
            backward = passes * forward[part]
            flops.append(ComponentFlops(component=part, forward=forward[part], backward=backward))
    return tuple(flops)


def step_flops(config: RunConfig) -> int | None:
    """Model FLOPs of one step in the run's mode; None for a user's own model, whose matmuls are not
    known.

    Attention counts in full. Recomputation is left out: these are the model's FLOPs, not the
    hardware's.
    """
    if config.model_factory is not None:
        return None
    return sum(part.step for part in component_flops(config))


def mfu(flops_per_s: float, device_name: str, precision: Precision) -> float | None:
    """Model FLOPs/s over the data sheet's dense peak at `precision`; None if no peak is known.

    Causal attention counts in full, as in step_flops (Chowdhery et al. 2022, section 4.1).
    """
    device = find_device(device_name)
    peak = device.peak_flops_per_s.get(precision) if device else None
    return None if peak is None else flops_per_s / peak


SOFTMAX_FORWARD_FLOPS = 5
"""For each score: compare with the row's maximum, subtract it, exponentiate, add to the row's
sum, divide by it.
"""


def attention_forward_flops(model: ModelConfig, batch_size: int) -> dict[str, int]:
    """FLOPs of naive attention in one forward pass by its parts (scores, softmax, values), without
    the linear layers around it.

    Every operation of the softmax counts as one. Attention counts in full; scaling and masking are
    left out.
    """
    flops = forward_flops(model, batch_size)
    weights = model.num_layers * batch_size * model.num_heads * model.context_length**2
    return {
        "scores": flops[Component.SCORES],
        "softmax": SOFTMAX_FORWARD_FLOPS * weights,
        "values": flops[Component.VALUES],
    }


def updated_parameters(config: RunConfig) -> int:
    """Number of parameters that a rank's optimizer updates: all, or the share of the rank that
    has most.
    """
    if config.parallel.shards_parameters or config.shard_optimizer:
        return updated_elements(config)
    return count_parameters(config.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWork:
    """FLOPs of a part of the step, and the fewest bytes that it must move to and from memory."""

    name: str
    flops: int
    moved_bytes: int
    precision: Precision
    """Precision of the arithmetic, which decides the peak that applies."""

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, in FLOPs per byte."""
        return self.flops / self.moved_bytes


def is_fused(model: ModelConfig) -> bool:
    """Whether attention is one kernel, which does not write its scores to memory."""
    return model.attention is Attention.SDPA and model.sdpa_backend is not SdpaBackend.MATH


def forward_work(config: RunConfig) -> tuple[PartWork, ...]:
    """The matmuls of one forward pass of a micro-batch and the lookup of the embedding.

    Attention's FLOPs are those of causal pairs where a fused kernel computes it, which skips the
    others, else in full.

    Every factor and result of a matmul counts once, in the type of the run's matmuls. A factor that
    several matmuls of a part share, such as the input of queries, keys and values, counts once in
    all. The scores of fused attention move no bytes. `fp8` makes no difference here.
    """
    element_bytes = factor_bytes(config.precision)
    moved_bytes = {
        part: element_bytes * elements for part, elements in _matmul_elements(config).items()
    }
    moved_bytes[Component.EMBEDDING] = _embedding_bytes(config)
    flops = forward_flops(config.model, config.batch_size, causal=is_fused(config.model))
    return tuple(
        PartWork(
            name=part, flops=flops[part], moved_bytes=moved_bytes[part], precision=config.precision
        )
        for part in Component
        if part in flops
    )


def _matmul_elements(config: RunConfig) -> dict[Component, int]:
    """Elements of the factors, results and biases of all layers' matmuls of each part; a shared
    factor counts once.
    """
    model, layers = config.model, config.model.num_layers
    tokens = config.batch_size * model.context_length
    stream, hidden = layers * tokens * model.d_model, layers * tokens * model.d_ff
    keys = layers * tokens * model.kv_width
    scores = layers * tokens * model.num_heads * model.context_length
    if is_fused(model):
        scores = 0
    # besides weights and biases; the feed-forward layer reads the hidden activations once, in w2
    activations = {
        Component.QKV: 2 * stream + 2 * keys,
        Component.SCORES: stream + keys + scores,
        Component.VALUES: stream + keys + scores,
        Component.OUTPUT: 2 * stream,
        Component.FFN: 2 * stream + ffn_matrices(model) * hidden,
        Component.HEAD: tokens * (model.d_model + model.vocab_size),
    }
    parameters = parameters_by_component(model)
    return {part: elements + parameters.get(part, 0) for part, elements in activations.items()}


def _embedding_bytes(config: RunConfig) -> int:
    """Bytes of the token ids, the rows looked up (repeated ones too), gpt2's positions and the
    result, all in fp32.
    """
    model = config.model
    tokens = config.batch_size * model.context_length
    positions = model.context_length * model.d_model if model.arch is Arch.GPT2 else 0
    return INT64_BYTES * tokens + FP32_BYTES * (2 * tokens * model.d_model + positions)


ADAMW_FLOPS = 13
"""For each parameter: 3 for the first moment, 4 for the second, 2 for the denominator, 1 for decay,
3 for the update. Factors that all parameters share are left out.
"""
ADAMW_BYTES = 7 * FP32_BYTES
"""For each parameter: read the parameter, its gradient and both moments; write all but the
gradient.
"""


def optimizer_work(config: RunConfig) -> PartWork:
    """AdamW's update, of the parameters that a rank updates, in one pass over all tensors, as in
    a fused kernel.
    """
    parameters = updated_parameters(config)
    return PartWork(
        name="optimizer",
        flops=ADAMW_FLOPS * parameters,
        moved_bytes=ADAMW_BYTES * parameters,
        precision=Precision.FP32,
    )


def least_time_s(work: PartWork, device: DeviceSpec) -> float | None:
    """The least seconds in which the device can do the work: the longer of its FLOPs at the data
    sheet's peak and its bytes at the data sheet's bandwidth. None if no peak is known.
    """
    peak = device.peak_flops_per_s.get(work.precision)
    if peak is None:
        return None
    return max(work.flops / peak, work.moved_bytes / device.memory_bandwidth_bytes_per_s)
