"""The memory of fast steps against the tensors of real ones, and the checkpoints that are chosen
by it.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from cs336.config import (
    SIZES,
    Arch,
    Attention,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Parallel,
    Precision,
    RunConfig,
)
from cs336.costs.fast_memory import FastMemory, with_checkpoints
from cs336.measure.clock import HostClock
from cs336.measure.step import TrainingStep
from cs336.record import load_records

SMALL = ModelConfig(
    vocab_size=37,
    context_length=16,
    d_model=32,
    d_ff=48,
    num_layers=3,
    num_heads=4,
    attention=Attention.SDPA,
)
EIGHT_B = replace(SIZES["8B"], context_length=32_768, attention=Attention.SDPA)
H200_BYTES = 150_100_000_000
ROOT = Path(__file__).parents[2]
MEASURED = (
    "e2e_benchmark/train_fast",
    "e2e_benchmark/train_fast_batch16",
    "ladder/gpt2",
    "ladder/gpt2-xl",
    "e2e_benchmark/fp8_xl",
    "e2e_benchmark/fp8_2.7B",
    "e2e_benchmark/moments_xl",
    "e2e_benchmark/moments_gpt2_xl",
)


def of(model: ModelConfig, **changes: object) -> RunConfig:
    settings = {
        "batch_size": 1,
        "precision": Precision.BF16,
        "optimizer": OptimizerKind.FUSED,
        "cast_once": True,
        "fused_blocks": True,
        "fused_loss": True,
        **changes,
    }
    return RunConfig(size="custom", model=model, **settings)


ON_TWO = {"parallel": Parallel.DDP_OVERLAP, "ranks": 2, "shard_optimizer": True}
SELECTIVE = {"checkpoint_blocks": 1, "selective_checkpoints": True}
IN_PARTS = {"loss_chunks": 4}
"""Of 8192 tokens each, of a sequence of 32,768."""


@pytest.mark.parametrize("split_masters", [False, True])
@pytest.mark.parametrize("padding", [1, 8])
@pytest.mark.parametrize("arch", Arch)
def test_state_and_gradients_are_those_of_a_step(
    arch: Arch, padding: int, split_masters: bool
) -> None:
    config = of(replace(SMALL, arch=arch), pad_vocabulary=padding, split_masters=split_masters)
    step = TrainingStep(config)
    step(HostClock())
    leaves = {id(w.copy.leaf): w.copy.leaf for w in step.model.weights if w.copy is not None}
    leaves |= {id(parameter): parameter for parameter in step.model.parameters()}
    assert step.optimizer is not None
    moments = [tensor for state in step.optimizer.state.values() for tensor in state.values()]
    remainders = [weight.remainder for weight in step.model.weights if weight.remainder is not None]
    assert FastMemory(config).held_bytes == sum(
        tensor.nbytes for tensor in (*leaves.values(), *remainders, *moments)
    )
    step.backward(step.forward(step.batches()))
    assert FastMemory(config).gradient_bytes == sum(
        leaf.grad.nbytes for leaf in leaves.values() if leaf.grad is not None
    )


def test_peaks_of_the_runs_in_data_are_forecast() -> None:
    """Of small models the allocator's rounding, and what a block's backward holds, are some
    percent.
    """
    known = {
        place: load_records(ROOT / "data" / "published" / place / "runs")[0] for place in MEASURED
    }
    ratios = [
        FastMemory(record.config).peak_bytes / record.memory.peak_allocated_bytes
        for place, records in known.items()
        for record in records
        if record.memory and record.config.fused_blocks and record.config.fused_loss
    ]
    assert len(ratios) > 24
    assert min(ratios) > 0.95
    assert max(ratios) < 1.01


def test_the_8b_step_fits_two_h200_with_selective_checkpoints() -> None:
    """Each token saves 146 kB in each of 34 blocks; the residual stream, q, k, v and attention's
    result are 48.
    """
    plain = of(EIGHT_B, **ON_TWO)
    chosen = with_checkpoints(plain, H200_BYTES)
    assert chosen == replace(plain, **SELECTIVE, **IN_PARTS, keep_hidden=chosen.keep_hidden)
    hidden = 32_768 * 11_008 * 2 * 2
    assert (
        FastMemory(chosen).saved_bytes - FastMemory(replace(chosen, keep_hidden=0)).saved_bytes
        == chosen.keep_hidden * hidden
    )
    chosen = replace(chosen, keep_hidden=0)
    of_head, logits = 4096 * 151_936 * 2, 32_768 * 151_936 * 2
    per_token = (FastMemory(chosen).saved_bytes - of_head) / 34 / 32_768
    assert per_token == pytest.approx(48 * 1024, rel=0.03)
    assert (FastMemory(plain).saved_bytes - logits) / 34 / 32_768 == pytest.approx(146e3, rel=0.03)


@pytest.mark.parametrize(
    ("memory_bytes", "changes"),
    [
        (300e9, {}),
        (260e9, IN_PARTS),
        (150.1e9, {**SELECTIVE, **IN_PARTS, "keep_hidden": 7}),
        (140e9, {**SELECTIVE, **IN_PARTS}),
        (120e9, {"checkpoint_blocks": 1, **IN_PARTS}),
        (30e9, {"checkpoint_blocks": 1, **IN_PARTS}),
    ],
)
def test_checkpoints_are_those_that_fit(memory_bytes: float, changes: dict[str, object]) -> None:
    plain = of(EIGHT_B, **ON_TWO)
    assert with_checkpoints(plain, int(memory_bytes)) == replace(plain, **changes)


def test_in_fixed_segments_more_is_left_free() -> None:
    """Ranks that push open each other's memory, which must be in fixed segments; selective
    checkpoints did not fit.
    """
    plain = of(EIGHT_B, **ON_TWO, device=Device.CUDA, cuda_graph=True)
    pushes = replace(plain, parallel=Parallel.DDP_PUSH)
    assert with_checkpoints(pushes, H200_BYTES) == replace(pushes, checkpoint_blocks=1, **IN_PARTS)


def test_segments_expand_only_without_graphs_of_collectives() -> None:
    alone = of(replace(EIGHT_B, num_layers=10), device=Device.CUDA, cuda_graph=True)
    shared = of(EIGHT_B, **ON_TWO, device=Device.CUDA, cuda_graph=True)
    chosen = [
        with_checkpoints(config, size)
        for config, size in ((alone, 90_000_000_000), (shared, H200_BYTES))
    ]
    assert [(config.expandable_segments, config.cuda_graph) for config in chosen] == [
        (True, True),
        (True, False),
    ]
    with pytest.raises(
        ValueError,
        match="--expandable-segments cannot be combined with --cuda-graph on several ranks",
    ):
        replace(shared, expandable_segments=True)
    with pytest.raises(
        ValueError, match="--expandable-segments cannot be combined with --parallel ddp-push"
    ):
        replace(shared, cuda_graph=False, parallel=Parallel.DDP_PUSH, expandable_segments=True)


def test_what_the_user_chose_stays() -> None:
    for changes in (
        {"checkpoint_blocks": 3},
        SELECTIVE,
        {"mode": Mode.INFERENCE},
        {"fused_blocks": False},
    ):
        config = of(EIGHT_B, **changes)
        assert with_checkpoints(config, H200_BYTES) == config
