"""Every product, pass over memory, launch and all-reduce of a study of ceilings, as tables and as values."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cs336_systems.analysis.warnings import LOOPS
from cs336_systems.config import Device, Precision
from cs336_systems.costs.hardware import DeviceSpec, find_device
from cs336_systems.record import Status
from cs336_systems.report.columns import Column
from cs336_systems.report.doubts import codes_text, ratio_text, time_text
from cs336_systems.report.numbers import significant
from cs336_systems.report.section import Section, values_of
from cs336_systems.report.sections.study import doubt_notes
from cs336_systems.report.table import make_table
from cs336_systems.report.words import STATUS_WORDS
from cs336_systems.studies.ceilings_records import (
    CeilingsStudy,
    Launch,
    LaunchCell,
    ProductCell,
    ProductPrecision,
    ReduceCell,
    StreamCell,
    Timing,
)
from cs336_systems.studies.records import CellStatus

MIB = 2**20
GIGA, TERA = 1e9, 1e12

Cell = ProductCell | StreamCell | LaunchCell | ReduceCell
Fields = dict[str, Callable[[Any], object]]
"""Columns of a CSV file, and how to get each from a cell."""


def promised_flops(spec: DeviceSpec | None, precision: ProductPrecision) -> float | None:
    """The data sheet's peak of dense products, or None where it is not known."""
    if spec is None:
        return None
    if precision is ProductPrecision.FP8:
        return spec.fp8_peak_flops_per_s
    return spec.peak_flops_per_s.get(Precision(precision))


def promised_bandwidth(study: CeilingsStudy) -> float | None:
    """The data sheet's bytes per second, or None where they are not known."""
    spec = find_device(study.device_name)
    return None if spec is None else spec.memory_bandwidth_bytes_per_s


def launch_words(study: CeilingsStudy, launch: Launch) -> str:
    """How the kernel, or on a CPU the operation, was launched."""
    if study.grid.device is Device.CPU:
        return "one operation after the other"
    return "launched one by one" if launch is Launch.EAGER else "in a CUDA graph"


def products_section(study: CeilingsStudy) -> Section:
    """One table for each precision."""
    spec = find_device(study.device_name)
    tables = tuple(
        make_table(
            f"Matrix products, {precision}, {study.device_name}",
            _product_columns(study, promised_flops(spec, precision)),
            study.products_of(precision),
            _product_notes(study, precision),
            _has_no_time,
        )
        for precision in dict.fromkeys(study.grid.precisions)
    )
    fields: Fields = {
        "precision": lambda cell: cell.precision,
        "name": lambda cell: cell.shape.name,
        "rows": lambda cell: cell.shape.rows,
        "inner": lambda cell: cell.shape.inner,
        "columns": lambda cell: cell.shape.columns,
        **_timing_fields(study, "ms", 1e3),
        "flops": lambda cell: cell.shape.flops,
        "moved_mib": lambda cell: cell.shape.moved_bytes(cell.precision) / MIB,
        "flops_per_byte": _intensity,
        "tflops_per_s": lambda cell: ratio(cell.flops_per_s, TERA),
        "data_sheet_share": lambda cell: ratio(cell.flops_per_s, promised_flops(spec, cell.precision)),
        "best_share": lambda cell: ratio(cell.flops_per_s, study.product_ceiling(cell.precision)),
        **_doubt_fields("ms", 1e3),
    }
    return Section(name="products", tables=tables, rows=values_of(fields, study.products))


def _product_columns(study: CeilingsStudy, promised: float | None) -> list[Column[ProductCell]]:
    columns: list[Column[ProductCell]] = [
        Column("product", numeric=False, text=lambda cell: cell.shape.name),
        Column("rows x inner x columns", text=lambda cell: cell.shape.label),
        Column("intensity", "FLOP/byte", drop_order=3, text=lambda cell: significant(_intensity(cell), 3)),
        Column("time", "ms", text=lambda cell: _time(cell.timing, 1e3)),
        Column("rate", "TFLOP/s", text=lambda cell: rate_text(cell.flops_per_s, TERA, cell.timing)),
    ]
    if promised is not None:
        columns.append(
            Column(
                "of data sheet",
                "%",
                drop_order=2,
                text=lambda cell: share_text(cell.flops_per_s, promised, cell.timing),
            )
        )
    return [*columns, Column("of best", "%", drop_order=1, text=lambda cell: _of_best(study, cell))]


def _of_best(study: CeilingsStudy, cell: ProductCell) -> str:
    """Of the ceiling, in percent; that of the best itself is 100, however doubtful its time."""
    best = study.best_product(cell.precision)
    if best is None:
        return ""
    return share_text(cell.flops_per_s, best.flops_per_s, *(() if cell is best else (cell.timing, best.timing)))


def _intensity(cell: ProductCell) -> float:
    return cell.shape.flops / cell.shape.moved_bytes(cell.precision)


def _product_notes(study: CeilingsStudy, precision: ProductPrecision) -> Iterator[str]:
    yield (
        f"Random matrices, the second transposed as a linear layer's weight; median ± standard deviation of "
        f"{study.grid.loops} loops of {study.grid.loop_s:g} s or more. The matrices are the same each time, so that "
        "small ones stay in caches."
    )
    if study.grid.device is Device.CUDA:
        yield "What is about as short as a launch is repeated from a CUDA graph: the times are the device's alone."
    if precision is ProductPrecision.FP8:
        yield "fp8 is e4m3 with one scale for each matrix, fast accumulation and a result in bf16."
    yield from _timing_notes((cell.shape.label, cell.timing) for cell in study.products_of(precision))


def streams_section(study: CeilingsStudy) -> Section:
    """One table for copies, sums and AdamW."""
    promised = promised_bandwidth(study)
    columns: list[Column[StreamCell]] = [
        Column("pass", numeric=False, text=lambda cell: cell.stream),
        Column("moved", "MiB", text=lambda cell: significant(cell.moved_bytes / MIB)),
        Column("time", "ms", text=lambda cell: _time(cell.timing, 1e3)),
        Column("rate", "GB/s", text=lambda cell: rate_text(cell.bytes_per_s, GIGA, cell.timing)),
    ]
    if promised is not None:
        columns.append(
            Column(
                "of data sheet",
                "%",
                drop_order=1,
                text=lambda cell: share_text(cell.bytes_per_s, promised, cell.timing),
            )
        )
    fields: Fields = {
        "stream": lambda cell: cell.stream,
        "moved_mib": lambda cell: cell.moved_bytes / MIB,
        **_timing_fields(study, "ms", 1e3),
        "gb_per_s": lambda cell: ratio(cell.bytes_per_s, GIGA),
        "data_sheet_share": lambda cell: ratio(cell.bytes_per_s, promised),
        **_doubt_fields("ms", 1e3),
    }
    notes = [
        "Bytes read plus bytes written. copy: one tensor into another; read: its sum; adamw: PyTorch's fused AdamW on "
        "one flat tensor, 28 bytes for each parameter.",
        *([f"The last cache holds {significant(study.cache_bytes / MIB)} MiB."] if study.cache_bytes else ()),
        *_timing_notes((f"{cell.stream} of {cell.moved_bytes} bytes", cell.timing) for cell in study.streams),
    ]
    table = make_table(f"Passes over memory, {study.device_name}", columns, study.streams, notes, _has_no_time)
    return Section(name="bandwidth", tables=(table,), rows=values_of(fields, study.streams))


def launches_section(study: CeilingsStudy) -> Section:
    """What a kernel costs that does next to nothing."""
    columns: list[Column[LaunchCell]] = [
        Column("a kernel on one element", numeric=False, text=lambda cell: launch_words(study, cell.launch)),
        Column("time", "µs", text=lambda cell: _time(cell.timing, 1e6)),
    ]
    fields: Fields = {
        "launch": lambda cell: cell.launch,
        **_timing_fields(study, "us", 1e6),
        **_doubt_fields("us", 1e6),
    }
    notes = [
        "By the host's clock, over many in a row.",
        *_timing_notes((cell.launch, cell.timing) for cell in study.launches),
    ]
    table = make_table(f"Launches, {study.device_name}", columns, study.launches, notes, _has_no_time)
    return Section(name="launches", tables=(table,), rows=values_of(fields, study.launches))


def reductions_section(study: CeilingsStudy) -> Section:
    """All-reduces; empty where there was one process."""
    columns: list[Column[ReduceCell]] = [
        Column("tensor", "MiB", text=lambda cell: significant(cell.num_bytes / MIB)),
        Column("time", "ms", text=lambda cell: _time(cell.timing, 1e3)),
        Column(
            "algorithm",
            "GB/s",
            drop_order=1,
            text=lambda cell: rate_text(cell.algorithm_bytes_per_s, GIGA, cell.timing),
        ),
        Column("bus", "GB/s", text=lambda cell: rate_text(cell.bus_bytes_per_s, GIGA, cell.timing)),
    ]
    fields: Fields = {
        "tensor_mib": lambda cell: cell.num_bytes / MIB,
        "world_size": lambda cell: cell.world_size,
        **_timing_fields(study, "ms", 1e3),
        "algorithm_gb_per_s": lambda cell: ratio(cell.algorithm_bytes_per_s, GIGA),
        "bus_gb_per_s": lambda cell: ratio(cell.bus_bytes_per_s, GIGA),
        **_doubt_fields("ms", 1e3),
    }
    notes = [
        f"In fp32, by {'NCCL' if study.grid.device is Device.CUDA else 'gloo'}. algorithm: bytes of the tensor over "
        "the time; bus: 2 (n - 1) / n times that, what each process has to send.",
        *_timing_notes((f"{cell.num_bytes} bytes", cell.timing) for cell in study.reductions),
    ]
    title = f"All-reduce among {study.grid.world_size} processes, {study.device_name}"
    tables = (make_table(title, columns, study.reductions, notes, _has_no_time),) if study.reductions else ()
    return Section(name="all_reduce", tables=tables, rows=values_of(fields, study.reductions))


def _timing_fields(study: CeilingsStudy, unit: str, per_s: float) -> Fields:
    """What all kinds of cells have in their CSV."""
    return {
        "device_name": lambda _: study.device_name,
        "status": lambda cell: cell.timing.status,
        "error": lambda cell: cell.timing.failure.message if cell.timing.failure else None,
        f"median_{unit}": lambda cell: None if cell.timing.time_s is None else cell.timing.time_s * per_s,
        "loop_spread": lambda cell: cell.timing.loops.spread if cell.timing.loops else None,
    }


def _doubt_fields(unit: str, per_s: float) -> Fields:
    """The last columns of all kinds of cells."""

    def std(cell: Cell) -> float | None:
        found = cell.timing.loops.stdev_s if cell.timing.loops else None
        return None if found is None else found * per_s

    return {f"std_{unit}": std, "warnings": lambda cell: codes_text(cell.timing.warnings)}


def _has_no_time(cell: Cell) -> bool:
    return cell.timing.status is not CellStatus.OK


def _timing_notes(cells: Iterable[tuple[str, Timing]]) -> Iterator[str]:
    """What puts times in doubt; why there is none, each reason once."""
    named = list(cells)
    yield from doubt_notes([codes_text(timing.warnings) for _, timing in named if timing.loops], "rows", LOOPS)
    reasons: dict[str, list[str]] = {}
    for name, timing in named:
        if timing.failure is not None:
            reasons.setdefault(timing.failure.message.rstrip("."), []).append(name)
    for reason, names in reasons.items():
        yield f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}."


def _time(timing: Timing, per_s: float) -> str:
    if timing.loops is not None:
        std = timing.loops.stdev_s
        return time_text(timing.loops.median_s * per_s, None if std is None else std * per_s, timing.warnings)
    return "no kernel" if timing.status is CellStatus.UNAVAILABLE else STATUS_WORDS[Status(timing.status)]


def ratio(value: float | None, whole: float | None) -> float | None:
    """The value over the whole; None where either is not known."""
    return None if value is None or not whole else value / whole


def scaled(value: float | None, unit: float) -> str:
    """The value in so large a unit, to four digits; empty where it is not known."""
    return "" if value is None else significant(value / unit)


def rate_text(value: float | None, unit: float, timing: Timing) -> str:
    """A rate in so large a unit, to four digits or with its deviation where its time is in doubt."""
    return ratio_text(ratio(value, unit), [timing], timing.warnings, digits=4)


def share_text(value: float | None, whole: float | None, *timings: Timing) -> str:
    """The share in percent, to three digits or with its deviation where one of these times is in doubt."""
    share = ratio(value, whole)
    warnings = [warning for timing in timings for warning in timing.warnings]
    return ratio_text(None if share is None else 100 * share, timings, warnings)


def percent(value: float | None, whole: float | None) -> str:
    """The share in percent, to three digits; empty where it is not known."""
    share = ratio(value, whole)
    return "" if share is None else significant(100 * share, 3)
