"""The operators and Python functions of torch.profiler's traces that say what work belongs to.

A trace may have millions of both, and most launch nothing: those are left out before their times
and shapes are read.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..columns import Ints, Mask
from ..memory.profile import Place
from ..memory.stacks import is_of_program, short_path
from .kineto_events import BOOKKEEPING, AnyEvent, Category, EventBatch, TraceEvents
from .trace import GroupNesting

MODULE_CALL = "nn.Module: "
"""The profiler's name for a call of a module begins so; its class and number follow."""
_FUNCTION = re.compile(r"(?P<file>.+)\((?P<line>\d{1,9})\): (?P<name>.*)", re.DOTALL)
_DIGIT = re.compile(rb"\d")
_LIBRARIES = sys.stdlib_module_names | {"einops", "numpy", "sympy", "typing_extensions"}
"""Further packages; the profiler writes the paths of their files from the package on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedOperators:
    """Operators that launched something or have a gradient, and the nodes of backward."""

    calls: EventBatch
    nodes: EventBatch
    is_recorded: Mask
    """Whether each of `calls` was made while autograd recorded, outside of backward."""
    forward: Ints
    """For each node, the row in `calls` of its operator of forward; -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFrames:
    """Python functions of the program, and calls of the model's modules."""

    functions: EventBatch
    modules: EventBatch


def linked_operators(events: TraceEvents, work: Iterable[AnyEvent] | None) -> LinkedOperators:
    """The operators around the launches of `work`, and those of forward that nodes name; all
    operators if no work is given.
    """
    operators = events.of_category(Category.OPERATOR)
    nodes = events.batch([event for event in operators if event.name.startswith(BOOKKEEPING)])
    if work is None:
        kept = [event for event in operators if not event.name.startswith(BOOKKEEPING)]
    else:
        of_nodes = {event.args.sequence for event in nodes.events} - {None}
        launching = {event.args.external_id for event in work} - {None, 0}
        kept = []
        for event in operators:
            # operators within nodes have the node's number, and name a thread of forward
            is_differentiated = event.args.sequence in of_nodes and not event.args.forward_thread
            if is_differentiated or event.args.external_id in launching:
                kept.append(event)
    calls = events.batch(kept, counts=work is None)
    is_recorded = _is_recorded(calls, nodes)
    forward = _forward(calls, nodes, is_recorded)
    return LinkedOperators(calls=calls, nodes=nodes, is_recorded=is_recorded, forward=forward)


def _numbers(values: Iterable[object]) -> Ints:
    """The values as whole numbers; -1 for what is none of at most 62 bits."""
    numbers = []
    for value in values:
        is_number = isinstance(value, int) and -1 <= value < 2**62
        numbers.append(value if is_number else -1)
    return np.array(numbers, dtype=np.int64)


def _is_recorded(calls: EventBatch, nodes: EventBatch) -> Mask:
    """Whether autograd recorded at each call: PyTorch numbers operators only then, and functions
    of the program always, whose numbers nodes have. Calls within nodes are left out, as they
    compute forward again.
    """
    sequence = _numbers(event.args.sequence for event in calls.events)
    of_nodes = _numbers(event.args.sequence for event in nodes.events)
    is_operator = np.array(["::" in event.name for event in calls.events], dtype=np.bool_)
    is_numbered = (sequence >= 0) & (is_operator | np.isin(sequence, of_nodes))
    # operators of backward have a number too, and name a thread of forward
    is_forward = _numbers(event.args.forward_thread for event in calls.events) <= 0
    within = GroupNesting(nodes.thread, nodes.start_ns, nodes.end_ns)
    is_outside = within.at(calls.thread, calls.start_ns) < 0
    return is_forward & is_outside & is_numbered


def _forward(calls: EventBatch, nodes: EventBatch, is_forward: Mask) -> Ints:
    """For each node, the row of the operator that made it: the last one to begin with its number
    on the thread that it names.

    Each thread numbers its operators from 0, and nodes name the thread by a number that no other
    event has.
    """
    sequence = _numbers(event.args.sequence for event in calls.events)
    wanted = _numbers(event.args.sequence for event in nodes.events)
    named = _numbers(event.args.forward_thread for event in nodes.events)
    forward = np.full(len(nodes), -1, dtype=np.int64)
    for number, of_thread in _pairs(
        sequence, np.where(is_forward, calls.thread, -1), wanted, named
    ):
        rows = np.flatnonzero(is_forward & (calls.thread == of_thread))
        rows = rows[np.lexsort((calls.start_ns[rows], sequence[rows]))]
        linked = np.flatnonzero(named == number)
        last = np.searchsorted(sequence[rows], wanted[linked], side="right") - 1
        row = np.append(rows, -1)[last]
        is_same = (last >= 0) & (np.append(sequence, -1)[row] == wanted[linked])
        forward[linked] = np.where(is_same, row, -1)
    return forward


def _pairs(sequence: Ints, thread: Ints, wanted: Ints, named: Ints) -> Iterator[tuple[int, int]]:
    """Each number by which nodes name a thread of forward, and that thread: the only one with
    operators of these nodes, which no nodes of another number have operators on.
    """
    numbers, threads = np.unique(named[named > 0]), np.unique(thread[thread >= 0])
    fits = np.zeros((len(numbers), len(threads)), dtype=np.bool_)
    for row, number in enumerate(numbers):
        for column, of_thread in enumerate(threads):
            nodes = wanted[(named == number) & (wanted >= 0)]
            fits[row, column] = np.isin(nodes, sequence[thread == of_thread]).any()
    for row, column in np.argwhere(fits).tolist():
        if fits[row].sum() == 1 and fits[:, column].sum() == 1:
            yield int(numbers[row]), int(threads[column])


def shape_text(event: AnyEvent) -> str:
    """Dimensions and types of the call's arguments, and, where its FLOPs depend on them, their
    values; empty without dimensions.
    """
    args = event.args
    needs_values = "conv" in event.name or "attention" in event.name
    return _text(bytes(args.dims), bytes(args.types), bytes(args.values) if needs_values else b"[]")


@lru_cache(maxsize=4096)
def _text(dims: bytes, types: bytes, values: bytes) -> str:
    if _DIGIT.search(dims) is None:
        return ""
    return b"".join((b"[", dims, b",", types, b",", values, b"]")).decode()


def frames_of_program(events: TraceEvents) -> ProgramFrames:
    """The functions that no library has, and the calls of modules."""
    functions, modules = [], []
    known: dict[str, bool] = {}
    for event in events.of_category(Category.FUNCTION):
        name = event.name
        if name.startswith(MODULE_CALL):
            modules.append(event)
            continue
        is_kept = known.get(name)
        if is_kept is None:
            is_kept = known[name] = _is_of_program(name)
        if is_kept:
            functions.append(event)
    return ProgramFrames(functions=events.batch(functions), modules=events.batch(modules))


def _is_of_program(name: str) -> bool:
    """Whether the frame is a function in a file of the program, not of Python or a library."""
    function = _FUNCTION.fullmatch(name)
    if function is None or not is_of_program(function["file"]):
        return False
    first = function["file"].split("/")[0].removesuffix(".py")
    return first not in _LIBRARIES


def place_of(name: str) -> Place:
    """The place of a function of the program, whose line is that of its definition."""
    function = _FUNCTION.fullmatch(name)
    if function is None:
        return Place(file=name, line=0, function="")
    file = short_path(function["file"])
    return Place(file=file, line=int(function["line"]), function=function["name"])
