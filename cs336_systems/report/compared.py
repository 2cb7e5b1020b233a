"""Two sides compared, each one configuration or a sweep: the verdicts, and the file from which they are made again."""

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from cs336_systems.analysis.matching import refuse_unlike, without_profiled
from cs336_systems.files import read_json
from cs336_systems.record import RecordError, RunRecord, load_records, read_record
from cs336_systems.report.columns import Row
from cs336_systems.report.formats import pngs_of, texts_of, write_files
from cs336_systems.report.section import Section
from cs336_systems.report.sections.comparison import ONLY_A, ONLY_B, pair_section, sweeps_section
from cs336_systems.text import counted, print_aside

COMPARISON_FILE = "comparison.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What was compared, as the user named it; kept in COMPARISON_FILE."""

    a: str
    b: str
    records: tuple[str, str] | None = None
    """Paths of the records of A and B, relative to the file, quoted as in a URL.

    None if they are in `runs` beside it, because they were measured alternately: even repeats are A's, odd ones B's.
    """
    allow_mixed: bool = False
    """Whether the records may come from other hardware, software or inputs."""
    format_version: int = 1

    @property
    def names(self) -> tuple[str, str]:
        """The names of A and B."""
        return self.a, self.b


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The verdict on each configuration of two sides, and the tables and pictures that show it."""

    sides: Sides
    records: Sequence[Sequence[RunRecord]]
    """Records of A, then records of B, without runs under a profiler."""
    section: Section
    rows: Sequence[Row]
    """For each configuration `verdict`, `ratio`, its interval `ratio_low` to `ratio_high`, and `ratio_is_doubted`."""
    json: Mapping[str, Any]
    left_out: Sequence[str] = ()
    """Sentences on runs that are not compared."""

    @property
    def verdicts(self) -> list[tuple[str, float | None]]:
        """The verdict on each configuration that both sides have, and B's step over A's; None if it is not known."""
        return [(row["verdict"], row["ratio"]) for row in self.rows if row["verdict"] not in (ONLY_A, ONLY_B)]

    @property
    def words(self) -> list[str]:
        """The command that makes such a comparison, without its name, in words for a shell."""
        found = ["cs336", "compare", *map(shlex.quote, self.sides.names)]
        if self.sides.records is None:
            counts = Counter(record.config.configuration for record in self.records[0])
            are_directories = all(name and not name.startswith("-") for name in self.sides.names)
            found += ["--repeats", str(max(counts.values())), *(["--measure"] if are_directories else [])]
        return [*found, *(["--allow-mixed"] if self.sides.allow_mixed else [])]

    def write(self, directory: Path) -> None:
        """Write the tables and pictures."""
        write_files({**texts_of(self.section), **pngs_of(self.section)}, directory)


def compare_sides(sides: Sides, records: Sequence[Sequence[RunRecord]], *, are_files: bool = False) -> Compared:
    """Compare one configuration with another, or each configuration of a sweep with that of another.

    One process of a configuration is a sweep of one row, unless it was measured for this comparison or is given as a
    file. Raises ValueError for what must not be compared, and SweepError for a side of which no process ended well.
    """
    are_alternate = sides.records is None
    is_mixed = are_alternate or sides.allow_mixed  # what is measured alternately was checked before the first run
    plain = [without_profiled(side) for side in records]
    refuse_unlike(plain, is_mixed)
    left_out = [
        f"{counted(len(side) - len(own), 'run')} under a profiler left out of {name}: a profiler makes a step slower."
        for name, side, own in zip("AB", records, plain, strict=True)
        if len(own) < len(side)
    ]
    is_one = all(len({record.config.configuration for record in side}) == 1 for side in plain)
    if is_one and (are_alternate or are_files or min(map(len, plain)) > 1):
        section, row, json = pair_section(sides.names, plain, are_alternate=are_alternate)
        rows = [row]
    else:
        section = sweeps_section(sides.names, plain, allow_mixed=is_mixed, are_alternate=are_alternate)
        rows = [*map(dict, section.rows)]
        listed = [{"side": side, "configuration": name} for side, name in zip("AB", sides.names, strict=True)]
        json = {"sides": listed, "results": section.json}
    return Compared(sides=sides, records=plain, section=section, rows=rows, json=json, left_out=left_out)


def compare_paths(sides: Sides, paths: Sequence[Path]) -> Compared:
    """Compare the records at two paths, each a directory of a sweep or a record."""
    found = [records_at(path) for path in paths]
    return compare_sides(sides, found, are_files=all(path.is_file() for path in paths))


def load_compared(directory: Path, records: Sequence[RunRecord] | None = None) -> Compared:
    """Compare again what COMPARISON_FILE in the directory names; `records` are those in it, if they were read."""
    what = "the names of both sides of a comparison"
    sides = read_json(directory / COMPARISON_FILE, Sides, what, version=1, error=RecordError)
    if sides.records is not None:
        return compare_paths(sides, [_found_from(directory, path) for path in sides.records])
    own = load_records(directory / "runs")[0] if records is None else records
    return compare_sides(sides, by_parity(own))


def seen_from(directory: Path, path: Path) -> str:
    """The path relative to the directory, so that both can be moved together; quoted because JSON must be UTF-8."""
    return quote(os.fsencode(os.path.relpath(path.resolve(), directory.resolve())))


def _found_from(directory: Path, quoted: str) -> Path:
    return Path(os.path.normpath(directory / os.fsdecode(unquote_to_bytes(quoted))))


def by_parity(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Split runs that were measured alternately into A's (even repeats) and B's (odd repeats), by repeat."""
    ordered = sorted(records, key=lambda record: record.config.repeat)
    return [[record for record in ordered if record.config.repeat % 2 == side] for side in (0, 1)]


def records_at(path: Path) -> Sequence[RunRecord]:
    """The records at the path; one that cannot be read is a warning on standard error. ValueError if there are none."""
    if path.is_file():
        return [read_record(path)]
    runs = path / "runs" if (path / "runs").is_dir() else path
    found, problems = load_records(runs)
    if not found:
        others = f" ({problems[0]})" if problems else ""
        raise ValueError(f"{path}: no records of runs{others}; needed the directory of a sweep")
    for problem in problems:
        print_aside(f"warning: {problem}")
    return found
