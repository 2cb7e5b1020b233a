"""What answers.md of kernels and of memory share: shares in sentences, and the Markdown of questions and answers."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from cs336_systems.report.formats import inert_markdown
from cs336_systems.report.numbers import significant


def percent_of(part: float, whole: float) -> str:
    """The part in percent of the whole, to three digits; `0 %` if either is 0."""
    return f"{significant(100 * part / whole, 3) if part and whole else 0} %"


def between(values: Mapping[str, float], text: Callable[[float], str]) -> str:
    """The least and the largest value with their names; one value if they read the same, empty without any."""
    if not values:
        return ""
    least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    low, high = text(values[least]), text(values[most])
    return low if low == high else f"{low} ({least}) to {high} ({most})"


def answers_markdown(title: str, sections: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """The title and questions as headings, and each answer as a paragraph, after its label in bold if it has one."""
    parts = [f"# {inert_markdown(title)}"]
    for question, paragraphs in sections:
        parts.append(f"## {question}")
        parts += [
            f"**{inert_markdown(name)}**: {inert_markdown(text)}" if name else inert_markdown(text)
            for name, text in paragraphs
        ]
    return "\n\n".join(parts) + "\n"
