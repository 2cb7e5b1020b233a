"""What the stack of an allocation tells: whether an optimizer or autograd made it, and at which
lines of the program.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, pairwise

import numpy as np

from ..columns import Mask
from .profile import Place
from .snapshot import UNRECORDED, Frame, Stack

_TORCH_OPTIM = re.compile(r"(?:^|[/\\])torch[/\\]optim[/\\](lr_scheduler|swa_utils)?")
_OPTIMIZER = re.compile(
    r"(?<![a-z])(?:optims?|optimi[sz]ers?|optimi[sz]ation|lion|lamb|lars|soap)(?![a-z])"
    r"|adam|adagrad|adadelta|adafactor|rmsprop|sgd|lbfgs|muon|shampoo|sophia|prodigy"
)
"""Parts of the names of optimizers, of which a class has one, and a file as its last word."""
_FOLDERS = re.compile(r"[/\\](?:optims?|optimizers?)[/\\][^/\\]*$|[/\\]zero[/\\]stage_?\d[^/\\]*$")
"""Folders of optimizers, and the files of DeepSpeed's ZeRO."""
_UPDATE = re.compile(r"(?:^|_)(?:step|update|init|state|states)(?:_|$)")
_OF_TRAINING = re.compile(r"(?:^|_)(?:train|training|evaluate|eval|model|batch|loss|epoch)(?:_|$)")
"""Parts of the names of functions around an optimizer, as `train_step` and `init_model`."""
_PROGRAM_NAME = re.compile(r"train|tune|model|eval|loop|runner|main|bench|(?:^|_)(?:run|test|exp)")
"""Parts of the names of programs and classes that are named after the optimizer that they use, as
`train_adamw.py`.
"""
_CALLED_BY_STEP = frozenset(
    {"forward", "backward", "closure", "training_step", "zero_grad", "_call_impl"}
)
"""Functions that are no part of an optimizer even if its step calls them, as it calls a closure."""
_ENGINE = re.compile(r"[/\\]torch[/\\](?:autograd|_functorch|_inductor)[/\\]")


class _FrameRole(Enum):
    """What a frame says of its stack."""

    OPTIMIZER = auto()
    INNER = auto()
    """A function that is no part of an optimizer even if its step calls it."""
    ZERO_GRAD = auto()


def _role_of(frame: Frame) -> _FrameRole | None:
    """Judge a frame by its folder in PyTorch, or by how its function, file and class are named.

    None means that the frame says nothing.
    """
    name, _, function = frame.name.rpartition(".")
    if function in _CALLED_BY_STEP:
        return _FrameRole.ZERO_GRAD if function == "zero_grad" else _FrameRole.INNER
    if of_torch := _TORCH_OPTIM.search(frame.filename):
        return None if of_torch[1] else _FrameRole.OPTIMIZER
    if not _UPDATE.search(function) or _OF_TRAINING.search(function):
        return None
    file = re.split(r"[/\\]", frame.filename)[-1].removesuffix(".py")
    is_in_folder = _FOLDERS.search(frame.filename) is not None
    is_optimizer = is_in_folder or _is_named(name) or _is_named(file, file.split("_")[-1])
    return _FrameRole.OPTIMIZER if is_optimizer else None


def _is_named(name: str, telling: str | None = None) -> bool:
    """Whether a class or a file is named as an optimizer, by its `telling` part, and not as a
    program that trains.
    """
    is_of_training = _PROGRAM_NAME.search(name.lower()) is not None
    return not is_of_training and _OPTIMIZER.search((telling or name).lower()) is not None


@dataclass(frozen=True, slots=True)
class Callers:
    """Which code called the allocator, for each stack of a snapshot."""

    is_optimizer: Mask
    """An optimizer's step, or the making of its state, and no call of the model within."""
    is_autograd: Mask
    """PyTorch's engine of backward: its threads run no other Python code, so no frame of the
    program is outermost.
    """
    is_zero_grad: Mask
    """`zero_grad` is on the stack."""


def callers_of(stacks: Sequence[Stack]) -> Callers:
    """Judge each stack; every different frame is looked at once."""
    role_of = {frame: _role_of(frame) for frame in {*chain.from_iterable(stacks)}}
    is_optimizer, is_autograd, is_zero_grad = (
        np.zeros(len(stacks), dtype=np.bool_) for _ in range(3)
    )
    for row, stack in enumerate(stacks):
        roles = [role for frame in stack if (role := role_of[frame])]
        files = [frame.filename for frame in stack if frame.filename.endswith(".py")]
        is_optimizer[row] = roles[:1] == [_FrameRole.OPTIMIZER]
        if stack != UNRECORDED:
            is_autograd[row] = not files or _ENGINE.search(files[-1]) is not None
        is_zero_grad[row] = _FrameRole.ZERO_GRAD in roles
    return Callers(is_optimizer, is_autograd, is_zero_grad)


MAX_PLACES = 6
PATH_PARTS = 2
"""Parts of a file's path that are kept; the others say more about the machine than about the
program.
"""
_TORCH = re.compile(r"(?:^|[/\\](?:site|dist)-packages[/\\])torch[/\\]")
_INSTALLED = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]"
    r"|[/\\]Python3\d+[/\\]Lib[/\\]|[/\\]torchinductor_[^/\\]*[/\\]|^<frozen "
)
"""Folders of installed packages, of the standard library and of code that Inductor generates."""
_LIBRARY = re.compile(
    r"(?:^|[/\\])(?:torch|torchvision|triton|transformers|peft|trl|accelerate|bitsandbytes|datasets"
    r"|diffusers|lightning|pytorch_lightning|lightning_fabric|deepspeed|megatron|fairscale|apex"
    r"|transformer_engine|xformers|flash_attn|unsloth|vllm|sglang)[/\\]"
)
"""Packages that are often used from a checkout instead of being installed."""
_PROGRAM = re.compile(r"\.py$|^<ipython-input|^<stdin>$")
_FORWARD = re.compile(r"(\w+)\.forward$")


def code_places(stack: Stack) -> tuple[Place, ...]:
    """The innermost calls in Python code outside of libraries.

    Those in libraries are taken only if there are no others: first those in checkouts, whose
    folders are only named like a library, then those in installed packages other than PyTorch.
    """
    of_python = [
        frame
        for frame in stack
        if _PROGRAM.search(frame.filename) and not _TORCH.search(frame.filename)
    ]
    not_installed = [frame for frame in of_python if not _INSTALLED.search(frame.filename)]
    of_program = [frame for frame in not_installed if not _LIBRARY.search(frame.filename)]
    return tuple(
        Place(file=short_path(frame.filename), line=frame.line, function=frame.name)
        for frame in (of_program or not_installed or of_python)[:MAX_PLACES]
    )


def is_of_program(filename: str) -> bool:
    """Whether the file is Python code of the program itself, and not of a library."""
    is_library = any(
        folder.search(filename) is not None for folder in (_TORCH, _INSTALLED, _LIBRARY)
    )
    return _PROGRAM.search(filename) is not None and not is_library


def short_path(filename: str) -> str:
    """The last parts of the file's path."""
    return "/".join(re.split(r"[/\\]", filename)[-PATH_PARTS:])


def module_of(stack: Stack) -> str:
    """The class of the innermost module on the stack, whose `forward` is named with its class.

    The `forward` of a function of autograd is no module's. Empty if no frame names a class.
    """
    for frame, caller in pairwise((*stack, UNRECORDED[0])):
        named = _FORWARD.search(frame.name)
        if named and not _ENGINE.search(caller.filename):
            return named[1]
    return ""
