"""Oracles: compiled steps of full depth, closed forms, and every batch tried one by one."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from cs336.commands.plan import PlanArguments
from cs336.config import (
    SIZES,
    UNSIZED,
    Attention,
    CompileMode,
    Device,
    ModelConfig,
    OptimizerKind,
    Phase,
    Precision,
    RunConfig,
)
from cs336.costs import fit
from cs336.costs.accounting import count_parameters, forward_flops
from cs336.costs.compiled_blocks import rank_step
from cs336.costs.depth import DepthError, of_depth
from cs336.costs.layout import Layout
from cs336.costs.layout_cost import layout_bytes, why_refused
from cs336.costs.layout_memory import Rank, fullest_rank_bytes
from cs336.costs.memory import memory_of
from cs336.costs.ranks_time import Links
from cs336.costs.tape import Names, OperationMaker
from cs336.costs.time import flops_of
from cs336.costs.traces import (
    Asked,
    compiled_as,
    compiled_tapes,
    is_compiled_at_hand,
    one_tracer,
    traced_elsewhere,
)
from cs336.model.fast.choose import fastest
from tests.ship_traces import blocks_of_plans

MODEL = ModelConfig(
    vocab_size=1000,
    context_length=256,
    d_model=512,
    d_ff=1536,
    num_layers=3,
    num_heads=8,
    attention=Attention.SDPA,
)
CONFIG = RunConfig(
    size=UNSIZED,
    model=MODEL,
    device=Device.CUDA,
    batch_size=2,
    precision=Precision.BF16,
    optimizer=OptimizerKind.FUSED,
    compile=CompileMode.DEFAULT,
    compile_blocks=True,
)
"""Two sequences are as many tokens as the model is wide, so that shapes do not tell weights from
activations.
"""
MATRICES = ("512 512",) * 4 + ("1536 512",) * 2 + ("512 1536",)
LINKS = Links(gpus_per_node=8, node_bytes_per_s=4e11)


@pytest.fixture(autouse=True, scope="module")
def tracer() -> Iterator[None]:
    # here shapes are checked by a decorator, which Dynamo does not trace
    with traced_elsewhere():
        yield


@pytest.mark.parametrize("checkpoint", [0, 1])
def test_a_block_stands_for_all(checkpoint: int) -> None:
    layout = Layout(micro_batch=CONFIG.batch_size, checkpoint=checkpoint)
    whole = replace(CONFIG, size="", checkpoint_blocks=checkpoint)
    measured = memory_of(compiled_tapes([whole])[0]).peak.allocated_bytes
    # remainders of blocks that are not split off, under 1 MiB each, are left out
    foretold = fullest_rank_bytes(CONFIG, layout)
    assert 0.93 * measured < foretold <= measured


def test_matmuls_of_a_block_are_those_of_the_closed_form() -> None:
    launches = rank_step(CONFIG).launches
    model = replace(MODEL, num_layers=1)
    expected = sum(forward_flops(model, CONFIG.batch_size).values())
    expected -= 2 * CONFIG.batch_size * MODEL.context_length * MODEL.d_model * MODEL.vocab_size
    maker = OperationMaker(Names({}))

    def flops(phase: Phase) -> int:
        keys = launches[phase].block
        return sum(flops_of(getattr(maker, make)(*arguments)) for _, make, *arguments in keys)

    attention = 4 * CONFIG.batch_size * MODEL.context_length**2 * MODEL.d_model
    assert flops(Phase.FORWARD) == expected
    # backward of fused attention computes its scores again
    assert flops(Phase.BACKWARD) == 2 * expected + attention // 2


def test_ranks_that_gather_weights_keep_no_casts() -> None:
    copies = rank_step(CONFIG, casts=MATRICES).live_of_block[Phase.BACKWARD]
    kept = {key[2]: count for key, count in copies.items() if key[1] == "cast"}
    assert kept == {"512 512": 4, "1536 512": 3}
    before = rank_step(CONFIG).live_of_block[Phase.BACKWARD]
    assert sum(before.values()) == sum(copies.values())


def test_shards_divide_the_state_of_compiled_steps() -> None:
    of_8, of_16 = (
        fullest_rank_bytes(CONFIG, Layout(shard=shards, micro_batch=2, accumulate=2))
        for shards in (8, 16)
    )
    # masters, two moments, and the sum of gradients, in fp32
    expected = 16 * count_parameters(MODEL) * (1 / 8 - 1 / 16)
    assert of_8 - of_16 == pytest.approx(expected, rel=0.01)


def test_more_of_a_compiled_layout_is_refused_with_a_reason() -> None:
    whole = replace(CONFIG, compile_blocks=False)
    assert "compile blocks one by one" in why_refused(whole)
    other = replace(CONFIG, compile=CompileMode.REDUCE_OVERHEAD)
    assert "only --compile default" in why_refused(other)
    ambiguous = replace(CONFIG, model=replace(MODEL, vocab_size=512))
    reason = layout_bytes(ambiguous, Layout(micro_batch=2), LINKS)
    assert isinstance(reason, str)
    assert "512 is the vocabulary and another size" in reason
    with pytest.raises(DepthError, match="vocabulary"):
        rank_step(ambiguous)


def _compiled() -> RunConfig:
    return replace(of_depth(CONFIG, 1), compile_blocks=False, batch_size=3)


def _fast() -> RunConfig:
    eager = replace(of_depth(CONFIG, 1), compile=CompileMode.NONE, compile_blocks=False)
    return fastest(eager, "NVIDIA H100", lambda _: False)


@pytest.mark.parametrize("make", [_compiled, _fast])
def test_the_largest_batch_is_that_of_all_tried(make: Callable[[], RunConfig]) -> None:
    config = make()
    outside = fit.outside_bytes(config)
    tape = fit._step_tape(replace(config, batch_size=5))
    assert tape is not None
    memory_bytes = outside + memory_of(tape, is_graphed=config.cuda_graph).reserved_bytes
    tried = range(1, 12)
    fitting = [size for size in tried if fit.fits(replace(config, batch_size=size), memory_bytes)]
    assert 5 in fitting
    assert fitting == [*range(1, len(fitting) + 1)]
    assert fit.largest_batch(config, memory_bytes) == len(fitting)
    assert fit.largest_batch(config, outside + 2**20) == 0
    assert not fit.why_not_searched(config)


def test_segments_that_expand_have_a_reason() -> None:
    config = replace(_fast(), expandable_segments=True, cuda_graph=False)
    assert fit.largest_batch(config, 2**40) is None
    assert "expand" in fit.why_not_searched(config)


def test_a_graph_that_was_compiled_for_another_step_gives_the_same_tape() -> None:
    steps = [of_depth(replace(CONFIG, checkpoint_blocks=checkpoint), 1) for checkpoint in (0, 1)]
    steps.append(replace(steps[0], batch_size=4))
    asked: Asked = {str(place): (compiled_as(step), {}) for place, step in enumerate(steps)}
    with one_tracer() as trace:  # by a new process for each question
        together = trace(asked)
        for name, step in asked.items():
            assert trace({name: step}) == {name: together[name]}


@pytest.mark.parametrize("size", [size for size in SIZES if size != "tiny"])
def test_blocks_of_presets_come_with_the_program(size: str) -> None:
    config = PlanArguments(size=size, compile=CompileMode.DEFAULT).config()
    for step in blocks_of_plans(size):
        assert is_compiled_at_hand(step), step.label
    for micro_batch, checkpoint in ((1, 1), (4, 0), (32, 1)):
        layout = Layout(shard=2, micro_batch=micro_batch, checkpoint=checkpoint)
        assert Rank(config=config, layout=layout).steps
