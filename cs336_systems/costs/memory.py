"""Peak memory of a training step, predicted from the configuration alone, without a GPU and without
torch.

The step's tape lists the tensors that it makes and frees, each with its formula, and a simulated
caching allocator places them. So the prediction includes what PyTorch counts: rounding, remainders
of blocks that it does not split, segments. No constant is fitted; assumptions are stated where they
are used.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import invert
from sys import maxsize

from ..config import Attention, Device, Mode, Parallel, Phase, Precision, RunConfig, SdpaBackend
from .accounting import count_parameters
from .allocator import ROUND_BYTES, CachingAllocator, OutOfMemoryError, round_up
from .shards import FP32_BYTES, HALF_BYTES, REST, is_block, kept_elements, units
from .tape import Category, Tape, TensorSpec, interpolated
from .traces import as_costed, has_tape, tape_of, trace_missing

CUDA_CONTEXT_BYTES = 768 * 2**20
"""Memory of the driver and of the kernels of PyTorch and cuBLAS: 0.72 GiB on an H200 that ran
out of memory.
"""
NCCL_BYTES = 478 * 2**20
"""Memory of NCCL on a rank, once it has called each kind of collective: measured on two H200."""
MAX_GROWTH = 8
"""Most by which a step is larger than the largest that was traced, when the search for the
largest goes on.
"""
INTERPOLATED = 12
"""Steps that are traced before the search halves what is left, as the model's tensors do not
grow evenly.
"""
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
    reserved_bytes: int
    """Segments held at the end of the last step: torch.cuda.max_memory_reserved, unless some are
    released.
    """
    start_bytes: int
    """Allocated when a step begins."""
    after_bytes: Mapping[Phase, int]
    """Allocated at the end of each phase. The optimizer's phase includes dropping the gradients."""


def predict_memory(config: RunConfig) -> MemoryPrediction | None:
    """Predict the memory of a CUDA run.

    None for what is not predicted: a user's own model that nobody has traced (`prepare`), compiled
    models and other shortcuts (cast_once, ...), flash and cuDNN attention without half precision,
    models of more than MAX_LAYERS. The device is assumed to be a Hopper GPU (cuBLAS's workspace is
    smaller elsewhere), whatever the configuration's is; there `auto` takes flash or cuDNN in half
    precision and the efficient kernel in fp32. Left out: scalars of GradScaler, buffers inside of
    kernels that trace.py does not name, a data loader's batch in flight.
    """
    if not is_predictable(config):
        return None
    return _predict(as_costed(config))


@lru_cache(maxsize=4096)
def _predict(config: RunConfig) -> MemoryPrediction:
    tape = tape_of(config)
    allocator = _placed(tape)
    sizes, levels = allocator.sizes_bytes, _levels(tape, allocator.sizes_bytes)
    first = [(phase, begin) for phase, begin, _ in tape.steps[0]]
    last = [(phase, begin) for phase, begin, _ in tape.steps[-1]]
    return MemoryPrediction(
        peak=_peak(tape, sizes, levels, last),
        first_step_peak=_peak(tape, sizes, levels, first),
        reserved_bytes=allocator.reserved_bytes,
        start_bytes=levels[last[0][1]],
        after_bytes={phase: levels[end] for (phase, _), (_, end) in pairwise(last)},
    )


def predicted_peak_bytes(config: RunConfig) -> int | None:
    """torch.cuda.max_memory_allocated of the measured steps; None if that is not predicted."""
    prediction = predict_memory(config) if config.device is Device.CUDA else None
    if prediction is None:
        return None
    first_bytes = prediction.first_step_peak.allocated_bytes
    later_bytes = prediction.peak.allocated_bytes
    if config.warmup_steps:
        return later_bytes
    return first_bytes if config.measured_steps == 1 else max(first_bytes, later_bytes)


def host_bytes(config: RunConfig, memory_bytes: int) -> int | None:
    """Memory that all ranks of a run on the CPU need at least; None for a run on a GPU and for a
    user's own model.

    The CPU holds the same tensors as a GPU does. Its allocator, its kernels' own buffers and
    PyTorch itself, all left out, took 0 to 20 % more where it was measured. The step is traced for
    it only where bounds do not tell whether it fits `memory_bytes`; else, and for a step with
    shortcuts, it is the lower one.
    """
    if config.device is not Device.CPU or config.model_factory is not None:
        return None
    prediction = predict_memory(config) if needs_tape(config, memory_bytes) else None
    if prediction is None:
        return _least_bytes(config)
    return config.ranks * prediction.peak.allocated_bytes


def needs_tape(config: RunConfig, memory_bytes: int) -> bool:
    """Whether it takes a tape to tell if a run on the CPU fits."""
    is_known = config.device is Device.CPU and config.model_factory is None
    return is_known and _least_bytes(config) <= memory_bytes < _most_bytes(config)


def _least_bytes(config: RunConfig) -> int:
    """Parameters, gradients and AdamW's moments, of shortcuts the parameters alone; and the scores
    of attention.

    The scores are those of attention that is written out, in two bytes each. Those of every block
    are there at once where backward needs them, unless checkpoints drop them, else those of one.
    """
    model, copies = config.model, 1.0
    has_backward = config.mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN)
    if has_backward and config == config.without_shortcuts and config.own_ddp is None:
        copies = 2.0
    if copies == 2.0 and config.mode is Mode.TRAIN and config.own_optimizer is None:
        copies += 2 / (config.ranks if config.shard_optimizer else 1)
    blocks = model.num_layers if has_backward and not config.checkpoint_blocks else 1
    scores = blocks * config.batch_size * model.num_heads * model.context_length**2
    score_bytes = scores * HALF_BYTES if model.attention is Attention.NAIVE else 0
    # all ranks together have each sharded parameter once, and else whole copies
    holders = 1 if config.parallel.shards_parameters else config.ranks
    weight_bytes = int(copies * FP32_BYTES * count_parameters(model))
    return holders * weight_bytes + config.ranks * score_bytes


def _most_bytes(config: RunConfig) -> int:
    """More than all tensors of a step together take, in fp32 and in half precision, whatever its
    settings.
    """
    model = config.model
    of_token = model.num_layers * (40 * model.d_model + 10 * model.d_ff) + 6 * model.vocab_size
    if model.attention is Attention.NAIVE:
        of_token += 8 * model.num_layers * model.num_heads * model.context_length
    tokens = config.batch_size * model.context_length
    elements = 2**26 + 8 * count_parameters(model) + tokens * of_token  # the first for workspaces
    return config.ranks * FP32_BYTES * elements


def outside_bytes(config: RunConfig) -> int:
    """Memory that PyTorch's allocator cannot have: that of the CUDA context, and of NCCL on
    several ranks.
    """
    return CUDA_CONTEXT_BYTES + (NCCL_BYTES if config.is_shared else 0)


def fits(config: RunConfig, memory_bytes: int) -> bool | None:
    """Whether the steps fit an otherwise empty device of `memory_bytes`; None if that is not
    predicted.

    The allocator is simulated on the memory that the CUDA context, and NCCL on several ranks,
    leave. As PyTorch's does, it releases cached segments before it fails. So the answer includes
    fragmentation and needs no margin.
    """
    if not is_predictable(config):
        return None
    return _fits(tape_of(config), memory_bytes - outside_bytes(config))


def _fits(tape: Tape, room_bytes: int) -> bool:
    try:
        _placed(tape, room_bytes)
    except OutOfMemoryError:
        return False
    return True


def largest_batch(config: RunConfig, memory_bytes: int) -> int | None:
    """The largest batch size that `fits`; 0 if not even one sequence does, None if that is not
    predicted.
    """
    return _largest(lambda size: replace(config, batch_size=size), config.batch_size, memory_bytes)


def largest_context(config: RunConfig, memory_bytes: int) -> int | None:
    """The longest context that `fits`, at the configuration's batch size; 0 and None as in
    largest_batch.

    A user's own model may take no longer one: then `why_untraced` says why of the next.
    """
    model = config.model
    return _largest(
        lambda length: replace(config, model=replace(model, context_length=length)),
        model.context_length,
        memory_bytes,
    )


def _largest(config_of: Callable[[int], RunConfig], asked: int, memory_bytes: int) -> int | None:
    """The largest number whose configuration can be traced and fits, assuming that all smaller
    numbers fit.
    """
    if not is_predictable(config_of(asked)):
        return None
    room_bytes = memory_bytes - outside_bytes(config_of(asked))
    if tape_of(config_of(asked)).names.axes:
        return _last_that_fits(lambda number: tape_of(config_of(number)), room_bytes)
    return _last_traced(config_of, asked, room_bytes)


def _last_that_fits(tape_at: Callable[[int], Tape], room_bytes: int) -> int:
    """The last number whose tape fits; `tape_at` raises ValueError for numbers that are too large.

    The search begins where the tensors alone no longer fit, which is found without the slower
    allocator.
    """
    if not _fits(tape_at(1), room_bytes):
        return 0

    def have_room(number: int) -> bool:
        with suppress(ValueError):
            return _tensor_bytes(tape_at(number)) <= room_bytes
        return False

    below = 1
    while have_room(2 * below):
        below *= 2
    above = _last_before(below, 2 * below, have_room) + 1
    below, step = above - 1, 1
    while not _fits(tape_at(below), room_bytes):
        above, below, step = below, max(1, below - step), 2 * step
    return _last_before(below, above, lambda number: _fits(tape_at(number), room_bytes))


def _last_traced(config_of: Callable[[int], RunConfig], asked: int, room_bytes: int) -> int:
    """The last number whose step is traced and fits, where the next one is traced too, and does not
    fit or fails.

    What is between the numbers that were traced only says which number to trace next.
    """
    tapes: dict[int, Tape] = {}
    below, above, number = 0, maxsize, asked
    while above - below > 1:
        above_before, above = above, number
        with suppress(ValueError):  # of a step that no configuration may have
            trace_missing([config_of(number)])
            if is_predictable(config_of(number)):
                tapes[number] = tape_of(config_of(number))
                if _fits(tapes[number], room_bytes):
                    below, above = number, above_before
        number = _next_to_trace(tapes, below, above, room_bytes)
    return below


def _next_to_trace(tapes: Mapping[int, Tape], below: int, above: int, room_bytes: int) -> int:
    """A number between `below`, which fits, and `above`, which does not."""
    middle = min(above - 1, 2 * max(below, 1))
    # the longest context that a model takes is mostly a round number
    while (rounder := middle & (middle - 1)) > below:
        middle = rounder
    recent = dict([*tapes.items()][-3:])
    is_alike = len({len(tape.tensors) for tape in recent.values()}) == 1
    if not is_alike or len(recent) < 2 or len(tapes) > INTERPOLATED:
        return middle

    def tape_at(number: int) -> Tape:
        if number > MAX_GROWTH * max(recent):
            raise ValueError("too far from the traced ones")
        return interpolated(recent, number)

    estimate = _last_that_fits(tape_at, room_bytes)
    # the last that fits is known when the one after it was traced too
    return max(estimate, below + 1) if below <= estimate < above else middle


def _last_before(below: int, above: int, holds: Callable[[int], bool]) -> int:
    """The last number for which it holds, by bisection: it holds for `below`, and not for
    `above`.
    """
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return below


def _tensor_bytes(tape: Tape) -> int:
    """The most bytes of tensors at any moment, without the remainders that the allocator does
    not split off.
    """
    sizes = [_rounded(spec.size_bytes) for spec in tape.specs]
    return max(_levels(tape, [sizes[kind] for kind in tape.tensors]))


def _levels(tape: Tape, sizes_bytes: Sequence[int]) -> list[int]:
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
    """Whether the step's tensors, and so its memory, are known from its configuration."""
    half = config.precision in (Precision.BF16, Precision.FP16)
    refused = config.model.sdpa_backend in (SdpaBackend.FLASH, SdpaBackend.CUDNN) and not half
    return (
        config == config.without_shortcuts
        and not refused
        and config.parallel is not Parallel.OWN
        and config.own_optimizer is None
        and config.model.num_layers <= MAX_LAYERS
        and has_tape(config)
    )


def rank_peak_bytes(config: RunConfig) -> int | None:
    """The most bytes of tensors in a steady step of a rank of PyTorch's DDP or of fsdp; None if
    that is not predicted.

    The tensors are those of one process, its state shared out in closed form: so any number of
    ranks is predicted. Remainders of blocks that the allocator does not split off, under 1 MiB
    each, are left out.
    """
    alone = config.alone
    if not is_predictable(alone):
        return None
    tape = tape_of(alone)
    shares, more_bytes = _shared_out(config)
    sizes = [round(shares.get(spec.category, 1) * _rounded(spec.size_bytes)) for spec in tape.specs]
    levels = _levels(tape, [sizes[kind] for kind in tape.tensors])
    return max(levels[tape.steps[-1][0][1] :]) + more_bytes


def _shared_out(config: RunConfig) -> tuple[dict[Category, float], int]:
    """The share of each category that a rank keeps, and what it keeps in addition: buckets, or
    gathered blocks.

    The gathered embedding, which is there before the first block and after the last, is left out.
    """
    parameters = count_parameters(config.model)
    if not config.is_shared:
        return {}, 0
    if config.parallel is Parallel.DDP:
        return {Category.GRADIENTS: 0.0}, FP32_BYTES * parameters
    share = sum(kept_elements(config)) / parameters
    sizes = {unit.name: unit.gathered_bytes(config.ranks) for unit in units(config)}
    largest = max(size for name, size in sizes.items() if is_block(name))
    gathered = (config.parallel.exchange.units_ahead + 1) * largest + sizes.get(REST, 0)
    kept = (
        Category.PARAMETERS,
        Category.GRADIENTS,
        Category.OPTIMIZER_STATE,
        Category.OPTIMIZER_WORKSPACE,
    )
    return {**dict.fromkeys(kept, share), Category.WEIGHT_COPIES: 0.0}, gathered


def _placed(tape: Tape, capacity_bytes: int | None = None) -> CachingAllocator:
    """The simulated allocator after the tape; raises OutOfMemoryError if a tensor does not fit."""
    allocator = CachingAllocator(capacity_bytes)
    allocator.replay(
        tape.events, tape.tensors, [(spec.size_bytes, spec.stream) for spec in tape.specs]
    )
    return allocator


def _peak(
    tape: Tape, sizes: Sequence[int], levels: Sequence[int], phases: Sequence[tuple[Phase, int]]
) -> Peak:
    """The first maximum of a step, from its phases and the events before them, and the bytes of
    each tensor's block.
    """
    (first, start), *others, (_, end) = phases
    peak_bytes = max(levels[start : end + 1])
    when = levels.index(peak_bytes, start)
    done = tape.events[:when]
    live = sorted({*range(max(done, default=-1) + 1)}.difference(map(invert, done)))
    parts = _parts(Counter(map(tape.spec, live)))
    wanted = [_rounded(spec.size_bytes) for spec in tape.specs]
    rests = [sizes[handle] - wanted[tape.tensors[handle]] for handle in live]
    unsplit = Part(
        category=Category.UNSPLIT,
        label="what the allocator does not split off",
        formula="up to 1 MiB a block",
        count=sum(rest > 0 for rest in rests),
        size_bytes=sum(rests),
    )
    phase = [first, *(phase for phase, begin in others if begin < when)][-1]
    return Peak(phase=phase, allocated_bytes=peak_bytes, parts=(*parts, unsplit))


def _parts(specs: Counter[TensorSpec]) -> tuple[Part, ...]:
    """One part for each kind of tensor, by category, the largest first in each."""
    order = list(Category)
    parts = [
        Part(
            category=spec.category,
            label=spec.label,
            formula=spec.formula,
            count=count,
            size_bytes=count * _rounded(spec.size_bytes),
        )
        for spec, count in specs.items()
    ]
    return tuple(
        sorted(parts, key=lambda part: (order.index(part.category), -part.size_bytes, part.label))
    )


def _rounded(size_bytes: int) -> int:
    return round_up(size_bytes, ROUND_BYTES)
