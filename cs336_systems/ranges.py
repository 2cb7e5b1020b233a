"""Names of the ranges that annotate a step, shared by the model and the analysis."""

from dataclasses import dataclass
from enum import StrEnum


class Range(StrEnum):
    """A part of a run, of a step or of the model; blocks have `block_range`."""

    WARMUP = "warmup"
    MEASURE = "measure"
    STEP = "step"
    DATA = "data"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    EMBEDDING = "embedding"
    ATTENTION = "attention"
    SCORES = "attention.scores"
    SOFTMAX = "attention.softmax"
    VALUES = "attention.values"
    FFN = "ffn"
    NORM = "norm"
    LM_HEAD = "lm_head"


@dataclass(frozen=True, kw_only=True)
class PhaseNames:
    """Names of the ranges around phases and steps in a trace, which other programs choose
    freely.
    """

    forward: str = Range.FORWARD
    """Range around forward. Without ranges of phases, backward is what autograd's own thread
    launched.
    """
    loss: str = Range.LOSS
    """Range around the loss, if it stands beside forward."""
    backward: str = Range.BACKWARD
    """Range around backward."""
    communication: str = Range.COMMUNICATION
    """Range around what several ranks do between backward and the optimizer."""
    optimizer: str = Range.OPTIMIZER
    """Range around the optimizer; without it PyTorch's own, Optimizer.step#NAME."""
    data: str = Range.DATA
    """Range around the making of the batch; without it that of PyTorch's DataLoader."""
    step: str = Range.STEP
    """Range around a step, or a pattern; without it torch.profiler's own, ProfilerStep#*."""
    warmup: str = Range.WARMUP
    """Range around warm-up steps; they are left out."""
    measure: str = Range.MEASURE
    """Range around the steps to look at."""


def block_range(index: int) -> str:
    """Name of the range around block `index`, counted from 0."""
    return f"block.{index}"


def rank_range(rank: int) -> str:
    """Name of the range around the measured steps of a rank, which tells it from others in one
    file.
    """
    return f"rank {rank}"
