"""The questions that CS336 (assignment 2, memory profiling) asks of snapshots, answered for one and for a sweep."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from cs336_systems.analysis.memory.profile import Category, MemoryProfile, PhaseMemory
from cs336_systems.config import Mode, Precision
from cs336_systems.report.entries import labels
from cs336_systems.report.numbers import label, significant
from cs336_systems.report.sections.memory.allocations import NUM_CONTRIBUTORS, typical
from cs336_systems.report.sections.memory.entries import MemoryEntry, twins
from cs336_systems.report.sections.memory.facts import phase_peaks, unnamed_copies_bytes
from cs336_systems.report.sections.memory.largest import largest_words
from cs336_systems.report.sections.memory.tables import bytes_of
from cs336_systems.report.sections.memory.words import MIB, consists_of, parts_of, shape_text, size, when
from cs336_systems.report.sentences import answers_markdown, percent_of

NUM_LARGEST = 5
"""Sizes of allocations to name in an answer."""
MIXED = (Precision.BF16, Precision.FP16)
MAX_EACH = 8
"""Runs that are answered for one by one; of more, some stand for the others."""
MIN_CHANGE = 0.01
"""Of a peak: what precision changes in a category by less is left out."""
TITLE = "Where the memory goes: the questions of CS336"


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


def answers(profile: MemoryProfile) -> dict[Question, str]:
    """Each of the questions with its answer; it says so where the profile does not tell."""
    return {
        Question.TIMELINE: _timeline(profile),
        Question.PEAK: _peak(profile),
        Question.PRECISION: _precision(profile),
        Question.RESIDUAL: _residual(profile),
        Question.LARGEST: _largest(profile),
        Question.BLOCK: _block(profile),
    }


def profile_answers(profile: MemoryProfile) -> str:
    """Markdown: each question as a heading, and the answer of this profile."""
    return answers_markdown(TITLE, [(question.value, [("", text)]) for question, text in answers(profile).items()])


def sweep_answers(entries: Sequence[MemoryEntry]) -> str:
    """Markdown: each question as a heading, what holds over the configurations, then the answer of each.

    Of more than MAX_EACH, only some are answered for one by one.
    """
    names = labels(entries)
    chosen = _chosen(entries)
    found = [
        (name, answers(entry.profile))
        for name, entry in zip(names, entries, strict=True)
        if any(entry is one for one in chosen)
    ]
    sections = []
    for question in Question:
        summary = _SUMMARIES[question](entries, names) if len(entries) > 1 else []
        own = _merged((name, texts[question]) for name, texts in found)
        sections.append((question.value, [*(("", text) for text in summary), *own]))
    return answers_markdown(TITLE, sections)


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


def _chosen(entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
    """All, or of many the least and the most of the modes, at the longest context that most of these finished at.

    The largest sizes where that is still too many.
    """
    if len(entries) <= MAX_EACH:
        return entries
    present = [mode for mode in Mode if any(entry.config.mode is mode for entry in entries)]
    wanted = [entry for entry in entries if entry.config.mode in (present[0], present[-1])]
    finished = [entry for entry in wanted if not entry.is_out_of_memory] or wanted
    counts = Counter(_context(entry) for entry in finished)
    longest = max(counts, key=lambda context: (counts[context], context))
    return [entry for entry in finished if _context(entry) == longest][-MAX_EACH:]


def _context(entry: MemoryEntry) -> int:
    return entry.config.model.context_length


def _merged(answered: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Names and texts, each text once, with all whose answer it is."""
    names: dict[str, list[str]] = {}
    for name, text in answered:
        names.setdefault(text, []).append(name)
    return [(", ".join(own), text) for text, own in names.items()]


def _timelines(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
    texts = [
        f"Each of the {len(entries)} runs has a picture in plots/, by its key, such as "
        f"plots/{entries[0].config.key}_timeline.png, and a row in boundaries.md."
    ]
    chosen = _chosen(entries)
    if len(chosen) < len(entries):
        texts.append(
            f"Told one by one, here and below: {len(chosen)} of the runs. cs336 memory memory/KEY.json --output DIR "
            "answers for any other."
        )
    return texts


def _peaks(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
    """A sentence for each size and precision: the peak at each context, by mode."""
    texts = []
    groups = twins(entries, "mode", "context_length")
    names = labels([group[0] for group in groups], without=("mode", "context_length"))
    for name, group in zip(names, groups, strict=True):
        modes = dict.fromkeys(entry.config.mode for entry in group)
        said = [
            f"{mode} " + ", ".join(_peak_at(entry) for entry in group if entry.config.mode is mode) for mode in modes
        ]
        texts.append(f"{name}: {'; '.join(said)}.")
    return texts


def _peak_at(entry: MemoryEntry) -> str:
    failed = "out of memory after " if entry.is_out_of_memory else ""
    return f"{failed}{size(entry.profile.peak.allocated_bytes)} at context {entry.config.model.context_length}"


def _precision_of_all(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
    """A sentence for each size and mode: mixed precision over full, of runs that finished in both."""
    groups = twins([entry for entry in entries if not entry.is_out_of_memory], "precision", "context_length")
    names = labels([group[0] for group in groups], without=("precision", "context_length"))
    texts = []
    for name, group in zip(names, groups, strict=True):
        full = {_context(entry): entry for entry in group if entry.config.precision is Precision.FP32}
        for precision in MIXED:
            pairs = [
                (entry, full[_context(entry)])
                for entry in group
                if entry.config.precision is precision and _context(entry) in full
            ]
            if pairs:
                ratios = ", ".join(f"{_ratio(*pair)} at context {_context(pair[0])}" for pair in pairs)
                texts.append(
                    f"{name}: the peak in {precision} over that in fp32 is {ratios}. At context "
                    f"{_context(pairs[-1][0])}: {_changes(*pairs[-1])}."
                )
    return texts


def _ratio(mixed: MemoryEntry, full: MemoryEntry) -> str:
    part, whole = mixed.profile.peak.allocated_bytes, full.profile.peak.allocated_bytes
    return significant(part / whole, 3) if whole else "unknown"


def _changes(mixed: MemoryEntry, full: MemoryEntry) -> str:
    """The categories that differ, the most first, and what of the temporary blocks are copies of weights."""
    peaks = (mixed.profile.peak, full.profile.peak)
    least = MIN_CHANGE * max(peak.allocated_bytes for peak in peaks)
    pairs = {category: (bytes_of(peaks[0], category), bytes_of(peaks[1], category)) for category in Category}
    changed = {category: pair for category, pair in pairs.items() if abs(pair[0] - pair[1]) >= least}
    ordered = sorted(changed.items(), key=lambda item: -abs(item[1][0] - item[1][1]))
    said = ", ".join(f"{category} {size(part)} for {size(whole)}" for category, (part, whole) in ordered)
    copies = unnamed_copies_bytes(mixed.profile)
    if Category.TEMPORARY in changed and not pairs[Category.AUTOCAST_COPIES][0] and copies >= least:
        said += (
            f"; of the temporary blocks {size(copies)} have half the sizes of the weights and are at most as many: the "
            "copies that autocast keeps until the pass ends, which nothing names as nothing saves them for backward"
        )
    return said or "no category differs by a hundredth of the peak"


def _residual_of_all(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
    """A sentence for each size that has several contexts."""
    texts = []
    groups = twins(entries, "mode", "precision", "context_length")
    names = labels([group[0] for group in groups], without=("mode", "precision", "context_length"))
    for name, group in zip(names, groups, strict=True):
        known = {_context(entry): entry.profile.residual_stream_bytes for entry in group}
        said = [f"{size(found)} at context {context}" for context, found in known.items() if found is not None]
        texts += [f"{name}: {', '.join(said)}."] if len(said) > 1 else []
    return texts


def _largest_of_all(entries: Sequence[MemoryEntry], names: Sequence[str]) -> list[str]:
    pairs = [(entry.profile.largest, name) for entry, name in zip(entries, names, strict=True) if entry.profile.largest]
    if not pairs:
        return []
    rows, name = max(pairs, key=lambda pair: pair[0][0].requested_bytes)
    return [f"The largest of all, in {name}: {largest_words(rows, 1)}."]


def _blocks(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
    """A sentence for each size and precision: what a block saves at each context, and its gradients."""
    texts = []
    groups = twins([entry for entry in entries if entry.profile.blocks], "mode", "context_length")
    names = labels([group[0] for group in groups], without=("mode", "context_length"))
    for name, group in zip(names, groups, strict=True):
        by_context = {_context(entry): typical(entry.profile.blocks) for entry in group}
        gradients = max(typical(entry.profile.blocks).gradient_bytes for entry in group)
        said = [f"{size(block.saved_bytes)} at context {context}" for context, block in by_context.items()]
        kept = f"; its gradients take {size(gradients)} at any" if gradients else ""
        texts += [f"A block of {name} saves {', '.join(said)}{kept}."] if len(said) > 1 else []
    return texts


_SUMMARIES: Mapping[Question, Callable[[Sequence[MemoryEntry], Sequence[str]], list[str]]] = {
    Question.TIMELINE: _timelines,
    Question.PEAK: _peaks,
    Question.PRECISION: _precision_of_all,
    Question.RESIDUAL: _residual_of_all,
    Question.LARGEST: _largest_of_all,
    Question.BLOCK: _blocks,
}
