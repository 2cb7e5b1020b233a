"""Parameters, bytes, FLOPs and MFU in closed form, from the configuration alone.

FLOPs are those of matmuls, in which a multiply-add counts as two. Norms, softmax, RoPE, the loss and the optimizer are
left out, as is usual (Chowdhery et al. 2022, appendix B), unless a name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cs336_systems.config import Arch, Attention, Mode, ModelConfig, Precision, RunConfig, SdpaBackend
from cs336_systems.costs.hardware import DeviceSpec, find_device
from cs336_systems.costs.shards import FP32_BYTES, HALF_BYTES, kept_elements, updated_elements

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


IN_BLOCKS = (Component.QKV, Component.SCORES, Component.VALUES, Component.OUTPUT, Component.FFN)
"""Parts of the blocks that are matmuls."""
FP8_LAYERS = (Component.QKV, Component.OUTPUT, Component.FFN)
"""Parts whose matmuls `fp8` computes in fp8."""


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
    recomputed: int
    """FLOPs of forward's matmuls that backward computes again."""

    @property
    def step(self) -> int:
        """The model's FLOPs, without recomputation."""
        return self.forward + self.backward


def component_flops(config: RunConfig, *, causal: bool = False) -> tuple[ComponentFlops, ...]:
    """FLOPs of one step of this project's model, part by part; `causal` as in forward_flops.

    Recomputation of an eager step is included: the blocks between checkpoints, and the scores in the backward of fused
    attention. Left out: what a compiler chooses to recompute, and the surplus of a padded vocabulary. Raises ValueError
    for a user's own model.
    """
    if config.model_factory is not None:
        raise ValueError(f"FLOPs are known only of this project's model, got model_factory {config.model_factory!r}")
    forward = forward_flops(config.model, config.batch_size, causal=causal)
    passes = 2 if _has_backward(config) else 0
    again = _recomputed(config, forward) if passes else {}
    return tuple(
        ComponentFlops(
            component=part,
            forward=forward[part],
            backward=passes * forward[part],
            recomputed=again.get(part, 0),
        )
        for part in Component
        if part in forward
    )


def _recomputed(config: RunConfig, forward: Mapping[Component, int]) -> dict[Component, int]:
    model = config.model
    again: dict[Component, int] = {}
    if config.checkpoint_blocks:
        again = {part: forward[part] for part in _recomputed_parts(config)}
        matmuls = model.num_layers * _ffn_matrices(model)
        spared = _spared_matmuls(config) + _kept(config) * (_ffn_matrices(model) - 1)
        again[Component.FFN] -= spared * forward[Component.FFN] // matmuls
    if _is_fused(model):
        again[Component.SCORES] = again.get(Component.SCORES, 0) + forward[Component.SCORES]
    return again


def _recomputed_parts(config: RunConfig) -> tuple[Component, ...]:
    """The parts that backward recomputes between checkpoints; with selective ones, linear layers except q, k and v.

    In fp8 selective checkpoints recompute q, k and v too, because a layer saves its factors only after the matmul.
    """
    if not config.checkpoint_blocks:
        return ()
    if not config.selective_checkpoints:
        return IN_BLOCKS
    return FP8_LAYERS if config.fp8 else (Component.OUTPUT, Component.FFN)


def _spared_matmuls(config: RunConfig) -> int:
    """Number of matmuls not recomputed: the last one of each group of blocks, whose result backward does not need.

    In fp8 none is spared, since a layer saves its factors only after the matmul.
    """
    return 0 if config.fp8 else -(-config.model.num_layers // config.checkpoint_blocks)


def _kept(config: RunConfig) -> int:
    """Number of blocks whose first feed-forward matmul is not recomputed either."""
    return 0 if config.fp8 else config.keep_hidden


def _has_backward(config: RunConfig) -> bool:
    return config.mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN)


def _is_fused(model: ModelConfig) -> bool:
    """Whether attention is one kernel, which does not write its scores to memory."""
    return model.attention is Attention.SDPA and model.sdpa_backend is not SdpaBackend.MATH


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


def moment_bytes(config: RunConfig) -> int:
    """Bytes of each of AdamW's two moments of a parameter."""
    return HALF_BYTES if config.bf16_moments else FP32_BYTES


def only_copied(model: ModelConfig) -> int:
    """Parameters of which `cast_once` reads the copies only: all but norms, embedding, and a head tied to it."""
    parts = parameters_by_component(model)
    read = {Component.EMBEDDING, Component.NORMS, *([Component.HEAD] if model.arch is Arch.GPT2 else [])}
    return sum(elements for part, elements in parts.items() if part not in read)


def split_parameters(config: RunConfig) -> int:
    """Parameters with split masters."""
    return only_copied(config.model) if config.split_masters else 0


def saved_by_moments(config: RunConfig) -> int:
    """Bytes per parameter that AdamW saves by reading and writing both moments in bf16 instead of fp32."""
    return 2 * 2 * (FP32_BYTES - moment_bytes(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of parameters, gradients, optimizer state and copies, without the allocator's rounding; 0 if not needed.

    Sharded tensors count with the share of the rank that keeps most.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    """AdamW's two moments, without step counts."""
    weight_copies: int
    """Autocast's half-precision copies of the weights and biases of all linear layers; 0 if these are sharded."""


def state_bytes(config: RunConfig) -> StateBytes:
    """Parameters, gradients and moments in fp32, and autocast's copies; not valid for `cast_once`."""
    parameters, updated = count_parameters(config.model), updated_parameters(config)
    if config.parallel.shards_parameters:
        parameters = sum(kept_elements(config).values())
    by_part = parameters_by_component(config.model)
    linear = sum(by_part[part] for part in _weights(config.model))
    has_copies = _is_half(config) and not config.parallel.shards_parameters
    return StateBytes(
        parameters=FP32_BYTES * parameters,
        gradients=FP32_BYTES * parameters if _has_backward(config) else 0,
        optimizer_state=2 * FP32_BYTES * updated if config.mode is Mode.TRAIN else 0,
        weight_copies=HALF_BYTES * linear if has_copies else 0,
    )


def updated_parameters(config: RunConfig) -> int:
    """Number of parameters that a rank's optimizer updates: all, or the share of the rank that has most."""
    if config.parallel.shards_parameters or config.shard_optimizer:
        return sum(updated_elements(config).values())
    return count_parameters(config.model)


def _is_half(config: RunConfig) -> bool:
    return config.precision in (Precision.BF16, Precision.FP16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
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


def forward_work(config: RunConfig) -> tuple[Work, ...]:
    """The matmuls of one forward pass and the lookup of the embedding.

    Attention's FLOPs are those of causal pairs where a fused kernel computes it, which skips the others, else in full.

    Every factor and result of a matmul counts once, in the type of the run's matmuls. A factor that several matmuls of
    a part share, such as the input of queries, keys and values, counts once in all. The scores of fused attention move
    no bytes. `fp8` makes no difference here.
    """
    element_bytes = HALF_BYTES if _is_half(config) else FP32_BYTES
    elements, moved_bytes = _matmul_elements(config), {Component.EMBEDDING: _embedding_bytes(config)}
    moved_bytes |= {part: found.forward_bytes(element_bytes, element_bytes) for part, found in elements.items()}
    flops = forward_flops(config.model, config.batch_size, causal=_is_fused(config.model))
    return tuple(
        Work(name=part, flops=flops[part], moved_bytes=moved_bytes[part], precision=config.precision)
        for part in Component
        if part in flops
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MatmulElements:
    """Elements of the matmuls of one part of the model in one forward pass, in all layers."""

    factors: int
    """Both factors of each matmul; a shared factor counts once."""
    results: int
    biases: int = 0
    """Biases are read in the type of the results."""

    def forward_bytes(self, factor_bytes: int, result_bytes: int) -> int:
        return factor_bytes * self.factors + result_bytes * (self.results + self.biases)


def _matmul_elements(config: RunConfig) -> dict[Component, _MatmulElements]:
    model, layers = config.model, config.model.num_layers
    weights, parameters = _weights(model), parameters_by_component(model)
    biases = {part: parameters[part] - weights[part] for part in weights}
    tokens = config.batch_size * model.context_length
    stream, hidden = layers * tokens * model.d_model, layers * tokens * model.d_ff
    scores = 0 if _is_fused(model) else layers * tokens * model.num_heads * model.context_length
    # (factors besides weights, results). The feed-forward layer reads the hidden activations once, in w2.
    activations = {
        Component.QKV: (stream, 3 * stream),
        Component.SCORES: (2 * stream, scores),
        Component.VALUES: (stream + scores, stream),
        Component.OUTPUT: (stream, stream),
        Component.FFN: (stream + hidden, (_ffn_matrices(model) - 1) * hidden + stream),
        Component.HEAD: (tokens * model.d_model, tokens * model.vocab_size),
    }
    return {
        part: _MatmulElements(factors=read + weights.get(part, 0), results=made, biases=biases.get(part, 0))
        for part, (read, made) in activations.items()
    }


def _embedding_bytes(config: RunConfig) -> int:
    """Bytes of the token ids, the rows looked up (repeated ones too), gpt2's positions and the result, all in fp32."""
    model = config.model
    tokens = config.batch_size * model.context_length
    positions = model.context_length * model.d_model if model.arch is Arch.GPT2 else 0
    return INT64_BYTES * tokens + FP32_BYTES * (2 * tokens * model.d_model + positions)


ADAMW_FLOPS = 13
"""For each parameter: 3 for the first moment, 4 for the second, 2 for the denominator, 1 for decay, 3 for the update.
Factors that all parameters share are left out."""
ADAMW_BYTES = 7 * FP32_BYTES
"""For each parameter: read the parameter, its gradient and both moments; write all but the gradient."""


def optimizer_work(config: RunConfig, parameters: int | None = None) -> Work:
    """AdamW's update in one pass over all tensors, as in a fused kernel; or over so many parameters."""
    parameters = count_parameters(config.model) if parameters is None else parameters
    return Work(
        name="optimizer",
        flops=ADAMW_FLOPS * parameters,
        moved_bytes=(ADAMW_BYTES - saved_by_moments(config)) * parameters - HALF_BYTES * split_parameters(config),
        precision=Precision.FP32,
    )


def ridge_point(device: DeviceSpec, precision: Precision) -> float | None:
    """FLOPs per byte below which memory bandwidth limits the time; None if no peak is known."""
    peak = device.peak_flops_per_s.get(precision)
    return None if peak is None else peak / device.memory_bandwidth_bytes_per_s


def least_time_s(work: Work, device: DeviceSpec) -> float | None:
    """The longer of the times at the data sheet's peak and at its bandwidth; None if no peak is known."""
    peak = device.peak_flops_per_s.get(work.precision)
    if peak is None:
        return None
    return max(work.flops / peak, work.moved_bytes / device.memory_bandwidth_bytes_per_s)


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
