"""What profiles in data/ say that a change would give, against the runs in data/ that have this change."""

import csv
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.config import Attention, CompileMode, OptimizerKind, Parallel, Phase, Precision, Profiler, RunConfig
from cs336_systems.record import RunRecord, Status, WarningCode, load_records
from tests.committed import DATA, committed_runs

PROFILES = (
    "kineto_profiles/each_kernel", "kineto_profiles/what_if", "nsys_profiles/course", "parallel/kineto_profiles/xl",
)  # fmt: skip
FUSED_ADAMW: dict[str, Any] = {"optimizer": OptimizerKind.FUSED}
CHANGES: dict[str, dict[str, Any]] = {
    "--precision tf32": {"precision": Precision.TF32},
    "--mixed-precision": {"precision": Precision.BF16},
    "--optimizer fused": FUSED_ADAMW,
    "--cuda-graph": {"cuda_graph": True},
    "--cuda-graph --optimizer fused": FUSED_ADAMW | {"cuda_graph": True},
    "--compile default": {"compile": CompileMode.DEFAULT},
    "--parallel ddp-overlap": {"parallel": Parallel.DDP_OVERLAP},
}
SHAPE = ("size", "context_length", "mode")
SAME_MACHINE = 0.05
"""How far a step as it is may be from other runs of it: hosts differ by more, and limit some steps."""


@dataclass(frozen=True)
class Pair:
    """The foretold and the measured step of one change, in ms."""

    profile: str
    run: RunConfig
    flags: str
    as_it_is_ms: float
    foretold_ms: float
    measured_ms: float
    noise_ms: float
    """Standard deviation of the measured steps."""


def changed(config: RunConfig, flags: str) -> RunConfig:
    if flags == "--attention sdpa":
        return replace(config, model=replace(config.model, attention=Attention.SDPA))
    return replace(config, **CHANGES[flags])


def compared(config: RunConfig) -> RunConfig:
    """What runs of the same steady step have in common."""
    return config.with_defaults("warmup_steps", "measured_steps", "repeat", "profiler", "ranges", "learning_rate")


def pairs() -> Iterator[Pair]:
    """Each change that was measured too: by runs on the GPU of the profile, or else on others of the same name.

    Not where the host is the limit, which differs from machine to machine: by the replay, or by the run's warning.
    """
    measured: dict[tuple[RunConfig, str | None], list[RunRecord]] = {}
    profiled: dict[Path, list[RunRecord]] = {}
    for runs in committed_runs():
        for record in load_records(runs)[0]:
            is_steady = record.status is Status.OK and record.config.warmup_steps >= 2
            if record.config.profiler is not Profiler.NONE:
                profiled.setdefault(runs.parent, []).append(record)
            elif is_steady and WarningCode.LAUNCH_BOUND not in {warning.code for warning in record.warnings}:
                measured.setdefault((compared(record.config), record.device_name), []).append(record)
    for name in PROFILES:
        with (DATA / name / "what_if.csv").open() as file:
            rows = list(csv.DictReader(file))
        for record in profiled[DATA / name]:
            config, gpu, device = record.config, gpu_of(record), record.device_name
            shape = config.size, str(config.model.context_length), config.mode, config.parallel
            own = [row for row in rows if (*map(row.get, SHAPE), row.get("parallel", Parallel.NONE)) == shape]
            before = next(row for row in own if not row["flags"])
            as_it_is_ms = float(before["changed_step_ms"])
            plain = steps_ms(measured.get((compared(config), device), []), gpu)
            if not plain or abs(typical(plain) / as_it_is_ms - 1) > SAME_MACHINE:
                continue
            for row in own:
                flags = row["flags"].removeprefix("'")  # which keeps spreadsheets from computing it
                if not flags.startswith("--") or row["limited_by"] != "the GPU":  # some are no flag, as a larger batch
                    continue
                if found := steps_ms(measured.get((compared(changed(config, flags)), device), []), gpu):
                    noise_ms = statistics.stdev(chain.from_iterable(found))
                    yield Pair(
                        name, config, flags, as_it_is_ms, float(row["changed_step_ms"]), typical(found), noise_ms
                    )


def gpu_of(record: RunRecord) -> str | None:
    return None if record.environment is None else record.environment.device_uuid


def steps_ms(records: list[RunRecord], gpu: str | None) -> list[list[float]]:
    """Steps of each run on this GPU, or of each run if there is none on it."""
    own = [record for record in records if gpu_of(record) == gpu] or records
    return [
        [1e3 * time_s for time_s in step.times_s]
        for record in own
        if (step := record.measurement(Phase.STEP)) is not None
    ]


def typical(runs: list[list[float]]) -> float:
    return statistics.median(map(statistics.fmean, runs))


@pytest.fixture(scope="module")
def found() -> list[Pair]:
    return list(pairs())


def test_a_foretold_change_is_what_a_run_with_it_took(found: list[Pair]) -> None:
    """Within 10 % of the step, or 20 % of the gain where that is more."""
    assert len(found) >= 12
    assert {*CHANGES, "--attention sdpa"} - {"--cuda-graph"} == {pair.flags for pair in found}
    assert {"small", "medium", "xl"} == {pair.run.size for pair in found}
    for pair in found:
        allowed_ms = max(0.1 * pair.measured_ms, 0.2 * abs(pair.as_it_is_ms - pair.measured_ms))
        assert abs(pair.foretold_ms - pair.measured_ms) <= allowed_ms, pair


def test_the_order_of_the_gains_is_that_of_the_runs(found: list[Pair]) -> None:
    """But for foretold steps whose difference is less than the standard deviation of that of two measured ones."""
    compared_flags: set[tuple[str, frozenset[str]]] = set()
    for one, other in combinations(found, 2):
        difference_ms = one.foretold_ms - other.foretold_ms
        if (one.profile, one.run) != (other.profile, other.run) or abs(difference_ms) < math.hypot(
            one.noise_ms, other.noise_ms
        ):
            continue
        assert difference_ms * (one.measured_ms - other.measured_ms) > 0, (one, other)
        compared_flags.add((one.run.size, frozenset((one.flags, other.flags))))
    assert len(compared_flags) >= 20
