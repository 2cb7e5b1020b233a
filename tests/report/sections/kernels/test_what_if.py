"""What a step would take with changes: tables and sentences of known causes, and committed runs with the change."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from cs336_systems.analysis.advice import Remedy
from cs336_systems.analysis.kernels.what_if import Counterfactual, WhatIf, what_if
from cs336_systems.config import (
    SIZES,
    Attention,
    Device,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    Profiler,
    RunConfig,
)
from cs336_systems.costs.time import Limit
from cs336_systems.record import RunRecord, RunWarning, Status, WarningCode, load_records
from cs336_systems.report.sections.kernels.entries import Explained, load_profiled, replayed
from cs336_systems.report.sections.kernels.findings import findings
from cs336_systems.report.sections.kernels.what_if import proposals, what_if_section
from cs336_systems.studies.ceilings_files import NO_CEILINGS, load_ceilings
from tests.analysis.kernels.test_replay import recorded, simulated
from tests.committed import DATA, committed_directories
from tests.report.reading import csv_rows
from tests.report.sections.kernels.profiles import make_cpu_profile, make_entry, make_profile, numbers

PLAIN = RunConfig(size="small", model=SIZES["small"], device=Device.CUDA)


def of_slow_host() -> Explained:
    """100 launches of 50 ns each, kernels of 10: without launches nothing but the kernels is left."""
    kernel = [10] * 100
    return Explained(profile=recorded(simulated([50] * 100, kernel, 6, 2), kernel), config=PLAIN)


def test_a_slow_host_is_named_by_the_graph_that_spares_it() -> None:
    (entry,) = replayed([of_slow_host()], NO_CEILINGS)
    found = what_if_section([entry])
    assert [row["what_if"] for row in csv_rows(found)][:2] == ["as it is", "launches for free, AdamW fused"]
    assert csv_rows(found)[1]["flags"].endswith("--cuda-graph --optimizer fused")
    as_it_is, free = numbers(found, "changed_step_ms")[:2]
    assert as_it_is == pytest.approx(1e-6 * (100 * 50 + 6 + 10 + 40))
    assert free < 0.3 * as_it_is
    assert csv_rows(found)[0]["limited_by"] == "the CPU"
    (text,) = [text for text in findings(entry.profile, entry.config, entry.what_if) if "It would take" in text]
    assert "--cuda-graph --optimizer fused" in text


def test_the_host_of_a_run_without_a_profiler_counts_where_launches_limit_it() -> None:
    """Launching takes 3,000 ns without the profiler, and 5,000 under it."""
    slow = of_slow_host()
    entry = make_entry(slow.profile)
    bound = RunWarning(code=WarningCode.LAUNCH_BOUND, message="")
    plain = replace(entry.plain, host_times_s=(3e-6, 3e-6), warnings=(bound,))
    (found,) = replayed([replace(entry, plain=plain)], NO_CEILINGS)
    assert found.what_if.step_s == pytest.approx(1e-9 * (100 * 30 + 6 + 10 + 40))
    assert not found.what_if.is_host_of_profiler
    (unknown,) = replayed([replace(entry, plain=None)], NO_CEILINGS)
    assert unknown.what_if.step_s == pytest.approx(1e-9 * (100 * 50 + 6 + 10 + 40))
    assert unknown.what_if.is_host_of_profiler


def test_a_profile_without_single_kernels_has_no_table_and_proposes_without_numbers() -> None:
    (entry,) = replayed([make_entry(make_profile())], NO_CEILINGS)
    assert what_if_section([entry]).tables == ()
    assert not any("It would take" in text for text in findings(entry.profile, entry.config, entry.what_if))
    assert any(text.startswith("What may shorten it") for text in findings(entry.profile, entry.config, entry.what_if))


def test_a_trace_of_a_cpu_is_not_replayed() -> None:
    found = what_if(make_cpu_profile())
    assert found.step_s is None
    assert {each.remedy for each in found.changed}.isdisjoint({Remedy.GRAPHS, Remedy.TF32, Remedy.BF16})


def ways(*gains_ms: tuple[Remedy, float | None]) -> WhatIf:
    """Of a step of 100 ms."""
    changed = tuple(
        Counterfactual(
            remedy=remedy,
            step_s=None if gain is None else 0.1 - gain / 1e3,
            limit=None if gain is None else Limit.DEVICE,
        )
        for remedy, gain in gains_ms
    )
    return WhatIf(step_s=0.1, limit=Limit.DEVICE, is_host_of_profiler=False, changed=changed)


def test_only_gains_that_matter_are_told_with_their_flags() -> None:
    found = ways((Remedy.BF16, 60), (Remedy.COMPILE, 5), (Remedy.ATTENTION, 0.5), (Remedy.TF32, None))
    text = proposals(found, PLAIN, {Remedy.TF32})
    assert "It would take 40.0 ms with products in bf16 (--mixed-precision; 60.0 % less)" in text
    assert "95.0 ms with neighbouring kernels fused (--compile default; 5.00 % less)." in text
    assert "attention" not in text
    assert text.endswith("by how much this profile does not tell: --precision tf32.")
    assert "--precision tf32" not in proposals(found, PLAIN, set())
    nothing = proposals(ways((Remedy.GRAPHS, 0.1)), replace(PLAIN, optimizer=OptimizerKind.FUSED), set())
    assert nothing == "Nothing of this would shorten the step by 1 %: launches for free."
    assert "--" not in proposals(found, None, {Remedy.TF32})


@pytest.mark.parametrize(
    ("remedy", "changes", "flags"),
    [
        (Remedy.COMPILE, {}, "--compile default"),
        (Remedy.ATTENTION, {}, "--attention sdpa"),
        (Remedy.OPTIMIZER, {}, "--optimizer fused"),
        (Remedy.GRAPHS, {}, "--cuda-graph --optimizer fused"),
        (Remedy.GRAPHS, {"optimizer": OptimizerKind.FUSED, "warmup_steps": 1}, "--cuda-graph --warmup-steps 4"),
        (Remedy.TF32, {}, "--precision tf32"),
        (Remedy.BF16, {"precision": Precision.TF32}, "--mixed-precision"),
        (Remedy.OVERLAP, {"parallel": Parallel.DDP_FLAT, "ranks": 2}, "--parallel ddp-overlap"),
    ],
)
def test_flags_of_a_change_make_a_valid_run_that_has_it(remedy: Remedy, changes: dict, flags: str) -> None:
    config = replace(PLAIN, **changes)
    assert remedy.named_for(config) == flags
    other = remedy.applied_to(config)
    assert other is not None
    assert other != config
    assert remedy is Remedy.OVERLAP or not remedy.is_open_to(other)


def test_what_a_run_cannot_have_is_not_open_to_it() -> None:
    assert not Remedy.GRAPHS.is_open_to(replace(PLAIN, precision=Precision.FP16))
    assert not Remedy.ATTENTION.is_open_to(replace(PLAIN, model=replace(PLAIN.model, attention=Attention.SDPA)))
    assert not Remedy.OVERLAP.is_open_to(PLAIN)


# committed runs: a profile of a step tells what committed runs with the change have measured

WITHOUT_TIME = ("seed", "warmup_steps", "measured_steps", "ranges", "repeat")
"""Settings by which runs of one step may differ."""
SAME_MACHINE = 0.1
"""Largest relative difference of the unchanged step in both sweeps: more is that of another machine's CPU."""


@dataclass(frozen=True)
class Pair:
    """A change that was replayed, and measured."""

    name: str
    remedy: Remedy
    replayed_s: float
    replayed_gain_s: float
    measured_s: float
    gain_s: float

    @property
    def is_right(self) -> bool:
        """Within 10 % of the step or 20 % of the gain, whichever is larger."""
        return abs(self.replayed_s - self.measured_s) <= max(0.1 * self.measured_s, 0.2 * abs(self.gain_s))


def measured_steps(directory: Path) -> dict[RunConfig, float]:
    """Median of the median steps of each configuration of a sweep."""
    found: dict[RunConfig, list[float]] = {}
    for record in load_records(directory / "runs")[0]:
        if is_published(record):
            measured = record.measurement(Phase.STEP)
            assert measured is not None
            found.setdefault(record.config.with_defaults(*WITHOUT_TIME), []).append(measured.median_s)
    return {config: statistics.median(times_s) for config, times_s in found.items()}


def is_published(record: RunRecord) -> bool:
    """Whether it has the time of a step without a profiler that does not wait for its launches."""
    config, codes = record.config, {warning.code for warning in record.warnings}
    is_plain = config.profiler is Profiler.NONE and not config.sync_phases
    return record.status is Status.OK and is_plain and WarningCode.LAUNCH_BOUND not in codes


@cache
def pairs() -> tuple[Pair, ...]:
    """All changes of committed profiles that a sweep has measured; those of memory have too few steps for times."""
    ceilings = load_ceilings(DATA / "ceilings")
    directories = [path for path in committed_directories() if (path / "runs").is_dir()]
    sweeps = {str(path): measured_steps(path) for path in directories if path.parent.name != "memory_profiles"}
    found: list[Pair] = []
    for directory in directories:
        if (directory / "kernels").is_dir():
            for entry in replayed(load_profiled(load_records(directory / "runs")[0], directory), ceilings):
                found += pairs_of(f"{directory.name} {entry.config.label}", entry, sweeps)
    return tuple(found)


def pairs_of(name: str, entry: Explained, sweeps: dict[str, dict[RunConfig, float]]) -> Iterator[Pair]:
    found, config, plain = entry.what_if, entry.config, entry.plain
    if found is None or found.step_s is None or config is None or plain is None:
        return
    now, own = config.unprofiled.with_defaults(*WITHOUT_TIME), plain.measurement(Phase.STEP)
    assert own is not None
    for each in found.changed:
        other = each.remedy.applied_to(config.unprofiled)
        changed = None if other is None else other.with_defaults(*WITHOUT_TIME)
        # on one kind of GPU, a step that its launches do not limit takes as long in each sweep
        known = {} if WarningCode.LAUNCH_BOUND in {w.code for w in plain.warnings} else {now: own.median_s}
        steps = [
            (before_s, times_s[changed])
            for times_s in sweeps.values()
            if changed in times_s
            and (before_s := (known | times_s).get(now)) is not None
            and abs(before_s / own.median_s - 1) <= SAME_MACHINE
        ]
        if each.step_s is not None and steps:
            gains_s = [before - after for before, after in steps]
            measured_s, gain_s = statistics.median([after for _, after in steps]), statistics.median(gains_s)
            yield Pair(name, each.remedy, each.step_s, found.step_s - each.step_s, measured_s, gain_s)


def test_committed_changes_take_as_long_as_replayed() -> None:
    assert {pair.remedy for pair in pairs()} >= {Remedy.BF16, Remedy.COMPILE, Remedy.ATTENTION, Remedy.OVERLAP}
    assert [pair for pair in pairs() if not pair.is_right] == []


def test_gains_of_committed_changes_are_in_the_order_measured() -> None:
    """Where two differ by more than a percent of the step."""
    for name in {pair.name for pair in pairs()}:
        own = sorted((pair for pair in pairs() if pair.name == name), key=lambda pair: -pair.gain_s)
        for larger in own:
            for smaller in own:
                if larger.gain_s - smaller.gain_s > 0.01 * larger.measured_s:
                    assert larger.replayed_gain_s > smaller.replayed_gain_s, (larger, smaller)
