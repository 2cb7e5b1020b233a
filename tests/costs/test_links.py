"""Times of collectives, against rings that are run chunk by chunk."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from cs336_systems.costs.communication import Call, Collective
from cs336_systems.costs.ranks_time import Links, fastest_bytes_per_s

LINKS = Links(gpus_per_node=4, node_bytes_per_s=8.0, network_bytes_per_s=2.0)
KINDS = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)


def sent_in_a_gather(in_node: int, nodes: int) -> tuple[int, int]:
    """Chunks that a GPU sends to its node and to the network, if each rank begins with one; all end with all.

    Rings go across the nodes first, one for each place in a node, and then within the nodes.
    """
    ranks = list(product(range(nodes), range(in_node)))
    have = {rank: {rank} for rank in ranks}
    sent: Counter[tuple[tuple[int, int], str]] = Counter()

    def ring(members: list[tuple[int, int]], link: str) -> None:
        passed = {rank: set(have[rank]) for rank in members}
        for _ in range(len(members) - 1):
            moved = {}
            for here, there in zip(members, members[1:] + members[:1], strict=True):
                sent[here, link] += len(passed[here])
                have[there] |= passed[here]
                moved[there] = passed[here]
            passed = moved

    for place in range(in_node):
        ring([(node, place) for node in range(nodes)], "network")
    for node in range(nodes):
        ring([(node, place) for place in range(in_node)], "node")
    assert all(found == set(ranks) for found in have.values())
    by_link = [{sent[rank, link] for rank in ranks} for link in ("node", "network")]
    (near,), (far,) = by_link
    return near, far


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("in_node", "nodes"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (4, 2), (4, 5)])
def test_the_slower_link_decides_how_long_a_ring_takes(kind: Collective, in_node: int, nodes: int) -> None:
    chunk_bytes, ranks = 96, in_node * nodes
    links = replace(LINKS, gpus_per_node=in_node)
    near, far = sent_in_a_gather(in_node, nodes)
    passes = 2 if kind is Collective.ALL_REDUCE else 1
    expected = passes * chunk_bytes * max(near / 8.0, far / 2.0)
    assert links.call_s(Call(kind, chunk_bytes * ranks), ranks) == pytest.approx(expected)


def test_a_push_goes_to_every_other_rank() -> None:
    found = LINKS.call_s(Call(Collective.PUSH, 80), 12)
    assert found == max(3 * 80 / 8.0, 8 * 80 / 2.0)


def test_measured_times_count_within_a_node_and_scale_with_what_is_sent() -> None:
    times = {Collective.ALL_REDUCE: {100: 7.0, 200: 9.0}}
    links = replace(LINKS, times=times, measured_ranks=2)
    call = Call(Collective.ALL_REDUCE, 100)
    assert links.call_s(call, 2) == 7.0
    assert links.call_s(call, 4) == pytest.approx(7.0 * (3 / 4) / (1 / 2))
    assert links.call_s(Call(Collective.ALL_GATHER, 200), 2) == 4.5, "half of an all-reduce"
    assert links.call_s(call, 1) == 0
    assert links.call_s(Call(Collective.PUSH, 80), 2) == 80 / 8.0, "not measured"


def test_the_fastest_rate_is_that_of_what_a_rank_sends() -> None:
    times = {Collective.ALL_REDUCE: {100: 1.0}, Collective.ALL_GATHER: {100: 0.4}, Collective.PUSH: {100: 0.01}}
    assert fastest_bytes_per_s(times, 4) == pytest.approx(0.75 * 100 / 0.4)
    assert fastest_bytes_per_s({}, 4) is None
