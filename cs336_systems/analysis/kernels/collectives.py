"""The collective that a kernel or copy is a part of, by its name."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...costs.communication import Collective
from ..columns import Ints
from .classes import MAX_NAME, KernelClass, classify_kernel
from .phases import Codes
from .trace import Strings, Trace, of_names

COLLECTIVE_OPERATOR = "record_param_comms"
"""The operator in which PyTorch launches a collective, which it names in its arguments."""
_BEFORE_KERNEL = ": "
"""Stands between the collective and the name of a kernel whose own name does not tell it."""
COLLECTIVES = tuple(Collective)
NO_COLLECTIVE = -1

# The first pattern that is found in the name decides. NCCL:
# ncclDevKernel_AllReduce_Sum_f32_RING_LL, before 2.19 ncclKernel_AllReduce_RING_LL_Sum_float; vLLM:
# cross_device_reduce_1stage; PyTorch's symmetric memory: all_reduce; DeepEP, MoRI, pplx: dispatch
# and combine.
_PATTERNS = (
    (r"all_?reduce|cross_device_reduce", Collective.ALL_REDUCE),
    (r"all_?gather", Collective.ALL_GATHER),
    (r"reduce_?scatter", Collective.REDUCE_SCATTER),
    (r"broadcast", Collective.BROADCAST),
    (r"all_?to_?all|dispatch(?!_layout)|combine", Collective.ALL_TO_ALL),
    (r"(?<![a-z])(?:send|recv|put)(?![a-z])|send_?recv", Collective.POINT_TO_POINT),
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
    name = name[:MAX_NAME].partition(_BEFORE_KERNEL)[0]
    return next(
        (kind for pattern, kind in _PATTERNS if re.search(pattern, name, re.I | re.A)),
        Collective.OTHER,
    )


OF_LIBRARY = re.compile(r"[nr]ccl|gloo:|mpi:|ucc:|c10d::|record_param_comms")
"""Beginning of the names of ranges and operators that PyTorch (nccl:all_reduce, c10d::allreduce_)
and NCCL (ncclAllReduce) put around a collective.
"""
_LAUNCHING = re.compile(r"[nr]ccl|c10d::|record_param_comms")
"""Those that end when the collective's kernels are launched; others end when these are done."""


def of_collective(name: str, collective: str) -> str:
    """The name of a kernel that an operator of this collective launched: the collective stands
    before it, if it does not tell the collective itself.
    """
    if collective_of(name) in (None, Collective.OTHER):
        return f"{COLLECTIVE_OPERATOR}({collective}){_BEFORE_KERNEL}{name}"
    return name


def with_collectives_named(trace: Trace) -> Trace:
    """The trace, where the name of a collective's range stands before that of a kernel of unknown
    class that was launched directly in it.
    """
    ranges, kernels = trace.ranges, trace.kernels
    texts = trace.strings
    is_around = trace.named(ranges, _LAUNCHING.match)
    if not is_around.any():
        return trace
    is_unknown = trace.named(kernels, lambda name: classify_kernel(name) is KernelClass.OTHER)
    rows = np.flatnonzero(is_unknown & kernels.is_launched)
    nested = np.flatnonzero(ranges.is_nested)
    inside = ranges.by_thread(nested).at(kernels.thread[rows], kernels.launch_ns[rows])
    innermost = np.append(nested, -1)[inside]
    is_inside = np.append(is_around, False)[innermost]
    rows, innermost = rows[is_inside], innermost[is_inside]
    pairs = zip(ranges.name[innermost].tolist(), kernels.name[rows].tolist(), strict=True)
    strings = Strings()
    strings.ids(texts)
    name = kernels.name.copy()
    name[rows] = strings.ids(
        f"{texts[outer]}{_BEFORE_KERNEL}{texts[kernel]}" for outer, kernel in pairs
    )
    return replace(trace, kernels=replace(kernels, name=name), strings=strings.all)


def collective_codes(names: Ints, strings: Sequence[str]) -> Codes:
    """The collective of each kernel or copy, as an index into `COLLECTIVES`; NO_COLLECTIVE for
    others.
    """

    def code(name: str) -> int:
        kind = collective_of(name)
        return NO_COLLECTIVE if kind is None else COLLECTIVES.index(kind)

    return of_names(names, strings, code, np.int8)
