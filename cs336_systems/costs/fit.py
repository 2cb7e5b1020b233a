"""What fits a device: whether a step does, the largest batch and the longest context that do, and
whether this machine has the memory for a run on the CPU.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from sys import maxsize

from ..config import Attention, Device, RunConfig
from .accounting import count_parameters
from .allocator import OutOfMemoryError
from .compiled import NotForetoldError, compiled_tape, why_not_foretold
from .memory import is_predictable, is_predictable_fast, placed, predict_memory, why_not_predicted
from .shards import FP32_BYTES
from .tape import Tape, interpolated
from .traces import is_compiled, tape_of, trace_missing

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
FURTHER = 4
"""Numbers beyond the first that does not fit that are tried too."""
INTERPOLATED = 12
"""Number of traced steps after which the search no longer interpolates between them, as the model's
tensors do not grow evenly.
"""
HasRoom = Callable[[Tape], bool]
"""Says whether the tensors of a step fit the memory."""


def host_bytes(config: RunConfig, memory_bytes: int) -> int | None:
    """Memory that all ranks of a run on the CPU need at least; None for a run on a GPU and for a
    user's own model.

    The CPU holds the same tensors as a GPU does. Its allocator, its kernels' own buffers and
    PyTorch itself, all left out, took 0 to 20 % more where it was measured. The step is traced for
    it only where that may decide whether it fits `memory_bytes`. Without a trace, and for a step
    with shortcuts, it is the memory of the parameters.
    """
    if config.device is not Device.CPU or config.model_factory is not None:
        return None
    prediction = predict_memory(config) if needs_tape(config, memory_bytes) else None
    if prediction is None:
        return _parameter_bytes(config)
    return config.ranks * prediction.peak.allocated_bytes


def needs_tape(config: RunConfig, memory_bytes: int) -> bool:
    """Whether it takes a tape to tell if a run on the CPU fits."""
    is_known = config.device is Device.CPU and config.model_factory is None
    return is_known and _parameter_bytes(config) <= memory_bytes < _most_bytes(config)


def _parameter_bytes(config: RunConfig) -> int:
    """Bytes of the parameters in fp32: of one copy that all ranks share, or of each rank's."""
    copies = 1 if config.parallel.shards_parameters else config.ranks
    return copies * FP32_BYTES * count_parameters(config.model)


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
    fragmentation and needs no margin. How segments grow (`expandable_segments`) is not simulated:
    then only what has no room without any loss is known not to fit.
    """
    tape = _step_tape(config)
    if tape is None:
        return None
    room_bytes = memory_bytes - outside_bytes(config)
    if config.expandable_segments and not is_compiled(config):
        prediction = predict_memory(config)
        is_too_much = prediction is not None and prediction.peak.allocated_bytes > room_bytes
        return False if is_too_much else None
    return _fits(tape, room_bytes, is_graphed=config.cuda_graph)


def _step_tape(config: RunConfig) -> Tape | None:
    """The tape of the very step, compiled or not, which is traced if need be; None where its
    memory is not predicted.
    """
    if is_compiled(config):
        with suppress(NotForetoldError):
            return compiled_tape(config)
        return None
    is_known = is_predictable(config) or is_predictable_fast(config)
    return tape_of(config) if is_known else None


def _fits(tape: Tape, room_bytes: int, *, is_graphed: bool = False) -> bool:
    """Whether the tensors of a traced step fit `room_bytes` of memory, as the allocator would place
    them.
    """
    try:
        placed(tape, room_bytes, is_graphed=is_graphed)
    except OutOfMemoryError:
        return False
    return True


def why_not_searched(config: RunConfig) -> str:
    """Why neither the largest batch nor the longest context of a step is searched; empty if both
    are.
    """
    if config.expandable_segments:
        return "how segments of memory expand is not simulated"
    return why_not_foretold(config) if is_compiled(config) else why_not_predicted(config)


def largest_batch(config: RunConfig, memory_bytes: int) -> int | None:
    """The largest batch size that `fits`; 0 if not even one sequence does, None if that is not
    predicted. Of a compiled step, and of a fast one, each size that is tried is traced.
    """
    return _largest(lambda size: replace(config, batch_size=size), config.batch_size, memory_bytes)


def largest_context(config: RunConfig, memory_bytes: int) -> int | None:
    """The longest context that `fits`, at the configuration's batch size; 0 and None as in
    largest_batch.

    A user's own model may take no longer one: then `why_untraced` says why of the next. None of a
    compiled step, as it takes twice as many tries as the largest batch, each of half a minute.
    """
    if is_compiled(config):
        return None
    model = config.model
    return _largest(
        lambda length: replace(config, model=replace(model, context_length=length)),
        model.context_length,
        memory_bytes,
    )


def _largest(config_of: Callable[[int], RunConfig], asked: int, memory_bytes: int) -> int | None:
    """The largest batch size, or context, whose step fits into this many bytes, assuming that all
    smaller ones fit; 0 if none does, None where the step cannot be traced.

    `config_of` makes the configuration of a number, and `asked` is the user's own number. A tape
    with named axes serves all sizes, so that it is searched; else each size is traced.
    """
    config = config_of(asked)
    if config.expandable_segments or (tape := _step_tape(config)) is None:
        return None
    room_bytes = memory_bytes - outside_bytes(config)
    if tape.axes:
        return last_that_fits(lambda number: tape_of(config_of(number)), room_bytes)
    has_room = partial(_fits, room_bytes=room_bytes, is_graphed=config.cuda_graph)
    return _last_traced(config_of, asked, has_room)


def last_that_fits(tape_at: Callable[[int], Tape], room_bytes: int) -> int:
    """The last number whose tape fits, or 0; `tape_at` raises ValueError for numbers that are too
    large.
    """
    return _last_with_room(tape_at, partial(_fits, room_bytes=room_bytes))


def _last_with_room(tape_at: Callable[[int], Tape], has_room: HasRoom) -> int:
    """The same, where `has_room` says whether a tape fits.

    More may fit where less does not, because tensors of other sizes leave other gaps. So a few
    numbers beyond the first that does not fit are tried too.
    """

    def fits_at(number: int) -> bool:
        """Whether the step of this size fits; False where the size cannot be traced."""
        with suppress(ValueError):
            return has_room(tape_at(number))
        return False

    last = last_number(fits_at)
    further = range(last + 2, last + 2 + FURTHER) if last else ()
    return max([last, *filter(fits_at, further)])


def last_number(has_room: Callable[[int], bool]) -> int:
    """The last number that has room, found by doubling and bisection; 0 if 1 has none."""
    below, above = 0, 1
    while has_room(above):
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        if has_room(middle):
            below = middle
        else:
            above = middle
    return below


def _last_traced(config_of: Callable[[int], RunConfig], asked: int, has_room: HasRoom) -> int:
    """The last number whose step is traced and fits, where the next one is traced too, and does not
    fit or fails.

    What is between the numbers that were traced only says which number to trace next.
    """
    tapes: dict[int, Tape] = {}
    below, above, number = 0, maxsize, asked
    while above - below > 1:
        above_before, above = above, number
        with suppress(ValueError):  # of a step that no configuration may have
            config = config_of(number)
            if not is_compiled(config):
                trace_missing([config])
            if (tape := _step_tape(config)) is not None:
                tapes[number] = tape
                if has_room(tape):
                    below, above = number, above_before
        number = _next_to_trace(tapes, below, above, has_room)
    return below


def _next_to_trace(tapes: Mapping[int, Tape], below: int, above: int, has_room: HasRoom) -> int:
    """The number whose step the search for the largest that fits traces next.

    It lies between `below`, which fits, and `above`, which does not. It is the largest number that
    is estimated to fit, by interpolation between the last traced steps (`tapes`, by number). If
    they allow no such estimate, it is a round number, at most twice `below`.
    """
    round_number = min(above - 1, 2 * max(below, 1))
    # clear low bits: the longest context that a model takes is mostly a multiple of a power of 2
    while (rounder := round_number & (round_number - 1)) > below:
        round_number = rounder
    recent = dict([*tapes.items()][-3:])
    # only steps that make the same tensors can be interpolated
    is_alike = len({len(tape.tensors) for tape in recent.values()}) == 1
    if not is_alike or len(recent) < 2 or len(tapes) > INTERPOLATED:
        return round_number

    def tape_at(number: int) -> Tape:
        """The tape of the step of this batch size or context length, interpolated between the last
        traced ones; ValueError if it is far larger than those.
        """
        if number > MAX_GROWTH * max(recent):
            raise ValueError("too far from the traced ones")
        return interpolated(recent, number)

    estimate = _last_with_room(tape_at, has_room)
    # if `below` itself is the estimate, the next number is traced to confirm that it does not fit
    return max(estimate, below + 1) if below <= estimate < above else round_number
