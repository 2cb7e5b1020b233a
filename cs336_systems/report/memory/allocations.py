"""Tables of the allocations of a `MemoryProfile`: the largest, what the peak consists of, what each block saves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from cs336_systems.analysis.memory.profile import BlockMemory, LikeAllocations, MemoryProfile, SavedTensor
from cs336_systems.report.columns import Column
from cs336_systems.report.listing import Listing, csv_of, label, percent, share
from cs336_systems.report.memory.words import MIB, Unit, innermost, shape_text, size, unit_for
from cs336_systems.report.table import Table, make_table
from cs336_systems.text import counted

NUM_CONTRIBUTORS = 5
"""Of what a block saves, as many as the course asks for."""
_MIB = Unit("MiB", MIB, 2)


def largest_listing(profile: MemoryProfile, top: int) -> Listing:
    """The `top` largest allocations with the code that they come from; as CSV all that the profile keeps."""
    rows = profile.largest
    columns: list[Column[LikeAllocations]] = [
        Column("asked for", "bytes", spare=4, says=lambda row: f"{row.requested_bytes:,}"),
        Column("asked for", "MiB", says=lambda row: _MIB.cell(row.requested_bytes)),
        Column("block", "MiB", spare=8, says=lambda row: _MIB.cell(row.num_bytes)),
        Column("count", spare=2, says=lambda row: f"{row.count:,}"),
        *_what_columns(),
    ]
    table = make_table("Largest allocations", columns, rows[:top], _shown(len(rows[:top]), len(rows)))
    return Listing(name="largest", tables=(table,) if rows else (), csv=csv_of(_csv_columns(), rows))


def at_peak_listing(profile: MemoryProfile, top: int) -> Listing:
    """The `top` groups of like allocations that the peak consists of, by bytes together; as CSV all that are kept."""
    rows, whole_bytes = profile.at_peak, profile.peak.allocated_bytes
    unit = unit_for(whole_bytes)
    columns: list[Column[LikeAllocations]] = [
        Column("together", unit.name, says=lambda row: unit.cell(row.bytes_at_peak)),
        Column("share", "%", spare=1, says=lambda row: percent(row.bytes_at_peak, whole_bytes)),
        Column("count", spare=2, says=lambda row: f"{row.count_at_peak:,}"),
        Column("each", "MiB", spare=4, says=lambda row: _MIB.cell(row.requested_bytes)),
        *_what_columns(),
    ]
    shown_bytes = sum(row.bytes_at_peak for row in rows[:top])
    notes = [
        "Together: in blocks; each: what was asked for.",
        f"Shown are {percent(shown_bytes, whole_bytes)} % of the peak.",
    ]
    csv = _csv_columns() | {
        "share_of_peak": lambda row: share(row.bytes_at_peak, whole_bytes),
    }
    table = make_table("What the peak consists of", columns, rows[:top], notes)
    return Listing(name="at_peak", tables=(table,) if rows else (), csv=csv_of(csv, rows))


def _what_columns() -> list[Column[LikeAllocations]]:
    return [
        Column("category", numeric=False, spare=3, says=attrgetter("category")),
        Column("phase", numeric=False, spare=9, says=lambda row: label(row.phase)),
        Column("name", numeric=False, says=lambda row: label(row.name)),
        Column("shape", numeric=False, spare=7, says=lambda row: shape_text(row.shape, row.dtype)),
        Column("formula", numeric=False, spare=5, says=attrgetter("explanation")),
        Column("place", numeric=False, spare=6, says=lambda row: innermost(row.places)),
    ]


def _csv_columns() -> dict[str, Callable[[LikeAllocations], object]]:
    return {
        "bytes": attrgetter("num_bytes"),
        "mib": lambda row: row.num_bytes / MIB,
        "requested_bytes": attrgetter("requested_bytes"),
        "count": attrgetter("count"),
        "count_at_peak": attrgetter("count_at_peak"),
        "bytes_at_peak": attrgetter("bytes_at_peak"),
        "category": attrgetter("category"),
        "phase": attrgetter("phase"),
        "name": attrgetter("name"),
        "shape": lambda row: " x ".join(map(str, row.shape)),
        "dtype": attrgetter("dtype"),
        "explanation": attrgetter("explanation"),
        "places": lambda row: " < ".join(f"{place.file}:{place.line} {place.function}" for place in row.places),
    }


def _shown(shown: int, known: int) -> list[str]:
    kinds = "Those of one size, category, name and place are one row."
    return [kinds, f"Shown are {shown} of {known} such rows."] if shown < known else [kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverBlocks:
    """One quantity of every block of the model, in bytes."""

    name: str
    num_bytes: tuple[int, ...]


def typical(blocks: Sequence[BlockMemory]) -> BlockMemory:
    """The first block that saves the median, the lower of the middle two; raise ValueError for no blocks."""
    if not blocks:
        raise ValueError("a typical block needs at least one block, got none")
    middle = sorted(block.saved_bytes for block in blocks)[(len(blocks) - 1) // 2]
    return next(block for block in blocks if block.saved_bytes == middle)


def blocks_listing(profile: MemoryProfile) -> Listing:
    """What each block saves and holds; to read, the least, median and most over the blocks."""
    blocks = profile.blocks
    rows = [
        OverBlocks(name=name, num_bytes=tuple(getattr(block, field) for block in blocks))
        for name, field in (("saved for backward", "saved_bytes"), ("parameters", "parameter_bytes"),
                            ("gradients", "gradient_bytes"))
    ]  # fmt: skip
    columns: list[Column[OverBlocks]] = [
        Column("of a block", numeric=False, says=attrgetter("name")),
        Column("min", "MiB", spare=2, says=lambda row: _MIB.cell(min(row.num_bytes))),
        Column("median", "MiB", says=lambda row: _MIB.cell(round(median(row.num_bytes)))),
        Column("max", "MiB", spare=1, says=lambda row: _MIB.cell(max(row.num_bytes))),
        Column("all blocks", "MiB", says=lambda row: _MIB.cell(sum(row.num_bytes))),
    ]
    csv: dict[str, Callable[[BlockMemory], object]] = {
        "block": attrgetter("name"),
        "saved_bytes": attrgetter("saved_bytes"),
        "recomputed_bytes": attrgetter("recomputed_bytes"),
        "saved_tensors": lambda row: len(row.saved),
        "parameter_bytes": attrgetter("parameter_bytes"),
        "gradient_bytes": attrgetter("gradient_bytes"),
    }
    notes = [f"Over {counted(len(blocks), 'block')}, in one step, without rounding; each is in blocks.csv."]
    if again := sum(block.recomputed_bytes for block in blocks):
        notes.append(f"Of what is saved, {size(again)} are not kept from forward on: backward computes them again.")
    tables = (make_table("Memory of a block", columns, rows, notes), _contributors_table(blocks)) if blocks else ()
    return Listing(name="blocks", tables=tables, csv=csv_of(csv, blocks))


def _contributors_table(blocks: Sequence[BlockMemory]) -> Table:
    block = typical(blocks)
    columns: list[Column[SavedTensor]] = [
        Column("size", "MiB", says=lambda row: _MIB.cell(row.num_bytes)),
        Column("share", "%", spare=1, says=lambda row: percent(row.num_bytes, block.saved_bytes)),
        Column("within the block", numeric=False, says=lambda row: label(row.name)),
        Column("shape", numeric=False, spare=3, says=lambda row: shape_text(row.shape, row.dtype)),
        Column("formula", numeric=False, spare=2, says=attrgetter("explanation")),
    ]
    alike = sum(_tensors(other) == _tensors(block) for other in blocks)
    notes = [
        f"Of {size(block.saved_bytes)} in {counted(len(block.saved), 'tensor')}, the same in {alike} of "
        f"{counted(len(blocks), 'block')}. Each tensor of each block is in saved.csv."
    ]
    rows = block.saved[:NUM_CONTRIBUTORS]
    return make_table(f"Largest tensors that {label(block.name)} saves for backward", columns, rows, notes)


def _tensors(block: BlockMemory) -> list[tuple[str, tuple[int, ...], str, int]]:
    """What the block saves, without that which names the block."""
    return [(tensor.name, tensor.shape, tensor.dtype, tensor.num_bytes) for tensor in block.saved]


def saved_listing(profile: MemoryProfile) -> Listing:
    """Every tensor that a block saves, as CSV; the largest of a typical block stand below the blocks."""
    rows = [(block, tensor) for block in profile.blocks for tensor in block.saved]
    return Listing(name="saved", tables=(), csv=_saved_csv(rows))


def _saved_csv(rows: Iterable[tuple[BlockMemory, SavedTensor]]) -> str:
    columns: dict[str, Callable[[tuple[BlockMemory, SavedTensor]], object]] = {
        "block": lambda row: row[0].name,
        "name": lambda row: row[1].name,
        "shape": lambda row: " x ".join(map(str, row[1].shape)),
        "dtype": lambda row: row[1].dtype,
        "bytes": lambda row: row[1].num_bytes,
        "share": lambda row: share(row[1].num_bytes, row[0].saved_bytes),
        "explanation": lambda row: row[1].explanation,
        "recomputed": lambda row: row[1].is_recomputed,
    }
    return csv_of(columns, rows)
