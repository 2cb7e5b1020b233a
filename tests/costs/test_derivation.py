"""Sharing a step on paper: the expressions evaluated, the rings run, and the limits tried."""

from dataclasses import replace

import pytest

from cs336.config import SIZES
from cs336.costs.derivation import RING, WHOLE_RING, Scheme, Sizes, exchanges, limits, parts_of

SIZES_8B = Sizes(B=2**20, D=4096, D_FF=11_008, C=800e12, W=40e9, X=8, Y=4, e=2, g=4)
PARTS = parts_of(SIZES["8B"])


def evaluated(expression: str, sizes: Sizes, elements: float) -> float:
    """An expression in which a space between two factors is a multiplication."""
    letters = {name: getattr(sizes, name) for name in ("B", "D", "D_FF", "N", "C", "W", "X", "Y")}
    letters |= {"e": sizes.e, "g": sizes.g, "P": elements}
    words = expression.replace("(", " ( ").replace(")", " ) ").replace("^", " ** ").split()
    python: list[str] = []
    for word in words:
        is_factor = word[0].isalnum() or word == "("
        if is_factor and python and (python[-1][0].isalnum() or python[-1] == ")"):
            python.append("*")
        python.append(word)
    value: float = eval(" ".join(python), {}, letters)
    return value


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_numbers_are_those_of_the_expressions_beside_them(part) -> None:
    assert evaluated(part.expression, SIZES_8B, 0) == part.elements
    rows = list(exchanges(part, SIZES_8B))
    assert {row.scheme for row in rows} == set(Scheme)
    for row in rows:
        assert row.sent_bytes == pytest.approx(evaluated(row.sent, SIZES_8B, part.elements))
        assert row.flops_count == pytest.approx(evaluated(row.flops, SIZES_8B, part.elements))
    for scheme, _, expression, most in limits(part, SIZES_8B):
        if "<" not in expression:
            assert most == pytest.approx(evaluated(expression, SIZES_8B, part.elements)), scheme


def ring_bytes(ranks: int, size: int, *, whole: bool) -> int:
    """What each rank of a simulated ring sends until all have the sum of all ranks' tensors."""
    parts = 1 if whole else ranks
    has = [[{rank} for _ in range(parts)] for rank in range(ranks)]
    sent = 0
    if whole:
        passed = [{rank} for rank in range(ranks)]
        while any(len(part) < ranks for tensors in has for part in tensors):
            passed = [passed[rank - 1] for rank in range(ranks)]
            sent += size
            for rank in range(ranks):
                has[rank][0] |= passed[rank]
        return sent
    for step in range(2 * ranks - 2):  # first sums move on, then what is complete
        moved = [
            (has[rank][(rank - step) % ranks].copy(), (rank - step) % ranks)
            for rank in range(ranks)
        ]
        for rank, (part, place) in enumerate(moved):
            has[(rank + 1) % ranks][place] |= part
        sent += size // ranks
    assert all(len(part) == ranks for tensors in has for part in tensors)
    return sent


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_rings_send_what_the_expressions_say(ranks: int) -> None:
    part = PARTS[0]
    sizes = replace(SIZES_8B, X=ranks, Y=1)
    sent = {row.collective: row.sent_bytes for row in exchanges(part, sizes)}
    scale = 4 * part.elements / (ranks * 1000)
    assert sent[RING] == pytest.approx(scale * ring_bytes(ranks, ranks * 1000, whole=False))
    assert sent[WHOLE_RING] == pytest.approx(scale * ring_bytes(ranks, ranks * 1000, whole=True))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_up_to_the_largest_n_sending_takes_no_longer_than_computing(part, gradient_bytes) -> None:
    """Each way in both passes, a little below and above its number."""
    sizes = replace(SIZES_8B, g=gradient_bytes, B=2**22, W=400e9)
    for scheme, collective, _, most in limits(part, sizes):
        if scheme is Scheme.BOTH:
            continue
        for factor in (0.99, 1.01):
            shared = replace(sizes, X=most * factor, Y=1)
            for is_backward in (False, True):
                rows = [
                    row
                    for row in exchanges(part, shared)
                    if (row.scheme, row.is_backward) == (scheme, is_backward)
                    and (scheme is not Scheme.DATA or row.collective == collective)
                ]
                if rows and (is_backward or scheme is not Scheme.DATA):
                    sent_s = sum(row.sent_s(shared) for row in rows)
                    # backward of a tensor group has twice the matmuls for as much that is sent
                    if scheme is Scheme.TENSOR and is_backward:
                        sent_s *= 2
                    assert (sent_s <= rows[0].computed_s(shared)) is (factor < 1)


def ends_in_time(part, sizes: Sizes, *, on_same_links: bool) -> bool:
    """Whether the mixed way's forward pass computes no shorter than it sends."""
    rows = [row for row in exchanges(part, sizes) if row.scheme is Scheme.BOTH]
    sent_s = {"weights": 0.0, "activations": 0.0}
    for row in rows:
        if not row.is_backward:
            sent_s[row.collective.split()[-1]] += row.sent_s(sizes)
    total_s = sum(sent_s.values()) if on_same_links else max(sent_s.values())
    return total_s <= rows[0].computed_s(sizes)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("rate", [40e9, 400e9, 4e12])
@pytest.mark.parametrize("on_same_links", [False, True])
def test_no_other_group_of_the_mixed_way_is_larger(part, rate: float, on_same_links: bool) -> None:
    """All groups are tried, X and Y in steps of half a percent."""
    sizes = replace(SIZES_8B, B=2**18, W=rate)
    known = {
        collective: (expression, most)
        for scheme, collective, expression, most in limits(part, sizes)
        if scheme is Scheme.BOTH
    }
    words = "on the same links" if on_same_links else "each on links of its own"
    (name,) = (collective for collective in known if words in collective)
    tried: dict[float, tuple[float, float]] = {}
    steps = [1.005**power for power in range(2200)]
    for ranks in steps:
        low, high = 0, len(steps)
        while low < high:
            middle = (low + high) // 2
            shared = replace(sizes, X=ranks, Y=steps[middle])
            if ends_in_time(part, shared, on_same_links=on_same_links):
                low = middle + 1
            else:
                high = middle
        if not low:
            break
        tried[ranks * steps[low - 1]] = ranks, steps[low - 1]
    expression, most = known[name]
    assert max(tried) == pytest.approx(most, rel=0.011)
    # the best of the groups that were tried stands at the limit of the inequality
    if on_same_links:
        ranks, tensor_ranks = tried[max(tried)]
        left = evaluated(
            expression.removesuffix(" < 1"), replace(sizes, X=ranks, Y=tensor_ranks), part.elements
        )
        assert left == pytest.approx(1, abs=0.03)
    said = [float(word.rstrip(",")) for word in name.split() if word[0].isdigit()]
    shared = replace(sizes, X=0.999 * said[0], Y=max(1, 0.999 * said[1]))
    assert said[0] * said[1] == pytest.approx(most, rel=1e-3)
    assert ends_in_time(part, shared, on_same_links=on_same_links)
