"""Copies and fills by kind, and their time on the device alone."""

import re
from collections.abc import Sequence

import numpy as np

from ..columns import Ints
from .attribution import Jobs
from .calls import TO_DEVICE, TO_HOST
from .collectives import NO_COLLECTIVE
from .device_time import Busy, DeviceSteps, alone_ns
from .step_profile import CopyTimes
from .trace import of_names

_DIRECTIONS = (
    (re.compile(r"memset|fill", re.I), "fill"),
    (TO_DEVICE, "host to device"),
    (TO_HOST, "device to host"),
    (re.compile(r"DtoD|Device-?to-?Device|D2D", re.I), "device to device"),
    (re.compile(r"PtoP|Peer", re.I), "peer to peer"),
)


def copy_kind(name: str) -> str:
    """Direction and memory of a copy by the name that profilers give it: `host to device,
    pageable`.
    """
    direction = next((words for pattern, words in _DIRECTIONS if pattern.search(name)), "copy")
    memory = next((word for word in ("pageable", "pinned") if word in name.casefold()), "")
    return f"{direction}, {memory}" if memory and direction != "fill" else direction


def copy_times(
    jobs: Jobs,
    devices: Sequence[Busy],
    num_devices: Ints,
    spans: DeviceSteps,
    strings: Sequence[str],
) -> tuple[CopyTimes, ...]:
    """Copies and fills in the steps by kind, without those that are collectives, and the time
    without a kernel.
    """
    is_one = jobs.is_copy & (jobs.step >= 0) & (jobs.collective == NO_COLLECTIVE)
    kind_of = of_names(jobs.name, strings, copy_kind, np.object_)
    kinds: list[str | None] = list(dict.fromkeys(kind_of[is_one]))
    if kinds:
        kinds.append(None)
    times = []
    for kind in kinds:
        is_kind = is_one if kind is None else is_one & (kind_of == kind)
        alone = np.zeros(len(spans))
        for busy in devices:
            copies = busy.rows[is_kind[busy.rows]]
            kernels = busy.rows[~jobs.is_copy[busy.rows]]
            alone += alone_ns(jobs, copies, kernels, spans)
        row = CopyTimes(
            kind=kind,
            count=int(is_kind.sum()),
            total_s=int(jobs.duration_ns[is_kind].sum()) / 1e9,
            alone_s=float((alone / np.maximum(num_devices, 1)).sum()) / 1e9,
        )
        times.append(row)
    return tuple(sorted(times, key=lambda row: (row.kind is None, -row.total_s)))
