"""How GPUs are connected within a node and across nodes, and how long a collective among some of them takes.

A collective runs as rings within every node and across the nodes at the same time, as NCCL's do: each GPU of a node
sends its share of what leaves the node through its own network adapter. Of S bytes that n nodes of g ranks have in the
end, a GPU sends S (g - 1) / g to its neighbours in an all-gather, and S (n - 1) / (n g) to other nodes; the slower of
the two decides (Austin et al. 2025, How to Scale Your Model, "How to Think About GPUs"). Latencies of the network are
left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cs336_systems.costs.communication import Call, Collective, sent_share
from cs336_systems.costs.curves import interpolated


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that exchange with each other: the same number on each of some nodes."""

    in_node: int
    nodes: int = 1

    @property
    def ranks(self) -> int:
        return self.in_node * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Connections of GPUs that are all alike."""

    gpus_per_node: int
    node_bytes_per_s: float
    """Rate at which each GPU sends to others of its node."""
    network_bytes_per_s: float | None = None
    """Rate at which each GPU sends to other nodes while all others of its node do so too; None: there is one node."""
    times: Mapping[Collective, Mapping[int, float]] = field(default_factory=dict)
    """Measured times of collectives within a node, by bytes; `node_bytes_per_s` is used for kinds not measured."""
    measured_ranks: int = 2
    """Ranks among which `times` were measured."""

    def call_s(self, call: Call, group: Group) -> float:
        """Time of a collective in this group while nothing else is sent."""
        return max(self._in_node_s(call, group.in_node), self._across_s(call, group))

    def _in_node_s(self, call: Call, ranks: int) -> float:
        """Measured times are scaled by what a rank sends if another number of ranks was measured."""
        share = sent_share(call.collective, ranks)
        if not share:
            return 0.0
        if not (times := _of_kind(call.collective, self.times)):
            return share * call.num_bytes / self.node_bytes_per_s
        return interpolated(times, call.num_bytes) * share / sent_share(call.collective, self.measured_ranks)

    def _across_s(self, call: Call, group: Group) -> float:
        if group.nodes == 1:
            return 0.0
        assert self.network_bytes_per_s is not None
        if call.collective is Collective.PUSH:
            sent_bytes: float = call.num_bytes * (group.ranks - group.in_node)
        else:
            sent_bytes = call.num_bytes * sent_share(call.collective, group.nodes) / group.in_node
        return sent_bytes / self.network_bytes_per_s

    def group(self, ranks: int) -> Group:
        """So many ranks, in one node as far as there is room; they fill their nodes."""
        in_node = min(ranks, self.gpus_per_node)
        return Group(in_node=in_node, nodes=ranks // in_node)


def measured_links(
    collectives: Mapping[int, Mapping[Collective, Mapping[int, float]]],
    gpus_per_node: int,
    network_bytes_per_s: float | None = None,
) -> Links | None:
    """Links by measured times of collectives, by the number of their ranks: the largest that a node has room for.

    None if no ring of so few ranks was measured.
    """
    for ranks in sorted(collectives, reverse=True):
        rate = fastest_bytes_per_s(collectives[ranks], ranks)
        if ranks <= gpus_per_node and rate is not None:
            return Links(
                gpus_per_node=gpus_per_node,
                node_bytes_per_s=rate,
                network_bytes_per_s=network_bytes_per_s,
                times=collectives[ranks],
                measured_ranks=ranks,
            )
    return None


def _of_kind(kind: Collective, times: Mapping[Collective, Mapping[int, float]]) -> Mapping[int, float]:
    """Times of this kind; if only all-reduces were measured, an all-gather or reduce-scatter takes half of one."""
    if (found := times.get(kind)) or kind not in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        return found or {}
    return {num_bytes: time_s / 2 for num_bytes, time_s in times.get(Collective.ALL_REDUCE, {}).items()}


def fastest_bytes_per_s(times: Mapping[Collective, Mapping[int, float]], ranks: int) -> float | None:
    """The highest rate at which a rank sent in an all-reduce, all-gather or reduce-scatter; None if none was timed."""
    rings = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    rates = (
        num_bytes * sent_share(kind, ranks) / time_s
        for kind in rings
        for num_bytes, time_s in times.get(kind, {}).items()
    )
    return max(rates, default=None)
