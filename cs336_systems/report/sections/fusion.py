"""What fusing does, for people: a table, a bar for each version of each operation, sentences, and all values as CSV."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cs336_systems.analysis.warnings import PASSES, in_doubt
from cs336_systems.config import Device, Precision
from cs336_systems.costs.hardware import DeviceSpec, find_device
from cs336_systems.record import Status
from cs336_systems.report.columns import Column
from cs336_systems.report.doubts import codes_text, doubt_notes, ratio_text, time_text
from cs336_systems.report.numbers import DOUBT, significant
from cs336_systems.report.plots import drawing
from cs336_systems.report.section import Section
from cs336_systems.report.sections.study import write_study
from cs336_systems.report.table import Table, make_table
from cs336_systems.report.words import STATUS_WORDS
from cs336_systems.studies.fusion_records import PHASES, FusionRow, FusionStudy, Version
from cs336_systems.studies.records import CellStatus

COLOURS = {Version.EAGER: "#333333", Version.COMPILED: "#E69F00", Version.FUSED: "#0072B2"}
CSV_COLUMNS = (
    "op", "precision", "version", "phase", "device_name", "status", "error", "kernels", "kernel_names",
    "must_move_mib", "moved_mib", "median_ms", "mean_ms", "std_ms", "gb_per_s", "bandwidth_share", "speed_up",
    "tflops_per_s", "max_error", "warnings",
)  # fmt: skip


def fusion_tables(study: FusionStudy) -> list[Table]:
    """One table for each precision and direction."""
    return [
        make_table(
            f"Fusion op by op, {phase}, {precision}, {settings(study)}",
            _columns(study),
            rows,
            _notes(study, rows),
            lambda row: row.status is not CellStatus.OK,
        )
        for precision in dict.fromkeys(row.precision for row in study.rows)
        for phase in PHASES
        if (rows := [row for row in study.rows if (row.precision, row.phase) == (precision, phase)])
    ]


def settings(study: FusionStudy) -> str:
    """What all rows share, in words."""
    grid = study.grid
    return (
        f"batch {grid.batch_size}, context {grid.context_length}, width {grid.width}, "
        f"attention {grid.num_heads} heads of {grid.d_head}, {study.environment.identity.device_name}"
    )


def _columns(study: FusionStudy) -> list[Column[FusionRow]]:
    spec = _spec(study)
    columns: list[Column[FusionRow]] = [
        Column("op", numeric=False, text=lambda row: row.op),
        Column("version", numeric=False, text=lambda row: row.version),
        Column("kernels", drop_order=3, text=lambda row: str(len(row.kernels)) if row.status is CellStatus.OK else ""),
        Column("must move", "MiB", drop_order=6, text=lambda row: significant(row.must_move_bytes / 2**20)),
        Column("moved", "MiB", drop_order=7, text=lambda row: _text(row.moved_bytes, 2**-20)),
        Column("time", "ms", text=lambda row: _time(row)),
        Column("rate", "GB/s", drop_order=5, text=lambda row: _derived(row, row.must_move_bytes_per_s, 1e-9)),
    ]
    if spec is not None:
        columns.append(
            Column("of bandwidth", "%", drop_order=4, text=lambda row: _derived(row, _share(row, spec), 100))
        )
    return [
        *columns,
        Column("speed-up", "vs eager", drop_order=1, text=lambda row: _speed_up(study, row)),
        Column("max error", drop_order=8, text=_error),
    ]


def _spec(study: FusionStudy) -> DeviceSpec | None:
    return find_device(study.environment.identity.device_name)


def _text(value: float | None, scale: float) -> str:
    return "" if value is None else significant(value * scale)


def _time(row: FusionRow) -> str:
    measured = row.measurement
    if measured is None:
        return STATUS_WORDS[Status(row.status)]
    std_ms = None if measured.stdev_s is None else measured.stdev_s * 1e3
    return time_text(measured.median_s * 1e3, std_ms, row.warnings)


def _derived(row: FusionRow, value: float | None, scale: float) -> str:
    """What follows from the time of the row alone."""
    return ratio_text(None if value is None else value * scale, [row.measurement], row.warnings)


def _speed_up(study: FusionStudy, row: FusionRow) -> str:
    eager = study.eager(row)
    warnings = () if row is eager else (*eager.warnings, *row.warnings)
    return ratio_text(speed_up(study, row), [eager.measurement, row.measurement], warnings)


def _error(row: FusionRow) -> str:
    if row.status is not CellStatus.OK:
        return ""
    return "not finite" if row.max_error is None else f"{row.max_error:.1e}"


def _share(row: FusionRow, spec: DeviceSpec) -> float | None:
    """Rate of the bytes that must move over the memory bandwidth that the data sheet promises."""
    rate = row.must_move_bytes_per_s
    return None if rate is None else rate / spec.memory_bandwidth_bytes_per_s


def speed_up(study: FusionStudy, row: FusionRow) -> float | None:
    """Median time of the eager version over that of the row; None where either has none."""
    slow, fast = study.eager(row).measurement, row.measurement
    return slow.median_s / fast.median_s if slow and fast and fast.median_s else None


def _notes(study: FusionStudy, rows: list[FusionRow]) -> Iterator[str]:
    yield (
        "must move: inputs read once and results written once; moved: operands and results of every operation that was "
        f"launched. Median ± standard deviation of {study.grid.passes} passes; error against the same mathematics in "
        "float64."
    )
    yield from doubt_notes([row.warnings for row in rows if row.measurement], "rows", PASSES)
    if study.grid.device is Device.CPU:
        yield "On a CPU operators take the place of kernels."
    for op in dict.fromkeys(row.op for row in rows):
        yield from _sentence(study, {row.version: row for row in rows if row.op is op})
    yield from _arithmetic(study, rows)
    for row in rows:
        if row.failure is not None:
            yield f"{row.op} {row.version}: {row.failure.message}"


def _sentence(study: FusionStudy, versions: dict[Version, FusionRow]) -> Iterator[str]:
    """What fusing one operation saves."""
    eager = versions[Version.EAGER]
    if eager.status is not CellStatus.OK or eager.moved_bytes is None:
        return
    others = [
        f"{version} {_kernels(row)}, {gain} times as fast"
        for version, row in versions.items()
        if version is not Version.EAGER and (gain := _speed_up(study, row))
    ]
    excess = significant(eager.moved_bytes / eager.must_move_bytes, 3)
    texts = [f"written out {_kernels(eager)} that move {excess} times what must move", *others]
    yield f"{eager.op}: {'; '.join(texts)}."


def _kernels(row: FusionRow) -> str:
    return "1 kernel" if len(row.kernels) == 1 else f"{len(row.kernels)} kernels"


def _arithmetic(study: FusionStudy, rows: list[FusionRow]) -> Iterator[str]:
    """Where matrix products, not the bytes, set the least time."""
    spec = _spec(study)
    for row in rows if spec else ():
        peak = spec.peak_flops_per_s.get(row.precision) if spec else None
        if peak and row.matmul_flops and row.version is Version.EAGER:
            yield (
                f"{row.op} is not limited by bandwidth alone: its matrix products take at least "
                f"{significant(row.matmul_flops / peak * 1e3, 3)} ms at the data sheet's {peak / 1e12:g} TFLOP/s."
            )


def fusion_section(study: FusionStudy) -> Section:
    """The tables, and a row for each version and direction; what is not known is empty."""
    rows = [dict(zip(CSV_COLUMNS, _csv_row(study, row), strict=True)) for row in study.rows]
    return Section(name="results", tables=tuple(fusion_tables(study)), rows=rows)


def _csv_row(study: FusionStudy, row: FusionRow) -> list[object]:
    spec, measured = _spec(study), row.measurement
    times_s = (measured.median_s, measured.mean_s, measured.stdev_s) if measured else (None,) * 3
    rate = row.must_move_bytes_per_s
    return [
        row.op, row.precision, row.version, row.phase, study.environment.identity.device_name,
        row.status, row.failure.message if row.failure else None,
        len(row.kernels) if row.status is CellStatus.OK else None, "; ".join(row.kernels),
        row.must_move_bytes / 2**20, None if row.moved_bytes is None else row.moved_bytes / 2**20,
        *(None if time_s is None else time_s * 1e3 for time_s in times_s),
        None if rate is None else rate / 1e9, _share(row, spec) if spec else None, speed_up(study, row),
        row.matmul_flops / measured.median_s / 1e12 if measured and measured.median_s and row.matmul_flops else None,
        row.max_error, codes_text(row.warnings),
    ]  # fmt: skip


def draw_fusion(study: FusionStudy, precision: Precision) -> Figure:
    """Time of each version, a row of panels for each direction, with the time that the bandwidth alone would take."""
    rows = [row for row in study.rows if row.precision is precision]
    ops = list(dict.fromkeys(row.op for row in rows))
    title = f"Time of one operation, {precision}: written out, compiled, fused"
    figure = drawing.new_figure(max(5.0, 2.6 * len(ops) + 0.6), 6.6, title, settings(study))
    panels = figure.subplots(len(PHASES), len(ops), squeeze=False)
    handles: dict[str, Any] = {}
    for line, phase in zip(panels, PHASES, strict=True):
        line[0].set_ylabel(f"{phase}, median time (ms)", fontsize=9)
        for panel, op in zip(line, ops, strict=True):
            handles |= _draw_panel(panel, [row for row in rows if (row.op, row.phase) == (op, phase)], _spec(study))
    for panel, op in zip(panels[0], ops, strict=True):
        panel.set_title(op, fontsize=10)
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", frameon=False, fontsize=9)
    return figure


def _draw_panel(panel: Axes, rows: list[FusionRow], spec: DeviceSpec | None) -> dict[str, Any]:
    drawing.style(panel)
    drawing.categories(panel, [row.version for row in rows])
    for index, row in enumerate(rows):
        if row.measurement is None:
            drawing.write_upright(panel, index, STATUS_WORDS[Status(row.status)])
            continue
        time_ms = row.measurement.median_s * 1e3
        bar = panel.bar(index, time_ms, 0.7, color=COLOURS[row.version])
        doubt = f" {DOUBT}" if in_doubt(warning.code for warning in row.warnings) else ""
        panel.bar_label(bar, [f"{significant(time_ms, 3)}{doubt}"], fontsize=8, padding=2)
    panel.set_ylim(0, panel.get_ylim()[1] * 1.12)
    if spec is None:
        return {}
    least_ms = rows[0].must_move_bytes / spec.memory_bandwidth_bytes_per_s * 1e3
    line = panel.axhline(least_ms, color=drawing.FAILURE_COLOUR, linewidth=1.2, linestyle="--", zorder=4)
    return {"what must move, at the data sheet's bandwidth": line}


def write_fusion(study: FusionStudy, directory: Path) -> None:
    """Write fusion.json, results.csv .md .tex .typ and plots/ into the directory, which is made if need be."""
    precisions = dict.fromkeys(row.precision for row in study.rows)
    pictures = {f"time_{precision}": draw_fusion(study, precision) for precision in precisions}
    write_study("fusion.json", study, [fusion_section(study)], pictures, directory)
