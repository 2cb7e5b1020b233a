"""Oracles: the collectives that a real step calls, and times measured on two H200."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from cs336.config import (
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
from cs336.costs.communication import Collective, CollectiveCall, calls
from cs336.costs.curves import time_s
from cs336.costs.shards import plain
from cs336.costs.traces import tape_of
from cs336.measure.step import TrainingStep
from cs336.measure.traced import one_of_the_ranks
from cs336.model.trainable import make_model
from cs336.parallel.collectives import COLLECTIVE_OF_OPERATOR, TrafficCounter

MIB = 2**20
WAYS = [way for way in Parallel if way not in (Parallel.NONE, Parallel.OWN)]


def shared(way: Parallel, arch: Arch = Arch.CS336, **settings) -> RunConfig:
    model = ModelConfig(
        arch=arch, vocab_size=37, context_length=10, d_model=24, d_ff=28, num_layers=3, num_heads=3
    )
    return RunConfig(size="custom", model=model, parallel=way, ranks=3, **settings)


def order_of_gradients(config: RunConfig) -> list[str]:
    """Names of the parameters in the order in which a real backward has made their gradients."""
    step, order = TrainingStep(config), []
    for name, parameter in step.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    step.backward(step.forward(step.batches()))
    return order


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_gradients_come_in_the_order_of_a_real_backward(arch, precision) -> None:
    config = plain(shared(Parallel.DDP, arch, precision=precision))
    tape = tape_of(config)
    names = [tape.parameters[place][0][0] for place in tape.gradient_order]
    assert names == order_of_gradients(config)


def counted(config: RunConfig) -> Counter[CollectiveCall]:
    """The collectives that one rank calls in a real step, as if the others were there."""
    model, buckets = make_model(config), []

    def note(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    with one_of_the_ranks(config, model) as rank:
        step = TrainingStep(config, model, rank=rank)
        if config.parallel is Parallel.DDP:  # PyTorch's cannot use the stand-in for a process group
            step.way.module.register_comm_hook(None, note)
        for _ in range(4):  # PyTorch's DDP has its last buckets from the third step on
            buckets.clear()
            with TrafficCounter() as counter:
                batches = [step.batches() for _ in range(config.accumulate_steps)]
                for _ in step._phases([*chain.from_iterable(batches)]):
                    pass
            step.model.zero_grad()
    averaged = Counter(CollectiveCall(Collective.ALL_REDUCE, num_bytes) for num_bytes in buckets)
    for name, payloads in counter._payloads.items():
        averaged.update(
            CollectiveCall(COLLECTIVE_OF_OPERATOR.get(name, Collective.PUSH), payload)
            for payload in payloads
        )
    return averaged


@pytest.mark.parametrize(
    ("precision", "micro_batches"), [(Precision.FP32, 1), (Precision.BF16, 1), (Precision.FP32, 3)]
)
@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("way", WAYS)
def test_the_collectives_are_those_of_a_real_step(way, arch, precision, micro_batches) -> None:
    """A push goes to both of the other ranks, and is counted once for each."""
    if micro_batches > 1 and not way.adds_micro_batches:
        pytest.skip("exchanges in every backward pass")
    config = shared(
        way,
        arch,
        precision=precision,
        accumulate_steps=micro_batches,
        shard_optimizer=not way.shards_parameters,
        bucket_mib=1,
        device=Device.CPU,
    )
    config = replace(config, model=replace(config.model, d_model=192, d_ff=512))
    foretold = calls(config)
    assert foretold is not None
    pushes = [call for call in foretold if call.collective is Collective.PUSH]
    assert counted(config) == foretold + Counter({call: foretold[call] for call in pushes})
    if way in (Parallel.DDP, Parallel.DDP_OVERLAP):
        reduced = [call for call in foretold if call.collective is Collective.ALL_REDUCE]
        assert len(reduced) > 1, "several buckets"


H200_S = {
    Collective.ALL_REDUCE: {
        4096: 12e-6,
        MIB: 19.4e-6,
        4 * MIB: 35.9e-6,
        16 * MIB: 79.2e-6,
        64 * MIB: 254.6e-6,
        256 * MIB: 897.8e-6,
        1024 * MIB: 3.266e-3,
        4096 * MIB: 12.40e-3,
    },
    Collective.ALL_GATHER: {
        4096: 9.2e-6,
        MIB: 14.9e-6,
        4 * MIB: 28.4e-6,
        16 * MIB: 58.4e-6,
        64 * MIB: 162.6e-6,
        256 * MIB: 552.7e-6,
        1024 * MIB: 2.006e-3,
        4096 * MIB: 7.37e-3,
    },
    Collective.REDUCE_SCATTER: {
        4096: 10.2e-6,
        MIB: 15.2e-6,
        4 * MIB: 26.6e-6,
        16 * MIB: 56.8e-6,
        64 * MIB: 166.1e-6,
        256 * MIB: 569.5e-6,
        1024 * MIB: 1.983e-3,
        4096 * MIB: 7.374e-3,
    },
    Collective.BROADCAST: {
        4096: 8.0e-6,
        MIB: 14.9e-6,
        4 * MIB: 26.7e-6,
        16 * MIB: 62.5e-6,
        64 * MIB: 204.8e-6,
        256 * MIB: 746.1e-6,
        1024 * MIB: 2.918e-3,
        4096 * MIB: 11.58e-3,
    },
}
"""Of two H200 without NVLink's multicast, by bytes; short ones from CUDA graphs."""
MEASURED_MS = [
    ("small", Parallel.DDP_FLAT, False, 1.63),
    ("small", Parallel.DDP_OVERLAP, False, 2.36),
    ("small", Parallel.DDP, False, 2.28),
    ("small", Parallel.FSDP, False, 2.57),
    ("small", Parallel.FSDP2, False, 2.22),
    ("xl", Parallel.DDP_NAIVE, False, 34.34),
    ("xl", Parallel.DDP_FLAT, False, 22.75),
    ("xl", Parallel.DDP_OVERLAP, False, 35.13),
    ("xl", Parallel.DDP, False, 34.60),
    ("xl", Parallel.FSDP, False, 30.16),
    ("xl", Parallel.FSDP2, False, 26.31),
    ("xl", Parallel.DDP_OVERLAP, True, 61.65),
]
"""NCCL's kernels in a step of these sizes on the same GPUs, each as long as on the rank that
came last to it.
"""


@pytest.mark.parametrize(("size", "way", "shard_optimizer", "milliseconds"), MEASURED_MS)
def test_the_time_is_that_of_the_kernels_of_a_step(
    size, way, shard_optimizer, milliseconds
) -> None:
    config = RunConfig(
        size=size,
        model=replace(SIZES[size], context_length=512, attention=Attention.SDPA),
        precision=Precision.BF16,
        device=Device.CUDA,
        optimizer=OptimizerKind.FUSED,
        parallel=way,
        ranks=2,
        shard_optimizer=shard_optimizer,
    )
    assert 1e3 * time_s(calls(config), H200_S) == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(size="small", model=SIZES["small"]),
        RunConfig(
            size="custom",
            model=SIZES["tiny"],
            parallel=Parallel.DDP,
            ranks=2,
            model_factory="package:model",
        ),
    ],
)
def test_what_is_not_known_has_no_calls(config) -> None:
    assert calls(config) is None


def test_nothing_is_said_of_an_own_optimizer_that_cannot_be_made_without_ranks(capsys) -> None:
    """It is not even tried: what such an optimizer sends is not known."""
    sharded = RunConfig(
        size="tiny",
        model=SIZES["tiny"],
        parallel=Parallel.DDP_OVERLAP,
        ranks=2,
        optimizer=OptimizerKind.OWN,
        own_optimizer="nowhere:Sharded",
    )
    assert calls(sharded) is None
    assert capsys.readouterr().err == ""
