"""One call of a collective: its kind, its bytes, and what of them a rank sends; and what is averaged in one call."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

BUCKET_BYTES = 25 * 2**20
"""Gradients that are averaged together while backward goes on, in ddp-overlap and in PyTorch's way."""
FIRST_BUCKET_BYTES = 2**20
"""The first bucket of PyTorch's DistributedDataParallel, which is smaller so that its all-reduce starts early."""


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


def buckets_of(sizes: Mapping[str, int], bucket_bytes: int, first_bytes: int | None = None) -> list[list[str]]:
    """The names in their order, in buckets that end with the one that fills them; `first_bytes` fill the first."""
    buckets: list[list[str]] = []
    filled, limit = 0, 0
    for name, size in sizes.items():
        if filled >= limit:
            limit = bucket_bytes if buckets or first_bytes is None else first_bytes
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return buckets
