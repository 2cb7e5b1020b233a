"""Layouts: deep steps from shallow tapes against whole ones, activations and bubbles against
published and simulated forms, and what has to hold between neighbours.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from cs336.config import (
    SIZES,
    Attention,
    Device,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    RunConfig,
)
from cs336.costs.checkpoints import Schedule, checkpoint_schedules, schedules
from cs336.costs.depth import step_by_depth
from cs336.costs.hardware import find_device
from cs336.costs.layout import Layout, layouts
from cs336.costs.layout_cost import LayoutCost, layout_cost
from cs336.costs.layout_memory import Rank, StageMemory, fullest_rank_bytes
from cs336.costs.memory import allocated_levels, predict_memory, rounded_bytes
from cs336.costs.rank_operations import rank_operations, with_sums
from cs336.costs.ranks_time import Links, ranks_step_time
from cs336.costs.tape import phases_of
from cs336.costs.time import step_time
from cs336.costs.traces import tape_of
from cs336.studies.ceilings_files import data_sheet_curves
from tests.costs.tensor_parallel import parallelized_block

H100 = find_device("H100 80GB HBM3")
assert H100 is not None
CURVES = data_sheet_curves(H100)
LINKS = Links(gpus_per_node=8, node_bytes_per_s=340e9, network_bytes_per_s=40e9)


def run(size: str = "2.7B", **changes: object) -> RunConfig:
    config = RunConfig(
        size=size,
        model=replace(SIZES[size], attention=Attention.SDPA),
        device=Device.CUDA,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
    )
    return replace(config, **changes)


def cost(config: RunConfig, links: Links = LINKS, **layout: int | bool) -> LayoutCost:
    forecast = layout_cost(config, Layout(**layout), CURVES, links)
    assert isinstance(forecast, LayoutCost), forecast
    return forecast


@pytest.mark.parametrize("size", ["small", "2.7B", "10B", "gpt2-xl"])
def test_a_deep_step_is_that_of_its_own_tape(size: str) -> None:
    """Of each preset's committed tape: the same operations, and the same peak to the byte."""
    config = run(size)
    tape = tape_of(config)
    step = step_by_depth(config)
    for phase, _, (first, stop) in phases_of(tape, -1):
        if phase not in step.launches:
            continue
        launched = [tape.makes[number] for number in tape.launches[first:stop]]
        deep = step.launches[phase].of_depth(config.model.num_layers)
        assert [make for _, make, *_ in deep] == [make for _, make, *_ in launched]
        assert [views for views, *_ in deep] == [views for views, *_ in launched]
    sizes = [rounded_bytes(spec.size_bytes) for spec in tape.specs]
    levels = allocated_levels(tape, [sizes[kind] for kind in tape.tensors])
    whole = max(levels[tape.steps[-1][0][1] :])
    assert fullest_rank_bytes(config, Layout(micro_batch=config.batch_size)) == whole


def test_activations_of_a_block_are_the_published_ones() -> None:
    """Korthikanti et al. 2022, eq. 4: 34 s b h / t bytes, fused attention without its 5 a s / h.

    Our block has no dropout, whose masks are 2 of the 34, and layer norms whose inputs are in fp32,
    2 bytes more each. Statistics of each token come on top: 4 numbers of two layer norms, which all
    tokens of a rank have, and one of each head.
    """
    config = run("gpt2-xl")
    model = config.model
    for tensor, micro_batch in ((1, 2), (5, 2), (25, 4)):
        rank = Rank(config=config, layout=Layout(tensor=tensor, micro_batch=micro_batch))
        memory = StageMemory(rank, rank.stages[0], is_first=True, is_last=True)
        tokens = micro_batch * model.context_length
        of_token = (34 - 2 + 4) * model.d_model + 4 * (4 + model.num_heads)
        kept = memory.kept_bytes((0, 0)) - memory.kept_bytes((0,))
        # sizes are rounded up to 512 bytes, and a block keeps 16 tensors
        assert kept == pytest.approx(tokens * of_token / tensor, abs=16 * 512)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 16])
def test_the_bubble_and_the_micro_batches_in_flight_are_those_of_a_run_schedule(
    stages: int, micro_batches: int
) -> None:
    """1F1B event by event: a forward pass takes 1 and a backward pass 2."""
    ends: dict[tuple[int, bool, int], float] = {}
    ready = [0.0] * stages
    orders = []
    most = [0] * stages
    for stage in range(stages):
        ahead = min(stages - stage - 1, micro_batches)
        order = [(False, number) for number in range(ahead)]
        for number in range(micro_batches):
            if ahead + number < micro_batches:
                order.append((False, ahead + number))
            order.append((True, number))
        orders.append(order)
        alive = 0
        for is_backward, _ in order:
            alive += -1 if is_backward else 1
            most[stage] = max(most[stage], alive)
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                is_backward, number = order[0]
                before = (stage + 1 if is_backward else stage - 1, is_backward, number)
                is_end = before[0] in (-1, stages)
                if not is_end and before not in ends:
                    break
                begin = max(ready[stage], ends.get(before, 0.0))
                ready[stage] = ends[stage, is_backward, number] = begin + (2 if is_backward else 1)
                order.pop(0)
    layout = Layout(pipeline=stages, accumulate=micro_batches)
    assert max(ready) == pytest.approx(3 * micro_batches * (1 + layout.bubble))
    assert most[0] == layout.in_flight


def test_more_chunks_shorten_the_bubble_and_keep_more_activations() -> None:
    """Narayanan et al. 2021, section 2.2: a bubble of 1 / v, and at most twice the activations."""
    one = Layout(pipeline=4, accumulate=16)
    two = replace(one, chunks=2)
    assert two.bubble == one.bubble / 2
    assert one.in_flight < two.in_flight <= 2 * one.in_flight


def test_interleaved_stages_wait_for_what_fills_and_empties_the_pipeline_alone() -> None:
    """Twice the micro-batches: without chunks stages wait for all that they send, with chunks for
    no more than before.
    """
    waited_s = {}
    for chunks, accumulate in product((1, 2), (16, 32)):
        numbers = {"pipeline": 4, "chunks": chunks, "accumulate": accumulate}
        waited_s[chunks, accumulate] = cost(run(), **numbers).time.exposed_s["pipeline"]
    # 19 hops and 35
    assert waited_s[1, 32] / waited_s[1, 16] == pytest.approx(35 / 19)
    assert waited_s[2, 32] == waited_s[2, 16] < waited_s[1, 16]
    slow = replace(LINKS, node_bytes_per_s=1e6)
    for chunks in (1, 2):
        exposed_s = cost(run(), slow, pipeline=4, chunks=chunks, accumulate=16).time.exposed_s
        sent_bytes = 2 * run().model.context_length * run().model.d_model
        all_s = 2 * chunks * 16 * sent_bytes / 1e6
        assert exposed_s["pipeline"] == pytest.approx(all_s, rel=0.2), "none is hidden"


@pytest.mark.parametrize(("size", "tensor"), [("2.7B", 2), ("gpt2-medium", 4)])
def test_a_tensor_rank_multiplies_what_pytorch_s_does(size: str, tensor: int) -> None:
    """The matmuls and collectives of a block that `parallelize_module` divides, in forward and
    backward, on meta tensors of a process group that is not there.
    """
    config = run(size)
    rank = Rank(config=config, layout=Layout(tensor=tensor, micro_batch=2))
    matmuls: list[Counter[tuple[int, ...]]] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        keys = rank.steps[0].launches[phase].block
        operations = rank_operations(keys, rank.names, tensor, 1)
        sides = [operation.sides for operation in operations if operation.kind == "matmul"]
        matmuls.append(Counter(tuple(sorted(side)) for side in sides))
    traced, collectives = parallelized_block(config, micro_batch=2, tensor=tensor)
    assert matmuls == traced
    assert collectives == [{"all_gather": 2, "reduce_scatter": 2}] * 2


@pytest.mark.parametrize(("tensor", "context"), [(1, 2), (2, 4)])
def test_a_ring_adds_up_what_each_rank_s_keys_give_in_fp32(tensor: int, context: int) -> None:
    """Each but the first result of attention is read, and the sum read and written: 2 + 4 + 4 bytes
    of each element; in backward those of three gradients.
    """
    rank = Rank(config=run("8B"), layout=Layout(tensor=tensor, context=context))
    model = rank.alone.model
    assert model.context_length == run("8B").model.context_length // context
    for phase, tensors in ((Phase.FORWARD, 1), (Phase.BACKWARD, 3)):
        keys = rank.steps[0].launches[phase].block
        operations = rank_operations(keys, rank.names, tensor, context)
        added = Counter(with_sums(operations, context)) - Counter(operations)
        (sums,) = added
        assert added[sums] == 1
        elements = model.context_length * model.d_model // tensor
        assert sums.launches * sums.moved_bytes == tensors * (context - 1) * 10 * elements
        assert [*with_sums(operations, 1)] == operations


def measured_layouts() -> list[tuple[RunConfig, Layout]]:
    """A step alone, of whole models and of sharded ones."""
    pairs = []
    for blocks, layout in product((0, 1), ({}, {"data": 2}, {"shard": 4})):
        config = run("small", batch_size=2, checkpoint_blocks=blocks)
        pairs.append((config, Layout(micro_batch=2, checkpoint=blocks, **layout)))
    return pairs


@pytest.mark.parametrize(("config", "layout"), measured_layouts(), ids=str)
def test_time_and_memory_of_few_ranks_are_those_of_their_own_step(
    config: RunConfig, layout: Layout
) -> None:
    """Whose collectives are those of its way of `--parallel`, and whose peak is that of a simulated
    allocator: rests that it does not split and a gathered embedding are left out, 6 % of this one.
    """
    forecast = layout_cost(config, layout, CURVES, LINKS)
    assert isinstance(forecast, LayoutCost)
    way = Parallel.FSDP if layout.shard > 1 else Parallel.DDP
    ranked = config
    if layout.gpus > 1:
        ranked = replace(config, parallel=way, ranks=layout.gpus)
    memory = predict_memory(ranked)
    assert memory is not None
    assert forecast.peak_bytes == pytest.approx(memory.peak.allocated_bytes, rel=0.06)
    alone = step_time(config, CURVES)
    assert alone is not None
    whole_s = alone.step_s
    if layout.gpus > 1:
        times = ranks_step_time(ranked, CURVES, LINKS)
        assert times is not None
        whole_s = times.time.step_s
    # buckets of PyTorch's DDP are not blocks, and the last launches of a phase wait for nothing
    assert forecast.step_s == pytest.approx(whole_s, rel=0.02)


DRAWN = 60


def drawn_costs(seed: int) -> Iterator[tuple[RunConfig, Layout, LayoutCost]]:
    """Random sensible layouts of a random preset."""
    random = Random(seed)
    for _ in range(DRAWN):
        size = random.choice(["small", "2.7B", "gpt2-medium", "8B"])
        config = run(size)
        gpus = random.choice([8, 16, 64])
        every = list(layouts(config, gpus, gpus * random.choice([1, 4, 16]), LINKS))
        layout = random.choice(every)
        forecast = layout_cost(config, layout, CURVES, LINKS)
        assert isinstance(forecast, LayoutCost)
        yield config, layout, forecast


def test_what_holds_between_neighbours_of_drawn_layouts() -> None:
    """Faster links are never slower; twice the replicas with twice the batch compute as much each
    and need no more memory; more shards keep less; checkpoints compute more and keep less; the
    parts make up the whole.
    """
    faster = replace(LINKS, node_bytes_per_s=2 * 340e9, network_bytes_per_s=80e9)
    for config, layout, forecast in drawn_costs(62):
        assert layout.gpus in (8, 16, 64)
        assert forecast.time.compute_s > 0
        quick = layout_cost(config, layout, CURVES, faster)
        assert isinstance(quick, LayoutCost)
        assert quick.step_s <= forecast.step_s * (1 + 1e-9)
        wide = layout_cost(config, replace(layout, data=2 * layout.data), CURVES, LINKS)
        assert isinstance(wide, LayoutCost)
        assert wide.time.compute_s == forecast.time.compute_s
        assert wide.flops == 2 * (forecast.flops or 0)
        if layout.data * layout.shard > 1:
            assert wide.peak_bytes == forecast.peak_bytes
            assert wide.step_s >= forecast.step_s * (1 - 1e-9)
        if layout.shard > 1:
            more = layout_cost(config, replace(layout, shard=2 * layout.shard), CURVES, LINKS)
            assert isinstance(more, LayoutCost)
            assert more.peak_bytes <= forecast.peak_bytes
        if not layout.checkpoint:
            kept = layout_cost(config, replace(layout, checkpoint=1), CURVES, LINKS)
            assert isinstance(kept, LayoutCost)
            assert kept.time.compute_s > forecast.time.compute_s
            assert kept.peak_bytes <= forecast.peak_bytes


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 12, 32, 33])
def test_checkpoints_keep_and_run_again_what_a_simulated_backward_does(blocks: int) -> None:
    """Nested ones by recursion, others by trying; and nested ones keep log2 N inputs."""
    input_bytes, block_bytes = 3, 50
    most = runs = 0

    def backward(number: int, kept_inputs: int) -> None:
        """Run backward of so many blocks, whose first input and others are kept."""
        nonlocal most, runs
        if number == 1:
            runs += 1
            most = max(most, kept_inputs * input_bytes + block_bytes)
            return
        first = number // 2
        runs += first
        backward(number - first, kept_inputs + 1)
        backward(first, kept_inputs)

    backward(blocks, 1)
    every = {schedule.name.split()[0]: schedule for schedule in ordered(blocks)}
    assert every["nested"].kept_bytes == most
    assert every["nested"].again == runs
    one_level = ordered(blocks)[2]
    for size in range(1, blocks + 1):
        groups = [min(size, blocks - begin) for begin in range(0, blocks, size)]
        kept = len(groups) * input_bytes + max(groups) * block_bytes
        assert one_level.kept_bytes <= kept


def ordered(blocks: int) -> list[Schedule]:
    return list(schedules(blocks, 3, 50))


def test_the_input_of_a_block_is_one_tensor_of_the_residual_stream() -> None:
    """In fp32, whatever the matmuls are in."""
    config = run("2.7B")
    none, each, *_ = checkpoint_schedules(config)
    stream = 4 * config.batch_size * config.model.context_length * config.model.d_model
    blocks = config.model.num_layers
    assert each.kept_bytes == blocks * stream + none.kept_bytes / blocks


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        # Llama 3 8B and 70B, as their files on the Hub have them
        ((4096, 14_336, 32, 32), 8_030_261_248),
        ((8192, 28_672, 80, 64), 70_553_706_496),
    ],
)
def test_stages_and_shards_of_known_models_add_up_to_their_parameters(
    shape: tuple[int, int, int, int], parameters: int
) -> None:
    """Of all stages, tensor ranks and shards; vectors that each tensor rank has count once."""
    d_model, d_ff, num_layers, num_heads = shape
    model = replace(
        SIZES["8B"],
        vocab_size=128_256,
        context_length=8192,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        attention=Attention.SDPA,
    )
    config = run("8B", model=model)
    blocks = (0,) * num_layers
    whole = Rank(config=config, layout=Layout()).elements(blocks, is_kept=False)
    assert whole == parameters
    vectors = (2 * num_layers + 1) * d_model
    rank = Rank(config=config, layout=Layout(tensor=8, shard=4))
    assert 8 * (rank.elements(blocks, is_kept=False) - vectors) + vectors == parameters
    assert 32 * (rank.elements(blocks, is_kept=True) - vectors) + vectors == parameters


def test_fsdp_reduces_in_fp32_twice_the_bytes() -> None:
    """Where links are so slow that nothing hides: blocks gather 2 bytes of each element twice, and
    reduce 2 or 4. The embedding's are in fp32 in either case.
    """
    slow = replace(LINKS, node_bytes_per_s=1e6, times={})
    config = run("8B")
    in_half, in_fp32 = (
        cost(config, slow, shard=8, fp32_reductions=is_fp32).time.exposed_s["data"]
        for is_fp32 in (False, True)
    )
    every = config.model.num_layers * config.model.d_model
    every *= 4 * config.model.d_model + 3 * config.model.d_ff
    head = config.model.vocab_size * config.model.d_model
    more_s = 2 * 7 / 8 * (every + head) / slow.node_bytes_per_s
    assert in_fp32 - in_half == pytest.approx(more_s, rel=0.01)
