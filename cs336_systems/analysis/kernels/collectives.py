"""The kinds of collectives, concluded from the names of their kernels and copies."""

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

import numpy as np

from cs336_systems.analysis.columns import Ints
from cs336_systems.analysis.kernels.classes import MAX_NAME, KernelClass, classify_kernel
from cs336_systems.analysis.kernels.phases import Codes


class Collective(StrEnum):
    """What ranks do together."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all-to-all"
    POINT_TO_POINT = "send and receive"
    COPY_TO_PEERS = "copy to peers"
    """Copies to another device by the copy engines, which leave all multiprocessors to kernels that compute."""
    OTHER = "other"
    """Kernels whose names do not tell, such as NCCL's kernel for several kinds at once."""


COLLECTIVES = tuple(Collective)
NO_COLLECTIVE = -1

# The first pattern that is found in the name decides. NCCL: ncclDevKernel_AllReduce_Sum_f32_RING_LL, before 2.19
# ncclKernel_AllReduce_RING_LL_Sum_float; vLLM: cross_device_reduce_1stage; PyTorch's symmetric memory: all_reduce.
_PATTERNS = (
    (r"all_?reduce|cross_device_reduce", Collective.ALL_REDUCE),
    (r"all_?gather", Collective.ALL_GATHER),
    (r"reduce_?scatter", Collective.REDUCE_SCATTER),
    (r"broadcast", Collective.BROADCAST),
    (r"all_?to_?all", Collective.ALL_TO_ALL),
    (r"send_?recv", Collective.POINT_TO_POINT),
    (r"reduce", Collective.REDUCE),
)
_COPY_TO_PEERS = re.compile(r"memcpy (?:PtoP|Peer-to-Peer)", re.IGNORECASE | re.ASCII)
"""Beginning of the names of such copies in torch.profiler's traces and in nsys's reports."""
_COMPILED = tuple((re.compile(pattern, re.IGNORECASE | re.ASCII), kind) for pattern, kind in _PATTERNS)


@lru_cache(maxsize=4096)
def collective_of(name: str) -> Collective | None:
    """The collective that the kernel or copy of this name is a part of; None if it is of none."""
    if _COPY_TO_PEERS.match(name):
        return Collective.COPY_TO_PEERS
    if classify_kernel(name) is not KernelClass.COMMUNICATION:
        return None
    return next((kind for pattern, kind in _COMPILED if pattern.search(name[:MAX_NAME])), Collective.OTHER)


def collective_codes(names: Ints, strings: Sequence[str]) -> Codes:
    """The collective of each kernel or copy, as an index into `COLLECTIVES`; NO_COLLECTIVE for others."""
    used, index = np.unique(names, return_inverse=True)
    kinds = [collective_of(strings[name]) for name in used.tolist()]
    codes = [NO_COLLECTIVE if kind is None else COLLECTIVES.index(kind) for kind in kinds]
    return np.array(codes, dtype=np.int8)[index]
