"""A step on many GPUs as tables: the forecast of each way to share it, and from where on communication limits it."""

from collections.abc import Iterator

from cs336_systems.costs.curves import LINK_EFFICIENCY, MATMUL_EFFICIENCY
from cs336_systems.costs.limits import Bound, Given, Link, Paper, Scheme, bounds, largest_ranks
from cs336_systems.costs.scale import PARALLEL, Scale, ScaleStep
from cs336_systems.report.columns import Row, column
from cs336_systems.report.plots.charts import Axis, Chart, Line, Panel, Point, curves_of, doubling
from cs336_systems.report.section import Section, Table, make_table, quantity_table
from cs336_systems.report.sections.account import by_data_sheet
from cs336_systems.report.words import DOUBTED_FORECAST, GIB, GIGA, SHIPPED, ratio, significant

BOOK = "Austin et al. 2025, How to Scale Your Model"
SOURCES = {
    Link.NODE: "chapter 5, How to Parallelize a Transformer for Training",
    Link.NETWORK: "chapter 12, How to Think About GPUs",
}
WORDS = {
    Scheme.DATA: "data parallel",
    Scheme.SHARDED: "fully sharded data parallel",
    Scheme.TENSOR: "tensor parallel",
    Scheme.BOTH: "fully sharded and tensor parallel",
}
COLOURS = ("#0072B2", "#E69F00")
CSV_COLUMNS = (
    "way", "ranks", "step_ms", "compute_ms", "communication_ms", "slowed_ms", "exposed_ms", "peak_gib", "fits", "mfu",
)  # fmt: skip
NO_LIMIT = "no limit"


def scale_section(found: Scale) -> Section:
    """The forecast and the inequalities; the CSV has a row for each way and number of ranks."""
    rows = list(scale_rows(found))
    tables = (_steps_table(found, rows), *limit_tables(found.given))
    return Section(name="scale", tables=tables, rows=rows, keys=CSV_COLUMNS, pictures=scale_charts(found, rows))


def scale_rows(found: Scale) -> Iterator[Row]:
    """A row for each way and number of ranks; None for what is not known."""
    for scheme, ranks, step in found.steps:
        values = {} if step is None else _values(step, found.machine.memory_bytes)
        yield dict.fromkeys(CSV_COLUMNS) | {"way": scheme, "ranks": ranks} | values


def _values(step: ScaleStep, memory_bytes: int | None) -> Row:
    times = step.times
    return {
        "step_ms": 1e3 * times.time.step_s,
        "compute_ms": 1e3 * times.compute_s,
        "communication_ms": 1e3 * times.communication_s,
        "slowed_ms": 1e3 * times.slowed_s,
        "exposed_ms": 1e3 * times.exposed_s,
        "peak_gib": None if step.memory_bytes is None else step.memory_bytes / GIB,
        "fits": None if step.memory_bytes is None or memory_bytes is None else step.memory_bytes <= memory_bytes,
        "mfu": step.mfu,
    }


def _steps_table(found: Scale, rows: list[Row]) -> Table:
    keys = ("way", "ranks", "step_ms", "compute_ms", "communication_ms", "slowed_ms", "exposed_ms", "exposed_part",
            "peak_gib", "mfu")  # fmt: skip
    shown = [
        row | {
            "exposed_part": ratio(row["exposed_ms"], row["step_ms"]),
            "prediction_is_doubted": found.machine.curves.is_in_doubt,
        }
        for row in rows
    ]  # fmt: skip
    title = f"One step of {found.config.label} on many {found.device_name}"
    notes = [*_step_notes(found), *_misfits(found, rows)]
    return make_table(title, [column(key) for key in keys], shown, notes)


def _misfits(found: Scale, rows: list[Row]) -> Iterator[str]:
    """Which rows need more memory than a GPU has by its data sheet."""
    too_large = [row for row in rows if row["fits"] is False]
    for way in dict.fromkeys(row["way"] for row in too_large):
        counts = ", ".join(f"{row['ranks']:,}" for row in too_large if row["way"] == way)
        memory_gib = (found.machine.memory_bytes or 0) / GIB
        yield f"{way} on {counts} does not fit: {found.device_name} has {memory_gib:.0f} GiB by its data sheet."


def _step_notes(found: Scale) -> Iterator[str]:
    yield (
        "A step takes the sum of computing, slowed and exposed: communication is exposed where kernels wait for it, "
        "and slows the kernels beside it."
    )
    if not found.is_measured:
        yield by_data_sheet(found.device_name)
    elif found.machine.curves.is_shipped:
        yield SHIPPED
    if found.machine.curves.is_in_doubt:
        yield DOUBTED_FORECAST
    if found.machine.peak_flops_per_s is None:
        yield "No MFU: the peak of this device is not known."


def limit_tables(given: Given) -> tuple[Table, ...]:
    """How many ranks each way allows, the inequalities, and their symbols."""
    return _largest_table(given.paper), _bounds_table(given.paper), _symbols_table(given)


def _largest_table(paper: Paper) -> Table:
    rows: list[Row] = [
        {"way": f"{scheme}: {WORDS[scheme]}", "most_ranks": largest_ranks(paper, scheme), "no_limit": NO_LIMIT}
        for scheme in Scheme
    ]
    title = f"Largest number of ranks before communication limits, for {paper.tokens:,} tokens in a step"
    note = "On more ranks communication takes longer than the matmuls of the blocks, with which it may overlap."
    return make_table(title, [column(key) for key in ("way", "most_ranks")], rows, [note])


def _bounds_table(paper: Paper) -> Table:
    keys = ("way", "link", "inequality", "intensity", "least_tokens", "source")
    notes = (
        f"Source: {BOOK}. Each line is about one kind of links, as if the others took no time; of N, X, Y ranks "
        "g, x, y are in one node. With many ranks the first lines are the course's B / N > C / W, Y < F W / C and "
        "B / N > (C / W)^2 / F. cs336_systems/costs/limits.py derives them.",
    )
    rows = [_bound_row(bound) for bound in bounds(paper)]
    return make_table("The inequalities", [column(key) for key in keys], rows, notes)


def _bound_row(bound: Bound) -> Row:
    return {
        "way": bound.scheme, "link": bound.link, "inequality": bound.formula, "intensity": bound.intensity,
        "least_tokens": bound.least_tokens, "source": SOURCES[bound.link],
    }  # fmt: skip


def _symbols_table(given: Given) -> Table:
    paper, links = given.paper, given.paper.links
    rows = [
        ("B", paper.tokens, "tokens", "of a step of all ranks"),
        ("N = X Y", "", "ranks", "data ranks times tensor ranks"),
        ("G", links.gpus_per_node, "GPUs", "of a node"),
        ("C", paper.flops_per_s, "FLOP/s", given.rate_source),
        ("W in a node", links.node_bytes_per_s, "byte/s", given.link_source),
        *([("W of the network", links.network_bytes_per_s, "byte/s", given.network_source)]
          if links.network_bytes_per_s is not None else ()),
        ("e of ddp", paper.gradient_bytes, "byte", "gradients, which are averaged in fp32"),
        ("e of fsdp", paper.weight_bytes, "byte", "weights that are gathered, and their gradients"),
        ("e of tp", paper.activation_bytes, "byte", "activations"),
        ("f", paper.feed, "elements", f"elements of a block's matrices / 4 d_model = {given.feed_formula}; "
                                      "d_ff, if it had only two in its feed-forward network"),
        ("a", "", "tokens", "e C / (2 W)"),
    ]  # fmt: skip
    return quantity_table("Symbols of the inequalities", rows, keys=("quantity", "amount", "unit", "how"))


def rate_source(device_name: str, precision: str, *, is_measured: bool) -> str:
    """Where C comes from."""
    if is_measured:
        return f"best matmul measured on {device_name}, {precision}"
    return f"{MATMUL_EFFICIENCY:g} of the peak of {device_name}, {precision}, by its data sheet"


def link_source(measured_ranks: int | None) -> str:
    """Where the rate within a node comes from; None: from the data sheet."""
    if measured_ranks is not None:
        return f"best collective measured among {measured_ranks} of them"
    return f"{LINK_EFFICIENCY:g} of NVLink, one way, by the data sheet"


def scale_charts(found: Scale, rows: list[Row]) -> list[Chart]:
    """MFU, or computing's part of the step where no peak is known, and exposed communication over the ranks."""
    known = [row for row in rows if row["step_ms"] is not None]
    if not known:
        return []
    first = ("MFU", "mfu") if any(row["mfu"] is not None for row in known) else ("Computing, of the step", "computing")
    shares = [
        row | {"exposed": row["exposed_ms"] / row["step_ms"], "computing": row["compute_ms"] / row["step_ms"]}
        for row in known
    ]
    x = doubling({float(row["ranks"]) for row in known}, "ranks", 1.4)
    y = Axis(label="%", from_zero=True)
    panels = [
        Panel(x=x, y=y, title=title, curves=curves_of(_lines(shares, key), COLOURS))
        for title, key in (first, ("Exposed communication, of the step", "exposed"))
    ]
    settings = f"{found.config.label}, {found.device_name}, {found.given.paper.links.gpus_per_node} GPUs in a node"
    if found.given.paper.links.network_bytes_per_s is not None:
        settings += f", network {significant(found.given.paper.links.network_bytes_per_s / GIGA, 3)} GB/s for each"
    return [Chart(name="scale", title="One step on many GPUs", settings=settings, panels=panels, columns=2,
                  size=(4.6, 3.4), legend=4)]  # fmt: skip


def _lines(rows: list[Row], key: str) -> list[Line]:
    """A line for each way."""
    return [
        Line(
            name=scheme,
            points=tuple(Point(x=float(row["ranks"]), value=100 * row[key]) for row in rows if row["way"] is scheme),
        )
        for scheme in PARALLEL
    ]
