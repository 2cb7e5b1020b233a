"""What stands out in a `MemoryProfile`, in sentences: the peak, what it consists of, and what is not as it should be.

Problems are named only if they cost at least as much as the thresholds below.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from cs336_systems.analysis.memory.profile import MIN_LATER, Category, MemoryProfile, Moment
from cs336_systems.report.sections.memory.entries import (
    START,
    by_category,
    check_words,
    difference_bytes,
    fragmentation_bytes,
    innermost,
    size,
    when,
)
from cs336_systems.report.words import GIB, MIB, label, percent_of
from cs336_systems.text import counted

MIN_FRAGMENTATION = 0.15
"""Smallest unused part of the reserved memory that is a finding: less is the usual cache of a few segments."""
MIN_FRAGMENTATION_BYTES = 256 * MIB
"""Smallest unused memory that is a finding: the cache of a small model is a large part of little."""
MIN_ROUNDING = 0.05
"""Smallest part of the peak lost to rounding that is a finding: tensors of a MiB and more usually lose less."""
MIN_UNKNOWN = 0.05
"""Smallest part of the peak of unknown use that is a finding: less changes no conclusion."""
MIN_GROWTH = 0.001
"""Smallest growth from step to step that is a finding, as a part of the peak: a kept loss is only 512 bytes."""
LEAST_STEPS = 2
"""Fewest steps that show a growth: a single step may leave what later ones use again, such as cuBLAS workspaces."""
MIN_OUTSIDE_BYTES = 2 * GIB
"""Smallest use outside of PyTorch that is a finding: a CUDA context with libraries takes half a GiB to one."""


MIN_PART = 0.001
"""The sentence on the peak leaves out parts below this share of the whole."""
NUM_PLACES = 3
"""Most places that a sentence names."""


def findings(profile: MemoryProfile) -> tuple[str, ...]:
    """Sentences: running out of memory comes first, then the peak, then problems, and what could not be read."""
    wrong = [text for find in (_first_step, _growth, _problems, _later, _unknown) for text in find(profile)]
    return (*_out_of_memory(profile), _peak(profile.peak), *wrong, *profile.notes)


def _out_of_memory(profile: MemoryProfile) -> Iterator[str]:
    failure, count = profile.work.first_failure, profile.work.out_of_memory
    if failure is None:
        return
    text = (
        f"Out of memory {'once,' if count == 1 else f'{count:,} times, first'} {when(failure)}"
        f"{f', at {innermost(failure.places)}' if failure.places else ''}, after {failure.event:,} "
        f"of {counted(profile.work.events, 'event')}: {size(failure.requested_bytes)} were asked for and "
        f"{size(failure.free_bytes)} were free on the device."
    )
    unused = failure.reserved_bytes - failure.allocated_bytes
    if unused > 0 and unused + failure.free_bytes >= failure.requested_bytes:
        text += (
            f" PyTorch itself held {size(unused)} that no block used then, in pieces: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may make room."
        )
    yield text


def _peak(peak: Moment) -> str:
    """The peak, when it was, and what it consists of, the largest part first."""
    whole, ordered = peak.allocated_bytes, sorted(by_category(peak).items(), key=lambda part: -part[1])
    said = [(label(name), part) for name, part in ordered if part and part >= MIN_PART * whole]
    parts = ", ".join(f"{name} {size(part)} ({100 * part / whole:.1f} %)" for name, part in said)
    return f"The peak is {size(whole)}, {when(peak)}; it consists of {parts or 'nothing'}."


def _first_step(profile: MemoryProfile) -> Iterator[str]:
    """A first step needs less memory than later ones, as the optimizer's state appears at its end."""
    state = [by_category(moment)[Category.OPTIMIZER_STATE] for moment in profile.boundaries]
    if not state or state[-1] <= state[0]:
        return
    peaks: dict[int, int] = {}
    for phase in profile.phases:
        peaks[phase.step] = max(peaks.get(phase.step, 0), phase.peak_bytes)
    text = f"The optimizer's state, {size(state[-1] - state[0])}, appears during the recording"
    if len(peaks) < 2:
        yield f"{text}: this is the first step, and later ones need that much more from their start."
        return
    (first, first_bytes), *_, (last, last_bytes) = peaks.items()
    yield (
        f"{text}: step {first} peaks at {size(first_bytes)}, step {last} at {size(last_bytes)}. The first step is not "
        "what a run needs."
    )


def _growth(profile: MemoryProfile) -> Iterator[str]:
    """Memory that every step leaves behind; the optimizer's state is no leak."""
    begun = [moment for moment in profile.boundaries if moment.phase == START]
    if len(begun) < LEAST_STEPS:
        return
    # what follows the last step's start is its own end
    kept = [moment.allocated_bytes - by_category(moment)[Category.OPTIMIZER_STATE]
            for moment in (*begun, profile.boundaries[-1])]  # fmt: skip
    grown = [later - earlier for earlier, later in pairwise(kept)]
    if min(grown) >= MIN_GROWTH * profile.peak.allocated_bytes:
        yield (
            f"Every step leaves {size(min(grown))} or more behind, {size(kept[-1] - kept[0])} in {len(begun)} steps. "
            "Is a loss or an output kept with its graph?"
        )


def _problems(profile: MemoryProfile) -> Iterator[str]:
    """Counts that disagree, and memory that is in no tensor: fragments, rounding, freed segments, other programs."""
    work, reserved, unused = profile.work, profile.peak.reserved_bytes, fragmentation_bytes(profile)
    if any(map(difference_bytes, profile.boundaries)):
        yield check_words(profile.boundaries)
    if unused >= max(MIN_FRAGMENTATION * reserved, MIN_FRAGMENTATION_BYTES):
        yield (
            f"At the peak {size(unused)} of the {size(reserved)} that PyTorch has reserved, "
            f"{percent_of(unused, reserved)}, are in no block: cache of an earlier, higher need, or rests between "
            "blocks (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True has fewer of these)."
        )
    if _is_much(profile, profile.rounding_bytes_at_peak, MIN_ROUNDING):
        yield (
            f"{_of_peak(profile, profile.rounding_bytes_at_peak)}, were never asked for: the allocator rounds requests "
            "up, and does not split off rests of less than a MiB."
        )
    if work.segments_freed:  # a cache that was flushed
        yield (
            f"The allocator gave {counted(work.segments_freed, 'segment')} back to the driver and asked it for "
            f"{work.segments_allocated:,}: memory was short, or torch.cuda.empty_cache() was called. Each time the "
            "host waits for the device."
        )
    if profile.outside_bytes is not None and profile.outside_bytes >= MIN_OUTSIDE_BYTES:
        yield (
            f"{size(profile.outside_bytes)} of the device are used and not reserved by PyTorch: more than a CUDA "
            "context takes, so another process may share the GPU."
        )


def _of_peak(profile: MemoryProfile, num_bytes: int) -> str:
    return f"{size(num_bytes)} of the peak, {percent_of(num_bytes, profile.peak.allocated_bytes)}"


def _is_much(profile: MemoryProfile, num_bytes: int, least: float) -> bool:
    return num_bytes > 0 and num_bytes >= least * profile.peak.allocated_bytes


def _unknown(profile: MemoryProfile) -> Iterator[str]:
    held = by_category(profile.peak)[Category.HELD]
    if _is_much(profile, held, MIN_UNKNOWN):
        has_notes = by_category(profile.peak)[Category.PARAMETERS] > 0
        guess = "workspaces of libraries" if has_notes else "parameters and the optimizer's state"
        remedy = "" if has_notes else " A recording by --memory knows."
        yield (
            f"{_of_peak(profile, held)}, were there before the recording and after it, and nothing says what they are: "
            f"most likely {guess}.{remedy}"
        )


def _later(profile: MemoryProfile) -> Iterator[str]:
    """Memory that is held for long in a snapshot without notes, most likely activations, and where it was made."""
    held = by_category(profile.peak)[Category.LATER]
    if not _is_much(profile, held, MIN_UNKNOWN):
        return
    places = Counter[str]()
    for row in profile.at_peak:
        if row.category is Category.LATER:
            places[f"at {innermost(row.places)}" if row.places else "at no known place"] += row.bytes_at_peak
    most = ", ".join(f"{size(num_bytes)} {place}" for place, num_bytes in places.most_common(NUM_PLACES))
    yield (
        f"{_of_peak(profile, held)}, came in the recording and were held until later, while {MIN_LATER} or more others "
        f"were allocated{f': {most}' if most else ''}. So autograd holds activations, until backward has used them: "
        "torch.no_grad() holds none, checkpointing fewer."
    )
