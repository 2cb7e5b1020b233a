"""A step on many GPUs as tables: the forecast of each way to share it, and from where on
communication limits it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...config import RunConfig
from ...costs.curves import MATMUL_EFFICIENCY, Curves
from ...costs.scale import Paper, ScaleStep, Scheme, largest_ranks
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


def scale_section(found: Scale) -> Section:
    """The forecast, and the most ranks of each way; the CSV has a row for each way and number of
    ranks.
    """
    rows = list(scale_rows(found))
    return Section(
        name="scale",
        tables=(_steps_table(found, rows), _largest_table(found)),
        rows=rows,
        keys=CSV_COLUMNS,
    )


def scale_rows(found: Scale) -> Iterator[Row]:
    """A row for each way and number of ranks; None for what is not known."""
    for scheme, ranks, step in found.steps:
        row: Row = dict.fromkeys(CSV_COLUMNS) | {"way": scheme, "ranks": ranks}
        if step is not None:
            times, needed_bytes, has_bytes = step.times, step.memory_bytes, found.memory_bytes
            row |= {
                "step_ms": 1e3 * times.time.step_s,
                "compute_ms": 1e3 * times.compute_s,
                "communication_ms": 1e3 * times.communication_s,
                "slowed_ms": 1e3 * times.slowed_s,
                "exposed_ms": 1e3 * times.exposed_s,
                "peak_gib": ratio(needed_bytes, GIB),
                "fits": None
                if needed_bytes is None or has_bytes is None
                else needed_bytes <= has_bytes,
                "mfu": ratio(step.flops_per_s, found.peak_flops_per_s),
            }
        yield row


def _steps_table(found: Scale, rows: list[Row]) -> Table:
    keys = (
        "way",
        "ranks",
        "step_ms",
        "compute_ms",
        "communication_ms",
        "slowed_ms",
        "exposed_ms",
        "exposed_part",
        "peak_gib",
        "mfu",
    )
    shown = [
        row
        | {
            "exposed_part": ratio(row["exposed_ms"], row["step_ms"]),
            "prediction_is_doubted": found.curves.is_in_doubt,
        }
        for row in rows
    ]
    title = f"One step of {found.config.label} on many {found.device_name}"
    notes = [*_step_notes(found), *_misfits(found, rows)]
    return make_table(title, columns_of(*keys), shown, notes)


def _misfits(found: Scale, rows: list[Row]) -> Iterator[str]:
    """Which rows need more memory than a GPU has by its data sheet."""
    too_large = [row for row in rows if row["fits"] is False]
    for way in dict.fromkeys(row["way"] for row in too_large):
        counts = ", ".join(f"{row['ranks']:,}" for row in too_large if row["way"] == way)
        memory_gib = (found.memory_bytes or 0) / GIB
        yield (
            f"{way} on {counts} does not fit: {found.device_name} has {memory_gib:.0f} GiB by "
            "its data sheet."
        )


def _step_notes(found: Scale) -> Iterator[str]:
    yield (
        "A step takes the sum of computing, slowed and exposed: communication is exposed where "
        "kernels wait for it, and slows the kernels beside it."
    )
    if not found.curves.is_measured:
        yield by_data_sheet(found.device_name)
    elif found.curves.is_shipped:
        yield SHIPPED
    if found.curves.is_in_doubt:
        yield DOUBTED_FORECAST
    if found.peak_flops_per_s is None:
        yield "No MFU: the peak of this device is not known."


def _largest_table(found: Scale) -> Table:
    paper, links = found.paper, found.paper.links
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
    measured, promised = (
        "its best matmul measured",
        f"{MATMUL_EFFICIENCY:g} of its peak by the data sheet",
    )
    within = (
        f"Each GPU sends {links.node_bytes_per_s / GIGA:,.0f} GB/s to others of its node "
        f"({found.link_source})"
    )
    beyond = links.network_bytes_per_s
    notes = (
        "On more ranks communication takes longer than the matmuls of the blocks, with which it "
        "may overlap.",
        f"{within}, and {beyond / GIGA:,.0f} GB/s to other nodes."
        if beyond is not None
        else f"{within}.",
        f"A GPU reaches {paper.flops_per_s / TERA:,.0f} TFLOP/s: "
        f"{measured if found.curves.is_measured else promised}.",
        "These limits follow from the inequalities of Austin et al. 2025, How to Scale Your "
        "Model, chapters 5 and 12; cs336_systems/costs/scale.py derives them.",
    )
    return make_table(title, columns_of("way", "most_ranks"), rows, notes)
