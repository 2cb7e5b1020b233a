"""What a step would take with changes: tables and sentences of known causes."""

from dataclasses import replace

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
    RunConfig,
)
from cs336_systems.costs.ranks_time import predicted_time
from cs336_systems.costs.time import Limit
from cs336_systems.record import Measurement, RunWarning, WarningCode
from cs336_systems.report.sections.kernels.entries import Explained, replayed
from cs336_systems.report.sections.kernels.findings import findings
from cs336_systems.report.sections.kernels.what_if import proposals, what_if_section
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.studies.ceilings_records import Launch
from tests.analysis.kernels.test_replay import recorded, simulated
from tests.report.ceilings import lasting, make_rates
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


@pytest.mark.parametrize(
    ("num_layers", "in_graphs", "slowness", "counted"),
    [(2, False, 1, 1), (2, False, 2, 2), (2, False, 3, 3), (100, False, 2, 1), (100, True, 2, 2)],
)
def test_where_the_host_waits_for_the_device_it_is_as_fast_as_in_forward(
    num_layers: int, in_graphs: bool, slowness: int, counted: int
) -> None:
    """Launching is foretold to take 1,500 ns; in forward this run's host took a multiple of what is foretold.

    Forward of 100 layers has more launches than the queue holds, so that the host waits in forward too, unless they are
    one graph.
    """
    entry = make_entry(of_slow_host().profile)
    model = replace(entry.config.model, num_layers=num_layers)
    config = replace(entry.config, model=model, cuda_graph=in_graphs, optimizer=OptimizerKind.FUSED)
    of_one_launch = predicted_time(config, ceilings_with_launch(1e-9).curves("NVIDIA H200"))
    ceilings = ceilings_with_launch(1e-9 * 1.5e-6 / of_one_launch.launch_s)
    predicted = predicted_time(config, ceilings.curves("NVIDIA H200"))
    forward = Measurement(Phase.FORWARD, (slowness * predicted.host_phases_s[Phase.FORWARD],) * 2)
    plain = replace(entry.plain, config=config, host_times_s=(1.0, 1.0), host_phases=(forward,))
    (found,) = replayed([replace(entry, config=config, plain=plain)], ceilings)
    assert found.what_if.step_s == pytest.approx(1e-9 * (100 * 15 * counted + 6 + 10 + 40))
    (untimed,) = replayed([replace(entry, config=config, plain=replace(plain, host_phases=()))], ceilings)
    assert untimed.what_if.step_s == pytest.approx(1e-9 * (100 * 15 + 6 + 10 + 40))


def ceilings_with_launch(time_s: float) -> Ceilings:
    rates = make_rates()
    launches = (
        replace(cell, timing=lasting(time_s, count=10**6)) if cell.launch is Launch.STEP else cell
        for cell in rates.launches
    )
    return Ceilings((replace(rates, launches=tuple(launches)),))


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
