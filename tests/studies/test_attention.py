"""The grid of attention on a CPU: closed forms against torch's counts, and the user's own with
known errors.
"""

import csv
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from cs336.cli import main
from cs336.commands.parse import parse
from cs336.commands.study import AttentionArguments
from cs336.config import Device, Phase, Precision
from cs336.measure import environment
from cs336.measure.inputs import source_digest
from cs336.record import Status
from cs336.report.sections.operators import attention_section
from cs336.studies import attention_cell
from cs336.studies.attention_cell import exact_attention, make_attention, measure_cell
from cs336.studies.cell import make_generator
from cs336.studies.operators import (
    AttentionCell,
    AttentionGrid,
    AttentionStudy,
    CellResult,
    ExactError,
    Implementation,
    Quantity,
    attention_flops,
    naive_saved_bytes,
    wrong_quantities,
)
from cs336.studies.passes import make_inputs
from cs336.studies.records import read_study
from cs336.studies.runner import run_study
from tests import own_kernels

SMALL = AttentionGrid(
    device=Device.CPU,
    batch_size=2,
    d_heads=(4,),
    context_lengths=(8,),
    implementations=(Implementation.OWN,),
    own="tests.own_kernels:right",
    causal=True,
    passes=2,
    warmup_passes=1,
)
ROUNDING = 1e-5
"""Far above what fp32 leaves of a few sums, far below every error that is put in."""


def test_the_students_own_is_measured_first() -> None:
    grid = replace(
        SMALL,
        implementations=(Implementation.NAIVE, Implementation.OWN, Implementation.SDPA),
        precisions=(Precision.BF16, Precision.FP32),
    )
    first = [group[0].rows[0].cell.implementation for group in grid.groups()]
    assert first[0] is Implementation.OWN
    assert sorted(first) == sorted(2 * grid.implementations)


def measured(name: str, precision: Precision = Precision.FP32, **fields) -> CellResult:
    grid = replace(SMALL, own=f"tests.own_kernels:{name}", **fields)
    return measure_cell(grid, AttentionCell(Implementation.OWN, precision, 4, 8))


def errors_of(result: CellResult, status: Status = Status.OK) -> dict[Quantity, ExactError]:
    assert result.status is status, result.failure
    assert [error.quantity for error in result.errors] == list(Quantity)
    return {error.quantity: error for error in result.errors}


def line_with(text: str) -> str:
    lines = Path(own_kernels.__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return f"tests/own_kernels.py, line {number}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries_in_block", [1, 3, 7, 100])
def test_blocks_of_queries_make_the_whole_in_float64(
    causal: bool, queries_in_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_cell, "BLOCK_BYTES", queries_in_block * 7 * 8)
    inputs = make_inputs([(2, 7, 3)] * 3, Precision.BF16, make_generator(SMALL))
    q, k, v = (x.detach().double().requires_grad_() for x in inputs.forward)
    output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    expected = (output, *torch.autograd.grad(output, (q, k, v), inputs.upstream.double()))
    exact = exact_attention(inputs, causal=causal)
    for tensor, known in zip(exact, expected, strict=True):
        torch.testing.assert_close(tensor, known.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["right", "Flash", "Flash.apply"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_right_function_is_timed_and_its_error_is_of_rounding(name: str, causal: bool) -> None:
    result = measured(name, causal=causal)
    assert all(0 < error.relative < ROUNDING for error in errors_of(result).values())
    assert [len(m.times_s) for m in result.measurements] == [2, 2]
    sums = [a + b for a, b in zip(*(m.times_s for m in result.measurements), strict=True)]
    assert list(result.measurement(Phase.STEP).times_s) == sums


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize(
    ("name", "causal", "wrong"),
    [
        ("without_the_mask", True, {*Quantity}),
        ("always_causal", False, {*Quantity}),
        ("without_the_scale", True, {*Quantity}),
        ("TwiceDk", True, {Quantity.DK}),
        ("without_the_mask", False, set()),
        ("always_causal", True, set()),
        ("Flash", True, set()),
    ],
)
def test_what_computes_something_else_is_wrong_and_its_times_do_not_count(
    name: str, causal: bool, wrong: set[Quantity], precision: Precision
) -> None:
    result = measured(name, precision, causal=causal)
    assert result.status is (Status.INVALID if wrong else Status.OK)
    assert bool(result.measurement(Phase.FORWARD)) is not bool(wrong)
    assert [len(m.times_s) for m in result.measurements] == [2, 2], (
        "the record keeps what was measured"
    )
    if wrong:
        text = result.failure.message
        assert set(re.findall(r"[:,] (\w+) [0-9.e-]+ \(PyTorch", text)) == wrong


def test_products_in_tf32_are_wrong_in_fp32_and_right_in_tf32() -> None:
    """The error that Triton's tl.dot leaves by default: right to three digits, and 1000 times
    that of fp32.
    """
    assert measured("products_in_tf32").status is Status.INVALID
    assert measured("products_in_tf32", Precision.TF32).status is Status.OK


def test_a_published_kernel_is_right_in_every_shape() -> None:
    """FlexAttention on an H200, up to a context of 65,536: by sums over the context alone it is
    16 times as far off.
    """
    study = read_study(
        Path(__file__).parents[2] / "data/published/attention/own_flex/attention.json",
        AttentionStudy,
    )
    kernels = {Precision.FP32: Implementation.EFFICIENT, Precision.BF16: Implementation.FLASH}
    errors = {result.cell: result.errors for result in study.results if result.errors}
    judged = 0
    for cell, errors_of_own in errors.items():
        beside = errors.get(replace(cell, implementation=kernels[cell.precision]))
        if cell.implementation is Implementation.OWN and beside:
            assert not wrong_quantities(cell, errors_of_own, beside)
            judged += 1
    assert judged > 60


@pytest.mark.parametrize(
    ("name", "status"),
    [("right", 0), ("without_the_mask", 1), ("ForwardAlone", 0), ("WrongForwardAlone", 1)],
)
def test_the_command_marks_a_wrong_function_and_leaves_its_times_out(
    name: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function without a backward is timed, and judged, by its forward."""
    flags = (
        "attention --device cpu --d-heads 4 --context-lengths 8 --passes 2 --causal --name n "
        f"--implementations naive --own tests.own_kernels:{name} --output"
    )
    assert main([*flags.split(), str(tmp_path)]) == status
    with (tmp_path / "attention/n/results.csv").open() as file:
        _, row = csv.DictReader(file)
    assert bool(row["forward_mean_ms"]) is (status == 0)
    assert row["status"] == ("ok" if status == 0 else "invalid")
    shown = capsys.readouterr().out
    assert ("WRONG" in shown) is (status == 1)
    assert bool(row["backward_mean_ms"]) is bool(row["together_mean_ms"]) is (name == "right")
    assert bool(row["dv_relative_error"]) is (not name.endswith("ForwardAlone"))
    if name == "ForwardAlone":
        assert (
            row["error"]
            == f"NotImplementedError: backward is next week's exercise ({line_with('next week')})"
        )
        assert "no backward" in shown
        assert float(row["output_relative_error"]) < ROUNDING


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one_query_less", "(2, 7, 4)"),
        ("in_float64", "float64"),
        ("on_another_device", "meta"),
        ("with_the_logsumexp", "tuple"),
        ("one_nan", "output inf"),
        ("NanDv", "dv inf"),
    ],
)
def test_what_is_wrong_is_said(name: str, said: str) -> None:
    result = measured(name)
    assert result.status is Status.INVALID
    assert said in result.failure.message


def test_a_function_that_writes_to_its_inputs_does_not_hide_its_error() -> None:
    """Its values are all 0 after the first pass, and its output with them; nothing is left of
    the right one.
    """
    output = errors_of(measured("writes_to_its_inputs"), Status.INVALID)[Quantity.OUTPUT]
    assert output.max_error == output.max_exact > 0


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        ("raises_at_16", Status.CRASHED, "context 16 is no whole block"),
        ("RaisesBackward", Status.CRASHED, "no backward yet"),
        ("out_of_memory", Status.OOM, "torch.empty(2**60)"),
    ],
)
def test_a_cell_that_fails_names_the_line_and_the_next_is_measured(
    name: str, status: Status, line: str
) -> None:
    grid = replace(
        SMALL,
        own=f"tests.own_kernels:{name}",
        implementations=(Implementation.OWN, Implementation.NAIVE),
        context_lengths=(16,),
    )
    study = run_study(grid)
    own, naive = study.results
    assert (own.status, naive.status) == (status, Status.OK)
    assert attention_section(study).rows[0]["error"].endswith(f"({line_with(line)})")
    assert max(error.relative for error in naive.errors) < ROUNDING


def test_the_flag_adds_an_implementation_and_keeps_the_state_of_its_source() -> None:
    flags = ["--device", "cpu", "--implementations", "sdpa", "--own", "tests.own_kernels:Flash"]
    grid = parse(AttentionArguments, "attention", flags).grid()
    assert grid.implementations == (Implementation.SDPA, Implementation.OWN)
    assert grid.source.state == source_digest("tests.own_kernels")
    without = parse(AttentionArguments, "attention", ["--device", "cpu"]).grid()
    assert Implementation.OWN not in without.implementations
    assert without.source is None
    with pytest.raises(ValueError, match="--own"):
        replace(without, implementations=(Implementation.OWN,))


GRID = replace(
    SMALL,
    own=None,
    implementations=(Implementation.NAIVE,),
    causal=False,
    passes=3,
    warmup_passes=2,
    context_lengths=(8, 16, 32),
)


def cell_of(
    implementation: Implementation, d_head: int = 4, context_length: int = 8
) -> AttentionCell:
    return AttentionCell(implementation, Precision.FP32, d_head, context_length)


def inputs_of(grid: AttentionGrid, cell: AttentionCell) -> tuple[torch.Tensor, ...]:
    shape = (grid.batch_size, cell.context_length, cell.d_head)
    return make_inputs([shape] * 3, Precision.FP32, make_generator(grid)).forward


def test_a_missing_kernel_is_a_row_and_no_failure() -> None:
    grid = replace(
        GRID,
        implementations=(Implementation.EFFICIENT, Implementation.FLASH),
        context_lengths=(8, 16),
    )
    study = run_study(grid)
    assert [result.status for result in study.results] == [Status.UNAVAILABLE] * 2 + [Status.OK] * 2
    assert "viable backend" in study.results[0].failure.message
    assert study.available(Precision.FP32) == [Implementation.FLASH]
    assert all(result.status.is_result for result in study.results)


@torch._dynamo.config.patch(recompile_limit=1)
def test_compiling_starts_afresh_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives up on a function after some shapes, here after the first, and then
    raises.

    Without its slow last stage, which gives up on nothing.
    """
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **how: compiled(function, backend="eager", **how)
    )
    for context_length in (8, 16):
        result = measure_cell(GRID, cell_of(Implementation.COMPILED, context_length=context_length))
        assert result.status is Status.OK


@pytest.mark.parametrize(
    "implementation", [Implementation.NAIVE, Implementation.COMPILED, Implementation.MATH]
)
def test_scores_that_a_laptop_has_no_memory_for_are_not_made(
    implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two matrices of 2 x 1,024 x 1,024 fp32 numbers are 16 MiB."""
    long = cell_of(implementation, context_length=1024)
    needed = 2 * GRID.batch_size * 1024 * 1024 * 4
    monkeypatch.setattr(environment, "host_memory_bytes", lambda: needed - 1)
    result = measure_cell(GRID, long)
    assert (result.status, result.measurements) == (Status.OOM, ())
    assert result.failure is not None
    assert "GiB of memory, and this machine has" in result.failure.message
    fused = measure_cell(GRID, cell_of(Implementation.SDPA, context_length=1024))
    assert fused.status is Status.OK
    if implementation is Implementation.NAIVE:
        monkeypatch.setattr(environment, "host_memory_bytes", lambda: needed)
        assert measure_cell(GRID, long).status is Status.OK


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "implementation",
    [Implementation.NAIVE, Implementation.SDPA, Implementation.FLASH, Implementation.MATH],
)
def test_every_implementation_computes_what_the_definition_says(
    implementation: Implementation, causal: bool
) -> None:
    grid, cell = replace(GRID, causal=causal), cell_of(implementation, d_head=4, context_length=6)
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
    grid = replace(GRID, batch_size=3, causal=causal)
    cell = cell_of(Implementation.NAIVE, d_head, context_length)
    inputs = inputs_of(grid, cell)
    given = {x.untyped_storage().data_ptr() for x in inputs}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # the causal mask is an input too
        if storage.data_ptr() not in given and tensor.dtype is not torch.bool:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = make_attention(grid, cell)(*inputs)
    assert naive_saved_bytes(grid, cell) == sum(kept.values()) + output.nbytes


def test_flops_are_those_that_torch_counts() -> None:
    cell = cell_of(Implementation.NAIVE, 16, 24)
    with FlopCounterMode(display=False) as forward:
        output = make_attention(GRID, cell)(*(inputs := inputs_of(GRID, cell)))
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(output, inputs, torch.ones_like(output))
    assert attention_flops(GRID, cell, Phase.FORWARD) == forward.get_total_flops()
    assert attention_flops(GRID, cell, Phase.BACKWARD) == backward.get_total_flops()
    shape = (2, 1, 24, 16)
    flash = cell_of(Implementation.FLASH, 16, 24)
    assert attention_flops(GRID, flash, Phase.BACKWARD) == sdpa_backward_flop_count(
        shape, shape, shape, shape
    )
