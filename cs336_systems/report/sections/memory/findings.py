"""What stands out in a `MemoryProfile`, in sentences.

Problems are named only if they cost at least as much as the thresholds below.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ....analysis.memory.notes import START
from ....analysis.memory.profile import MIN_LATER, Category, MemoryProfile, Moment
from ....text import counted
from ...words import GIB, MIB, label, percent_of
from ..plugged import added_findings
from .entry import MemoryEntry, by_category
from .words import check_words, innermost, size, when

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
    return (
        *_out_of_memory(profile),
        _peak(profile.peak),
        *_first_step(profile),
        *_growth(profile),
        *_problems(profile),
        *_parts(profile),
        *profile.notes,
        *added_findings(MemoryEntry(profile=profile)),
    )


def answer(profile: MemoryProfile) -> tuple[str, ...]:
    """Three sentences: how much memory and of what, which code made most of it, and what was
    reserved.
    """
    return (*_out_of_memory(profile), _peak(profile.peak), *_most(profile), _reserved(profile))[:3]


def _most(profile: MemoryProfile) -> Iterator[str]:
    """A sentence that names the largest parts of the memory at the peak: a tensor by its name if
    that is known, else by the code that made it.
    """
    bytes_of = Counter[str]()
    for group in profile.at_peak:
        name = f"made at {innermost(group.places)}" if group.places else ""
        if group.name:
            name = f"{group.name} ({group.category})"
        bytes_of[name] += group.bytes_at_peak
    parts = [
        f"{size(num_bytes)} {label(name)}"
        for name, num_bytes in bytes_of.most_common(NUM_PLACES)
        if name
    ]
    if parts:
        yield f"Its largest parts: {', '.join(parts)}."


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
    """The first request that failed, and what of PyTorch's own memory could have served it."""
    failure, count = profile.work.first_failure, profile.work.out_of_memory
    if failure is None:
        return
    times = "once," if count == 1 else f"{count:,} times, first"
    place = f", at {innermost(failure.places)}" if failure.places else ""
    text = (
        f"Out of memory {times} {when(failure)}{place}, after "
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
    whole, parts = peak.allocated_bytes, []
    for name, part in sorted(by_category(peak).items(), key=lambda item: -item[1]):
        if part and part >= MIN_PART * whole:
            parts.append(f"{label(name)} {size(part)} ({100 * part / whole:.1f} %)")
    of_what = ", ".join(parts) or "nothing"
    return f"The peak is {size(whole)}, {when(peak)}; it consists of {of_what}."


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
    if wrong := check_words(profile.boundaries):
        yield wrong
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
    sizes = by_category(profile.peak)
    if profile.has_notes:
        if _is_much(profile, sizes[Category.HELD], MIN_UNKNOWN):
            yield (
                f"{_of_peak(profile, sizes[Category.HELD])}, {BEFORE_AND_AFTER}, and nothing says "
                "what they are: most likely workspaces of libraries."
            )
        return
    for category, (known, name) in WITHOUT_NOTES.items():
        if not _is_much(profile, sizes[category], MIN_UNKNOWN):
            continue
        made_at = Counter[str]()
        for group in profile.at_peak:
            if group.category is category and group.places:
                made_at[innermost(group.places)] += group.bytes_at_peak
        text = f"{_of_peak(profile, sizes[category])}, {known}"
        if made_at:
            places = [
                f"{size(num_bytes)} at {place}"
                for place, num_bytes in made_at.most_common(NUM_PLACES)
            ]
            text += f" ({', '.join(places)})"
        if category is Category.HELD and sizes[Category.OPTIMIZER_STATE]:
            name = "most likely parameters"
        yield f"{text}: {name}." if name else f"{text}."
