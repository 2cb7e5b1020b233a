"""How the GPUs of a step are joined: within a node by NVLink or the like, and between nodes by the
network adapters that its usual node has; measured collectives come first, and then data sheets.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from .communication import Collective
from .curves import CollectiveTimes
from .hardware import DeviceSpec
from .ranks_time import Links, measured_links

NETWORK_EFFICIENCY = 0.8
"""Share of a network adapter's rate that a collective reaches."""
REFERENCE_BYTES_PER_S = 450e9
REFERENCE_S = {
    2**20: 38.09e-6,
    2**22: 40.48e-6,
    2**24: 77.53e-6,
    2**26: 270.5e-6,
    2**28: 912.8e-6,
    2**30: 3309e-6,
    2**32: 12_463e-6,
}
"""Times of all-reduces by bytes among two H200, whose NVLink sends so fast one way
(data/published/ceilings/NVIDIA-H200-x2-collectives).
"""
NODE_STEP_S, NETWORK_STEP_S = 3.4e-6, 9.6e-6
"""Times of a step of a ring by NVLink and by the network, beside that of its bytes: `hwLat` of
NCCL's src/graph/tuning.cc for rings by the protocol Simple.
"""
USUAL_NODE = 8
"""GPUs of a node where no data sheet says."""


def links_of(
    name: str,
    device: DeviceSpec | None,
    measured: Mapping[int, CollectiveTimes],
    *,
    gpus: int,
    gpus_per_node: int | None = None,
    node_bytes_per_s: float | None = None,
    network_bytes_per_s: float | None = None,
) -> tuple[Links, str]:
    """The links of so many GPUs, and in words what their rates stand on. Rates and the size of a
    node that are given come before those that are measured, and before data sheets.

    Raises ValueError if a rate is not known.
    """
    node = gpus_per_node or (device.gpus_per_node if device else None) or USUAL_NODE
    network_source = ""
    if gpus <= node:
        network_bytes_per_s = None
    elif network_bytes_per_s is not None:
        network_source = "; network: given"
    else:
        network_bytes_per_s, network_source = _usual_network(name, device, gpus, node)
    links = partial(Links, gpus_per_node=node, network_bytes_per_s=network_bytes_per_s)
    measured_ones = measured_links(measured, node, network_bytes_per_s)
    if node_bytes_per_s is not None:
        joined, node_source = links(node_bytes_per_s=node_bytes_per_s), "node: given"
    elif measured_ones is not None:
        joined = measured_ones
        node_source = f"node: collectives among {joined.measured_ranks} measured"
    elif gpus == 1:
        joined, node_source = links(node_bytes_per_s=1.0), "no links are used"
    else:
        one_way = _one_way_bytes_per_s(name, device)
        joined = _like_reference(links, one_way)
        node_source = (
            f"node: {one_way / 1e9:g} GB/s one way by the data sheet, used as far as two H200 use "
            "theirs, by message size"
        )
    joined = replace(joined, node_step_s=NODE_STEP_S, network_step_s=NETWORK_STEP_S)
    return joined, node_source + network_source


def _usual_network(name: str, device: DeviceSpec | None, gpus: int, node: int) -> tuple[float, str]:
    """The rate that a GPU reaches to other nodes by the adapters of its usual node, and what it
    stands on; raise ValueError if it has none.
    """
    if device is None or device.network_bytes_per_s is None:
        raise ValueError(
            f"{gpus} GPUs need several nodes of {node}, and {name} has no usual network; "
            "`cs336 plan` takes --network-gb-per-s"
        )
    source = (
        f"; network: {100 * NETWORK_EFFICIENCY:g} % of the {device.network_bytes_per_s / 1e9:g} "
        f"GB/s of a GPU's adapter ({device.network}), which is assumed"
    )
    return NETWORK_EFFICIENCY * device.network_bytes_per_s, source


def _one_way_bytes_per_s(name: str, device: DeviceSpec | None) -> float:
    """The rate of a GPU's links to others of its node, one way, by its data sheet; raise ValueError
    if that has none.
    """
    if device is None or device.link_bytes_per_s is None:
        raise ValueError(
            f"no collectives among several {name} were measured, and how they are joined is not in "
            "its data sheet; `cs336 plan` takes --node-gb-per-s"
        )
    return device.link_bytes_per_s


def _like_reference(links: Callable[..., Links], one_way_bytes_per_s: float) -> Links:
    """Links of this rate, of which collectives use as much as those of the reference do: in the
    same time they send so many times the bytes.
    """
    ratio = one_way_bytes_per_s / REFERENCE_BYTES_PER_S
    times = {round(ratio * num_bytes): time_s for num_bytes, time_s in REFERENCE_S.items()}
    largest = max(times)
    return links(node_bytes_per_s=largest / times[largest], times={Collective.ALL_REDUCE: times})
