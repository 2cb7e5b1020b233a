"""Keeping the records of a sweep: which of an earlier one are kept, and what is written of each run that ends."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.files import error_in_words
from cs336_systems.record import Failure, Input, RecordError, RunRecord, Status, load_records, write_record
from cs336_systems.sweep.explain import can_be_explained
from cs336_systems.sweep.listener import Listener
from cs336_systems.sweep.store import (
    SweepError,
    changed_inputs,
    remove_temporary_files,
    set_aside,
    set_aside_unreadable,
)


class Resumed(NamedTuple):
    """What a sweep finds in its directory."""

    kept: list[RunRecord]
    """Records that stay: those of other runs, and results of the wanted ones."""
    todo: list[RunConfig]
    """Wanted runs without a result, in their order."""
    unexplained: list[RunConfig]
    """Wanted runs with a result whose raw profiles are to be explained."""
    problems: list[RecordError]
    """Files that were not readable, and are set aside."""


def resume(configs: Sequence[RunConfig], runs: Path, *, fresh: bool) -> Resumed:
    """Clear up `runs`, of which this process holds the lock, and find what is to be done; `fresh` sets all aside."""
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
    """Input files as the sweep found them; a run for which they had changed has no result."""
    measured: list[RunRecord] = field(default_factory=list)

    def finish(self, record: RunRecord) -> None:
        """The run has ended, and its record is in the directory."""
        self.measured.append(record)
        self.listener.finished(record)

    def changed_since(self, record: RunRecord) -> str | None:
        """Why a result does not count, if an input file of its run was not as the sweep had found it."""
        changed = changed_inputs(record, self.inputs) if record.status.is_result else []
        return f"changed while the sweep ran: {'; '.join(changed)}; start over with --fresh" if changed else None

    def refuse(self, config: RunConfig, message: str, elapsed_s: float, log_tail: str | None = None) -> RunRecord:
        """Write that the run gave a record which does not count."""
        return self.fail(config, Status.INVALID, Failure(message=message, log_tail=log_tail), elapsed_s)

    def fail(self, config: RunConfig, status: Status, failure: Failure, elapsed_s: float) -> RunRecord:
        """Write that the run, which began `elapsed_s` ago, gave no result."""
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
