"""What a sweep keeps of its runs: records, old and new, and explanations of raw profiles; and who
is told of them.

A profile is explained in a process of its own, after the run, and again if the explanation is lost.
The run's record is not changed, so a defect of the analysis can lose an explanation but no
measurement.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from ..analysis.kernels.classes import KernelRules
from ..config import Profiler, RunConfig
from ..files import FileError, error_in_words, in_one_line
from ..measure.environment import host_memory_bytes
from ..measure.inputs import all_inputs
from ..measure.nvml import Gpu
from ..posix_needed import IS_POSIX
from ..record import (
    Failure,
    Identity,
    Input,
    RecordError,
    RunRecord,
    Status,
    load_records,
    read_record,
    time_now,
    write_record,
)
from ..subject import Subject
from ..text import print_aside
from . import store
from .process import NOT_EXPLAINED, begin_worker

if IS_POSIX:
    import resource


class Listener:
    """Receives the events of a sweep. Each method does nothing here; a subclass overrides those
    that it shows.
    """

    def planned(
        self, kept: Sequence[RunRecord], todo: Sequence[RunConfig], problems: Sequence[RecordError]
    ) -> None:
        """Called once at the beginning: the sweep keeps the records `kept`, will run the
        configurations `todo`, and has set the unreadable files `problems` aside.
        """

    def importing(self) -> None:
        """Called while the fork server imports PyTorch, which takes seconds. Nothing is measured
        until this method has returned.
        """

    def started(self, config: RunConfig, gpu: Gpu | None) -> None:
        """Called when a worker has been started for this configuration on this GPU."""

    def finished(self, record: RunRecord) -> None:
        """Called when a run has ended, with its record."""

    def explaining(self, subject: Subject) -> None:
        """Called when a worker has been started that explains the raw profile of this run."""

    def explained(self, subject: Subject, failure: str | None) -> None:
        """Called when the worker that explains a run's profile has ended; `failure` says in one
        line why there is no explanation, and is None if there is one.
        """

    def noted(self, line: str) -> None:
        """Called with a message about a machine of the sweep; it may be text that the machine
        sent.
        """

    def tick(self) -> None:
        """Called when a second has passed."""


@dataclass(slots=True)
class Keeper:
    """Writes the records of runs that have ended, remembers them, and tells the listener."""

    runs: Path
    listener: Listener
    inputs: Sequence[Input] = ()
    """Input files as they were when the sweep began; the result of a run with changed files does
    not count.
    """
    measured: list[RunRecord] = field(default_factory=list)

    def finish(self, record: RunRecord) -> None:
        """Remember the record of a run that has ended, which is in the directory already, and
        notify the listener.
        """
        self.measured.append(record)
        self.listener.finished(record)

    def read(self, config: RunConfig, elapsed_s: float, log_tail: str | None = None) -> RunRecord:
        """The record that the run has left in the directory, or one that says why that does not
        count.
        """
        path = self.runs / f"{config.key}.json"
        try:
            record = read_record(path)
        except RecordError as error:
            message = f"the record was not readable; kept as {store.quarantine(path).name}: {error}"
            return self.refuse(config, message, elapsed_s, log_tail)
        changed = store.changed_inputs(record, self.inputs)
        if not changed or not record.status.is_result:
            return record
        why = f"changed while the sweep ran: {'; '.join(changed)}; start over with --fresh"
        return self.refuse(config, why, elapsed_s, log_tail)

    def refuse(
        self, config: RunConfig, message: str, elapsed_s: float, log_tail: str | None = None
    ) -> RunRecord:
        """Write a record that replaces the run's own one, which is not valid; `message` says
        why.
        """
        return self.fail(
            config, Status.INVALID, Failure(message=message, log_tail=log_tail), elapsed_s
        )

    def fail(
        self, config: RunConfig, status: Status, failure: Failure, elapsed_s: float
    ) -> RunRecord:
        """Write the record of a failed run, which began `elapsed_s` ago."""
        started_at = time_now(ago_s=elapsed_s)
        return self.write(
            RunRecord(config=config, status=status, started_at=started_at, failure=failure)
        )

    def write(self, record: RunRecord) -> RunRecord:
        """Write the record; raise SweepError where that fails."""
        try:
            write_record(record, self.runs)
        except OSError as error:
            raise store.SweepError(error_in_words(error)) from error
        return record


class Resumed(NamedTuple):
    """Contents of a sweep's directory when it begins."""

    keeper: Keeper
    todo: list[RunConfig]
    """Wanted runs without a result, in their order."""
    unexplained: list[RunConfig]
    """Wanted runs with a result whose raw profiles are to be explained."""
    present: Identity | None
    """Conditions that all records must share; None if there are none yet, or if they may differ."""


def resume(
    configs: Sequence[RunConfig],
    runs: Path,
    listener: Listener,
    *,
    fresh: bool,
    allow_mixed: bool,
    present: Identity | None = None,
) -> Resumed:
    """Clean up `runs`, whose lock this process holds, and find what is left to do; `fresh` sets all
    records aside.

    Raises SweepError for records that were not made under the `present` conditions (those of the
    first record if they are not known), unless these may be mixed.
    """
    if fresh:
        store.set_aside(runs)
    records, problems = load_records(runs)
    store.set_aside_unreadable(problems)
    wanted = {config.key for config in configs}
    kept = [record for record in records if record.key not in wanted or record.status.is_result]
    done = {record.key for record in kept}
    todo = [config for config in configs if config.key not in done]
    waiting = {record.key for record in kept if can_be_explained(record, runs)}
    unexplained = [config for config in configs if config.key in waiting]
    inputs: tuple[Input, ...] = ()
    if not allow_mixed:
        inputs = all_inputs(configs)
        present = present or next(
            (record.environment.identity for record in kept if record.environment), None
        )
        if present is not None:
            store.refuse_to_mix(kept, present, inputs, runs.parent)
    listener.planned(kept, todo, problems)
    return Resumed(
        Keeper(runs, listener, inputs), todo, unexplained, None if allow_mixed else present
    )


def lacks_explanation(record: RunRecord, runs: Path) -> bool:
    """Whether the run was profiled, could be explained, and has no readable explanation."""
    subject = record.subject
    if subject.profiler is Profiler.NONE or has_explanation(subject, runs):
        return False
    return record.status is Status.OK or raw_profile(record, runs) is not None


def can_be_explained(record: RunRecord, runs: Path) -> bool:
    """Whether the run lacks an explanation and has the raw profile to make one from."""
    return raw_profile(record, runs) is not None and not has_explanation(record.subject, runs)


def raw_profile(record: RunRecord, runs: Path) -> Path | None:
    """The raw profile from which the run can be explained; None if there is none.

    A failed run can be explained only if it left a memory snapshot, which shows how it ran out of
    memory.
    """
    profiler = record.subject.profiler
    if profiler is Profiler.NONE:
        return None
    if record.status is not Status.OK and profiler is not Profiler.MEMORY:
        return None
    path = store.raw_profile_path(record.subject, runs)
    return path if path.is_file() else None


def has_explanation(subject: Subject, runs: Path) -> bool:
    """Whether this run has an explanation that this or a later version of the program can read."""
    path = store.explanation_path(subject, runs)
    if not path.is_file():
        return False
    from ..analysis.kernels.step_profile import decode_profile
    from ..analysis.memory.profile import read_memory_profile

    try:
        if subject.profiler is Profiler.MEMORY:
            read_memory_profile(path)
        else:
            decode_profile(path.read_bytes())
    except (OSError, ValueError) as error:
        return isinstance(error, FileError) and error.is_newer
    return True


def explain_run(subject: Subject, runs: Path, rules: KernelRules | None = None) -> None:
    """Read the raw profile of the run and write its explanation; with `rules` for names of kernels.

    Raises what the analysis raises.
    """
    raw = store.raw_profile_path(subject, runs)
    target = store.explanation_path(subject, runs)
    target.parent.mkdir(parents=True, exist_ok=True)
    if subject.profiler is Profiler.MEMORY:
        from ..analysis.memory.explain import explain_memory
        from ..analysis.memory.profile import write_memory_profile

        write_memory_profile(explain_memory(raw), target)
    else:
        from ..analysis.kernels.explain import explain
        from ..analysis.kernels.step_profile import write_profile

        config = subject if isinstance(subject, RunConfig) else None
        write_profile(explain(raw, config, rules=rules), target)


def explain_in_worker(
    subject: Subject, runs: Path, log: Connection, rules: KernelRules | None = None
) -> None:
    """Entry of a forked worker that explains one run. If it fails, the last line of its output
    says why.
    """
    begin_worker(log)
    _limit_memory()
    try:
        explain_run(subject, runs, rules)
    except Exception as error:
        print(file=sys.stderr)
        print_aside(in_one_line(error))
        os._exit(NOT_EXPLAINED)


def _limit_memory() -> None:
    """Limit this process to the memory of the machine, and have it killed first when memory runs
    out.
    """
    # raised outside Linux, and if the limit is lower already
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (host_memory_bytes(), resource.RLIM_INFINITY))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
