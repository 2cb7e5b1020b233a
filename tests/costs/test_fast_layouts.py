"""Oracles: traces of every micro-batch, and the front of all layouts without a closed form."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cs336.commands.configure import NamedGpu, make_fast_config
from cs336.config import Device, Parallel, Precision, RunConfig
from cs336.costs import time, traces
from cs336.costs.curves import Curves
from cs336.costs.fast_layouts import FastStep, fast_costs, fast_steps
from cs336.costs.memory import predict_memory
from cs336.costs.networks import links_of
from cs336.costs.ranks_time import Links
from cs336.costs.time import step_time
from cs336.costs.training import pareto
from cs336.studies.ceilings_files import Ceilings

GPU = NamedGpu("H100 80GB HBM3", 80 * 2**30)


@pytest.fixture(autouse=True, scope="module")
def tracer() -> Iterator[None]:
    # here shapes are checked by a decorator, which is no part of a step
    with traces.traced_elsewhere():
        yield


def curves() -> Curves:
    known = Ceilings(has_shipped=True).curves("H100 80GB HBM3")
    assert known is not None
    return known


def links() -> Links:
    return links_of("H100 80GB HBM3", None, {}, gpus=4, node_bytes_per_s=4e11)[0]


def make(asked: Mapping[str, Any]) -> RunConfig:
    settings = {"size": "tiny", "context_length": 256, "precision": Precision.FP32}
    return make_fast_config(Device.CUDA, dict(asked), GPU, **settings | dict(asked))


def make_of_blocks(asked: Mapping[str, Any]) -> RunConfig:
    """A model most of whose memory is that of blocks: closed forms say little of small ones."""
    width = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 8, "vocab_size": 8192}
    return make(width | dict(asked))


@pytest.mark.parametrize(
    ("checkpoint", "parallel"), [*product((0, 1), (Parallel.NONE, Parallel.DDP_OVERLAP))]
)
def test_two_micro_batches_tell_of_five(
    checkpoint: int, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"batch_size": 2, "accumulate_steps": 5, "checkpoint_blocks": checkpoint}
    if parallel is not Parallel.NONE:
        asked |= {"parallel": parallel, "ranks": 4}
    config = make(asked)
    foretold, memory = step_time(config, curves()), predict_memory(config)
    for module in (time, traces):
        monkeypatch.setattr(module, "MICRO_BATCHES", 5)
    # so that nothing is kept of before
    config = replace(config, seed=1)
    for function in (time._step_time, traces.traced_as):
        function.cache_clear()
    traced, whole = step_time(config, curves()), predict_memory(config)
    for function in (time._step_time, traces.traced_as):
        function.cache_clear()
    assert foretold is not None
    assert traced is not None
    assert foretold.step_s == pytest.approx(traced.step_s)
    assert foretold.phases_s == pytest.approx(traced.phases_s)
    assert foretold.low_s == pytest.approx(traced.low_s, rel=1e-3)
    assert foretold.high_s == pytest.approx(traced.high_s, rel=1e-3)
    assert memory is not None
    assert whole is not None
    # places of blocks differ, and so what the allocator does not split off
    peaks = [one.peak.allocated_bytes for one in (memory, whole)]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)


@pytest.mark.parametrize("gpus", [1, 4])
def test_the_front_is_that_of_all_layouts(gpus: int) -> None:
    steps, _ = fast_steps(make_of_blocks, gpus, 4 * gpus, links(), None)
    assert len({step.config for step in steps}) == len(steps) > 4

    def costs(of: list[FastStep]) -> list[Any]:
        found, reasons = fast_costs(of, 80 * 2**30, curves(), links())
        assert not reasons
        return found

    every = [cost for step in steps for cost in costs([step])]
    assert [*pareto(costs(steps))] == [*pareto(every)]
    for cost in every:
        assert cost.layout.gpus == gpus
        assert cost.layout.global_batch == 4 * gpus
        assert cost.time.step_s == pytest.approx(
            cost.time.compute_s + cost.time.exposed_s.get("data", 0.0) + cost.time.optimizer_s
        )
