"""All of one `MemoryProfile` as files of a directory, and as tables for a terminal."""

from pathlib import Path

from cs336_systems.analysis.memory.profile import MemoryProfile, write_memory_profile
from cs336_systems.report.formats import to_markdown
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.sections.memory.allocations import (
    at_peak_section,
    blocks_section,
    largest_section,
    saved_section,
)
from cs336_systems.report.sections.memory.answers import profile_answers
from cs336_systems.report.sections.memory.findings import findings
from cs336_systems.report.sections.memory.phases import boundaries_section, phases_section
from cs336_systems.report.sections.memory.plots import write_pictures
from cs336_systems.report.sections.memory.tables import allocator_section, categories_section, peak_section
from cs336_systems.report.sections.memory.words import about
from cs336_systems.report.table import Table, findings_table, with_note


def sections(profile: MemoryProfile, top: int) -> list[Section]:
    """All that is known of the profile, in the order to read it; at most `top` allocations a table."""
    return [
        peak_section(profile),
        categories_section(profile),
        boundaries_section(profile),
        phases_section(profile),
        at_peak_section(profile, top),
        largest_section(profile, top),
        blocks_section(profile),
        saved_section(profile),
        allocator_section(profile),
    ]


def memory_tables(profile: MemoryProfile, top: int = 10) -> list[Table]:
    """The tables for a terminal: first the findings; below the first table stands what it is of."""
    found = with_note(findings_table(findings(profile)), about(profile))
    return [found, *(table for section in sections(profile, top) for table in section.tables)]


def write_memory(profile: MemoryProfile, directory: Path, top: int = 10) -> list[Path]:
    """Write memory.json, each subject as CSV and for people, findings.md, answers.md and plots/ into the directory.

    The directory is made. Returns the paths. A subject that the profile has nothing of has no files: those of another
    profile are removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_memory_profile(profile, directory / "memory.json")
    texts = {
        "findings.md": to_markdown(with_note(findings_table(findings(profile)), about(profile))),
        "answers.md": profile_answers(profile),
    }
    for section in sections(profile, top):
        texts |= texts_of(section, about(profile))
    return [directory / "memory.json", *write_files(texts, directory), *write_pictures(profile, directory)]
