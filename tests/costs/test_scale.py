"""A step on many GPUs on paper: memory, MFU, data sheets, and every rank count of the
inequalities tried one by one.
"""

from dataclasses import replace
from itertools import product

import pytest

from cs336.config import SIZES, Attention, Device, OptimizerKind, Parallel, Precision, RunConfig
from cs336.costs.accounting import step_flops
from cs336.costs.communication import Collective, CollectiveCall
from cs336.costs.hardware import find_device
from cs336.costs.memory import predict_memory
from cs336.costs.ranks_time import Links
from cs336.costs.scale import PARALLEL, Paper, ScaleStep, Scheme, largest_ranks, scale_step
from cs336.studies.ceilings_files import data_sheet_curves

H200 = find_device("H200")
assert H200 is not None
LINKS = Links(gpus_per_node=8, node_bytes_per_s=340e9, network_bytes_per_s=50e9)
CURVES = data_sheet_curves(H200)


def run(size: str = "small", **changes: object) -> RunConfig:
    model = replace(
        SIZES[size], context_length=256, attention=Attention.SDPA, num_layers=3, vocab_size=2500
    )
    config = RunConfig(
        size=size,
        model=model,
        batch_size=2,
        device=Device.CUDA,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
    )
    return replace(config, **changes)


def step(scheme: Scheme, ranks: int, config: RunConfig | None = None) -> ScaleStep:
    forecast = scale_step(config or run(), scheme, ranks, CURVES, LINKS)
    assert forecast is not None
    return forecast


@pytest.mark.parametrize("checkpoint_blocks", [0, 1])
@pytest.mark.parametrize("scheme", PARALLEL)
def test_the_memory_of_a_rank_is_that_of_the_way_s_own_code(
    scheme: Scheme, checkpoint_blocks: int
) -> None:
    """Traced and allocated tensor by tensor; the closed form leaves out the gathered embedding,
    5 % of this model.
    """
    config, ranks = run(checkpoint_blocks=checkpoint_blocks), 8
    memory = predict_memory(replace(config, parallel=PARALLEL[scheme], ranks=ranks))
    assert memory is not None
    assert step(scheme, ranks, config).memory_bytes == pytest.approx(
        memory.peak.allocated_bytes, rel=0.06
    )


def test_the_rate_is_that_of_the_whole_batch_on_all_ranks() -> None:
    forecast = step(Scheme.SHARDED, 16)
    flops = step_flops(run(batch_size=32))
    assert flops is not None
    assert forecast.flops_per_s == pytest.approx(flops / 16 / forecast.times.time.step_s)


def test_whole_models_take_a_rank_as_long_and_as_much_memory_on_any_number() -> None:
    """So they are predicted once; those of a sharded model are not."""
    few, many = (replace(run(), parallel=Parallel.DDP, ranks=ranks) for ranks in (2, 48))
    assert predict_memory(few) == predict_memory(many)
    peaks = [step(Scheme.SHARDED, ranks).memory_bytes or 0 for ranks in (8, 16, 64)]
    assert peaks == sorted(peaks, reverse=True)


H100 = Links(gpus_per_node=8, node_bytes_per_s=450e9, network_bytes_per_s=50e9)
PAPER = Paper(tokens=2**21, feed=12_352, flops_per_s=990e12, links=H100, element_bytes=2)


def times_s(paper: Paper, scheme: Scheme, data: int, tensor: int) -> list[tuple[float, float]]:
    """Computing and communication of a block, in each part of a step in which they overlap, from
    what is sent.

    d_model is 6 and the elements of a block's matrices are 4 x 6 x f; `call_s` is tested on its
    own.
    """
    d_model, elements = 6, 4 * 6 * paper.feed
    links, tokens = paper.links, paper.tokens / data

    def weights_s(kind: Collective, element_bytes: int) -> float:
        call = CollectiveCall(kind, element_bytes * elements / tensor)
        return replace(links, gpus_per_node=max(1, links.gpus_per_node // tensor)).call_s(
            call, data
        )

    def activations_s() -> float:
        kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) * 2
        size = paper.element_bytes * tokens * d_model
        return sum(links.call_s(CollectiveCall(kind, size), tensor) for kind in kinds)

    forward = 2 * tokens * elements / tensor / paper.flops_per_s
    gather, scatter = (
        weights_s(kind, paper.element_bytes)
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    pairs = []
    if scheme is Scheme.DATA:
        pairs += [(2 * forward, weights_s(Collective.ALL_REDUCE, 4))]
    if scheme in (Scheme.SHARDED, Scheme.BOTH):
        pairs += [(forward, gather), (2 * forward, gather + scatter)]
    if scheme in (Scheme.TENSOR, Scheme.BOTH):
        pairs += [(forward, activations_s())]
    return pairs


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
        (
            H100,
            replace(H100, network_bytes_per_s=6e9),
            replace(H100, gpus_per_node=4, node_bytes_per_s=25e9),
            replace(H100, gpus_per_node=1),
            replace(H100, gpus_per_node=64, network_bytes_per_s=None),
        ),
        ((2**18, 12_352), (2**14, 60_000), (3_000, 2_000), (50_000, 120_000)),
        (2, 4),
    )
]


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize("paper", PAPERS)
def test_the_largest_number_of_ranks_is_the_one_that_trying_all_finds(
    paper: Paper, scheme: Scheme
) -> None:
    limit = largest_ranks(paper, scheme)
    if paper.links.network_bytes_per_s is None:
        limit = min(limit, paper.links.gpus_per_node)
    most = 2 * limit + 4 * paper.links.gpus_per_node
    assert tried(paper, scheme, most) == limit
