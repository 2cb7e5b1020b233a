"""The user's own attention on a CPU: errors that are known beforehand, faults that are named, and the grid goes on."""

import csv
import inspect
import re
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
    wrong_quantities,
)
from cs336_systems.studies.cell import attempt, make_generator, make_inputs
from cs336_systems.studies.records import read_study
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


def errors_of(result: CellResult, status: Status = Status.OK) -> dict[Quantity, ExactError]:
    assert result.status is status, result.failure
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
        first, *others = exact_errors((output, *found[1:]), found)
        assert first.max_error == pytest.approx(0.5, rel=1e-12)
        assert first.relative == pytest.approx(0.5 / found[0].abs().max().item())
        assert [other.max_error for other in others] == [0, 0, 0]
    output[0, 0, 0] = torch.nan
    first, *_ = exact_errors((output, *found[1:]), found)
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
    for quantity, error in errors_of(measured(name), Status.INVALID).items():
        amounts = {"0.25": 0.25, "half": error.max_exact / 2, "whole": error.max_exact}
        known = amounts[wrong[quantity]] if quantity in wrong else 0
        assert error.max_error == pytest.approx(known, abs=ROUNDING * error.max_exact), quantity


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize(
    ("name", "causal", "wrong", "said"),
    [
        ("without_the_mask", True, {*Quantity}, "equals attention without the causal mask"),
        ("always_causal", False, {*Quantity}, "equals attention with the causal mask"),
        ("without_the_scale", True, {*Quantity}, None),
        ("TwiceDk", True, {Quantity.DK}, None),
        ("without_the_mask", False, set(), None),
        ("always_causal", True, set(), None),
        ("Flash", True, set(), None),
    ],
)
def test_what_computes_something_else_is_wrong_and_its_times_do_not_count(
    name: str, causal: bool, wrong: set[Quantity], said: str | None, precision: Precision
) -> None:
    result = measured(name, precision, causal=causal)
    assert result.status is (Status.INVALID if wrong else Status.OK)
    assert bool(result.measurement(Phase.FORWARD)) is not bool(wrong)
    assert [len(m.times_s) for m in result.measurements] == [2, 2], "the record keeps what was measured"
    if wrong:
        text = result.failure.message
        assert {quantity for quantity in Quantity if re.search(rf"[:,] {quantity} [0-9.e-]+ \(PyTorch", text)} == wrong
        assert (said in text) if said else ("equals" not in text)
        assert line_of(getattr(getattr(own_kernels, name), "forward", getattr(own_kernels, name))) in text


def test_products_in_tf32_are_told_from_fp32_and_from_nonsense() -> None:
    """The error that Triton's tl.dot leaves by default: right to three digits, and 1000 times that of fp32."""
    result = measured("products_in_tf32")
    assert result.status is Status.INVALID
    assert "tf32" in result.failure.message
    assert "tf32" not in measured("without_the_scale").failure.message
    assert measured("products_in_tf32", Precision.TF32).status is Status.OK


def test_a_published_kernel_is_right_in_every_shape() -> None:
    """FlexAttention on an H200, up to a context of 65,536: by sums over the context alone it is 16 times as far off."""
    study = read_study(Path(__file__).parents[2] / "data/published/attention/own_flex/attention.json", AttentionStudy)
    kernels = {Precision.FP32: Implementation.EFFICIENT, Precision.BF16: Implementation.FLASH}
    errors = {(each.cell.implementation, each.cell): each.errors for each in study.results if each.errors}
    judged = 0
    for each in study.results:
        kernel = kernels[each.cell.precision]
        beside = errors.get((kernel, replace(each.cell, implementation=kernel)))
        if each.cell.implementation is Implementation.OWN and each.errors and beside:
            assert wrong_quantities(each.cell, each.errors, beside) == ()
            judged += 1
    assert judged > 60


@pytest.mark.parametrize(("name", "status"), [("ForwardAlone", 0), ("WrongForwardAlone", 1)])
def test_a_kernel_without_a_backward_keeps_its_forward(
    name: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--device",
        "cpu",
        "--d-heads",
        "4",
        "--context-lengths",
        "8",
        "--passes",
        "2",
        "--implementations",
        "naive",
    ]
    own = f"tests.own_kernels:{name}"
    assert main(["attention", *flags, "--causal", "--own", own, "--output", str(tmp_path), "--name", "n"]) == status
    with (tmp_path / "attention/n/results.csv").open() as file:
        _, row = csv.DictReader(file)
    assert (row["backward_mean_ms"], row["together_mean_ms"], row["dq_max_error"]) == ("", "", "")
    assert bool(row["forward_mean_ms"]) is (status == 0)
    shown = capsys.readouterr().out
    if status == 0:
        assert row["status"] == "ok"
        assert row["error"].startswith("NotImplementedError: backward is next week's exercise (tests/own_kernels.py")
        assert "no backward" in shown
        assert float(row["output_relative_error"]) < ROUNDING
    else:
        assert (row["status"], "without the causal mask" in row["error"]) == ("invalid", True)
        assert "WRONG" in shown
    study = read_study(tmp_path / "attention/n/attention.json", AttentionStudy)
    assert [m.phase for m in study.results[1].measurements] == [Phase.FORWARD]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import triton_of_a_gpu", None),
        ("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')", "triton"),
        ("from tests.own_kernels import for_triton as flash", "0 active drivers"),
        ("from tests.own_kernels import for_cuda as flash", "CUDA"),
    ],
)
def test_a_kernel_for_a_gpu_is_said_to_need_one(
    source: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The texts are those of Triton 3.5 and of PyTorch without CUDA; another module that is missing is an error."""
    (tmp_path / "kernel_here.py").write_text(f"{source}\ndef unused(): ...\n" + "flash = globals().get('flash')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "kernel_here", raising=False)
    grid = replace(SMALL, own="kernel_here:flash")
    (cell,) = grid.groups()[0]
    (row,), _ = attempt(grid, cell, measure_rows)
    if reason is None:
        assert row.status is Status.CRASHED
        return
    assert row.status is Status.UNAVAILABLE
    assert row.failure.message.startswith("needs a GPU: ")
    assert reason in row.failure.message
    assert row.failure.traceback is None


def test_a_function_that_writes_to_its_inputs_does_not_hide_its_error() -> None:
    """Its values are all 0 after the first pass, and its output with them; nothing is left of the right one."""
    output = errors_of(measured("writes_to_its_inputs"), Status.INVALID)[Quantity.OUTPUT]
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
