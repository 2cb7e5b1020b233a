"""Peak memory and kernels of a step under torch.compile.

The compiler takes seconds for each block of a model, so that only shallow models are compiled
(`compiling.py`), two and four blocks deep, or three and five. Every further two blocks add to the
memory, and to the kernels, what the two of the deeper one add: by twos, because the compiled code
gives the memory of one block's buffers to the next one's, and takes it back in the one after that.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ..config import SETTINGS, CompileMode, Device, Phase, RunConfig
from .depth import DepthError, kinds_of_blocks, launched, of_depth, repeated
from .memory import (
    MAX_LAYERS,
    MemoryPrediction,
    Part,
    Peak,
    allocated_levels,
    memory_of,
    peak_of,
    placed,
    predict_memory,
)
from .tape import Names, Operation, OperationKey, OperationMaker, Tape, phases_of
from .traces import as_costed, compiled_tapes, is_at_hand, is_compiled, is_compiled_at_hand

STRIDE = 2
"""Blocks by which the deeper of two compiled models is deeper."""
LEAST_BLOCKS = 2
"""Blocks of the shallower one, if the model has an even number of blocks."""

COMPILED_WITH = (
    "compile",
    "compile_blocks",
    "pad_vocabulary",
    "cast_once",
    "fused_loss",
    "cuda_graph",
)
"""Settings that a compiled step may have: its trace has what they change. A graph launches the
same kernels, and has their tensors in a pool.
"""


class NotForetoldError(ValueError):
    """The memory of a compiled step is not foretold, for the reason that it says."""


def predict_step_memory(config: RunConfig) -> MemoryPrediction | None:
    """Predict the memory of a CUDA run, compiled or not; None for what is not predicted."""
    if not is_compiled(config):
        return predict_memory(config)
    try:
        return predict_compiled_memory(config)
    except NotForetoldError:
        return None


def why_not_foretold(config: RunConfig) -> str:
    """Why the memory of a compiled step is not foretold; empty if it is, or is not compiled."""
    if not is_compiled(config):
        return ""
    try:
        predict_compiled_memory(config)
    except NotForetoldError as error:
        return str(error)
    return ""


def predict_compiled_memory(config: RunConfig) -> MemoryPrediction:
    """Predict the memory of a CUDA run whose whole model is compiled; raise NotForetoldError for
    what is not predicted.
    """
    if reason := why_refused(config):
        raise NotForetoldError(reason)
    return _predict(as_costed(config))


def why_refused(config: RunConfig) -> str:
    """Which setting of a compiled step is the reason that nothing is foretold; empty without one.

    Graphs of reduce-overhead have a pool of memory of their own, and the other modes choose
    kernels, with their workspaces, by timing them on the GPU.
    """
    shortcuts = {name for name, setting in SETTINGS.items() if setting.is_shortcut}
    if config.compile is not CompileMode.DEFAULT:
        return f"only --compile default is foretold, and --compile {config.compile} is asked for"
    if config.is_shared:
        return f"a compiled step on {config.ranks} ranks is not foretold"
    if config.own_optimizer is not None:
        return "the optimizer is your own"
    if config.checkpoint_blocks:
        return "a compiled step with checkpoints is not foretold"
    if config != config.with_defaults(*shortcuts.difference(COMPILED_WITH)):
        return "a compiled step with such shortcuts is not foretold"
    if config.model.num_layers > MAX_LAYERS:
        return f"a model of more than {MAX_LAYERS} layers is not foretold"
    return ""


@lru_cache(maxsize=4096)
def _predict(config: RunConfig) -> MemoryPrediction:
    """The same, of a step that nothing in the settings refuses."""
    steps, times = steps_to_compile(config)
    tapes = compiled_tapes(steps)
    for tape in tapes:
        if not tape.steps:
            raise NotForetoldError(tape.failure)
    if not times:
        return replace(memory_of(tapes[0]), reserved_bytes=None)
    return _deepened(tapes[0], tapes[1], times)


def uncompiled(config: RunConfig) -> RunConfig:
    """The same step without torch.compile."""
    return config.with_defaults("compile", "compile_blocks")


def steps_to_compile(config: RunConfig) -> tuple[list[RunConfig], int]:
    """The steps whose tapes the forecast of a step needs: a shallow model's and a deeper one's, and
    how many times the difference of both is added to the shallow one; or its own, and 0.
    """
    blocks = _number_of_blocks(config)
    shallow = LEAST_BLOCKS + blocks % STRIDE
    if blocks <= shallow + STRIDE:
        return [config], 0
    steps = [_of_depth(config, depth) for depth in (shallow, shallow + STRIDE)]
    return steps, (blocks - shallow) // STRIDE


def _number_of_blocks(config: RunConfig) -> int:
    """How many equal blocks the model has; 0 if its blocks are not equal, or not known."""
    try:
        kinds = kinds_of_blocks(uncompiled(config))
    except DepthError:
        return 0
    return 0 if any(kinds) else len(kinds)


def _of_depth(config: RunConfig, blocks: int) -> RunConfig:
    """The configuration of a model with so many equal blocks."""
    if config.model_factory is not None:
        return replace(config, blocks=(0,) * blocks)
    return of_depth(config, blocks)


def _deepened(shallow: Tape, deeper: Tape, times: int) -> MemoryPrediction:
    """The memory of a step with so many times more blocks than the deeper model has more than the
    shallow one.
    """
    one, two = memory_of(shallow), memory_of(deeper)

    def linear(of_one: int, of_two: int) -> int:
        return of_one + times * (of_two - of_one)

    peaks = []
    for step in (-1, 0):
        moments = zip(_moments(shallow, step), _moments(deeper, step), strict=True)
        deepened = [_deepened_peak(before, after, times) for before, after in moments]
        peaks.append(max(deepened, key=lambda peak: peak.allocated_bytes))
    return MemoryPrediction(
        peak=peaks[0],
        first_step_peak=peaks[1],
        reserved_bytes=None,
        start_bytes=linear(one.start_bytes, two.start_bytes),
        after_bytes={
            phase: linear(num_bytes, two.after_bytes[phase])
            for phase, num_bytes in one.after_bytes.items()
        },
        compiler=one.compiler,
    )


def _moments(tape: Tape, step: int) -> list[Peak]:
    """The peaks of both halves of each phase of a step. Memory rises or falls with each block that
    a phase computes, so that each of them grows evenly with the number of blocks.
    """
    allocator = placed(tape)
    levels = allocated_levels(tape, allocator.sizes_bytes)
    peaks = []
    for phase, (begin, end), _ in phases_of(tape, step):
        if phase is Phase.STEP:
            break
        middle = (begin + end) // 2
        for start, stop in ((begin, middle), (middle, end)):
            half = [(phase, start, 0), (Phase.STEP, stop, 0)]
            peaks.append(peak_of(tape, allocator.sizes_bytes, levels, half))
    return peaks


def _deepened_peak(one: Peak, two: Peak, times: int) -> Peak:
    """The same moment of a deeper model."""
    parts = {_kind(part): part for part in one.parts}
    after = {_kind(part): part for part in two.parts}
    deepened = []
    for kind in {**parts, **after}:
        before = parts.get(kind) or replace(after[kind], count=0, size_bytes=0)
        then = after.get(kind) or replace(before, count=0, size_bytes=0)
        part = replace(
            before,
            count=before.count + times * (then.count - before.count),
            size_bytes=before.size_bytes + times * (then.size_bytes - before.size_bytes),
        )
        if part.size_bytes:
            deepened.append(part)
    allocated = one.allocated_bytes + times * (two.allocated_bytes - one.allocated_bytes)
    return Peak(phase=one.phase, allocated_bytes=allocated, parts=tuple(deepened))


def _kind(part: Part) -> tuple[str, str, str]:
    """What parts of one kind have in common."""
    return part.category, part.label, part.formula


def has_compiled_kernels(config: RunConfig) -> bool:
    """Whether the step runs on a GPU under torch.compile, and its kernels are known without
    compiling: its tapes come with the program, or its memory has been asked for.
    """
    if config.device is not Device.CUDA or not is_compiled(config) or why_refused(config):
        return False
    # counting the blocks of a user's own model would run its code
    one = of_depth(uncompiled(config), 1)
    if config.model_factory is not None and not is_at_hand(one):
        return False
    return all(map(is_compiled_at_hand, steps_to_compile(as_costed(config))[0]))


@lru_cache(maxsize=256)
def compiled_operations(config: RunConfig) -> dict[Phase, list[Operation]]:
    """The operations of each phase of a compiled step in the steady state, as
    `has_compiled_kernels` knows them.

    Forward and backward are code that inductor has written: it makes views and buffers in C++,
    which take the host next to nothing, so that only launches count as calls. The optimizer is
    eager.
    """
    steps, times = steps_to_compile(config)
    first, *deeper = map(_keys_by_phase, compiled_tapes(steps))
    maker, made = OperationMaker(Names({})), dict[OperationKey, Operation]()
    phases: dict[Phase, list[Operation]] = {}
    for place, (phase, keys) in enumerate(first):
        for other in deeper:
            keys = _deepened_keys(keys, other[place][1], times)
        for key in keys:
            if key not in made:
                views, make, *arguments = key
                made[key] = replace(getattr(maker, make)(*arguments), views=views)
        phases.setdefault(phase, []).extend(made[key] for key in keys)
    return phases


def _keys_by_phase(tape: Tape) -> list[tuple[Phase, list[OperationKey]]]:
    """The operations of each phase of the last step; views count in the optimizer only."""
    phases = []
    for phase, _, (first, stop) in phases_of(tape, -1):
        keys = launched(tape, first, stop)
        if phase is not Phase.OPTIMIZER:
            keys = [(0, *key[1:]) for key in keys]
        if keys and phase is not Phase.STEP:
            phases.append((phase, keys))
    return phases


def _deepened_keys(
    one: Sequence[OperationKey], two: Sequence[OperationKey], times: int
) -> list[OperationKey]:
    """The operations of a model with so many times more blocks than the deeper one has more than
    the shallow one.
    """
    # an operation that updates all parameters is one however many these are
    if len(one) == len(two):
        return [_longer_key(before, after, times) for before, after in zip(one, two, strict=True)]
    return repeated(one, two, kind=1).of_depth(1 + times)


def _longer_key(one: OperationKey, two: OperationKey, times: int) -> OperationKey:
    """One operation over lists of tensors, whose shapes are its last argument."""
    *settings, of_one = one
    *_, of_two = two
    if one == two or not isinstance(of_one, tuple):
        return two
    more = Counter(of_two)
    more.subtract(of_one)
    return (*settings, (*of_one, *(times * [*more.elements()])))
