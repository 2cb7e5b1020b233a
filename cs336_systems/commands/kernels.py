"""`cs336 kernels`: where the time of profiled steps went, from a file of nsys or torch.profiler."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from cs336_systems.commands import flags
from cs336_systems.commands.outcome import OK, UsageError, existing, show
from cs336_systems.ranges import PhaseNames
from cs336_systems.record import load_records, read_record

if TYPE_CHECKING:
    from cs336_systems.analysis.kernels.step_profile import StepProfile


@dataclass(frozen=True, kw_only=True)
class KernelsArguments:
    """Say where the time of profiled steps went: by phase, kind of work, module and kernel, and when the GPU was idle.

    FILE is a report of nsys (.nsys-rep; needs nsys), its SQLite export, a trace of torch.profiler (.json, .json.gz), or
    what this command or a sweep has kept of one (profile.json, kernels/*.json).
    A kernel belongs to the phase in which it was launched, by whatever thread. A trace of a CPU has operators in the
    place of kernels. Of a run on several ranks, traces beside FILE are read too (rank1_FILE, ...).
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """What the profiler wrote."""
    top: int = 10
    """Kernels to list, for the step and for each phase."""
    record: Annotated[Path | None, flags.unset("JSON", "the run's own, if FILE is one of benchmark_sweep.py's")] = None
    """Record of the profiled run; it gives attention its FLOPs, and says which advice the run follows already."""
    ranges: flags.Flat[PhaseNames] = field(default_factory=PhaseNames)
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: write nothing)")] = None
    """Directory for the tables (CSV, Markdown, LaTeX, Typst), pictures and JSON."""
    json: flags.Switch = False
    """Print JSON instead of tables."""


def run(arguments: KernelsArguments) -> int:
    """Read, explain, print, and write where asked."""
    if arguments.top < 1:
        raise UsageError(f"--top must be at least 1, got {arguments.top}")
    existing(arguments.file, "a report of nsys, its SQLite export, or a trace of torch.profiler")
    path = _record_path(arguments)
    record = None if path is None else read_record(path)
    from cs336_systems.analysis.kernels.explain import explain
    from cs336_systems.analysis.kernels.phases import RangeNameError
    from cs336_systems.analysis.kernels.step_profile import read_profile
    from cs336_systems.report.progress import StatusLine
    from cs336_systems.report.sections.kernels.files import answer_of, tables_of_one, write_kernels
    from cs336_systems.report.sections.kernels.tables import explained

    with StatusLine() as status:
        status.reading(arguments.file)
        profile = read_profile(arguments.file)
        if profile is None:
            try:
                profile = explain(arguments.file, record.config if record else None, arguments.ranges)
            except RangeNameError as error:
                raise UsageError(f"{arguments.file}: {error}") from error
        entry = explained(profile, record, load_records(path.parent)[0] if path else ())
        if arguments.output is not None:
            status("drawing and writing")
            arguments.output.mkdir(parents=True, exist_ok=True)
            write_kernels(entry, arguments.output, arguments.top)

    encoded = _with_statistics(profile) if arguments.json else None
    show(tables_of_one(entry, arguments.top), arguments.output, answer_of(entry), json=encoded)
    return OK


def _with_statistics(profile: "StepProfile") -> bytes:
    """The profile in JSON, and before it the statistics of the wall times of step and phases over the steps."""
    from cs336_systems.analysis.statistics import summary
    from cs336_systems.files import encode_json

    walls_s = {"step": profile.step_s, **{str(phase.phase): phase.wall_s for phase in profile.phases}}
    found = {name: summary(times_s) for name, times_s in walls_s.items() if times_s}
    return encode_json({"statistics": found, **msgspec.to_builtins(profile)})


def _record_path(arguments: KernelsArguments) -> Path | None:
    """The record of the run that was profiled: the one given, or the one that its sweep keeps."""
    if arguments.record is not None:
        return existing(arguments.record, "a record of a run, in JSON")
    from cs336_systems.analysis.kernels.communication import without_rank

    stem = without_rank(arguments.file.name).removesuffix(".gz").removesuffix(".json").removesuffix(".nsys-rep")
    beside = arguments.file.parent.parent / "runs" / f"{stem}.json"
    return beside if beside.is_file() else None
