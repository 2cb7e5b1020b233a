"""Plans look at no more layouts than they must: those of which a bound already says that they do
not fit change nothing.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cs336.config import SIZES, Attention, Device, OptimizerKind, Precision, RunConfig
from cs336.costs import training
from cs336.costs.hardware import find_device
from cs336.costs.layout import layouts
from cs336.costs.layout_memory import fullest_rank_bytes, least_rank_bytes
from cs336.costs.ranks_time import Links
from cs336.costs.traces import one_tracer
from cs336.costs.training import GlobalBatch, Training, plan_training
from cs336.studies.ceilings_files import data_sheet_curves

H100 = find_device("H100 80GB HBM3")
assert H100 is not None
LINKS = Links(gpus_per_node=8, node_bytes_per_s=340e9, network_bytes_per_s=40e9)
CONFIGURATIONS = Path(__file__).parents[1] / "configurations"
GIB = 2**30


def step(size: str, precision: Precision = Precision.BF16, factory: str | None = None) -> RunConfig:
    """The step of one process."""
    return RunConfig(
        size="custom" if factory else size,
        model=replace(SIZES[size], attention=Attention.SDPA, context_length=2048),
        device=Device.CUDA,
        precision=precision,
        optimizer=OptimizerKind.FUSED,
        model_factory=factory,
    )


def asked(config: RunConfig, gpus: int, memory_gib: float) -> Training:
    """One step of 128 sequences on so many GPUs."""
    assert H100 is not None
    return Training(
        config=config,
        gpus=gpus,
        device_name="H100 80GB HBM3",
        batch=GlobalBatch(wanted=128, is_tokens=False),
        tokens=None,
        price=None,
        days=None,
        memory_bytes=round(memory_gib * GIB),
        peak_flops_per_s=None,
        curves=data_sheet_curves(H100),
        links=LINKS,
        link_source="",
    )


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(("size", "gpus"), [("xl", 1), ("xl", 8), ("8B", 16), ("gpt2-xl", 8)])
def test_no_rank_has_less_than_the_bound(size: str, gpus: int, precision: Precision) -> None:
    config = step(size, precision)
    bounds = []
    for layout in layouts(config, gpus, 128, LINKS):
        least, fullest = least_rank_bytes(config, layout), fullest_rank_bytes(config, layout)
        assert 0 < least <= fullest
        bounds.append(least / fullest)
    # the bound is of use: of some layout the state is most of what a rank has
    assert max(bounds) > 0.5


def test_no_rank_with_experts_has_less_than_the_bound() -> None:
    config = step("small", factory=f"hf:{CONFIGURATIONS / 'mixtral_8x7b.json'}")
    with one_tracer():
        tried = [*layouts(config, 16, 32, LINKS)]
        assert any(layout.expert > 1 for layout in tried)
        for layout in tried:
            assert 0 < least_rank_bytes(config, layout) <= fullest_rank_bytes(config, layout)


@pytest.mark.parametrize("gpus", [1, 8, 24])
def test_plans_are_the_same_as_without_the_bound(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of GPUs into which nothing fits, something, and everything; the best never gets slower as
    memory grows.
    """
    sizes_gib = 2, 12, 24, 80, 1000
    config = step("xl")
    plans = [plan_training(asked(config, gpus, size)) for size in sizes_gib]
    monkeypatch.setattr(training, "least_rank_bytes", lambda *_: 0)
    for size, plan in zip(sizes_gib, plans, strict=True):
        whole = plan_training(asked(config, gpus, size))
        assert plan.front == whole.front
        assert plan.reasons == whole.reasons
        if not whole.front:
            assert plan.smallest == whole.smallest
    assert not plans[0].front
    assert plans[-1].front
    steps_s = [plan.best.step_s for plan in plans if plan.best is not None]
    assert all(later <= earlier for earlier, later in pairwise(steps_s))
