"""Names of the ranges that annotate a step, shared by the model and the analysis."""

from enum import StrEnum


class Range(StrEnum):
    """A part of a run, of a step or of the model; blocks have `block_range`."""

    WARMUP = "warmup"
    MEASURE = "measure"
    STEP = "step"
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


def block_range(index: int) -> str:
    """Name of the range around block `index`, counted from 0."""
    return f"block.{index}"


def rank_range(rank: int) -> str:
    """Name of the range around the measured steps of a rank, which tells it from others in one file."""
    return f"rank {rank}"
