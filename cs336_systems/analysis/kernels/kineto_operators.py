"""The operators and Python functions of torch.profiler's traces that say what work belongs to.

A trace may have millions of both, and most launch nothing: those are left out before their times
and shapes are read.
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..columns import Ints
from .kineto_events import BOOKKEEPING, AnyEvent, EventBatch, TraceEvents

MODULE_CALL = "nn.Module: "
"""The profiler's name for a call of a module begins so; its class and number follow."""
_FUNCTION = re.compile(r"(?P<file>.+)\(\d+\): ", re.DOTALL)
_DIGIT = re.compile(rb"\d")
_INSTALLED = re.compile(r"<|.*(?:site|dist)-packages/|.*/lib/python\d")
"""Files of Python itself and of installed packages."""
_LIBRARIES = sys.stdlib_module_names | {
    "accelerate",
    "apex",
    "bitsandbytes",
    "deepspeed",
    "diffusers",
    "einops",
    "flash_attn",
    "lightning",
    "megatron",
    "numpy",
    "peft",
    "pytorch_lightning",
    "sglang",
    "torch",
    "torchvision",
    "transformer_engine",
    "transformers",
    "triton",
    "typing_extensions",
    "vllm",
    "xformers",
}
"""Packages of whose files the profiler writes the path from the package on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedOperators:
    """Operators that launched something or have a gradient, and the nodes of backward."""

    calls: EventBatch
    nodes: EventBatch
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
    operators = events.of_category("cpu_op")
    nodes = events.batch(event for event in operators if event.name.startswith(BOOKKEEPING))
    of_nodes = {event.args.sequence for event in nodes.events} - {None}
    launching = None if work is None else {event.args.external_id for event in work} - {None, 0}
    kept = []
    for event in operators:
        args = event.args
        is_kept = launching is None or args.external_id in launching or args.sequence in of_nodes
        if is_kept and not event.name.startswith(BOOKKEEPING):
            kept.append(event)
    calls = events.batch(kept)
    return LinkedOperators(calls=calls, nodes=nodes, forward=_forward(calls, nodes))


def _numbers(values: Iterable[object]) -> Ints:
    """The values as whole numbers; -1 for what is none of at most 62 bits."""
    whole = [value if isinstance(value, int) and -1 <= value < 2**62 else -1 for value in values]
    return np.array(whole, dtype=np.int64)


def _forward(calls: EventBatch, nodes: EventBatch) -> Ints:
    """For each node, the row of the operator that made it: the last one to begin with its number
    on the thread that it names.

    Each thread numbers its operators from 0, and nodes name the thread by a number that no other
    event has. A thread of operators is that of a number if it alone has all operators of the nodes
    with this number; where several have, or none has, nothing is known.
    """
    sequence = _numbers(event.args.sequence for event in calls.events)
    # only operators of forward have a number and no thread of forward
    sequence[_numbers(event.args.forward_thread for event in calls.events) > 0] = -1
    of_nodes = _numbers(event.args.sequence for event in nodes.events)
    forward_thread = _numbers(event.args.forward_thread for event in nodes.events)
    threads: dict[object, int] = {}
    of_calls = [threads.setdefault((event.pid, event.tid), len(threads)) for event in calls.events]
    thread = np.array(of_calls, dtype=np.int64)
    forward = np.full(len(of_nodes), -1, dtype=np.int64)
    is_linked = (of_nodes >= 0) & (forward_thread > 0)
    thread_of = _threads_by_number(sequence, thread, of_nodes, forward_thread * is_linked)
    for number, its_thread in thread_of.items():
        rows = np.flatnonzero((thread == its_thread) & (sequence >= 0))
        rows = rows[np.lexsort((calls.start_ns[rows], sequence[rows]))]
        wanted = np.flatnonzero(is_linked & (forward_thread == number))
        last = np.searchsorted(sequence[rows], of_nodes[wanted], side="right") - 1
        row = np.append(rows, -1)[last]
        is_same = np.append(sequence, -1)[row] == of_nodes[wanted]
        forward[wanted] = np.where(is_same, row, -1)
    return forward


def _threads_by_number(
    sequence: Ints, thread: Ints, of_nodes: Ints, forward_thread: Ints
) -> dict[int, int]:
    """The thread of each number by which nodes name a thread of forward, where only one fits."""
    fitting: dict[int, set[int]] = {}
    for number in np.unique(forward_thread[forward_thread > 0]).tolist():
        wanted = of_nodes[forward_thread == number]
        counts = {
            int(one): int(np.isin(wanted, sequence[thread == one]).sum())
            for one in np.unique(thread)
        }
        most = max(counts.values(), default=0)
        fitting[number] = {one for one, count in counts.items() if count == most and most}
    known: dict[int, int] = {}
    # a thread that is known to have one number has no other
    while alone := [number for number, fit in fitting.items() if len(fit) == 1]:
        for number in alone:
            taken = fitting.pop(number)
            known[number] = min(taken)
            for fit in fitting.values():
                fit -= taken
            break
    return known


def shape_text(event: AnyEvent) -> str:
    """Dimensions and types of the call's arguments, and, where its FLOPs depend on them, their
    values; empty without dimensions.
    """
    args = event.args
    if _DIGIT.search(args.dims) is None:
        return ""
    values = args.values if "conv" in event.name or "attention" in event.name else b"[]"
    return b"".join((b"[", args.dims, b",", args.types, b",", values, b"]")).decode()


def frames_of_program(events: TraceEvents) -> ProgramFrames:
    """The functions that no library has, and the calls of modules."""
    functions, modules = [], []
    is_of_program: dict[str, bool] = {}
    for event in events.of_category("python_function"):
        name = event.name
        if name.startswith(MODULE_CALL):
            modules.append(event)
            continue
        is_kept = is_of_program.get(name)
        if is_kept is None:
            is_kept = is_of_program[name] = _is_of_program(name)
        if is_kept:
            functions.append(event)
    return ProgramFrames(functions=events.batch(functions), modules=events.batch(modules))


def _is_of_program(name: str) -> bool:
    """Whether the frame is a function in a file of the program, not of Python or a library."""
    function = _FUNCTION.match(name)
    if function is None or _INSTALLED.match(name):
        return False
    first = function["file"].split("/")[0].removesuffix(".py")
    return first not in _LIBRARIES
