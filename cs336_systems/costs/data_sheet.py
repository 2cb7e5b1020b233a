"""The curves of a device without measured ceilings, from its data sheet and stated efficiencies.

No device reaches its data sheet's peaks. The efficiencies are those that H100 and H200 reach at large sizes
(`cs336 ceilings`), rounded down; results that follow from them are marked as such wherever they are shown.
"""

from cs336_systems.config import Precision
from cs336_systems.costs.curves import Curves, Matmul
from cs336_systems.costs.hardware import DeviceSpec

MATMUL_EFFICIENCY = 0.7
"""Share of the peak that a matmul reaches, whatever its size."""
MEMORY_EFFICIENCY = 0.85
"""Share of the memory bandwidth that every kernel except matmuls reaches."""
LINK_EFFICIENCY = 0.75
"""Share of NVLink's rate in one direction that a collective reaches."""
LAUNCH_S = 7e-6
"""Time that a host needs to launch a kernel."""
KERNEL_S = 1.5e-6
"""Least time of a kernel."""
_SIDE = 2**20
"""Of the one matmul of the curves: more than any step has, because the efficiency is that of all matmuls."""


def data_sheet_curves(device: DeviceSpec) -> Curves:
    """Times of a device that reaches the stated share of each rate that its data sheet promises."""
    bandwidth = MEMORY_EFFICIENCY * device.memory_bandwidth_bytes_per_s
    smallest = round(KERNEL_S * bandwidth)
    passes = {smallest: KERNEL_S, 1000 * smallest: 1000 * KERNEL_S}
    return Curves(
        matmuls={precision: _matmuls(device, precision) for precision in Precision},
        copies=passes,
        adamw=passes,
        launch_s=LAUNCH_S,
        kernel_s=KERNEL_S,
    )


def _matmuls(device: DeviceSpec, precision: Precision) -> tuple[Matmul, ...]:
    """One matmul, whose rate applies to all; empty if the peak of the precision is not known."""
    peak = device.peak_flops_per_s.get(precision)
    if peak is None:
        return ()
    time_s = 2 * _SIDE**3 / (MATMUL_EFFICIENCY * peak)
    return (Matmul(rows=_SIDE, inner=_SIDE, columns=_SIDE, time_s=time_s),)


def data_sheet_link(device: DeviceSpec) -> float | None:
    """Rate at which a GPU sends to others of its node, in bytes/s; None if the data sheet has no NVLink."""
    return None if device.link_bytes_per_s is None else LINK_EFFICIENCY * device.link_bytes_per_s
