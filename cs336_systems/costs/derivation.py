"""How many ranks can share a training step before communication limits it, on paper.

The inequalities are those of the course, from Austin et al. 2025, How to Scale Your Model, chapter
"How to Parallelize a Transformer for Training", in the units of this project (`Sizes`), with P for
the elements of the matrices of a block, or of its feed-forward network. Only their matmuls are
counted, and one kind of link.

**Data parallel.** Backward takes 4 B P / (N C). Its gradients are averaged meanwhile: in a ring
each rank sends 2 g P (N - 1) / N, in time / W. Computing takes longer while N < 1 + 2 B W / (g C).
Ranks that pass whole tensors on send g P (N - 1): N (N - 1) < 4 B W / (g C).

**Fully sharded.** Forward takes 2 B P / (N C) and gathers e P (N - 1) / N; backward computes twice
as much, gathers again, and scatters as many gradients: the same ratio, N < 1 + 2 B W / (e C).

**Tensor parallel.** All B tokens pass each rank, which has 1 / N of every matrix: 2 B P / (N C). A
feed-forward network gathers its input and scatters its result, e B D (N - 1) / N each, and so does
attention: N < 1 + P W / (e D C) of the network, with 2 e of a block.

**Both.** Weights are gathered among X ranks, 1 / Y of them, and activations among Y ranks, of B / X
tokens. Where each has links of its own, X and Y have the limits from above, one by one. On the same
links their times add up: (X - 1) / x + (Y - 1) / y < 1, if 1 + x and 1 + y are these limits; N =
X Y is largest where X / x = Y / y, unless that leaves one of them below 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ..config import ModelConfig
from .accounting import ffn_matrices


class Scheme(StrEnum):
    """The four ways to share a step that have an inequality."""

    DATA = "ddp"
    SHARDED = "fsdp"
    TENSOR = "tp"
    BOTH = "fsdp+tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The letters of the derivation, and what they stand for."""

    B: float
    """Tokens of a step on all ranks."""
    D: float
    """d_model."""
    D_FF: float
    C: float
    """FLOP/s of a GPU in matmuls."""
    W: float
    """Bytes per second that a GPU sends."""
    X: float
    """Ranks that divide the batch."""
    Y: float
    """Ranks that divide the matrices; N = X Y."""
    e: float
    """Bytes of an element of weights and activations."""
    g: float
    """Bytes of an element of gradients that are averaged whole."""

    @property
    def N(self) -> float:  # noqa: N802 (the letter of the course)
        """Ranks."""
        return self.X * self.Y


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a derivation is about: a block, or its feed-forward network alone."""

    name: str
    expression: str
    """Elements of its matrices, P."""
    elements: float
    pairs: int
    """All-gathers, and as many reduce-scatters, of activations among tensor ranks in a pass."""


def parts_of(model: ModelConfig) -> tuple[Part, Part]:
    """The block and the feed-forward network of a model."""
    matrices, attention = ffn_matrices(model), 4 * model.d_model**2
    network = matrices * model.d_model * model.d_ff
    of_network = f"{matrices} D D_FF"
    block = Part(
        name="one block", expression=f"4 D^2 + {of_network}", elements=attention + network, pairs=2
    )
    return block, Part(
        name="feed-forward network", expression=of_network, elements=network, pairs=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What ranks send in a pass beside its matmuls; expressions are in the letters of Sizes and P,
    in which a space is a multiplication.
    """

    scheme: Scheme
    part: Part
    is_backward: bool
    collective: str
    sent: str
    """Bytes that a rank sends, as an expression."""
    sent_bytes: float
    flops: str
    """FLOPs of a rank in this pass, as an expression."""
    flops_count: float

    def sent_s(self, sizes: Sizes) -> float:
        """Seconds in which the bytes are sent."""
        return self.sent_bytes / sizes.W

    def computed_s(self, sizes: Sizes) -> float:
        """Seconds of the pass's matmuls."""
        return self.flops_count / sizes.C


RING, WHOLE_RING = "all-reduce", "all-reduce, whole tensors passed on"
"""An all-reduce in a ring as a reduce-scatter and an all-gather; and the alternate ring, in which
each rank passes the whole tensors of all others on, N - 1 of them.
"""


def exchanges(part: Part, sizes: Sizes) -> Iterator[Exchange]:
    """The collectives of a part's passes: data parallel over N ranks, in both rings, fully sharded
    over N, tensor parallel over N, and both over X times Y.
    """
    for is_backward in (False, True):
        for scheme, sent in _sent(part, sizes, is_backward):
            times = 4 if is_backward else 2
            for collective, expression, sent_bytes in sent:
                yield Exchange(
                    scheme=scheme,
                    part=part,
                    is_backward=is_backward,
                    collective=collective,
                    sent=expression,
                    sent_bytes=sent_bytes,
                    flops=f"{times} B P / N",
                    flops_count=times * sizes.B * part.elements / sizes.N,
                )


Sent = tuple[str, str, float]
"""A collective, and the bytes that a rank sends in it as an expression and as a number."""


def _sent(part: Part, sizes: Sizes, is_backward: bool) -> Iterator[tuple[Scheme, list[Sent]]]:
    """What each way sends in a pass."""
    ranks, elements = sizes.N, part.elements
    gradients = sizes.g * elements
    averaged = [
        (RING, "2 g P (N - 1) / N", 2 * gradients * (ranks - 1) / ranks),
        (WHOLE_RING, "g P (N - 1)", gradients * (ranks - 1)),
    ]
    yield Scheme.DATA, averaged if is_backward else [("none", "0", 0.0)]
    weights = sizes.e * elements * (ranks - 1) / ranks
    yield Scheme.SHARDED, _weights("e P (N - 1) / N", weights, is_backward)
    pairs = part.pairs
    activations = pairs * sizes.e * sizes.B * sizes.D * (ranks - 1) / ranks
    times = "" if pairs == 1 else f"{pairs} "
    yield Scheme.TENSOR, _activations(f"{times}e B D (N - 1) / N", activations)
    weights = sizes.e * elements / sizes.Y * (sizes.X - 1) / sizes.X
    activations = pairs * sizes.e * sizes.B / sizes.X * sizes.D * (sizes.Y - 1) / sizes.Y
    yield (
        Scheme.BOTH,
        [
            *_weights("e P (X - 1) / (X Y)", weights, is_backward),
            *_activations(f"{times}e B D (Y - 1) / (X Y)", activations),
        ],
    )


def _weights(expression: str, sent_bytes: float, is_backward: bool) -> list[Sent]:
    """Weights that are gathered in each pass, and gradients that backward scatters."""
    sent = [("all-gather of weights", expression, sent_bytes)]
    if is_backward:
        sent.append(("reduce-scatter of gradients", expression, sent_bytes))
    return sent


def _activations(expression: str, sent_bytes: float) -> list[Sent]:
    """Activations, or their gradients, that tensor ranks gather and scatter in each pass."""
    return [
        ("all-gather of activations", expression, sent_bytes),
        ("reduce-scatter of activations", expression, sent_bytes),
    ]


def limits(part: Part, sizes: Sizes) -> Iterator[tuple[Scheme, str, str, float]]:
    """Each way's inequality solved for N: on fewer ranks its collectives take no longer than the
    matmuls beside them. The way, its collective, the expression and the number.
    """
    ratio = 2 * sizes.W / sizes.C
    yield Scheme.DATA, RING, "1 + 2 B W / (g C)", 1 + sizes.B * ratio / sizes.g
    whole = 2 * sizes.B * ratio / sizes.g
    yield Scheme.DATA, WHOLE_RING, "N (N - 1) < 4 B W / (g C)", 0.5 + (0.25 + whole) ** 0.5
    yield Scheme.SHARDED, "all-gather", "1 + 2 B W / (e C)", 1 + sizes.B * ratio / sizes.e
    pairs = "" if part.pairs == 1 else f"{part.pairs} "
    tensor = part.elements * sizes.W / (part.pairs * sizes.e * sizes.D * sizes.C)
    expression = f"1 + P W / ({pairs}e D C)"
    yield Scheme.TENSOR, "activations", expression, 1 + tensor
    sharded = sizes.B * ratio / sizes.e
    own_links = _both("each on links of its own", 1 + sharded, 1 + tensor)
    product = f"(1 + 2 B W / (e C)) ({expression})"
    yield Scheme.BOTH, own_links, product, (1 + sharded) * (1 + tensor)
    ranks, tensor_ranks = _on_the_same_links(sharded, tensor)
    same_links = _both("on the same links", ranks, tensor_ranks)
    total = f"(X - 1) e C / (2 B W) + (Y - 1) {pairs}e D C / (P W) < 1"
    yield Scheme.BOTH, same_links, total, ranks * tensor_ranks


def _both(links: str, ranks: float, tensor_ranks: float) -> str:
    """Weights and activations in words, with the sizes of their groups of ranks."""
    return f"both, {links}: X = {ranks:.4g}, Y = {tensor_ranks:.4g}"


def _on_the_same_links(sharded: float, tensor: float) -> tuple[float, float]:
    """The X and Y, of at least 1, with the largest X Y for which (X - 1) / sharded + (Y - 1) /
    tensor is at most 1.
    """
    ranks = sharded * (1 + 1 / sharded + 1 / tensor) / 2
    ranks = min(max(ranks, 1.0), 1 + sharded)
    return ranks, 1 + tensor * (1 - (ranks - 1) / sharded)
