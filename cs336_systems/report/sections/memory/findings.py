"""What stands out in a `MemoryProfile`, each with its numbers.

Problems are named only if they cost at least as much as the thresholds below.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ....analysis.memory.notes import START
from ....analysis.memory.profile import MIN_LATER, Category, FailedRequest, MemoryProfile
from ....costs.allocator import LARGE_SEGMENT_BYTES, SMALL_BYTES, round_up, segment_size
from ....text import counted
from ...section import Finding
from ...words import GIB, MIB, label, percent_of
from ..plugged import added_findings
from .entry import MemoryEntry, by_category
from .words import check_words, made_at, size, when

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
PRIVATE = "private pools (CUDA graphs, torch.cuda.MemPool)"
NUM_PLACES = 3
"""Most places that a sentence names."""


def findings(profile: MemoryProfile) -> tuple[Finding, ...]:
    """Running out of memory comes first, then the peak, then problems, and what could not be
    read.
    """
    # what is in doubt is told with the peak
    others = (text for text in profile.notes if text not in profile.doubts)
    noted = [Finding(code="note", text=text) for text in others]
    of_others = added_findings(MemoryEntry(profile=profile))
    return (
        *_out_of_memory(profile),
        _peak(profile),
        *_first_step(profile),
        *_growth(profile),
        *_problems(profile),
        *_parts(profile),
        *_other_devices(profile),
        *noted,
        *(Finding(code="plug-in", text=text) for text in of_others),
    )


def answer(profile: MemoryProfile) -> tuple[Finding, ...]:
    """Three findings: how much memory and of what, which code made most of it, and what was
    reserved.
    """
    findings = (*_out_of_memory(profile), _peak(profile), *_most(profile), _reserved(profile))
    return findings[:3]


def _most(profile: MemoryProfile) -> Iterator[Finding]:
    """A sentence that names the largest parts of the memory at the peak: a tensor by its name if
    that is known, else by the code that made it.
    """
    bytes_of = Counter[str]()
    for group in profile.at_peak:
        code = made_at(group)
        name = ""
        if group.name:
            name = f"{group.name} ({group.category})"
        elif code:
            name = f"made at {code}"
        bytes_of[name] += group.bytes_at_peak
    bytes_of.pop("", None)
    numbers = dict(bytes_of.most_common(NUM_PLACES))
    if numbers:
        parts = [f"{size(num_bytes)} {label(name)}" for name, num_bytes in numbers.items()]
        text = f"Its largest parts: {', '.join(parts)}."
        yield Finding(code="largest", text=text, numbers=numbers)


def _reserved(profile: MemoryProfile) -> Finding:
    """A finding on how much memory PyTorch had reserved from the driver, and how much of that held
    no tensor.
    """
    reserved = size(profile.peak_reserved_bytes)
    text = f"PyTorch has reserved {reserved} at most"
    if profile.lacks_segments:
        text = f"PyTorch has reserved {reserved} or more at its most, as the file lacks segments"
    if unused := profile.fragmentation_bytes:
        text += f"; at the peak {size(unused)} of it were in no block"
    if profile.private_bytes:
        text += f"; {PRIVATE} have {size(profile.private_bytes)}"
        text += f", {size(profile.idle_private_bytes)} of it in no block"
    numbers = {
        "peak_reserved_bytes": profile.peak_reserved_bytes,
        "fragmentation_bytes": unused,
        "private_bytes": profile.private_bytes,
        "idle_private_bytes": profile.idle_private_bytes,
    }
    return Finding(code="reserved", text=f"{text}.", numbers=numbers)


def _out_of_memory(profile: MemoryProfile) -> Iterator[Finding]:
    """Findings on the first request that failed: its size, what had been reserved and where, and
    what would have been enough.
    """
    failure, count = profile.work.first_failure, profile.work.out_of_memory
    if failure is None:
        return
    text = (
        f"{_first_failure(profile, failure)}, after {failure.event:,} of "
        f"{counted(profile.work.events, 'event')}: {size(failure.requested_bytes)} were asked for "
        f"and {size(failure.free_bytes)} were free on the device."
    )
    short = max(_from_driver(failure, profile.is_expandable) - failure.free_bytes, 0)
    unused = failure.reserved_bytes - failure.allocated_bytes - failure.idle_private_bytes
    text += _pool_words(failure)
    if short:
        text += f" {size(short)} more would have been enough"
        if failure.idle_private_bytes >= short:
            text += ", less than private pools had in no block"
        text += "."
    else:
        text += " That would have been enough, so something else than the device sets a limit."
    if unused > 0 and unused + failure.free_bytes >= failure.requested_bytes:
        remedy = "" if profile.is_expandable else f": {EXPANDABLE} may make room"
        text += f" PyTorch itself held {size(unused)} that no block used then, in pieces{remedy}."
    numbers = {
        "device": profile.device,
        "out_of_memory": count,
        "event": failure.event,
        "requested_bytes": failure.requested_bytes,
        "free_bytes": failure.free_bytes,
        "reserved_bytes": failure.reserved_bytes,
        "idle_private_bytes": failure.idle_private_bytes,
        "short_bytes": short,
        "unused_bytes": unused,
    }
    yield Finding(code="out of memory", text=text, numbers=numbers)


def _first_failure(profile: MemoryProfile, failure: FailedRequest) -> str:
    """How often memory ran out, and when and at which code first, without a full stop."""
    count = profile.work.out_of_memory
    parts = [f"GPU {profile.device} ran out of memory {counted(count, 'time')}"]
    moment = when(failure)
    if count > 1:
        moment = f"first {moment}".strip()
    if moment:
        parts.append(moment)
    if made := made_at(failure):
        parts.append(f"at {made}")
    return ", ".join(parts)


def _from_driver(failure: FailedRequest, is_expandable: bool) -> int:
    """What the allocator asks of the driver for a request: a segment, or pages of one."""
    if is_expandable and failure.requested_bytes > SMALL_BYTES:
        return round_up(failure.requested_bytes, LARGE_SEGMENT_BYTES)
    return segment_size(failure.requested_bytes)


def _pool_words(failure: FailedRequest) -> str:
    """A sentence on what was reserved then, by pool and kind of segment, the largest first."""
    num_private = len({pool.pool for pool in failure.pools if pool.pool})
    reserved = Counter[str]()
    for pool in failure.pools:
        kind = "small" if pool.is_small else "large"
        if pool.is_expandable:
            kind = "expandable"
        if pool.pool is None:
            name = "segments freed since, whose pool is not seen"
        elif pool.pool:
            name = f"{kind} segments of {counted(num_private, 'private pool')}"
        else:
            name = f"{kind} segments of the shared pool"
        reserved[name] += pool.reserved_bytes
    parts = [f"{size(num_bytes)} in {name}" for name, num_bytes in reserved.most_common()]
    if not parts:
        return ""
    text = f" {size(failure.reserved_bytes)} were reserved: {', '.join(parts)}."
    if idle := failure.idle_private_bytes:
        text += f" Of {PRIVATE}, {size(idle)} were in no block: no other code can use them."
    return text


def _peak(profile: MemoryProfile) -> Finding:
    """The peak, when it was, and what it consists of, the largest part first."""
    peak = profile.peak
    whole = peak.allocated_bytes
    parts = []
    numbers = {"peak_bytes": whole}
    for name, part in sorted(by_category(peak).items(), key=lambda item: -item[1]):
        if part and part >= MIN_PART * whole:
            parts.append(f"{label(name)} {size(part)} ({100 * part / whole:.1f} %)")
            numbers[name] = part
    of_what = ", ".join(parts) or "nothing"
    most = f"{size(whole)} or more" if profile.lacks_segments else size(whole)
    if profile.doubts:
        most = f"in doubt, {size(whole)} by the file's events"
    moment = ", ".join(part for part in (most, when(peak)) if part)
    text = f"The peak is {moment}; it consists of {of_what}."
    text = " ".join([text, *profile.doubts])
    if profile.other_devices:
        text = f"On GPU {profile.device} {text[0].lower()}{text[1:]}"
    return Finding(code="peak", text=text, numbers=numbers)


def _other_devices(profile: MemoryProfile) -> Iterator[Finding]:
    """A finding for each device in the snapshot that is not explained here, with its peak of
    memory.
    """
    for other in profile.other_devices:
        text = f"Not explained: GPU {other.device}, whose peak is {size(other.peak_bytes)}"
        if other.out_of_memory:
            text += f" and which ran out of memory {counted(other.out_of_memory, 'time')}"
        numbers = {
            "device": other.device,
            "peak_bytes": other.peak_bytes,
            "out_of_memory": other.out_of_memory,
        }
        text += f"; --device {other.device} explains it."
        yield Finding(code="other device", text=text, numbers=numbers)


def _first_step(profile: MemoryProfile) -> Iterator[Finding]:
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
    numbers = {"state_bytes": state[-1] - state[0]}
    if len(peaks) < 2:
        text += ": this is the first step, and later ones need that much more from their start."
        yield Finding(code="first step", text=text, numbers=numbers)
        return
    (first, first_bytes), *_, (last, last_bytes) = peaks.items()
    text += f": step {first} peaks at {size(first_bytes)}, step {last} at {size(last_bytes)}. "
    text += "The first step is not what a run needs."
    numbers |= {"first_bytes": first_bytes, "last_bytes": last_bytes}
    yield Finding(code="first step", text=text, numbers=numbers)


def _growth(profile: MemoryProfile) -> Iterator[Finding]:
    """A finding if every step leaves memory allocated; the optimizer's state, which appears in the
    first step, is no leak and does not count.
    """
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
        text = (
            f"Every step leaves {size(min(grown))} or more behind, {size(kept[-1] - kept[0])} in "
            f"{len(begun)} steps. Is a loss or an output kept with its graph?"
        )
        numbers = {"least_bytes": min(grown), "bytes": kept[-1] - kept[0], "steps": len(begun)}
        yield Finding(code="growth", text=text, numbers=numbers)


def _problems(profile: MemoryProfile) -> Iterator[Finding]:
    """Counts that disagree, and memory that is in no tensor: fragments, freed segments, other
    programs.
    """
    work, reserved, unused = profile.work, profile.peak.reserved_bytes, profile.fragmentation_bytes
    if wrong := check_words(profile.boundaries):
        yield Finding(code="check failed", text=wrong)
    if unused >= max(MIN_FRAGMENTATION * reserved, MIN_FRAGMENTATION_BYTES):
        remedy = "" if profile.is_expandable else f" ({EXPANDABLE} has fewer of these)"
        text = (
            f"At the peak {size(unused)} of the {size(reserved)} that PyTorch has reserved, "
            f"{percent_of(unused, reserved)}, are in no block: cache of an earlier, higher need, "
            f"or rests between blocks{remedy}."
        )
        numbers = {"fragmentation_bytes": unused, "reserved_bytes": reserved}
        yield Finding(code="fragmentation", text=text, numbers=numbers)
    if work.segments_freed:  # a cache that was flushed
        text = (
            f"The allocator gave {counted(work.segments_freed, 'segment')} back to the driver and "
            f"asked it for {work.segments_allocated:,}: memory was short, or "
            "torch.cuda.empty_cache() was called. Each time the host waits for the device."
        )
        numbers = {"freed": work.segments_freed, "allocated": work.segments_allocated}
        yield Finding(code="segments freed", text=text, numbers=numbers)
    if profile.outside_bytes is not None and profile.outside_bytes >= MIN_OUTSIDE_BYTES:
        text = (
            f"{size(profile.outside_bytes)} of the device are used and not reserved by PyTorch: "
            "more than a CUDA context takes, so another process may share the GPU."
        )
        numbers = {"outside_bytes": profile.outside_bytes}
        yield Finding(code="outside", text=text, numbers=numbers)


def _of_peak(profile: MemoryProfile, num_bytes: int) -> str:
    """An amount of memory in words: its size, and its share in the peak of allocated memory."""
    return f"{size(num_bytes)} of the peak, {percent_of(num_bytes, profile.peak.allocated_bytes)}"


def _is_much(profile: MemoryProfile, num_bytes: int, least: float) -> bool:
    """Whether the amount is not 0 and at least the share `least` of the peak of allocated
    memory.
    """
    return num_bytes > 0 and num_bytes >= least * profile.peak.allocated_bytes


KNOWN_WITHOUT_NOTES = {
    Category.OPTIMIZER_STATE: "were made in an optimizer's step and kept",
    Category.GRADIENTS: (
        "were made in threads without Python code, as autograd's are, and still there in an "
        "optimizer's step"
    ),
    Category.HELD: "were there before the recording and after it",
    Category.EARLIER: "were there before the recording and freed in it",
    Category.KEPT: "were made in the recording and kept at its end",
    Category.LATER: (
        f"were made in the recording and freed in it, after {MIN_LATER} or more others were made"
    ),
}
"""What is known of memory in a snapshot without notes."""
USUAL_NAMES = {
    Category.OPTIMIZER_STATE: "the optimizer's state",
    Category.GRADIENTS: "gradients",
    Category.HELD: "not seen what they are",
    Category.LATER: "not seen what they are",
}
"""What follows from it."""


def _parts(profile: MemoryProfile) -> Iterator[Finding]:
    """What is known of each part of the peak whose use nobody has noted, with the code that made
    it.
    """
    sizes = by_category(profile.peak)
    for category, known in KNOWN_WITHOUT_NOTES.items():
        num_bytes = sizes[category]
        is_told = not profile.has_notes or category is Category.HELD
        if not is_told or not _is_much(profile, num_bytes, MIN_UNKNOWN):
            continue
        text = f"{_of_peak(profile, num_bytes)}, {known}{_places(profile, category)}"
        numbers = {"bytes": num_bytes, "peak_bytes": profile.peak.allocated_bytes}
        name = USUAL_NAMES.get(category, "")
        text += f": {name}." if name else "."
        yield Finding(code=category, text=text, numbers=numbers)


def _places(profile: MemoryProfile, category: Category) -> str:
    """The lines of code that made most of the memory of this category, in brackets; empty if no
    stacks were recorded.
    """
    made = Counter[str]()
    for group in profile.at_peak:
        if group.category is category and group.places:
            made[made_at(group)] += group.bytes_at_peak
    places = [f"{size(num_bytes)} at {place}" for place, num_bytes in made.most_common(NUM_PLACES)]
    return f" ({', '.join(places)})" if places else ""
