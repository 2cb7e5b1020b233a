"""The course's questions on memory answered for every configuration of a sweep, with what they have in common."""

from collections.abc import Callable, Mapping, Sequence

from cs336_systems.analysis.memory.profile import Category
from cs336_systems.config import Precision
from cs336_systems.report.formats import significant
from cs336_systems.report.memory.allocations import typical
from cs336_systems.report.memory.answers import Question, answers
from cs336_systems.report.memory.entries import MemoryEntry, identities, labels
from cs336_systems.report.memory.largest import largest_words
from cs336_systems.report.memory.tables import bytes_of
from cs336_systems.report.memory.words import size
from cs336_systems.report.sentences import answers_markdown

MIXED = (Precision.BF16, Precision.FP16)


def sweep_answers(entries: Sequence[MemoryEntry]) -> str:
    """Markdown: each question as a heading, what holds over the configurations, then the answer of each."""
    names = labels(entries)
    found = [{answer.question: answer.text for answer in answers(entry.profile)} for entry in entries]
    sections = []
    for question in Question:
        summary = _SUMMARIES[question](entries, names) if len(entries) > 1 else []
        own = [(name, texts[question]) for name, texts in zip(names, found, strict=True)]
        sections.append((question.value, [*(("", text) for text in summary), *own]))
    return answers_markdown("Where the memory goes: the questions of CS336", sections)


def twins(entries: Sequence[MemoryEntry], *names: str) -> list[list[MemoryEntry]]:
    """The entries in groups that differ in nothing but these columns, in the order of their first."""
    groups: dict[tuple[object, ...], list[MemoryEntry]] = {}
    for entry, identity in zip(entries, identities(entries), strict=True):
        key = tuple(value for name, value in identity.items() if name not in names)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _timelines(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
    return [
        f"The {len(entries)} pictures are in plots/, by the key of the run: plots/{entries[0].config.key}_timeline.png."
    ]


def _peaks(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
    """A sentence for each size and precision: the peak at each context, by mode."""
    texts = []
    groups = twins(entries, "mode", "context_length", "device_name")
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


def _precision(entries: Sequence[MemoryEntry], names: Sequence[str]) -> list[str]:
    """Mixed precision over full, of runs that finished in both."""
    texts = []
    named = {id(entry): name for entry, name in zip(entries, names, strict=True)}
    for group in twins([entry for entry in entries if not entry.is_out_of_memory], "precision", "device_name"):
        full = next((entry for entry in group if entry.config.precision is Precision.FP32), None)
        texts += [
            f"{named[id(mixed)]} peaks at {_against(mixed, full)}: "
            f"saved activations {_change(mixed, full, Category.SAVED)}, "
            f"autocast copies {_change(mixed, full, Category.AUTOCAST_COPIES)}."
            for mixed in group
            if full is not None and full.profile.peak.allocated_bytes and mixed.config.precision in MIXED
        ]
    return texts


def _against(mixed: MemoryEntry, full: MemoryEntry) -> str:
    part, whole = mixed.profile.peak.allocated_bytes, full.profile.peak.allocated_bytes
    return f"{significant(part / whole, 3)} times fp32, {size(part)} for {size(whole)}"


def _change(mixed: MemoryEntry, full: MemoryEntry, category: Category) -> str:
    return f"{size(bytes_of(mixed.profile.peak, category))} for {size(bytes_of(full.profile.peak, category))}"


def _residual(entries: Sequence[MemoryEntry], _: Sequence[str]) -> list[str]:
    known = {found for entry in entries if (found := entry.profile.residual_stream_bytes) is not None}
    return [f"From {size(min(known))} to {size(max(known))}."] if len(known) > 1 else []


def _largest(entries: Sequence[MemoryEntry], names: Sequence[str]) -> list[str]:
    pairs = [
        (entry.profile.largest[0], name) for entry, name in zip(entries, names, strict=True) if entry.profile.largest
    ]
    if not pairs:
        return []
    row, name = max(pairs, key=lambda pair: pair[0].requested_bytes)
    return [f"The largest of all, in {name}: {largest_words([row], 1)}."]


def _blocks(entries: Sequence[MemoryEntry], names: Sequence[str]) -> list[str]:
    saved = {
        name: typical(entry.profile.blocks).saved_bytes
        for name, entry in zip(names, entries, strict=True)
        if entry.profile.blocks
    }
    if len(saved) < 2:
        return []
    low, high = min(saved, key=saved.__getitem__), max(saved, key=saved.__getitem__)
    return [f"A block saves {size(saved[low])} ({low}) to {size(saved[high])} ({high})."]


_SUMMARIES: Mapping[Question, Callable[[Sequence[MemoryEntry], Sequence[str]], list[str]]] = {
    Question.TIMELINE: _timelines,
    Question.PEAK: _peaks,
    Question.PRECISION: _precision,
    Question.RESIDUAL: _residual,
    Question.LARGEST: _largest,
    Question.BLOCK: _blocks,
}
