"""A remedy gains no more than is said: drawn programs run again on a machine with the remedy.

The machine takes away all that the remedy could, as no real one does: graphs whose launches take
no time, a compiler that leaves nothing but matmuls and attention, batches that are always ready.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cs336.analysis.kernels.explain import explain
from cs336.analysis.remedies import Remedy
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.figures import in_use
from cs336.report.sections.kernels.gains import (
    between_gain_s,
    copies_gain_s,
    data_gain_s,
    gain_s,
    waits_gain_s,
)
from tests.analysis.kernels.drawn_files import write
from tests.analysis.kernels.drawn_machine import recorded
from tests.analysis.kernels.drawn_plans import Part, Pause, Plan, draw
from tests.analysis.kernels.drawn_programs import Program, simulate

DRAWS, PARTS = 96, 4
MAX_OUTSIDE = 0.2
"""Largest share of the program's time outside of the steps that are told, all of which a remedy
might save too.
"""
_COMPUTING = (Part.FORWARD, Part.LOSS, Part.BACKWARD, Part.EVALUATION)


class Graphed(Program):
    """Kernels are launched at once and follow each other at once."""

    def costs(self, kind: str, name: str, duration_ns: int) -> tuple[int, float, int]:
        is_kernel = kind == "kernel"
        return (duration_ns, 0.0, 0) if is_kernel else super().costs(kind, name, duration_ns)


class Tight(Program):
    """Kernels follow each other at once."""

    def costs(self, kind: str, name: str, duration_ns: int) -> tuple[int, float, int]:
        return duration_ns, 1.0, 0


class Compiled(Program):
    """Forward and backward have matmuls and attention only, which are launched at once."""

    def costs(self, kind: str, name: str, duration_ns: int) -> tuple[int, float, int]:
        if kind != "kernel" or self.at.get("phase") not in _COMPUTING:
            return super().costs(kind, name, duration_ns)
        is_kept = any(part in name for part in ("nvjet", "gemm", "flash"))
        return duration_ns if is_kept else 0, 0.0, 0


class Fused(Program):
    """The optimizer takes no time."""

    def costs(self, kind: str, name: str, duration_ns: int) -> tuple[int, float, int]:
        is_updating = self.at.get("phase") == Part.OPTIMIZER
        return (0, 0.0, 0) if is_updating else super().costs(kind, name, duration_ns)


class Ready(Program):
    """Each batch is ready at once."""

    def pause(self, reason: str, duration_ns: int) -> None:
        super().pause(reason, 0 if reason == Pause.DATA else duration_ns)


class Unwaited(Program):
    """The host waits for nothing but the end of the program."""

    def wait(self, name: str) -> None:
        if name != "cudaStreamSynchronize":
            super().wait(name)


class Uncopied(Unwaited):
    """Copies take no time."""

    def costs(self, kind: str, name: str, duration_ns: int) -> tuple[int, float, int]:
        is_copy = kind == "copy"
        return (0, 1.0, 0) if is_copy else super().costs(kind, name, duration_ns)


def bounds_s(entry: Explained) -> dict[type[Program], float]:
    """What is said to be gained at most, over all steps of the profile."""
    bounds: dict[type[Program], float] = {
        Graphed: gain_s(entry, Remedy.GRAPHS),
        Tight: between_gain_s(entry),
        Compiled: gain_s(entry, Remedy.COMPILE),
        Ready: data_gain_s(entry),
        Unwaited: waits_gain_s(entry),
        Uncopied: copies_gain_s(entry),
    }
    if Remedy.OPTIMIZER not in in_use(entry.profile):
        bounds[Fused] = gain_s(entry, Remedy.OPTIMIZER)
    return bounds


def beside_s(machine: Program) -> float:
    """Time of the work on all streams but the longest, which another program might do beside
    it.
    """
    times: Counter[int] = Counter()
    for job in machine.jobs:
        times[job.stream] += job.end_ns - job.start_ns
    return (times.total() - max(times.values())) / 1e9


def whole(plan: Plan) -> Plan:
    """The same program on one device, in a file that has all of it."""
    return replace(
        plan, cut=(0.0, 1.0), dropped="", shift_ns=0, ranks=1, slow_rank=0, devices=1, decoy=""
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_no_remedy_gains_more_than_is_said(part: int, tmp_path: Path) -> None:
    count = DRAWS // PARTS
    over, compared = [], 0
    for seed in range(part * count, (part + 1) * count):
        plan = whole(draw(seed))
        machine = simulate(plan)[0]
        place = tmp_path / str(seed)
        place.mkdir()
        entry = Explained(profile=explain(write(recorded(machine), place)))
        whole_s = machine.now / 1e9
        outside_s = whole_s - entry.span().profiled_s
        if outside_s > MAX_OUTSIDE * whole_s:
            continue
        compared += 1
        for remedy, bound_s in bounds_s(entry).items():
            gained_s = whole_s - simulate(plan, remedy)[0].now / 1e9
            if gained_s > bound_s + outside_s + beside_s(machine):
                over.append((seed, remedy.__name__, gained_s, bound_s, outside_s))
    assert not over
    assert compared > count / 2
