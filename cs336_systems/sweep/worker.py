"""One run in one process: measure, under a profiler if the run has one, write the record, end."""

import datetime
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from cs336_systems.config import ModelConfig, Profiler, RunConfig
from cs336_systems.files import error_in_words
from cs336_systems.measure.failure import describe
from cs336_systems.measure.progress import Say, say_nothing
from cs336_systems.measure.run import measure
from cs336_systems.record import RunRecord, Status, read_record, write_record
from cs336_systems.sweep.inputs import inputs_of
from cs336_systems.sweep.nsys import is_under_nsys, run_under_nsys
from cs336_systems.sweep.process import RECORD_NOT_WRITTEN, adopt_orphans, die_with, die_with_forker
from cs336_systems.sweep.store import kernel_profile_path, memory_profile_path, raw_profile_path


def run_here(config: RunConfig, directory: Path, say: Say = say_nothing) -> RunRecord:
    """Measure in this process, or one that nsys watches, and write the record into `directory`; `say` what is done."""
    directory = directory.absolute()  # the user's own model may change the current one
    record = _run(config, directory, say)
    write_record(record, directory)
    return record


def _run(config: RunConfig, runs: Path, say: Say = say_nothing) -> RunRecord:
    inputs = inputs_of(config)  # before the user's module is imported, which it may be some time after an edit
    return replace(_watched(config, runs, say), inputs=inputs)


def _watched(config: RunConfig, runs: Path, say: Say) -> RunRecord:
    if config.profiler is Profiler.NONE or (config.profiler is Profiler.NSYS and is_under_nsys()):
        return measure(config, say=say)
    if config.profiler is Profiler.NSYS:
        return _explained(config, runs, lambda raw: _record_with_nsys(config, raw), say)
    return _explained(config, runs, lambda raw: measure(config, profile=raw, say=say), say)


def _explained(config: RunConfig, runs: Path, record_to: Callable[[Path], RunRecord], say: Say) -> RunRecord:
    """The record of a profiled run, once what the profiler recorded has been explained; without that, a failed run."""
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    is_memory = config.profiler is Profiler.MEMORY
    raw = raw_profile_path(config, runs)
    profile = memory_profile_path(config, runs) if is_memory else kernel_profile_path(config, runs)
    for path in (raw, profile):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    try:
        record = record_to(raw)
        say("explaining what was recorded")
        if record.status is Status.OK and not raw.is_file():
            raise RuntimeError(f"the run ended well and {config.profiler} left no {raw.name}: see what it printed")
        if is_memory and raw.is_file():  # of a run that ran out of memory too: it is evidence
            from cs336_systems.analysis.memory.explain import explain_memory
            from cs336_systems.analysis.memory.profile import write_memory_profile

            write_memory_profile(explain_memory(raw, *_shape(config)), profile)
        elif record.status is Status.OK:
            from cs336_systems.analysis.kernels.explain import explain
            from cs336_systems.analysis.kernels.step_profile import write_profile

            write_profile(explain(raw, config), profile)
        return record
    except Exception as error:  # whatever it is: the times are in the record of the unprofiled run
        failure = describe(error, Status.CRASHED, "profiling", config.device)
        return RunRecord(config=config, status=Status.CRASHED, started_at=started_at, failure=failure)


def _shape(config: RunConfig) -> tuple[ModelConfig, int] | tuple[None, None]:
    """The model's shape and the batch size, where the model is ours."""
    return (None, None) if config.model_factory is not None else (config.model, config.batch_size)


def _record_with_nsys(config: RunConfig, report: Path) -> RunRecord:
    with TemporaryDirectory(prefix="cs336-", dir=get_temp_dir()) as scratch:
        run_under_nsys(config, report, Path(scratch))
        return read_record(Path(scratch) / f"{config.key}.json")


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
    record = _run(config, directory)
    try:
        write_record(record, directory)
    except OSError as error:
        print(f"\n{error_in_words(error)}", file=sys.stderr, flush=True)
        os._exit(RECORD_NOT_WRITTEN)


def die_with_parent() -> None:
    """Have the kernel kill this process when the fork server ends, as it does with the sweep; now if that is past."""
    die_with_forker(signal.SIGKILL)
    sweep = multiprocessing.parent_process()
    if sweep is not None and not sweep.is_alive():
        os._exit(1)


if __name__ == "__main__":  # under nsys: the configuration as JSON, the directory for the record, who started nsys
    die_with(int(sys.argv[3]))
    run_here(msgspec.json.decode(sys.argv[1], type=RunConfig), Path(sys.argv[2]))
