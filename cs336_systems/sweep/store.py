"""The directory of a sweep's results: its paths, checks before writing, and refusal to mix unlike
records.

Also locks: one sweep at a time on a directory and on a GPU. The kernel releases a lock when its
holder ends, so no lock is ever stale.
"""

import contextlib
import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..config import Profiler, RunConfig
from ..files import encode_json, remedy, write_atomically
from ..measure.nvml import Gpu
from ..posix_needed import IS_POSIX, LACKING
from ..record import Identity, Input, RecordError, RunRecord, published_runs
from ..subject import Subject
from ..text import LONGEST_PART, command_line, shorten, shortened

if IS_POSIX:
    import fcntl

_PROBE_BYTES = 2**16
"""Size of a large record, so that the probe also finds a full disk."""


PROFILE_DIRECTORIES = {
    Profiler.NONE: "e2e_benchmark",
    Profiler.NSYS: "nsys_profiles",
    Profiler.KINETO: "kineto_profiles",
    Profiler.MEMORY: "memory_profiles",
}
"""Directories for results, below the output directory."""
ENVIRONMENT_FILE = "environment.json"
_RAW_PROFILES = {
    Profiler.NSYS: ("reports", ".nsys-rep"),
    Profiler.KINETO: ("traces", ".json.gz"),
    Profiler.MEMORY: ("snapshots", ".pickle"),
}
_KERNELS, _MEMORY = "kernels", "memory"
"""Directories for explained profiles, beside the directory of records."""
VIEWERS = {
    Profiler.NSYS: "nsys-ui",
    Profiler.KINETO: "https://ui.perfetto.dev",
    Profiler.MEMORY: "https://pytorch.org/memory_viz",
}
"""Viewers of each profiler's files."""


class SweepError(RuntimeError):
    """The sweep cannot start or continue; the message says why and what to do. Finished records
    are kept.
    """


class LockedError(RuntimeError):
    """Another process holds the lock."""


def make_writable(runs: Path) -> Path:
    """Create the directory and write a probe file, so that a sweep fails before its first run,
    not after it.
    """
    probe = runs / f".probe.{os.getpid()}.tmp"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        write_atomically(probe, bytes(_PROBE_BYTES))
        probe.unlink()
    except OSError as error:
        helps = " or ".join(filter(None, [remedy(error), "choose another --output"]))
        raise SweepError(f"{runs}: cannot write there ({error.strerror}); {helps}") from error
    return runs


def raw_profile_path(subject: Subject, runs: Path) -> Path:
    """Path of this run's raw profile; `runs` is the directory of records."""
    folder, ending = _RAW_PROFILES[subject.profiler]
    return runs.with_name(folder) / f"{subject.key}{ending}"


def explanation_path(subject: Subject, runs: Path) -> Path:
    """Path of the explanation of this run's raw profile: a `MemoryProfile` of a snapshot, a
    `StepProfile` of others.
    """
    folder = _MEMORY if subject.profiler is Profiler.MEMORY else _KERNELS
    return runs.with_name(folder) / f"{subject.key}.json"


def raw_profile_paths(config: RunConfig, runs: Path) -> tuple[Path, ...]:
    """Paths of all files that this run's profiler may leave: of every rank, and notes beside a
    memory snapshot.
    """
    if config.profiler is Profiler.NONE:
        return ()
    from ..analysis.memory.notes import notes_path

    raw = raw_profile_path(config, runs)
    ranks = 1 if config.profiler is Profiler.NSYS else config.ranks
    paths = [path_of_rank(raw, rank) for rank in range(ranks)]
    notes = map(notes_path, paths) if config.profiler is Profiler.MEMORY else ()
    return (*paths, *notes)


def path_of_rank(raw: Path, rank: int) -> Path:
    """Path of one rank's raw profile: for the first rank the run's own path, for the others
    files beside it.
    """
    return raw if not rank else raw.with_name(f"rank{rank}_{raw.name}")


def fresh_profile_path(config: RunConfig, runs: Path) -> Path | None:
    """Path for the raw profile of this run; None without a profiler.

    Removes the raw profile and the explanation of an earlier run of the same configuration.
    """
    if config.profiler is Profiler.NONE:
        return None
    raw = raw_profile_path(config, runs)
    raw.parent.mkdir(parents=True, exist_ok=True)
    for path in (raw, explanation_path(config, runs)):
        path.unlink(missing_ok=True)
    return raw


def set_aside_unreadable(problems: Sequence[RecordError]) -> None:
    """Quarantine records that are damaged; raise SweepError for one that a later version of this
    program wrote.
    """
    if newer := [problem for problem in problems if problem.is_newer]:
        raise SweepError(f"{newer[0]}, or choose another --name")
    for problem in problems:
        if problem.path.suffix != ".json":  # a line of published records
            raise SweepError(f"{problem}; mend or remove that line, or choose another --name")
        quarantine(problem.path)


def set_aside(runs: Path) -> None:
    """Move all records to a new directory beside `runs`, named after the time, and leave `runs`
    empty. A file of published records is renamed likewise.
    """
    kept = runs.with_name(f"{runs.name}-before-{time_stamp()}")
    if (joined := published_runs(runs)).is_file():
        joined.rename(published_runs(kept))
    if any(runs.iterdir()):
        runs.rename(kept)
        runs.mkdir()


def set_aside_run(config: RunConfig, runs: Path) -> Path | None:
    """Append the time to the names of an earlier run's record, profile and explanation, which no
    report reads then.

    Returns the record's new path, or None if there is no earlier run.
    """
    stamp = time_stamp()
    patterns = (f"*/{config.key}.*", f"*/rank*_{config.key}.*")
    for pattern in patterns:
        for path in [*runs.parent.glob(pattern)]:
            if not path.name.endswith("Z"):
                path.rename(path.with_name(f"{path.name}.{stamp}"))
    kept = runs / f"{config.key}.json.{stamp}"
    return kept if kept.exists() else None


def time_stamp() -> str:
    """The current time to the microsecond, for a file name."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")


def quarantine(path: Path) -> Path:
    """Rename an unreadable record, so that it is kept but no longer read."""
    number = 0
    while (target := path.with_name(f"{path.name}.invalid{number or ''}")).exists():
        number += 1
    return path.rename(target)


def refuse_to_mix(
    records: Sequence[RunRecord], present: Identity, inputs: Sequence[Input], directory: Path
) -> None:
    """Raise SweepError, which names the differences, unless all records were made under the
    `present` conditions.

    `inputs` are the current ones of the runs that are wanted; inputs of other runs may have
    changed.
    """
    for record in records:
        changed = _changed_conditions(record, present)
        if inputs:  # cells of studies have none
            changed += changed_inputs(record, inputs)
        if changed:
            raise SweepError(
                f"{directory} holds records made under other conditions ({'; '.join(changed)}). "
                "Choose another --name, start over with --fresh (the old records are kept beside), "
                "or mix them with --allow-mixed"
            )


def _changed_conditions(record: RunRecord, present: Identity) -> list[str]:
    """A sentence for each condition of the record that differs from the present one."""
    if record.environment is None:
        return []
    changed = differences(record.environment.identity, present)
    return [f"{name} was {_shown(past)}, is {now}" for name, past, now in changed]


def differences(one: Identity, other: Identity) -> list[tuple[str, Any, Any]]:
    """Name and both values of each condition in which the two differ."""
    values, others = msgspec.to_builtins(one), msgspec.to_builtins(other)
    return [(name, value, others[name]) for name, value in values.items() if value != others[name]]


def _shown(text: str | None) -> str:
    """A text from a record as messages quote it; a long one loses its middle."""
    return shortened(str(text), LONGEST_PART)


def changed_inputs(record: RunRecord, inputs: Sequence[Input]) -> list[str]:
    """A sentence for each input of the record's run whose state differs from that in `inputs`."""
    now = {present.name: present.state for present in inputs}
    changed = []
    for past in record.inputs:
        if past.name in now and past.state != now[past.name]:
            changed.append(
                f"{_shown(past.name)} was {_shown(past.state or 'unreadable')}, is "
                f"{now[past.name] or 'unreadable'}"
            )
    return changed


def write_environment(records: Sequence[RunRecord], directory: Path) -> None:
    """Write environment.json: the environment of the latest record that has one, and the command
    line.
    """
    known = [record for record in records if record.environment is not None]
    if known:
        latest = max(known, key=lambda record: record.started_at)
        argv = [Path(sys.argv[0]).name, *sys.argv[1:]]
        described = {**msgspec.to_builtins(latest.environment), "argv": argv}
        write_atomically(directory / ENVIRONMENT_FILE, encode_json(described))


def command_in(directory: Path) -> str:
    """The command that measured last in this directory; empty where its environment.json does
    not have it.
    """
    try:
        data = (directory / ENVIRONMENT_FILE).read_bytes()
        return command_line(msgspec.json.decode(data)["argv"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory of results, from its first record to its last table.

    Raises SweepError if nothing can be written there, and LockedError, which names the holder, if
    another process writes there. Half-written files of processes that have ended are removed.
    """
    make_writable(directory)
    with exclusive(directory / ".lock", f"the directory {directory}"):
        for leftover in directory.rglob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` during the context; raise LockedError, which names the holder,
    if it is taken, and SweepError where there are no locks.
    """
    if not IS_POSIX:
        raise SweepError(LACKING)
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (
                os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another process"
            )
            raise LockedError(
                f"{what} is in use by {shorten(holder, LONGEST_PART)}; wait for it or end it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor,
            f"process {os.getpid()} on {platform.node()}: {command_line(sys.argv)}\n".encode(),
            0,
        )
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Open the lock file, which every user may lock, because users share GPUs and may share
    directories.

    O_CREAT is only used if the file is missing: in a shared directory such as /tmp, Linux refuses
    it for another user's file.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor


@contextlib.contextmanager
def exclusive_gpus(gpus: Iterable[Gpu | None]) -> Iterator[None]:
    """Hold the lock of each GPU during the context; None stands for the CPU, which has no lock."""
    with contextlib.ExitStack() as stack:
        for gpu in gpus:
            if gpu is not None:
                name = f"{gpu.name} ({gpu.uuid})"
                stack.enter_context(exclusive(gpu_lock_path(gpu.uuid), name))
        yield


def gpu_lock_path(uuid: str) -> Path:
    """Lock file of a GPU, the same for all users of this machine. Older drivers put slashes into
    UUIDs of slices.
    """
    return Path(tempfile.gettempdir()) / f"cs336-systems-{uuid.replace('/', '-')}.lock"
