"""Peaks of memory that are foretold of models that nobody here wrote, against those that a GPU
measures.
"""

from dataclasses import replace

import pytest

from cs336.config import SIZES, UNSIZED, Device, OptimizerKind, Precision, RunConfig
from cs336.costs.memory import predicted_peak_bytes
from cs336.costs.time import prepare_forecasts
from cs336.measure.run import measure
from cs336.record import Status
from tests.drawn_models import NAMED

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
