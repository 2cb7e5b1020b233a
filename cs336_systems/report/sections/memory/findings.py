"""What tables, pictures and sentences about memory are made of, and what stands out in a
`MemoryProfile`, in sentences.

Problems are named only if they cost at least as much as the thresholds below.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....analysis.memory.profile import (
    MIN_LATER,
    BlockMemory,
    Category,
    FailedRequest,
    MemoryProfile,
    Moment,
    Place,
    read_memory_profile,
)
from ....config import Profiler, RunConfig
from ....costs.memory import predicted_peak_bytes, residual_stream_bytes
from ....record import RunRecord
from ....subject import Subject
from ....sweep.store import explanation_path
from ....text import counted
from ...columns import Column, column
from ...section import load_entries
from ...words import GIB, MIB, label, percent_of, significant

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

START = "start"
"""Name of the phase of a moment at which a step begins."""
KIB = 2**10
KEPT_FOLDERS = 2
"""Last parts of a path that a table shows; the CSV has the whole path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry:
    """One explained snapshot of any program; of a run of a sweep also its configuration and its
    device.
    """

    profile: MemoryProfile
    subject: Subject | None = None
    """None for a single snapshot, which has no columns of settings."""
    device_name: str | None = None

    @property
    def config(self) -> RunConfig | None:
        """The run's configuration; None for a single snapshot and for a watched loop."""
        return self.subject if isinstance(self.subject, RunConfig) else None

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory ran out, so that the peak is only what was allocated before."""
        return self.profile.work.out_of_memory > 0

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak of the recorded steps; None if the configuration is unknown or has no
        prediction.
        """
        return None if self.config is None else predicted_peak_bytes(self.config)

    @property
    def residual_stream_bytes(self) -> int | None:
        """Bytes of one tensor of batch x context x d_model in fp32; None if the shape of the
        model is unknown.
        """
        config = self.config
        return (
            None
            if config is None or config.model_factory is not None
            else residual_stream_bytes(config)
        )


def load_memory(records: Sequence[RunRecord], directory: Path) -> list[MemoryEntry]:
    """The runs of a sweep whose memory was recorded, with their profiles in `directory`/memory, in
    the order of tables.

    A missing profile is left out, with a warning.
    """

    def load(record: RunRecord) -> MemoryEntry:
        profile = read_memory_profile(explanation_path(record.subject, directory / "runs"))
        return MemoryEntry(subject=record.subject, profile=profile, device_name=record.device_name)

    return load_entries(records, (Profiler.MEMORY,), load)


def fields_of(part: "DataclassInstance") -> dict[str, Any]:
    """The fields of a part of a profile by name, which is also the key of a column."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


def by_category(moment: Moment) -> dict[Category, int]:
    """Bytes of each category at the moment, counted in blocks; 0 for an absent category."""
    return dict.fromkeys(Category, 0) | {row.category: row.num_bytes for row in moment.categories}


def difference_bytes(moment: Moment) -> int | None:
    """Bytes by which the snapshot's blocks exceed the allocator's count; None if not counted."""
    return None if moment.counted_bytes is None else moment.allocated_bytes - moment.counted_bytes


def typical(blocks: Sequence[BlockMemory]) -> BlockMemory:
    """The first block that saves the median, the lower of the middle two, of at least one block."""
    middle = sorted(block.saved_bytes for block in blocks)[(len(blocks) - 1) // 2]
    return next(block for block in blocks if block.saved_bytes == middle)


@dataclass(frozen=True, slots=True)
class MemoryUnit:
    """A unit of memory with fixed decimals, so that the cells of a table can be compared at a
    glance.
    """

    name: str
    num_bytes: int
    decimals: int

    def cell(self, num_bytes: int) -> str:
        """The bytes in this unit; `< 0.01` for what is more than nothing but less than the
        decimals show.
        """
        least = 10.0**-self.decimals
        value = num_bytes / self.num_bytes
        if num_bytes and abs(value) < least / 2:
            return f"< {least:.{self.decimals}f}"
        return f"{value:,.{self.decimals}f}" if num_bytes else "0"


GIB_CELL, MIB_CELL = MemoryUnit("GiB", GIB, 2), MemoryUnit("MiB", MIB, 2)


def unit_for(largest_bytes: int) -> MemoryUnit:
    """GiB for a table whose largest value is at least one, MiB below."""
    return MemoryUnit("GiB", GIB, 3) if largest_bytes >= GIB else MIB_CELL


def in_unit(key: str, unit: MemoryUnit, name: str = "", drop_order: int | None = None) -> Column:
    """The column of bytes of this key in this unit, in one table under another name or with
    another order.
    """
    found = column(key, unit=unit.name, write=unit.cell)
    order = found.drop_order if drop_order is None else drop_order
    return replace(found, name=name or found.name, drop_order=order)


def size(num_bytes: int) -> str:
    """The bytes for a sentence: `18.84 GiB`, `6.25 MiB`, one decimal from 100 on; below a KiB
    whole.
    """
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.{1 if abs(num_bytes) >= 100 * unit else 2}f} {name}"
    return counted(num_bytes, "byte")


def about(profile: MemoryProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    steps = (
        f"{counted(profile.num_steps, 'step')}, counted from 0"
        if profile.num_steps > 1
        else "1 step, number 0"
    )
    known = steps if profile.num_steps else "no steps known to the file"
    return f"{label(profile.source)}, GPU {profile.device}, {known}."


def when(moment: Moment | FailedRequest) -> str:
    """The moment for a sentence: `15.0 ms after the first event, in backward of step 0`."""
    where = f", in {label(moment.phase)}" if moment.phase else ""
    step = f"{' of' if moment.phase else ', in'} step {moment.step}" if moment.step >= 0 else ""
    return f"{moment_ms(moment.time_s)} ms after the first event{where}{step}"


def moment_ms(time_s: float) -> str:
    """The time in ms, to a tenth, or to three digits where that is more."""
    return f"{time_s * 1e3:,.1f}" if time_s >= 0.01 else significant(time_s * 1e3, 3)


def check_words(moments: Iterable[Moment]) -> str:
    """Whether categories, which add up to what is allocated, agree with the allocator's own
    count, as a sentence.
    """
    differences = [found for found in map(difference_bytes, moments) if found is not None]
    if wrong := [difference for difference in differences if difference]:
        return (
            f"Check failed: at {len(wrong):,} of {len(differences):,} boundaries the blocks of "
            "the snapshot differ from what PyTorch's allocator counted, by "
            f"{max(wrong, key=abs):+,} bytes at most."
        )
    where = "the one boundary" if len(differences) == 1 else f"all {len(differences):,} boundaries"
    return (
        f"Check: at {where} the categories add up to what PyTorch's allocator counted, to the byte."
    )


def shape_text(shape: tuple[int, ...], dtype: str) -> str:
    """Shape and data type as far as they are known: `4 x 512 x 768 float32`."""
    return " ".join(part for part in (" x ".join(map(str, shape)), label(dtype)) if part)


def innermost(places: Sequence[Place]) -> str:
    """The innermost place with the end of its path, `model/transformer.py:123 softmax`; empty
    without a stack.
    """
    if not places:
        return ""
    folders = re.split(r"[/\\]", places[0].file)
    return (
        f"{label('/'.join(folders[-KEPT_FOLDERS:]))}:{places[0].line} {label(places[0].function)}"
    ).strip()


MIN_FRAGMENTATION = 0.15
"""Smallest unused part of the reserved memory that is a finding: less is the usual cache of a
few segments.
"""
MIN_FRAGMENTATION_BYTES = 256 * MIB
"""Smallest unused memory that is a finding: the cache of a small model is a large part of
little.
"""
MIN_UNKNOWN = 0.05
"""Smallest part of the peak of unknown use that is a finding: less changes no conclusion."""
MIN_GROWTH = 0.001
"""Smallest growth from step to step that is a finding, as a part of the peak: a kept loss is
only 512 bytes.
"""
LEAST_STEPS = 2
"""Fewest steps that show a growth: a single step may leave what later ones use again, such as
cuBLAS workspaces.
"""
MIN_OUTSIDE_BYTES = 2 * GIB
"""Smallest use outside of PyTorch that is a finding: a CUDA context with libraries takes half a
GiB to one.
"""


EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
MIN_PART = 0.001
"""The sentence on the peak leaves out parts below this share of the whole."""
NUM_PLACES = 3
"""Most places that a sentence names."""


def findings(profile: MemoryProfile) -> tuple[str, ...]:
    """Sentences: running out of memory comes first, then the peak, then problems, and what could
    not be read.
    """
    wrong = [text for find in (_first_step, _growth, _problems, _parts) for text in find(profile)]
    return (*_out_of_memory(profile), _peak(profile.peak), *wrong, *profile.notes)


def answer(profile: MemoryProfile) -> tuple[str, ...]:
    """Three sentences: how much memory and of what, which code made most of it, and what was
    reserved.
    """
    return (*_out_of_memory(profile), _peak(profile.peak), *_most(profile), _reserved(profile))[:3]


def _most(profile: MemoryProfile) -> Iterator[str]:
    """The code that made most of what was there at the peak, or the tensors where their names
    are known.
    """
    of = Counter[str]()
    for row in profile.at_peak:
        made_at = f"made at {innermost(row.places)}" if row.places else ""
        of[f"{row.name} ({row.category})" if row.name else made_at] += row.bytes_at_peak
    named = [(name, num_bytes) for name, num_bytes in of.most_common(NUM_PLACES) if name]
    if named:
        yield (
            "Its largest parts: "
            f"{', '.join(f'{size(num_bytes)} {label(name)}' for name, num_bytes in named)}."
        )


def _reserved(profile: MemoryProfile) -> str:
    """What PyTorch had from the driver, and what of it no block used."""
    text = f"PyTorch has reserved {size(profile.peak_reserved_bytes)} at most"
    if unused := profile.fragmentation_bytes:
        text += f"; at the peak {size(unused)} of it were in no block"
    if profile.private_bytes:
        text += f"; private pools, as CUDA graphs have, hold {size(profile.private_bytes)}"
        text += (
            f", {size(profile.idle_private_bytes)} of it in no block but in use when a graph "
            "is replayed"
        )
    return f"{text}."


def _out_of_memory(profile: MemoryProfile) -> Iterator[str]:
    failure, count = profile.work.first_failure, profile.work.out_of_memory
    if failure is None:
        return
    text = (
        f"Out of memory {'once,' if count == 1 else f'{count:,} times, first'} "
        f"{when(failure)}{f', at {innermost(failure.places)}' if failure.places else ''}, after "
        f"{failure.event:,} of {counted(profile.work.events, 'event')}: "
        f"{size(failure.requested_bytes)} were asked for and {size(failure.free_bytes)} were free "
        "on the device."
    )
    unused = failure.reserved_bytes - failure.allocated_bytes - failure.idle_private_bytes
    if unused > 0 and unused + failure.free_bytes >= failure.requested_bytes:
        remedy = "" if profile.is_expandable else f": {EXPANDABLE} may make room"
        text += f" PyTorch itself held {size(unused)} that no block used then, in pieces{remedy}."
    yield text


def _peak(peak: Moment) -> str:
    """The peak, when it was, and what it consists of, the largest part first."""
    whole, ordered = (
        peak.allocated_bytes,
        sorted(by_category(peak).items(), key=lambda part: -part[1]),
    )
    said = [(label(name), part) for name, part in ordered if part and part >= MIN_PART * whole]
    parts = ", ".join(f"{name} {size(part)} ({100 * part / whole:.1f} %)" for name, part in said)
    return f"The peak is {size(whole)}, {when(peak)}; it consists of {parts or 'nothing'}."


def _first_step(profile: MemoryProfile) -> Iterator[str]:
    """A first step needs less memory than later ones, as the optimizer's state appears at its
    end.
    """
    state = [by_category(moment)[Category.OPTIMIZER_STATE] for moment in profile.boundaries]
    if not state or state[-1] <= state[0]:
        return
    peaks: dict[int, int] = {}
    for phase in profile.phases:
        peaks[phase.step] = max(peaks.get(phase.step, 0), phase.peak_bytes)
    text = f"The optimizer's state, {size(state[-1] - state[0])}, appears during the recording"
    if len(peaks) < 2:
        yield (
            f"{text}: this is the first step, and later ones need that much more from their start."
        )
        return
    (first, first_bytes), *_, (last, last_bytes) = peaks.items()
    yield (
        f"{text}: step {first} peaks at {size(first_bytes)}, step {last} at {size(last_bytes)}. "
        "The first step is not what a run needs."
    )


def _growth(profile: MemoryProfile) -> Iterator[str]:
    """Memory that every step leaves behind; the optimizer's state is no leak."""
    begun = [moment for moment in profile.boundaries if moment.phase == START]
    if len(begun) < LEAST_STEPS:
        return
    # what follows the last step's start is its own end
    kept = [
        moment.allocated_bytes - by_category(moment)[Category.OPTIMIZER_STATE]
        for moment in (*begun, profile.boundaries[-1])
    ]
    grown = [later - earlier for earlier, later in pairwise(kept)]
    if min(grown) >= MIN_GROWTH * profile.peak.allocated_bytes:
        yield (
            f"Every step leaves {size(min(grown))} or more behind, {size(kept[-1] - kept[0])} in "
            f"{len(begun)} steps. Is a loss or an output kept with its graph?"
        )


def _problems(profile: MemoryProfile) -> Iterator[str]:
    """Counts that disagree, and memory that is in no tensor: fragments, freed segments, other
    programs.
    """
    work, reserved, unused = profile.work, profile.peak.reserved_bytes, profile.fragmentation_bytes
    if any(map(difference_bytes, profile.boundaries)):
        yield check_words(profile.boundaries)
    if unused >= max(MIN_FRAGMENTATION * reserved, MIN_FRAGMENTATION_BYTES):
        remedy = "" if profile.is_expandable else f" ({EXPANDABLE} has fewer of these)"
        yield (
            f"At the peak {size(unused)} of the {size(reserved)} that PyTorch has reserved, "
            f"{percent_of(unused, reserved)}, are in no block: cache of an earlier, higher need, "
            f"or rests between blocks{remedy}."
        )
    if work.segments_freed:  # a cache that was flushed
        yield (
            f"The allocator gave {counted(work.segments_freed, 'segment')} back to the driver and "
            f"asked it for {work.segments_allocated:,}: memory was short, or "
            "torch.cuda.empty_cache() was called. Each time the host waits for the device."
        )
    if profile.outside_bytes is not None and profile.outside_bytes >= MIN_OUTSIDE_BYTES:
        yield (
            f"{size(profile.outside_bytes)} of the device are used and not reserved by PyTorch: "
            "more than a CUDA context takes, so another process may share the GPU."
        )


def _of_peak(profile: MemoryProfile, num_bytes: int) -> str:
    return f"{size(num_bytes)} of the peak, {percent_of(num_bytes, profile.peak.allocated_bytes)}"


def _is_much(profile: MemoryProfile, num_bytes: int, least: float) -> bool:
    return num_bytes > 0 and num_bytes >= least * profile.peak.allocated_bytes


BEFORE_AND_AFTER = "were there before the recording and after it"
WITHOUT_NOTES = {
    Category.OPTIMIZER_STATE: (
        "were made in an optimizer's step and kept",
        "the optimizer's state",
    ),
    Category.GRADIENTS: (
        "were made by autograd and still there in an optimizer's step",
        "gradients",
    ),
    Category.HELD: (BEFORE_AND_AFTER, "most likely parameters and the optimizer's state"),
    Category.EARLIER: ("were there before the recording and freed in it", ""),
    Category.KEPT: ("were made in the recording and kept at its end", ""),
    Category.LATER: (
        f"were made in the recording and freed in it, after {MIN_LATER} or more others were made",
        "most likely activations, which autograd holds until backward has used them: "
        "torch.no_grad() holds none, checkpointing fewer",
    ),
}
"""What is known of memory in a snapshot without notes, and what follows from it."""


def _parts(profile: MemoryProfile) -> Iterator[str]:
    """What is known of each part of the peak whose use nobody has noted, with the code that made
    it.
    """
    found = by_category(profile.peak)
    if profile.has_notes:
        if _is_much(profile, found[Category.HELD], MIN_UNKNOWN):
            yield (
                f"{_of_peak(profile, found[Category.HELD])}, {BEFORE_AND_AFTER}, and nothing says "
                "what they are: most likely workspaces of libraries."
            )
        return
    for category, (known, name) in WITHOUT_NOTES.items():
        if _is_much(profile, found[category], MIN_UNKNOWN):
            places = Counter[str]()
            for row in profile.at_peak:
                if row.category is category and row.places:
                    places[innermost(row.places)] += row.bytes_at_peak
            most = ", ".join(
                f"{size(num_bytes)} at {place}"
                for place, num_bytes in places.most_common(NUM_PLACES)
            )
            made = f" ({most})" if most else ""
            if category is Category.HELD and found[Category.OPTIMIZER_STATE]:
                name = "most likely parameters"
            yield (
                f"{_of_peak(profile, found[category])}, {known}{made}{f': {name}' if name else ''}."
            )
