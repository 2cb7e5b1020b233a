"""The user's own attention on a CPU: errors that are known beforehand, faults that are named, and the grid goes on."""

import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cs336_systems.cli import main
from cs336_systems.commands.attention import AttentionArguments
from cs336_systems.commands.flags import parse
from cs336_systems.config import Device, Phase, Precision
from cs336_systems.measure.inputs import source_digest
from cs336_systems.record import Status
from cs336_systems.report.sections.attention import attention_rows
from cs336_systems.studies import attention_exact
from cs336_systems.studies.attention_cell import measure_cell, measure_rows
from cs336_systems.studies.attention_exact import exact_attention, exact_errors
from cs336_systems.studies.attention_records import (
    AttentionCell,
    AttentionGrid,
    AttentionStudy,
    CellResult,
    ExactError,
    Implementation,
    Quantity,
)
from cs336_systems.studies.cell import attempt, make_generator, make_inputs
from cs336_systems.studies.runner import run_study
from tests import own_kernels

SMALL = AttentionGrid(
    device=Device.CPU, batch_size=2, d_heads=(4,), context_lengths=(8,), implementations=(Implementation.OWN,),
    own="tests.own_kernels:right", causal=True, passes=2, warmup_passes=1,
)  # fmt: skip
ROUNDING = 1e-5
"""Far above what fp32 leaves of a few sums, far below every error that is put in."""


def measured(name: str, precision: Precision = Precision.FP32, **fields) -> CellResult:
    grid = replace(SMALL, own=f"tests.own_kernels:{name}", **fields)
    cell = AttentionCell(implementation=Implementation.OWN, precision=precision, d_head=4, context_length=8)
    return measure_cell(grid, cell)


def errors_of(result: CellResult) -> dict[Quantity, ExactError]:
    assert result.status is Status.OK, result.failure
    assert [error.quantity for error in result.errors] == list(Quantity)
    return {error.quantity: error for error in result.errors}


def line_of(function) -> str:
    """File and line as an editor counts them, and as Python's own inspect finds them."""
    return f"tests/own_kernels.py, line {inspect.getsourcelines(function)[1]}"


def line_with(text: str) -> str:
    lines = Path(own_kernels.__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return f"tests/own_kernels.py, line {number}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries_in_block", [1, 3, 7, 100])
def test_blocks_of_queries_make_the_whole_in_float64(
    causal: bool, queries_in_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_exact, "BLOCK_BYTES", queries_in_block * 7 * 8)
    inputs = make_inputs([(2, 7, 3)] * 3, Precision.BF16, make_generator(SMALL))
    q, k, v = (x.detach().double().requires_grad_() for x in inputs.forward)
    output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    expected = (output, *torch.autograd.grad(output, (q, k, v), inputs.upstream.double()))
    for found, known in zip(exact_attention(inputs, causal=causal), expected, strict=True):
        torch.testing.assert_close(found, known.detach(), rtol=1e-12, atol=1e-12)


def test_an_error_in_any_sequence_and_one_that_is_not_finite_are_found() -> None:
    inputs = make_inputs([(3, 5, 2)] * 3, Precision.FP32, make_generator(SMALL))
    found = exact_attention(inputs, causal=False)
    for sequence, amount in ((0, 0.5), (2, -0.5)):
        output = found[0].clone()
        output[sequence, 4, 1] += amount
        first, *others = exact_errors((output, *found[1:]), inputs, causal=False)
        assert first.max_error == pytest.approx(0.5, rel=1e-12)
        assert first.relative == pytest.approx(0.5 / found[0].abs().max().item())
        assert [other.max_error for other in others] == [0, 0, 0]
    output[0, 0, 0] = torch.nan
    first, *_ = exact_errors((output, *found[1:]), inputs, causal=False)
    assert (first.max_error, first.relative) == (None, None)


@pytest.mark.parametrize("name", ["right", "Flash", "Flash.apply"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_right_function_is_timed_and_its_error_is_of_rounding(name: str, causal: bool) -> None:
    result = measured(name, causal=causal)
    assert all(0 < error.relative < ROUNDING for error in errors_of(result).values())
    assert [len(m.times_s) for m in result.measurements] == [2, 2]
    sums = [a + b for a, b in zip(*(m.times_s for m in result.measurements), strict=True)]
    assert list(result.measurement(Phase.STEP).times_s) == sums


def test_in_bf16_the_error_is_that_of_its_eight_bits() -> None:
    errors = errors_of(measured("right", Precision.BF16))
    assert all(2**-10 < error.relative < 2**-4 for error in errors.values())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("a_quarter_more", {Quantity.OUTPUT: "0.25"}),
        ("half_as_much_again", dict.fromkeys(Quantity, "half")),
        ("TwiceDk", {Quantity.DK: "whole"}),
    ],
)
def test_a_known_error_is_found_where_it_is_and_as_large_as_it_is(name: str, wrong: dict[Quantity, str]) -> None:
    for quantity, error in errors_of(measured(name)).items():
        amounts = {"0.25": 0.25, "half": error.max_exact / 2, "whole": error.max_exact}
        known = amounts[wrong[quantity]] if quantity in wrong else 0
        assert error.max_error == pytest.approx(known, abs=ROUNDING * error.max_exact), quantity


def test_a_function_that_writes_to_its_inputs_does_not_hide_its_error() -> None:
    """Its values are all 0 after the first pass, and its output with them; nothing is left of the right one."""
    output = errors_of(measured("writes_to_its_inputs"))[Quantity.OUTPUT]
    assert output.max_error == output.max_exact > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one_query_less", "(2, 7, 4)"),
        ("in_float64", "float64"),
        ("on_another_device", "meta"),
        ("with_the_logsumexp", "tuple"),
        ("one_nan", "1 of 64"),
        ("without_gradients", "without gradients"),
        ("without_a_gradient_of_k", "respect to k"),
        ("NanDv", "gradient of v"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(name: str, said: str) -> None:
    result = measured(name)
    assert (result.status, result.measurements, result.errors) == (Status.INVALID, (), ())
    function = getattr(own_kernels, name)
    assert said in result.failure.message
    assert f"({line_of(getattr(function, 'forward', function))})" in result.failure.message


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        ("raises_at_16", Status.CRASHED, "context 16 is no whole block"),
        ("RaisesBackward", Status.CRASHED, "no backward yet"),
        ("out_of_memory", Status.OOM, "torch.empty(2**60)"),
    ],
)
def test_a_cell_that_fails_names_the_line_and_the_next_is_measured(name: str, status: Status, line: str) -> None:
    grid = replace(SMALL, own=f"tests.own_kernels:{name}", implementations=(Implementation.OWN, Implementation.NAIVE),
                   context_lengths=(16,))  # fmt: skip
    study = run_study(grid)
    own, naive = study.results
    assert (own.status, naive.status) == (status, Status.OK)
    assert attention_rows(study)[0]["error"].endswith(f"({line_with(line)})")
    assert max(error.relative for error in naive.errors) < ROUNDING


def test_a_file_that_cannot_be_imported_is_a_row_that_names_its_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unfinished.py").write_text("\n\ndef flash(q, k, v, is_causal)\n    return q\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    grid = replace(SMALL, own="unfinished:flash")
    (cell,) = grid.groups()[0]
    (row,), _ = attempt(grid, cell, measure_rows)
    study = AttentionStudy(grid=grid, results=(row,))
    assert row.status is Status.CRASHED
    assert attention_rows(study)[0]["error"].count("unfinished.py, line 3") == 1


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.own_kernels", "package.module:name"),
        ("tests/own_kernels.py:right", "package.module:name"),
        ("tests.no_such:right", "no_such"),
        ("tests.own_kernels:rihgt", "did you mean right"),
        ("tests.own_kernels:number", "int"),
    ],
)
def test_a_name_that_cannot_be_meant_is_refused_before_anything_starts(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cs336_systems.studies.runner.run_study", lambda *_: pytest.fail("a study was started"))
    assert main(["attention", "--device", "cpu", "--output", str(tmp_path), "--own", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--own" in line
    assert said in line
    assert list(tmp_path.iterdir()) == []


def test_a_study_without_an_own_function_takes_no_time_for_errors() -> None:
    def unused(*_: Tensor, **__: bool) -> None:
        pytest.fail("float64 was computed")

    grid = replace(SMALL, own=None, implementations=(Implementation.NAIVE,))
    cell = AttentionCell(implementation=Implementation.NAIVE, precision=Precision.FP32, d_head=4, context_length=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cs336_systems.studies.attention_cell.exact_errors", unused)
        assert measure_cell(grid, cell).errors == ()
