"""All of one `StepProfile` as files of a directory, and as tables for a terminal."""

from pathlib import Path

from cs336_systems.analysis.kernels.step_profile import StepProfile, encode_profile
from cs336_systems.config import RunConfig
from cs336_systems.report.formats import to_markdown
from cs336_systems.report.kernels.findings import findings
from cs336_systems.report.kernels.places import (
    blocks_listing,
    gaps_listing,
    host_calls_listing,
    idle_listing,
    modules_listing,
)
from cs336_systems.report.kernels.plots import write_pictures
from cs336_systems.report.kernels.shares import attention_listing, classes_listing, products_listing
from cs336_systems.report.kernels.tables import kernels_listing, phases_listing
from cs336_systems.report.kernels.words import about
from cs336_systems.report.listing import Listing, texts_of, write_files
from cs336_systems.report.table import Table, findings_table, with_note


def listings(profile: StepProfile, top: int) -> list[Listing]:
    """All that is known of the profile, in the order to read it; at most `top` kernels and idle times a table."""
    return [
        phases_listing(profile),
        classes_listing(profile),
        kernels_listing(profile, top),
        products_listing(profile),
        attention_listing(profile),
        modules_listing(profile),
        blocks_listing(profile),
        idle_listing(profile, top),
        gaps_listing(profile),
        host_calls_listing(profile),
    ]


def _findings(profile: StepProfile, config: RunConfig | None) -> Table:
    """What stands out; with the `config` of the run, no advice that it follows already."""
    return findings_table(findings(profile, config), "Nothing stands out.")


def profile_tables(profile: StepProfile, top: int, config: RunConfig | None = None) -> list[Table]:
    """The tables for a terminal: first the findings, if any; below the first table stands what it is of."""
    tables = [table for listing in listings(profile, top) for table in listing.tables]
    found = _findings(profile, config)
    tables = [found, *tables] if found.rows else tables
    return [with_note(tables[0], about(profile)), *tables[1:]]


def write_profile(profile: StepProfile, directory: Path, top: int = 10, config: RunConfig | None = None) -> list[Path]:
    """Write profile.json, each subject as CSV and for people, findings.md and plots/ into the directory, which is made.

    Returns the paths. A subject that the profile has nothing of has no files: those of another profile are removed.
    """
    texts = {"profile.json": encode_profile(profile).decode()}
    texts["findings.md"] = to_markdown(with_note(_findings(profile, config), about(profile)))
    for listing in listings(profile, top):
        texts |= texts_of(listing, about(profile))
    return [*write_files(texts, directory), *write_pictures(profile, directory)]
