"""Ways to make a step shorter, as flags: each makes a valid run that has it."""

from dataclasses import replace

import pytest

from cs336_systems.analysis.advice import Remedy
from cs336_systems.config import SIZES, Attention, Device, OptimizerKind, Parallel, Precision, RunConfig

PLAIN = RunConfig(size="small", model=SIZES["small"], device=Device.CUDA)


@pytest.mark.parametrize(
    ("remedy", "changes", "flags"),
    [
        (Remedy.COMPILE, {}, "--compile default"),
        (Remedy.ATTENTION, {}, "--attention sdpa"),
        (Remedy.OPTIMIZER, {}, "--optimizer fused"),
        (Remedy.GRAPHS, {}, "--cuda-graph --optimizer fused"),
        (Remedy.GRAPHS, {"optimizer": OptimizerKind.FUSED, "warmup_steps": 1}, "--cuda-graph --warmup-steps 4"),
        (Remedy.TF32, {}, "--precision tf32"),
        (Remedy.BF16, {"precision": Precision.TF32}, "--mixed-precision"),
        (Remedy.OVERLAP, {"parallel": Parallel.DDP_FLAT, "ranks": 2}, "--parallel ddp-overlap"),
    ],
)
def test_flags_of_a_change_make_a_valid_run_that_has_it(remedy: Remedy, changes: dict, flags: str) -> None:
    config = replace(PLAIN, **changes)
    assert remedy.named_for(config) == flags
    other = remedy.applied_to(config)
    assert other is not None
    assert other != config
    assert remedy is Remedy.OVERLAP or not remedy.is_open_to(other)


def test_what_a_run_cannot_have_is_not_open_to_it() -> None:
    assert not Remedy.GRAPHS.is_open_to(replace(PLAIN, precision=Precision.FP16))
    assert not Remedy.ATTENTION.is_open_to(replace(PLAIN, model=replace(PLAIN.model, attention=Attention.SDPA)))
    assert not Remedy.OVERLAP.is_open_to(PLAIN)
