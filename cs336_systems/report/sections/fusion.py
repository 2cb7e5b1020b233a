"""What fusing does, for people: a table, a bar for each version of each operation, sentences, and all values as CSV."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from cs336_systems.analysis.warnings import PASSES
from cs336_systems.config import Device, Phase, Precision
from cs336_systems.costs.hardware import find_device
from cs336_systems.record import Status
from cs336_systems.report.columns import Row, column, three_digits
from cs336_systems.report.plots.charts import FAILURE_COLOUR, Axis, Bar, Chart, Panel, Reference, Style
from cs336_systems.report.section import Section, known, make_table
from cs336_systems.report.sections.study import derived, doubt_notes, end_of, promised_bandwidth, times_ms, write_study
from cs336_systems.report.words import DOUBT, GIGA, MIB, TERA, ratio, significant
from cs336_systems.studies.fusion_records import PHASES, FusionRow, FusionStudy, Version
from cs336_systems.text import counted

COLOURS = {Version.EAGER: "#333333", Version.COMPILED: "#E69F00", Version.FUSED: "#0072B2"}
LEAST = "what must move, at the data sheet's bandwidth"
COLUMNS = (
    column("op"), column("version"), column("kernels"), column("must_move_mib"), column("moved_mib", drop_order=7),
    column("median_ms"), column("gb_per_s", drop_order=5, write=three_digits), column("bandwidth_share"),
    column("speed_up", unit="vs eager", drop_order=1), column("max_error"),
)  # fmt: skip
CSV_COLUMNS = (
    "op", "precision", "version", "phase", "device_name", "status", "error", "kernels", "kernel_names",
    "must_move_mib", "moved_mib", "median_ms", "mean_ms", "std_ms", "gb_per_s", "bandwidth_share", "speed_up",
    "tflops_per_s", "max_error", "warnings",
)  # fmt: skip


def fusion_section(study: FusionStudy) -> Section:
    """A table for each precision and direction; the values have a row for each version and direction."""
    tables = [
        make_table(
            f"Fusion op by op, {rows[0]['phase']}, {rows[0]['precision']}, {settings(study)}",
            known(COLUMNS, rows),
            rows,
            _notes(study, rows),
            lambda row: row["status"] is not Status.OK,
            _savings(rows),
        )
        for rows in _by_direction(study)
    ]
    charts = [fusion_chart(study, precision) for precision in dict.fromkeys(study.grid.precisions)]
    return Section(name="results", tables=tuple(tables), rows=fusion_rows(study), keys=CSV_COLUMNS, pictures=charts)


def settings(study: FusionStudy) -> str:
    """What all rows share, in words."""
    grid = study.grid
    return (
        f"batch {grid.batch_size}, context {grid.context_length}, width {grid.width}, "
        f"attention {grid.num_heads} heads of {grid.d_head}, {study.environment.identity.device_name}"
    )


def _by_direction(study: FusionStudy) -> Iterator[list[Row]]:
    """The rows of each precision and direction that has any."""
    rows = fusion_rows(study)
    for precision in dict.fromkeys(row["precision"] for row in rows):
        for phase in PHASES:
            if found := [row for row in rows if (row["precision"], row["phase"]) == (precision, phase)]:
                yield found


def fusion_rows(study: FusionStudy) -> list[Row]:
    """A row for each version and direction; None for what is not known."""
    return [_values(study, row, study.eager(row)) for row in study.rows]


def _values(study: FusionStudy, row: FusionRow, eager: FusionRow) -> Row:
    device_name = study.environment.identity.device_name
    rate, is_ok = row.must_move_bytes_per_s, row.status is Status.OK
    own, slow = times_ms(row.measurement, row.warnings), times_ms(eager.measurement, eager.warnings)
    pair = () if row is eager else (slow, own)
    return {
        "op": row.op, "precision": row.precision, "version": row.version, "phase": row.phase,
        "device_name": device_name,
        **end_of(row.status, row.failure),
        "kernels": len(row.kernels) if is_ok else None, "kernel_names": "; ".join(row.kernels),
        "must_move_mib": row.must_move_bytes / MIB, "moved_mib": ratio(row.moved_bytes, MIB),
        **own,
        **derived("gb_per_s", ratio(rate, GIGA), own),
        **derived("bandwidth_share", ratio(rate, promised_bandwidth(device_name)), own),
        **derived("speed_up", ratio(slow["median_ms"], own["median_ms"]), *pair),
        "matmul_flops": row.matmul_flops, "tflops_per_s": ratio(row.matmul_flops / GIGA or None, own["median_ms"]),
        "max_error": row.max_error, "error_words": "not finite" if is_ok else "",
    }  # fmt: skip


def _notes(study: FusionStudy, rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "must move: inputs read once and results written once; moved: operands and results of every operation that was "
        f"launched. Median ± standard deviation of {study.grid.passes} passes; error against the same mathematics in "
        "float64."
    )
    yield from doubt_notes([row["warnings"] for row in rows if row["median_ms"] is not None], "rows", PASSES)
    if study.grid.device is Device.CPU:
        yield "On a CPU operators take the place of kernels."
    yield from _savings(rows)
    yield from _arithmetic(study, rows)
    yield from (f"{row['op']} {row['version']}: {row['error']}" for row in rows if row["error"] is not None)


def _savings(rows: Sequence[Row]) -> Iterator[str]:
    """What fusing each operation saves."""
    for op in dict.fromkeys(row["op"] for row in rows):
        versions = {row["version"]: row for row in rows if row["op"] is op}
        eager = versions[Version.EAGER]
        if eager["status"] is not Status.OK or eager["moved_mib"] is None:
            continue
        excess = significant(eager["moved_mib"] / eager["must_move_mib"], 3)
        texts = [f"written out {counted(eager['kernels'], 'kernel')} that move {excess} times what must move"]
        for version, row in versions.items():
            if version is not Version.EAGER and (gain := column("speed_up").cell(row)):
                texts.append(f"{version} {counted(row['kernels'], 'kernel')}, {gain} times as fast")
        yield f"{op}: {'; '.join(texts)}."


def _arithmetic(study: FusionStudy, rows: Sequence[Row]) -> Iterator[str]:
    """Where matrix products, not the bytes, set the least time."""
    spec = find_device(study.environment.identity.device_name)
    for row in rows if spec else ():
        peak = spec.peak_flops_per_s.get(row["precision"]) if spec else None
        if peak and row["matmul_flops"] and row["version"] is Version.EAGER:
            yield (
                f"{row['op']} is not limited by bandwidth alone: its matrix products take at least "
                f"{significant(row['matmul_flops'] / peak * 1e3, 3)} ms at the data sheet's {peak / TERA:g} TFLOP/s."
            )


def fusion_chart(study: FusionStudy, precision: Precision) -> Chart:
    """Time of each version, a row of panels for each direction, with the time that the bandwidth alone would take."""
    rows = [row for row in fusion_rows(study) if row["precision"] is precision]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    bandwidth = promised_bandwidth(study.environment.identity.device_name)
    panels = [
        _panel([row for row in rows if (row["op"], row["phase"]) == (op, phase)], op, phase, bandwidth)
        for phase in PHASES
        for op in ops
    ]
    return Chart(
        name=f"time_{precision}", title=f"Time of one operation, {precision}: written out, compiled, fused",
        settings=settings(study), panels=panels, columns=len(ops), size=(2.6, 2.6), legend=1,
        styles={version: Style(colour=colour, label="") for version, colour in COLOURS.items()},
    )  # fmt: skip


def _panel(rows: Sequence[Row], op: str, phase: Phase, bandwidth: float | None) -> Panel:
    bars = [
        Bar(name=row["version"], failure=row["ended"]) if row["median_ms"] is None else
        Bar(name=row["version"], parts={row["version"]: row["median_ms"]},
            words=f"{significant(row['median_ms'], 3)}{f' {DOUBT}' if row['is_doubted'] else ''}")
        for row in rows
    ]  # fmt: skip
    least = [rows[0]["must_move_mib"] * MIB / bandwidth * 1e3] if bandwidth is not None and rows else []
    return Panel(
        x=Axis(names=[row["version"] for row in rows]),
        y=Axis(label=f"{phase}, median time (ms)", from_zero=True),
        title=op,
        bars=bars,
        references=[Reference(value=time_ms, colour=FAILURE_COLOUR, name=LEAST) for time_ms in least],
    )


def write_fusion(study: FusionStudy, directory: Path) -> None:
    """Write fusion.json, results.csv .md .tex .typ and plots/ into the directory, which is made if need be."""
    write_study("fusion.json", study, [fusion_section(study)], directory)
