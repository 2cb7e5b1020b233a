"""Names of ranges that PyTorch, trainers and servers write by themselves, and what they stand for.

Names of phases are words that stand alone (`## forward ##`, `bwd`) or names that a program is known
to write. A name in which such a word only occurs (`my_forward_hook`) stands for nothing.
"""

import re

from .phases import LaunchPhase
from .step_profile import StepLabel

_AROUND = re.compile(r"^[\W_]+|[\W_]+$")
_SEPARATORS = re.compile(r"[\s_.\-]+")
_WORDS = {
    "fwd": LaunchPhase.FORWARD,
    "forward": LaunchPhase.FORWARD,
    "forward pass": LaunchPhase.FORWARD,
    "forward compute": LaunchPhase.FORWARD,
    "bwd": LaunchPhase.BACKWARD,
    "backward": LaunchPhase.BACKWARD,
    "backward pass": LaunchPhase.BACKWARD,
    "backward compute": LaunchPhase.BACKWARD,
    "optimizer": LaunchPhase.OPTIMIZER,
    "optimizer step": LaunchPhase.OPTIMIZER,
    "data": LaunchPhase.DATA,
    "data loading": LaunchPhase.DATA,
    "dataloader": LaunchPhase.DATA,
    "get batch": LaunchPhase.DATA,
    "load batch": LaunchPhase.DATA,
    "next batch": LaunchPhase.DATA,
}
"""Whole names of ranges, in lower case, with one space for what separates words."""
_OF_PROGRAMS = (
    # PyTorch's DataLoader, and Lightning around it
    (re.compile(r"enumerate\(DataLoader\)#"), LaunchPhase.DATA),
    (re.compile(r"\[pl\]\[profile\].{0,80}dataloader_next$"), LaunchPhase.DATA),
    # Lightning's hooks; its `optimizer_step` contains forward and backward
    (re.compile(r"\[pl\]\[profile\].{0,80}\.(?:training|validation)_step$"), LaunchPhase.FORWARD),
    (re.compile(r"\[pl\]\[profile\]\[Strategy\].{0,80}\.backward$"), LaunchPhase.BACKWARD),
    # DeepSpeed's engine
    (re.compile(r"DeepSpeedEngine\.forward$"), LaunchPhase.FORWARD),
    (re.compile(r"DeepSpeedEngine\.backward$"), LaunchPhase.BACKWARD),
    (re.compile(r"DeepSpeedEngine\.step$"), LaunchPhase.OPTIMIZER),
)
_PIECE = re.compile(r"\w{1,80}\((?P<pass>[FBW])\)$", re.ASCII)
"""A module's part of a pass, as schedules of pipelines name it: `attn(F)`, `mlp(B)`, `mlp(W)`."""
_PASSES = {"F": LaunchPhase.FORWARD, "B": LaunchPhase.BACKWARD, "W": LaunchPhase.WEIGHT_GRADIENTS}
TORCH_OPTIMIZER = re.compile(r"Optimizer\.step#")
TORCH_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#")
"""PyTorch puts these ranges around every optimizer."""
_TRAINER_STEP = re.compile(r"ProfilerStep#\d|\[pl\]\[profile\]run_training_batch$")
"""torch.profiler's own range from one `step()` to the next, and Lightning's."""
_SERVER_STEPS = (
    # vLLM: requests in context (prefill) and in generation (decode), with their tokens, and in
    # newer versions with sums that follow these
    r"execute_(?:\d+_)?context_(?P<new>\d+)\((?:sq)?(?P<new_tokens>\d+)\w{0,80}\)"
    r"_generation_(?P<old>\d+)\((?:sq)?(?P<old_tokens>\d+)\w{0,80}\)$",
    r"execute_new_(?P<new>\d+)_cached_(?P<old>\d+)$",
    # SGLang
    r"step\[(?P<mode>[A-Z_]{1,40}) bs=(?P<batch>\d+)(?: toks=(?P<tokens>\d+))?\]$",
    # TensorRT-LLM
    r"\[Executor\] _forward_step \d+: (?P<new>\d+) ctx reqs, (?P<new_tokens>\d+) ctx tokens, "
    r"(?P<old>\d+) gen reqs$",
)
_SERVER_STEP = [re.compile(pattern, re.ASCII) for pattern in _SERVER_STEPS]
_MODES = {"DECODE": "decode", "EXTEND": "prefill", "PREFILL": "prefill"}


def phase_named(name: str) -> LaunchPhase | None:
    """The phase that a range of this name stands for by itself; None for any other name."""
    for pattern, phase in _OF_PROGRAMS:
        if pattern.match(name):
            return phase
    if piece := _PIECE.match(name):
        return _PASSES[piece["pass"]]
    return _WORDS.get(_SEPARATORS.sub(" ", _AROUND.sub("", name)).casefold())


def is_piece(name: str) -> bool:
    """Whether the range is one module's part of a pass, so that a step has many of them."""
    return _PIECE.match(name) is not None


def is_trainer_step(name: str) -> bool:
    """Whether the range is a step by torch.profiler or a trainer."""
    return _TRAINER_STEP.match(name) is not None


def server_step(name: str) -> StepLabel | None:
    """What the name of a server's step says of it; None for any other range."""
    for pattern in _SERVER_STEP:
        if match := pattern.match(name):
            return _label(match.groupdict())
    return None


def _label(values: dict[str, str | None]) -> StepLabel:
    """The label from the numbers and the mode in the name of a server's step."""
    numbers = {key: int(text) for key, text in values.items() if text and text.isdecimal()}
    mode = values.get("mode")
    if mode is not None:
        kind = _MODES.get(mode, mode.replace("_", " ").lower())
        return StepLabel(kind=kind, batch=numbers.get("batch"), tokens=numbers.get("tokens"))
    tokens = None
    if "new_tokens" in numbers:
        # without a number of its own, a request in generation makes one token
        tokens = numbers["new_tokens"] + numbers.get("old_tokens", numbers["old"])
    return StepLabel(
        kind="prefill" if numbers["new"] else "decode",
        batch=numbers["new"] + numbers["old"],
        tokens=tokens,
    )
