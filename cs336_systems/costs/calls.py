"""One call of a collective: its kind, its bytes, and what of them a rank sends."""

from dataclasses import dataclass
from enum import StrEnum


class Collective(StrEnum):
    """An exchange among all ranks. In a push each copies a tensor of its own to every other one's memory."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    BROADCAST = "broadcast"
    PUSH = "push"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective that is launched as one; several tensors that are averaged or gathered together are one call."""

    collective: Collective
    num_bytes: int
    """Of the whole tensors: those of all ranks' parts, where each has a part."""


def sent_share(collective: Collective, ranks: int) -> float:
    """Part of a call's bytes that each rank of a ring sends; an all-reduce is a reduce-scatter and an all-gather."""
    if collective is Collective.PUSH:
        return ranks - 1
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1) / ranks


def call_of(collective: Collective, num_bytes: int) -> Call:
    """The call of that many bytes."""
    return Call(collective=collective, num_bytes=num_bytes)
