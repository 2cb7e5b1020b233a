"""How the GPUs of a step are joined: within a node by NVLink or the like, and between nodes by the
network adapters that its usual node has; measured collectives come first, and then data sheets.
"""

from collections.abc import Mapping
from functools import partial

from .communication import Collective
from .curves import LINK_EFFICIENCY
from .hardware import DeviceSpec
from .ranks_time import Links, measured_links

NETWORK_EFFICIENCY = 0.8
"""Share of a network adapter's rate that a collective reaches."""
USUAL_NODE = 8
"""GPUs of a node where no data sheet says."""


def links_of(
    name: str,
    device: DeviceSpec | None,
    measured: Mapping[int, Mapping[Collective, Mapping[int, float]]],
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
    sources = []
    if gpus <= node:
        network_bytes_per_s = None
    elif network_bytes_per_s is None:
        if device is None or device.network_bytes_per_s is None:
            raise ValueError(
                f"needed --network-gb-per-s: {gpus} GPUs need several nodes of {node}, and {name} "
                "has no usual network"
            )
        network_bytes_per_s = NETWORK_EFFICIENCY * device.network_bytes_per_s
        sources.append(
            f"network: {NETWORK_EFFICIENCY:g} of {device.network_bytes_per_s / 1e9:g} GB/s a GPU "
            f"({device.network})"
        )
    else:
        sources.append("network: given")
    links = partial(Links, gpus_per_node=node, network_bytes_per_s=network_bytes_per_s)
    if node_bytes_per_s is not None:
        return links(node_bytes_per_s=node_bytes_per_s), "; ".join(["node: given", *sources])
    measured_ones = measured_links(measured, node, network_bytes_per_s)
    if measured_ones is not None:
        sources.insert(0, f"node: collectives among {measured_ones.measured_ranks} measured")
        return measured_ones, "; ".join(sources)
    if gpus == 1:
        return links(node_bytes_per_s=1.0), "no links are used"
    if device is None or device.link_bytes_per_s is None:
        raise ValueError(
            f"needed --node-gb-per-s: no collectives among several {name} were measured, and how "
            "they are joined is not in its data sheet"
        )
    rate = LINK_EFFICIENCY * device.link_bytes_per_s
    sources.insert(
        0,
        f"node: {LINK_EFFICIENCY:g} of {device.link_bytes_per_s / 1e9:g} GB/s one way (data sheet)",
    )
    return links(node_bytes_per_s=rate), "; ".join(sources)
