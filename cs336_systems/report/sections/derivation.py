"""What ranks compute and send in each way to share a step, on paper: expressions beside their
numbers, and until how many ranks communication takes no longer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ...config import ModelConfig
from ...costs.derivation import Exchange, Scheme, Sizes, exchanges, limits, parts_of
from ...costs.shards import FP32_BYTES, HALF_BYTES
from ..columns import Row, columns_of
from ..section import Section, Table, make_table
from ..words import GIGA, TERA

WORDS = {
    Scheme.DATA: "data parallel",
    Scheme.SHARDED: "fully sharded",
    Scheme.TENSOR: "tensor parallel",
    Scheme.BOTH: "fully sharded and tensor parallel",
}
CSV_COLUMNS = (
    *("part", "way", "pass", "collective", "sent", "sent_bytes", "sent_ms"),
    *("flops_expression", "flops", "computed_ms", "overlapped_ms", "summed_ms"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """A model and the GPUs that share its step."""

    model: ModelConfig
    sizes: Sizes
    """With the rate of the slowest link that the ranks use."""
    node_bytes_per_s: float
    """Rate within a node."""


def derivation_section(derivation: Derivation) -> Section:
    """What is sent, and the largest numbers of ranks; the CSV has a row for each collective."""
    rows = list(_rows(derivation))
    tables = [_letters(derivation)]
    for part in parts_of(derivation.model):
        of_part = [row for row in rows if row["part"] == part.name]
        keys = [key for key in CSV_COLUMNS if key != "part"]
        title = f"{part.name}, P = {part.expression} = {part.elements:,}"
        note = (
            "Sent: by each rank in this pass. Overlapped: all collectives of the pass beside its "
            "matmuls, the longer of both; summed: one after the other."
        )
        tables.append(make_table(title, columns_of(*keys), of_part, [note]))
    return Section(
        name="derivation", tables=(*tables, _limits_table(derivation)), rows=rows, keys=CSV_COLUMNS
    )


def _rows(derivation: Derivation) -> Iterator[Row]:
    """A row for each collective of each pass."""
    sizes = derivation.sizes
    for part in parts_of(derivation.model):
        every = list(exchanges(part, sizes))
        for one in every:
            sent_s = sum(other.sent_s(sizes) for other in every if _is_beside(one, other))
            computed_s = one.computed_s(sizes)
            yield {
                "part": part.name,
                "way": WORDS[one.scheme],
                "pass": "backward" if one.is_backward else "forward",
                "collective": one.collective,
                "sent": one.sent,
                "sent_bytes": one.sent_bytes,
                "sent_ms": 1e3 * one.sent_s(sizes),
                "flops_expression": one.flops,
                "flops": one.flops_count,
                "computed_ms": 1e3 * computed_s,
                "overlapped_ms": 1e3 * max(computed_s, sent_s),
                "summed_ms": 1e3 * (computed_s + sent_s),
            }


def _is_beside(one: Exchange, other: Exchange) -> bool:
    """Whether both are sent in the same pass of the same way: of two rings one is taken."""
    is_same = (one.scheme, one.is_backward) == (other.scheme, other.is_backward)
    return is_same and (one.scheme is not Scheme.DATA or one is other)


def _letters(derivation: Derivation) -> Table:
    """What the letters stand for."""
    sizes = derivation.sizes
    meanings = (
        ("B", sizes.B, "tokens of a step on all ranks"),
        ("D", sizes.D, "d_model"),
        ("D_FF", sizes.D_FF, "width of the feed-forward layer"),
        ("N", sizes.N, f"ranks, {sizes.X:g} (X) times {sizes.Y:g} (Y) where two ways are mixed"),
        ("C", sizes.C / TERA, "TFLOP/s of a GPU in matmuls"),
        ("W", sizes.W / GIGA, "GB/s that a GPU sends"),
        ("e", sizes.e, "bytes of an element of weights and activations"),
        ("g", sizes.g, "bytes of an element of gradients that are averaged whole"),
    )
    rows = [dict(zip(("quantity", "amount", "how"), meaning, strict=True)) for meaning in meanings]
    return make_table("Letters", columns_of("quantity", "amount", "how"), rows)


def _limits_table(derivation: Derivation) -> Table:
    """The inequalities solved for N, with gradients of 2 and of 4 bytes, in a node and beyond."""
    rates = sorted({derivation.sizes.W, derivation.node_bytes_per_s}, reverse=True)
    choices = product(rates, parts_of(derivation.model), (HALF_BYTES, FP32_BYTES))
    rows: list[Row] = []
    for rate, part, gradient_bytes in choices:
        sizes = replace(derivation.sizes, g=gradient_bytes, W=rate)
        for scheme, collective, expression, most in limits(part, sizes):
            is_data = scheme is Scheme.DATA
            if is_data or gradient_bytes == HALF_BYTES:
                row: Row = {
                    "part": part.name,
                    "way": WORDS[scheme],
                    "collective": f"{collective}, g = {gradient_bytes}" if is_data else collective,
                    "expression": expression,
                    "amount": most,
                    "unit": f"at {rate / GIGA:,.0f} GB/s",
                }
                rows.append(row)
    notes = (
        "On fewer ranks the collectives take no longer than the matmuls beside them; in the mixed "
        "way on up to these X times up to these Y, and not on every N = X Y below their product.",
        "From Austin et al. 2025, How to Scale Your Model, chapters 5 and 12; "
        "cs336_systems/costs/derivation.py derives them.",
    )
    keys = ("part", "way", "collective", "expression", "amount", "unit")
    return make_table("N, at most", columns_of(*keys), rows, notes)
