from dataclasses import replace

import pytest

from cs336_systems.config import Device, Phase, Precision
from cs336_systems.report.plots.draw import figure_of
from cs336_systems.report.sections.fusion import CSV_COLUMNS, fusion_chart, fusion_section
from cs336_systems.studies.fusion_records import Op, Version
from tests.report.drawn import texts
from tests.report.reading import column, csv_rows
from tests.report.studies import MIB, make_fusion, make_lost_row, make_row

UNKNOWN = "A device that nobody knows"


@pytest.fixture
def study():
    """Fusing saves 7/8 of the time forward; backward runs out of memory where it was compiled."""
    return make_fusion(
        make_row(kernels=tuple("abcdefgh"), times_s=(0.008, 0.0079, 0.0083)),
        make_row(phase=Phase.BACKWARD),
        make_row(version=Version.COMPILED, times_s=(0.001,), kernels=("fused",), moved_bytes=None),
        make_lost_row(version=Version.COMPILED, phase=Phase.BACKWARD),
        make_row(version=Version.FUSED, times_s=(0.002,), kernels=("gelu",), moved_bytes=2 * MIB),
        make_row(version=Version.FUSED, phase=Phase.BACKWARD, max_error=None),
    )


def test_tables_by_hand(study):
    forward, backward = fusion_section(study).tables
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


def test_sentences_by_hand(study):
    forward, backward = fusion_section(study).tables
    assert (
        "gelu: written out 8 kernels that move 9.00 times what must move; compiled 1 kernel, 8.00 times as fast; "
        "fused 1 kernel, 4.00 times as fast." in forward.notes
    )
    assert "gelu compiled: no memory" in backward.notes
    assert not any("operators" in note for note in forward.notes)
    on_cpu = replace(study, grid=replace(study.grid, device=Device.CPU))
    assert "On a CPU operators take the place of kernels." in fusion_section(on_cpu).tables[0].notes


def test_products_have_a_least_time_of_their_own():
    study = make_fusion(make_row(Op.ATTENTION, matmul_flops=67 * 10**9))
    assert any(
        "at least 1.00 ms at the data sheet's 67 TFLOP/s" in note for note in fusion_section(study).tables[0].notes
    )
    assert not any("at least" in note for note in fusion_section(make_fusion(make_row())).tables[0].notes)


def test_an_unknown_device_has_no_share_and_no_line(study):
    unknown = make_fusion(*study.rows, device_name=UNKNOWN)
    assert "of bandwidth" not in [heading.name for heading in fusion_section(unknown).tables[0].headings]
    assert {row["bandwidth_share"] for row in csv_rows(fusion_section(unknown))} == {""}
    line = "what must move, at the data sheet's bandwidth"
    assert line in texts(figure_of(fusion_chart(study, Precision.FP32)))
    assert line not in texts(figure_of(fusion_chart(unknown, Precision.FP32)))


def test_the_line_is_the_least_time_that_the_bandwidth_allows(study):
    panel = figure_of(fusion_chart(study, Precision.FP32)).axes[0]
    heights = [line.get_ydata()[0] for line in panel.get_lines() if list(line.get_xdata()) == [0, 1]]
    assert heights == [pytest.approx(2 * MIB / 4800e9 * 1e3)]
    assert [patch.get_height() for patch in panel.patches] == pytest.approx([8, 1, 2])
    assert "out of memory" in texts(figure_of(fusion_chart(study, Precision.FP32)))


def test_csv_has_every_value(study):
    rows = csv_rows(fusion_section(study))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert (rows[0]["kernels"], rows[0]["kernel_names"]) == ("8", "a; b; c; d; e; f; g; h")
    assert [float(rows[0][name]) for name in ("median_ms", "mean_ms", "must_move_mib", "moved_mib")] == [
        8, pytest.approx(24.2 / 3), 2, 18,
    ]  # fmt: skip
    assert float(rows[2]["speed_up"]) == 8
    assert float(rows[2]["bandwidth_share"]) == pytest.approx(2 * MIB / 0.001 / 4800e9)
    assert [rows[3][name] for name in ("status", "error", "kernels", "median_ms", "speed_up", "max_error")] == [
        "oom", "no memory", "", "", "", "",
    ]  # fmt: skip


def test_there_is_no_speed_up_over_a_version_that_failed():
    study = make_fusion(make_lost_row(), make_row(version=Version.FUSED))
    assert [row["speed_up"] for row in fusion_section(study).rows] == [None, None]
    assert not any(note.startswith("gelu: written out") for note in fusion_section(study).tables[0].notes)
