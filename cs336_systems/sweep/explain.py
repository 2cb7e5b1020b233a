"""Explains the raw profile of a run in a process of its own, after the run, and again if the explanation is lost.

The run's record is not changed, so a defect of the analysis can lose an explanation but no measurement.
"""

import contextlib
import os
import resource
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from cs336_systems.config import Profiler, RunConfig
from cs336_systems.files import FileError, error_in_words
from cs336_systems.measure.environment import host_memory_bytes
from cs336_systems.record import RunRecord, Status
from cs336_systems.sweep.process import NOT_EXPLAINED, begin_worker
from cs336_systems.sweep.store import explanation_path, raw_profile_path
from cs336_systems.text import print_aside


def lacks_explanation(record: RunRecord, runs: Path) -> bool:
    """Whether the run was profiled, ended in a way that can be explained, and has no readable explanation.

    A failed run can be explained only if it left a memory snapshot, which shows how it ran out of memory.
    """
    config = record.config
    if config.profiler is Profiler.NONE:
        return False
    has_snapshot = config.profiler is Profiler.MEMORY and raw_profile_path(config, runs).is_file()
    return (record.status is Status.OK or has_snapshot) and not has_explanation(config, runs)


def can_be_explained(record: RunRecord, runs: Path) -> bool:
    """Whether the run lacks an explanation and has the raw profile to make one from."""
    return lacks_explanation(record, runs) and raw_profile_path(record.config, runs).is_file()


def has_explanation(config: RunConfig, runs: Path) -> bool:
    """Whether this run has an explanation that this or a later version of the program can read."""
    path = explanation_path(config, runs)
    if not path.is_file():
        return False
    from cs336_systems.analysis.kernels.step_profile import decode_profile
    from cs336_systems.analysis.memory.profile import read_memory_profile

    try:
        if config.profiler is Profiler.MEMORY:
            read_memory_profile(path)
        else:
            decode_profile(path.read_bytes())
    except (OSError, ValueError) as error:
        return isinstance(error, FileError) and error.is_newer
    return True


def explain_run(config: RunConfig, runs: Path) -> None:
    """Read the raw profile of the run and write its explanation. Raises what the analysis raises."""
    raw, target = raw_profile_path(config, runs), explanation_path(config, runs)
    target.parent.mkdir(parents=True, exist_ok=True)
    if config.profiler is Profiler.MEMORY:
        from cs336_systems.analysis.memory.explain import explain_memory
        from cs336_systems.analysis.memory.profile import write_memory_profile

        is_own_model = config.model_factory is not None  # the shape of such a model is not known
        shape = (None, None) if is_own_model else (config.model, config.batch_size)
        write_memory_profile(explain_memory(raw, *shape), target)
    else:
        from cs336_systems.analysis.kernels.explain import explain
        from cs336_systems.analysis.kernels.step_profile import write_profile

        write_profile(explain(raw, config), target)


def main(config: RunConfig, runs: Path, log: Connection) -> None:
    """Entry of a forked worker that explains one run. If it fails, the last line of its output says why."""
    begin_worker(log)
    _limit_memory()
    try:
        explain_run(config, runs)
    except Exception as error:
        print(file=sys.stderr)
        print_aside(_in_words(error))
        os._exit(NOT_EXPLAINED)


def _limit_memory() -> None:
    """Limit this process to the memory of the machine, and have it killed first when memory runs out."""
    with contextlib.suppress(OSError, ValueError):  # raised outside Linux, and if the limit is lower already
        resource.setrlimit(resource.RLIMIT_DATA, (host_memory_bytes(), resource.RLIM_INFINITY))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _in_words(error: Exception) -> str:
    """The error in one line; for a defect of the analysis, with its place in the source."""
    from cs336_systems.analysis.kernels.nsys import NsysError

    if isinstance(error, FileError | NsysError):
        return str(error)
    if isinstance(error, OSError):
        return error_in_words(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return ": ".join(filter(None, [what, str(error)])) + f" ({Path(last.filename).name}:{last.lineno})"
