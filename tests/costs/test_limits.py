"""The course's inequalities: the same by symbols, the book's numbers, and every rank count tried one by one."""

from dataclasses import replace
from itertools import product

import pytest

from cs336_systems.costs.communication import Call, Collective
from cs336_systems.costs.ranks_time import Links
from cs336_systems.costs.scale import Paper, Scheme, largest_ranks

H100 = Links(gpus_per_node=8, node_bytes_per_s=450e9, network_bytes_per_s=50e9)
PAPER = Paper(tokens=2**21, feed=12_352, flops_per_s=990e12, links=H100, element_bytes=2, gradient_bytes=4)


def times_s(paper: Paper, scheme: Scheme, data: int, tensor: int) -> list[tuple[float, float]]:
    """Computing and communication of a block, in each part of a step in which they overlap, from what is sent.

    d_model is 6 and the elements of a block's matrices are 4 x 6 x f; `call_s` is tested on its own.
    """
    d_model, elements = 6, 4 * 6 * paper.feed
    links, tokens = paper.links, paper.tokens / data

    def weights_s(kind: Collective, element_bytes: int) -> float:
        call = Call(kind, element_bytes * elements / tensor)  # type: ignore[arg-type]
        return replace(links, gpus_per_node=max(1, links.gpus_per_node // tensor)).call_s(call, data)

    def activations_s() -> float:
        kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) * 2
        size = paper.element_bytes * tokens * d_model
        return sum(links.call_s(Call(kind, size), tensor) for kind in kinds)  # type: ignore[arg-type]

    forward = 2 * tokens * elements / tensor / paper.flops_per_s
    gather, scatter = (
        weights_s(kind, paper.element_bytes) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    found = []
    if scheme is Scheme.DATA:
        found += [(2 * forward, weights_s(Collective.ALL_REDUCE, paper.gradient_bytes))]
    if scheme in (Scheme.SHARDED, Scheme.BOTH):
        found += [(forward, gather), (2 * forward, gather + scatter)]
    if scheme in (Scheme.TENSOR, Scheme.BOTH):
        found += [(forward, activations_s())]
    return found


def shapes(paper: Paper, scheme: Scheme, ranks: int) -> list[tuple[int, int]]:
    """Data and tensor ranks that a scheme may make of so many ranks."""
    size = paper.links.gpus_per_node
    if scheme is Scheme.TENSOR:
        return [(1, ranks)]
    if scheme is not Scheme.BOTH:
        return [(ranks, 1)]
    pairs = [(ranks // tensor, tensor) for tensor in range(1, ranks + 1) if ranks % tensor == 0]
    return [(data, tensor) for data, tensor in pairs if size % tensor == 0 or tensor % size == 0]


def tried(paper: Paper, scheme: Scheme, most: int) -> int:
    """The most ranks of which computing takes as long as communication, or longer."""
    size = paper.links.gpus_per_node
    good = [
        ranks
        for ranks in range(1, most + 1)
        if ranks <= size or (ranks % size == 0 and paper.links.network_bytes_per_s is not None)
        for data, tensor in shapes(paper, scheme, ranks)
        if all(math >= comm * (1 - 1e-12) for math, comm in times_s(paper, scheme, data, tensor))
    ]
    return max(good)


PAPERS = [
    replace(PAPER, links=links, tokens=tokens, feed=f, element_bytes=size)
    for links, (tokens, f), size in product(
        (H100, replace(H100, network_bytes_per_s=6e9), replace(H100, gpus_per_node=4, node_bytes_per_s=25e9),
         replace(H100, gpus_per_node=1), replace(H100, gpus_per_node=64, network_bytes_per_s=None)),
        ((2**18, 12_352), (2**14, 60_000), (3_000, 2_000), (50_000, 120_000)),
        (2, 4),
    )
]  # fmt: skip


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize("paper", PAPERS)
def test_the_largest_number_of_ranks_is_the_one_that_trying_all_finds(paper: Paper, scheme: Scheme) -> None:
    found = largest_ranks(paper, scheme)
    if paper.links.network_bytes_per_s is None:
        found = min(found, paper.links.gpus_per_node)
    most = 2 * found + 4 * paper.links.gpus_per_node
    assert tried(paper, scheme, most) == found
