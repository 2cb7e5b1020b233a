"""What memory holds, as far as its lifetime and the stacks of its events tell: for snapshots without notes.

Known for certain is whether memory was there before the recording and at its end. The stacks tell what an optimizer
made, and what autograd made in its own threads, which have no Python code of the program.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

import numpy as np

from cs336_systems.analysis.columns import Ints, Mask
from cs336_systems.analysis.memory.allocations import BEFORE, Replay
from cs336_systems.analysis.memory.profile import CODES, MIN_LATER, Category
from cs336_systems.analysis.memory.snapshot import NO_STACK, Action, Frame, Stack

MIN_BETWEEN = 4
"""Allocations outside of optimizers from which on a step has ended; a thread that loads data makes fewer meanwhile."""
_TORCH_OPTIM = re.compile(r"(?:^|[/\\])torch[/\\]optim[/\\](lr_scheduler|swa_utils)?")
_OPTIMIZER = re.compile(
    r"(?<![a-z])(?:optims?|optimi[sz]ers?|optimi[sz]ation|lion|lamb|lars|soap|stage)(?![a-z])"
    r"|adam|adagrad|adadelta|adafactor|rmsprop|sgd|lbfgs|muon|shampoo|sophia|prodigy"
)
"""Parts of the names of files and classes of optimizers; `stage3.py` is that of DeepSpeed's ZeRO."""
_FOLDERS = re.compile(r"[/\\](?:optims?|optimizers?)[/\\][^/\\]*$")
_UPDATE = re.compile(r"(?:^|_)(?:step|update|init|state|states)(?:_|$)")
_CALLED_BY_STEP = frozenset({"forward", "backward", "closure", "training_step", "zero_grad", "_call_impl"})
"""Functions that are no part of an optimizer even if its step calls them, as it calls a closure."""
_ENGINE = re.compile(r"[/\\]torch[/\\](?:autograd|_functorch|_inductor)[/\\]")


class _Call(Enum):
    """What a frame says of its stack."""

    OPTIMIZER = auto()
    INNER = auto()
    """A function that is no part of an optimizer even if its step calls it."""
    ZERO_GRAD = auto()


def _call_of(frame: Frame) -> _Call | None:
    """Judge it by its folder in PyTorch, or by how its function and its file or class are named; None says nothing."""
    name, _, function = frame.name.rpartition(".")
    if function in _CALLED_BY_STEP:
        return _Call.ZERO_GRAD if function == "zero_grad" else _Call.INNER
    if of_torch := _TORCH_OPTIM.search(frame.filename):
        return None if of_torch[1] else _Call.OPTIMIZER
    file = re.split(r"[/\\]", frame.filename)[-1]
    is_named = _OPTIMIZER.search(f"{file} {name}".lower()) or _FOLDERS.search(frame.filename)
    return _Call.OPTIMIZER if is_named and _UPDATE.search(function) else None


@dataclass(frozen=True, slots=True)
class Makers:
    """What each stack of a snapshot says of who called."""

    is_optimizer: Mask
    """An optimizer's step, or the making of its state, is on it, and no call of the model within."""
    is_autograd: Mask
    """It begins in PyTorch's engine of backward, whose threads run no other Python code, and not in a program."""
    clears: Mask
    """`zero_grad` is on it."""


def makers_of(stacks: Sequence[Stack]) -> Makers:
    """Judge each stack; every different frame is looked at once."""
    call_of = {frame: _call_of(frame) for frame in {*chain.from_iterable(stacks)}}
    told = [[call for frame in stack if (call := call_of[frame])] for stack in stacks]
    outermost = [next((f.filename for f in reversed(stack) if f.filename.endswith(".py")), "") for stack in stacks]
    return Makers(
        is_optimizer=np.array([calls[:1] == [_Call.OPTIMIZER] for calls in told], dtype=np.bool_),
        is_autograd=np.array([not file or bool(_ENGINE.search(file)) for file in outermost], dtype=np.bool_),
        clears=np.array([_Call.ZERO_GRAD in calls for calls in told], dtype=np.bool_),
    )


def by_lifetime(replay: Replay) -> Ints:
    """The code of each allocation's category by when it was there alone."""
    rows, events = replay.allocations, replay.memory.events
    made = np.append(0, np.cumsum(events.action == Action.ALLOC))
    is_old, is_kept = rows.start == BEFORE, rows.free_requested == len(events)
    is_long = made[np.maximum(rows.free_requested, 0)] - made[rows.start + 1] >= MIN_LATER
    choices = (Category.HELD, Category.EARLIER, Category.KEPT, Category.LATER)
    return np.select(
        [replay.is_held_throughout, is_old, is_kept, is_long], [CODES[choice] for choice in choices],
        default=CODES[Category.TEMPORARY],
    )  # fmt: skip


def optimizer_state(replay: Replay, makers: Makers) -> Mask:
    """Allocations that a step of an optimizer made and left, and earlier ones of the same size that it replaced."""
    rows, events, is_optimizer = replay.allocations, replay.memory.events, makers.is_optimizer
    is_made = events.action == Action.ALLOC
    others = np.append(0, np.cumsum(is_made & ~is_optimizer[events.stack]))
    between = others[np.maximum(rows.free_requested, 0)] - others[rows.start + 1]
    is_left = (rows.free_requested == len(events)) | (between >= MIN_BETWEEN)
    is_state: Mask = is_optimizer[rows.stack] & is_left  # blocks from before the recording may have their stack too
    # a free without a stack belongs to the step that allocated last
    last_made = np.maximum.accumulate(np.where(is_made, np.arange(len(events)), 0)) if len(events) else events.stack
    stack_of_free = np.where(events.stack == NO_STACK, events.stack[last_made], events.stack)
    old = np.flatnonzero((rows.start == BEFORE) & (rows.free_requested >= 0) & (rows.free_requested < len(events)))
    is_replaced = is_optimizer[stack_of_free[rows.free_requested[old]]]
    is_replaced &= np.isin(rows.requested_bytes[old], rows.requested_bytes[is_state])
    is_state[old[is_replaced]] = True
    return is_state


def gradients(replay: Replay, makers: Makers) -> Mask:
    """Allocations by autograd that were there while an optimizer worked, or that `zero_grad` freed.

    None if no stack has Python code: then it was not recorded.
    """
    rows, events = replay.allocations, replay.memory.events
    if makers.is_autograd[events.stack].all():
        return np.zeros(len(rows), dtype=np.bool_)
    steps = np.append(0, np.cumsum(makers.is_optimizer[events.stack]))
    was_there = steps[np.maximum(rows.free_requested, 0)] - steps[rows.start + 1] > 0
    is_cleared = np.append(makers.clears[events.stack], False)[rows.free_requested]
    is_gradient: Mask = (rows.start != BEFORE) & makers.is_autograd[rows.stack] & (was_there | is_cleared)
    return is_gradient


def codes_without_notes(replay: Replay, stacks: Sequence[Stack]) -> Ints:
    """The code of each allocation's category, as far as lifetimes and stacks tell."""
    found, makers = by_lifetime(replay), makers_of(stacks)
    found[gradients(replay, makers)] = CODES[Category.GRADIENTS]
    found[optimizer_state(replay, makers)] = CODES[Category.OPTIMIZER_STATE]
    return found
