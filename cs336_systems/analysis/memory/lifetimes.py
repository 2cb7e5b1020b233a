"""What memory holds, as far as its lifetime and the stacks of its events tell: for snapshots without notes.

Known for certain is whether memory was there before the recording and at its end. The stacks tell what an optimizer
made, and what autograd made in its own threads, which have no Python code of the program.
"""

import re
from collections.abc import Sequence

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


def made_by_optimizer(stack: Stack) -> bool:
    """Whether an optimizer's step, or the making of its state, is on the stack, and no call of the model within it."""
    for frame in stack:
        function = frame.name.rpartition(".")[2]
        if function in _CALLED_BY_STEP:
            return False
        if of_torch := _TORCH_OPTIM.search(frame.filename):
            if not of_torch[1]:
                return True
        elif _UPDATE.search(function) and _is_of_optimizer(frame):
            return True
    return False


def _is_of_optimizer(frame: Frame) -> bool:
    """Whether the file, its folder, or the class if the name has one, is named like an optimizer."""
    file = re.split(r"[/\\]", frame.filename)[-1]
    name = f"{file} {frame.name.rpartition('.')[0]}".lower()
    return bool(_OPTIMIZER.search(name) or _FOLDERS.search(frame.filename))


def made_by_autograd(stack: Stack) -> bool:
    """Whether the stack begins in PyTorch's engine of backward and not in a program, as in a thread of the engine."""
    python = [frame for frame in stack if frame.filename.endswith(".py")]
    return not python or bool(_ENGINE.search(python[-1].filename))


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


def optimizer_state(replay: Replay, stacks: Sequence[Stack]) -> Mask:
    """Allocations that a step of an optimizer made and left, and earlier ones of the same size that it replaced."""
    rows, events = replay.allocations, replay.memory.events
    is_step_of = np.array([made_by_optimizer(stack) for stack in stacks])
    is_made = events.action == Action.ALLOC
    others = np.append(0, np.cumsum(is_made & ~is_step_of[events.stack]))
    between = others[np.maximum(rows.free_requested, 0)] - others[rows.start + 1]
    is_left = (rows.free_requested == len(events)) | (between >= MIN_BETWEEN)
    is_state: Mask = is_step_of[rows.stack] & is_left  # blocks from before the recording may have their stack too
    # a free without a stack belongs to the step that allocated last
    last_made = np.maximum.accumulate(np.where(is_made, np.arange(len(events)), 0)) if len(events) else events.stack
    stack_of_free = np.where(events.stack == NO_STACK, events.stack[last_made], events.stack)
    is_freed = (rows.start == BEFORE) & (rows.free_requested >= 0) & (rows.free_requested < len(events))
    old = np.flatnonzero(is_freed)
    is_replaced = is_step_of[stack_of_free[rows.free_requested[old]]]
    is_replaced &= np.isin(rows.requested_bytes[old], rows.requested_bytes[is_state])
    is_state[old[is_replaced]] = True
    return is_state


def gradients(replay: Replay, stacks: Sequence[Stack]) -> Mask:
    """Allocations by autograd that were there while an optimizer worked, or that `zero_grad` freed.

    None if no stack has Python code: then it was not recorded.
    """
    rows, events = replay.allocations, replay.memory.events
    is_autograds = np.array([made_by_autograd(stack) for stack in stacks])
    if is_autograds[events.stack].all():
        return np.zeros(len(rows), dtype=np.bool_)
    is_step_of = np.array([made_by_optimizer(stack) for stack in stacks])
    is_cleared_by = np.array([any(frame.name.endswith("zero_grad") for frame in stack) for stack in stacks])
    steps = np.append(0, np.cumsum(is_step_of[events.stack]))
    was_there = steps[np.maximum(rows.free_requested, 0)] - steps[rows.start + 1] > 0
    is_cleared = np.append(is_cleared_by[events.stack], False)[rows.free_requested]
    is_gradient: Mask = (rows.start != BEFORE) & is_autograds[rows.stack] & (was_there | is_cleared)
    return is_gradient


def codes_without_notes(replay: Replay, stacks: Sequence[Stack]) -> Ints:
    """The code of each allocation's category, as far as lifetimes and stacks tell."""
    found = by_lifetime(replay)
    found[gradients(replay, stacks)] = CODES[Category.GRADIENTS]
    found[optimizer_state(replay, stacks)] = CODES[Category.OPTIMIZER_STATE]
    return found
