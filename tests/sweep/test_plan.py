"""The order of a sweep's runs and what it says will not fit, against runs that were measured on
an H200.
"""

import random
from dataclasses import replace

import pytest

from cs336.commands.sweep_plan import make_plan
from cs336.config import SIZES, Attention, CompileMode, Device, Mode, Parallel, RunConfig
from cs336.costs import traces
from cs336.costs.memory import predict_memory
from cs336.record import Status, load_records
from tests.committed import DATA, committed_runs

GIB = 2**30
H200_BYTES = round(139.8 * GIB)
"""What PyTorch said of the H200 in its message when the 10B model ran out of memory there."""


def config(
    size: str = "small", context_length: int = 128, device: Device = Device.CUDA, **fields: object
) -> RunConfig:
    return RunConfig(
        size=size,
        model=replace(SIZES[size], context_length=context_length),
        device=device,
        **fields,
    )


def test_the_smallest_measured_peak_runs_first() -> None:
    """The order of measured peaks is the oracle; runs whose peaks are within the 3 % of a
    prediction may change.
    """
    measured = {
        record.config: record.memory.peak_allocated_bytes
        for name in ("train", "inference")
        for record in load_records(DATA / "e2e_benchmark" / name / "runs")[0]
        if record.memory is not None
    }
    assert len(measured) >= 60
    plan = make_plan(list(measured), H200_BYTES)
    peaks = [measured[found] for found in plan.configs]
    assert sorted(peaks) != list(measured.values())
    assert all(later > 0.97 * max(peaks[: number + 1]) for number, later in enumerate(peaks))
    assert plan.too_large == ()


def test_what_ran_out_of_memory_is_foretold_and_comes_last() -> None:
    statuses = {}
    for runs in committed_runs():
        if runs.parents[1] == DATA / "e2e_benchmark":
            records, _ = load_records(runs)
            statuses |= {record.config: record.status for record in records}
    plain = [
        config
        for config in statuses
        if config.device is Device.CUDA
        and config.compile is CompileMode.NONE
        and config.model_factory is None
    ]
    too_large = {config for config in plain if statuses[config] is Status.OOM}
    assert too_large
    plan = make_plan(plain, H200_BYTES)
    assert set(plan.too_large) == too_large
    assert plan.configs[-len(plan.too_large) :] == plan.too_large


def test_a_compiled_model_is_ordered_as_if_eager_and_never_said_not_to_fit() -> None:
    compiled = config("10B", 512, compile=CompileMode.DEFAULT)
    large, small = config("2.7B"), config()
    plan = make_plan([compiled, large, small], H200_BYTES)
    assert (plan.configs, plan.too_large) == ((small, large, compiled), ())


def test_a_cpu_run_that_the_machine_cannot_hold_comes_last() -> None:
    """AdamW keeps 16 bytes for each of 12.8e9 parameters; both ranks of xl keep a whole model,
    or half of one.
    """
    shared = {"device": Device.CPU, "ranks": 2}
    huge, small = config("10B", device=Device.CPU), config(device=Device.CPU)
    whole, half = (
        config("xl", **shared, parallel=way) for way in (Parallel.DDP_FLAT, Parallel.FSDP)
    )
    own = config("10B", device=Device.CPU, model_factory="package.module:make")
    assert make_plan([huge, whole, own, half, small], 48 * GIB).too_large == (huge, whole)
    compiled = replace(huge, compile=CompileMode.DEFAULT)
    limits = [bool(make_plan([compiled], gib * GIB).too_large) for gib in (47, 48)]
    assert 47 < 4 * 12_832_823_808 / GIB < 48
    assert limits == [True, False], "of a compiled step only the parameters are known"


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_what_a_cpu_cannot_hold_is_known_at_once(layers, tmp_path, monkeypatch) -> None:
    """Drawn steps on machines just too small and just large enough for their tensors, without a
    tape in the cache.
    """
    rng = random.Random(layers)
    settings = {
        "mode": rng.choice([Mode.FORWARD, Mode.FORWARD_BACKWARD]),
        "batch_size": rng.randint(8, 32),
    }
    drawn = config("tiny", rng.randint(200, 2000), Device.CPU, **settings)
    drawn = replace(
        drawn, model=replace(drawn.model, num_layers=layers, attention=rng.choice(list(Attention)))
    )
    needed = predict_memory(drawn).peak.allocated_bytes
    for share, expected in ((0.99, (drawn,)), (1.01, ())):
        monkeypatch.setattr(traces, "_traced", {})
        monkeypatch.setattr(traces, "_cache", lambda share=share: tmp_path / str(share))
        monkeypatch.setattr(traces, "_shipped", lambda _: {})
        assert make_plan([drawn], int(share * needed)).too_large == expected
