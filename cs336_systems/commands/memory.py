"""`cs336 memory`: explains where the memory of recorded steps went, from a memory snapshot of PyTorch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from cs336_systems.commands.flags import unset
from cs336_systems.commands.outcome import OK, UsageError, existing, show
from cs336_systems.config import RunConfig
from cs336_systems.record import read_record

if TYPE_CHECKING:
    from cs336_systems.analysis.memory.profile import MemoryProfile


@dataclass(frozen=True, kw_only=True)
class MemoryArguments:
    """Explain where the memory of recorded steps went: by category, phase, block of the model and line of code.

    FILE is a snapshot that any program wrote with torch.cuda.memory._dump_snapshot, or the profile that this command or
    a sweep has kept of one (memory.json, memory/*.json). Snapshots of this project have notes beside them, which say
    what each block of memory held.
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A snapshot, or a profile."""
    top: int = 10
    """Number of allocations to list."""
    record: Annotated[Path | None, unset("JSON", "the run's own, if FILE is one of benchmark_sweep.py's")] = None
    """Record of the run, whose model explains the sizes."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: write nothing)")] = None
    """Directory for the tables (CSV, Markdown, LaTeX, Typst), the picture and JSON."""

    @property
    def config(self) -> RunConfig | None:
        """The configuration of the run, if known; raise RecordError for a bad record."""
        beside = self.file.parent.parent / "runs" / f"{self.file.stem}.json"
        if self.record is not None:
            return read_record(existing(self.record, "a record of a run, in JSON")).config
        return read_record(beside).config if beside.is_file() else None


def run(arguments: MemoryArguments) -> int:
    """Read, explain, print, and write where asked."""
    if arguments.top < 1:
        raise UsageError(f"--top must be at least 1, got {arguments.top}")
    config = arguments.config
    file = existing(arguments.file, "a memory snapshot of PyTorch, or a memory profile")
    from cs336_systems.report.progress import StatusLine

    with StatusLine() as status:
        status.reading(file)
        profile = _explain(file, config)
        from cs336_systems.report.sections.memory.findings import answer
        from cs336_systems.report.sections.memory.tables import tables_of_one, write_memory

        if arguments.output is not None:
            status("drawing and writing")
            arguments.output.mkdir(parents=True, exist_ok=True)
            write_memory(profile, arguments.output, arguments.top)
    show(tables_of_one(profile, arguments.top), arguments.output, answer(profile))
    return OK


def _explain(file: Path, config: RunConfig | None) -> "MemoryProfile":
    from cs336_systems.analysis.memory.explain import explain_memory
    from cs336_systems.analysis.memory.profile import read_memory_profile

    if file.suffix == ".json":
        return read_memory_profile(file)
    if config is None or config.model_factory is not None:  # the shape of a user's own model is not known
        return explain_memory(file)
    return explain_memory(file, config.model, config.batch_size)
