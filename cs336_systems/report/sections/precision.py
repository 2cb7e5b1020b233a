"""The precision study for people: sums, layer norm and data types under autocast, as tables."""

from collections.abc import Sequence
from dataclasses import asdict

from cs336_systems.report.columns import column
from cs336_systems.report.section import Section, make_table
from cs336_systems.report.sections.study import across, pivoted
from cs336_systems.studies.precision_records import (
    Accumulation,
    NormalisedActivations,
    ObservedDtype,
    PrecisionStudy,
)

ACCUMULATION = ("sum_dtype", "addend_dtype", "cast", "total", "error", "storage_error", "rounding_error",
                "growing_additions")  # fmt: skip
LAYER_NORM = ("activations", "dtype", "variance", "exact_variance", "output", "exact_output", "library_output")


def precision_sections(study: PrecisionStudy) -> list[Section]:
    """Sums, layer norm, and data types; records of earlier versions have no layer norm."""
    norms = [layer_norm_section(study.layer_norm)] if study.layer_norm else []
    return [accumulation_section(study.accumulation), *norms, dtype_section(study.dtypes)]


def accumulation_section(rows: Sequence[Accumulation]) -> Section:
    """The sums, their errors, and what the errors come from."""
    values = [{key: getattr(row, key) for key in ACCUMULATION} for row in rows]
    title = f"{rows[0].addend} added {rows[0].count} times: exactly {rows[0].exact:g}"
    table = make_table(title, [column(key) for key in ACCUMULATION], values)
    return Section(name="accumulation", tables=(table,), rows=[asdict(row) for row in rows])


def layer_norm_section(rows: Sequence[NormalisedActivations]) -> Section:
    """Variance and output of each kind of activations in each data type, beside the exact ones."""
    values = [
        asdict(row) | {
            "activations": f"{row.centre:g} ± {row.scale:g}" if row.centre else f"± {row.scale:g}",
            "variance_failure": f"beyond {row.dtype}",
            "output_failure": f"beyond {row.dtype}",
        }
        for row in rows
    ]  # fmt: skip
    title = "Layer norm with every operation in one data type"
    note = "PyTorch's layer norm has its statistics in fp32, whatever the data type of the activations."
    table = make_table(title, [column(key) for key in LAYER_NORM], values, [note])
    return Section(name="layer_norm", tables=(table,), rows=[asdict(row) for row in rows])


def dtype_section(rows: Sequence[ObservedDtype]) -> Section:
    """One row for each quantity of each model, one column for each device and autocast type."""
    values = [asdict(row) | {"setting": f"{row.precision} on {row.device}"} for row in rows]
    settings = dict.fromkeys(row["setting"] for row in values)
    columns = [column("model"), column("quantity"), *(across(setting, column("dtype")) for setting in settings)]
    findings = [
        f"In fp32 in every case: {', '.join(_always(rows, in_fp32=True)) or 'nothing'}.",
        f"In the autocast type in every case: {', '.join(_always(rows, in_fp32=False)) or 'nothing'}.",
    ]
    pivot = pivoted(values, ("model", "quantity"), "setting")
    table = make_table("Data types under autocast, as observed", columns, pivot, findings, findings=findings)
    return Section(name="dtypes", tables=(table,), rows=[asdict(row) for row in rows])


def _always(rows: Sequence[ObservedDtype], *, in_fp32: bool) -> list[str]:
    """Quantities that are in fp32, or in the autocast type, in every row that has them."""
    others = {row.quantity for row in rows if row.dtype != ("fp32" if in_fp32 else row.precision)}
    return [quantity for quantity in dict.fromkeys(row.quantity for row in rows) if quantity not in others]
