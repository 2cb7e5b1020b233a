"""The questions that CS336 (assignment 2, memory profiling) asks of a snapshot, answered from a `MemoryProfile`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from cs336_systems.analysis.memory.profile import MemoryProfile, PhaseMemory
from cs336_systems.report.memory.allocations import NUM_CONTRIBUTORS, typical
from cs336_systems.report.memory.facts import phase_peaks
from cs336_systems.report.memory.largest import largest_words
from cs336_systems.report.memory.words import MIB, consists_of, parts_of, shape_text, size, when
from cs336_systems.report.numbers import label
from cs336_systems.report.sentences import percent_of

NUM_LARGEST = 5
"""Sizes of allocations to name in an answer."""


class Question(Enum):
    """The course's questions, in its order."""

    TIMELINE = "How does the active memory run over the pass, and which phase is which?"
    PEAK = "What is the peak memory, of the forward pass alone and of a whole training step?"
    PRECISION = "What does mixed precision change?"
    RESIDUAL = "How large is one tensor of the residual stream in single precision?"
    LARGEST = "How large are the largest allocations, and which code do they come from?"
    BLOCK = (
        "How many bytes does one block save for backward, which are the five largest contributors, and how large are "
        "its gradients?"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question, and what a profile says to it."""

    question: Question
    text: str


def answers(profile: MemoryProfile) -> tuple[Answer, ...]:
    """Each of the questions with its answer; it says so where the profile does not tell."""
    texts: Mapping[Question, Callable[[MemoryProfile], str]] = {
        Question.TIMELINE: _timeline,
        Question.PEAK: _peak,
        Question.PRECISION: _precision,
        Question.RESIDUAL: _residual,
        Question.LARGEST: _largest,
        Question.BLOCK: _block,
    }
    return tuple(Answer(question=question, text=text(profile)) for question, text in texts.items())


def _timeline(profile: MemoryProfile) -> str:
    """The last step, which is as steady as the recording goes."""
    found = [phase for phase in profile.phases if phase.step == profile.phases[-1].step]
    if not found:
        return (
            f"The snapshot {label(profile.source)} does not say when phases ended; its curve has its peak "
            f"{when(profile.peak)}. A recording by --memory marks them."
        )
    return f"Step {found[0].step} begins with {size(found[0].begin_bytes)}; {', '.join(map(_phase_words, found))}."


def _phase_words(phase: PhaseMemory) -> str:
    if not phase.is_finished:
        return f"{label(phase.phase)} runs out of memory at {size(phase.end_bytes)}"
    return f"{label(phase.phase)} ends with {size(phase.end_bytes)} after a peak of {size(phase.peak_bytes)}"


def _peak(profile: MemoryProfile) -> str:
    peak, peaks = profile.peak, phase_peaks(profile)
    text = f"{size(peak.allocated_bytes)} allocated, {when(peak)}, and {size(profile.peak_reserved_bytes)} reserved"
    if len(peaks) > 1:
        text += "; by phase " + ", ".join(f"{label(phase)} {size(most)}" for phase, most in peaks.items())
    of = consists_of(peak.categories, peak.allocated_bytes)
    failed = " The run ran out of memory, so this is what it had by then." if profile.work.out_of_memory else ""
    return f"{text}. The peak consists of {of}.{failed}"


def _precision(profile: MemoryProfile) -> str:
    """By data type, as far as the profile names those at the peak."""
    sums: dict[str, int] = {}
    for row in profile.at_peak:
        if row.dtype:
            sums[row.dtype] = sums.get(row.dtype, 0) + row.bytes_at_peak
    if not sums:
        return f"The snapshot {label(profile.source)} names no data types. A recording by --memory does."
    said = parts_of(sums, profile.peak.allocated_bytes)
    return f"Of the peak, as far as data types are known: {said}."


def _residual(profile: MemoryProfile) -> str:
    if profile.residual_stream_bytes is None:
        return "The snapshot does not tell the shape of the model; batch x T x d_model x 4 bytes."
    return f"{profile.residual_stream_bytes / MIB:,.2f} MiB: batch x T x d_model x 4 bytes."


def _largest(profile: MemoryProfile) -> str:
    return f"{largest_words(profile.largest, NUM_LARGEST)}." if profile.largest else "Nothing was allocated."


def _block(profile: MemoryProfile) -> str:
    if not profile.blocks:
        return "Nothing was saved for backward in a block that the profile knows."
    block = typical(profile.blocks)
    gradients = (
        f"Its gradients take {size(block.gradient_bytes)} ({block.gradient_bytes:,} bytes)."
        if block.gradient_bytes
        else "It had no gradients."
    )
    parts = [
        f"{' '.join(part for part in (label(tensor.name), shape_text(tensor.shape, tensor.dtype)) if part)} "
        f"{size(tensor.num_bytes)} ({percent_of(tensor.num_bytes, block.saved_bytes)})"
        for tensor in block.saved[:NUM_CONTRIBUTORS]
    ]
    again = block.recomputed_bytes
    kept = f" Of that, {size(again)} are there only while backward computes the block again." if again else ""
    return (
        f"{label(block.name)} saves {size(block.saved_bytes)} ({block.saved_bytes:,} bytes); most of it "
        f"{', '.join(parts)}.{kept} {gradients}"
    )
