"""Tables of allocations: the largest, what the peak consists of, what each block of the model saves for backward.

Of one `MemoryProfile`, the largest over the configurations of a sweep too.
"""

from collections.abc import Sequence
from statistics import median

from cs336_systems.analysis.memory.profile import BlockMemory, LikeAllocations, MemoryProfile, SavedTensor
from cs336_systems.report.columns import Column, column
from cs336_systems.report.entries import Values, over_configurations, rows_of
from cs336_systems.report.numbers import label, percent, share
from cs336_systems.report.section import Section
from cs336_systems.report.sections.memory.entries import MemoryEntry
from cs336_systems.report.sections.memory.words import MIB, MIB_CELL, in_unit, innermost, shape_text, size, unit_for
from cs336_systems.report.table import Table, make_table
from cs336_systems.text import counted

NUM_CONTRIBUTORS = 5
"""Of what a block saves, as many as the course asks for."""
NUM_LARGEST = 3
"""Allocations of each configuration to list."""
_LIKE_CSV = (
    "bytes", "mib", "requested_bytes", "count", "count_at_peak", "bytes_at_peak", "category", "phase", "name", "shape",
    "dtype", "explanation", "places",
)  # fmt: skip


def _like(row: LikeAllocations) -> Values:
    return {
        "bytes": row.num_bytes,
        "mib": row.num_bytes / MIB,
        "requested_bytes": row.requested_bytes,
        "count": row.count,
        "count_at_peak": row.count_at_peak,
        "bytes_at_peak": row.bytes_at_peak,
        "category": row.category,
        "phase": row.phase,
        "name": row.name,
        "shape": " x ".join(map(str, row.shape)),
        "shape_and_type": shape_text(row.shape, row.dtype),
        "dtype": row.dtype,
        "explanation": row.explanation,
        "place": innermost(row.places),
        "places": " < ".join(f"{place.file}:{place.line} {place.function}" for place in row.places),
    }


def largest_section(profile: MemoryProfile, top: int) -> Section:
    """The `top` largest allocations with the code that they come from; as CSV all that the profile keeps."""
    rows = [*map(_like, profile.largest)]
    columns = [
        column("requested_bytes", unit="bytes", write=_whole, drop_order=4),
        in_unit("requested_bytes", MIB_CELL),
        in_unit("bytes", MIB_CELL, "block", drop_order=8),
        column("count"),
        *_what_columns(),
    ]
    table = make_table("Largest allocations", columns, rows[:top], _shown(len(rows[:top]), len(rows)))
    return Section(name="largest", tables=(table,) if rows else (), rows=rows, keys=_LIKE_CSV)


def largest_by_configuration(entries: Sequence[MemoryEntry]) -> Section:
    """The largest allocations of every configuration, and where they come from."""
    rows = rows_of(entries, lambda entry: map(_like, entry.profile.largest[:NUM_LARGEST]))
    columns = [
        column("requested_bytes", unit="bytes", write=_whole, drop_order=3),
        column("requested_bytes", name="size", write=size),
        column("count", drop_order=1),
        column("category", drop_order=2),
        column("explanation", drop_order=4),
        column("place", drop_order=5),
    ]
    csv = ("requested_bytes", "bytes", "count", "category", "name", "explanation", "place")
    return over_configurations("largest", "Largest allocations", rows, columns, csv, [])


def at_peak_section(profile: MemoryProfile, top: int) -> Section:
    """The `top` groups of like allocations that the peak consists of, by bytes together; as CSV all that are kept."""
    whole_bytes = profile.peak.allocated_bytes
    rows = [_like(row) | {"share_of_peak": share(row.bytes_at_peak, whole_bytes)} for row in profile.at_peak]
    columns = [
        in_unit("bytes_at_peak", unit_for(whole_bytes)),
        column("share_of_peak"),
        column("count_at_peak"),
        in_unit("requested_bytes", MIB_CELL, "each", drop_order=4),
        *_what_columns(),
    ]
    notes = [
        "Together: in blocks; each: what was asked for.",
        f"Shown are {percent(sum(row['bytes_at_peak'] for row in rows[:top]), whole_bytes)} % of the peak.",
    ]
    table = make_table("What the peak consists of", columns, rows[:top], notes)
    keys = (*_LIKE_CSV, "share_of_peak")
    return Section(name="at_peak", tables=(table,) if rows else (), rows=rows, keys=keys)


def _whole(value: int) -> str:
    return f"{value:,}"


def _what_columns() -> list[Column[Values]]:
    return [
        column("category"),
        column("phase", write=label, drop_order=9),
        column("name"),
        column("shape_and_type"),
        column("explanation"),
        column("place"),
    ]


def _shown(shown: int, known: int) -> list[str]:
    kinds = "Those of one size, category, name and place are one row."
    return [kinds, f"Shown are {shown} of {known} such rows."] if shown < known else [kinds]


def typical(blocks: Sequence[BlockMemory]) -> BlockMemory:
    """The first block that saves the median, the lower of the middle two; raise ValueError for no blocks."""
    if not blocks:
        raise ValueError("a typical block needs at least one block, got none")
    middle = sorted(block.saved_bytes for block in blocks)[(len(blocks) - 1) // 2]
    return next(block for block in blocks if block.saved_bytes == middle)


def blocks_section(profile: MemoryProfile) -> Section:
    """What each block saves and holds; to read, the least, median and most over the blocks."""
    blocks = profile.blocks
    if not blocks:
        return Section(name="blocks")
    every = [
        {
            "block": block.name,
            "saved_bytes": block.saved_bytes,
            "recomputed_bytes": block.recomputed_bytes,
            "saved_tensors": len(block.saved),
            "parameter_bytes": block.parameter_bytes,
            "gradient_bytes": block.gradient_bytes,
        }
        for block in blocks
    ]
    names = {"saved for backward": "saved_bytes", "parameters": "parameter_bytes", "gradients": "gradient_bytes"}
    found = {name: [getattr(block, field) for block in blocks] for name, field in names.items()}
    rows = [
        {"of": name, "min": min(sizes), "median": round(median(sizes)), "max": max(sizes), "sum": sum(sizes)}
        for name, sizes in found.items()
    ]
    columns: list[Column[Values]] = [
        column("of", name="of a block"),
        Column("min", "MiB", drop_order=2, key="min", write=MIB_CELL.cell),
        Column("median", "MiB", key="median", write=MIB_CELL.cell),
        Column("max", "MiB", drop_order=1, key="max", write=MIB_CELL.cell),
        Column("all blocks", "MiB", key="sum", write=MIB_CELL.cell),
    ]
    notes = [f"Over {counted(len(blocks), 'block')}, in one step, without rounding; each is in blocks.csv."]
    if again := sum(block.recomputed_bytes for block in blocks):
        notes.append(f"Of what is saved, {size(again)} are not kept from forward on: backward computes them again.")
    tables = (make_table("Memory of a block", columns, rows, notes), _contributors_table(blocks))
    return Section(name="blocks", tables=tables, rows=every)


def _saved(block: BlockMemory, tensor: SavedTensor) -> Values:
    return {
        "block": block.name,
        "name": tensor.name,
        "shape": " x ".join(map(str, tensor.shape)),
        "shape_and_type": shape_text(tensor.shape, tensor.dtype),
        "dtype": tensor.dtype,
        "bytes": tensor.num_bytes,
        "share": share(tensor.num_bytes, block.saved_bytes),
        "explanation": tensor.explanation,
        "recomputed": tensor.is_recomputed,
    }


def _contributors_table(blocks: Sequence[BlockMemory]) -> Table:
    block = typical(blocks)
    rows = [_saved(block, tensor) for tensor in block.saved[:NUM_CONTRIBUTORS]]
    columns = [
        in_unit("bytes", MIB_CELL),
        column("share"),
        column("name", name="within the block"),
        column("shape_and_type", drop_order=3),
        column("explanation", drop_order=2),
    ]
    alike = sum(_tensors(other) == _tensors(block) for other in blocks)
    notes = [
        f"Of {size(block.saved_bytes)} in {counted(len(block.saved), 'tensor')}, the same in {alike} of "
        f"{counted(len(blocks), 'block')}. Each tensor of each block is in saved.csv."
    ]
    return make_table(f"Largest tensors that {label(block.name)} saves for backward", columns, rows, notes)


def _tensors(block: BlockMemory) -> list[tuple[str, tuple[int, ...], str, int]]:
    """What the block saves, without that which names the block."""
    return [(tensor.name, tensor.shape, tensor.dtype, tensor.num_bytes) for tensor in block.saved]


def saved_section(profile: MemoryProfile) -> Section:
    """Every tensor that a block saves, as CSV; the largest of a typical block stand below the blocks."""
    rows = [_saved(block, tensor) for block in profile.blocks for tensor in block.saved]
    keys = ("block", "name", "shape", "dtype", "bytes", "share", "explanation", "recomputed")
    return Section(name="saved", rows=rows, keys=keys)
