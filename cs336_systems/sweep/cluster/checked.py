"""Checks a record that a machine has sent, which may be any bytes, before it counts."""

from dataclasses import replace

from cs336_systems.files import write_atomically
from cs336_systems.record import RecordError, RunRecord, RunWarning, WarningCode, decode_record
from cs336_systems.sweep.cluster.places import Run
from cs336_systems.sweep.keep import Keeper
from cs336_systems.sweep.store import quarantine

_SHARED = RunWarning(
    code=WarningCode.CPU_SHARED,
    message="other runs were at work on this machine, and the CPU limits this one; leave out --share-nodes",
)


class RefusedError(Exception):
    """A machine has sent a record that does not count."""


def checked_record(run: Run, data: bytes, keeper: Keeper) -> RunRecord:
    """The record that `data` holds, with the earlier tries and the neighbours of the run.

    Raises RefusedError if the record does not count; data that is not a record of the run is set aside.
    """
    try:
        record = decode_record(data, keeper.runs / f"{run.key}.json")
    except RecordError as error:
        raise _set_aside(run, data, keeper, "the record was not readable", f": {error}") from error
    if record.config != run.config:
        raise _set_aside(run, data, keeper, "the record is of another run")
    if (changed := keeper.changed_since(record)) is not None:
        raise RefusedError(changed)
    warnings = (*record.warnings, _SHARED) if run.neighbours and is_cpu_limited(record) else record.warnings
    return replace(
        record, lost_tries=tuple(run.lost), neighbours=tuple(sorted(run.neighbours)), warnings=warnings
    )  # fmt: skip


def is_cpu_limited(record: RunRecord) -> bool:
    """Whether the CPU limits the run, which others on its machine would then disturb."""
    return any(warning.code is WarningCode.LAUNCH_BOUND for warning in record.warnings)


def _set_aside(run: Run, data: bytes, keeper: Keeper, what: str, why: str = "") -> RefusedError:
    path = keeper.runs / f"{run.key}.json"
    write_atomically(path, data)
    return RefusedError(f"{what}; kept as {quarantine(path).name}{why}")
