"""The attention grid on a CPU: closed forms against torch's own counts."""

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from cs336_systems.commands.attention import AttentionArguments
from cs336_systems.commands.flags import parse
from cs336_systems.config import Device, Phase, Precision
from cs336_systems.record import Status
from cs336_systems.studies.attention_cell import full_attention, make_attention, measure_cell
from cs336_systems.studies.attention_records import (
    AttentionCell,
    AttentionGrid,
    AttentionStudy,
    Implementation,
    matmul_flops,
    naive_saved_bytes,
)
from cs336_systems.studies.runner import run_study

SMALL = AttentionGrid(
    device=Device.CPU, batch_size=2, d_heads=(4,), context_lengths=(8, 16, 32), implementations=(Implementation.NAIVE,),
    passes=3, warmup_passes=2, timeout_s=600.0,
)  # fmt: skip


def cell_of(implementation: Implementation, d_head: int = 4, context_length: int = 8) -> AttentionCell:
    return AttentionCell(
        implementation=implementation, precision=Precision.FP32, d_head=d_head, context_length=context_length
    )


def inputs_of(grid: AttentionGrid, cell: AttentionCell) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (grid.batch_size, cell.context_length, cell.d_head)
    return [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]


def test_a_missing_kernel_is_a_row_and_no_failure() -> None:
    grid = replace(SMALL, implementations=(Implementation.EFFICIENT, Implementation.FLASH), context_lengths=(8, 16))
    study = run_study(grid)
    assert [result.status for result in study.results] == [Status.UNAVAILABLE] * 2 + [Status.OK] * 2
    assert "viable backend" in study.results[0].failure.message
    assert study.available(Precision.FP32) == [Implementation.FLASH]
    assert all(result.status.is_result for result in study.results)


def test_a_whole_study_keeps_every_time_and_its_environment() -> None:
    progress: list[AttentionStudy] = []
    study = run_study(replace(SMALL, d_heads=(8, 4), precisions=(Precision.BF16,)), on_progress=progress.append)
    assert [(r.cell.context_length, r.cell.d_head) for r in study.results] == [
        (8, 4), (8, 8), (16, 4), (16, 8), (32, 4), (32, 8),
    ]  # fmt: skip
    assert [len(seen.results) for seen in progress] == [1, 2, 3, 4, 5, 6]
    assert progress[-1] == study
    assert study.environment.identity.torch == torch.__version__
    for result in study.results:
        assert [m.phase for m in result.measurements] == [Phase.FORWARD, Phase.BACKWARD]
        assert all(len(m.times_s) == 3 and m.min_s > 0 for m in result.measurements)
        assert result.memory is None  # there is no allocator to ask: unknown, not 0
        assert result.first_pass_s > 0
        assert result.compile_s is None


def test_an_injected_sleep_is_found_in_forward_alone() -> None:
    def slow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return full_attention(q, k, v)

    result = measure_cell(SMALL, cell_of(Implementation.NAIVE), slow)
    assert result.measurement(Phase.FORWARD).min_s >= 0.1
    assert result.measurement(Phase.BACKWARD).min_s < 0.05


@torch._dynamo.config.patch(recompile_limit=1)
def test_compiling_starts_afresh_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives up on a function after some shapes, here after the first, and then raises.

    Without its slow last stage, which gives up on nothing.
    """
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled(function, backend="eager", **how))
    for context_length in (8, 16):
        result = measure_cell(SMALL, cell_of(Implementation.COMPILED, context_length=context_length))
        assert result.status is Status.OK
        assert result.compile_s == result.first_pass_s > 0


def test_causal_attention_is_compiled_in_a_worker() -> None:
    grid = replace(SMALL, causal=True, context_lengths=(8,), implementations=(Implementation.COMPILED,))
    (result,) = run_study(grid).results
    assert result.failure is None
    assert result.compile_s > result.measurement(Phase.FORWARD).mean_s


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "implementation", [Implementation.NAIVE, Implementation.SDPA, Implementation.FLASH, Implementation.MATH]
)
def test_every_implementation_computes_what_the_definition_says(implementation: Implementation, causal: bool) -> None:
    grid, cell = replace(SMALL, causal=causal), cell_of(implementation, d_head=4, context_length=6)
    inputs = inputs_of(grid, cell)
    q, k, v = (x.detach().double().numpy() for x in inputs)
    expected = np.zeros_like(q)
    for batch in range(2):
        for query in range(6):
            keys = range(query + 1 if causal else 6)
            weights = [math.exp(q[batch, query] @ k[batch, key] / 2) for key in keys]
            weighted = sum(w * v[batch, key] for w, key in zip(weights, keys, strict=True))
            expected[batch, query] = weighted / sum(weights)
    output = make_attention(grid, cell)(*inputs)
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d_head", "context_length"), [(4, 8), (16, 3)])
def test_what_written_out_attention_saves_is_what_autograd_keeps(
    causal: bool, d_head: int, context_length: int
) -> None:
    grid = replace(SMALL, batch_size=3, causal=causal)
    cell = cell_of(Implementation.NAIVE, d_head, context_length)
    inputs = inputs_of(grid, cell)
    given = {x.untyped_storage().data_ptr() for x in inputs}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given and tensor.dtype is not torch.bool:  # the causal mask is an input too
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = make_attention(grid, cell)(*inputs)
    assert naive_saved_bytes(grid, cell) == sum(kept.values()) + output.nbytes


def test_flops_are_those_that_torch_counts() -> None:
    cell = cell_of(Implementation.NAIVE, 16, 24)
    with FlopCounterMode(display=False) as forward:
        output = make_attention(SMALL, cell)(*(inputs := inputs_of(SMALL, cell)))
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(output, inputs, torch.ones_like(output))
    assert matmul_flops(SMALL, cell, Phase.FORWARD) == forward.get_total_flops()
    assert matmul_flops(SMALL, cell, Phase.BACKWARD) == backward.get_total_flops()
    shape = (2, 1, 24, 16)
    flash = cell_of(Implementation.FLASH, 16, 24)
    assert matmul_flops(SMALL, flash, Phase.BACKWARD) == sdpa_backward_flop_count(shape, shape, shape, shape)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_heads": ()}, "d_heads needs at least one"),
        ({"context_lengths": (8, -1)}, "context_lengths must be at least 1, got -1"),
        ({"context_lengths": (10**9,)}, "use smaller"),
        ({"d_heads": (10**18,)}, "use smaller"),
        ({"timeout_s": float("nan")}, "timeout_s must be positive"),
    ],
    ids=str,
)
def test_an_impossible_grid_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **changes)


def test_flags_mean_a_grid() -> None:
    grid = parse(AttentionArguments, "attention", ["--device", "cpu"]).grid()
    assert (grid.batch_size, grid.passes, grid.causal, grid.precisions) == (8, 10, False, (Precision.FP32,))
    assert Implementation.SDPA in grid.implementations
    flags = (
        "--device cpu --d-heads 16 64 --context-lengths 8 --implementations math --precisions bf16 --passes 2 --causal"
    )
    arguments = parse(AttentionArguments, "attention", flags.split())
    assert arguments.grid() == AttentionGrid(
        device=Device.CPU, d_heads=(16, 64), context_lengths=(8,), implementations=(Implementation.MATH,),
        precisions=(Precision.BF16,), passes=2, causal=True,
    )  # fmt: skip
    assert arguments.directory() == Path("data/attention/bf16_cpu")
    with pytest.raises(ValueError, match="--name"):
        replace(arguments, name="../up").directory()
    with pytest.raises(ValueError, match="at least 1"):
        replace(arguments, passes=0).grid()
    with pytest.raises(SystemExit):
        parse(AttentionArguments, "attention", ["--implementations", "nonsense"])
