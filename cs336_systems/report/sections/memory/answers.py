"""Answers to the questions of CS336 (assignment 2, memory profiling) about one snapshot or the runs of a sweep."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cs336_systems.analysis.memory.profile import BlockMemory, Category, MemoryProfile, PhaseMemory
from cs336_systems.config import Mode, Precision
from cs336_systems.report.entries import labels
from cs336_systems.report.formats import answers_markdown
from cs336_systems.report.numbers import MIB, label, percent_of, significant
from cs336_systems.report.sections.memory.allocations import NUM_CONTRIBUTORS
from cs336_systems.report.sections.memory.entries import MemoryEntry, Snapshot, grouped, recorded_runs
from cs336_systems.report.sections.memory.words import (
    by_category,
    largest_words,
    parts_of,
    peak_words,
    peaks_by,
    shape_text,
    size,
    typical,
    when,
)

NUM_LARGEST = 5
"""How many of the largest sizes of allocations an answer names."""
MIXED = (Precision.BF16, Precision.FP16)
MAX_EACH = 8
"""Up to this number of runs, each has answers of its own; of more runs, only some have."""
MIN_CHANGE = 0.01
"""Smallest change of a category that is worth naming, as a part of the peak."""
TITLE = "Where the memory goes: the questions of CS336"


@dataclass(frozen=True, slots=True)
class Question:
    """A question of the course, and the functions that answer it."""

    text: str
    alone: Callable[[MemoryProfile], str]
    """Answers it from one profile, or says that the profile does not tell."""
    together: Callable[[Sequence[MemoryEntry]], Iterable[str]]
    """Makes sentences about several runs together."""


def answers(entries: Sequence[Snapshot]) -> str:
    """Markdown with each question as a heading: sentences about all runs together, then the answer of each run.

    Runs with the same answer share it. Of more than MAX_EACH runs, only some have answers of their own.
    """
    runs = recorded_runs(entries)
    names = labels(runs) if runs else [""] * len(entries)
    chosen = {id(entry) for entry in _chosen(runs) or entries}
    sections = []
    for question in QUESTIONS:
        names_of: dict[str, list[str]] = {}
        for name, entry in zip(names, entries, strict=True):
            if id(entry) in chosen:
                names_of.setdefault(question.alone(entry.profile), []).append(name)
        together = question.together(runs) if len(runs) > 1 else ()
        own = [(", ".join(named), text) for text, named in names_of.items()]
        sections.append((question.text, [*(("", text) for text in together), *own]))
    return answers_markdown(TITLE, sections)


def _chosen(entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
    """The runs with answers of their own: all, or at most MAX_EACH of many.

    Of many, those of the first and the last mode at the context that most of them finished at, the longest of several;
    the largest sizes among them if these are still too many.
    """
    if len(entries) <= MAX_EACH:
        return entries
    present = [mode for mode in Mode if any(entry.config.mode is mode for entry in entries)]
    wanted = [entry for entry in entries if entry.config.mode in (present[0], present[-1])]
    finished = [entry for entry in wanted if not entry.is_out_of_memory] or wanted
    counts = Counter(map(_context, finished))
    longest = max(counts, key=lambda context: (counts[context], context))
    return [entry for entry in finished if _context(entry) == longest][-MAX_EACH:]


def _context(entry: MemoryEntry) -> int:
    return entry.config.model.context_length


def timeline_answer(profile: MemoryProfile) -> str:
    """The phases of the last step, which is the steadiest of the recording."""
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
    peaks = peaks_by(profile.phases, lambda phase: phase.phase)
    text = f"{peak_words(profile)} At most {size(profile.peak_reserved_bytes)} are reserved."
    if len(peaks) > 1:
        text += f" By phase: {', '.join(f'{label(phase)} {size(most)}' for phase, most in peaks.items())}."
    return f"{text} The run ran out of memory, so this is what it had by then." if profile.work.out_of_memory else text


def _precision(profile: MemoryProfile) -> str:
    """The peak by data type, as far as the profile names data types."""
    sums = Counter[str]()
    for row in profile.at_peak:
        if row.dtype:
            sums[row.dtype] += row.bytes_at_peak
    if not sums:
        return f"The snapshot {label(profile.source)} names no data types. A recording by --memory does."
    return f"Of the peak, as far as data types are known: {parts_of(sums, profile.peak.allocated_bytes)}."


def _residual(profile: MemoryProfile) -> str:
    if profile.residual_stream_bytes is None:
        return "The snapshot does not tell the shape of the model; batch x T x d_model x 4 bytes."
    return f"{profile.residual_stream_bytes / MIB:,.2f} MiB: batch x T x d_model x 4 bytes."


def _largest(profile: MemoryProfile) -> str:
    return f"{largest_words(profile.largest, NUM_LARGEST)}." if profile.largest else "Nothing was allocated."


def block_answer(profile: MemoryProfile) -> str:
    """What a block saves for backward, its largest contributors, and its gradients beside its parameters."""
    if not profile.blocks:
        return "Nothing was saved for backward in a block that the profile knows."
    block = typical(profile.blocks)
    parts = [
        f"{' '.join(part for part in (label(tensor.name), shape_text(tensor.shape, tensor.dtype)) if part)} "
        f"{size(tensor.num_bytes)} ({percent_of(tensor.num_bytes, block.saved_bytes)})"
        for tensor in block.saved[:NUM_CONTRIBUTORS]
    ]
    text = f"{label(block.name)} saves {size(block.saved_bytes)} ({block.saved_bytes:,} bytes); most of it "
    text += f"{', '.join(parts)}."
    if again := block.recomputed_bytes:
        text += f" Of that, {size(again)} are there only while backward computes the block again."
    return f"{text} {gradient_words(block)}"


def gradient_words(block: BlockMemory) -> str:
    """The gradients of a block beside its parameters."""
    if not block.gradient_bytes:
        return "It had no gradients."
    words = f"Its gradients take {size(block.gradient_bytes)} ({block.gradient_bytes:,} bytes)"
    if block.gradient_bytes == block.parameter_bytes:
        return f"{words}, as many as its parameters: a gradient of the same size for each of them, as expected."
    return f"{words}, and its parameters {size(block.parameter_bytes)} ({block.parameter_bytes:,} bytes): not the same."


def _over_contexts(
    entries: Iterable[MemoryEntry], value: Callable[[MemoryEntry], str], *without: str
) -> Iterator[tuple[str, list[MemoryEntry], str]]:
    """For each group of runs that differ only in context and `without`: its name, its runs, the value at each context.

    Runs without a value are left out.
    """
    groups = grouped([entry for entry in entries if value(entry)], "context_length", *without)
    leaders, apart = [group[0] for group in groups], ("context_length", *without)
    names = labels(leaders, always=("size", "mode", "precision"), without=apart)
    for name, group in zip(names, groups, strict=True):
        values = {_context(entry): value(entry) for entry in group}
        yield name, group, ", ".join(f"{text} at context {context}" for context, text in values.items())


def _series(value: Callable[[MemoryEntry], str], *without: str) -> Callable[[Sequence[MemoryEntry]], Iterator[str]]:
    """A function that makes a sentence for each group of runs with several contexts: the value at each of them."""

    def sentences(entries: Sequence[MemoryEntry]) -> Iterator[str]:
        for name, group, said in _over_contexts(entries, value, *without):
            if len(set(map(_context, group))) > 1:
                yield f"{name}: {said}."

    return sentences


def _peak_size(entry: MemoryEntry) -> str:
    return f"{'out of memory after ' if entry.is_out_of_memory else ''}{size(entry.profile.peak.allocated_bytes)}"


def _residual_size(entry: MemoryEntry) -> str:
    num_bytes = entry.profile.residual_stream_bytes
    return "" if num_bytes is None else size(num_bytes)


def _saved_size(entry: MemoryEntry) -> str:
    return f"{size(typical(entry.profile.blocks).saved_bytes)} a block" if entry.profile.blocks else ""


def _timelines(entries: Sequence[MemoryEntry]) -> Iterator[str]:
    yield (
        f"Each of the {len(entries)} runs has a picture in plots/, by its key, such as "
        f"plots/{entries[0].config.key}_timeline.png, and rows in phases.md and boundaries.md."
    )
    chosen = _chosen(entries)
    if len(chosen) < len(entries):
        yield (
            f"{len(chosen)} of the runs have answers of their own, here and below. cs336 memory memory/KEY.json "
            "--output DIR answers for any other."
        )


def mixed_answers(entries: Sequence[MemoryEntry]) -> Iterator[str]:
    """Sentences that compare the runs in mixed precision with the same runs in fp32, if both finished."""
    full_of: dict[int, MemoryEntry] = {}
    for group in grouped([entry for entry in entries if not entry.is_out_of_memory], "precision"):
        by_precision = {entry.config.precision: entry for entry in group}
        if full := by_precision.get(Precision.FP32):
            full_of |= {id(by_precision[name]): full for name in MIXED if name in by_precision}

    def ratio(entry: MemoryEntry) -> str:
        part, whole = (run.profile.peak.allocated_bytes for run in (entry, full_of[id(entry)]))
        return significant(part / whole, 3) if whole else "unknown"

    mixed = [entry for entry in entries if id(entry) in full_of]
    for name, group, said in _over_contexts(mixed, ratio):
        changes = _changes(group[-1].profile, full_of[id(group[-1])].profile)
        yield f"{name}: the peak over that in fp32 is {said}. At context {_context(group[-1])}: {changes}."


def _changes(mixed: MemoryProfile, full: MemoryProfile) -> str:
    """The categories that differ, the largest difference first, and how many temporary bytes are copies of weights."""
    least = MIN_CHANGE * max(mixed.peak.allocated_bytes, full.peak.allocated_bytes)
    parts, wholes = by_category(mixed.peak), by_category(full.peak)
    changed = [category for category in Category if abs(parts[category] - wholes[category]) >= least]
    changed.sort(key=lambda category: -abs(parts[category] - wholes[category]))
    said = ", ".join(f"{category} {size(parts[category])} for {size(wholes[category])}" for category in changed)
    copies = _unnamed_copies_bytes(mixed)
    if Category.TEMPORARY in changed and not parts[Category.AUTOCAST_COPIES] and copies >= least:
        said += (
            f"; of the temporary blocks {size(copies)} have half the sizes of the weights and are at most as many: the "
            "copies that autocast keeps until the pass ends, which nothing names as nothing saves them for backward"
        )
    return said or "no category differs by a hundredth of the peak"


def _unnamed_copies_bytes(profile: MemoryProfile) -> int:
    """Temporary blocks at the peak of half a fp32 weight's size, at most as many as there are such weights.

    Under autocast without a graph these are its copies of the weights: nothing saves them, so nothing names them.
    """
    weights, copies = Counter[int](), Counter[int]()
    for row in profile.at_peak:
        if row.category is Category.PARAMETERS and row.dtype == "float32":
            weights[row.requested_bytes // 2] += row.count_at_peak
        elif row.category is Category.TEMPORARY:
            copies[row.requested_bytes] += row.count_at_peak
    return sum(num_bytes * count for num_bytes, count in (copies & weights).items())


def largest_answers(entries: Sequence[MemoryEntry]) -> Iterator[str]:
    """A sentence on the largest allocation of all runs."""
    pairs = [(e.profile.largest, name) for e, name in zip(entries, labels(entries), strict=True) if e.profile.largest]
    if pairs:
        rows, name = max(pairs, key=lambda pair: pair[0][0].requested_bytes)
        yield f"The largest of all, in {name}: {largest_words(rows, 1)}."


QUESTIONS = (
    Question("How does the active memory run over the pass, and which phase is which?", timeline_answer, _timelines),
    Question("What is the peak memory, of the forward pass alone and of a whole training step?",
             _peak, _series(_peak_size)),
    Question("What does mixed precision change?", _precision, mixed_answers),
    Question("How large is one tensor of the residual stream in single precision?",
             _residual, _series(_residual_size, "mode", "precision")),
    Question("How large are the largest allocations, and which code do they come from?", _largest, largest_answers),
    Question("How many bytes does one block save for backward, which are the five largest contributors, and how large "
             "are its gradients?", block_answer, _series(_saved_size, "mode")),
)  # fmt: skip
"""The questions in the order of the course."""
