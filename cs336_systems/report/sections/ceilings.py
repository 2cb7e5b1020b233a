"""What a machine reaches, for people: a summary beside the data sheet, and every cell."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from ...analysis.warnings import LOOPS
from ...config import Device
from ...costs.communication import sent_share
from ...costs.hardware import find_device
from ...studies.ceilings_records import CeilingsStudy
from ...studies.ceilings_rows import (
    QUEUED_BYTES,
    CollectiveCell,
    LaunchCell,
    LaunchKind,
    ProductCell,
    Stream,
    StreamCell,
    TimedRow,
)
from ..columns import Column, Row, column, columns_of
from ..section import Section, Table, known, make_table
from ..words import GIGA, MIB, TERA, mixed_notes, ratio, significant
from .study import (
    derived,
    doubt_notes,
    doubts_of,
    end_of,
    has_failed,
    missing_notes,
    promised_bandwidth,
)

SUMMARY = ("ceiling", "measured", "unit", "data_sheet", "data_sheet_share", "reached_at")
_ENDS = ("device_name", "status", "error", "median_ms", "loop_spread")
CSV_COLUMNS = {
    "results": (
        "ceiling",
        "device_name",
        "measured",
        "unit",
        "data_sheet",
        "data_sheet_share",
        "reached_at",
        "measured_std",
        "warnings",
    ),
    "products": (
        "precision",
        "name",
        "rows",
        "inner",
        "columns",
        *_ENDS,
        "flops",
        "moved_mib",
        "flops_per_byte",
        "tflops_per_s",
        "data_sheet_share",
        "best_share",
        "std_ms",
        "warnings",
    ),
    "bandwidth": (
        "stream",
        "moved_mib",
        *_ENDS,
        "gb_per_s",
        "data_sheet_share",
        "std_ms",
        "warnings",
    ),
    "launches": (
        "launch",
        "device_name",
        "status",
        "error",
        "median_us",
        "loop_spread",
        "std_us",
        "warnings",
    ),
    "collectives": (
        "collective",
        "tensor_mib",
        "world_size",
        *_ENDS,
        "algorithm_gb_per_s",
        "bus_gb_per_s",
        "std_ms",
        "warnings",
    ),
}
"""Columns of the CSV file of each section."""
LAUNCHES = (column("launched"), column("median_us"))
CLOCK = "By the host's clock, over many in a row."


def ceilings_sections(study: CeilingsStudy) -> list[Section]:
    """All subjects in reading order; the section of a subject without values is empty."""
    products = product_rows(study)
    streams = [_stream(study, cell) for cell in study.streams]
    launches = [_launch(study, cell) for cell in study.launches]
    collectives = [_collective(study, cell) for cell in study.reductions]
    ceilings = _best(products) + _best(streams, "moved_mib") + _best(launches) + _best(collectives)
    return [
        _section("results", ceilings, _summary_table(study, ceilings)),
        _section("products", products, *_product_tables(study, products)),
        _section("bandwidth", streams, _stream_table(study, streams)),
        _section("launches", launches, _table(study, "Launches", LAUNCHES, launches, CLOCK)),
        _section("collectives", collectives, *_collective_tables(study, collectives)),
    ]


def caveats_of_ceilings(study: CeilingsStudy) -> list[str]:
    """Notes on products and streams of the grid that were not measured, and on unlike conditions.
    Other cells are not counted: later versions measure more of them.
    """
    wanted = sum(isinstance(cell.rows[0], ProductCell | StreamCell) for cell in study.grid.cells())
    environments = [study.environment, *study.other_environments]
    missing = missing_notes(len(study.products) + len(study.streams), wanted)
    return [*missing, *mixed_notes(environments)]


def _section(name: str, rows: Sequence[Row], *tables: Table) -> Section:
    """A section of the study of ceilings, with the columns that its CSV file has by its name."""
    return Section(name=name, tables=tables, rows=rows, keys=CSV_COLUMNS[name])


def _row(
    study: CeilingsStudy, cell: TimedRow, label: str, unit: str = "ms", per_s: float = 1e3
) -> Row:
    """The values that a row of any kind of cell has: how the cell ended, its median time in `unit`
    (of which a second has `per_s`), and what puts the time in doubt.
    """
    timing = cell.timing
    row: Row = {
        "label": label,
        "device_name": study.device_name,
        **end_of(timing.status, timing.failure),
        f"median_{unit}": None,
        f"std_{unit}": None,
        "loop_spread": None,
        "cv": None,
        **doubts_of(timing.warnings),
    }
    if loops := timing.loops:
        row[f"median_{unit}"] = loops.median_s * per_s
        row["loop_spread"], row["cv"] = loops.spread, loops.cv
        if loops.stdev_s is not None:
            row[f"std_{unit}"] = loops.stdev_s * per_s
    return row


def _as_ceiling(row: Row, ceiling: str, key: str, unit: str, reached_at: str = "") -> Row:
    """The row with the columns of the summary, which shows it if it is the best of its ceiling;
    `key` is its rate's.
    """
    measured, cv = row[key], row["cv"]
    unknown: Row = {"data_sheet": None, **derived("data_sheet_share", None)}
    summary = {
        "ceiling": ceiling,
        "measured": measured,
        "unit": unit,
        "reached_at": reached_at,
        "measured_std": None if measured is None or cv is None else measured * cv,
    }
    return unknown | row | summary


def _timed(rows: Sequence[Row]) -> list[Row]:
    """The rows of cells that were measured, and so have a time."""
    return [row for row in rows if row["loop_spread"] is not None]


def _best(rows: Sequence[Row], key: str = "measured") -> list[Row]:
    """Of the rows with a time, the one with the largest value under `key` for each ceiling."""
    best: dict[str, Row] = {}
    for row in _timed(rows):
        ceiling = row["ceiling"]
        best[ceiling] = max(best.get(ceiling, row), row, key=itemgetter(key))
    return list(best.values())


def product_rows(study: CeilingsStudy) -> list[Row]:
    """A row for each matmul. Its share of the best is in doubt if either time is, but not for
    the best itself.
    """
    rows = [_product(study, cell) for cell in study.products]
    best = {row["ceiling"]: row for row in _best(rows)}
    for row in rows:
        other = best.get(row["ceiling"], row)
        pair = () if other is row else (row, other)
        row |= derived("best_share", ratio(row["flops_per_s"], other["flops_per_s"]), *pair)
    return rows


def _product(study: CeilingsStudy, cell: ProductCell) -> Row:
    """The row of one matmul, with its rate and its share of the data sheet's peak."""
    shape = cell.shape
    rate = cell.flops_per_s
    timed = _row(study, cell, shape.label)
    spec = find_device(study.device_name)
    promised = None if spec is None else spec.peak(cell.precision)
    moved_bytes = shape.moved_bytes(cell.precision)
    row = {
        "precision": cell.precision,
        "name": shape.name,
        "shape": shape.label,
        "flops_per_s": rate,
        "rows": shape.rows,
        "inner": shape.inner,
        "columns": shape.columns,
        **timed,
        "flops": shape.flops,
        "moved_mib": moved_bytes / MIB,
        "flops_per_byte": shape.flops / moved_bytes,
        **derived("tflops_per_s", ratio(rate, TERA), timed),
        "data_sheet": ratio(promised, TERA),
        **derived("data_sheet_share", ratio(rate, promised), timed),
    }
    return _as_ceiling(row, f"{cell.precision} product", "tflops_per_s", "TFLOP/s", shape.label)


def _stream(study: CeilingsStudy, cell: StreamCell) -> Row:
    """The row of one pass over memory, with its bandwidth."""
    promised = promised_bandwidth(study.device_name)
    rate = cell.timing.rate(cell.moved_bytes)
    timed = _row(study, cell, f"{cell.stream} of {cell.moved_bytes} bytes")
    row = {
        "stream": cell.stream,
        "moved_mib": cell.moved_bytes / MIB,
        **timed,
        **derived("gb_per_s", ratio(rate, GIGA), timed),
        "data_sheet": ratio(promised, GIGA),
        **derived("data_sheet_share", ratio(rate, promised), timed),
    }
    return _as_ceiling(row, f"{cell.stream} (memory)", "gb_per_s", "GB/s", _mib(row["moved_mib"]))


def _launch(study: CeilingsStudy, cell: LaunchCell) -> Row:
    """The row of one kind of launch, with the median time in microseconds."""
    launched = launch_words(study, cell.launch)
    row = _row(study, cell, str(cell.launch), "us", 1e6)
    row |= {"launch": cell.launch, "launched": launched}
    return _as_ceiling(row, launched, "median_us", "µs")


def launch_words(study: CeilingsStudy, launch: LaunchKind) -> str:
    """In words, what kind of launch was timed and how."""
    if study.grid.device is Device.CPU:
        return "an operation on one element"
    return {
        LaunchKind.EAGER: "a kernel on one element, launched one by one",
        LaunchKind.STEP: "a call of a training step: an operation or a view",
        LaunchKind.MIXED_STEP: "the same in bf16, with PyTorch's attention and fused AdamW",
        LaunchKind.INFERENCE: "the same of a forward pass without gradients",
        LaunchKind.GRAPH: "a kernel on one element, in a CUDA graph",
        LaunchKind.QUEUED: f"a copy of {QUEUED_BYTES // MIB} MiB, launched one by one",
    }[launch]


def _collective(study: CeilingsStudy, cell: CollectiveCell) -> Row:
    """The row of one collective, with its bandwidth as nccl-tests counts it."""
    timed = _row(study, cell, f"{cell.collective} of {cell.num_bytes} bytes")
    # what each process of a ring sends, as in nccl-tests, except for the broadcast
    sent_bytes = cell.num_bytes * sent_share(cell.collective, cell.world_size)
    row = {
        "collective": cell.collective,
        "tensor_mib": cell.num_bytes / MIB,
        "world_size": cell.world_size,
        **timed,
        **derived("algorithm_gb_per_s", ratio(cell.timing.rate(cell.num_bytes), GIGA), timed),
        **derived("bus_gb_per_s", ratio(cell.timing.rate(sent_bytes), GIGA), timed),
    }
    ceiling = f"{cell.collective} among {cell.world_size} (bus)"
    return _as_ceiling(row, ceiling, "bus_gb_per_s", "GB/s", _mib(row["tensor_mib"]))


def _mib(size_mib: float) -> str:
    """A size in MiB as text with its unit."""
    return f"{significant(size_mib)} MiB"


def _table(
    study: CeilingsStudy, title: str, columns: Sequence[Column], rows: Sequence[Row], *notes: str
) -> Table:
    """The columns that have values; what puts times in doubt, and why there are none, each
    reason once.
    """
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["error"] is not None:
            reasons.setdefault(row["error"].rstrip("."), []).append(row["label"])
    failures = []
    for reason, labels in reasons.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        failures.append(f"{labels[0]}{more}: {reason}.")
    doubts = doubt_notes([row["warnings"] for row in _timed(rows)], "rows", LOOPS)
    title = f"{title}, {study.device_name}"
    return make_table(title, known(columns, rows), rows, [*notes, *doubts, *failures], has_failed)


def _product_tables(study: CeilingsStudy, rows: Sequence[Row]) -> list[Table]:
    """A table of matmuls for each precision."""
    columns = (
        column("name", name="layer", about="The layer whose matrix multiplication it is."),
        column("shape"),
        column("flops_per_byte"),
        column("median_ms"),
        column("tflops_per_s"),
        column("data_sheet_share", drop_order=2),
        column("best_share"),
    )
    note = (
        "Random matrices, the second transposed as a linear layer's weight; median ± standard "
        f"deviation of {study.grid.loops} loops of {study.grid.loop_s:g} s or more. The matrices "
        "are the same each time, so that small ones stay in caches."
    )
    tables = []
    for name in dict.fromkeys(row["precision"] for row in rows):
        products = [row for row in rows if row["precision"] is name]
        tables.append(_table(study, f"Matrix multiplications, {name}", columns, products, note))
    return tables


def _stream_table(study: CeilingsStudy, rows: Sequence[Row]) -> Table:
    """The table of passes over memory: copies, sums and AdamW."""
    columns = columns_of("stream", "moved_mib", "median_ms", "gb_per_s", "data_sheet_share")
    notes = [
        "Bytes read plus bytes written. copy: one tensor into another; read: its sum; adamw: "
        "PyTorch's fused AdamW on one flat tensor, 28 bytes for each parameter."
    ]
    if study.cache_bytes:
        notes.append(f"The last cache holds {_mib(study.cache_bytes / MIB)}.")
    return _table(study, "Passes over memory", columns, rows, *notes)


def _collective_tables(study: CeilingsStudy, rows: Sequence[Row]) -> list[Table]:
    """A table for each number of processes; none where there was one process."""
    columns = columns_of(
        "collective", "tensor_mib", "median_ms", "algorithm_gb_per_s", "bus_gb_per_s"
    )
    backend = "NCCL" if study.grid.device is Device.CUDA else "gloo"
    note = (
        f"In fp32, by {backend}; push by copy engines. tensor: the whole, of which each process "
        "has a part in an all-gather and a reduce-scatter. algorithm: its bytes over the time; "
        "bus: what each process of a ring has to send, (n - 1) / n of it, and twice that for an "
        "all-reduce."
    )
    tables = []
    for ranks in dict.fromkeys(row["world_size"] for row in rows):
        collectives = [row for row in rows if row["world_size"] == ranks]
        title = f"Collectives among {ranks} processes"
        tables.append(_table(study, title, columns, collectives, note))
    return tables


def _summary_table(study: CeilingsStudy, ceilings: Sequence[Row]) -> Table:
    """The ceilings beside the data sheet, where it is known, with what they mean in sentences."""
    findings = list(_findings(study, {row["ceiling"]: row for row in ceilings}))
    columns = known(columns_of(*SUMMARY), ceilings)
    notes = [
        *findings,
        *caveats_of_ceilings(study),
        *doubt_notes([row["warnings"] for row in ceilings], "ceilings", LOOPS),
    ]
    return make_table(
        f"Ceilings of {study.device_name}", columns, ceilings, notes, findings=findings
    )


def _findings(study: CeilingsStudy, ceilings: Mapping[str, Row]) -> Iterator[str]:
    """Sentences on what the measured ceilings mean for a training step."""
    rates = {}
    for row in ceilings.values():
        if "flops_per_s" in row:
            rates[row["precision"]] = row["flops_per_s"]
    copy = ceilings.get(f"{Stream.COPY} (memory)")
    launch_s = study.launch_s(LaunchKind.EAGER)
    if rates and copy is not None:
        bytes_per_s = copy["gb_per_s"] * GIGA
        texts = [f"{name} {significant(rate / bytes_per_s, 3)}" for name, rate in rates.items()]
        yield (
            f"FLOPs per byte below which memory, not arithmetic, is the limit: {', '.join(texts)}."
        )
    if rates and launch_s is not None and study.grid.device is Device.CUDA:
        texts = []
        for name, rate in rates.items():
            side = (launch_s * rate / 2) ** (1 / 3)  # of a matrix whose product takes a launch
            texts.append(f"{name} {side:,.0f}")
        yield (
            "Launched one by one, multiplications of smaller square matrices take less time than "
            f"their launch, at the ceiling: {', '.join(texts)}."
        )
