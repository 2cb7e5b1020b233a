"""Columns turn values to text, and a table keeps the values as a data frame."""

import pytest

from cs336_systems.report.columns import COLUMNS, Column, column
from cs336_systems.report.frame import to_frame
from cs336_systems.report.section import in_si
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.files import tables_of_one
from cs336_systems.report.sections.steps import results_table
from tests.report.making import make_config, make_failure, make_record
from tests.report.sections.kernels.profiles import make_profile


def test_a_value_is_scaled_and_unknown_is_empty() -> None:
    time = Column("time", "µs", key="time_s", scale=1e6)
    assert [time.cell({"time_s": value}) for value in (0.0123456, None)] == ["12,346", ""]
    assert Column("time", "ms", key="time_s", scale=1e3, std="std_s").cell({"time_s": 0.066312, "std_s": 0.000123}) == (
        "66.31 ± 0.12"
    )


def test_one_table_may_change_a_column_for_itself_alone() -> None:
    before = COLUMNS["wall_mean_ms"]
    changed = column("wall_mean_ms", name="other", drop_order=7)
    assert (changed.name, changed.drop_order, changed.unit, changed.key) == ("other", 7, "ms", "wall_mean_ms")
    assert COLUMNS["wall_mean_ms"] == before != changed


def test_every_column_says_what_it_is() -> None:
    assert [key for key, found in COLUMNS.items() if not found.about.endswith(".")] == []


def test_the_frame_of_a_table_has_the_values_unrounded() -> None:
    """Steps of 0.1 and 0.2 s have a mean of 150 ms; a run that failed has none."""
    failed = make_failure(make_config("xl"))
    frame = results_table(to_frame([make_record(make_config(), (0.1, 0.2)), failed])).frame
    assert list(frame["size"]) == ["small", "xl"]
    assert frame["step_mean_ms"][0] == pytest.approx(150)
    assert frame["step_std_ms"][0] == pytest.approx(1e3 * 0.005**0.5)
    assert frame["step_mean_ms"][1] is None


def test_the_frames_of_a_kernel_profile_have_its_sums() -> None:
    """5, 10 and 5 ms of kernels in the phases of a step of 20 ms."""
    tables = {table.title: table for table in tables_of_one(Explained(profile=make_profile()), 3)}
    assert list(tables["Phases of a step"].frame["kernel_mean_ms"]) == pytest.approx([5, 10, 5, 20])
    assert all(len(table.frame) == len(table.rows) for title, table in tables.items() if title != "Findings")


def test_scaled_units_of_columns_become_si() -> None:
    row = {"step_mean_ms": 2.0, "std_us": 3.0, "total_ms_per_step": None, "peak_gib": 0.5, "moved_mib": 3, "forms": 1,
           "gb_per_s": 2.5, "roof_tflops_per_s": 4.0}  # fmt: skip
    assert in_si(row) == pytest.approx(
        {"step_mean_s": 0.002, "std_s": 3e-6, "total_s_per_step": None, "peak_bytes": 2**29, "moved_bytes": 3 * 2**20,
         "forms": 1, "bytes_per_s": 2.5e9, "roof_flops_per_s": 4e12}
    )  # fmt: skip
