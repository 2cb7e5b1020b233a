"""A step on many GPUs as tables: the forecast of each way to share it, and from where on
communication limits it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...config import RunConfig
from ...costs.curves import Curves
from ...costs.scale import Paper, ScaleStep, Scheme, largest_ranks
from ...studies.ceilings_files import REFERENCE
from ..columns import Row, columns_of
from ..section import Section, Table, make_table
from ..words import DOUBTED_FORECAST, GIB, GIGA, SHIPPED, TERA, ratio
from .account import by_data_sheet

WORDS = {
    Scheme.DATA: "data parallel",
    Scheme.SHARDED: "fully sharded data parallel",
    Scheme.TENSOR: "tensor parallel",
    Scheme.BOTH: "fully sharded and tensor parallel",
}
CSV_COLUMNS = (
    "way",
    "ranks",
    "step_ms",
    "compute_ms",
    "communication_ms",
    "slowed_ms",
    "exposed_ms",
    "peak_gib",
    "fits",
    "mfu",
)
NO_LIMIT = "no limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is asked of a step on many GPUs, and the answer."""

    config: RunConfig
    """The step of one process."""
    steps: tuple[tuple[Scheme, int, ScaleStep | None], ...]
    """For each scheme and number of ranks the forecast, None where there is none."""
    paper: Paper
    """What the inequalities are about: the tokens of a step on the most ranks."""
    curves: Curves
    device_name: str
    peak_flops_per_s: float | None
    memory_bytes: int | None
    """Of each GPU by its data sheet; None if it is not known."""
    link_source: str
    """Where the rate within a node comes from."""


def scale_section(scale: Scale) -> Section:
    """The forecast, and the most ranks of each way; the CSV has a row for each way and number of
    ranks.
    """
    rows = list(scale_rows(scale))
    return Section(
        name="scale",
        tables=(_steps_table(scale, rows), _largest_table(scale)),
        rows=rows,
        keys=CSV_COLUMNS,
    )


def scale_rows(scale: Scale) -> Iterator[Row]:
    """A row for each way and number of ranks; None for what is not known."""
    for scheme, ranks, step in scale.steps:
        row: Row = dict.fromkeys(CSV_COLUMNS) | {"way": scheme, "ranks": ranks}
        if step is not None:
            times, needed_bytes, has_bytes = step.times, step.memory_bytes, scale.memory_bytes
            row |= {
                "step_ms": 1e3 * times.time.step_s,
                "compute_ms": 1e3 * times.compute_s,
                "communication_ms": 1e3 * times.communication_s,
                "slowed_ms": 1e3 * times.slowed_s,
                "exposed_ms": 1e3 * times.exposed_s,
                "peak_gib": ratio(needed_bytes, GIB),
                "mfu": ratio(step.flops_per_s, scale.peak_flops_per_s),
            }
            if needed_bytes is not None and has_bytes is not None:
                row["fits"] = needed_bytes <= has_bytes
        yield row


def _steps_table(scale: Scale, rows: list[Row]) -> Table:
    """The forecast of each way and number of ranks."""
    keys = [key for key in CSV_COLUMNS if key != "fits"]
    keys.insert(keys.index("peak_gib"), "exposed_part")
    shown = [
        row
        | {
            "exposed_part": ratio(row["exposed_ms"], row["step_ms"]),
            "prediction_is_doubted": scale.curves.is_in_doubt,
        }
        for row in rows
    ]
    title = f"One step of {scale.config.label} on many {scale.device_name}"
    notes = [*_step_notes(scale), *_misfits(scale, rows)]
    return make_table(title, columns_of(*keys), shown, notes)


def _misfits(scale: Scale, rows: list[Row]) -> Iterator[str]:
    """A note that names the rows whose step needs more memory than a GPU has by its data sheet."""
    too_large = [row for row in rows if row["fits"] is False]
    for way in dict.fromkeys(row["way"] for row in too_large):
        counts = ", ".join(f"{row['ranks']:,}" for row in too_large if row["way"] == way)
        memory_gib = (scale.memory_bytes or 0) / GIB
        yield (
            f"{way} on {counts} does not fit: {scale.device_name} has {memory_gib:.0f} GiB by "
            "its data sheet."
        )


def _step_notes(scale: Scale) -> Iterator[str]:
    """How a step's time is made up, and where rates and peaks come from."""
    yield (
        "A step takes the sum of computing, slowed and exposed: communication is exposed where "
        "kernels wait for it, and slows the kernels beside it."
    )
    if not scale.curves.is_measured:
        yield by_data_sheet(scale.device_name)
    elif scale.curves.is_shipped:
        yield SHIPPED
    if scale.curves.is_in_doubt:
        yield DOUBTED_FORECAST
    if scale.peak_flops_per_s is None:
        yield "No MFU: the peak of this device is not known."


def _largest_table(scale: Scale) -> Table:
    """The most ranks of each way before communication limits the step."""
    paper, links = scale.paper, scale.paper.links
    rows: list[Row] = [
        {
            "way": f"{scheme}: {WORDS[scheme]}",
            "most_ranks": largest_ranks(paper, scheme),
            "no_limit": NO_LIMIT,
        }
        for scheme in Scheme
    ]
    title = (
        f"Largest number of ranks before communication limits, for {paper.tokens:,} tokens in "
        "a step"
    )
    sent = (
        f"Each GPU sends {links.node_bytes_per_s / GIGA:,.0f} GB/s to others of its node "
        f"({scale.link_source})"
    )
    if links.network_bytes_per_s is not None:
        sent += f", and {links.network_bytes_per_s / GIGA:,.0f} GB/s to other nodes"
    reached = f"its data sheet's peak with the efficiency of an {REFERENCE}"
    if scale.curves.is_measured:
        reached = "its best matmul measured"
    notes = (
        "On more ranks communication takes longer than the matmuls of the blocks, with which it "
        "may overlap.",
        f"{sent}.",
        f"A GPU reaches {paper.flops_per_s / TERA:,.0f} TFLOP/s: {reached}.",
        "These limits follow from the inequalities of Austin et al. 2025, How to Scale Your "
        "Model, chapters 5 and 12; cs336_systems/costs/scale.py derives them.",
    )
    return make_table(title, columns_of("way", "most_ranks"), rows, notes)
