"""Answers in prose, beside the tables: how they give a share, and how they become Markdown."""

from collections.abc import Iterable, Sequence

from cs336_systems.report.formats import inert_markdown
from cs336_systems.report.numbers import significant


def percent_of(part: float, whole: float) -> str:
    """The share in percent for a sentence, to three digits; 0 of nothing."""
    return f"{significant(100 * part / whole, 3) if part and whole else 0} %"


def answers_markdown(title: str, sections: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Questions as headings, answers as paragraphs, each with a label in bold if it has one; no name is markup."""
    parts = [f"# {inert_markdown(title)}"]
    for question, paragraphs in sections:
        parts.append(f"## {question}")
        parts += [
            f"**{inert_markdown(name)}**: {inert_markdown(text)}" if name else inert_markdown(text)
            for name, text in paragraphs
        ]
    return "\n\n".join(parts) + "\n"
