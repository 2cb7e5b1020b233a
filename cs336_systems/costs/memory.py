"""Peak memory of a training step, predicted from the configuration alone, without a GPU and without
torch.

The step's tape lists the tensors that it makes and frees, each with its formula, and a simulated
caching allocator places them. So the prediction includes what PyTorch counts: rounding, remainders
of blocks that it does not split, segments. No constant is fitted; assumptions are stated where they
are used.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from ..config import (
    PACKED_MULTIPLE,
    Attention,
    Device,
    Mode,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    RunConfig,
    SdpaBackend,
)
from .allocator import ROUND_BYTES, CachingAllocator, round_up
from .tape import Category, Tape, TensorSpec
from .traces import as_costed, has_tape, tape_of, why_untraced

MAX_LAYERS = 1000
"""Most layers that are simulated; more would take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors of one kind that are allocated at one moment."""

    category: Category
    label: str
    formula: str
    """Bytes of one tensor, as a product of named axes and the element size."""
    count: int
    size_bytes: int
    """Bytes of all the tensors, each rounded up to 512 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment of a step with the most memory allocated."""

    phase: Phase
    allocated_bytes: int
    """The value of torch.cuda.max_memory_allocated."""
    parts: tuple[Part, ...]
    """All tensors allocated at that moment, by category and size; their sum is
    `allocated_bytes`.
    """

    def bytes_of(self, category: Category) -> int:
        """Bytes of one category at the peak."""
        return sum(part.size_bytes for part in self.parts if part.category is category)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Counters of PyTorch's allocator, predicted for one configuration, in bytes."""

    peak: Peak
    """Peak of a step in the steady state."""
    first_step_peak: Peak
    """Peak of the first step, at whose end the optimizer makes its state."""
    reserved_bytes: int | None
    """Segments held at the end of the last step: torch.cuda.max_memory_reserved, unless some are
    released; None where these grow (`expandable_segments`).
    """
    start_bytes: int
    """Allocated when a step begins."""
    after_bytes: Mapping[Phase, int]
    """Allocated at the end of each phase. The optimizer's phase includes dropping the gradients."""
    compiler: str = ""
    """Version of PyTorch whose torch.compile has compiled the step; empty for an eager one."""


def predict_memory(config: RunConfig) -> MemoryPrediction | None:
    """Predict the memory of a CUDA run.

    None for what is not predicted: a user's own model that nobody has traced (`prepare`), compiled
    models (`compiled.py`) and other shortcuts (cast_once, ...) but for all that --fast chooses,
    flash and cuDNN attention without half precision, models of more than MAX_LAYERS. The device is
    assumed to be a Hopper GPU (cuBLAS's workspace is smaller elsewhere), whatever the
    configuration's is; there `auto` takes flash or cuDNN in half precision and the efficient kernel
    in fp32. Left out: scalars of GradScaler, buffers inside of kernels that trace.py does not name,
    a data loader's batch in flight.
    """
    if not (is_predictable(config) or is_predictable_fast(config)):
        return None
    return _predict(as_costed(config))


@lru_cache(maxsize=4096)
def _predict(config: RunConfig) -> MemoryPrediction:
    """The same, of a step that is known to be predicted."""
    prediction = memory_of(tape_of(config), is_graphed=config.cuda_graph)
    return replace(prediction, reserved_bytes=None) if config.expandable_segments else prediction


def memory_of(tape: Tape, *, is_graphed: bool = False) -> MemoryPrediction:
    """Replay the allocations of a traced step, and read allocated memory at its peak and after each
    phase. `is_graphed` says whether CUDA graphs of the step are captured.
    """
    allocator = placed(tape, is_graphed=is_graphed)
    sizes, levels = allocator.sizes_bytes, allocated_levels(tape, allocator.sizes_bytes)
    first, *_, last = tape.steps
    return MemoryPrediction(
        peak=peak_of(tape, sizes, levels, last),
        first_step_peak=peak_of(tape, sizes, levels, first),
        reserved_bytes=allocator.reserved_bytes,
        start_bytes=levels[last[0][1]],
        after_bytes={phase: levels[end] for (phase, _, _), (_, end, _) in pairwise(last)},
        compiler=tape.compiler,
    )


def predicted_peak_bytes(config: RunConfig) -> int | None:
    """torch.cuda.max_memory_allocated of the measured steps; None if that is not predicted."""
    prediction = predict_memory(config) if config.device is Device.CUDA else None
    if prediction is None:
        return None
    peaks = []
    if config.warmup_steps == 0:
        peaks.append(prediction.first_step_peak)
    if config.warmup_steps + config.measured_steps > 1:
        peaks.append(prediction.peak)
    return max(peak.allocated_bytes for peak in peaks)


def allocated_levels(tape: Tape, sizes_bytes: Sequence[int]) -> list[int]:
    """Bytes allocated before the first event and after each, from the bytes of each tensor."""
    # ~handle counts from the end
    changes = [*sizes_bytes, *(-size for size in reversed(sizes_bytes))]
    return list(accumulate(map(changes.__getitem__, tape.events), initial=0))


def residual_stream_bytes(config: RunConfig) -> int:
    """Bytes of one tensor of the residual stream: batch x T x d_model x 4, fp32 under autocast
    too.
    """
    return config.batch_size * config.model.context_length * config.model.d_model * 4


def is_predictable(config: RunConfig) -> bool:
    """Whether the tensors of the eager step, and so its memory, are known from its
    configuration.
    """
    return config == config.without_shortcuts and not _why_not_eager(config) and has_tape(config)


def why_not_predicted(config: RunConfig) -> str:
    """Why the memory of a step that is not compiled as a whole is not predicted; empty if it is."""
    if config == config.without_shortcuts:
        reason = _why_not_eager(config)
    elif not is_fast_step(config):
        reason = "of steps with shortcuts only the whole of --fast is traced"
    else:
        reason = ""
    if reason or has_tape(config):
        return reason
    return why_untraced(config) or "the step cannot be traced here"


def _why_not_eager(config: RunConfig) -> str:
    """Which setting of an eager step is the reason that it is not traced; empty without one."""
    half = config.precision in (Precision.BF16, Precision.FP16)
    if config.model.sdpa_backend in (SdpaBackend.FLASH, SdpaBackend.CUDNN) and not half:
        backend = config.model.sdpa_backend
        return f"{backend} attention computes in bf16 and fp16, and not in {config.precision}"
    if config.parallel is Parallel.OWN:
        return "the ranks share the step in your own way"
    if config.own_optimizer is not None:
        return "the optimizer is your own"
    if config.model.num_layers > MAX_LAYERS:
        return f"models of at most {MAX_LAYERS} layers are traced"
    return ""


def is_fast_step(config: RunConfig) -> bool:
    """Whether the step has all kernels that `--fast` chooses; then these are known, with
    checkpoints, with the loss in parts and outside of CUDA graphs too.
    """
    model = config.model
    settings = (
        config.fused_blocks,
        config.fused_loss,
        config.mode is not Mode.TRAIN or config.optimizer is OptimizerKind.FUSED,
        model.attention is Attention.SDPA and model.sdpa_backend is not SdpaBackend.MATH,
        model.d_model % PACKED_MULTIPLE == 0 and model.d_ff % PACKED_MULTIPLE == 0,
    )
    return all(settings) and not config.update_in_backward


def is_predictable_fast(config: RunConfig) -> bool:
    """The same of a step in the fastest known way: its tape has what compiled blocks keep, as these
    are fused by hand, and what ranks gather and receive.
    """
    return config.model_factory is None and is_fast_step(config) and has_tape(config)


def placed(
    tape: Tape, capacity_bytes: float = inf, *, is_graphed: bool = False
) -> CachingAllocator:
    """The simulated allocator after it has replayed the tape; raises OutOfMemoryError if a tensor
    does not fit.

    With CUDA graphs the steps before them run on a stream of their own, whose blocks no other
    stream gets; then what is free is released, and the graphs have a pool to themselves
    (model/fast/step_graph.py).
    """
    allocator = CachingAllocator(capacity_bytes)
    requests = [(spec.size_bytes, spec.stream) for spec in tape.specs]
    if not is_graphed:
        allocator.replay(tape.events, tape.tensors, requests)
        return allocator
    _, first, _ = tape.steps[0][0]
    _, last, _ = tape.steps[-1][0]
    allocator.replay(tape.events[:first], tape.tensors, requests)
    allocator.replay(tape.events[first:last], tape.tensors, requests, "before the graphs ")
    allocator.release_free_segments()
    allocator.replay(tape.events[last:], tape.tensors, requests, "graphs ")
    return allocator


def peak_of(
    tape: Tape,
    sizes: Sequence[int],
    levels: Sequence[int],
    phases: Sequence[tuple[Phase, int, int]],
) -> Peak:
    """The first maximum of a step, from its phases and the events before them, and the bytes of
    each tensor's block.
    """
    (_, start, _), *_, (_, end, _) = phases
    peak_bytes = max(levels[start : end + 1])
    when = levels.index(peak_bytes, start)
    done = tape.events[:when]
    num_made = max(done, default=-1) + 1
    freed = {~event for event in done if event < 0}
    live = [handle for handle in range(num_made) if handle not in freed]
    parts = _parts(Counter(map(tape.spec, live)))
    wanted = [rounded_bytes(spec.size_bytes) for spec in tape.specs]
    rests = [sizes[handle] - wanted[tape.tensors[handle]] for handle in live]
    unsplit = Part(
        category=Category.UNSPLIT,
        label="what the allocator does not split off",
        formula="up to 1 MiB a block",
        count=sum(rest > 0 for rest in rests),
        size_bytes=sum(rests),
    )
    phase = [phase for phase, begin, _ in phases if begin == start or begin < when][-1]
    return Peak(phase=phase, allocated_bytes=peak_bytes, parts=(*parts, unsplit))


def _parts(specs: Counter[TensorSpec]) -> tuple[Part, ...]:
    """The tensors at the peak, grouped by kind and ordered by category, the largest first in
    each.
    """
    order = list(Category)
    parts = [
        Part(
            category=spec.category,
            label=spec.label,
            formula=spec.formula,
            count=count,
            size_bytes=count * rounded_bytes(spec.size_bytes),
        )
        for spec, count in specs.items()
    ]
    parts.sort(key=lambda part: (order.index(part.category), -part.size_bytes, part.label))
    return tuple(parts)


def rounded_bytes(size_bytes: int) -> int:
    """Bytes of a tensor of this size, rounded up as PyTorch's allocator does it."""
    return round_up(size_bytes, ROUND_BYTES)
