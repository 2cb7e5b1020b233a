"""Sections and checks that other distributions add, by the entry points of two groups.

What is added looks at an object of the class `of`: `Explained` or `MemoryEntry` (one explained
file), or `Results` (a sweep).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from ...files import in_one_line
from ...plugins import load
from ...text import print_aside
from ..section import Section

SECTIONS, CHECKS = "cs336.sections", "cs336.checks"
"""The groups of entry points."""
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedSection:
    """A section about all explained files of a command or sweep, or about the sweep's results."""

    of: type
    make: Callable[[Any], Section | None]
    """Makes the section of a sequence of entries, or of `Results`; None if it has nothing to say.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedCheck:
    """A rule that may say one sentence, with its number, about an explained file or a sweep."""

    of: type
    find: Callable[[Any], str | None]


def added_sections(of: type, subject: object) -> list[Section]:
    """The sections that plug-ins make of the subject; `plugin_` before the names of their files
    keeps them apart from this program's.
    """
    sections = []
    for added in _loaded(SECTIONS, AddedSection):
        section = _called(added.make, subject) if added.of is of else None
        if section is not None:
            sections.append(replace(section, name=f"plugin_{section.name}"))
    return sections


def added_findings(subject: object) -> Iterator[str]:
    """The sentences that plug-ins say about the subject."""
    for added in _loaded(CHECKS, AddedCheck):
        sentence = _called(added.find, subject) if isinstance(subject, added.of) else None
        if sentence:
            yield sentence


@cache
def _loaded(group: str, kind: type) -> list[Any]:
    """Objects of this kind that installed plug-ins register under the entry point `group`."""
    return load(group, kind)


def _called(function: Callable[[Any], ResultT | None], subject: object) -> ResultT | None:
    """What the function returns; None after a warning if it fails.

    A plug-in's error must not cost a sweep its own tables.
    """
    try:
        return function(subject)
    except Exception as error:
        name = f"{function.__module__}.{function.__qualname__}"
        _warn_once(f"warning: plug-in {name} failed: {in_one_line(error)}")
        return None


@cache
def _warn_once(text: str) -> None:
    """Print a warning on standard error, the same one only once."""
    print_aside(text)
