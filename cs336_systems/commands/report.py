"""`cs336 report`: the tables and plots of finished runs, again."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cs336_systems.commands.flags import unset
from cs336_systems.commands.outcome import OK, UsageError
from cs336_systems.commands.sweep import report
from cs336_systems.record import RunRecord, load_records


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Make the tables and plots of finished runs again, from one sweep's directory or several together."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR ...]")]
    """Directories of sweeps (each with runs/ in it)."""
    output: Annotated[Path | None, unset("DIR", "the directory itself, if there is one only")] = None
    """Where to write."""


def run(arguments: ReportArguments) -> int:
    """Write and print what the records of the directories give together."""
    if not arguments.directories or (arguments.output is None and len(arguments.directories) > 1):
        raise UsageError("report needs a directory; with several, also --output for what they give together")
    found = {directory: load_or_say(directory / "runs") for directory in arguments.directories}
    for directory, own in found.items():
        if not own:
            raise UsageError(f"{directory}: no records in {directory / 'runs'}; needed the directory of a sweep")
    identities = {record.environment.identity for own in found.values() for record in own if record.environment}
    if len(identities) > len({identity.device_name for identity in identities}):
        said = "the records come from different drivers, torch or code, to which differences may be due"
        print(f"warning: {said}", file=sys.stderr)
    output = arguments.output or arguments.directories[0]
    output.mkdir(parents=True, exist_ok=True)
    report(found, output, keep=True)
    return OK


def load_or_say(runs: Path) -> list[RunRecord]:
    """The records in `runs`; what is unreadable is said and left out."""
    records, problems = load_records(runs)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    return records
