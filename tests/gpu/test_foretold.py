"""Peaks of memory that are foretold of models that nobody here wrote, and what is foretold of
compiled steps, against what a GPU measures.
"""

import random
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from cs336.config import (
    SIZES,
    UNSIZED,
    CompileMode,
    Device,
    Mode,
    OptimizerKind,
    Phase,
    Precision,
    RunConfig,
)
from cs336.costs.compiled import predict_step_memory, why_not_foretold
from cs336.costs.memory import predicted_peak_bytes
from cs336.costs.ranks_time import predicted_time
from cs336.costs.time import prepare_forecasts
from cs336.measure.run import measure
from cs336.record import Status
from cs336.studies.ceilings_files import load_ceilings_or_warn
from tests.drawn_models import NAMED
from tests.gpu.drawn_steps import draw

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]
DRAWN = [
    f"tests.drawn_models:{name}" for name in (*NAMED, *(f"of_seed_{seed}" for seed in range(12)))
]
TRANSFORMERS = [
    f"tests.gpu.transformers_models:{name}"
    for name in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3")
]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("factory", [*DRAWN, *TRANSFORMERS])
def test_peaks_are_those_foretold(factory, precision):
    """`pytest -m gpu tests/gpu/test_foretold.py -s -k mixtral` prints both peaks."""
    if factory in TRANSFORMERS:
        pytest.importorskip("transformers")
    config = RunConfig(
        size=UNSIZED,
        model=replace(SIZES["tiny"], context_length=1024),
        batch_size=8,
        device=Device.CUDA,
        precision=precision,
        optimizer=OptimizerKind.FUSED,
        warmup_steps=2,
        measured_steps=2,
        model_factory=factory,
    )
    prepare_forecasts([config], of_users=True)
    foretold = predicted_peak_bytes(config)
    record = measure(config)
    assert record.status is Status.OK, record.failure
    assert record.memory is not None
    measured = record.memory.peak_allocated_bytes
    error = 100 * ((foretold or 0) / measured - 1)
    print(f"{factory} {precision}: foretold {foretold}, measured {measured}: {error:+.2f} %")
    assert foretold == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("seed", range(6))
def test_compiled_steps_are_those_foretold(seed: int) -> None:
    """Drawn ones, eight blocks deep. `-s` prints memory and times; of the host those of each phase,
    as what it takes to call compiled code is not known.
    """
    config = draw(random.Random(f"compiled {seed}"))
    config = replace(
        config,
        size="",
        model=replace(config.model, num_layers=8),
        batch_size=min(config.batch_size, 4),
        mode=Mode.TRAIN,
        compile=CompileMode.DEFAULT,
        warmup_steps=5,
    )
    foretold = predict_step_memory(config)
    assert foretold is not None, why_not_foretold(config)
    record = measure(config)
    assert record.status is Status.OK, record.failure
    memory = record.memory
    assert memory is not None
    pairs = [
        (foretold.peak.allocated_bytes, memory.peak_allocated_bytes),
        (foretold.reserved_bytes, memory.peak_reserved_bytes),
    ]
    curves = load_ceilings_or_warn(Path("data/ceilings")).curves(record.device_name or "")
    time = None if curves is None else predicted_time(config, curves)
    measured_s = {timed.phase: median(timed.times_s) for timed in record.measurements}
    host_s = {timed.phase: median(timed.times_s) for timed in record.host_phases}
    print(config.label, pairs, time, measured_s, host_s, sep="\n")
    for expected, measured in pairs:
        assert expected == pytest.approx(measured, rel=0.03)
    if time is not None:
        assert time.step_s == pytest.approx(measured_s[Phase.STEP], rel=0.2)
