"""Time of a step on several ranks: closed forms, rings chunk by chunk, a simulation by ticks,
and inequalities.
"""

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

import pytest

from cs336.commands.configure import NamedGpu, make_fast_config
from cs336.config import (
    Arch,
    Device,
    ModelConfig,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    Profiler,
    RunConfig,
)
from cs336.costs.accounting import count_parameters
from cs336.costs.communication import Collective, CollectiveCall, calls, stages
from cs336.costs.curves import Curves
from cs336.costs.derivation import Scheme, Sizes, limits, parts_of
from cs336.costs.kernels import Matmul
from cs336.costs.ranks_time import (
    Links,
    RanksTime,
    fastest_bytes_per_s,
    predicted_time,
    ranks_step_time,
)
from cs336.costs.shards import LOOKUP, REST, units
from cs336.costs.time import step_time
from cs336.record import load_records
from cs336.studies.ceilings_files import load_ceilings
from tests.committed import DATA, committed_runs

MODEL = ModelConfig(
    vocab_size=64, context_length=1, d_model=256, d_ff=1024, num_layers=6, num_heads=4
)
RUN = RunConfig(
    size="custom", model=MODEL, batch_size=64, device=Device.CUDA, optimizer=OptimizerKind.FUSED
)
RATE = 1e12
HEAD = "lm_head"


def curves(bandwidth: float = 1e18) -> Curves:
    """A device of one rate for all matmuls, whose other kernels take next to no time."""
    matmuls = (Matmul(rows=8192, inner=8192, columns=8192, time_s=2 * 8192**3 / RATE),)
    passes = {1: 1 / bandwidth, 2**40: 2**40 / bandwidth}
    return Curves(
        matmuls=dict.fromkeys(Precision, matmuls),
        copies=passes,
        adamw=passes,
        launch_s=0.0,
        kernel_s=0.0,
    )


def links(bytes_per_s: float, gpus: int = 8, network: float | None = None) -> Links:
    return Links(gpus_per_node=gpus, node_bytes_per_s=bytes_per_s, network_bytes_per_s=network)


def on(way: Parallel, ranks: int = 4, **changes: object) -> RunConfig:
    return replace(RUN, parallel=way, ranks=ranks, **changes)


def predicted(config: RunConfig, rate: float) -> RanksTime:
    forecast = ranks_step_time(config, curves(), links(rate))
    assert forecast is not None
    return forecast


def sums(config: RunConfig, rate: float, ranks: int = 4) -> float:
    """What averaging all gradients takes in a ring, one collective after the other."""
    return 2 * 4 * count_parameters(config.model) * (ranks - 1) / ranks / rate


@pytest.mark.parametrize("rate", [1e6, 1e10])
@pytest.mark.parametrize("way", [Parallel.DDP_NAIVE, Parallel.DDP_FLAT])
def test_what_is_averaged_after_backward_is_exposed(way: Parallel, rate: float) -> None:
    forecast = predicted(on(way), rate)
    alone = step_time(RUN, curves())
    assert alone is not None
    assert forecast.compute_s == pytest.approx(alone.step_s)
    assert forecast.exposed_s == pytest.approx(sums(RUN, rate))
    assert forecast.time.phases_s[Phase.COMMUNICATION] == pytest.approx(forecast.exposed_s)
    assert forecast.communication_s == pytest.approx(forecast.exposed_s)


def multiplied_elements(model: ModelConfig) -> int:
    """Elements of all matrices that multiply: without vectors and tables that are looked up."""
    feed_forward = 2 if model.arch is Arch.GPT2 else 3
    of_block = 4 * model.d_model**2 + feed_forward * model.d_model * model.d_ff
    return model.num_layers * of_block + model.vocab_size * model.d_model


class Part(NamedTuple):
    """What the kernels do: `work_s` alone, once as many sends have ended as `needs`; sends begin
    before and after.
    """

    work_s: float
    before: Sequence[float] = ()
    after: Sequence[float] = ()
    needs: int = 0


def ticked(parts: Sequence[Part], ticks: int = 5_000) -> tuple[list[float], float]:
    """When each part and the last send end, in small steps of time: beside a send the kernels
    are half as fast.
    """
    tick = sum(part.work_s + sum(part.before) + sum(part.after) for part in parts) / ticks
    now, ended, sends, ends = 0.0, 0, deque[float](), list[float]()

    def pass_by() -> None:
        nonlocal now, ended
        now += tick
        if sends:
            sends[0] -= tick
            if sends[0] <= tick * 1e-6:
                sends.popleft()
                ended += 1

    for part in parts:
        sends.extend(part.before)
        left = part.work_s
        while ended < part.needs:
            pass_by()
        while left > tick * 1e-6:
            left -= tick / 2 if sends else tick
            pass_by()
        ends.append(now)
        sends.extend(part.after)
    while sends:
        pass_by()
    return ends, now


@pytest.mark.parametrize("rate", [1e6, 1e9, 4e9, 1e10, 1e13])
@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("way", [Parallel.DDP_OVERLAP, Parallel.DDP])
def test_buckets_are_averaged_while_backward_goes_on(
    way: Parallel, arch: Arch, rate: float
) -> None:
    wide = replace(MODEL, arch=arch, d_model=1024, d_ff=4096)  # of several buckets
    config = on(way, model=wide)
    forecast, alone = predicted(config, rate), step_time(config, curves())
    assert alone is not None
    backward_s = alone.phases_s[Phase.BACKWARD]
    buckets = [stage for stage in stages(config) if stage.multiplied_elements or stage.sends]
    assert len(buckets) > 3
    multiplied = sum(bucket.multiplied_elements for bucket in buckets)
    assert multiplied == multiplied_elements(wide)
    averaged_bytes = [call.num_bytes for bucket in buckets for call in bucket.sends]
    assert sum(averaged_bytes) == 4 * count_parameters(wide)
    parts = [
        Part(
            work_s=backward_s * bucket.multiplied_elements / multiplied,
            after=[2 * num_bytes * 3 / 4 / rate],
        )
        for bucket, num_bytes in zip(buckets, averaged_bytes, strict=True)
    ]
    (*_, end_s), last_s = ticked(parts)
    assert forecast.slowed_s == pytest.approx(end_s - backward_s, abs=5e-3 * last_s)
    assert forecast.exposed_s == pytest.approx(last_s - end_s, abs=5e-3 * last_s)
    later = {
        phase: time_s - alone.phases_s.get(phase, 0)
        for phase, time_s in forecast.time.phases_s.items()
    }
    in_backward = last_s if way is Parallel.DDP else end_s
    assert later[Phase.BACKWARD] == pytest.approx(in_backward - backward_s, abs=5e-3 * last_s)
    assert later[Phase.COMMUNICATION] == pytest.approx(last_s - in_backward, abs=5e-3 * last_s)


def test_copies_to_others_are_added_up_afterwards() -> None:
    slow = curves(bandwidth=1e9)
    forecast = ranks_step_time(on(Parallel.DDP_PUSH), slow, links(inf))
    assert forecast is not None
    elements = count_parameters(RUN.model)
    assert forecast.exposed_s == pytest.approx(3 * 12 * elements / 1e9)


def test_a_sharded_optimizer_sends_every_parameter() -> None:
    forecast = predicted(on(Parallel.DDP_NAIVE, shard_optimizer=True), 1e9)
    assert forecast.exposed_s == pytest.approx(sums(RUN, 1e9) * 3 / 2)
    assert forecast.communication_s == pytest.approx(forecast.exposed_s)


FAST = make_fast_config(
    Device.CUDA,
    {},
    NamedGpu("NVIDIA A100-SXM4-80GB"),
    size="small",
    context_length=128,
    batch_size=1,
)
"""A step of the fast model, in which matrices have 16-bit gradients."""


def fast_bytes(model: ModelConfig) -> tuple[int, int]:
    """Bytes of the gradients of matrices, the table of embeddings included, and of vectors."""
    of_embeddings = model.vocab_size * model.d_model
    matrices = 2 * (multiplied_elements(model) + of_embeddings)
    vectors = count_parameters(model) - multiplied_elements(model) - of_embeddings
    return matrices, 4 * vectors


def test_the_fast_model_averages_half_of_the_bytes() -> None:
    forecast = ranks_step_time(
        replace(FAST, parallel=Parallel.DDP_FLAT, ranks=4), curves(), links(1e9)
    )
    assert forecast is not None
    assert forecast.exposed_s == pytest.approx(2 * sum(fast_bytes(FAST.model)) * 3 / 4 / 1e9)


@pytest.mark.parametrize("rate", [1e6, 1e8])
def test_the_fast_model_sends_updates_while_it_updates(rate: float) -> None:
    """On so slow a link a rank has updated long before the last part has been sent: gradients are
    scattered after backward, and what was updated is gathered beside the optimizer.
    """
    config = replace(FAST, parallel=Parallel.DDP_FLAT, ranks=4, shard_optimizer=True)
    forecast = ranks_step_time(config, curves(), links(rate))
    assert forecast is not None
    matrices, vectors = fast_bytes(FAST.model)
    scattered_s = (matrices + vectors) * 3 / 4 / rate
    gathered_s = matrices * 3 / 4 / rate
    phases_s = forecast.time.phases_s
    assert phases_s[Phase.COMMUNICATION] == pytest.approx(scattered_s)
    assert phases_s[Phase.OPTIMIZER] == pytest.approx(gathered_s)


def sharded_parts(
    config: RunConfig, compute: Mapping[Phase, float], rate: float, ahead: int, once: bool
) -> list[Part]:
    """What follows one another in a step whose parameters are sharded, with as many units
    gathered ahead.
    """
    sizes = {
        unit.name: unit.element_bytes * sum(unit.parts) * (config.ranks - 1) / rate
        for unit in units(config)
    }
    blocks = [f"layers.{index}" for index in range(config.model.num_layers)]
    names = [LOOKUP, *blocks, HEAD]
    head = config.model.vocab_size * config.model.d_model
    of_block = (multiplied_elements(config.model) - head) // len(blocks)
    weights = {LOOKUP: 0} | dict.fromkeys(blocks, of_block) | {HEAD: head}
    order = [
        *((name, Phase.FORWARD) for name in names),
        *((name, Phase.BACKWARD) for name in names[::-1]),
    ]
    kept = {LOOKUP, HEAD} if once else set()
    gathered = [
        place
        for place, (name, phase) in enumerate(order)
        if name in sizes and not (phase is Phase.BACKWARD and name in kept)
    ]
    rest = [sizes[REST]] if REST in sizes else []
    parts, sent = [Part(work_s=0.0, before=rest, needs=len(rest))], list[int](range(-len(rest), 0))
    for place, (name, phase) in enumerate(order):
        new = [needed for needed in gathered if needed <= place + ahead and needed not in sent]
        sent += new
        scatters = [sizes[name]] if phase is Phase.BACKWARD and name in sizes else []
        parts.append(
            Part(
                work_s=compute[phase] * weights[name] / sum(weights.values()),
                before=[sizes[order[needed][0]] for needed in new],
                after=scatters,
                needs=sent.index(place) + 1 if place in gathered else 0,
            )
        )
        sent += [len(order) + place] * len(scatters)
    return [*parts, Part(work_s=0.0, before=rest)]


@pytest.mark.parametrize("rate", [1e5, 1e8, 1e9, 3e9, 1e10, 1e13])
@pytest.mark.parametrize("way", [Parallel.FSDP, Parallel.FSDP2])
def test_gathers_run_ahead_and_scatters_behind(way: Parallel, rate: float) -> None:
    config = on(way)
    forecast, alone = predicted(config, rate), step_time(config, curves())
    assert alone is not None
    ahead, once = (2, True) if way is Parallel.FSDP else (1, False)
    _, end_s = ticked(sharded_parts(config, alone.phases_s, rate, ahead, once))
    vectors = {} if way is Parallel.FSDP2 else calls(config) or {}
    later_s = sum(
        2 * call.num_bytes * 3 / 4 / rate
        for call in vectors
        if call.collective is Collective.ALL_REDUCE
    )
    of_both = alone.phases_s[Phase.FORWARD] + alone.phases_s[Phase.BACKWARD]
    assert forecast.exposed_s + forecast.slowed_s == pytest.approx(
        end_s + later_s - of_both, abs=1e-2 * end_s
    )


@pytest.mark.parametrize(
    "way", [way for way in Parallel if way not in (Parallel.NONE, Parallel.OWN)]
)
def test_no_way_hides_more_than_there_is_or_waits_longer_than_it_sends(way: Parallel) -> None:
    for rate in (1e6, 1e9, 1e12):
        forecast = predicted(on(way), rate)
        assert forecast.exposed_s >= -1e-12
        if way not in (Parallel.FSDP_PUSH, Parallel.DDP_PUSH):
            assert forecast.exposed_s <= forecast.communication_s * (1 + 1e-4)


def test_collectives_among_as_many_ranks_are_needed() -> None:
    config = on(Parallel.DDP_NAIVE, 4)
    times = {4: {Collective.ALL_REDUCE: {1: 1e-9, 2**30: 2**30 / 1e9}}}
    forecast = predicted_time(config, replace(curves(), collectives=times))
    assert forecast is not None
    alone = predicted_time(RUN, curves())
    assert alone is not None
    sent_s = 4 * count_parameters(RUN.model) / 1e9
    assert forecast.step_s - alone.step_s == pytest.approx(sent_s, rel=1e-3)
    assert predicted_time(config, curves()) is None
    assert (
        predicted_time(on(Parallel.DDP_NAIVE, 2), replace(curves(), collectives=times)) is None
    ), "2 are less than 4"


# the inequalities against the forecast

PARALLEL = {Scheme.DATA: Parallel.DDP, Scheme.SHARDED: Parallel.FSDP}
"""The ways of the inequalities whose steps are forecast by `--parallel`."""


@pytest.mark.usefixtures("one_rate")
@pytest.mark.parametrize("sequences", [2**4 * 3**3 * 5 * 7, 2**16])
@pytest.mark.parametrize("scheme", PARALLEL)
def test_the_forecast_crosses_where_the_inequality_says(scheme: Scheme, sequences: int) -> None:
    """At every number of ranks in one node; embedding, head and norms, which only the forecast
    counts, are small. The context of MODEL is one token.
    """
    rate = RATE * sequences / 2**21
    sizes = Sizes(B=sequences, D=1, D_FF=1, C=RATE, W=rate, X=1, Y=1, e=4, g=4)
    part, _ = parts_of(MODEL)
    most = next(number for way, _, _, number in limits(part, sizes) if way is scheme)
    tried = [ranks for ranks in range(1, round(3 * most)) if sequences % ranks == 0]
    assert {ranks <= most for ranks in tried} == {True, False}, "both sides are tried"
    for ranks in tried:
        config = replace(RUN, parallel=PARALLEL[scheme], ranks=ranks, batch_size=sequences // ranks)
        forecast = ranks_step_time(config, curves(), links(rate, gpus=ranks))
        compute = step_time(config, curves())
        assert forecast is not None
        assert compute is not None
        beside = (Phase.BACKWARD,) if scheme is Scheme.DATA else (Phase.FORWARD, Phase.BACKWARD)
        holds = sum(compute.phases_s[phase] for phase in beside) >= forecast.communication_s
        if abs(ranks / most - 1) > 0.06 and abs(ranks - most) > 1:
            assert holds is (ranks <= most), (ranks, most)


# measured steps


def test_measured_steps_of_several_ranks_take_what_the_ceilings_let_expect() -> None:
    """Every way in the records of `data/`: eager steps are at most 10 % off, and half of the
    configurations 3 %; fast ones 15 and 5 %.
    """
    ceilings = load_ceilings(DATA / "ceilings")
    measured_s: dict[tuple[RunConfig, str], list[float]] = {}
    for record in (record for runs in committed_runs() for record in load_records(runs)[0]):
        config, step = record.config, record.measurement(Phase.STEP)
        is_plain = config.profiler is Profiler.NONE and config.device is Device.CUDA
        if config.ranks > 1 and is_plain and step is not None and record.environment is not None:
            name = record.environment.identity.device_name
            measured_s.setdefault((replace(config, repeat=0), name), []).append(step.median_s)
    errors: dict[bool, list[float]] = {False: [], True: []}
    for (config, name), times_s in measured_s.items():
        measured = ceilings.curves(name)
        expected = None if measured is None else predicted_time(config, measured)
        if expected is not None:
            error = abs(expected.step_s / statistics.median(times_s) - 1)
            errors[config.cast_once].append(error)
    for is_fast, largest, middle in ((False, 0.10, 0.03), (True, 0.15, 0.05)):
        if not errors[is_fast]:
            pytest.skip("no such records")
        assert max(errors[is_fast]) <= largest
        assert statistics.median(errors[is_fast]) <= middle


LINKS = Links(gpus_per_node=4, node_bytes_per_s=8.0, network_bytes_per_s=2.0)
KINDS = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)


def sent_in_a_gather(in_node: int, nodes: int) -> tuple[int, int]:
    """Chunks that a GPU sends to its node and to the network, if each rank begins with one; all end
    with all.

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
    assert all(chunks == set(ranks) for chunks in have.values())
    by_link = [{sent[rank, link] for rank in ranks} for link in ("node", "network")]
    (near,), (far,) = by_link
    return near, far


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("in_node", "nodes"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (4, 2), (4, 5)]
)
def test_the_slower_link_decides_how_long_a_ring_takes(
    kind: Collective, in_node: int, nodes: int
) -> None:
    chunk_bytes, ranks = 96, in_node * nodes
    links = replace(LINKS, gpus_per_node=in_node)
    near, far = sent_in_a_gather(in_node, nodes)
    passes = 2 if kind is Collective.ALL_REDUCE else 1
    expected = passes * chunk_bytes * max(near / 8.0, far / 2.0)
    assert links.call_s(CollectiveCall(kind, chunk_bytes * ranks), ranks) == pytest.approx(expected)


def test_a_push_goes_to_every_other_rank() -> None:
    push_s = LINKS.call_s(CollectiveCall(Collective.PUSH, 80), 12)
    assert push_s == max(3 * 80 / 8.0, 8 * 80 / 2.0)


def test_measured_times_count_within_a_node_and_scale_with_what_is_sent() -> None:
    times = {Collective.ALL_REDUCE: {100: 7.0, 200: 9.0}}
    links = replace(LINKS, times=times, measured_ranks=2)
    call = CollectiveCall(Collective.ALL_REDUCE, 100)
    assert links.call_s(call, 2) == 7.0
    assert links.call_s(call, 4) == pytest.approx(7.0 * (3 / 4) / (1 / 2))
    assert links.call_s(CollectiveCall(Collective.ALL_GATHER, 200), 2) == 4.5, (
        "half of an all-reduce"
    )
    assert links.call_s(call, 1) == 0
    assert links.call_s(CollectiveCall(Collective.PUSH, 80), 2) == 80 / 8.0, "not measured"


def test_the_fastest_rate_is_that_of_what_a_rank_sends() -> None:
    times = {
        Collective.ALL_REDUCE: {100: 1.0},
        Collective.ALL_GATHER: {100: 0.4},
        Collective.PUSH: {100: 0.01},
    }
    assert fastest_bytes_per_s(times, 4) == pytest.approx(0.75 * 100 / 0.4)
    assert fastest_bytes_per_s({}, 4) is None


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (8, 1), (16, 2), (512, 64)])
def test_steps_of_a_ring_take_longer_the_more_ranks_it_has(ranks: int, nodes: int) -> None:
    """Of n - 1 steps each between two nodes takes longer. Those of the ranks that were measured are
    in the measured time; trees and all-to-alls have no such steps.
    """
    plain = Links(gpus_per_node=8, node_bytes_per_s=1e12, network_bytes_per_s=1e11)
    stepping = replace(plain, node_step_s=1.0, network_step_s=100.0)
    times = {Collective.ALL_REDUCE: {1: 2e-12}}
    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        call = CollectiveCall(kind, 2**20)
        steps_s = ranks - nodes + 100 * (nodes - 1)
        assert stepping.call_s(call, ranks) - plain.call_s(call, ranks) == pytest.approx(steps_s)
        measured = [replace(one, times=times) for one in (plain, stepping)]
        more_s = measured[1].call_s(call, ranks) - measured[0].call_s(call, ranks)
        assert more_s == pytest.approx(steps_s - 1)
    for kind in (Collective.ALL_REDUCE, Collective.ALL_TO_ALL):
        call = CollectiveCall(kind, 2**20)
        assert stepping.call_s(call, ranks) == plain.call_s(call, ranks)
