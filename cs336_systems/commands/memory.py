"""`cs336 memory`: explains where the memory of recorded steps went, from a memory snapshot of PyTorch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from cs336_systems.commands.flags import Switch
from cs336_systems.commands.outcome import OK, UsageError, existing, show

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
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: write nothing)")] = None
    """Directory for the tables (CSV, Markdown, LaTeX, Typst), the picture and JSON."""
    json: Switch = False
    """Print JSON instead of tables."""


def run(arguments: MemoryArguments) -> int:
    """Read, explain, print, and write where asked."""
    if arguments.top < 1:
        raise UsageError(f"--top must be at least 1, got {arguments.top}")
    file = existing(arguments.file, "a memory snapshot of PyTorch, or a memory profile")
    from cs336_systems.report.progress import StatusLine

    with StatusLine() as status:
        status.reading(file)
        profile = _explain(file)
        from cs336_systems.analysis.memory.profile import encode_memory_profile
        from cs336_systems.report.sections.memory.findings import answer
        from cs336_systems.report.sections.memory.tables import tables_of_one, write_memory

        if arguments.output is not None:
            status("drawing and writing")
            arguments.output.mkdir(parents=True, exist_ok=True)
            write_memory(profile, arguments.output, arguments.top)
    encoded = encode_memory_profile(profile) if arguments.json else None
    show(tables_of_one(profile, arguments.top), arguments.output, answer(profile), json=encoded)
    return OK


def _explain(file: Path) -> "MemoryProfile":
    from cs336_systems.analysis.memory.explain import explain_memory
    from cs336_systems.analysis.memory.profile import read_memory_profile

    return read_memory_profile(file) if file.suffix == ".json" else explain_memory(file)
