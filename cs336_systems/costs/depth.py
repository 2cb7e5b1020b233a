"""The step of a model of any depth, from the tapes of shallow ones.

Blocks of a model are equal, or of a few kinds. So the step of two blocks is that of one block, of
the kind that most are of, with a few parts inserted: one part in the tensors that each phase makes
and frees, and one in its operations. A step of more blocks repeats these parts, those of each kind
as often as it has blocks. Tapes of one and two blocks of this project's model with named axes come
with the program, so that no depth has to be traced.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

from ..config import Phase, RunConfig
from .tape import OperationKey, Tape, TensorKey, phases_of
from .traces import has_tape, tape_of, traced_as, why_untraced

T = TypeVar("T")
Change = tuple[bool, TensorKey]
"""Whether a tensor is freed, and its kind."""


class DepthError(ValueError):
    """The blocks of a model are not equal, so that one does not stand for the others."""


@dataclass(frozen=True, slots=True)
class Repeated(Generic[T]):
    """A list in which each block of the model has an equal part."""

    of_one: tuple[T, ...]
    """The list of a model of one block."""
    place: int
    """Where the part of each further block is inserted."""
    block: tuple[T, ...]

    def of_depth(self, blocks: int) -> list[T]:
        """The list of a model of so many blocks, at least one."""
        before, after = self.of_one[: self.place], self.of_one[self.place :]
        return [*before, *self.block * (blocks - 1), *after]


@dataclass(frozen=True, slots=True, eq=False)
class StepByDepth:
    """A steady training step of models that differ in the number of their blocks of one kind."""

    launches: Mapping[Phase, Repeated[OperationKey]]
    """The operations of forward and backward, in the order of their launches."""
    changes: Mapping[Phase, Repeated[Change]]
    """Tensors that a phase makes and frees. Those that it frees last are left out, as they end no
    peak; others that are freed one after the other are sorted.
    """
    live_of_one: Mapping[Phase, Counter[TensorKey]]
    """Tensors that exist when a phase begins, in a model of one block."""
    live_of_block: Mapping[Phase, Counter[TensorKey]]
    """What each further block adds to these."""

    def live(self, phase: Phase, blocks: int) -> Counter[TensorKey]:
        """How many tensors of each kind exist when a phase of a model of so many blocks begins."""
        counts = Counter(self.live_of_one[phase])
        for kind, count in self.live_of_block[phase].items():
            counts[kind] += (blocks - 1) * count
        return counts


@lru_cache(maxsize=4096)
def of_depth(config: RunConfig, blocks: int, kind: int = 0) -> RunConfig:
    """The configuration with this number of blocks, the last of this kind."""
    if config.model_factory is not None:
        return replace(config, blocks=(*[0] * (blocks - 1), kind))
    return replace(config, size="", model=replace(config.model, num_layers=blocks))


def kinds_of_blocks(config: RunConfig) -> tuple[int, ...]:
    """The kind of each block of the model; raise DepthError for a model of one's own that cannot
    be traced.
    """
    if config.model_factory is None:
        return (0,) * config.model.num_layers
    one = of_depth(config, 1)
    if not has_tape(one):
        raise DepthError(why_untraced(one))
    return tuple(tape_of(one).blocks)


def step_by_depth(config: RunConfig, kind: int = 0) -> StepByDepth:
    """The step of a configuration of one process whatever its depth, of blocks of this kind; raise
    DepthError if these differ, or cannot be traced.
    """
    return _step_by_depth(traced_as(of_depth(config, 1))[0], kind)


@lru_cache(maxsize=256)
def _step_by_depth(one: RunConfig, kind: int) -> StepByDepth:
    """The step of a configuration of one block that is traced for all of its sizes."""
    two = of_depth(one, 2, kind)
    for config in (one, two):
        if not has_tape(config):
            raise DepthError(why_untraced(config) or "the step of one block cannot be traced")
    return step_of_tapes(tape_of(one), tape_of(two), kind)


def step_of_tapes(shallow: Tape, deeper: Tape, kind: int = 0) -> StepByDepth:
    """The step of which these are the tapes of one block and of two, the second of this kind; raise
    DepthError if they differ in more than one block.
    """
    launches: dict[Phase, Repeated[OperationKey]] = {}
    changes: dict[Phase, Repeated[Change]] = {}
    live_of_one: dict[Phase, Counter[TensorKey]] = {}
    live_of_block: dict[Phase, Counter[TensorKey]] = {}
    lives = zip(_live_tensors(shallow), _live_tensors(deeper), strict=True)
    phases = zip(phases_of(shallow, -1), phases_of(deeper, -1), strict=True)
    for (phase, *of_shallow), (_, *of_deeper) in phases:
        live_of_one[phase], live = next(lives)
        live_of_block[phase] = Counter(live)
        live_of_block[phase].subtract(live_of_one[phase])
        changes[phase] = repeated(
            _changes(shallow, *of_shallow[0]), _changes(deeper, *of_deeper[0]), kind
        )
        # of the optimizer one operation updates all parameters, whose time is known by its bytes
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            launches[phase] = repeated(
                launched(shallow, *of_shallow[1]), launched(deeper, *of_deeper[1]), kind
            )
    return StepByDepth(launches, changes, live_of_one, live_of_block)


def repeated(of_one: Sequence[T], of_two: Sequence[T], kind: int) -> Repeated[T]:
    """The list of a model of one block, and the part by which that of two is longer. A block of
    another kind may have parts in several places, as it needs another mask of the whole model.
    """
    longer = len(of_two) - len(of_one)
    place = 0
    while place < len(of_one) and of_one[place] == of_two[place]:
        place += 1
    if longer >= 0 and list(of_two[place + longer :]) == list(of_one[place:]):
        return Repeated(tuple(of_one), place, tuple(of_two[place : place + longer]))
    if not kind:
        raise DepthError("the second block of the model does other things than the first")
    left, more = Counter(of_one[place:]), []
    for one in of_two[place:]:
        if left[one]:
            left[one] -= 1
        else:
            more.append(one)
    return Repeated(tuple(of_one), place, tuple(more))


def _live_tensors(tape: Tape) -> list[Counter[TensorKey]]:
    """The tensors that exist when each phase of the last step begins."""
    counts, done, live = Counter[TensorKey](), 0, []
    for _, (begin, _), _ in phases_of(tape, -1):
        for event in tape.events[done:begin]:
            is_freed, kind = _change(tape, event)
            counts[kind] -= 1 if is_freed else -1
        done = begin
        live.append(+counts)
    return live


def _change(tape: Tape, event: int) -> Change:
    """What an event of a tape does to which kind of tensor."""
    handle = ~event if event < 0 else event
    return event < 0, tape.kinds[tape.tensors[handle]]


def _changes(tape: Tape, begin: int, end: int) -> list[Change]:
    """The changes of a phase; the order of tensors that are freed together depends on addresses."""
    changes: list[Change] = []
    freed: list[Change] = []
    for event in tape.events[begin:end]:
        change = _change(tape, event)
        if change[0]:
            freed.append(change)
            continue
        changes += sorted(freed)
        freed = []
        changes.append(change)
    return changes


def launched(tape: Tape, first: int, stop: int) -> list[OperationKey]:
    """The operations that a phase launches."""
    return [_frozen(tape.makes[number]) for number in tape.launches[first:stop]]


def _frozen(value: Any) -> Any:  # noqa: ANN401 (what JSON may hold)
    """The value with tuples in the place of lists, to be compared and counted."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
