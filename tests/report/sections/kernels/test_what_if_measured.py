"""What profiles in data/ say that a change would give, against the runs in data/ that have this change."""

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.config import Attention, CompileMode, OptimizerKind, Phase, Precision, Profiler, RunConfig
from cs336_systems.record import RunRecord, Status, load_records
from tests.committed import DATA, committed_runs

PROFILES = ("kineto_profiles/each_kernel", "nsys_profiles/course")
FUSED_ADAMW: dict[str, Any] = {"optimizer": OptimizerKind.FUSED}
CHANGES: dict[str, dict[str, Any]] = {
    "--precision tf32": {"precision": Precision.TF32},
    "--mixed-precision": {"precision": Precision.BF16},
    "--optimizer fused": FUSED_ADAMW,
    "--cuda-graph": {"cuda_graph": True},
    "--cuda-graph --optimizer fused": FUSED_ADAMW | {"cuda_graph": True},
    "--compile default": {"compile": CompileMode.DEFAULT},
}
SAME_MACHINE = 0.05
"""How far a step as it is may be from other runs of it: hosts differ by more, and limit some steps."""


@dataclass(frozen=True)
class Pair:
    """The foretold and the measured step of one change, in ms."""

    run: RunConfig
    flags: str
    as_it_is_ms: float
    foretold_ms: float
    measured_ms: float


def changed(config: RunConfig, flags: str) -> RunConfig:
    if flags == "--attention sdpa":
        return replace(config, model=replace(config.model, attention=Attention.SDPA))
    return replace(config, **CHANGES[flags])


def compared(config: RunConfig) -> RunConfig:
    """What runs of the same steady step have in common."""
    return config.with_defaults("warmup_steps", "measured_steps", "repeat", "profiler", "ranges", "learning_rate")


def pairs() -> Iterator[Pair]:
    """Each change that was measured too; not where the host is the limit, which differs from machine to machine."""
    measured: dict[RunConfig, list[float]] = {}
    profiled: dict[Path, list[RunRecord]] = {}
    for runs in committed_runs():
        for record in load_records(runs)[0]:
            step = record.measurement(Phase.STEP)
            if record.config.profiler is not Profiler.NONE:
                profiled.setdefault(runs.parent, []).append(record)
            elif record.status is Status.OK and step is not None and record.config.warmup_steps >= 2:
                measured.setdefault(compared(record.config), []).append(1e3 * step.mean_s)
    for name in PROFILES:
        with (DATA / name / "what_if.csv").open() as file:
            rows = list(csv.DictReader(file))
        for record in profiled[DATA / name]:
            config = record.config
            shape = config.size, str(config.model.context_length), config.mode
            own = [row for row in rows if (row["size"], row["context_length"], row["mode"]) == shape]
            before = next(row for row in own if not row["flags"])
            as_it_is_ms = float(before["changed_step_ms"])
            plain = measured.get(compared(config), [])
            if not plain or abs(statistics.median(plain) / as_it_is_ms - 1) > SAME_MACHINE:
                continue
            for row in own:
                flags = row["flags"].removeprefix("'")  # which keeps spreadsheets from computing it
                if (
                    flags
                    and row["limited_by"] == "the GPU"
                    and (found := measured.get(compared(changed(config, flags))))
                ):
                    yield Pair(config, flags, as_it_is_ms, float(row["changed_step_ms"]), statistics.median(found))


@pytest.fixture(scope="module")
def found() -> list[Pair]:
    return list(pairs())


def test_a_foretold_change_is_what_a_run_with_it_took(found: list[Pair]) -> None:
    """Within 10 % of the step, or 20 % of the gain where that is more."""
    assert len(found) >= 12
    assert {"--mixed-precision", "--attention sdpa", "--compile default"} <= {pair.flags for pair in found}
    assert {"small", "xl"} == {pair.run.size for pair in found}
    for pair in found:
        allowed_ms = max(0.1 * pair.measured_ms, 0.2 * abs(pair.as_it_is_ms - pair.measured_ms))
        assert abs(pair.foretold_ms - pair.measured_ms) <= allowed_ms, pair


def test_the_order_of_the_gains_is_that_of_the_runs(found: list[Pair]) -> None:
    runs = {pair.run for pair in found}
    orders = []
    for run in runs:
        own = [pair for pair in found if pair.run == run]
        orders.append(len(own))
        foretold = sorted(own, key=lambda pair: pair.foretold_ms)
        assert foretold == sorted(own, key=lambda pair: pair.measured_ms), run.label
    assert max(orders) >= 2
