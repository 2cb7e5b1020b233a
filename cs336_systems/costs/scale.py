"""A training step on many GPUs: its forecast, and how many ranks can share it before communication
limits it.

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
from dataclasses import dataclass, replace
from enum import StrEnum
from math import floor, inf

from ..config import ModelConfig, Parallel, RunConfig
from .accounting import ffn_matrices, step_flops
from .curves import Curves
from .memory import rank_peak_bytes
from .ranks_time import Links, RanksTime, ranks_step_time
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
    """Bytes of an element of gathered weights, their gradients, and activations; gradients that
    are averaged whole are in fp32.
    """

    def intensities(self, element_bytes: int) -> tuple[float, float]:
        """The intensities a = e C / (2 W) of the links of a node and of the network; infinite
        without a network. e is `element_bytes`, C the FLOPs per second of a GPU, and W a link's
        bytes per second.
        """
        work, beyond = element_bytes * self.flops_per_s / 2, self.links.network_bytes_per_s
        return work / self.links.node_bytes_per_s, inf if beyond is None else work / beyond


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
        element_bytes = FP32_BYTES if scheme is Scheme.DATA else paper.element_bytes
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


PARALLEL = {Scheme.DATA: Parallel.DDP, Scheme.SHARDED: Parallel.FSDP}
"""The schemes whose steps are forecast, which measured steps of few ranks test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleStep:
    """The forecast of a step of one scheme on one number of ranks."""

    times: RanksTime
    memory_bytes: int | None
    """Peak of the rank that keeps most; None if it is not predicted."""
    flops_per_s: float
    """Model FLOPs of a rank in the time of the step."""


def scale_step(
    config: RunConfig, scheme: Scheme, ranks: int, curves: Curves, links: Links
) -> ScaleStep | None:
    """Predict a step of `ranks` ranks, each of which has the step `config` of one process; None
    if it is not known.
    """
    on_rank = replace(config, parallel=PARALLEL[scheme], ranks=ranks)
    times, flops = ranks_step_time(on_rank, curves, links), step_flops(config)
    if times is None or flops is None:
        return None
    return ScaleStep(
        times=times, memory_bytes=rank_peak_bytes(on_rank), flops_per_s=flops / times.time.step_s
    )
