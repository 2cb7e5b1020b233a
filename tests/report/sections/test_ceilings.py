"""Tables and files of ceilings that were made by hand."""

import numpy as np
import pytest

from cs336.config import Device
from cs336.report.sections.ceilings import ceilings_sections
from cs336.studies.ceilings_rows import LaunchCell, LaunchKind, ProductCell
from tests.report.ceilings import (
    FP32,
    all_tables,
    lasting,
    lost,
    make_ceilings,
    make_whole,
    product_at,
    square,
    stream_at,
)
from tests.report.reading import column, csv_rows

UNKNOWN = "A device that nobody knows"


@pytest.fixture
def study():
    return make_whole()


def section(name, study):
    return {own.name: own for own in ceilings_sections(study)}[name]


def test_the_summary_by_hand(study):
    (table,) = section("results", study).tables
    assert column(table, "ceiling") == [
        "bf16 product",
        "fp32 product",
        "copy (memory)",
        "adamw (memory)",
        "a kernel on one element, launched one by one",
        "a kernel on one element, in a CUDA graph",
        "all-reduce among 4 (bus)",
    ]
    assert column(table, "measured") == [
        "800.0 ± 0",
        "50.00 ± 0",
        "4,000 ± 0",
        "3,600 ± 0",
        "4.000 ± 0",
        "1.000 ± 0",
        "300.0 ± 0",
    ]
    assert column(table, "unit") == ["TFLOP/s", "TFLOP/s", "GB/s", "GB/s", "µs", "µs", "GB/s"]
    assert column(table, "data sheet") == ["989.5", "67.00", "4,800", "4,800", "", "", ""]
    assert column(table, "of data sheet") == ["80.8", "74.6", "83.3", "75.0", "", "", ""]
    assert column(table, "reached at")[:3] == [
        "4096 x 4096 x 4096",
        "1024 x 1024 x 1024",
        "4,096 MiB",
    ]
    (row, *_) = csv_rows(section("results", study))
    assert float(row["data_sheet_share"]) == pytest.approx(800 / 989.5)


def test_products_by_hand(study):
    bf16, fp32, fp8 = section("products", study).tables
    assert bf16.title == "Matrix multiplications, bf16, NVIDIA H200"
    assert column(bf16, "rate") == ["300.0", "800.0", "700.0", "400.0", "600.0"]
    assert column(bf16, "of data sheet") == ["30.3", "80.8", "70.7", "40.4", "60.6"]
    assert column(bf16, "of best") == ["37.5", "100", "87.5", "50.0", "75.0"]
    assert column(bf16, "time")[1] == "0.1718 ± 0"  # 2 x 4096^3 over 800e12
    # 2 x 1024^3 over 300e12; loops of 1, 1.025 and 1 / 1.025
    assert column(bf16, "time")[0] == "0.00716 ± 0.00017"
    assert column(bf16, "intensity")[0] == "341"  # 2 x 1024^3 over 3 x 1024^2 x 2
    assert column(fp32, "of best") == ["100"]
    assert "of data sheet" not in [heading.name for heading in fp8.headings], (
        "nothing is known of it"
    )
    assert column(fp8, "time") == ["no kernel", "no kernel"]
    assert fp8.failed == {0, 1}
    assert fp8.notes[-1] == "1024 x 1024 x 1024 and 1 more: too old."
    rows = csv_rows(section("products", study))
    assert [rows[0][name] for name in ("precision", "name", "rows", "status")] == [
        "bf16",
        "square",
        "1024",
        "ok",
    ]
    assert float(rows[0]["flops"]) == 2 * 1024**3
    assert float(rows[0]["moved_mib"]) == 6
    assert float(rows[0]["tflops_per_s"]) == pytest.approx(300)
    assert float(rows[0]["loop_spread"]) == pytest.approx(0.05)
    loops = np.array([1, 1 / 1.025, 1.05 / 1.025])
    assert float(rows[0]["std_ms"]) == pytest.approx(2 * 1024**3 / 300e9 * loops.std(ddof=1))
    assert rows[0]["warnings"] == ""
    assert [
        rows[6][name] for name in ("status", "error", "median_ms", "tflops_per_s", "best_share")
    ] == ["unavailable", "too old.", "", "", ""]


def test_memory_and_collectives_by_hand(study):
    (memory,) = section("bandwidth", study).tables
    assert column(memory, "pass") == ["copy", "copy", "copy", "adamw"]
    assert column(memory, "moved") == ["1.000", "4,096", "8,192", "4,096"]
    assert column(memory, "rate") == ["9,000", "4,000", "", "3,600"]
    assert column(memory, "of data sheet") == ["188", "83.3", "", "75.0"]
    assert column(memory, "time")[2] == "out of memory"
    assert "The last cache holds 50.00 MiB." in memory.notes
    (reduce,) = section("collectives", study).tables
    assert column(reduce, "algorithm") == ["100.0", "200.0"]
    assert column(reduce, "bus") == ["150.0", "300.0"]  # four processes: 2 x 3 / 4
    assert [
        float(row["bus_gb_per_s"]) for row in csv_rows(section("collectives", study))
    ] == pytest.approx([150, 300])
    assert section("collectives", make_ceilings()).tables == ()


def test_an_unknown_device_and_a_cpu_have_no_data_sheet():
    study = make_ceilings(
        [product_at(square(64), 0.05, FP32)],
        [stream_at(20)],
        [LaunchCell(launch=LaunchKind.EAGER, timing=lasting(2e-6))],
        device_name=UNKNOWN,
        device=Device.CPU,
    )
    summary, *others = all_tables(ceilings_sections(study))
    assert column(summary, "measured") == ["0.05000 ± 0", "20.00 ± 0", "2.000 ± 0"]
    assert column(summary, "ceiling")[2] == "an operation on one element"
    for table in (summary, *others):
        assert not any("data sheet" in heading.name for heading in table.headings)
        assert not any("CUDA" in note or "launch" in note for note in table.notes)


def test_without_times_there_are_no_ceilings():
    empty = make_ceilings([ProductCell(precision=FP32, shape=square(8), timing=lost())])
    (table, *_) = all_tables(ceilings_sections(empty))
    (note,) = table.notes
    # one product, and three passes over one size
    assert note.startswith("Only 1 of the grid's 4 cells were measured")
    assert not table.rows
