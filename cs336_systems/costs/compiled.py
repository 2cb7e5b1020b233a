"""Peak memory and kernels of a step under torch.compile.

The compiler takes seconds for each block of a model, so that only shallow models are compiled
(`compiling.py`), two and four blocks deep, or three and five. Every further two blocks add to the
step what the two of the deeper one add: by twos, because the compiled code gives the memory of one
block's buffers to the next one's, and takes it back in the one after that.
"""

from functools import lru_cache

import msgspec

from ..config import SETTINGS, CompileMode, Device, Phase, RunConfig
from .deepened import deepened
from .depth import DepthError, kinds_of_blocks, of_depth
from .memory import MAX_LAYERS, MemoryPrediction, memory_of, predict_memory
from .tape import Tape, phases_of
from .traces import as_costed, compiled_tapes, is_at_hand, is_compiled, is_compiled_at_hand

STRIDE = 2
"""Blocks by which the deeper of two compiled models is deeper."""
LEAST_BLOCKS = 2
"""Blocks of the shallower one, if the model has an even number of blocks."""

LIBRARY_CALLS = 3
"""Calls of an eager step that take the host as long as a matmul or an attention of a compiled one,
with its part of the guards and of the wrappers around graphs, where a kernel in Triton counts as
one call. From the host's times of half of 30 compiled steps of gpt2 and gpt2-xl on H200 hosts, in
calls of the eager steps of the same sweeps; of the other half nine in ten are within the interval
of launches (`tests/costs/test_compiled.py`).
"""

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
    """Predict the memory of a CUDA run under torch.compile; raise NotForetoldError for what is not
    predicted.
    """
    return _predict(as_costed(config))


@lru_cache(maxsize=4096)
def _predict(config: RunConfig) -> MemoryPrediction:
    """The same, computed."""
    return memory_of(compiled_tape(config), is_graphed=config.cuda_graph)


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


def compiled_tape(config: RunConfig) -> Tape:
    """The steps of a run under torch.compile until the steady state; raise NotForetoldError where
    there are none.
    """
    if reason := why_refused(config):
        raise NotForetoldError(reason)
    return _compiled_tape(as_costed(config).without_graph)


@lru_cache(maxsize=256)
def _compiled_tape(config: RunConfig) -> Tape:
    """The same, of a step that nothing in the settings refuses."""
    steps, times = steps_to_compile(config)
    tapes = compiled_tapes(steps)
    for tape in tapes:
        if not tape.steps:
            raise NotForetoldError(tape.failure)
    tape = tapes[0]
    if times:
        shallow, deeper = tapes
        tape = deepened(shallow, deeper, times)
    return without_views(tape)


def without_views(tape: Tape) -> Tape:
    """The tape as inductor's code launches it. That makes views and buffers in C++, which take the
    host next to nothing, so that forward and backward only call what they launch. Its launcher of a
    kernel in Triton takes the host 7 to 9 us (meta-pytorch/tritonbench, pull request 1017, on a
    GB200), about as long as a call of an eager step; for others see LIBRARY_CALLS.
    """
    makes, launches = list(tape.makes), list(tape.launches)
    for number in range(len(tape.steps)):
        for phase, _, (first, stop) in phases_of(tape, number):
            if phase in (Phase.FORWARD, Phase.BACKWARD):
                for place in range(first, stop):
                    launches[place] = tape.launches[place] + len(tape.makes)
    for (_, make, *arguments), operation in zip(tape.makes, tape.operations, strict=True):
        # what is called besides the operation itself
        more_calls = LIBRARY_CALLS - 1 if operation.is_matmul else 0
        makes.append((more_calls, make, *arguments))
    return msgspec.structs.replace(tape, makes=makes, launches=launches)


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
    steps = [of_depth(config, depth) for depth in (shallow, shallow + STRIDE)]
    return steps, (blocks - shallow) // STRIDE


def _number_of_blocks(config: RunConfig) -> int:
    """How many equal blocks the model has; 0 if its blocks are not equal, or not known."""
    try:
        kinds = kinds_of_blocks(uncompiled(config))
    except DepthError:
        return 0
    return 0 if any(kinds) else len(kinds)


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
