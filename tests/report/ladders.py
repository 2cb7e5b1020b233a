"""Hand-made ladders, small enough to work out by hand: four rungs on an H200, whose losses fall
from 12 to 10.
"""

from dataclasses import replace

from cs336.config import SIZES, Device, RunConfig
from cs336.record import Compilation
from cs336.report.sections.kernels.entry import Explained
from cs336.sweep.ladder import GATE_STEPS, chosen, reason_run, rungs
from tests.report.making import H200, make_record
from tests.report.sections.kernels.profiles import make_profile

FALLING = tuple(12 - 2 * step / (GATE_STEPS - 1) for step in range(GATE_STEPS))
STEPS_S = {"fp32": 0.8, "bf16": 0.4, "compile": 0.1, "fused": 0.05}
NOISE = (0.99, 1.0, 1.01)


def make_ladder(size="small", names=tuple(STEPS_S)):
    base = RunConfig(size=size, model=SIZES[size], device=Device.CUDA)
    return chosen(rungs(base, H200), names)


def shifted(distance):
    """Losses that end `distance` (a share of the fall) above the reference's."""
    return (*FALLING[:-1], FALLING[-1] + 2 * distance)


def make_process(rung, mean_s, repeat=0, losses=FALLING, compiled=None, **fields):
    record = make_record(
        replace(rung.config, repeat=repeat), (0.9 * mean_s, 1.1 * mean_s), **fields
    )
    compilation = (
        None
        if compiled is None
        else Compilation(seconds=compiled, graphs=2, graph_breaks=1, recompiles=0)
    )
    return replace(record, losses=losses, compilation=compilation)


def make_records(ladder, repeats=3, losses=None):
    """Processes of each rung, 1 % apart; those that compile take 20 s the first time and 4 s
    after that.
    """
    return [
        make_process(
            rung,
            STEPS_S[rung.name] * NOISE[repeat] if repeats > 1 else STEPS_S[rung.name],
            repeat,
            (losses or {}).get(rung.name, FALLING),
            None if rung.name in ("fp32", "bf16") else (4.0 if repeat else 20.0),
        )
        for rung in ladder
        for repeat in range(repeats)
    ]


def make_entry(rung, record=None, **changes):
    """The rung under a profiler: 25 kernels and 20.1 ms busy a step, of 40 ms of kernels in both
    steps together.
    """
    profiled = record or make_record(reason_run(rung), (1.0,))
    return Explained(profile=make_profile(**changes), profiled=profiled)
