"""Oracles: memory measured on two H200, and bytes in closed form."""

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
from cs336_systems.costs.accounting import parameter_bytes, updated_parameters
from cs336_systems.costs.memory import predict_memory
from cs336_systems.costs.tape import Category, phases_of
from cs336_systems.costs.traces import tape_of

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
@pytest.mark.parametrize(
    ("way", "settings"), [(Parallel.DDP_NAIVE, SHARED), *((way, {}) for way in (Parallel.DDP_FLAT, *FSDP))]
)
def test_state_in_closed_form_is_that_of_the_rank_that_keeps_most(way, settings, arch) -> None:
    """Of the tensors of the way's own code; each is rounded up to 512 bytes."""
    model = ModelConfig(arch=arch, vocab_size=96, context_length=24, d_model=48, d_ff=96, num_layers=2, num_heads=2)
    config = RunConfig(size="custom", model=model, optimizer=OptimizerKind.FOREACH, parallel=way, ranks=3, **settings)
    tape = tape_of(config)
    _, (begin, _), _ = phases_of(tape, -1)[-1]  # after the optimizer
    freed = {~event for event in tape.events[:begin] if event < 0}
    specs = [tape.spec(event) for event in tape.events[:begin] if event >= 0 and event not in freed]

    def kept(category: Category) -> int:
        return sum(spec.size_bytes for spec in specs if spec.category is category)

    assert kept(Category.PARAMETERS) == pytest.approx(parameter_bytes(config), rel=0.02)  # parts are aligned
    assert kept(Category.OPTIMIZER_STATE) == pytest.approx(8 * updated_parameters(config), rel=0.02)
