"""The course's inequalities: the same by symbols, the book's numbers, and every rank count tried one by one."""

from dataclasses import replace
from itertools import product

import pytest
import sympy

from cs336_systems.config import SIZES
from cs336_systems.costs.communication import Call, Collective
from cs336_systems.costs.ranks_time import Links
from cs336_systems.costs.scale import Link, Paper, Scheme, bounds, feed, largest_ranks, most_ranks

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


@pytest.mark.parametrize("link", Link)
@pytest.mark.parametrize("scheme", [Scheme.DATA, Scheme.SHARDED, Scheme.TENSOR])
def test_the_formulas_are_what_solving_for_the_ranks_gives(scheme: Scheme, link: Link) -> None:
    """Where computing takes as long as communication, by symbols; the slower link across nodes is the network."""
    b, c, w, e, p, d, g, n = sympy.symbols("B C W e P D G N", positive=True)
    others = (n - 1) / n if link is Link.NODE else (n / g - 1) / n
    if scheme is Scheme.DATA:
        math, comm = 4 * b * p / (n * c), 2 * e * p * others / w
    elif scheme is Scheme.SHARDED:
        math, comm = 2 * b * p / (n * c), e * p * others / w
    else:
        math, comm = 2 * b * p / (n * c), 4 * e * b * d * others / w
    (solution,) = sympy.solve(sympy.Eq(math, comm), n)
    a, f = e * c / (2 * w), p / (4 * d)
    budget = f if scheme is Scheme.TENSOR else b
    expected = 1 + budget / a if link is Link.NODE else g * (1 + budget / a)
    assert sympy.simplify(solution - expected) == 0
    values = {b: 2**21, c: 990e12, e: 2, p: 4 * 64 * 1000, d: 64, g: 8, w: 450e9 if link is Link.NODE else 50e9}
    near, far = (values[e] * values[c] / (2 * rate) for rate in (450e9, 50e9))
    size = 10**9 if link is Link.NODE else 8
    reached = most_ranks(float(budget.subs(values)), near if link is Link.NODE else 1e-9, far, size)
    assert reached == pytest.approx(float(solution.subs(values)))


def test_both_together_have_the_book_s_square_by_symbols() -> None:
    """Austin et al. 2025: B / N > alpha^2 / F, with X = sqrt(B N / F) data ranks, if there are many of both."""
    b, c, w, p, d, n, x = sympy.symbols("B C W P D N X", positive=True)
    e, f = 2, p / (4 * d)
    math = 2 * b * p / (n * c)
    of_weights, of_activations = e * p * x / (n * w), 4 * e * (b / x) * d / w
    (best,) = sympy.solve(sympy.Eq(of_weights, of_activations), x)
    assert sympy.simplify(best - sympy.sqrt(b * n / f)) == 0
    (most,) = sympy.solve(sympy.Eq(math, of_weights.subs(x, best)), n)
    alpha = c / w
    assert sympy.simplify(b / most - alpha**2 / f) == 0


def test_the_book_s_numbers_come_out() -> None:
    """H100, bf16: 2200 tokens for each GPU in a node and 2475 across nodes of 400 GB/s; LLaMA-3's F gives 11-way TP."""
    paper = replace(PAPER, gradient_bytes=2, feed=28_000)
    found = {(each.way, each.link): each for each in bounds(paper)}
    for scheme in (Scheme.DATA, Scheme.SHARDED):
        assert found[scheme, Link.NODE].least_tokens == pytest.approx(2200)
        assert found[scheme, Link.NETWORK].least_tokens == pytest.approx(2475)
    assert found[Scheme.TENSOR, Link.NODE].least_tokens is None
    assert paper.feed / found[Scheme.TENSOR, Link.NETWORK].intensity * 8 == pytest.approx(11.3, abs=0.05)
    assert found[Scheme.BOTH, Link.NODE].least_tokens == pytest.approx(2200**2 / 28_000)


def test_twice_the_bytes_of_gradients_halve_the_ranks() -> None:
    narrow, wide = (largest_ranks(replace(PAPER, gradient_bytes=size), Scheme.DATA) for size in (2, 4))
    assert narrow == largest_ranks(PAPER, Scheme.SHARDED)
    assert narrow / wide == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(("size", "matrices"), [("8B", 3), ("gpt2-xl", 2)])
def test_f_is_a_block_s_matrices_over_four_times_its_width(size: str, matrices: int) -> None:
    model = SIZES[size]
    elements = 4 * model.d_model**2 + matrices * model.d_model * model.d_ff
    assert feed(model) == elements / (4 * model.d_model)


def test_more_tokens_never_allow_fewer_ranks() -> None:
    for scheme in Scheme:
        found = [largest_ranks(replace(PAPER, tokens=2**power), scheme) for power in range(8, 24)]
        assert found == sorted(found)
        assert (len(set(found)) == 1) is (scheme is Scheme.TENSOR), "tensor parallelism has no use of more tokens"
