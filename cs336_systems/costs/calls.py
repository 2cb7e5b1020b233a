"""One call of a collective: its kind, its bytes and the part that a rank sends; and buckets, averaged in one call."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

BUCKET_BYTES = 25 * 2**20
"""Least bytes of a full bucket of gradients, averaged during backward, in ddp-overlap and PyTorch's DDP."""
FIRST_BUCKET_BYTES = 2**20
"""The first bucket of PyTorch's DistributedDataParallel, which is smaller so that its all-reduce starts early."""


class Collective(StrEnum):
    """An exchange among all ranks. In a push each rank copies a tensor of its own to every other rank's memory."""

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
    """Bytes of the whole tensors: of all ranks' parts together, if each rank has a part."""


def sent_share(collective: Collective, ranks: int) -> float:
    """Part of a call's bytes that each rank of a ring sends; an all-reduce is a reduce-scatter and an all-gather."""
    if collective is Collective.PUSH:
        return ranks - 1
    return (2 if collective is Collective.ALL_REDUCE else 1) * (ranks - 1) / ranks


def call_of(collective: Collective, num_bytes: int) -> Call:
    """The call of that many bytes."""
    return Call(collective=collective, num_bytes=num_bytes)


def buckets_of(sizes: Mapping[str, int], bucket_bytes: int, first_bytes: int | None = None) -> list[list[str]]:
    """The names in order, in buckets; the name that fills a bucket is its last. `first_bytes` fill the first bucket."""
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
