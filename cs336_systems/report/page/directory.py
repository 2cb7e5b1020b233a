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
    "files": "Files of other programs",
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
    def title(self) -> str:
        """What the page is about: the subject and the directory, of a file its question and
        name.
        """
        if self.results is not None and self.results.is_of_file:
            (question,) = self.results.sections
            sources = [entry.profile.source for entry in self.results.kernels]
            sources += [entry.profile.source for entry in self.results.memory]
            return f"{question}: {sources[0]}"
        return f"{SUBJECTS[self.subject]}: {self.path.resolve().name}"

    @property
    def subject(self) -> str:
        """The key of SUBJECTS that it belongs to; a sweep that also has profiles belongs to
        these, and a file without records to the files.
        """
        if self.study is not None:
            return self.study.subject
        if self.rungs:
            return "ladders"
        if self.compared is not None:
            return "comparisons"
        if self.results is not None and self.results.is_of_file:
            return "files"
        records = () if self.results is None else self.results.records
        profilers = {record.subject.profiler for record in records}
        if Profiler.MEMORY in profilers:
            return "memory"
        return "kernels" if profilers - {Profiler.NONE} else "steps"
