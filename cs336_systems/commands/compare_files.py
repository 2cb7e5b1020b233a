"""Two files of any programs side by side, for `cs336 compare`: traces, or memory snapshots."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..record import RUNS, published_runs
from .outcome import UsageError, checked

if TYPE_CHECKING:
    from ..analysis.kernels.step_profile import StepProfile
    from ..analysis.memory.profile import MemoryProfile
    from ..report.difference import Difference

_HEAD_BYTES = 2**16
_PICKLE = b"\x80"
"""First byte of a pickle, as snapshots of PyTorch are."""


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
    return _begins_with(path, b'"status"', b'"started_at"')


def _begins_with(path: Path, *words: bytes) -> bool:
    """Whether all of these words stand in the first bytes of a regular file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return all(word in head for word in words)


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
            profiles.append(_profile_of(path))
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


def _profile_of(path: Path) -> "StepProfile | MemoryProfile":
    """The explained file; a snapshot is known by its content."""
    from ..analysis.kernels.explain import explain
    from ..analysis.kernels.step_profile import read_profile
    from ..analysis.memory.explain import explain_memory
    from ..analysis.memory.profile import read_memory_profile

    if path.is_file():
        with path.open("rb") as file:
            if file.read(1) == _PICKLE:
                return explain_memory(path)
    if _begins_with(path, b'"device"', b'"held_bytes"'):
        return read_memory_profile(path)
    return read_profile(path) or explain(path)


def write_difference(difference: "Difference", directory: Path, formats: Sequence[str]) -> None:
    """Write difference.json, and each table as CSV, Markdown and in the other formats."""
    from ..report.formats import texts_of, write_files

    files: dict[str, str | bytes] = {"difference.json": difference.encode()}
    for section in difference.sections:
        files |= texts_of(section)
    write_files(files, directory, formats)
