"""The precision study for people: its tables, and below each what its values say."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from cs336_systems.config import Precision
from cs336_systems.report.columns import column
from cs336_systems.report.section import Section, make_table
from cs336_systems.report.sections.study import across, pivoted, write_study
from cs336_systems.report.words import rounded, scientific, significant
from cs336_systems.studies.precision_records import (
    MIXED_PRECISIONS,
    NORM_INPUT,
    NORM_OUTPUT,
    Accumulation,
    NormalisedActivations,
    ObservedDtype,
    PrecisionStudy,
)

ACCUMULATION = ("sum_dtype", "addend_dtype", "cast", "total", "error", "storage_error", "rounding_error",
                "growing_additions")  # fmt: skip


NUM_FINDINGS = 2
"""How many of the sentences below a table a page says first."""
LAYER_NORM = ("activations", "dtype", "variance", "exact_variance", "output", "exact_output", "library_output")


def accumulation_section(rows: Sequence[Accumulation]) -> Section:
    """The sums, their errors, and what the errors come from."""
    stored = [asdict(row) for row in rows]
    values = [{key: getattr(row, key) for key in ACCUMULATION} for row in rows]
    title = f"{rows[0].addend} added {rows[0].count} times: exactly {rows[0].exact:g}"
    notes = interpret_accumulation(rows)
    columns = [column(key) for key in ACCUMULATION]
    table = make_table(title, columns, values, notes, findings=notes[:NUM_FINDINGS])
    return Section(name="accumulation", tables=(table,), rows=stored)


def dtype_section(rows: Sequence[ObservedDtype]) -> Section:
    """One row for each quantity of each model, one column for each device and autocast type."""
    values = [asdict(row) | {"setting": f"{row.precision} on {row.device}"} for row in rows]
    settings = dict.fromkeys(row["setting"] for row in values)
    columns = [column("model"), column("quantity"), *(across(setting, column("dtype")) for setting in settings)]
    notes, pivot = interpret_dtypes(rows), pivoted(values, ("model", "quantity"), "setting")
    table = make_table("Data types under autocast, as observed", columns, pivot, notes, findings=notes[:NUM_FINDINGS])
    return Section(name="dtypes", tables=(table,), rows=[asdict(row) for row in rows])


def interpret_accumulation(rows: Sequence[Accumulation]) -> list[str]:
    """Say in sentences what the sums show."""
    return [*sum_sentences(rows), "The last column counts the additions that changed the sum."]


def sum_sentences(rows: Sequence[Accumulation], precisions: Sequence[Precision] = MIXED_PRECISIONS) -> list[str]:
    """How far the sums in these precisions are off, and why, and whether a cast changes that."""
    by_types = {(row.sum_dtype, row.addend_dtype, row.cast): row for row in rows}
    sentences = [
        sentence
        for low in precisions
        for sentence in _interpret_sums(by_types[low, low, False], by_types["fp32", low, False])
    ]
    if all(row.total == by_types[row.sum_dtype, row.addend_dtype, False].total for row in rows if row.cast):
        sentences.append("Casting each addend to fp32 first changes nothing: PyTorch does so by itself.")
    return sentences


def _interpret_sums(low: Accumulation, wide: Accumulation) -> Iterator[str]:
    share = "all" if math.isclose(wide.error, wide.storage_error, rel_tol=1e-3) else f"{wide.storage_error:+z.4f}"
    yield (
        f"The {low.sum_dtype} sum misses {low.exact:g} by {low.error:+z.4f}, an fp32 sum of the same addends by "
        f"{wide.error:+z.4f}, {share} of it from storing {low.addend} as {low.stored_addend:.6f}."
    )
    if low.growing_additions < low.count:
        yield (
            f"The {low.sum_dtype} sum stands still at {low.total:g} after {low.growing_additions} additions: what is "
            "added is too little to reach the next number."
        )


def interpret_dtypes(rows: Sequence[ObservedDtype]) -> list[str]:
    """Say in sentences what autocast leaves in fp32, what it does not, and what the device decides."""
    places = {
        precision: {
            (row.model, row.device, row.quantity): row.dtype == "fp32" for row in rows if row.precision == precision
        }
        for precision in MIXED_PRECISIONS
    }
    same = places[Precision.FP16] == places[Precision.BF16]
    sentences = [
        f"In fp32 in every case: {', '.join(_always(rows, in_fp32=True)) or 'nothing'}.",
        f"In the autocast type in every case: {', '.join(_always(rows, in_fp32=False)) or 'nothing'}.",
        f"fp16 and bf16 are used in {'the same' if same else 'different'} places.",
    ]
    devices = dict.fromkeys(row.device for row in rows)
    for device in devices if len(devices) > 1 else ():
        here = _always([row for row in rows if row.device is device], in_fp32=True)
        if only_here := [quantity for quantity in here if quantity not in _always(rows, in_fp32=True)]:
            sentences.append(f"In fp32 on {device} only: {', '.join(only_here)}.")
    return [*sentences, *_interpret_layer_norm(rows)]


def _interpret_layer_norm(rows: Sequence[ObservedDtype]) -> Iterator[str]:
    dtypes = {(row.device, row.precision, row.quantity): row.dtype for row in rows if row.model == "ToyModel"}
    for (device, precision, quantity), made in dtypes.items():
        if quantity == NORM_OUTPUT:
            yield f"Layer norm on {device}: {dtypes[device, precision, NORM_INPUT]} in, {made} out."


def _always(rows: Sequence[ObservedDtype], *, in_fp32: bool) -> list[str]:
    """Quantities that are in fp32, or in the autocast type, in every row that has them."""
    others = {row.quantity for row in rows if row.dtype != ("fp32" if in_fp32 else row.precision)}
    return [quantity for quantity in dict.fromkeys(row.quantity for row in rows) if quantity not in others]


def layer_norm_section(rows: Sequence[NormalisedActivations]) -> Section:
    """Variance and output of each kind of activations in each data type, beside the exact ones."""
    values = [
        asdict(row) | {
            "activations": _activations(row),
            "variance_failure": f"beyond {row.dtype}",
            "output_failure": f"beyond {row.dtype}",
        }
        for row in rows
    ]  # fmt: skip
    notes, columns = interpret_layer_norm(rows), [column(key) for key in LAYER_NORM]
    title = "Layer norm with every operation in one data type"
    table = make_table(title, columns, values, notes, findings=notes[:NUM_FINDINGS])
    return Section(name="layer_norm", tables=(table,), rows=[asdict(row) for row in rows])


def _activations(row: NormalisedActivations) -> str:
    return f"{row.centre:g} ± {row.scale:g}" if row.centre else f"± {row.scale:g}"


def interpret_layer_norm(rows: Sequence[NormalisedActivations]) -> list[str]:
    """Say in sentences which values each data type cannot hold, and how far its outputs are off."""
    sentences = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        own = [row for row in rows if row.dtype == dtype]
        lost = [row for row in own if is_lost(row)]
        sentences += [loss_words(row) for row in lost]
        errors = [abs(row.error) for row in own if row not in lost and row.error is not None]
        if errors:
            others = "Its other outputs" if lost else f"In {dtype} all outputs"
            sentences.append(f"{others} are at most {significant(100 * max(errors), 2)} % off.")
    return [*sentences, *library_words(rows)]


def is_lost(row: NormalisedActivations) -> bool:
    """Whether the data type cannot hold the variance."""
    return not row.variance


def loss_words(row: NormalisedActivations) -> str:
    """Which part of the computation the data type cannot hold, and what becomes of the output."""
    if row.variance is None:
        what = f"the square of a deviation, {row.scale**2:g}, is beyond its largest number"
    elif row.output == 0:
        what = "both activations are stored as the same number, so no variance is left"
    else:
        what = f"the variance, {row.exact_variance:.2g}, is below its smallest number, so epsilon alone is left"
    found = "has no value" if row.output is None else f"is {rounded(row.output)} instead of {rounded(row.exact_output)}"
    return f"In {row.dtype}, of activations {_activations(row)}, {what}: the output {found}."


def library_words(rows: Sequence[NormalisedActivations]) -> Iterator[str]:
    """What PyTorch's own layer norm makes of the cases whose variance the data type cannot hold."""
    beyond = [row for row in rows if row.variance is None and row.library_error is not None]
    if beyond:
        error = max(abs(row.library_error or 0.0) for row in beyond)
        yield (
            f"Where {beyond[0].dtype} overflows, the output of PyTorch's layer norm is off by {scientific(error)} of "
            "the exact one: its statistics are in fp32. It cannot recover digits that the activations themselves lack."
        )


def precision_sections(study: PrecisionStudy) -> list[Section]:
    """Sums, layer norm, and data types; records of earlier versions have no layer norm."""
    norms = [layer_norm_section(study.layer_norm)] if study.layer_norm else []
    return [accumulation_section(study.accumulation), *norms, dtype_section(study.dtypes)]


def write_precision(study: PrecisionStudy, directory: Path) -> None:
    """Write precision.json, and `accumulation`, `layer_norm` and `dtypes` in every format, into the directory."""
    write_study("precision.json", study, precision_sections(study), directory)
