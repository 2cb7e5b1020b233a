"""All results below one directory, for one page, and the identifiers of their parts in the page."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cs336_systems.report.columns import Row
from cs336_systems.report.compared import Compared
from cs336_systems.report.results import Results
from cs336_systems.studies.ceilings_files import Ceilings
from cs336_systems.studies.ceilings_records import CeilingsStudy
from cs336_systems.studies.operators import AttentionStudy, FusionStudy
from cs336_systems.studies.precision_records import PrecisionStudy
from cs336_systems.studies.step_parts import StepParts
from cs336_systems.sweep.ladder import Rung


def block_id(directory: Path, name: str) -> str:
    """The identifier, in the page, of the table or figure `name` of a results directory.

    The directory is relative to the root of the page. That of a cell is `block_id(directory, "results.0.2")`. With an
    empty name this is what all identifiers of the directory begin with; it is empty for the root itself.
    """
    path = quote(os.fsencode(directory.as_posix()), safe="/")
    return name if path == "." else f"{path}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    """A ladder that was run: its rungs, the records and profiles of them, and a row of values for each rung."""

    rungs: tuple[Rung, ...]
    results: Results
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Results by their directories, which are relative to `root` and in order; the root itself is `Path(".")`."""

    root: Path
    sweeps: Mapping[Path, Results] = field(default_factory=dict)
    """Includes the runs that compare two sides."""
    comparisons: Mapping[Path, Compared] = field(default_factory=dict)
    """Verdicts on runs that `cs336 compare` measured, which are among the sweeps too, and on finished sweeps."""
    ladders: Mapping[Path, Climbed] = field(default_factory=dict)
    ceilings: Mapping[Path, CeilingsStudy] = field(default_factory=dict)
    parts: Mapping[Path, StepParts] = field(default_factory=dict)
    """The parts of a step that are on the roofline of a directory of ceilings."""
    attention: Mapping[Path, AttentionStudy] = field(default_factory=dict)
    fusion: Mapping[Path, FusionStudy] = field(default_factory=dict)
    precision: Mapping[Path, PrecisionStudy] = field(default_factory=dict)
    unreadable: Mapping[Path, str] = field(default_factory=dict)
    """Why the results of a directory cannot be read."""

    @classmethod
    def together(cls, root: Path, several: Iterable["Collection"]) -> "Collection":
        """The results of several collections of the same root, whose directories differ."""
        found, names = list(several), [each.name for each in fields(cls) if each.name != "root"]
        merged: dict[str, dict[Path, Any]] = {name: {} for name in names}
        for own in found:
            for name in names:
                merged[name] |= getattr(own, name)
        return cls(root=root, **{name: dict(sorted(own.items())) for name, own in merged.items()})

    def at(self, directory: Path) -> "Collection":
        """The results of this directory below the root, as a collection of which it is the root."""
        path = directory.relative_to(self.root)
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "root"}
        return Collection(root=directory, **{name: {Path(): own[path]} for name, own in kept.items() if path in own})

    def place(self, directory: Path) -> Path:
        """How the page names the directory: by its path below the root, or the root by its name."""
        return directory if directory != Path() else Path(self.root.resolve().name)

    @property
    def measured(self) -> Mapping[Path, Results]:
        """The results of sweeps and of ladders."""
        return {**self.sweeps, **{path: climbed.results for path, climbed in self.ladders.items()}}

    def ceilings_of(self, directory: Path) -> Ceilings:
        """The ceilings that were measured beside a sweep, of which its rates are given as shares."""
        return self.measured[directory].ceilings

    @property
    def directories(self) -> list[Path]:
        """All directories with results that could be read, each once."""
        kinds = self.sweeps, self.comparisons, self.ladders, self.ceilings, self.attention, self.fusion, self.precision
        return sorted(set().union(*kinds))
