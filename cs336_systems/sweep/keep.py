"""Records of a sweep: which records of an earlier sweep are kept, and what is written when a run ends."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.files import error_in_words
from cs336_systems.record import Failure, Input, RecordError, RunRecord, Status, load_records, read_record, write_record
from cs336_systems.sweep.explain import can_be_explained
from cs336_systems.sweep.listener import Listener
from cs336_systems.sweep.store import (
    SweepError,
    changed_inputs,
    quarantine,
    remove_temporary_files,
    set_aside,
    set_aside_unreadable,
)


class Resumed(NamedTuple):
    """Contents of a sweep's directory when it begins."""

    kept: list[RunRecord]
    """Records that stay: those of other runs, and results of the wanted runs."""
    todo: list[RunConfig]
    """Wanted runs without a result, in their order."""
    unexplained: list[RunConfig]
    """Wanted runs with a result whose raw profiles are to be explained."""
    problems: list[RecordError]
    """Files that were not readable, and are set aside."""


def resume(configs: Sequence[RunConfig], runs: Path, *, fresh: bool) -> Resumed:
    """Clean up `runs`, whose lock this process holds, and find what is left to do; `fresh` sets all records aside."""
    if fresh:
        set_aside(runs)
    remove_temporary_files(runs)
    records, problems = load_records(runs)
    set_aside_unreadable(problems)
    wanted = {config.key for config in configs}
    kept = [record for record in records if record.key not in wanted or record.status.is_result]
    done = {record.key for record in kept}
    todo = [config for config in configs if config.key not in done]
    unexplained = [record.config for record in kept if record.key in wanted and can_be_explained(record, runs)]
    return Resumed(kept, todo, unexplained, problems)


@dataclass(slots=True)
class Keeper:
    """Writes the records of runs that have ended, remembers them, and tells the listener."""

    runs: Path
    listener: Listener
    inputs: Sequence[Input] = ()
    """Input files as they were when the sweep began; the result of a run with changed files does not count."""
    measured: list[RunRecord] = field(default_factory=list)

    def finish(self, record: RunRecord) -> None:
        """Remember the record of a run that has ended, which is in the directory already, and notify the listener."""
        self.measured.append(record)
        self.listener.finished(record)

    def _changed_since(self, record: RunRecord) -> str | None:
        """Why a result does not count, if an input file of its run has changed since the sweep began."""
        changed = changed_inputs(record, self.inputs) if record.status.is_result else []
        return f"changed while the sweep ran: {'; '.join(changed)}; start over with --fresh" if changed else None

    def read(self, config: RunConfig, elapsed_s: float, log_tail: str | None = None) -> RunRecord:
        """The record that the run has left in the directory, or one that says why that does not count."""
        path = self.runs / f"{config.key}.json"
        try:
            record = read_record(path)
        except RecordError as error:
            message = f"the record was not readable; kept as {quarantine(path).name}: {error}"
            return self.refuse(config, message, elapsed_s, log_tail)
        if record.config != config:
            message = f"the record is of another run; kept as {quarantine(path).name}"
            return self.refuse(config, message, elapsed_s, log_tail)
        changed = self._changed_since(record)
        return record if changed is None else self.refuse(config, changed, elapsed_s, log_tail)

    def refuse(self, config: RunConfig, message: str, elapsed_s: float, log_tail: str | None = None) -> RunRecord:
        """Write a record that says that the run's own record does not count."""
        return self.fail(config, Status.INVALID, Failure(message=message, log_tail=log_tail), elapsed_s)

    def fail(self, config: RunConfig, status: Status, failure: Failure, elapsed_s: float) -> RunRecord:
        """Write the record of a failed run, which began `elapsed_s` ago."""
        began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=elapsed_s)
        started_at = began.isoformat(timespec="seconds")
        return self.write(RunRecord(config=config, status=status, started_at=started_at, failure=failure))

    def write(self, record: RunRecord) -> RunRecord:
        """Write the record; raise SweepError where that fails."""
        try:
            write_record(record, self.runs)
        except OSError as error:
            raise SweepError(error_in_words(error)) from error
        return record
