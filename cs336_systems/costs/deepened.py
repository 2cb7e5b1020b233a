"""The step of a deep model, spliced from the tapes of two shallow ones.

The deeper of the two does all that the shallow one does, and more in a few places of each phase,
where it has more blocks. A model with as many blocks again does that once more.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import chain, pairwise
from typing import Any, TypeVar

import msgspec

from .depth import Change, launched
from .tape import OperationKey, Tape, TensorKey

H = TypeVar("H", bound=Hashable)


def deepened(shallow: Tape, deeper: Tape, times: int) -> Tape:
    """The tape of a model with so many times more blocks than the deeper model has more than the
    shallow one.

    Of tensors of one kind the last that was made is freed first, as backward frees what forward
    has made.
    """
    kinds, makes = dict[TensorKey, int](), dict[OperationKey, int]()
    tensors: list[int] = []
    events: list[int] = []
    launches: list[int] = []
    live: defaultdict[TensorKey, list[int]] = defaultdict(list)
    begins: list[tuple[int, int]] = []
    for (changes, keys), (more_changes, more_keys) in zip(
        _parts(shallow), _parts(deeper), strict=True
    ):
        begins.append((len(events), len(launches)))
        for is_freed, kind in spliced(changes, more_changes, times):
            if not is_freed:
                live[kind].append(len(tensors))
                events.append(len(tensors))
                tensors.append(kinds.setdefault(kind, len(kinds)))
            elif live[kind]:
                events.append(~live[kind].pop())
        for key in _deeper_keys(keys, more_keys, times):
            launches.append(makes.setdefault(key, len(makes)))
    later = iter(begins[1:])
    steps = []
    for step in shallow.steps:
        steps.append([(phase, *next(later)) for phase, _, _ in step])
    return msgspec.structs.replace(
        shallow,
        kinds=[*kinds],
        makes=[*makes],
        tensors=tensors,
        events=events,
        launches=launches,
        steps=steps,
        parameters=[],
        gradient_order=[],
    )


def spliced(one: Sequence[H], two: Sequence[H], times: int) -> list[H]:
    """The list `one` with what `two` has more in each place, so many times."""
    deep: list[H] = []
    matcher = SequenceMatcher(None, one, two, autojunk=False)
    for tag, _, _, begin, end in matcher.get_opcodes():
        deep += (times if tag == "insert" else 1) * list(two[begin:end])
    return deep


def _parts(tape: Tape) -> Iterator[tuple[list[Change], list[OperationKey]]]:
    """What is made and freed, and what is launched, before the first step and in each phase of each
    step.
    """
    begins = [(0, 0), *((event, launch) for _, event, launch in chain.from_iterable(tape.steps))]
    begins.append((len(tape.events), len(tape.launches)))
    for (begin, first), (end, stop) in pairwise(begins):
        yield _changes(tape, begin, end), launched(tape, first, stop)


def _changes(tape: Tape, begin: int, end: int) -> list[Change]:
    """The changes between two events. Tensors that are freed together are freed in the order in
    which they were made, as their order in the tape depends on addresses.
    """
    changes: list[Change] = []
    freed: list[int] = []
    for event in tape.events[begin:end]:
        if event < 0:
            freed.append(~event)
            continue
        changes += [(True, tape.kinds[tape.tensors[handle]]) for handle in sorted(freed)]
        changes.append((False, tape.kinds[tape.tensors[event]]))
        freed = []
    changes += [(True, tape.kinds[tape.tensors[handle]]) for handle in sorted(freed)]
    return changes


def _deeper_keys(
    one: Sequence[OperationKey], two: Sequence[OperationKey], times: int
) -> list[OperationKey]:
    """The operations of the deep model."""
    # an operation that updates all parameters is one however many these are
    if [key[1] for key in one] == [key[1] for key in two]:
        return [_longer_key(before, after, times) for before, after in zip(one, two, strict=True)]
    return spliced(one, two, times)


def _longer_key(one: OperationKey, two: OperationKey, times: int) -> OperationKey:
    """One operation over more tensors, each of which may need views first."""
    views = one[0] + times * (two[0] - one[0])
    arguments = zip(one[1:], two[1:], strict=True)
    return (views, *(_longer_argument(before, after, times) for before, after in arguments))


def _longer_argument(one: Any, two: Any, times: int) -> Any:  # noqa: ANN401 (of any operation)
    """An argument, which has the shapes of more tensors if it is a list of shapes."""
    if one == two or not isinstance(one, tuple):
        return two
    more = Counter(two)
    more.subtract(one)
    return (*one, *(times * [*more.elements()]))
