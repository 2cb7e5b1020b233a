"""Two files of any programs side by side, for `cs336 compare`: traces, or memory snapshots."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..record import RUNS, published_runs
from .outcome import OK, UsageError, checked, show

if TYPE_CHECKING:
    from ..analysis.kernels.step_profile import StepProfile
    from ..analysis.memory.profile import MemoryProfile
    from ..report.difference import Difference

_HEAD_BYTES = 2**16
_OF_A_RECORD = (b'"status"', b'"started_at"')
_OF_A_MEMORY_PROFILE = (b'"device"', b'"held_bytes"', b'"peak"')
_PICKLE = b"\x80"
"""First byte of a pickle, as snapshots of PyTorch are."""


def is_sweep(path: Path) -> bool:
    """Whether an existing path holds records of runs; otherwise it is a file of any program, or a
    directory of such.
    """
    if path.is_file():
        return _begins_with(path, _OF_A_RECORD)
    runs = path / RUNS
    if runs.exists() or published_runs(runs).exists():
        return True
    files = list(path.iterdir())
    # a folder of nothing is no run of several files
    return not files or any(
        _begins_with(file, _OF_A_RECORD) for file in files if file.suffix == ".json"
    )


def _begins_with(path: Path, words: Collection[bytes]) -> bool:
    """Whether all of these words stand in the first bytes of the file."""
    head = _head(path)
    return all(word in head for word in words)


def _head(path: Path) -> bytes:
    """The first bytes of a regular file; none of anything else."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def compare_files(
    paths: Sequence[Path], top: int, output: Path | None, formats: Collection[str], *, json: bool
) -> int:
    """Read and explain both files, then print and write their difference; return the exit
    status.
    """
    from ..report.progress import StatusLine

    with StatusLine() as status:
        profiles = []
        for path in paths:
            status.reading(path)
            profiles.append(_profile_of(path))
    difference = _difference(profiles, top)
    if output is not None:
        _write(difference, output, formats)
    tables = [table for section in difference.sections for table in section.tables]
    lines = [finding.text for finding in difference.findings]
    show(tables, output, lines, json=difference.encode() if json else None)
    return OK


def _profile_of(path: Path) -> "StepProfile | MemoryProfile":
    """The explained file; a snapshot is known by its content."""
    from ..analysis.memory.explain import explain_memory
    from ..analysis.memory.profile import read_memory_profile

    if _head(path).startswith(_PICKLE):
        return explain_memory(path)
    if _begins_with(path, _OF_A_MEMORY_PROFILE):
        return read_memory_profile(path)
    from ..analysis.kernels.explain import explain
    from ..analysis.kernels.step_profile import read_profile

    return read_profile(path) or explain(path)


def _difference(profiles: "Sequence[StepProfile | MemoryProfile]", top: int) -> "Difference":
    """The difference of both files; raise UsageError if one is a snapshot and the other is not."""
    from ..analysis.kernels.step_profile import StepProfile
    from ..report.sections.kernels.compared import compared_traces
    from ..report.sections.memory.compared import compared_snapshots

    a, b = profiles
    if isinstance(a, StepProfile) and isinstance(b, StepProfile):
        return checked(compared_traces, a, b, top)
    if not isinstance(a, StepProfile) and not isinstance(b, StepProfile):
        return compared_snapshots(a, b, top)
    names = ["a trace" if isinstance(side, StepProfile) else "a snapshot" for side in profiles]
    raise UsageError(
        f"A is {names[0]} and B is {names[1]}, which have nothing in common: give two traces, or "
        "two memory snapshots"
    )


def _write(difference: "Difference", directory: Path, formats: Collection[str]) -> None:
    """Write the difference as difference.json, and each table as CSV, Markdown and in the other
    formats.
    """
    from ..report.formats import texts_of, to_markdown, write_files
    from ..report.section import findings_table

    files: dict[str, str | bytes] = {
        "difference.json": difference.encode(),
        "findings.md": to_markdown(findings_table(difference.findings)),
    }
    for section in difference.sections:
        files |= texts_of(section)
    write_files(files, directory, formats)
