"""What stands out in a `MemoryProfile`, in sentences: the peak, what it consists of, what is not as it should be.

A finding beside the peak is told only where it costs at least what its threshold below says.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from cs336_systems.analysis.memory.profile import MIN_LATER, Category, MemoryProfile
from cs336_systems.report.sections.memory.facts import late_state_bytes, starts, step_peaks
from cs336_systems.report.sections.memory.largest import largest_words
from cs336_systems.report.sections.memory.phases import difference_bytes
from cs336_systems.report.sections.memory.tables import bytes_of, fragmentation_bytes
from cs336_systems.report.sections.memory.words import GIB, MIB, consists_of, innermost, size, times, when
from cs336_systems.report.sentences import percent_of
from cs336_systems.text import counted

NUM_LARGEST = 3
"""Sizes of allocations to name."""
MIN_FRAGMENTATION = 0.15
"""Of what is reserved at the peak: below it, the cache is the usual one of a few segments."""
MIN_FRAGMENTATION_BYTES = 256 * MIB
"""A small model's cache is a large part of little."""
MIN_ROUNDING = 0.05
"""Of the peak. Tensors of a MiB and more are rounded up by less, unless the allocator may not split its blocks."""
MIN_UNKNOWN = 0.05
"""Of the peak, held throughout and of no category: less changes no conclusion."""
MIN_GROWTH = 0.001
"""Of the peak, from the start of one step to the start of the next: a kept loss is 512 bytes."""
LEAST_STEPS = 2
"""One step may leave what all later ones use again, as the first does: workspaces of cuBLAS."""
MIN_OUTSIDE_BYTES = 2 * GIB
"""A CUDA context with the libraries of PyTorch takes about half a GiB to one."""


def findings(profile: MemoryProfile) -> tuple[str, ...]:
    """Running out of memory first, then the peak, then the first step, what is lost, and the largest allocations."""
    return tuple(
        text
        for find in (_out_of_memory, _peak, _first_step, _growth, _disagreement, _fragmentation, _rounding, _segments,
                     _later, _unknown, _outside, _largest)
        for text in find(profile)
    )  # fmt: skip


def _out_of_memory(profile: MemoryProfile) -> Iterator[str]:
    failure = profile.work.first_failure
    if failure is None:
        return
    first = " first" if profile.work.out_of_memory > 1 else ""
    place = f", at {innermost(failure.places)}" if failure.places else ""
    text = (
        f"Out of memory {times(profile.work.out_of_memory)},{first} {when(failure)} (after {failure.event:,} of "
        f"{counted(profile.work.events, 'event')}){place}: {size(failure.requested_bytes)} were asked for and "
        f"{size(failure.free_bytes)} were free on the device."
    )
    unused = failure.reserved_bytes - failure.allocated_bytes
    if unused > 0 and unused + failure.free_bytes >= failure.requested_bytes:
        text += (
            f" PyTorch itself held {size(unused)} that no block used then, in pieces: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may make room."
        )
    yield text


def _peak(profile: MemoryProfile) -> Iterator[str]:
    peak = profile.peak
    of = consists_of(peak.categories, peak.allocated_bytes)
    yield f"The peak is {size(peak.allocated_bytes)}, {when(peak)}; it consists of {of}."


def _first_step(profile: MemoryProfile) -> Iterator[str]:
    """The optimizer's state is made at the end of the first step: that step is smaller than all later ones."""
    late_bytes = late_state_bytes(profile)
    if not late_bytes:
        return
    peaks = step_peaks(profile)
    text = f"The optimizer's state, {size(late_bytes)}, appears during the recording"
    if len(peaks) < 2:
        yield f"{text}: this is the first step, and later ones need that much more from their start."
        return
    (first, first_bytes), *_, (last, last_bytes) = peaks.items()
    yield (
        f"{text}: step {first} peaks at {size(first_bytes)}, step {last} at {size(last_bytes)}. The first step is not "
        "what a run needs."
    )


def _growth(profile: MemoryProfile) -> Iterator[str]:
    """Steps that leave something behind; what the optimizer keeps is no leak."""
    begun = starts(profile)
    if len(begun) < LEAST_STEPS:
        return
    # what follows the last step's start is its own end
    kept = [moment.allocated_bytes - bytes_of(moment, Category.OPTIMIZER_STATE)
            for moment in (*begun, profile.boundaries[-1])]  # fmt: skip
    grown = [later - earlier for earlier, later in pairwise(kept)]
    if min(grown) >= MIN_GROWTH * profile.peak.allocated_bytes:
        yield (
            f"Every step leaves {size(min(grown))} or more behind, {size(kept[-1] - kept[0])} in {len(begun)} steps. "
            "Is a loss or an output kept with its graph?"
        )


def _disagreement(profile: MemoryProfile) -> Iterator[str]:
    wrong = [found for moment in profile.boundaries if (found := difference_bytes(moment))]
    if wrong:
        yield (
            f"At {len(wrong)} of {len(profile.boundaries)} boundaries the snapshot's blocks are not what PyTorch's "
            f"allocator counted; they differ by {size(abs(max(wrong, key=abs)))} at most."
        )


def _fragmentation(profile: MemoryProfile) -> Iterator[str]:
    unused, reserved = fragmentation_bytes(profile), profile.peak.reserved_bytes
    if unused >= max(MIN_FRAGMENTATION * reserved, MIN_FRAGMENTATION_BYTES):
        yield (
            f"At the peak {size(unused)} of the {size(reserved)} that PyTorch has reserved, "
            f"{percent_of(unused, reserved)}, are in no block: cache of an earlier, higher need, or rests between "
            "blocks (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True has fewer of these)."
        )


def _rounding(profile: MemoryProfile) -> Iterator[str]:
    lost, whole = profile.rounding_bytes_at_peak, profile.peak.allocated_bytes
    if whole and lost / whole >= MIN_ROUNDING:
        yield (
            f"{size(lost)} of the peak, {percent_of(lost, whole)}, were never asked for: the allocator rounds requests "
            "up, and does not split off rests of less than a MiB."
        )


def _segments(profile: MemoryProfile) -> Iterator[str]:
    """A cache that was flushed, which waits for the device."""
    work = profile.work
    if work.segments_freed:
        yield (
            f"The allocator gave {counted(work.segments_freed, 'segment')} back to the driver and asked it for "
            f"{work.segments_allocated:,}: memory was short, or torch.cuda.empty_cache() was called. Each time the "
            "host waits for the device."
        )


def _unknown(profile: MemoryProfile) -> Iterator[str]:
    held, whole = bytes_of(profile.peak, Category.HELD), profile.peak.allocated_bytes
    if held and held / whole >= MIN_UNKNOWN:
        is_sighted = bytes_of(profile.peak, Category.PARAMETERS) > 0
        guess = "workspaces of libraries" if is_sighted else "parameters and the optimizer's state"
        remedy = "" if is_sighted else " A recording by --memory knows."
        yield (
            f"{size(held)} of the peak, {percent_of(held, whole)}, were there before the recording and after it, and "
            f"nothing says what they are: most likely {guess}.{remedy}"
        )


def _later(profile: MemoryProfile) -> Iterator[str]:
    """What a snapshot without notes has of activations, with the places that hold most of it."""
    held, whole = bytes_of(profile.peak, Category.LATER), profile.peak.allocated_bytes
    if not held or held / whole < MIN_UNKNOWN:
        return
    places = Counter[str]()
    for row in profile.at_peak:
        if row.category is Category.LATER:
            places[f"at {innermost(row.places)}" if row.places else "at no known place"] += row.bytes_at_peak
    most = ", ".join(f"{size(num_bytes)} {place}" for place, num_bytes in places.most_common(NUM_LARGEST))
    yield (
        f"{size(held)} of the peak, {percent_of(held, whole)}, came in the recording and were held until later, while "
        f"{MIN_LATER} or more others were allocated{f': {most}' if most else ''}. So autograd holds activations, until "
        "backward has used them: torch.no_grad() holds none, checkpointing fewer."
    )


def _outside(profile: MemoryProfile) -> Iterator[str]:
    if profile.outside_bytes is not None and profile.outside_bytes >= MIN_OUTSIDE_BYTES:
        yield (
            f"{size(profile.outside_bytes)} of the device are used and not reserved by PyTorch: more than a CUDA "
            "context takes, so another process may share the GPU."
        )


def _largest(profile: MemoryProfile) -> Iterator[str]:
    if profile.largest:
        yield f"The largest allocations: {largest_words(profile.largest, NUM_LARGEST)}."
