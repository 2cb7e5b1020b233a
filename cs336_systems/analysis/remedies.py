"""Ways to make a step shorter, in words and as flags of this program."""

from collections.abc import Collection
from dataclasses import replace
from enum import Enum
from typing import Any

from ..config import (
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
    """A way to make a step shorter, in words, and as flags of this project for a run that does not
    use it already.

    If the configuration is unknown, for example of another program's trace, the advice names no
    flags.
    """

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
        """The flags of this change, and those that they need; its words if the configuration is
        unknown.
        """
        if config is None:
            return self.value
        flags = [_flag(name, value) for name, value in _changes(self, config).items()]
        return " ".join(flags) or "a larger --batch-size"

    def is_open_to(self, config: RunConfig | None) -> bool:
        """Whether the run could use it and does not; True if the configuration is unknown.

        Steps of several ranks that overlap communication already have another way: a larger batch
        computes longer for the same bytes.
        """
        if config is None:
            return True
        return config.is_shared if self is Remedy.OVERLAP else self.applied_to(config) is not None


OF_PRECISION = {
    Precision.TF32: Remedy.TF32,
    Precision.BF16: Remedy.BF16,
    Precision.FP16: Remedy.FP16,
}


_SETTINGS: dict[Remedy, dict[str, Any]] = {
    Remedy.COMPILE: {"compile": CompileMode.DEFAULT},
    Remedy.OPTIMIZER: {"optimizer": OptimizerKind.FUSED},
    Remedy.TF32: {"precision": Precision.TF32},
    Remedy.BF16: {"precision": Precision.BF16},
    Remedy.FP16: {"precision": Precision.FP16},
    Remedy.OVERLAP: {"parallel": Parallel.DDP_OVERLAP},
}
"""The settings of remedies that are the same for every run."""


def _changes(remedy: Remedy, config: RunConfig) -> dict[str, Any]:
    """The settings that the remedy changes, and those that it needs; empty for a run that has it
    or cannot have it.
    """
    if not _is_lacking(remedy, config):
        return {}
    if remedy is Remedy.ATTENTION:
        return {"model": replace(config.model, attention=Attention.SDPA)}
    if remedy is not Remedy.GRAPHS:
        return _SETTINGS[remedy]
    changes = {"cuda_graph": True, **_changes(Remedy.OPTIMIZER, config)}
    if config.warmup_steps <= EAGER_STEPS_BEFORE_GRAPH:
        changes["warmup_steps"] = EAGER_STEPS_BEFORE_GRAPH + 1
    return changes


def _is_lacking(remedy: Remedy, config: RunConfig) -> bool:
    """Whether the run does without the remedy, and nothing of the remedy excludes it."""
    has_no_half = config.precision in (Precision.FP32, Precision.TF32)
    is_naive = config.model_factory is None and config.model.attention is Attention.NAIVE
    is_training = config.mode is Mode.TRAIN
    is_graphed = config.cuda_graph or config.compile is CompileMode.REDUCE_OVERHEAD
    return {
        Remedy.COMPILE: config.compile is CompileMode.NONE,
        Remedy.ATTENTION: is_naive,
        Remedy.OPTIMIZER: is_training and config.optimizer is not OptimizerKind.FUSED,
        Remedy.GRAPHS: not is_graphed,
        Remedy.TF32: config.precision is Precision.FP32,
        Remedy.BF16: has_no_half,
        Remedy.FP16: has_no_half,
        Remedy.OVERLAP: config.parallel in (Parallel.DDP_NAIVE, Parallel.DDP_FLAT),
    }[remedy]


def _flag(name: str, value: object) -> str:
    """A setting as it is typed on the command line."""
    if name == "model":
        return f"--attention {Attention.SDPA}"
    if value is Precision.BF16:
        return "--mixed-precision"
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def remedies(
    config: RunConfig | None, *candidates: Remedy, in_use: Collection[Remedy] | None = None
) -> str:
    """The candidates that are open to the run and not `in_use`, separated by commas; empty if
    there are none. `in_use` is None where nothing shows what a run without configuration does.
    """
    named = []
    for remedy in candidates:
        if remedy.is_open_to(config) and remedy not in (in_use or ()):
            named.append(remedy.named_for(config))
    if named and config is None and in_use is None:
        named.append(NOT_IN_USE)
    return ", ".join(named)


def against_launches(config: RunConfig | None, in_use: Collection[Remedy] | None = None) -> str:
    """What helps if launching kernels limits the step, as a phrase that follows `use`; `in_use` as
    for `remedies`.
    """
    ways = "a larger model or batch"
    candidates = (Remedy.COMPILE, Remedy.ATTENTION, Remedy.OPTIMIZER)
    kernels = remedies(config, *candidates, in_use=in_use)
    graphs = remedies(config, Remedy.GRAPHS, in_use=in_use)
    if kernels:
        kernels = f"fewer kernels ({kernels})"
    if graphs:
        graphs = f"CUDA graphs ({graphs})"
        if config is None:
            graphs = "CUDA graphs" if in_use is not None else f"CUDA graphs {NOT_IN_USE}"
    if kernels and graphs:
        return f"{ways}, {kernels}, or {graphs}"
    return ", or ".join(way for way in (ways, kernels, graphs) if way)
