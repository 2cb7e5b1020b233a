"""Tables and files of hand-made studies of attention and of fusion."""

from dataclasses import replace

import pytest

from cs336.config import Device, Phase
from cs336.record import Failure, Input, Status
from cs336.report.sections.operators import (
    CSV_COLUMNS,
    ERROR_COLUMNS,
    attention_section,
    fusion_section,
)
from cs336.studies.operators import ExactError, Implementation, Quantity, Version
from tests.report.reading import column, csv_rows
from tests.report.studies import (
    MIB,
    make_cell,
    make_failed,
    make_fusion,
    make_lost_row,
    make_result,
    make_row,
    make_study,
)

NAIVE, FLASH = Implementation.NAIVE, Implementation.FLASH


@pytest.fixture
def study():
    """Naive takes four times the memory at twice the context and has none at 2048; flash twice,
    and half the time.
    """
    return make_study(
        make_result(make_cell(NAIVE, 64, 512), saved_mib=2.5, peak_mib=10),
        make_result(make_cell(NAIVE, 64, 1024), saved_mib=10, peak_mib=24),
        make_failed(make_cell(NAIVE, 64, 2048), requested_bytes=32 * MIB),
        make_result(make_cell(FLASH, 64, 512), (0.00099, 0.001, 0.00101), saved_mib=1),
        make_result(make_cell(FLASH, 64, 1024), (0.00099, 0.001, 0.00101), saved_mib=2),
        make_result(make_cell(FLASH, 64, 2048), (0.00099, 0.001, 0.00101), saved_mib=4),
    )


def test_tables_have_a_row_for_each_shape_and_a_column_for_each_implementation(study):
    forward, backward, memory = attention_section(study).tables
    assert [heading.name for heading in forward.headings] == ["d_head", "context", "naive", "flash"]
    assert forward.rows == (
        ("64", "512", "2.000 ± 0.010", "1.000 ± 0.010"),
        ("64", "1024", "2.000 ± 0.010", "1.000 ± 0.010"),
        ("64", "2048", "out of memory", "1.000 ± 0.010"),
    )
    assert [row[2] for row in backward.rows] == ["5.00 ± 0.02", "5.00 ± 0.02", "out of memory"]
    assert forward.title == "Forward pass of attention, fp32, batch 2, no heads, NVIDIA H200"
    # 2 x T x T x 4 bytes of weights, and twice 2 x T x 64 x 4 bytes
    assert [row[-1] for row in memory.rows] == ["2.500", "9.000", "34.00"]
    assert [row[2:4] for row in memory.rows] == [
        ("6.500 (2.500)", "5.000 (1.000)"),
        ("14.00 (10.00)", "6.000 (2.000)"),
        ("out of memory", "8.000 (4.000)"),
    ]


def test_an_implementation_without_any_kernel_is_a_sentence_and_no_column():
    cells = [
        make_failed(make_cell(FLASH, 64, c), Status.UNAVAILABLE, "needs fp16") for c in (512, 1024)
    ]
    forward, *_ = attention_section(make_study(make_result(make_cell()), *cells)).tables
    assert [heading.name for heading in forward.headings] == ["d_head", "context", "naive"]
    assert "No flash in fp32: needs fp16" in forward.notes
    partly = make_study(make_result(make_cell(FLASH, 64, 512)), cells[1])
    assert [row[2] for row in attention_section(partly).tables[0].rows] == [
        "2.000 ± 0.010",
        "no kernel",
    ]


def test_csv_has_every_value(study):
    rows = csv_rows(attention_section(study))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert len(rows) == 6
    second = rows[1]
    assert (second["implementation"], second["context_length"], second["batch_size"]) == (
        "naive",
        "1024",
        "2",
    )
    assert float(second["forward_mean_ms"]) == pytest.approx(2)
    assert float(second["backward_std_ms"]) == pytest.approx(0.02)
    assert float(second["forward_tflops_per_s"]) == pytest.approx(
        4 * 2 * 1024**2 * 64 / 0.002 / 1e12
    )
    assert float(second["backward_tflops_per_s"]) == pytest.approx(
        8 * 2 * 1024**2 * 64 / 0.005 / 1e12
    )
    assert float(rows[4]["backward_tflops_per_s"]) == pytest.approx(
        10 * 2 * 1024**2 * 64 / 0.005 / 1e12
    )
    assert float(second["together_mean_ms"]) == pytest.approx(7)
    assert float(second["together_tflops_per_s"]) == pytest.approx(
        12 * 2 * 1024**2 * 64 / 0.007 / 1e12
    )
    assert float(rows[4]["together_tflops_per_s"]) == pytest.approx(
        14 * 2 * 1024**2 * 64 / 0.006 / 1e12
    )
    assert [
        float(second[f"{name}_mib"]) for name in ("saved", "naive_saved_closed_form", "peak")
    ] == [10, 9, 24]
    assert (rows[2]["status"], rows[2]["requested_mib"], rows[2]["forward_mean_ms"]) == (
        "oom",
        "32",
        "",
    )


@pytest.fixture
def own_study():
    """The user's own takes half of naive's time; its gradients are wrong, and at 2048 it raises."""
    errors = [
        ExactError(quantity=quantity, max_error=error, max_exact=4.0)
        for quantity, error in zip(Quantity, (1e-6, 2e-6, 1.0, 0.5), strict=True)
    ]
    raised = Failure(
        message="ValueError: no block",
        traceback="Traceback (most recent call last):\n"
        '  File "cs336/studies/cell.py", line 9, '
        'in attempt\n  File "mine.py", line 7, in flash\n    block()\n  File "torch/x.py", '
        "line 3, in y\nValueError: no block\n",
    )
    own = make_result(
        make_cell(Implementation.OWN), (0.00099, 0.001, 0.00101), (0.00249, 0.0025, 0.00251)
    )
    return make_study(
        replace(
            make_result(make_cell()),
            errors=tuple(replace(error, max_error=1e-6) for error in errors),
        ),
        replace(own, errors=tuple(errors)),
        replace(
            make_failed(make_cell(Implementation.OWN, 64, 2048), Status.CRASHED), failure=raised
        ),
        implementations=(NAIVE, Implementation.OWN),
        source=Input(name="source of mine:flash", state="0123abcd"),
    )


def test_csv_has_the_errors_of_the_output_and_of_each_gradient(own_study):
    _, own, crashed = csv_rows(attention_section(own_study))
    assert [float(own[f"{quantity}_max_error"]) for quantity in Quantity] == [1e-6, 2e-6, 1.0, 0.5]
    assert [float(own[f"{quantity}_relative_error"]) for quantity in Quantity] == [
        2.5e-7,
        5e-7,
        0.25,
        0.125,
    ]
    assert {crashed[key] for key in ERROR_COLUMNS} == {""}
    assert crashed["error"] == "ValueError: no block (mine.py, line 7)"


def test_what_own_is_and_how_it_failed_are_told_and_the_others_are_compared_with_it(own_study):
    forward, backward, *_ = attention_section(own_study).tables
    assert any("mine:flash" in note and "0123abcd" in note for note in forward.notes)
    assert any(
        "no block (mine.py, line 7)" in note and "context 2048" in note for note in forward.notes
    )
    for table in (forward, backward):
        (compared,) = [note for note in table.notes if "over that of own" in note]
        assert "naive 2.00 at d_head 64, context 1024" in compared


@pytest.fixture
def fusion():
    """Fusing saves 7/8 of the time forward; backward runs out of memory where it was compiled."""
    return make_fusion(
        make_row(kernels=tuple("abcdefgh"), times_s=(0.008, 0.0079, 0.0083)),
        make_row(phase=Phase.BACKWARD),
        make_row(version=Version.COMPILED, times_s=(0.001,), kernels=("fused",), moved_bytes=None),
        make_lost_row(version=Version.COMPILED, phase=Phase.BACKWARD),
        make_row(version=Version.FUSED, times_s=(0.002,), kernels=("gelu",), moved_bytes=2 * MIB),
        make_row(version=Version.FUSED, phase=Phase.BACKWARD, max_error=None),
    )


def test_tables_by_hand(fusion):
    forward, backward = fusion_section(fusion).tables
    assert column(forward, "version") == ["eager", "compiled", "fused"]
    assert column(forward, "kernels") == ["8", "1", "1"]
    assert column(forward, "time") == ["8.0 ± 0.2", "1.000", "2.000"]  # medians
    assert column(forward, "moved") == ["18.00", "", "2.000"]
    assert column(forward, "rate") == ["0.262", "2.10", "1.05"]  # 2 MiB a time, in GB/s
    assert column(forward, "of bandwidth") == ["0.00546", "0.0437", "0.0218"]  # of 4800 GB/s
    assert column(forward, "speed-up") == ["1.00", "8.00", "4.00"]
    assert column(backward, "time") == ["2.000", "out of memory", "2.000"]
    assert column(backward, "kernels") == ["2", "", "2"]
    assert column(backward, "max error") == ["1.5e-07", "", "not finite"]
    assert backward.failed == {1}
    assert forward.title.startswith("Fusion op by op, forward, fp32, batch 2, context 8, width 16")


def test_sentences_by_hand(fusion):
    forward, backward = fusion_section(fusion).tables
    assert "gelu compiled: no memory" in backward.notes
    assert not any("operators" in note for note in forward.notes)
    on_cpu = replace(fusion, grid=replace(fusion.grid, device=Device.CPU))
    assert "On a CPU operators take the place of kernels." in fusion_section(on_cpu).tables[0].notes
