"""All of one `StepProfile` as files of a directory, and as tables for a terminal."""

from pathlib import Path

from cs336_systems.analysis.kernels.step_profile import StepProfile, encode_profile
from cs336_systems.config import RunConfig
from cs336_systems.report.formats import to_markdown
from cs336_systems.report.section import Section, texts_of, write_files
from cs336_systems.report.sections.kernels.findings import findings
from cs336_systems.report.sections.kernels.places import (
    blocks_section,
    gaps_section,
    host_calls_section,
    idle_section,
    modules_section,
)
from cs336_systems.report.sections.kernels.plots import write_pictures
from cs336_systems.report.sections.kernels.shares import attention_section, classes_section, products_section
from cs336_systems.report.sections.kernels.tables import kernels_section, phases_section
from cs336_systems.report.sections.kernels.words import about
from cs336_systems.report.table import Table, findings_table, with_note


def sections(profile: StepProfile, top: int) -> list[Section]:
    """All that is known of the profile, in the order to read it; at most `top` kernels and idle times a table."""
    return [
        phases_section(profile),
        classes_section(profile),
        kernels_section(profile, top),
        products_section(profile),
        attention_section(profile),
        modules_section(profile),
        blocks_section(profile),
        idle_section(profile, top),
        gaps_section(profile),
        host_calls_section(profile),
    ]


def _findings(profile: StepProfile, config: RunConfig | None) -> Table:
    """What stands out; with the `config` of the run, no advice that it follows already."""
    return findings_table(findings(profile, config), "Nothing stands out.")


def profile_tables(profile: StepProfile, top: int, config: RunConfig | None = None) -> list[Table]:
    """The tables for a terminal: first the findings, if any; below the first table stands what it is of."""
    tables = [table for section in sections(profile, top) for table in section.tables]
    found = _findings(profile, config)
    tables = [found, *tables] if found.rows else tables
    return [with_note(tables[0], about(profile)), *tables[1:]]


def write_profile(profile: StepProfile, directory: Path, top: int = 10, config: RunConfig | None = None) -> list[Path]:
    """Write profile.json, each subject as CSV and for people, findings.md and plots/ into the directory, which is made.

    Returns the paths. A subject that the profile has nothing of has no files: those of another profile are removed.
    """
    texts = {"profile.json": encode_profile(profile).decode()}
    texts["findings.md"] = to_markdown(with_note(_findings(profile, config), about(profile)))
    for section in sections(profile, top):
        texts |= texts_of(section, about(profile))
    return [*write_files(texts, directory), *write_pictures(profile, directory)]
