"""Oracles: memory measured on two H200, the order of a real backward, and bytes counted one parameter at a time."""

from dataclasses import replace

import pytest

from cs336_systems.config import (
    SIZES,
    Arch,
    Attention,
    Device,
    ModelConfig,
    OptimizerKind,
    Parallel,
    Precision,
    RunConfig,
)
from cs336_systems.costs.accounting import state_bytes
from cs336_systems.costs.forecast.step import StepTape
from cs336_systems.costs.tape import Category
from cs336_systems.costs.memory import predict_memory, residual_stream_bytes
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.transformer import TransformerLM
from tests.costs.live import one_of, order_of_gradients, real_bytes, tape_bytes, use_tensors_of_a_gpu

DDP = [Parallel.DDP_NAIVE, Parallel.DDP_FLAT, Parallel.DDP_OVERLAP, Parallel.DDP]
FSDP = [Parallel.FSDP, Parallel.FSDP_PUSH, Parallel.FSDP2]
SHARED = {"shard_optimizer": True}
MEASURED = [
    ("small", Parallel.DDP_NAIVE, {}, 3107313664, 2168655872, 3235905536),
    ("small", Parallel.DDP_FLAT, {}, 3129710592, 2158530560, 3743416320),
    ("small", Parallel.DDP, {}, 3636477440, 2541839360, 4282384384),
    ("small", Parallel.DDP_NAIVE, SHARED, 2618960896, 2037998080, 2795503616),
    ("xl", Parallel.DDP_NAIVE, {}, 37212602880, 32775364608, 41873833984),
    ("xl", Parallel.DDP_FLAT, {}, 40589048320, 32584572928, 49675239424),
    ("xl", Parallel.DDP, {}, 45343337984, 32563116032, 54377054208),
    ("xl", Parallel.DDP_OVERLAP, {}, 37201232384, 32763502592, None),
    ("xl", Parallel.FSDP, {}, 20967851520, 16223461376, None),
    ("2.7B", Parallel.FSDP, {}, 30456024576, 27448338432, None),
    ("small", Parallel.FSDP2, {}, 2051180544, 1479835136, 2531262464),
    ("xl", Parallel.FSDP2, {}, 20391992832, 16262914560, 25444745216),
]
"""Size, way, settings; peak, peak of the first step and, if known, reserved bytes of the rank with the highest peak.

On two H200 with torch 2.11: a whole step in bf16 with fused attention and AdamW, context 512, batch 4 a rank.
"""


def on_two(size: str, way: Parallel, **settings) -> RunConfig:
    return RunConfig(
        size=size, model=replace(SIZES[size], context_length=512, attention=Attention.SDPA), precision=Precision.BF16,
        device=Device.CUDA, optimizer=OptimizerKind.FUSED, parallel=way, ranks=2, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(("size", "way", "settings", "peak", "first", "reserved"), MEASURED)
def test_memory_is_that_measured(size, way, settings, peak, first, reserved) -> None:
    found = predict_memory(on_two(size, way, **settings))
    assert found.peak.allocated_bytes == pytest.approx(peak, rel=0.01)
    assert found.first_step_peak.allocated_bytes == pytest.approx(first, rel=0.01)
    assert reserved is None or found.reserved_bytes == pytest.approx(reserved, rel=0.05)


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_gradients_come_in_the_order_of_a_real_backward(arch, precision) -> None:
    """Buckets depend on it. Named as in the model, whose parameters have the order of the tape's."""
    model = ModelConfig(arch=arch, vocab_size=37, context_length=10, d_model=24, d_ff=28, num_layers=2, num_heads=3)
    config = RunConfig(size="custom", model=model, precision=precision)
    shapes = parameter_shapes(model)
    names = dict(zip(shapes, (name for name, _ in TransformerLM(model).named_parameters()), strict=True))
    step = StepTape(replace(config, parallel=Parallel.DDP_NAIVE))
    order = []
    keep = step.way.graded
    step.way.graded = lambda name, gradient: (order.append(names[name]), keep(name, gradient))
    step.set_up()
    step.run()
    assert order == order_of_gradients(config)


CASES = [
    *((way, {}) for way in (*DDP, Parallel.DDP_PUSH, *FSDP)),
    (Parallel.DDP_NAIVE, SHARED),
    *((way, {"checkpoint_blocks": 2}) for way in FSDP),
]


@pytest.mark.parametrize(("arch", "precision"), [(Arch.CS336, Precision.BF16), (Arch.GPT2, Precision.FP32)])
@pytest.mark.parametrize(("way", "settings"), CASES)
def test_each_phase_holds_what_a_real_step_holds(monkeypatch, way, settings, arch, precision) -> None:
    """Three ranks divide few tensors. PyTorch's buckets need more than 1 MiB, and settle in the third step.

    Where tensors are counted, autograd adds no gradients in place: one more of the residual stream may be there.
    """
    use_tensors_of_a_gpu(monkeypatch)
    model = ModelConfig(arch=arch, vocab_size=999, context_length=8, d_model=96, d_ff=385, num_layers=3, num_heads=2)
    config = RunConfig(
        size="custom", model=model, batch_size=3, precision=precision, optimizer=OptimizerKind.FOREACH, parallel=way,
        ranks=3, **settings,
    )  # fmt: skip
    found, ranks = [], config.ranks
    for rank in range(ranks if settings == SHARED else 1):
        with one_of(ranks, rank, way):
            found.append(real_bytes(config, 4, rank))
    start, after, peak = zip(*found, strict=True)
    expected_start, expected_after, expected_peak = tape_bytes(config, 4)
    uncounted = 16 * len(parameter_shapes(model))  # counts of steps and of gradients, which a CPU keeps as tensors
    assert max(start) == pytest.approx(expected_start, abs=uncounted)
    assert [*map(max, zip(*after, strict=True))] == expected_after
    assert max(peak) == pytest.approx(expected_peak, abs=residual_stream_bytes(config))


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize(
    ("way", "settings"), [(Parallel.DDP_NAIVE, SHARED), *((way, {}) for way in (Parallel.DDP_FLAT, *FSDP))]
)
def test_state_in_closed_form_is_that_of_the_rank_that_keeps_most(way, settings, arch) -> None:
    """Of what three ranks really keep after a step, counted tensor by tensor."""
    model = ModelConfig(arch=arch, vocab_size=37, context_length=8, d_model=16, d_ff=19, num_layers=2, num_heads=2)
    config = RunConfig(size="custom", model=model, optimizer=OptimizerKind.FOREACH, parallel=way, ranks=3, **settings)
    kept, moments = [], []
    for rank in range(3):
        with one_of(3, rank, way):
            step = TrainingStep(config, rank=rank)
            step.backward(step.forward(step.batches()))
            step.way.finish_gradient_synchronization()
            step.update()
            kept.append(sum(map(bytes_here, step.model.parameters())))
            local = getattr(step.optimizer, "_local", step.optimizer)
            state = [value for each in local.state.values() for value in each.values() if value.dim()]
            moments.append(sum(map(bytes_here, state)))
    found = state_bytes(config)
    assert (found.parameters, found.gradients, found.optimizer_state) == (max(kept), max(kept), max(moments))


def bytes_here(tensor) -> int:
    """Of a tensor that is spread over ranks, those of the part that is here."""
    return getattr(tensor, "_local_tensor", tensor).nbytes


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_rank_with_the_largest_share_of_the_state_is_predicted(ranks) -> None:
    model = ModelConfig(vocab_size=99, context_length=8, d_model=64, d_ff=128, num_layers=4, num_heads=2)
    config = RunConfig(
        size="custom", model=model, device=Device.CUDA, parallel=Parallel.DDP_FLAT, ranks=ranks, **SHARED
    )
    shapes = {name: each.shape.numel() for name, each in TransformerLM(model).named_parameters()}
    moments = predict_memory(config).peak.bytes_of(Category.OPTIMIZER_STATE)
    share = 8 * sum(shapes.values()) / ranks
    assert share <= moments <= share + 8 * max(shapes.values()) + 2 * 512 * len(shapes)
