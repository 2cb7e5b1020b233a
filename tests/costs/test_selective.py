"""Selective checkpoints in forecasts against a block that PyTorch runs with torchtitan's policy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from cs336.config import Arch, Attention, Device, ModelConfig, OptimizerKind, RunConfig
from cs336.costs.hardware import find_device
from cs336.costs.layout import SELECTIVE, Layout
from cs336.costs.layout_cost import LayoutCost, layout_cost
from cs336.costs.layout_memory import Rank
from cs336.costs.ranks_time import Links
from cs336.costs.selective import kept_bytes, run_again
from cs336.costs.tape import OperationKind
from cs336.costs.time import flops_of
from cs336.model.transformer import TransformerLM
from cs336.studies.ceilings_files import data_sheet_curves

BATCH = 2


def model_of(arch: Arch) -> ModelConfig:
    return ModelConfig(
        arch=arch,
        vocab_size=64,
        context_length=48,
        d_model=64,
        d_ff=160,
        num_layers=1,
        num_heads=4,
        attention=Attention.SDPA,
    )


class Policy:
    """Keeps the result of attention and of every second matmul, as torchtitan's does."""

    def __init__(self) -> None:
        self.matmuls = {True: 0, False: 0}
        self.kept_bytes = 0

    def __call__(
        self, context: Any, operator: Callable[..., Any], *args: Any, **_: Any
    ) -> CheckpointPolicy:
        of_matmul = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        is_kept = "scaled_dot_product" in str(operator)
        if of_matmul:
            self.matmuls[context.is_recompute] += 1
            is_kept = self.matmuls[context.is_recompute] % 2 == 1
            if is_kept and not context.is_recompute:
                self.kept_bytes += 4 * args[-2].shape[0] * args[-1].shape[1]
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def flops(model: ModelConfig, policy: Policy | None) -> int:
    """FLOPs of matmuls in forward and backward of a block with these checkpoints, or none."""
    whole = TransformerLM(model)
    block = whole.layers[0]
    x = torch.randn(BATCH, model.context_length, model.d_model, requires_grad=True)

    def run(stream: torch.Tensor) -> Any:
        return block(stream, *whole.tables(model.context_length))

    with FlopCounterMode(display=False) as counter:
        if policy is None:
            out = run(x)
        else:
            out = checkpoint(
                run,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )
        out.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(n for operator, n in counts.items() if "mm" in str(operator))


def config_of(model: ModelConfig) -> RunConfig:
    return RunConfig(
        size="custom",
        model=model,
        device=Device.CUDA,
        optimizer=OptimizerKind.FUSED,
        batch_size=BATCH,
    )


@pytest.mark.parametrize("arch", [Arch.CS336, Arch.GPT2])
def test_what_runs_again_and_what_is_kept_are_those_of_pytorchs_checkpoints(arch: Arch) -> None:
    """In fp32, so that no cast stands between; the kept logarithms are of fused attention alone."""
    model = model_of(arch)
    policy = Policy()
    more_flops = flops(model, policy) - flops(model, None)
    layout = Layout(micro_batch=BATCH, checkpoint=SELECTIVE)
    forward = Rank(config=config_of(model), layout=layout).operations(0)
    again = run_again(forward)
    assert sum(map(flops_of, again)) == more_flops
    assert OperationKind.ATTENTION not in {operation.kind for operation in again}
    rows = BATCH * model.context_length
    of_attention = rows * (4 * model.d_model + 4 * model.num_heads)
    assert kept_bytes(forward) == policy.kept_bytes + of_attention


def test_selective_checkpoints_lie_between_all_and_none() -> None:
    """In time and memory; and of each further block they keep its results beside its input."""
    device = find_device("H100 80GB HBM3")
    assert device is not None
    curves = data_sheet_curves(device)
    model = replace(
        model_of(Arch.CS336), num_layers=6, context_length=1024, d_model=1024, d_ff=4096
    )
    costs = []
    for checkpoint_kind in (0, SELECTIVE, 1):
        layout = Layout(micro_batch=BATCH, checkpoint=checkpoint_kind)
        links = Links(gpus_per_node=8, node_bytes_per_s=3e11)
        cost = layout_cost(config_of(model), layout, curves, links)
        assert isinstance(cost, LayoutCost)
        costs.append(cost)
    none, selective, full = costs
    assert none.step_s < selective.step_s < full.step_s
    assert full.peak_bytes < selective.peak_bytes < none.peak_bytes
    layout = Layout(micro_batch=BATCH, checkpoint=SELECTIVE)
    kept = kept_bytes(Rank(config=config_of(model), layout=layout).operations(0))
    assert selective.peak_bytes - full.peak_bytes == 5 * kept
