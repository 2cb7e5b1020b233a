"""What a machine reaches, for people: a summary beside the data sheet, what it means for a step, and all files."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cs336_systems.analysis.warnings import LOOPS
from cs336_systems.config import Device
from cs336_systems.costs.calls import Collective
from cs336_systems.report.columns import Row, column
from cs336_systems.report.section import Section, Table, known, make_table
from cs336_systems.report.sections.ceilings.plots import bandwidth_chart, collective_chart, product_chart
from cs336_systems.report.sections.ceilings.roofline import parts_section, roofline_chart
from cs336_systems.report.sections.ceilings.tables import (
    collective_rows,
    collectives_section,
    kernels_section,
    launch_rows,
    launches_section,
    passes_section,
    product_rows,
    products_section,
    stream_rows,
    streams_section,
    timed,
)
from cs336_systems.report.sections.study import derived, write_study
from cs336_systems.report.words import DOUBT, significant
from cs336_systems.studies.ceilings_files import FILE_NAME
from cs336_systems.studies.ceilings_records import PADDED, CeilingsStudy, Launch, ProductPrecision, Stream
from cs336_systems.studies.step_parts import StepParts

COLUMNS = ("ceiling", "measured", "unit", "data_sheet", "data_sheet_share", "reached_at")
CSV_COLUMNS = ("ceiling", "device_name", "measured", "unit", "data_sheet", "data_sheet_share", "reached_at",
               "measured_std", "warnings")  # fmt: skip
PICTURES = ("products", "bandwidth", "collectives", "roofline")
BUSY = 1.5
"""Load for each CPU above which other programs must have been running too."""


def ceilings_of(study: CeilingsStudy) -> list[Row]:
    """The fastest cell of each kind that has a time; of passes over memory the largest, which fits no cache."""
    products, streams = timed(product_rows(study)), timed(stream_rows(study))
    by_precision = [[row for row in products if row["precision"] is name] for name in study.product_ceilings]
    by_stream = [[row for row in streams if row["stream"] is stream] for stream in Stream]
    best = [max(rows, key=lambda row: row["tflops_per_s"]) for rows in by_precision]
    largest = [max(rows, key=lambda row: row["moved_mib"]) for rows in by_stream if rows]
    collectives: dict[tuple[str, int], Row] = {}
    for row in sorted(timed(collective_rows(study)), key=lambda row: row["bus_gb_per_s"]):
        collectives[row["collective"], row["world_size"]] = row  # the fastest is the last
    order = list(Collective)
    return [
        *(_ceiling(row, f"{row['precision']} product", "tflops_per_s", "TFLOP/s", row["shape"]) for row in best),
        *(_ceiling(row, f"{row['stream']} (memory)", "gb_per_s", "GB/s", _mib(row["moved_mib"])) for row in largest),
        *(_ceiling(row, row["launched"], "median_us", "µs") for row in timed(launch_rows(study))),
        *(
            _ceiling(row, _bus(row), "bus_gb_per_s", "GB/s", _mib(row["tensor_mib"]))
            for row in sorted(collectives.values(), key=lambda row: (row["world_size"], order.index(row["collective"])))
        ),
    ]


def _ceiling(row: Row, name: str, key: str, unit: str, reached_at: str = "") -> Row:
    """The row of the cell that sets a ceiling, by the columns of the summary; `key` is that of the ceiling."""
    std = None if row["cv"] is None else row[key] * row["cv"]
    unknown = dict.fromkeys(("data_sheet", "data_sheet_share", "data_sheet_share_std", "data_sheet_share_is_doubted"))
    measured = {"measured": row[key], "measured_std": std, "unit": unit}
    return unknown | row | measured | {"ceiling": name, "reached_at": reached_at}


def _bus(row: Row) -> str:
    return f"{row['collective']} among {row['world_size']} (bus)"


def _mib(size_mib: float) -> str:
    return f"{significant(size_mib)} MiB"


def ceilings_tables(study: CeilingsStudy, parts: StepParts | None = None) -> list[Table]:
    """The summary, then all cells of one kind after the other, then the parts of a step, where there are any."""
    return [table for section in ceilings_sections(study, parts) for table in section.tables]


def ceilings_sections(study: CeilingsStudy, parts: StepParts | None = None) -> list[Section]:
    """All subjects in reading order; the section of a subject without values is empty."""
    return [
        summary_section(study),
        replace(products_section(study), pictures=product_chart(study)),
        replace(streams_section(study), pictures=bandwidth_chart(study)),
        launches_section(study),
        kernels_section(study),
        passes_section(study),
        replace(collectives_section(study), pictures=collective_chart(study)),
        replace(parts_section(study, parts), pictures=roofline_chart(study, parts)),
    ]


def summary_section(study: CeilingsStudy) -> Section:
    """The ceilings beside the data sheet, where it is known, with what they mean in sentences."""
    rows = ceilings_of(study)
    columns = known([column(key) for key in COLUMNS], rows)
    findings = list(_findings(study))
    table = make_table(f"Ceilings of {study.device_name}", columns, rows, findings, findings=findings)
    return Section(name="results", tables=(table,), rows=rows, keys=CSV_COLUMNS)


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
    yield from _busy_machine(study)
    yield from doubts(study)


def _half_rate_side(study: CeilingsStudy, precision: ProductPrecision, ceiling: float) -> int | None:
    """The least side from which all square matmuls reach half of the ceiling; None if all of them do, or none."""
    squares = {
        cell.shape.rows: rate
        for cell in study.products_of(precision)
        if cell.shape.is_square and (rate := cell.flops_per_s) is not None
    }
    slowest = max((side for side, rate in squares.items() if rate < ceiling / 2), default=None)
    return None if slowest is None else min((side for side in squares if side > slowest), default=None)


def _padding(study: CeilingsStudy) -> Iterator[str]:
    """What padding gains, for pairs of matmuls whose names differ by the suffix `, padded`."""
    by_name = {(row["name"], row["precision"]): row for row in timed(product_rows(study))}
    for name in dict.fromkeys(shape.name for shape in study.grid.shapes):
        gains = []
        for precision in dict.fromkeys(study.grid.precisions):
            slow, fast = by_name.get((name, precision)), by_name.get((f"{name}{PADDED}", precision))
            if slow is not None and fast is not None:
                gain = derived("speed_up", slow["median_ms"] / fast["median_ms"], slow, fast)
                gains.append(f"{precision} {column('speed_up').cell(gain)}")
        if gains:
            yield f"{name}, times as fast with padded columns: {', '.join(gains)}."


def _cached_adamw(study: CeilingsStudy) -> Iterator[str]:
    """A note if AdamW's rate is above a copy's, which is impossible if all bytes come from memory."""
    copy, adamw = study.bandwidth(Stream.COPY), study.bandwidth(Stream.ADAMW)
    if copy is not None and adamw is not None and adamw > copy:
        on_cpu = study.grid.device is Device.CPU
        other = ", or the copy read what it was about to write over, which is not counted" if on_cpu else ""
        yield f"AdamW's rate is above that of a copy: some of what it moves was still in a cache{other}."


def doubts(study: CeilingsStudy) -> Iterator[str]:
    """What puts ceilings in doubt: the loops of the cells that set them differ."""
    texts = [
        f"{row['ceiling']} ({row['warnings'].replace(';', ', ')}; the slowest loop took "
        f"{100 * row['loop_spread']:.0f} % longer than the fastest)"
        for row in ceilings_of(study)
        if row["warnings"]
    ]
    if texts:
        yield (
            f"In doubt, and marked {DOUBT}: {', '.join(texts)}. Was the machine busy, or its clock changing? Measure "
            f"again, with {LOOPS.more}."
        )


def _busy_machine(study: CeilingsStudy) -> Iterator[str]:
    """A note if other programs slowed a CPU, on which an operation waits for its slowest thread."""
    load, cpus = study.environment.load_1min, study.environment.cpu_count
    if study.grid.device is Device.CPU and load is not None and load > BUSY * cpus:
        yield f"The machine was busy (load {load:.1f} on {cpus} CPUs): it can reach more than this."


def write_ceilings(study: CeilingsStudy, directory: Path, parts: StepParts | None = None) -> list[Path]:
    """Write ceilings.json, each subject as tables, and plots/ into the directory, which is made; return the paths."""
    return write_study(FILE_NAME, study, ceilings_sections(study, parts), directory, PICTURES)
