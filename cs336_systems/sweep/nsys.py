"""One run under Nsight Systems, in a process of its own; nsys captures the measured steps only."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from cs336_systems.analysis.kernels.nsys_export import NsysError, find_nsys
from cs336_systems.config import RunConfig
from cs336_systems.ranges import Range
from cs336_systems.sweep.process import child_environment, die_with_forker

CAPTURE = (
    "--trace=cuda,nvtx",
    "--sample=none",  # sampling the CPU would slow it, and fill the disk
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",  # otherwise a graph is one event, without its kernels
    "--capture-range=nvtx",
    f"--nvtx-capture={Range.MEASURE}",
    "--capture-range-end=stop",
    "--force-overwrite=true",
)


def is_under_nsys() -> bool:
    """Whether nsys started this process."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ


def run_under_nsys(config: RunConfig, report: Path, runs: Path) -> None:
    """Measure `config` in a process under nsys, which leaves its record in `runs` and the report of nsys at `report`.

    Raises NsysError if there is no record. A run that fails before its measured steps leaves a record and no report.
    """
    nsys = find_nsys()
    report.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(nsys, "profile", *CAPTURE, f"--output={report.with_suffix('')}"),
        *(sys.executable, "-m", "cs336_systems.sweep.worker"),
        *(msgspec.json.encode(config).decode(), str(runs), str(os.getpid())),
    ]
    done = subprocess.run(command, env=child_environment(), stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    if not (runs / f"{config.key}.json").is_file():
        raise NsysError(f"nsys ended with status {done.returncode}, and the run left no record")


def _die_with_parent() -> None:
    die_with_forker(signal.SIGKILL)
