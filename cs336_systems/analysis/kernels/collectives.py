"""The collective that a kernel or copy is a part of, by its name."""

import re
from collections.abc import Sequence

import numpy as np

from ...costs.communication import Collective
from ..columns import Ints
from .classes import MAX_NAME, KernelClass, classify_kernel
from .phases import Codes
from .trace import of_names

COLLECTIVES = tuple(Collective)
NO_COLLECTIVE = -1

# The first pattern that is found in the name decides. NCCL:
# ncclDevKernel_AllReduce_Sum_f32_RING_LL, before 2.19 ncclKernel_AllReduce_RING_LL_Sum_float; vLLM:
# cross_device_reduce_1stage; PyTorch's symmetric memory: all_reduce.
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


def collective_of(name: str) -> Collective | None:
    """The collective that the kernel or copy of this name is a part of; None if it is of none."""
    if _COPY_TO_PEERS.match(name):
        return Collective.COPY_TO_PEERS
    if classify_kernel(name) is not KernelClass.COMMUNICATION:
        return None
    name = name[:MAX_NAME]
    return next(
        (kind for pattern, kind in _PATTERNS if re.search(pattern, name, re.I | re.A)),
        Collective.OTHER,
    )


def collective_codes(names: Ints, strings: Sequence[str]) -> Codes:
    """The collective of each kernel or copy, as an index into `COLLECTIVES`; NO_COLLECTIVE for
    others.
    """

    def code(name: str) -> int:
        kind = collective_of(name)
        return NO_COLLECTIVE if kind is None else COLLECTIVES.index(kind)

    return of_names(names, strings, code, np.int8)
