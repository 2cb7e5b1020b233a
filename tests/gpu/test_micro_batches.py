"""Micro-batches and grouped queries on a GPU: the losses of whole batches and of equal heads, with
CUDA graphs too, and peaks of memory as they are foretold.
"""

from dataclasses import replace

import pytest
import torch

from cs336.config import (
    Attention,
    Device,
    ModelConfig,
    OptimizerKind,
    Precision,
    RunConfig,
    SdpaBackend,
)
from cs336.costs.memory import predicted_peak_bytes
from cs336.measure.run import measure
from cs336.model.fast.choose import fastest
from cs336.record import RunRecord, Status
from tests.model.fast.steps import of_losses

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]
SHAPE = ModelConfig(
    vocab_size=8192, context_length=256, d_model=768, d_ff=2048, num_layers=4, num_heads=12
)
WHOLE = RunConfig(
    size="custom",
    model=SHAPE,
    batch_size=8,
    device=Device.CUDA,
    optimizer=OptimizerKind.FUSED,
    warmup_steps=5,
    measured_steps=3,
)
IN_PARTS = replace(WHOLE, batch_size=2, accumulate_steps=4)


def measured(config: RunConfig) -> RunRecord:
    record = measure(config)
    assert record.status is Status.OK, record.failure
    return record


@pytest.mark.parametrize("way", ["eager", "graph", "fast"])
def test_losses_are_those_of_the_whole_batch(way):
    changes = {
        "eager": lambda run: run,
        "graph": lambda run: replace(run, cuda_graph=True),
        "fast": lambda run: fastest(run, torch.cuda.get_device_name()),
    }
    whole, parts = (measured(changes[way](run)) for run in (WHOLE, IN_PARTS))
    dtype = torch.bfloat16 if way == "fast" else torch.float32
    assert parts.losses == pytest.approx(whole.losses, abs=of_losses(WHOLE, dtype))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("kv_heads", [0, 3])
def test_peaks_are_those_foretold(precision, attention, kv_heads):
    """`pytest -m gpu tests/gpu/test_micro_batches.py -s` prints both peaks."""
    model = replace(SHAPE, attention=attention, num_kv_heads=kv_heads)
    config = replace(IN_PARTS, model=model, precision=precision)
    foretold, memory = predicted_peak_bytes(config), measured(config).memory
    assert memory is not None
    print(f"{config.label}: foretold {foretold}, measured {memory.peak_allocated_bytes}")
    assert foretold == pytest.approx(memory.peak_allocated_bytes, rel=0.01)


@pytest.mark.parametrize("backend", SdpaBackend)
def test_every_kernel_of_attention_takes_grouped_queries(backend):
    """Those that PyTorch has for them, or else with keys and values repeated."""
    model = replace(SHAPE, attention=Attention.SDPA, num_kv_heads=3)
    run = replace(WHOLE, model=model, precision=Precision.BF16)
    plain, other = measured(run), measured(replace(run, model=replace(model, sdpa_backend=backend)))
    assert other.losses == pytest.approx(plain.losses, abs=of_losses(run, torch.bfloat16))
