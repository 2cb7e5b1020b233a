"""How many ranks can share a training step before communication limits it, on paper.

The four inequalities are those of the course, from Austin et al. 2025, How to Scale Your Model,
chapters "How to Parallelize a Transformer for Training" and "How to Think About GPUs", in the units
of this project:

    B  tokens of a step                      N  ranks = X data ranks times Y tensor ranks
    C  FLOP/s of a GPU in matmuls            G  GPUs of a node
    W  bytes/s that a GPU sends, to its node or through the network
    e  bytes of an element that is sent      P, D  elements of a block's matrices, d_model

Only the matmuls of the blocks are counted. Communication may overlap with them, and with
communication on other links.

**Data parallel.** Backward takes 4 B P / (N C) for a block. Its gradients are averaged meanwhile:
an all-reduce sends 2 e P (N - 1) / N, in time / W. Computing takes longer while B / N > a (1 - 1 /
N), with a = e C / (2 W). Across nodes a GPU sends 2 e P (1 - 1 / G) to its own, so N (1 - 1 / G) <
B / a, and with many ranks B / N > a: the course's form. It sends 2 e P (1 - G / N) / G through the
network, as the G GPUs of a node share what leaves it: N < G (1 + B / a).

**Fully sharded.** Forward takes 2 B P / (N C) and gathers e P (N - 1) / N; backward computes twice
as much, gathers again, and scatters as many gradients. Both have the same ratio as above, with e of
the gathered weights.

**Tensor parallel.** All B tokens pass each rank, which has 1 / Y of every matrix: 2 B P / (Y C). A
block gathers its input and scatters its result, e B D (Y - 1) / Y each, twice: for attention and
for the feed-forward network. Computing takes longer while Y (1 - 1 / Y) < f / a, with f = P / (4
D): the same form with f in the place of B, which has no part in it. Of a feed-forward network of
two matrices alone, which gathers and scatters once, f is d_ff: the course's.

**Both.** Weights are gathered among X ranks, 1 / Y of them, and activations among Y ranks, of B / X
tokens: X and Y have the limits from above, one by one. With many of both N = X Y < (B / a) (f / a),
or B / N > a^2 / f: the course's form. Across nodes tensor ranks first fill a node, and there N < G
(1 + B / a) as without: the GPUs of a node gather different weights, but through one network. With n
< 1 + f / a nodes of tensor ranks N < n G (1 + B / a).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import floor, inf

from ..config import ModelConfig
from .accounting import ffn_matrices
from .ranks_time import Links
from .shards import FP32_BYTES

SLACK = 1e-9
"""Relative, so that a limit that is a whole number is not rounded down."""


class Scheme(StrEnum):
    """The four ways to share a step that have an inequality."""

    DATA = "ddp"
    SHARDED = "fsdp"
    TENSOR = "tp"
    BOTH = "fsdp+tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """The quantities of a step that occur in the inequalities."""

    tokens: int
    """B, the tokens of all ranks together."""
    feed: float
    """f, the elements of a block's matrices over 4 d_model."""
    flops_per_s: float
    links: Links
    element_bytes: int
    """Bytes of an element of gathered weights, their gradients, and activations."""
    gradient_bytes: int = FP32_BYTES
    """Bytes of an element of gradients that are averaged whole."""

    def intensities(self, element_bytes: int) -> tuple[float, float]:
        """The intensities a = e C / (2 W) of the links of a node and of the network; infinite
        without a network. e is `element_bytes`, C the FLOPs per second of a GPU, and W a link's
        bytes per second.
        """
        work, beyond = element_bytes * self.flops_per_s / 2, self.links.network_bytes_per_s
        return work / self.links.node_bytes_per_s, inf if beyond is None else work / beyond


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
    feed_of = part.elements / (2 * part.pairs * sizes.D)
    tensor = 1 + feed_of * ratio / sizes.e
    expression = "1 + P W / (e D C)" if part.pairs == 1 else f"1 + P W / ({part.pairs} e D C)"
    yield Scheme.TENSOR, "activations", expression, tensor
    both = (1 + sizes.B * ratio / sizes.e) * tensor
    yield Scheme.BOTH, "both", f"(1 + 2 B W / (e C)) ({expression})", both


def feed(model: ModelConfig) -> float:
    """f: the elements of the matrices of a block over 4 d_model, of which attention has 4
    d_model^2.
    """
    return model.d_model + ffn_matrices(model) * model.d_ff / 4


def most_ranks(budget: float, near: float, far: float, in_node: int) -> float:
    """The most ranks, `in_node` of each node, whose communication takes no longer than computing.

    `budget` is B or f, `near` and `far` are the intensities a of the node's links and of the
    network.
    """
    within = budget / near if near else inf
    across = budget / far if far else inf
    if 1 + within < in_node:
        return 1 + within
    of_node = within * in_node / (in_node - 1) if in_node > 1 else inf
    return max(in_node, min(of_node, in_node * (1 + across)))


def largest_ranks(paper: Paper, scheme: Scheme) -> int | None:
    """The most ranks of a scheme; beyond one node they fill nodes. None if there is no limit."""
    size = paper.links.gpus_per_node
    if scheme is Scheme.TENSOR:
        most = _whole(_most_tensor(paper), size)
    elif scheme is Scheme.BOTH:
        most = max(
            y * _most_data(paper, paper.element_bytes, max(1, size // y))
            for y in _tensor_ranks(paper)
        )
    else:
        is_whole = scheme is Scheme.DATA
        element_bytes = paper.gradient_bytes if is_whole else paper.element_bytes
        most = _most_data(paper, element_bytes, size)
    return None if most == inf else int(most)


def _whole(ranks: float, in_node: int) -> float:
    """Round down to whole ranks, and beyond one node to whole nodes; at least 1."""
    if ranks == inf:
        return inf
    if ranks < in_node:
        return max(1, floor(ranks * (1 + SLACK)))
    return floor(ranks / in_node * (1 + SLACK)) * in_node


def _most_data(paper: Paper, element_bytes: int, in_node: int) -> float:
    """The most ranks over which data parallelism can spread the paper's batch before communication
    limits the step, rounded down to whole machines.
    """
    return _whole(most_ranks(paper.tokens, *paper.intensities(element_bytes), in_node), in_node)


def _most_tensor(paper: Paper) -> float:
    """The most ranks over which tensor parallelism can split the feed-forward layer before
    communication limits the step.
    """
    return most_ranks(
        paper.feed, *paper.intensities(paper.element_bytes), paper.links.gpus_per_node
    )


def _tensor_ranks(paper: Paper) -> Iterator[int]:
    """Numbers of tensor ranks that divide a node, or fill nodes, within their own limit."""
    size, most = paper.links.gpus_per_node, _most_tensor(paper) * (1 + SLACK)
    yield from (y for y in range(1, size + 1) if size % y == 0 and y <= most)
    if size <= most < inf and (nodes := floor(most / size)) > 1:
        yield nodes * size
    elif most == inf:
        yield size
