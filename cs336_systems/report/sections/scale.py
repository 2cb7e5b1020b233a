"""A step on many GPUs as tables: the forecast of each way to share it, and from where on communication limits it."""

from collections.abc import Iterator

from cs336_systems.costs.curves import LINK_EFFICIENCY, MATMUL_EFFICIENCY
from cs336_systems.costs.limits import Bound, Given, Link, Paper, Scheme, bounds, largest_ranks
from cs336_systems.costs.scale import Scale, ScaleStep
from cs336_systems.report.columns import Row, column
from cs336_systems.report.section import Section, Table, make_table, quantity_table
from cs336_systems.report.sections.account import by_data_sheet
from cs336_systems.report.words import DOUBTED_FORECAST, GIB, SHIPPED, ratio

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
CSV_COLUMNS = (
    "way", "ranks", "data_ranks", "tensor_ranks", "batch_size", "tokens_per_rank", "step_ms", "compute_ms",
    "communication_ms", "slowed_ms", "exposed_ms", "peak_gib", "fits", "mfu", "reason",
)  # fmt: skip
NO_LIMIT = "no limit"


def scale_section(found: Scale) -> Section:
    """The forecast and the inequalities; the CSV has a row for each way and number of ranks."""
    rows = list(scale_rows(found))
    tables = (_steps_table(found, rows), *limit_tables(found.given))
    return Section(name="scale", tables=tables, rows=rows, keys=CSV_COLUMNS)


def scale_json(found: Scale) -> dict[str, object]:
    """The same as numbers in SI units; None for what is not known."""
    section = Section(name="scale", rows=list(scale_rows(found)), keys=CSV_COLUMNS)
    return {
        "config": found.config,
        "device_name": found.device_name,
        "is_measured": found.is_measured,
        "steps": section.json,
        "limits": {
            "given": found.given,
            "bounds": bounds(found.given.paper),
            "largest_ranks": _largest(found.given.paper),
        },
    }


def scale_rows(found: Scale) -> Iterator[Row]:
    """A row for each way and number of ranks; None for what is not known."""
    for scheme, ranks, step in found.steps:
        values = _values(step, found.machine.memory_bytes) if isinstance(step, ScaleStep) else {"reason": step}
        yield dict.fromkeys(CSV_COLUMNS) | {"way": scheme, "ranks": ranks} | values


def _values(step: ScaleStep, memory_bytes: int | None) -> Row:
    times = step.times
    return {
        "data_ranks": step.data_ranks,
        "tensor_ranks": step.tensor_ranks,
        "batch_size": step.batch_size,
        "tokens_per_rank": step.tokens_per_rank,
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
    keys = ("way", "ranks", "rank_shape", "tokens_per_rank", "step_ms", "compute_ms", "communication_ms", "slowed_ms",
            "exposed_ms", "exposed_part", "peak_gib", "mfu")  # fmt: skip
    shown = [
        row | {
            "rank_shape": f"{row['data_ranks']} x {row['tensor_ranks']}" if row["data_ranks"] else "",
            "exposed_part": ratio(row["exposed_ms"], row["step_ms"]),
            "prediction_is_doubted": found.machine.curves.is_in_doubt,
        }
        for row in rows
    ]  # fmt: skip
    title = f"One step of {found.config.label} on many {found.device_name}"
    notes = [*_step_notes(found), *_misfits(found, rows), *_reasons(rows)]
    return make_table(title, [column(key) for key in keys], shown, notes)


def _misfits(found: Scale, rows: list[Row]) -> Iterator[str]:
    """Which rows need more memory than a GPU has by its data sheet."""
    too_large = [row for row in rows if row["fits"] is False]
    for way in dict.fromkeys(row["way"] for row in too_large):
        counts = ", ".join(f"{row['ranks']:,}" for row in too_large if row["way"] == way)
        memory_gib = (found.machine.memory_bytes or 0) / GIB
        yield f"{way} on {counts} does not fit: {found.device_name} has {memory_gib:.0f} GiB by its data sheet."


def _reasons(rows: list[Row]) -> Iterator[str]:
    """Which rows have no forecast, and why."""
    for way, reason in dict.fromkeys((row["way"], row["reason"]) for row in rows if row["reason"]):
        counts = [f"{row['ranks']:,}" for row in rows if (row["way"], row["reason"]) == (way, reason)]
        yield f"No {way} on {', '.join(counts)}: {reason}."


def _step_notes(found: Scale) -> Iterator[str]:
    used = {scheme for scheme, *_ in found.steps}
    yield "; ".join(f"{scheme}: {WORDS[scheme]}" for scheme in Scheme if scheme in used) + "."
    yield (
        "A step takes the sum of computing, slowed and exposed: communication is exposed where kernels wait for it, "
        "and slows the kernels beside it. That of tensor parallelism is all exposed; the inequalities below allow it "
        "to overlap."
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


def _largest(paper: Paper) -> dict[str, int | None]:
    return {scheme: largest_ranks(paper, scheme) for scheme in Scheme}


def _largest_table(paper: Paper) -> Table:
    rows: list[Row] = []
    for scheme, most in _largest(paper).items():
        own = [bound for bound in bounds(paper) if bound.scheme is scheme and bound.ranks is not None]
        decisive = min(own, key=lambda bound: bound.ranks or 0, default=None)
        rows.append({
            "way": scheme, "most_ranks": most, "no_limit": NO_LIMIT,
            "decided_by": "" if decisive is None or most is None else decisive.link,
        })  # fmt: skip
    title = f"Largest number of ranks before communication limits, for {paper.tokens:,} tokens in a step"
    note = "On more ranks communication takes longer than the matmuls of the blocks, with which it may overlap."
    return make_table(title, [column(key) for key in ("way", "most_ranks", "decided_by")], rows, [note])


def _bounds_table(paper: Paper) -> Table:
    keys = ("way", "link", "inequality", "intensity", "least_tokens", "most_ranks", "source")
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
        "least_tokens": bound.least_tokens, "most_ranks": bound.ranks, "no_limit": NO_LIMIT,
        "source": SOURCES[bound.link],
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
