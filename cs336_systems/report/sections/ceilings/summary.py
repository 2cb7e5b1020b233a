"""What a machine reaches, for people: a summary beside the data sheet, what it means for a step, and all files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.analysis.warnings import LOOPS
from cs336_systems.config import Device
from cs336_systems.costs.hardware import find_device
from cs336_systems.report.columns import Column
from cs336_systems.report.doubts import codes_text, ratio_text, time_text
from cs336_systems.report.numbers import DOUBT, significant
from cs336_systems.report.section import Section, values_of
from cs336_systems.report.sections.ceilings.plots import ceilings_pictures
from cs336_systems.report.sections.ceilings.roofline import StepParts, parts_section
from cs336_systems.report.sections.ceilings.roofline_plot import draw_roofline
from cs336_systems.report.sections.ceilings.tables import (
    GIGA,
    MIB,
    TERA,
    Fields,
    launch_words,
    launches_section,
    products_section,
    promised_bandwidth,
    promised_flops,
    ratio,
    reductions_section,
    scaled,
    share_text,
    streams_section,
)
from cs336_systems.report.sections.study import write_study
from cs336_systems.report.table import Table, make_table
from cs336_systems.studies.ceilings_files import FILE_NAME
from cs336_systems.studies.ceilings_records import CeilingsStudy, Launch, ProductPrecision, Stream, Timing

BUSY = 1.5
"""Load for each CPU above which others must have been at work too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """One line of the summary."""

    name: str
    value: float
    """In SI units."""
    unit: str
    unit_value: float
    """What one of `unit` is in SI units."""
    promised: float | None = None
    """By the data sheet, in SI units."""
    reached_at: str = ""
    timing: Timing
    """Of the cell that set it."""


def ceilings_of(study: CeilingsStudy) -> list[Ceiling]:
    """The best of each kind, those without a time left out."""
    return [*_product_ceilings(study), *_memory_ceilings(study), *_launch_ceilings(study), *_reduce_ceilings(study)]


def _product_ceilings(study: CeilingsStudy) -> Iterator[Ceiling]:
    spec = find_device(study.device_name)
    for precision in dict.fromkeys(study.grid.precisions):
        best = study.best_product(precision)
        if best is not None and best.flops_per_s is not None:
            yield Ceiling(
                name=f"{precision} product",
                value=best.flops_per_s,
                unit="TFLOP/s",
                unit_value=TERA,
                promised=promised_flops(spec, precision),
                reached_at=best.shape.label,
                timing=best.timing,
            )


def _memory_ceilings(study: CeilingsStudy) -> Iterator[Ceiling]:
    for stream in Stream:
        largest = study.largest_stream(stream)
        if largest is not None and largest.bytes_per_s is not None:
            yield Ceiling(
                name=f"{stream} (memory)",
                value=largest.bytes_per_s,
                unit="GB/s",
                unit_value=GIGA,
                promised=promised_bandwidth(study),
                reached_at=f"{significant(largest.moved_bytes / MIB)} MiB",
                timing=largest.timing,
            )


def _launch_ceilings(study: CeilingsStudy) -> Iterator[Ceiling]:
    for launch in Launch:
        cell = next((cell for cell in study.launches if cell.launch is launch), None)
        if cell is not None and cell.timing.time_s is not None:
            yield Ceiling(
                name=f"kernel, {launch_words(study, launch)}",
                value=cell.timing.time_s,
                unit="µs",
                unit_value=1e-6,
                timing=cell.timing,
            )


def _reduce_ceilings(study: CeilingsStudy) -> Iterator[Ceiling]:
    timed = [(rate, cell) for cell in study.reductions if (rate := cell.bus_bytes_per_s) is not None]
    if timed:
        rate, best = max(timed, key=lambda pair: pair[0])
        yield Ceiling(
            name=f"all-reduce among {best.world_size} (bus)",
            value=rate,
            unit="GB/s",
            unit_value=GIGA,
            reached_at=f"{significant(best.num_bytes / MIB)} MiB",
            timing=best.timing,
        )


def ceilings_tables(study: CeilingsStudy, parts: StepParts | None = None) -> list[Table]:
    """The summary, then all cells of one kind after the other, then the parts of a step, where there are any."""
    return [table for section in ceilings_sections(study, parts) for table in section.tables]


def ceilings_sections(study: CeilingsStudy, parts: StepParts | None = None) -> list[Section]:
    """All subjects in the order to read them; one that there is nothing of is empty."""
    return [
        summary_section(study),
        products_section(study),
        streams_section(study),
        launches_section(study),
        reductions_section(study),
        parts_section(study, parts),
    ]


def summary_section(study: CeilingsStudy) -> Section:
    """The ceilings beside the data sheet, where it is known, with what they mean in sentences."""
    rows = ceilings_of(study)
    columns: list[Column[Ceiling]] = [
        Column("ceiling", numeric=False, text=lambda row: row.name),
        Column("measured", text=_measured),
        Column("unit", numeric=False, text=lambda row: row.unit),
    ]
    if any(row.promised for row in rows):
        columns += [
            Column("data sheet", drop_order=2, text=lambda row: scaled(row.promised, row.unit_value)),
            Column(
                "of data sheet", "%", drop_order=1, text=lambda row: share_text(row.value, row.promised, row.timing)
            ),
        ]
    columns.append(Column("reached at", numeric=False, drop_order=3, text=lambda row: row.reached_at))
    fields: Fields = {
        "ceiling": lambda row: row.name,
        "device_name": lambda _: study.device_name,
        "measured": lambda row: row.value / row.unit_value,
        "unit": lambda row: row.unit,
        "data_sheet": lambda row: ratio(row.promised, row.unit_value),
        "data_sheet_share": lambda row: ratio(row.value, row.promised),
        "reached_at": lambda row: row.reached_at,
        "measured_std": lambda row: None if row.timing.cv is None else row.value / row.unit_value * row.timing.cv,
        "warnings": lambda row: codes_text(row.timing.warnings),
    }
    table = make_table(f"Ceilings of {study.device_name}", columns, rows, _findings(study))
    return Section(name="results", tables=(table,), rows=values_of(fields, rows))


def _measured(row: Ceiling) -> str:
    value, cv = row.value / row.unit_value, row.timing.cv
    return time_text(value, None if cv is None else value * cv, row.timing.warnings)


def _findings(study: CeilingsStudy) -> Iterator[str]:
    """What the ceilings mean for a step."""
    rates, bandwidth, launch_s = study.product_ceilings, study.bandwidth(), study.launch_s(Launch.EAGER)
    if rates and bandwidth is not None:
        texts = [f"{name} {significant(rate / bandwidth, 3)}" for name, rate in rates.items()]
        yield f"FLOPs per byte below which memory, not arithmetic, is the limit: {', '.join(texts)}."
    sides = {name: _half_rate_side(study, name, rate) for name, rate in rates.items()}
    if any(sides.values()):
        texts = [f"{name} {side}" for name, side in sides.items() if side is not None]
        yield f"Square products run at half of their ceiling or more from these sides on: {', '.join(texts)}."
    if rates and launch_s is not None and study.grid.device is Device.CUDA:
        texts = [f"{name} {(launch_s * rate / 2) ** (1 / 3):,.0f}" for name, rate in rates.items()]
        yield (
            "Launched one by one, smaller square products than these take less time than their launch, at the ceiling: "
            f"{', '.join(texts)}."
        )
    yield from _padding(study)
    yield from _cached_adamw(study)
    yield from _company(study)
    yield from doubts(study)


def _half_rate_side(study: CeilingsStudy, precision: ProductPrecision, ceiling: float) -> int | None:
    """The least side from which on all square products run at half of the ceiling; None where all do, or none."""
    squares = {
        cell.shape.rows: rate
        for cell in study.products_of(precision)
        if cell.shape.is_square and (rate := cell.flops_per_s) is not None
    }
    slowest = max((side for side, rate in squares.items() if rate < ceiling / 2), default=None)
    return None if slowest is None else min((side for side in squares if side > slowest), default=None)


def _padding(study: CeilingsStudy) -> Iterator[str]:
    """What padding gains, for pairs of products of which one is called as the other with `, padded`."""
    by_name = {(cell.shape.name, cell.precision): cell for cell in study.products}
    for name in dict.fromkeys(shape.name for shape in study.grid.shapes):
        gains = {}
        for precision in dict.fromkeys(study.grid.precisions):
            pair = by_name.get((name, precision)), by_name.get((f"{name}, padded", precision))
            timings = [cell.timing for cell in pair if cell is not None and cell.timing.time_s is not None]
            if len(timings) == 2:
                slow_s, fast_s = (timing.time_s for timing in timings)
                gains[precision] = ratio_text(
                    ratio(slow_s, fast_s), timings, [warning for timing in timings for warning in timing.warnings]
                )
        if gains:
            yield f"{name}, times as fast with padded columns: {', '.join(f'{n} {gain}' for n, gain in gains.items())}."


def _cached_adamw(study: CeilingsStudy) -> Iterator[str]:
    """What moves the most bytes for each element cannot be faster than a copy if all of them come from memory."""
    copy, adamw = study.bandwidth(Stream.COPY), study.bandwidth(Stream.ADAMW)
    if copy is not None and adamw is not None and adamw > copy:
        on_cpu = study.grid.device is Device.CPU
        other = ", or the copy read what it was about to write over, which is not counted" if on_cpu else ""
        yield f"AdamW's rate is above that of a copy: some of what it moves was still in a cache{other}."


def doubts(study: CeilingsStudy) -> Iterator[str]:
    """What puts ceilings in doubt: the loops of the cells that set them differ."""
    texts = [
        f"{row.name} ({', '.join(warning.code for warning in row.timing.warnings)}; the slowest loop took "
        f"{100 * row.timing.loops.spread:.0f} % longer than the fastest)"
        for row in ceilings_of(study)
        if row.timing.loops is not None and row.timing.warnings
    ]
    if texts:
        yield (
            f"In doubt, and marked {DOUBT}: {', '.join(texts)}. Was the machine busy, or its clock changing? Measure "
            f"again, with {LOOPS.more}."
        )


def _company(study: CeilingsStudy) -> Iterator[str]:
    """What others did to the times on a CPU, where an operation waits for the slowest of its threads."""
    load, cpus = study.environment.load_1min, study.environment.cpu_count
    if study.grid.device is Device.CPU and load is not None and load > BUSY * cpus:
        yield f"The machine was busy (load {load:.1f} on {cpus} CPUs): it can reach more than this."


def write_ceilings(study: CeilingsStudy, directory: Path, parts: StepParts | None = None) -> list[Path]:
    """Write ceilings.json, each subject as tables, and plots/ into the directory, which is made; return the paths."""
    pictures = {**ceilings_pictures(study), "roofline": draw_roofline(study, parts)}
    return write_study(FILE_NAME, study, ceilings_sections(study, parts), pictures, directory)
