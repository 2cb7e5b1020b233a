"""The worker process of one run: it measures, under a profiler if the run has one, writes the
record, and ends.
"""

import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from ..analysis.kernels import NsysError
from ..analysis.warnings import judged
from ..config import Profiler, RunConfig
from ..files import error_in_words
from ..measure.failure import describe
from ..measure.run import measure
from ..record import RunRecord, Status, read_record, time_now, write_record
from ..temporary import temporary_directory
from ..text import print_aside
from .nsys import is_under_nsys, run_under_nsys
from .process import RECORD_NOT_WRITTEN, begin_worker, die_with, forget_safe_path
from .ranks import measure_on_ranks
from .store import fresh_profile_path


def main(config: RunConfig, runs: Path, log: Connection, gpu_uuids: Sequence[str]) -> None:
    """Entry of a forked worker that measures one run, or starts its ranks, and writes its record
    into `runs`.

    The times are written before they are judged: the time limit may come meanwhile.
    """
    begin_worker(log, gpu_uuids)
    record = run_here(config, runs, gpu_uuids)
    try:
        write_record(record, runs)
        write_record(judged(record), runs)
    except OSError as error:
        print(file=sys.stderr)
        print_aside(error_in_words(error))
        os._exit(RECORD_NOT_WRITTEN)


def run_here(config: RunConfig, runs: Path, gpu_uuids: Sequence[str] = ()) -> RunRecord:
    """Measure in this process and its ranks, or in a process under nsys; the raw profile stays
    beside `runs`.

    `gpu_uuids` are for the ranks of a run that has any.
    """
    profile = fresh_profile_path(config, runs)
    if profile is not None and config.profiler is Profiler.NSYS and not is_under_nsys():
        return _measured_under_nsys(config, profile, gpu_uuids)
    return _measured(config, gpu_uuids, profile)


def _measured(
    config: RunConfig, gpu_uuids: Sequence[str], profile: Path | None = None
) -> RunRecord:
    """The record of the run, measured on its ranks if it has any, or in this process."""
    if config.is_shared:
        return measure_on_ranks(config, gpu_uuids, profile)
    return measure(config, profile=profile)


def _measured_under_nsys(config: RunConfig, report: Path, gpu_uuids: Sequence[str]) -> RunRecord:
    """The record that the process under nsys writes; one of a failure if it writes none, or nsys
    leaves no report.
    """
    started_at = time_now()
    try:
        with temporary_directory() as scratch:
            run_under_nsys(config, report, scratch, gpu_uuids)
            record = read_record(scratch / f"{config.key}.json")
        if record.status is Status.OK and not report.is_file():
            raise NsysError(
                f"the run ended well and nsys left no {report.name}: see what it printed"
            )
        return record
    # any failure of profiling: the times are in the record of the unprofiled run
    except Exception as error:
        failure = describe(error, Status.CRASHED, "profiling", config.device)
        return RunRecord(
            config=config, status=Status.CRASHED, started_at=started_at, failure=failure
        )


if __name__ == "__main__":
    # under nsys; arguments: configuration as JSON, directory for the record, id of the worker, GPUs
    # of ranks
    die_with(int(sys.argv[3]))
    forget_safe_path()
    asked = msgspec.json.decode(sys.argv[1], type=RunConfig)
    write_record(_measured(asked, sys.argv[4:]), Path(sys.argv[2]))
