"""The precision study for people: two tables, and below each what its values say."""

from collections.abc import Sequence

from cs336_systems.config import Precision
from cs336_systems.precision_study import MIXED_PRECISIONS, Accumulation, ObservedDtype
from cs336_systems.report.formats import Column, Heading, Table, make_table

_ACCUMULATION_COLUMNS: tuple[Column[Accumulation], ...] = (
    Column(Heading("sum", numeric=False), lambda row: row.sum_dtype),
    Column(Heading("addend", numeric=False), lambda row: row.addend_dtype),
    Column(Heading("cast", numeric=False), lambda row: "explicit" if row.cast else ""),
    Column(Heading("result"), lambda row: f"{row.total:.4f}"),
    Column(Heading("error"), lambda row: f"{row.error:+.4f}"),
    Column(Heading("from storing"), lambda row: f"{row.storage_error:+.4f}"),
    Column(Heading("from rounding"), lambda row: f"{row.rounding_error:+.4f}"),
    Column(Heading("last change"), lambda row: f"{row.growing_additions}"),
)


def accumulation_table(rows: Sequence[Accumulation]) -> Table:
    """The sums, their errors, and what the errors come from."""
    title = f"{rows[0].addend} added {rows[0].count} times: exactly {rows[0].exact:g}"
    return make_table(title, _ACCUMULATION_COLUMNS, rows, interpret_accumulation(rows))


def dtype_table(rows: Sequence[ObservedDtype]) -> Table:
    """One row for each quantity of each model, one column for each device and autocast type."""
    settings = list(dict.fromkeys((row.device, row.precision) for row in rows))
    dtypes = {(row.model, row.quantity, row.device, row.precision): row.dtype for row in rows}
    quantities = dict.fromkeys((row.model, row.quantity) for row in rows)
    return Table(
        title="Data types under autocast, as observed",
        headings=(
            Heading("model", numeric=False),
            Heading("quantity", numeric=False),
            *(Heading(f"{precision} on {device}", numeric=False) for device, precision in settings),
        ),
        rows=tuple((*key, *(dtypes.get((*key, *setting), "") for setting in settings)) for key in quantities),
        notes=tuple(interpret_dtypes(rows)),
    )


def interpret_accumulation(rows: Sequence[Accumulation]) -> list[str]:
    """Say in sentences what the sums show."""
    sentences = []
    by_types = {(row.sum_dtype, row.addend_dtype, row.cast): row for row in rows}
    for low in ("fp16", "bf16"):
        narrow, wide, cast = by_types[low, low, False], by_types["fp32", low, False], by_types["fp32", low, True]
        moral = "the sum needs the precision, not what is added" if abs(narrow.error) > 2 * abs(wide.error) else ""
        sentences.append(
            f"A {low} sum misses {narrow.exact:g} by {narrow.error:+.4f}; an fp32 sum of the same {low} addends by "
            f"{wide.error:+.4f}, of which {wide.storage_error:+.4f} is {narrow.addend} being stored as "
            f"{narrow.stored_addend:.6f}" + (f": {moral}." if moral else ".")
        )
        if narrow.growing_additions < narrow.count:
            sentences.append(
                f"The {low} sum stands still at {narrow.total:g} after {narrow.growing_additions} of {narrow.count} "
                f"additions: {narrow.addend} is less than half the distance to the next {low} number."
            )
        if wide.total == cast.total:
            sentences.append(f"Casting each {low} addend to fp32 first changes nothing: PyTorch does so by itself.")
    return sentences


def interpret_dtypes(rows: Sequence[ObservedDtype]) -> list[str]:
    """Say in sentences which quantities autocast leaves in fp32, which it does not, and where that depends."""
    kept, lowered = (
        [quantity for quantity in dict.fromkeys(row.quantity for row in rows) if all(map(holds, _of(rows, quantity)))]
        for holds in (lambda row: row.dtype == "fp32", lambda row: row.dtype == row.precision)
    )
    sentences = [
        f"In fp32 in every case: {', '.join(kept) or 'nothing'}.",
        f"In the autocast type in every case: {', '.join(lowered) or 'nothing'}.",
    ]
    places = {
        precision: [
            (row.model, row.device, row.quantity, row.dtype == "fp32") for row in rows if row.precision is precision
        ]
        for precision in MIXED_PRECISIONS
    }
    same = places[Precision.FP16] == places[Precision.BF16]
    sentences.append(f"fp16 and bf16 are used in {'the same' if same else 'different'} places.")
    for (model, quantity), group in _group(rows).items():
        if len({row.dtype == "fp32" for row in group}) > 1:
            found = dict.fromkeys(f"{row.dtype} on {row.device}" for row in group)
            sentences.append(f"{model}, {quantity}: {', '.join(found)}.")
    return sentences


def _of(rows: Sequence[ObservedDtype], quantity: str) -> list[ObservedDtype]:
    return [row for row in rows if row.quantity == quantity]


def _group(rows: Sequence[ObservedDtype]) -> dict[tuple[str, str], list[ObservedDtype]]:
    groups: dict[tuple[str, str], list[ObservedDtype]] = {}
    for row in rows:
        groups.setdefault((row.model, row.quantity), []).append(row)
    return groups
