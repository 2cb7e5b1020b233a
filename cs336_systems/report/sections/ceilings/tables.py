"""Every product, pass over memory, launch and collective of a study of ceilings, as tables and as values."""

from collections.abc import Iterator, Sequence

from cs336_systems.analysis.warnings import LOOPS
from cs336_systems.config import Device, Precision
from cs336_systems.costs.calls import Collective
from cs336_systems.costs.hardware import DeviceSpec, find_device
from cs336_systems.record import Status
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.section import Section, Table, known, make_table
from cs336_systems.report.sections.study import derived, doubt_notes, doubts_of, end_of, promised_bandwidth
from cs336_systems.report.words import GIGA, MIB, TERA, ratio, significant
from cs336_systems.studies.ceilings_records import QUEUED_BYTES, CeilingsStudy, Launch, ProductCell, ProductPrecision
from cs336_systems.studies.loops import Timing

PRODUCTS = (
    "precision", "name", "rows", "inner", "columns", "device_name", "status", "error", "median_ms", "loop_spread",
    "flops", "moved_mib", "flops_per_byte", "tflops_per_s", "data_sheet_share", "best_share", "std_ms", "warnings",
)  # fmt: skip
STREAMS = ("stream", "moved_mib", "device_name", "status", "error", "median_ms", "loop_spread", "gb_per_s",
           "data_sheet_share", "std_ms", "warnings")  # fmt: skip
KERNELS = (
    "precision", "form", "batch", "rows", "inner", "columns", "device_name", "status", "error", "median_ms",
    "loop_spread", "tflops_per_s", "std_ms", "warnings",
)  # fmt: skip
PASSES = ("how", "moved_mib", "device_name", "status", "error", "median_ms", "loop_spread", "gb_per_s", "std_ms",
          "warnings")  # fmt: skip
LAUNCHES = ("launch", "device_name", "status", "error", "median_us", "loop_spread", "std_us", "warnings")
COLLECTIVES = ("collective", "tensor_mib", "world_size", "device_name", "status", "error", "median_ms", "loop_spread",
              "algorithm_gb_per_s", "bus_gb_per_s", "std_ms", "warnings")  # fmt: skip
"""Columns of the CSV files."""


def promised_flops(spec: DeviceSpec | None, precision: ProductPrecision) -> float | None:
    """The data sheet's peak of dense products, or None where it is not known."""
    if spec is None:
        return None
    if precision is ProductPrecision.FP8:
        return spec.fp8_peak_flops_per_s
    return spec.peak_flops_per_s.get(Precision(precision))


def launch_words(study: CeilingsStudy, launch: Launch) -> str:
    """What was launched, and how."""
    if study.grid.device is Device.CPU:
        return "an operation on one element"
    return {
        Launch.EAGER: "a kernel on one element, launched one by one",
        Launch.STEP: "a call of a training step: an operation or a view",
        Launch.GRAPH: "a kernel on one element, in a CUDA graph",
        Launch.QUEUED: f"a copy of {QUEUED_BYTES // MIB} MiB, launched one by one",
    }[launch]


def timing_values(timing: Timing, unit: str = "ms", per_s: float = 1e3) -> Row:
    """How a cell ended, its time in that unit, and what puts it in doubt."""
    loops = timing.loops
    return {
        **end_of(timing.status, timing.failure),
        f"median_{unit}": None if loops is None else loops.median_s * per_s,
        f"std_{unit}": None if loops is None or loops.stdev_s is None else loops.stdev_s * per_s,
        "loop_spread": None if loops is None else loops.spread,
        "cv": timing.cv,
        **doubts_of(timing.warnings),
    }


def timed(rows: Sequence[Row]) -> list[Row]:
    """The rows that have a time."""
    return [row for row in rows if row["loop_spread"] is not None]


def _table(study: CeilingsStudy, title: str, columns: Sequence[Column], rows: Sequence[Row], *notes: str) -> Table:
    """The columns that have values; what puts times in doubt, and why there are none, each reason once."""

    def all_notes() -> Iterator[str]:
        yield from notes
        yield from doubt_notes([row["warnings"] for row in timed(rows)], "rows", LOOPS)
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row["error"] is not None:
                reasons.setdefault(row["error"].rstrip("."), []).append(row["label"])
        for reason, labels in reasons.items():
            yield f"{labels[0]}{f' and {len(labels) - 1} more' if labels[1:] else ''}: {reason}."

    title = f"{title}, {study.device_name}"
    return make_table(title, known(columns, rows), rows, all_notes(), lambda row: row["status"] is not Status.OK)


def products_section(study: CeilingsStudy) -> Section:
    """One table for each precision."""
    rows = product_rows(study)
    columns = (column("name", name="product", about="The layer whose product it is."), column("shape"),
               column("flops_per_byte"), column("median_ms"), column("tflops_per_s"),
               column("data_sheet_share", drop_order=2), column("best_share"))  # fmt: skip
    loops = (
        "Random matrices, the second transposed as a linear layer's weight; median ± standard deviation of "
        f"{study.grid.loops} loops of {study.grid.loop_s:g} s or more. The matrices are the same each time, so that "
        "small ones stay in caches."
    )
    graph = "What is about as short as a launch is repeated from a CUDA graph: the times are the device's alone."
    fp8 = "fp8 is e4m3 with one scale for each matrix, fast accumulation and a result in bf16."
    tables = []
    for precision in dict.fromkeys(study.grid.precisions):
        own = [row for row in rows if row["precision"] is precision]
        on_gpu, in_fp8 = study.grid.device is Device.CUDA, precision is ProductPrecision.FP8
        notes = loops, *[graph] * on_gpu, *[fp8] * in_fp8
        tables.append(_table(study, f"Matrix products, {precision}", columns, own, *notes))
    return Section(name="products", tables=tuple(tables), rows=rows, keys=PRODUCTS)


def product_rows(study: CeilingsStudy) -> list[Row]:
    """A row for each matrix product."""
    return [_product(study, cell) for cell in study.products]


def _product(study: CeilingsStudy, cell: ProductCell) -> Row:
    """Row of one matmul. Its share of the best is in doubt if either time is, but not for the best itself (100 %)."""
    shape, best, own = cell.shape, study.best_product(cell.precision), timing_values(cell.timing)
    promised = promised_flops(find_device(study.device_name), cell.precision)
    pair = () if best is None or best is cell else (own, timing_values(best.timing))
    return {
        "precision": cell.precision, "name": shape.name, "label": shape.label, "shape": shape.label,
        "cube_side": shape.cube_side, "is_square": shape.is_square,
        "rows": shape.rows, "inner": shape.inner, "columns": shape.columns, "device_name": study.device_name, **own,
        "flops": shape.flops, "moved_mib": shape.moved_bytes(cell.precision) / MIB,
        "flops_per_byte": shape.flops / shape.moved_bytes(cell.precision),
        **derived("tflops_per_s", ratio(cell.flops_per_s, TERA), own),
        "data_sheet": ratio(promised, TERA), **derived("data_sheet_share", ratio(cell.flops_per_s, promised), own),
        **derived("best_share", ratio(cell.flops_per_s, study.product_ceiling(cell.precision)), *pair),
    }  # fmt: skip


def streams_section(study: CeilingsStudy) -> Section:
    """One table for copies, sums and AdamW."""
    rows = stream_rows(study)
    columns = [column(key) for key in ("stream", "moved_mib", "median_ms", "gb_per_s", "data_sheet_share")]
    table = _table(
        study, "Passes over memory", columns, rows,
        "Bytes read plus bytes written. copy: one tensor into another; read: its sum; adamw: PyTorch's fused AdamW on "
        "one flat tensor, 28 bytes for each parameter.",
        *([f"The last cache holds {significant(study.cache_bytes / MIB)} MiB."] if study.cache_bytes else ()),
    )  # fmt: skip
    return Section(name="bandwidth", tables=(table,), rows=rows, keys=STREAMS)


def stream_rows(study: CeilingsStudy) -> list[Row]:
    """A row for each pass over memory."""
    promised, rows = promised_bandwidth(study.device_name), []
    for cell in study.streams:
        own = timing_values(cell.timing)
        rows.append({
            "stream": cell.stream, "label": f"{cell.stream} of {cell.moved_bytes} bytes",
            "moved_mib": cell.moved_bytes / MIB, "device_name": study.device_name, **own,
            **derived("gb_per_s", ratio(cell.bytes_per_s, GIGA), own),
            "data_sheet": ratio(promised, GIGA),
            **derived("data_sheet_share", ratio(cell.bytes_per_s, promised), own),
        })  # fmt: skip
    return rows


def kernels_section(study: CeilingsStudy) -> Section:
    """The matmuls and attention kernels of steps, as values alone: there are hundreds."""
    rows = [
        {
            "precision": cell.precision, "form": cell.form, "batch": cell.batch, "rows": cell.rows,
            "inner": cell.inner, "columns": cell.columns, "device_name": study.device_name,
            **timing_values(cell.timing), "tflops_per_s": ratio(cell.timing.rate(cell.flops), TERA),
        }
        for cell in study.kernels
    ]  # fmt: skip
    return Section(name="kernels", rows=rows, keys=KERNELS)


def passes_section(study: CeilingsStudy) -> Section:
    """Passes over memory that are no copies, as values alone."""
    rows = [
        {
            "how": cell.how, "moved_mib": cell.moved_bytes / MIB, "device_name": study.device_name,
            **timing_values(cell.timing), "gb_per_s": ratio(cell.timing.rate(cell.moved_bytes), GIGA),
        }
        for cell in study.passes
    ]  # fmt: skip
    return Section(name="passes", rows=rows, keys=PASSES)


def launches_section(study: CeilingsStudy) -> Section:
    """How long launches take."""
    rows = launch_rows(study)
    columns = column("launched"), column("median_us")
    table = _table(study, "Launches", columns, rows, "By the host's clock, over many in a row.")
    return Section(name="launches", tables=(table,), rows=rows, keys=LAUNCHES)


def launch_rows(study: CeilingsStudy) -> list[Row]:
    """A row for each kind of launch."""
    return [
        {"launch": cell.launch, "label": cell.launch, "launched": launch_words(study, cell.launch),
         "device_name": study.device_name, **timing_values(cell.timing, "us", 1e6)}
        for cell in study.launches
    ]  # fmt: skip


def collectives_section(study: CeilingsStudy) -> Section:
    """A table for each number of processes; empty where there was one process."""
    rows = collective_rows(study)
    keys = ("collective", "tensor_mib", "median_ms", "algorithm_gb_per_s", "bus_gb_per_s")
    backend = "NCCL" if study.grid.device is Device.CUDA else "gloo"
    note = (
        f"In fp32, by {backend}. tensor: the whole, of which each process has a part in an all-gather and a "
        "reduce-scatter. algorithm: its bytes over the time; bus: what each process of a ring has to send, (n - 1) / n "
        "of it, and twice that for an all-reduce."
    )
    has_push = any(row["collective"] is Collective.PUSH for row in rows)
    push = ["push: each process copies its tensor to every other one's memory, by copy engines."] if has_push else []
    tables = []
    for ranks in dict.fromkeys(row["world_size"] for row in rows):
        own = [row for row in rows if row["world_size"] == ranks]
        title = f"Collectives among {ranks} processes"
        tables.append(_table(study, title, [column(key) for key in keys], own, note, *push))
    return Section(name="collectives", tables=tuple(tables), rows=rows, keys=COLLECTIVES)


def collective_rows(study: CeilingsStudy) -> list[Row]:
    """A row for each collective."""
    rows = []
    for cell in study.reductions:
        own = timing_values(cell.timing)
        rows.append({
            "collective": cell.collective, "tensor_mib": cell.num_bytes / MIB,
            "label": f"{cell.collective} of {cell.num_bytes} bytes", "world_size": cell.world_size,
            "device_name": study.device_name, **own,
            **derived("algorithm_gb_per_s", ratio(cell.algorithm_bytes_per_s, GIGA), own),
            **derived("bus_gb_per_s", ratio(cell.bus_bytes_per_s, GIGA), own),
        })  # fmt: skip
    return rows
