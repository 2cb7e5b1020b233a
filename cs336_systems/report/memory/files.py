"""All of one `MemoryProfile` as files of a directory, and as tables for a terminal."""

from pathlib import Path

from cs336_systems.analysis.memory.profile import MemoryProfile, write_memory_profile
from cs336_systems.report.formats import to_markdown
from cs336_systems.report.listing import Listing, texts_of, write_files
from cs336_systems.report.memory.allocations import at_peak_listing, blocks_listing, largest_listing, saved_listing
from cs336_systems.report.memory.answers import profile_answers
from cs336_systems.report.memory.findings import findings
from cs336_systems.report.memory.phases import boundaries_listing, phases_listing
from cs336_systems.report.memory.plots import write_pictures
from cs336_systems.report.memory.tables import allocator_listing, categories_listing, peak_listing
from cs336_systems.report.memory.words import about
from cs336_systems.report.table import Table, findings_table, with_note


def listings(profile: MemoryProfile, top: int) -> list[Listing]:
    """All that is known of the profile, in the order to read it; at most `top` allocations a table."""
    return [
        peak_listing(profile),
        categories_listing(profile),
        boundaries_listing(profile),
        phases_listing(profile),
        at_peak_listing(profile, top),
        largest_listing(profile, top),
        blocks_listing(profile),
        saved_listing(profile),
        allocator_listing(profile),
    ]


def memory_tables(profile: MemoryProfile, top: int = 10) -> list[Table]:
    """The tables for a terminal: first the findings; below the first table stands what it is of."""
    found = with_note(findings_table(findings(profile)), about(profile))
    return [found, *(table for listing in listings(profile, top) for table in listing.tables)]


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
    for listing in listings(profile, top):
        texts |= texts_of(listing, about(profile))
    return [directory / "memory.json", *write_files(texts, directory), *write_pictures(profile, directory)]
