#!/usr/bin/env python3
"""Stands in for nsys where there is neither nsys nor a GPU: FAKE_NSYS says how it ends.

`profile` writes the record that the run would have left, and a report; `export` makes a database of
a report, which is one already.
"""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from cs336.config import Phase, RunConfig
from cs336.ranges import rank_range
from cs336.record import Measurement, RunRecord, Status, write_record
from tests.analysis.kernels.tracing import (
    AUTOGRAD,
    PROCESS,
    Kernel,
    Recording,
    Span,
    process_of,
    write_export,
)

FATE = os.environ.get("FAKE_NSYS", "")


def option(name: str) -> Path:
    return Path(next(word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}=")))


def record_of(config: RunConfig) -> RunRecord:
    times = tuple(
        Measurement(phase, (0.5, 0.5)) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    )
    step = Measurement(Phase.STEP, (1.5, 1.5))
    return RunRecord(
        config=config,
        status=Status.OK,
        started_at="2026-11-21T00:00:00+00:00",
        measurements=(*times, step),
    )


def recording() -> Recording:
    """One measured step: two kernels in forward, three in backward on autograd's thread, one in
    the optimizer.
    """
    spans = [Span("measure", 0, 1000), Span("step", 10, 900), Span("forward", 20, 200)]
    spans += [Span("backward", 200, 500), Span("optimizer", 500, 800)]
    made = Recording(spans=spans)
    for time in (30, 40):
        made.launch("gemm", time)
    for time in (210, 220, 230):
        made.launch("gemm", time, AUTOGRAD)
    made.launch("elementwise_kernel", 510)
    return made


def on_ranks(ranks: int) -> Recording:
    """The step on each rank, in a process that nsys sees only if it is asked to, with an
    all-reduce in backward.
    """
    made = Recording()
    for rank in range(ranks if "--trace-fork-before-exec=true" in sys.argv else 0):
        own = recording()
        own.kernels.append(
            Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 240, AUTOGRAD, 100_300, 40, 16)
        )
        own.spans.append(Span(rank_range(rank), 1, 999))
        for row in (*own.kernels, *own.spans):
            moved = (process_of(PROCESS) + (rank << 24)) + row.thread - process_of(row.thread)
            (made.kernels if isinstance(row, Kernel) else made.spans).append(
                replace(row, thread=moved)
            )
    return made


def profile() -> int:
    asked = sys.argv[sys.argv.index("cs336.sweep.worker") + 1 :]
    config, runs = msgspec.json.decode(asked[0], type=RunConfig), Path(asked[1])
    print("a word from nsys", flush=True)
    if FATE == "no record":
        return 3
    write_record(record_of(config), runs)
    report = option("output").with_name(option("output").name + ".nsys-rep")
    if FATE == "garbage":
        report.write_bytes(b"neither a report nor a database")
    elif FATE != "no report":
        write_export(report, on_ranks(config.ranks) if config.is_shared else recording())
    return 0


def export() -> int:
    if FATE == "no export":
        print("the importer is broken", file=sys.stderr)
        return 1
    shutil.copy(sys.argv[-1], option("output"))
    return 0


if __name__ == "__main__":
    sys.exit(profile() if sys.argv[1] == "profile" else export())
