"""Tables of allocations: the largest, what the peak consists of, what each block of the model saves for backward."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from cs336_systems.analysis.memory.profile import BlockMemory, LikeAllocations, MemoryProfile, SavedTensor
from cs336_systems.report.columns import Column, Row, column
from cs336_systems.report.entries import over_configurations, rows_of
from cs336_systems.report.section import Section, Table, make_table
from cs336_systems.report.sections.memory.entries import Snapshot
from cs336_systems.report.sections.memory.words import (
    MIB_CELL,
    fields_of,
    in_unit,
    innermost,
    shape_text,
    size,
    typical,
    unit_for,
)
from cs336_systems.report.words import MIB, label, percent, ratio
from cs336_systems.text import counted

NUM_CONTRIBUTORS = 5
"""Largest tensors of a block to list; the course asks for five."""
NUM_LARGEST = 3
"""Largest allocations to list for each of several runs, and in a sentence."""
_LIKE_KEYS = (
    "bytes", "mib", "requested_bytes", "count", "count_at_peak", "bytes_at_peak", "category", "phase", "name", "shape",
    "dtype", "explanation", "place", "places",
)  # fmt: skip


def _tensor(row: LikeAllocations | SavedTensor) -> Row:
    return fields_of(row) | {
        "bytes": row.num_bytes,
        "shape": " x ".join(map(str, row.shape)),
        "shape_and_type": shape_text(row.shape, row.dtype),
    }


def _like(row: LikeAllocations) -> Row:
    return {
        **_tensor(row),
        "mib": row.num_bytes / MIB,
        "place": innermost(row.places),
        "places": " < ".join(f"{place.file}:{place.line} {place.function}" for place in row.places),
    }


def largest(entries: Sequence[Snapshot], top: int = NUM_LARGEST) -> Section:
    """The `top` largest allocations of each entry, with the code that made them; of one snapshot also at its peak.

    The CSV of one snapshot has all that the profile keeps.
    """

    def ranked(entry: Snapshot) -> Iterator[Row]:
        found = entry.profile.largest
        for rank, row in enumerate(found[:top] if entry.is_run else found):
            yield _like(row) | {"rank": rank}
        known = set(found)
        others = [row for row in entry.profile.at_peak if row not in known]
        yield from (_like(row) | {"rank": None} for row in ([] if entry.is_run else others))

    rows = rows_of(entries, ranked)
    ranks = [row["rank"] for row in rows if row["rank"] is not None]
    num_shown = sum(rank < top for rank in ranks)
    columns = [
        column("requested_bytes", unit="bytes", write=_exact, drop_order=4),
        in_unit("requested_bytes", MIB_CELL),
        in_unit("bytes", MIB_CELL, name="block", drop_order=8),
        column("count"),
        *_origin_columns(),
    ]
    notes = ["Those of one size, category, name and place are one row."]
    notes += [f"Shown are {num_shown} of {len(ranks)} such rows."] if num_shown < len(ranks) else []
    section = over_configurations(
        "largest", "Largest allocations", rows, columns, _LIKE_KEYS, notes,
        shown=lambda row: row["rank"] is not None and row["rank"] < top,
    )  # fmt: skip
    alone = [] if entries[0].is_run else list(_at_peak(entries[0].profile, top))
    return replace(section, tables=(*alone, *section.tables))


def _at_peak(profile: MemoryProfile, top: int) -> Iterator[Table]:
    """The `top` groups of like allocations at the peak, by the bytes of each group."""
    whole_bytes = profile.peak.allocated_bytes
    rows = [_like(row) | {"share_of_peak": ratio(row.bytes_at_peak, whole_bytes)} for row in profile.at_peak]
    columns = [
        in_unit("bytes_at_peak", unit_for(whole_bytes)),
        column("share_of_peak"),
        column("count_at_peak"),
        in_unit("requested_bytes", MIB_CELL, name="each", drop_order=4),
        *_origin_columns(),
    ]
    notes = [
        "Together: in blocks; each: what was asked for.",
        f"Shown are {percent(sum(row['bytes_at_peak'] for row in rows[:top]), whole_bytes)} % of the peak.",
    ]
    if rows:
        yield make_table("What the peak consists of", columns, rows[:top], notes)


def _exact(value: int) -> str:
    return f"{value:,}"


def _origin_columns() -> list[Column]:
    return [
        column("category"),
        column("phase", write=label, drop_order=9),
        column("name"),
        column("shape_and_type"),
        column("explanation"),
        column("place"),
    ]


def blocks(profile: MemoryProfile) -> Section:
    """What each block saves for backward and holds: its range over the blocks, and the tensors of a typical block."""
    if not profile.blocks:
        return Section(name="blocks")
    rows: list[Row] = [
        {
            "block": block.name,
            "saved_bytes": block.saved_bytes,
            "recomputed_bytes": block.recomputed_bytes,
            "saved_tensors": len(block.saved),
            "parameter_bytes": block.parameter_bytes,
            "gradient_bytes": block.gradient_bytes,
        }
        for block in profile.blocks
    ]
    names = {"saved for backward": "saved_bytes", "parameters": "parameter_bytes", "gradients": "gradient_bytes"}
    found = {name: [row[key] for row in rows] for name, key in names.items()}
    ranges = [
        {"of": name, "min": min(sizes), "median": round(median(sizes)), "max": max(sizes), "sum": sum(sizes)}
        for name, sizes in found.items()
    ]
    columns: list[Column] = [
        column("of", name="of a block"),
        Column("min", "MiB", drop_order=2, key="min", write=MIB_CELL.cell),
        Column("median", "MiB", key="median", write=MIB_CELL.cell),
        Column("max", "MiB", drop_order=1, key="max", write=MIB_CELL.cell),
        Column("all blocks", "MiB", key="sum", write=MIB_CELL.cell),
    ]
    notes = [f"Over {counted(len(rows), 'block')}, in one step, without rounding; each is in blocks.csv."]
    if again := sum(block.recomputed_bytes for block in profile.blocks):
        notes.append(f"Of what is saved, {size(again)} are not kept from forward on: backward computes them again.")
    table = make_table("Memory of a block", columns, ranges, notes)
    return Section(name="blocks", tables=(table, contributors(profile.blocks)), rows=rows)


def contributors(found: Sequence[BlockMemory]) -> Table:
    """The largest tensors that a typical one of the blocks saves."""
    block = typical(found)
    rows = [*_saved(block)][:NUM_CONTRIBUTORS]
    columns = [
        in_unit("bytes", MIB_CELL),
        column("share"),
        column("name", name="within the block"),
        column("shape_and_type", drop_order=3),
        column("explanation", drop_order=2),
    ]
    alike = sum(_tensors(other) == _tensors(block) for other in found)
    notes = [
        f"Of {size(block.saved_bytes)} in {counted(len(block.saved), 'tensor')}, the same in {alike} of "
        f"{counted(len(found), 'block')}."
    ]
    return make_table(f"Largest tensors that {label(block.name)} saves for backward", columns, rows, notes)


def _tensors(block: BlockMemory) -> list[tuple[str, tuple[int, ...], str, int]]:
    """What the block saves, without the explanations, which name the block."""
    return [(tensor.name, tensor.shape, tensor.dtype, tensor.num_bytes) for tensor in block.saved]


def _saved(block: BlockMemory) -> Iterator[Row]:
    for tensor in block.saved:
        yield {
            **_tensor(tensor),
            "share": ratio(tensor.num_bytes, block.saved_bytes),
        }
