"""The step of a model of any depth whose blocks are compiled one by one, as ranks compile them that
gather parameters between blocks.

The compiler chooses kernels by sizes, so that a step of one block and one of two are compiled for
each micro-batch. Ranks of a tensor or a context group are taken to have their part of each of these
kernels, as they have of those of an eager step.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from ..config import Phase, RunConfig
from .compiled import without_views
from .depth import DepthError, StepByDepth, of_depth, step_by_depth, step_of_tapes
from .shards import HALF_BYTES
from .tape import Category, Tape, phases_of
from .traces import as_costed, compiled_tapes, is_compiled

BLOCKS = (1, 2)
"""Depths of the models that are compiled."""


def rank_step(config: RunConfig, kind: int = 0, casts: tuple[str, ...] = ()) -> StepByDepth:
    """The step of a configuration of one process whatever its depth, of blocks of this kind,
    compiled or not; raise DepthError if there is none.

    `casts` are the shapes of a block's matrices that this rank has in half precision already, so
    that what a compiled block keeps of them for backward is a copy of weights.
    """
    if not is_compiled(config):
        return step_by_depth(config, kind)
    return _compiled_step(as_costed(of_depth(config, 1)), casts)


@lru_cache(maxsize=256)
def _compiled_step(one: RunConfig, casts: tuple[str, ...]) -> StepByDepth:
    """The same of compiled blocks; `one` is the configuration of one block."""
    if reason := why_ambiguous(one):
        raise DepthError(reason)
    tapes = compiled_tapes(steps_of_blocks(one))
    for tape in tapes:
        if not tape.steps:
            raise DepthError(tape.failure)
    sides = Counter(map(_sides, casts))
    plain = []
    for blocks, tape in zip(BLOCKS, tapes, strict=True):
        plain.append(without_views(_with_copies(_without_makers(tape), sides, blocks)))
    shallow, deeper = plain
    return step_of_tapes(shallow, deeper)


def steps_of_blocks(config: RunConfig) -> list[RunConfig]:
    """The steps of few blocks that are compiled for this one."""
    return [as_costed(of_depth(config, blocks)) for blocks in BLOCKS]


def compile_missing(configs: Iterable[RunConfig]) -> None:
    """Compile what these configurations need, all together, so that it is said once."""
    steps: dict[RunConfig, None] = {}
    for config in configs:
        if is_compiled(config) and not why_ambiguous(config):
            steps |= dict.fromkeys(steps_of_blocks(config))
    if steps:
        compiled_tapes(steps)


def why_ambiguous(config: RunConfig) -> str:
    """Why tensors of a compiled step are not told apart, whose tape has sizes in the place of
    names; empty if they are.
    """
    model = config.model
    tokens = config.batch_size * model.context_length
    others = (tokens, model.context_length, model.d_model, model.d_ff, config.batch_size)
    if is_compiled(config) and model.vocab_size in others:
        return (
            f"the tape of a compiled step has sizes only, and {model.vocab_size:,} is the "
            "vocabulary and another size as well: change one of them"
        )
    return ""


def stream_width(config: RunConfig, d_model: int) -> str:
    """The side of matrices that is the residual stream's, in formulas of the step's tape."""
    is_named = config.model_factory is None and not is_compiled(config)
    return "d_model" if is_named else str(d_model)


def _without_makers(tape: Tape) -> Tape:
    """The tape without what made its tensors: the first block's input, of the embedding, is then
    the same as that of others.
    """
    kinds = []
    for category, _, *sizes in tape.kinds:
        kinds.append((Category.ACTIVATIONS if category is Category.LOSS else category, "", *sizes))
    return msgspec.structs.replace(tape, kinds=kinds)


def _sides(shape: str) -> tuple[str, ...]:
    """The sides of a matrix, which may be kept transposed."""
    return tuple(sorted(shape.split()))


def _with_copies(tape: Tape, casts: Counter[tuple[str, ...]], blocks: int) -> Tape:
    """The tape, in which what the last step keeps for backward of matrices in half precision is a
    copy of weights. An activation may have the same sides, so that of these as many as a block
    has matrices count, the first of each block: which of them makes no difference in bytes.
    """
    if not casts:
        return tape
    forward = [events for phase, events, _ in phases_of(tape, -1) if phase is Phase.FORWARD]
    begin, end = forward[0]
    events = tape.events[begin:end]
    freed = {~event for event in events if event < 0}
    kept: dict[tuple[str, ...], list[int]] = {}
    for handle in events:
        if handle < 0 or handle in freed:
            continue
        category, _, shape, element_bytes, _ = tape.kinds[tape.tensors[handle]]
        is_half = category is Category.ACTIVATIONS and element_bytes == HALF_BYTES
        if is_half and _sides(shape) in casts:
            kept.setdefault(_sides(shape), []).append(handle)
    kinds, tensors = [*tape.kinds], [*tape.tensors]
    for sides, handles in kept.items():
        of_block = max(1, len(handles) // blocks)
        number = len(kinds)
        kinds.append((Category.WEIGHT_COPIES, "cast", " ".join(sides), HALF_BYTES, ""))
        for place, handle in enumerate(handles):
            if place % of_block < casts[sides]:
                tensors[handle] = number
    return msgspec.structs.replace(tape, kinds=kinds, tensors=tensors)
