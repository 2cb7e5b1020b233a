"""Tables of memory: the peak and its categories, phase by phase, the largest allocations, what a
block saves.

They are for a terminal and for the files of a directory, of one snapshot or of the runs of a sweep.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ....analysis.memory.notes import START
from ....analysis.memory.profile import (
    Category,
    CategoryBytes,
    LikeAllocations,
    MemoryProfile,
    Moment,
    SavedTensor,
    encode_memory_profile,
)
from ....record import Status
from ....text import counted
from ...charts import Drawing, Picture
from ...columns import Column, Row, column, columns_of
from ...configurations import order
from ...formats import pngs_of, texts_of, to_markdown, write_files
from ...identity import file_names
from ...section import (
    Section,
    Table,
    all_tables,
    findings_table,
    known,
    labels,
    make_table,
    over_configurations,
    rows_of,
    settings,
    with_note,
)
from ...words import GIB, MIB, count, label, percent, ratio
from ..plugged import added_sections
from .bars import peak_charts
from .entry import MemoryEntry, difference_bytes, typical
from .findings import answer, findings
from .words import (
    GIB_CELL,
    MIB_CELL,
    MemoryUnit,
    about,
    check_words,
    in_unit,
    innermost,
    moment_ms,
    shape_text,
    size,
    unit_for,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMORY_FILE = "memory.json"
"""The profile of a single snapshot, in its directory."""
SMALL = 0.01
"""Part of the largest total below which a category is dropped first on a narrow terminal."""
NUM_CONTRIBUTORS = 5
"""Largest tensors of a block to list; the course asks for five."""
TOP_OF_RUNS = 3
"""Largest allocations to list for each of several runs."""
_LIKE_KEYS = (
    "bytes",
    "mib",
    "requested_bytes",
    "count",
    "count_at_peak",
    "bytes_at_peak",
    "category",
    "phase",
    "name",
    "shape",
    "dtype",
    "place",
    "places",
)


def category_key(category: Category, quantity: str) -> str:
    """The key of a column about a category, such as `optimizer_state_bytes`."""
    return f"{category.replace(' ', '_')}_{quantity}"


_MOMENT_KEYS = (
    "step",
    "moment",
    "time_ms",
    "allocated_bytes",
    "counted_bytes",
    "difference_bytes",
    "requested_bytes",
    "counted_requested_bytes",
    "reserved_bytes",
    "phase_peak_bytes",
    *(
        category_key(category, quantity)
        for quantity in ("bytes", "requested_bytes")
        for category in Category
    ),
)


def _category_values(moment: Moment) -> Row:
    """Bytes, requested bytes, blocks and share of each category at the moment."""
    categories = {part.category: part for part in moment.categories}
    values: Row = {}
    for name in Category:
        nothing = CategoryBytes(category=name, num_bytes=0, requested_bytes=0, count=0)
        part = categories.get(name, nothing)
        values[category_key(name, "bytes")] = part.num_bytes
        values[category_key(name, "requested_bytes")] = part.requested_bytes
        values[category_key(name, "blocks")] = part.count
        values[category_key(name, "share")] = ratio(part.num_bytes, moment.allocated_bytes)
    return values


def _category_columns(rows: Sequence[Row], unit: MemoryUnit, whole: str) -> list[Column]:
    """One column for each category; those that never reach SMALL of the largest `whole` are
    dropped first.
    """
    small = SMALL * max((row[whole] for row in rows), default=0)
    columns = []
    for name in Category:
        key = category_key(name, "bytes")
        largest = max((row[key] for row in rows), default=0)
        order = 1 if largest > small else 5
        columns.append(Column(name, unit.name, key=key, write=unit.cell, drop_order=order))
    return columns


def _unit(entries: Sequence[MemoryEntry]) -> MemoryUnit:
    """GiB for runs of a sweep; for a single snapshot what suits its size."""
    return GIB_CELL if entries[0].subject else unit_for(entries[0].profile.peak_reserved_bytes)


def peaks(entries: Sequence[MemoryEntry]) -> Section:
    """One row for each run or snapshot: its peak, then what the peak consists of."""
    rows = rows_of(entries, _peak)
    unit = _unit(entries)
    of_step = ("predicted_peak_allocated_bytes", "peak_reserved_bytes", "private_bytes")
    of_model = ("residual_stream_bytes", "block_saved_bytes", "block_gradient_bytes")
    allocated = in_unit("peak_allocated_bytes", unit)
    status = column("status")
    sizes = [
        allocated,
        column("peak_phase", drop_order=3),
        *(in_unit(key, unit) for key in of_step),
        *(in_unit(key, MIB_CELL) for key in of_model),
        status,
    ]
    parts = _category_columns(rows, unit, "peak_allocated_bytes")
    parts += [allocated, column("peak_phase", drop_order=2), status]
    of_runs = list(_notes_on_runs(entries))
    notes = ["Peak: allocated at most; reserved: held by PyTorch at most.", *of_runs]
    keys = tuple(next(_peak(entries[0])))
    section = over_configurations("peaks", "Peaks of memory", rows, sizes, notes, keys)
    consist = over_configurations("", "What the peaks consist of", rows, parts, of_runs, ())
    return replace(section, tables=(*section.tables, *consist.tables))


def _peak(entry: MemoryEntry) -> Iterator[Row]:
    """One row with all values of the peak."""
    profile = entry.profile
    peak = profile.peak
    block = typical(profile.blocks) if profile.blocks else None
    yield {
        "status": str(Status.OOM if entry.is_out_of_memory else Status.OK),
        "peak_allocated_gib": peak.allocated_bytes / GIB,
        "peak_allocated_bytes": peak.allocated_bytes,
        "peak_phase": peak.phase or None,
        "predicted_peak_allocated_bytes": entry.predicted_peak_bytes,
        "rounding_bytes": profile.rounding_bytes_at_peak,
        "peak_requested_bytes": profile.peak_requested_bytes,
        "held_bytes": profile.held_bytes,
        "reserved_at_peak_bytes": peak.reserved_bytes,
        "fragmentation_bytes": profile.fragmentation_bytes,
        "peak_reserved_bytes": profile.peak_reserved_bytes,
        "private_bytes": profile.private_bytes,
        "idle_private_bytes": profile.idle_private_bytes,
        "outside_bytes": profile.outside_bytes,
        "residual_stream_bytes": entry.residual_stream_bytes,
        "block_saved_bytes": block and block.saved_bytes,
        "block_gradient_bytes": block and block.gradient_bytes,
        "gpu_index": profile.device,
        "recorded_steps": profile.num_steps,
        **_category_values(peak),
    }


def _notes_on_runs(entries: Sequence[MemoryEntry]) -> Iterator[str]:
    """Notes on runs on several ranks, and on those that ran out of memory."""
    if any(entry.config and entry.config.ranks > 1 for entry in entries):
        yield "Of several ranks rank 0 is explained."
    if any(entry.is_out_of_memory for entry in entries):
        yield (
            "Out of memory: what there was before it, which is less than the run needs; after a "
            "first forward pass of training, gradients and the optimizer's state would have been "
            "added."
        )


def boundaries(entries: Sequence[MemoryEntry]) -> Section:
    """Memory at the end of each phase of the last step, beside the allocator's own count; the
    CSV has all steps.
    """
    rows = rows_of(entries, lambda entry: _moments(entry.profile))
    unit = _unit(entries)
    whole = ("allocated_bytes", "counted_bytes", "reserved_bytes", "phase_peak_bytes")
    shown = columns_of(
        "moment",
        column("time_s", write=moment_ms),
        *_category_columns(rows, unit, "allocated_bytes"),
        *(in_unit(key, unit) for key in whole),
    )
    wrong = check_words(chain.from_iterable(entry.profile.boundaries for entry in entries))
    notes = [wrong] if wrong else []
    title = "Memory from phase to phase"
    return over_configurations(
        "boundaries", title, rows, shown, notes, _MOMENT_KEYS, shown=itemgetter("is_shown")
    )


def _moments(profile: MemoryProfile) -> Iterator[Row]:
    """A row for each boundary of phases."""
    peaks = {(phase.step, phase.phase): phase.peak_bytes for phase in profile.phases}
    last = max((moment.step for moment in profile.boundaries), default=0)
    for moment in profile.boundaries:
        name = START if moment.phase == START else f"end of {label(moment.phase)}"
        yield {
            **asdict(moment),
            **_category_values(moment),
            "is_shown": moment.step == last,
            "moment": name if moment.phase else "unknown",
            "time_ms": None if moment.time_s is None else moment.time_s * 1e3,
            "difference_bytes": difference_bytes(moment),
            "requested_bytes": moment.requested_bytes,
            "phase_peak_bytes": peaks.get((moment.step, moment.phase)),
        }


def largest(entries: Sequence[MemoryEntry], top: int) -> Section:
    """The `top` largest allocations of each run, with the code that made them; of one snapshot
    those at its peak.

    The CSV of one snapshot has all that the profile keeps.
    """
    if entries[0].subject is None:
        return _largest_at_peak(entries[0].profile, top)
    shown = columns_of(
        column("requested_bytes", unit="bytes", write=count, drop_order=4),
        in_unit("requested_bytes", MIB_CELL),
        in_unit("bytes", MIB_CELL, name="block", drop_order=8),
        "count",
        *_origin_columns(),
    )
    rows = rows_of(entries, lambda entry: map(_like, entry.profile.largest[:top]))
    notes = ["Those of one size, category, name and place are one row."]
    return over_configurations("largest", "Largest allocations", rows, shown, notes, _LIKE_KEYS)


def _largest_at_peak(profile: MemoryProfile, top: int) -> Section:
    """The `top` groups of like allocations that take most of the peak, in a table.

    The CSV file has all groups at the peak, and then the largest of those that were not there.
    """
    whole_bytes = profile.peak.allocated_bytes
    # a group that is in both stays in its place among those at the peak
    groups = [_like(group) for group in dict.fromkeys((*profile.at_peak, *profile.largest))]
    at_peak = groups[: len(profile.at_peak)]
    rows = [
        row | {"share_of_peak": ratio(row["bytes_at_peak"], whole_bytes)} for row in at_peak[:top]
    ]
    columns = columns_of(
        in_unit("bytes_at_peak", unit_for(whole_bytes)),
        "share_of_peak",
        "count_at_peak",
        in_unit("requested_bytes", MIB_CELL, name="each", drop_order=4),
        *_origin_columns(),
    )
    shown = percent(sum(row["bytes_at_peak"] for row in rows), whole_bytes)
    notes = [f"Together: in blocks; each: what was asked for. Shown are {shown} % of the peak."]
    table = make_table("Largest allocations at the peak", known(columns, rows), rows, notes)
    return Section(name="largest", tables=(table,) if rows else (), rows=groups, keys=_LIKE_KEYS)


def _like(group: LikeAllocations) -> Row:
    """The values of a group of like allocations."""
    stack = [f"{place.file}:{place.line} {place.function}" for place in group.places]
    return {
        **_tensor(group),
        "mib": group.num_bytes / MIB,
        "place": innermost(group.places),
        "places": " < ".join(stack),
    }


def _tensor(tensor: LikeAllocations | SavedTensor) -> Row:
    """The values that like allocations and saved tensors both have."""
    return asdict(tensor) | {
        "bytes": tensor.num_bytes,
        "shape": " x ".join(map(str, tensor.shape)),
        "shape_and_type": shape_text(tensor.shape, tensor.dtype),
    }


def _origin_columns() -> list[Column]:
    """Columns that say what an allocation was for, and which code made it."""
    return columns_of(
        "category",
        column("phase", write=label, drop_order=9),
        "name",
        "shape_and_type",
        "place",
        Column("module", key="module", numeric=False, write=label),
    )


def blocks(profile: MemoryProfile) -> Section:
    """The largest tensors that a typical block saves for backward; the CSV has what each block
    saves and holds.
    """
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
    return Section(name="blocks", tables=(_saved_table(profile),), rows=rows)


def _saved_table(profile: MemoryProfile) -> Table:
    """The largest tensors that a typical block saves for backward."""
    block = typical(profile.blocks)
    tensors = []
    for saved in block.saved[:NUM_CONTRIBUTORS]:
        share = ratio(saved.num_bytes, block.saved_bytes)
        tensors.append(_tensor(saved) | {"share": share})
    shown = columns_of(
        in_unit("bytes", MIB_CELL),
        "share",
        column("name", name="within the block"),
        column("shape_and_type", drop_order=3),
    )
    alike = sum(other.saved_bytes == block.saved_bytes for other in profile.blocks)
    of_all = counted(len(profile.blocks), "block")
    in_all = f"{size(block.saved_bytes)} in {counted(len(block.saved), 'tensor')}"
    notes = [
        f"Of {in_all}, as much as in {alike} of {of_all}; parameters "
        f"{size(block.parameter_bytes)}, gradients {size(block.gradient_bytes)}. Each block is in "
        "blocks.csv."
    ]
    if again := block.recomputed_bytes:
        notes.append(
            f"Of these, {size(again)} are not kept from forward on: backward computes them again."
        )
    title = f"Largest tensors that {label(block.name)} saves for backward"
    return make_table(title, shown, tensors, notes)


def sections_of(entries: Sequence[MemoryEntry], top: int = TOP_OF_RUNS) -> list[Section]:
    """All sections in reading order, then pictures; a single snapshot also has one on the blocks of
    its model.

    The picture of a single snapshot is `timeline`. Runs have theirs as `<key>_timeline`, and
    several a bar each in `peaks`.
    """
    entries = _in_order(entries)
    sections = [peaks(entries), boundaries(entries), largest(entries, top)]
    added = added_sections(MemoryEntry, entries)
    profile = entries[0].profile
    if entries[0].subject is None:
        timeline = Drawing("timeline", partial(_draw, profile))
        sections += [blocks(profile), Section(name="timeline", pictures=[timeline])]
        return sections + added
    pictures: list[Picture] = [*peak_charts(entries), *_timelines(entries)]
    return [*sections, *added, Section(name="plots", pictures=pictures)]


def memory_tables(entries: Sequence[MemoryEntry]) -> list[Table]:
    """Tables for a terminal on the peaks of runs."""
    if not entries:
        return []
    entries = _in_order(entries)
    sections = [peaks(entries), *added_sections(MemoryEntry, entries)]
    return all_tables(sections)


def tables_of_one(profile: MemoryProfile, top: int) -> list[Table]:
    """Tables for a terminal on a single snapshot, without what `answer` says: further findings,
    then the details.
    """
    said = answer(profile)
    alone = [MemoryEntry(profile=profile)]
    further = findings_table([finding for finding in findings(profile) if finding not in said])
    sections = [boundaries(alone), largest(alone, top), blocks(profile)]
    sections += added_sections(MemoryEntry, alone)
    tables = [further, *all_tables(sections)]
    return [table for table in tables if table.rows]


def keep_memory(profile: MemoryProfile, directory: Path) -> None:
    """Write the profile itself into its directory."""
    write_files({MEMORY_FILE: encode_memory_profile(profile)}, directory)


def write_memory(
    profile: MemoryProfile, directory: Path, top: int, formats: Collection[str] = ()
) -> list[Path]:
    """Write memory.json, findings.md, plots/, and each section as CSV, Markdown and in the other
    `formats` into the directory; return the paths.

    The directory is made. The files of an empty section are removed.
    """
    files: dict[str, str | bytes] = {
        MEMORY_FILE: encode_memory_profile(profile),
        "findings.md": to_markdown(_findings(profile)),
    }
    for section in sections_of([MemoryEntry(profile=profile)], top):
        files |= {**texts_of(section, about(profile)), **pngs_of(section)}
    return write_files(files, directory, formats)


def _in_order(entries: Sequence[MemoryEntry]) -> list[MemoryEntry]:
    """The entries in the order of tables; a single snapshot, which has no record, stays as it
    is.
    """
    return sorted(entries, key=lambda entry: order(entry.subject) if entry.subject else ())


def _findings(profile: MemoryProfile) -> Table:
    """The table of findings on one profile, with the name of its snapshot below."""
    return with_note(findings_table(findings(profile)), about(profile))


def _draw(profile: MemoryProfile, settings: str = "", name: str = "") -> "Figure":
    """The picture of `draw_memory`, imported here: matplotlib is slow to import."""
    from .plots import draw_memory

    return draw_memory(profile, settings, name)


def _timelines(entries: Sequence[MemoryEntry]) -> list[Drawing]:
    """The picture of allocated memory over time for each run."""
    titles = labels(entries, always=("size", "context_length", "mode", "precision"))
    stems = file_names(entry.subject.key for entry in entries if entry.subject)
    drawings = []
    for entry, title, stem in zip(entries, titles, stems, strict=True):
        draw = partial(_draw, entry.profile, settings([entry]), title)
        drawings.append(Drawing(f"{stem}_timeline", draw))
    return drawings
