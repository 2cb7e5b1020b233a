"""One run in one process: measure, write the record, end."""

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from cs336_systems.config import RunConfig
from cs336_systems.measurement import measure
from cs336_systems.process import RECORD_NOT_WRITTEN, adopt_orphans, die_with_forker
from cs336_systems.record import RunRecord, write_record


def run_here(config: RunConfig, directory: Path) -> RunRecord:
    """Measure in this process and write the record into `directory`."""
    directory = directory.absolute()  # the user's own model may change the current one
    record = measure(config)
    write_record(record, directory)
    return record


def main(config: RunConfig, directory: Path, log: Connection, gpu_uuid: str | None) -> None:
    """Entry of a forked worker: its own session and group, its output into `log`, dead as soon as the sweep is."""
    os.setsid()
    die_with_parent()
    adopt_orphans()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log.fileno(), 1), (log.fileno(), 2)):
        os.dup2(source, target)
    log.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if gpu_uuid is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_uuid
    record = measure(config)
    try:
        write_record(record, directory)
    except OSError as error:
        print(f"{directory}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(RECORD_NOT_WRITTEN)


def die_with_parent() -> None:
    """Have the kernel kill this process when the fork server ends, as it does with the sweep; now if that is past."""
    die_with_forker(signal.SIGKILL)
    sweep = multiprocessing.parent_process()
    if sweep is not None and not sweep.is_alive():
        os._exit(1)
