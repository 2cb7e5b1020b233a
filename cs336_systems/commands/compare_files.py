"""Two files of any programs side by side, for `cs336 compare`: traces, or memory snapshots."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..record import RUNS, published_runs
from .explain import arguments_for
from .outcome import UsageError, checked

if TYPE_CHECKING:
    from ..report.difference import Difference

_HEAD_BYTES = 2**16


def is_sweep(path: Path) -> bool:
    """Whether an existing path holds records of runs of this program, so that it is compared as a
    sweep; otherwise it is a trace or snapshot of any program, or a directory of such.
    """
    if path.is_file():
        return _is_record(path)
    runs = path / RUNS
    if runs.exists() or published_runs(runs).exists():
        return True
    files = list(path.iterdir())
    # an empty folder holds no traces, and the comparison of sweeps says what it lacks
    return not files or any(file.suffix == ".json" and _is_record(file) for file in files)


def _is_record(path: Path) -> bool:
    """Whether the file is the record of a run: two of its keys stand among the first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return b'"status"' in head and b'"started_at"' in head


def difference_of(paths: Sequence[Path], top: int) -> "Difference":
    """Read and explain both files, and compare them; raise UsageError if they cannot be."""
    from ..analysis.kernels.step_profile import StepProfile
    from ..report.progress import StatusLine
    from ..report.sections.kernels.compared import compared_traces
    from ..report.sections.memory.compared import compared_snapshots

    with StatusLine() as status:
        profiles = []
        for path in paths:
            status.reading(path)
            profiles.append(arguments_for(path).explained().profile)
    a, b = profiles
    if isinstance(a, StepProfile) and isinstance(b, StepProfile):
        return checked(compared_traces, a, b, top)
    if not isinstance(a, StepProfile) and not isinstance(b, StepProfile):
        return compared_snapshots(a, b, top)
    trace, snapshot = ("A", "B") if isinstance(a, StepProfile) else ("B", "A")
    raise UsageError(
        f"{trace} is a trace and {snapshot} a memory snapshot, which have nothing in common: give "
        "two traces, or two snapshots"
    )


def write_difference(difference: "Difference", directory: Path, formats: Sequence[str]) -> None:
    """Write difference.json, and each table as CSV, Markdown and in the other formats."""
    from ..report.formats import texts_of, write_files

    files: dict[str, str | bytes] = {"difference.json": difference.encode()}
    for section in difference.sections:
        files |= texts_of(section)
    write_files(files, directory, formats)
