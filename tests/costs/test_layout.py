"""Layouts: deep steps from shallow tapes against whole ones, activations and bubbles against
published and simulated forms, and what has to hold between neighbours.
"""

from dataclasses import replace

import pytest

from cs336.config import SIZES, Attention, Device, OptimizerKind, Precision, RunConfig
from cs336.costs.curves import data_sheet_curves
from cs336.costs.depth import step_by_depth
from cs336.costs.hardware import find_device
from cs336.costs.layout import Layout
from cs336.costs.layout_cost import LayoutCost, layout_cost
from cs336.costs.layout_memory import fullest_rank_bytes
from cs336.costs.memory import allocated_levels, rounded_bytes
from cs336.costs.ranks_time import Links
from cs336.costs.tape import phases_of
from cs336.costs.traces import tape_of

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


def cost(config: RunConfig, links: Links = LINKS, **layout: int) -> LayoutCost:
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
