"""Ways to make a step shorter, as flags of this project, without those that a run uses already.

If the configuration is unknown, for example of another program's trace, the advice names no flags and may include ways
that are in use.
"""

from dataclasses import replace
from enum import Enum
from itertools import starmap
from typing import Any

from cs336_systems.config import (
    EAGER_STEPS_BEFORE_GRAPH,
    Attention,
    CompileMode,
    Mode,
    OptimizerKind,
    Parallel,
    Precision,
    RunConfig,
)

NOT_IN_USE = "where not in use yet"


class Remedy(Enum):
    """A way to make a step shorter, in words."""

    COMPILE = "torch.compile"
    ATTENTION = "fused attention"
    OPTIMIZER = "a fused optimizer"
    GRAPHS = "CUDA graphs"
    TF32 = 'TF32 (torch.set_float32_matmul_precision("high"))'
    BF16 = "autocast to bf16"
    FP16 = "autocast to fp16"
    OVERLAP = "communication during backward"

    def applied_to(self, config: RunConfig) -> RunConfig | None:
        """The run with this change too; None if the run has it already or cannot have it."""
        changes = _changes(self, config)
        try:
            return replace(config, **changes) if changes else None
        except ValueError:  # another setting excludes it
            return None

    def named_for(self, config: RunConfig | None) -> str:
        """The flags of this change, and those that they need; its words if the configuration is unknown."""
        if config is None:
            return self.value
        changes = _changes(self, config)
        return " ".join(starmap(_flag, changes.items())) if changes else "a larger --batch-size"

    def is_open_to(self, config: RunConfig | None) -> bool:
        """Whether the run could use it and does not; True if the configuration is unknown.

        Steps of several ranks that overlap communication already have another way: a larger batch computes longer for
        the same bytes.
        """
        if config is None or self is Remedy.OVERLAP:
            return config is None or config.is_shared
        return self.applied_to(config) is not None


OF_PRECISION = {Precision.TF32: Remedy.TF32, Precision.BF16: Remedy.BF16, Precision.FP16: Remedy.FP16}


def _changes(remedy: Remedy, config: RunConfig) -> dict[str, Any]:
    """The settings that the remedy changes, and those that it needs; empty for a run that has it or cannot have it."""
    match remedy:
        case Remedy.COMPILE if config.compile is CompileMode.NONE:
            return {"compile": CompileMode.DEFAULT}
        case Remedy.ATTENTION if config.model_factory is None and config.model.attention is Attention.NAIVE:
            return {"model": replace(config.model, attention=Attention.SDPA)}
        case Remedy.OPTIMIZER if config.mode is Mode.TRAIN and config.optimizer is not OptimizerKind.FUSED:
            return {"optimizer": OptimizerKind.FUSED}
        case Remedy.GRAPHS if not config.cuda_graph and config.compile is not CompileMode.REDUCE_OVERHEAD:
            least = EAGER_STEPS_BEFORE_GRAPH + 1
            warmup = {"warmup_steps": least} if config.warmup_steps < least else {}
            return {"cuda_graph": True, **_changes(Remedy.OPTIMIZER, config), **warmup}
        case Remedy.TF32 | Remedy.BF16 | Remedy.FP16:
            (precision,) = (each for each, own in OF_PRECISION.items() if own is remedy)
            slower = (Precision.FP32,) if remedy is Remedy.TF32 else (Precision.FP32, Precision.TF32)
            return {"precision": precision} if config.precision in slower else {}
        case Remedy.OVERLAP if config.parallel in (Parallel.DDP_NAIVE, Parallel.DDP_FLAT):
            return {"parallel": Parallel.DDP_OVERLAP}
    return {}


def _flag(name: str, value: object) -> str:
    """The setting on the command line."""
    if name == "model":
        return f"--attention {Attention.SDPA}"
    if value is Precision.BF16:
        return "--mixed-precision"
    return f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")


def remedies(config: RunConfig | None, *candidates: Remedy) -> str:
    """The candidates that are open to the run, separated by commas; empty if there are none."""
    found = [remedy.named_for(config) for remedy in candidates if remedy.is_open_to(config)]
    return ", ".join([*found, NOT_IN_USE] if found and config is None else found)


def against_launches(config: RunConfig | None) -> str:
    """What helps if launching kernels limits the step, as a phrase that follows `use`."""
    ways = ["a larger model or batch"]
    if kernels := remedies(config, Remedy.COMPILE, Remedy.ATTENTION, Remedy.OPTIMIZER):
        ways.append(f"fewer kernels ({kernels})")
    if graphs := remedies(config, Remedy.GRAPHS):
        ways.append(f"CUDA graphs {NOT_IN_USE}" if config is None else f"CUDA graphs ({graphs})")
    return ", or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)
