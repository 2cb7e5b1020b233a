"""The curves of a device that nobody has measured, from its data sheet and stated efficiencies.

No device reaches what its data sheet promises. The efficiencies are those that H100 and H200 reach at large sizes
(`cs336 ceilings`), rounded down; what follows from them is marked as such wherever it is shown.
"""

from cs336_systems.config import Precision
from cs336_systems.costs.curves import Curves, Matmul
from cs336_systems.costs.hardware import DeviceSpec

MATMUL_EFFICIENCY = 0.7
"""Of the peak, at every size of a matmul."""
MEMORY_EFFICIENCY = 0.85
"""Of the memory bandwidth, for every kernel that is no matmul."""
LINK_EFFICIENCY = 0.75
"""Of the rate of NVLink in one direction, in a collective."""
LAUNCH_S = 7e-6
"""Time that a host needs to launch a kernel."""
KERNEL_S = 1.5e-6
"""Least time of a kernel."""
_SIDE = 4096


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
    """One matmul, whose rate is that of all; none at a precision whose peak is not known."""
    peak = device.peak_flops_per_s.get(precision)
    if peak is None:
        return ()
    time_s = 2 * _SIDE**3 / (MATMUL_EFFICIENCY * peak)
    return (Matmul(rows=_SIDE, inner=_SIDE, columns=_SIDE, time_s=time_s),)


def data_sheet_link(device: DeviceSpec) -> float | None:
    """Rate at which a GPU sends to others of its node, in bytes/s; None if the data sheet has no NVLink."""
    return None if device.link_bytes_per_s is None else LINK_EFFICIENCY * device.link_bytes_per_s
