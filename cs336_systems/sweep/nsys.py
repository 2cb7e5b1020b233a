"""One run under Nsight Systems, in a process of its own; nsys captures the measured steps only.

Ranks are processes that this process forks. All are in one report, in which a range names the rank
of each process.
"""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..analysis.kernels import NsysError, find_nsys
from ..config import RunConfig
from ..ranges import Range
from .process import child_environment, die_with_forker

CAPTURED_STEPS = (
    "--capture-range=nvtx",
    f"--nvtx-capture={Range.MEASURE}",
    "--capture-range-end=stop",
)
CAPTURE = (
    "--trace=cuda,nvtx",
    "--sample=none",  # sampling the CPU would slow it, and fill the disk
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",  # otherwise a graph is one event, without its kernels
    *CAPTURED_STEPS,
    "--force-overwrite=true",
)
FORKED = "--trace-fork-before-exec=true"
"""Without this, nsys records nothing of processes that are forked and execute no other program,
such as ranks.
"""


def is_under_nsys() -> bool:
    """Whether nsys started this process."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ


def run_under_nsys(
    config: RunConfig, report: Path, runs: Path, gpu_uuids: Sequence[str] = ()
) -> None:
    """Measure `config` in a process under nsys, which leaves its record in `runs` and the report of
    nsys at `report`.

    `gpu_uuids` are for the ranks of the run. Raises NsysError if there is no record. A run that
    fails before its measured steps leaves a record and no report.
    """
    nsys = find_nsys()
    report.parent.mkdir(parents=True, exist_ok=True)
    command = [nsys, "profile", *CAPTURE, f"--output={report.with_suffix('')}"]
    if config.is_shared:
        command.append(FORKED)
    command += [sys.executable, "-m", "cs336.sweep.worker"]
    command += [msgspec.json.encode(config).decode(), str(runs), str(os.getpid()), *gpu_uuids]
    die_with_parent = functools.partial(die_with_forker, signal.SIGKILL)
    done = subprocess.run(
        command, env=child_environment(), stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    if not (runs / f"{config.key}.json").is_file():
        raise NsysError(f"nsys ended with status {done.returncode}, and the run left no record")
