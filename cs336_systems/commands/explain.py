"""`cs336 kernels` and `cs336 memory`: where the time, or the memory, of steps went, from the
file of any program.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from ..analysis.columns import read_head
from ..ranges import PhaseNames
from ..record import RUNS, RunRecord, load_records, read_record
from .file_page import write_page_of_file
from .flags import Flat, OutputArguments, RulesFile, Switch, check_top, unset
from .outcome import OK, UsageError, checked, existing, print_page, show, with_statistics

if TYPE_CHECKING:
    from ..analysis.kernels.step_profile import StepProfile
    from ..analysis.memory.profile import MemoryProfile
    from ..report.results import Results
    from ..report.section import Table


PICKLE = b"\x80"
"""The first byte of a pickle, and so of a snapshot."""
HEAD_BYTES = 1024
"""Bytes that show whether a file is of memory; profiles of memory say there what was held."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What can be done with an explained file."""

    profile: "StepProfile | MemoryProfile"
    write: Callable[[Path, int, Collection[str]], object]
    """Write it into a directory: tables of at most so many rows, also in these formats."""
    tables: Callable[[int], Sequence["Table"]]
    """Its tables, of at most so many rows."""
    answer: Callable[[], Sequence[str]]
    """The lines of its answer."""
    encode: Callable[[], bytes]
    """Its JSON."""
    keep: Callable[[Path], object]
    """Write the profile itself into a directory."""
    results: Callable[[], "Results"]
    """The results that its page shows, those of the profile alone."""


@dataclass(frozen=True, kw_only=True)
class FileArguments(OutputArguments):
    """What both commands ask for."""

    NEEDED: ClassVar[str]
    """What the file must be, in words."""
    TAKES_DIRECTORY: ClassVar[bool] = False
    """Whether a directory of files is taken too."""
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """What a profiler or PyTorch wrote, as said above."""
    top: int = 10
    """Most kernels or allocations in a table."""
    json: Switch = False
    """Print JSON instead of tables."""

    def explained(self) -> Explanation:
        """Read and explain the file."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class KernelsArguments(FileArguments):
    """Say where the time of profiled steps went: by phase, kind of work, module and kernel, and
    when the GPU was idle.

    FILE is a report of nsys (.nsys-rep; needs nsys), its SQLite export, a trace of torch.profiler
    (.json, .json.gz), or what this command or a sweep has kept of one (profile.json,
    kernels/*.json). It may be a directory with the traces of all ranks of one run, whatever their
    names; beside a single FILE, traces named rank1_FILE and so on are read too.

    A kernel belongs to the phase in which it was launched, by whatever thread. A trace of a CPU has
    operators instead of kernels.
    """

    NEEDED = (
        "a report of nsys, its SQLite export, a trace of torch.profiler, or a directory of these"
    )
    TAKES_DIRECTORY = True
    record: Annotated[
        Path | None, unset("JSON", "the run's own, if FILE is one of benchmark_sweep.py's")
    ] = None
    """Record of the profiled run; it gives attention its FLOPs, and says which advice the run
    follows already.
    """
    rules: RulesFile = None
    """TOML file of lines 'PATTERN' = "CLASS": kernels with the pattern (a regular expression) in
    their names are of this class. They decide before all other rules; the first that fits counts.
    """
    ranges: Flat[PhaseNames] = field(default_factory=PhaseNames)

    def explained(self) -> Explanation:
        """The explanation; raise UsageError for names of ranges that cannot be."""
        record, others = self.record_and_others()
        from ..analysis.kernels.classes import read_rules
        from ..analysis.kernels.explain import explain
        from ..analysis.kernels.phase_ranges import RangeNameError
        from ..analysis.kernels.step_profile import read_profile
        from ..report.sections.kernels.entry import Explained, plain_run
        from ..report.sections.kernels.files import (
            answer_of,
            keep_profile,
            tables_of_one,
            write_kernels,
        )

        config = None if record is None else record.config
        rules = None if self.rules is None else read_rules(self.rules)
        try:
            profile = None if self.file.is_dir() else read_profile(self.file)
            if profile is None:
                profile = explain(self.file, config, self.ranges, rules)
            elif rules is not None:
                raise UsageError(
                    f"--rules needs the trace itself, and {self.file} is a profile made from one"
                )
        except RangeNameError as error:
            raise UsageError(f"{self.file}: {error}") from error
        plain = None if record is None else plain_run(record, others)
        entry = Explained(profile=profile, profiled=record, plain=plain)
        return Explanation(
            profile=profile,
            write=partial(write_kernels, entry),
            tables=partial(tables_of_one, entry),
            answer=partial(answer_of, entry),
            encode=partial(_with_statistics, profile),
            keep=partial(keep_profile, profile),
            results=lambda: results_of(kernels=[Explained(profile=profile)]),
        )

    def record_and_others(self) -> tuple[RunRecord | None, list[RunRecord]]:
        """The record of the profiled run, given or kept by its sweep, and all records beside it.

        Raises RecordError if it is damaged.
        """
        if self.record is not None:
            record = read_record(existing(self.record, "a record of a run, in JSON"))
            return record, load_records(self.record.parent)[0]
        from ..analysis.kernels.communication import without_rank

        key = without_rank(self.file.name)
        for ending in (".gz", ".json", ".nsys-rep"):
            key = key.removesuffix(ending)
        records, problems = load_records(self.file.parent.parent / RUNS)
        for problem in problems:
            if problem.path.stem == key:
                raise problem
        return next((record for record in records if record.key == key), None), records


@dataclass(frozen=True, kw_only=True)
class MemoryArguments(FileArguments):
    """Explain where the memory of recorded steps went: by category, phase, block of the model and
    line of code.

    FILE is a snapshot that any program wrote with torch.cuda.memory._dump_snapshot, or the profile
    that this command or a sweep has kept of one (memory.json, memory/*.json). Snapshots of this
    project have notes beside them, which say what each block of memory held.
    """

    NEEDED = "a memory snapshot of PyTorch, or a memory profile"
    device: Annotated[
        int | None, unset("N", "the one of the notes, or that ran out of memory, or is fullest")
    ] = None
    """Which GPU of the snapshot is explained."""

    def explained(self) -> Explanation:
        """The explanation."""
        from ..analysis.memory.explain import explain_memory
        from ..analysis.memory.profile import encode_memory_profile, read_memory_profile
        from ..report.sections.memory.entry import MemoryEntry
        from ..report.sections.memory.findings import answer
        from ..report.sections.memory.tables import keep_memory, tables_of_one, write_memory

        head = read_head(self.file, HEAD_BYTES, self.NEEDED)
        is_profile = self.file.suffix == ".json" or head.lstrip().startswith(b"{")
        if is_profile and self.device is not None:
            raise UsageError(
                f"--device needs the snapshot itself, and {self.file} is a profile of one device"
            )
        if is_profile:
            profile = read_memory_profile(self.file)
        else:
            profile = explain_memory(self.file, self.device)
        return Explanation(
            profile=profile,
            write=partial(write_memory, profile),
            tables=partial(tables_of_one, profile),
            answer=lambda: [finding.text for finding in answer(profile)],
            encode=partial(encode_memory_profile, profile),
            keep=partial(keep_memory, profile),
            results=lambda: results_of(memory=[MemoryEntry(profile=profile)]),
        )


def results_of(**profiles: Any) -> "Results":  # noqa: ANN401 (one kind of entries)
    """The results of a single file."""
    from ..report.results import Results

    return Results(records=(), **profiles)


def arguments_for(path: Path, rules: Path | None = None) -> FileArguments:
    """The command that explains the file at `path`: a pickle and a profile of memory are of
    memory, all else is of kernels. Only kernels have `rules`.
    """
    head = b"" if path.is_dir() else read_head(path, HEAD_BYTES, "a trace or a snapshot")
    if head.startswith(PICKLE) or b'"held_bytes"' in head:
        if rules is not None:
            raise UsageError(f"--rules names kernels, and {path} is of memory")
        return MemoryArguments(file=path)
    return KernelsArguments(file=path, rules=rules)


def run(arguments: FileArguments) -> int:
    """Read, explain, print, and write where asked."""
    checked(check_top, arguments.top)
    if not (arguments.TAKES_DIRECTORY and arguments.file.is_dir()):
        existing(arguments.file, arguments.NEEDED)
    from ..report.progress import StatusLine

    with StatusLine() as status:
        status.reading(arguments.file)
        explanation = arguments.explained()
        if arguments.output is not None:
            status("drawing and writing")
            explanation.write(arguments.output, arguments.top, arguments.formats)
    json = explanation.encode() if arguments.json else None
    show(explanation.tables(arguments.top), arguments.output, explanation.answer(), json=json)
    if json is None:
        results = explanation.results()
        keep = explanation.keep
        print_page(partial(write_page_of_file, arguments.file, results, keep, arguments.output))
    return OK


def _with_statistics(profile: "StepProfile") -> bytes:
    """The profile in JSON, and before it the statistics of the wall times of step and phases
    over the steps.
    """
    walls_s = {"step": profile.step_s}
    for phase in profile.phases:
        walls_s[str(phase.phase)] = phase.wall_s
    return with_statistics(profile, walls_s)
