"""A results directory, as its page shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...config import Profiler
from ..compared import Compared
from ..results import KERNELS, MEMORY, Results, StudyResults
from ..sections.ladder import RungResult

SUBJECTS = {
    "steps": "Time and memory of a training step",
    "ladders": "From the slow step to the fast one",
    "kernels": KERNELS,
    "memory": MEMORY,
    "attention": "Attention alone",
    "fusion": "Fused operations",
    "ceilings": "What the machine reaches",
    "precision": "Precision",
    "comparisons": "A against B",
}
"""All subjects in the order of the list of all pages; sweeps are by what was profiled in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """The results in one directory, as far as it has any."""

    path: Path
    results: Results | None = None
    """The runs of a sweep, of a comparison that `cs336 compare` measured, or of all rungs; or one
    explained file without the record of a run.
    """
    compared: Compared | None = None
    rungs: Sequence[RungResult] = ()
    """The rungs of a ladder, from the slow step to the fast one."""
    study: StudyResults | None = None

    @property
    def subject(self) -> str:
        """The subject (a key of SUBJECTS) under which the directory is listed; a sweep that also
        has profiles is listed under what they are of, as a single file is.
        """
        if self.study is not None:
            return self.study.subject
        if self.rungs:
            return "ladders"
        if self.compared is not None:
            return "comparisons"
        results = self.results or Results(records=())
        profilers = {record.subject.profiler for record in results.records}
        if Profiler.MEMORY in profilers or results.memory:
            return "memory"
        return "kernels" if profilers - {Profiler.NONE} or results.kernels else "steps"
