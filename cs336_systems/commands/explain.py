"""`cs336 kernels` and `cs336 memory`: where the time, or the memory, of steps went, from the
file of any program.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

import msgspec
import tyro

from ..ranges import PhaseNames
from ..record import load_records, read_record
from .flags import Flat, Switch, unset
from .outcome import OK, UsageError, existing, show

if TYPE_CHECKING:
    from ..analysis.kernels.step_profile import StepProfile

Explanation: TypeAlias = tuple[Callable[..., Any], ...]
"""What is left to do with an explained file: write it into a directory and make its tables, both
with a number of rows to list; the lines of its answer; and its JSON.
"""


@dataclass(frozen=True, kw_only=True)
class FileArguments:
    """What both commands ask for."""

    NEEDED: ClassVar[str]
    """What the file must be, in words."""
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """What a profiler or PyTorch wrote, as said above."""
    top: int = 10
    """Most kernels, or allocations, that a table lists."""
    output: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: write nothing)")
    ] = None
    """Directory for the tables (CSV, Markdown, LaTeX, Typst), pictures and JSON."""
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
    kernels/*.json). A kernel belongs to the phase in which it was launched, by whatever thread. A
    trace of a CPU has operators in the place of kernels. Of a run on several ranks, traces beside
    FILE are read too (rank1_FILE, ...).
    """

    NEEDED = "a report of nsys, its SQLite export, or a trace of torch.profiler"
    record: Annotated[
        Path | None, unset("JSON", "the run's own, if FILE is one of benchmark_sweep.py's")
    ] = None
    """Record of the profiled run; it gives attention its FLOPs, and says which advice the run
    follows already.
    """
    ranges: Flat[PhaseNames] = field(default_factory=PhaseNames)

    def explained(self) -> Explanation:
        """The explanation; raise UsageError for names of ranges that cannot be."""
        path = record_path(self)
        record = None if path is None else read_record(path)
        from ..analysis.kernels.explain import explain
        from ..analysis.kernels.phases import RangeNameError
        from ..analysis.kernels.step_profile import read_profile
        from ..report.sections.kernels.entry import Explained, plain_run
        from ..report.sections.kernels.files import answer_of, tables_of_one, write_kernels

        try:
            profile = read_profile(self.file) or explain(
                self.file, record.config if record else None, self.ranges
            )
        except RangeNameError as error:
            raise UsageError(f"{self.file}: {error}") from error
        plain = plain_run(record, load_records(path.parent)[0]) if record and path else None
        entry = Explained(profile=profile, profiled=record, plain=plain)
        ways = (write_kernels, tables_of_one, answer_of)
        return *(functools.partial(each, entry) for each in ways), functools.partial(
            _with_statistics, profile
        )


@dataclass(frozen=True, kw_only=True)
class MemoryArguments(FileArguments):
    """Explain where the memory of recorded steps went: by category, phase, block of the model and
    line of code.

    FILE is a snapshot that any program wrote with torch.cuda.memory._dump_snapshot, or the profile
    that this command or a sweep has kept of one (memory.json, memory/*.json). Snapshots of this
    project have notes beside them, which say what each block of memory held.
    """

    NEEDED = "a memory snapshot of PyTorch, or a memory profile"

    def explained(self) -> Explanation:
        """The explanation."""
        from ..analysis.memory.explain import explain_memory
        from ..analysis.memory.profile import encode_memory_profile, read_memory_profile
        from ..report.sections.memory.findings import answer
        from ..report.sections.memory.tables import tables_of_one, write_memory

        profile = (read_memory_profile if self.file.suffix == ".json" else explain_memory)(
            self.file
        )
        ways = (write_memory, tables_of_one, answer, encode_memory_profile)
        return tuple(functools.partial(each, profile) for each in ways)


def run(arguments: FileArguments) -> int:
    """Read, explain, print, and write where asked."""
    if arguments.top < 1:
        raise UsageError(f"--top must be at least 1, got {arguments.top}")
    existing(arguments.file, arguments.NEEDED)
    from ..report.progress import StatusLine

    with StatusLine() as status:
        status.reading(arguments.file)
        write, tables, answer, encode = arguments.explained()
        if arguments.output is not None:
            status("drawing and writing")
            write(arguments.output, arguments.top)
    show(
        tables(arguments.top), arguments.output, answer(), json=encode() if arguments.json else None
    )
    return OK


def _with_statistics(profile: "StepProfile") -> bytes:
    """The profile in JSON, and before it the statistics of the wall times of step and phases
    over the steps.
    """
    from ..analysis.statistics import summary
    from ..files import encode_json

    walls_s = {
        "step": profile.step_s,
        **{str(phase.phase): phase.wall_s for phase in profile.phases},
    }
    found = {name: summary(times_s) for name, times_s in walls_s.items() if times_s}
    return encode_json({"statistics": found, **msgspec.to_builtins(profile)})


def record_path(arguments: KernelsArguments) -> Path | None:
    """The record of the run that was profiled: the one given, or the one that its sweep keeps."""
    if arguments.record is not None:
        return existing(arguments.record, "a record of a run, in JSON")
    from ..analysis.kernels.communication import without_rank

    stem = (
        without_rank(arguments.file.name)
        .removesuffix(".gz")
        .removesuffix(".json")
        .removesuffix(".nsys-rep")
    )
    beside = arguments.file.parent.parent / "runs" / f"{stem}.json"
    return beside if beside.is_file() else None
