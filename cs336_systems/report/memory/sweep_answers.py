"""The course's questions on memory answered for every configuration of a sweep, with what they have in common."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from cs336_systems.analysis.memory.profile import Category
from cs336_systems.config import Mode, Precision
from cs336_systems.report.entries import labels
from cs336_systems.report.memory.allocations import typical
from cs336_systems.report.memory.answers import Question, answers
from cs336_systems.report.memory.entries import MemoryEntry, twins
from cs336_systems.report.memory.facts import unnamed_copies_bytes
from cs336_systems.report.memory.largest import largest_words
from cs336_systems.report.memory.tables import bytes_of
from cs336_systems.report.memory.words import size
from cs336_systems.report.numbers import significant
from cs336_systems.report.sentences import answers_markdown

MIXED = (Precision.BF16, Precision.FP16)
MAX_EACH = 8
"""Runs that are answered for one by one; of more, some stand for the others."""
MIN_CHANGE = 0.01
"""Of a peak: what precision changes in a category by less is left out."""


def sweep_answers(entries: Sequence[MemoryEntry]) -> str:
    """Markdown: each question as a heading, what holds over the configurations, then the answer of each.

    Of more than MAX_EACH, only some are answered for one by one.
    """
    names = labels(entries)
    chosen = _chosen(entries)
    found = [
        (name, {answer.question: answer.text for answer in answers(entry.profile)})
        for name, entry in zip(names, entries, strict=True)
        if any(entry is one for one in chosen)
    ]
    sections = []
    for question in Question:
        summary = _SUMMARIES[question](entries, names) if len(entries) > 1 else []
        own = _merged((name, texts[question]) for name, texts in found)
        sections.append((question.value, [*(("", text) for text in summary), *own]))
    return answers_markdown("Where the memory goes: the questions of CS336", sections)


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


def _precision(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
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


def _residual(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
    """A sentence for each size that has several contexts."""
    texts = []
    groups = twins(entries, "mode", "precision", "context_length")
    names = labels([group[0] for group in groups], without=("mode", "precision", "context_length"))
    for name, group in zip(names, groups, strict=True):
        known = {_context(entry): entry.profile.residual_stream_bytes for entry in group}
        said = [f"{size(found)} at context {context}" for context, found in known.items() if found is not None]
        texts += [f"{name}: {', '.join(said)}."] if len(said) > 1 else []
    return texts


def _largest(entries: Sequence[MemoryEntry], names: Sequence[str]) -> list[str]:
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
    Question.PRECISION: _precision,
    Question.RESIDUAL: _residual,
    Question.LARGEST: _largest,
    Question.BLOCK: _blocks,
}
