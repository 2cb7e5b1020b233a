"""Steps in fp8 that are drawn, to score forecasts of time and peak on shapes for which nothing was
chosen.

`pytest -m gpu tests/gpu/test_fp8_steps.py -s` prints each step's error.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cs336.commands.configure import NamedGpu, make_fast_config
from cs336.config import Arch, Device, Phase, RunConfig
from cs336.costs.curves import Curves
from cs336.costs.fast_memory import FastMemory
from cs336.costs.hardware import find_device
from cs336.costs.memory import predicted_peak_bytes
from cs336.costs.time import prepare_forecasts, step_time
from cs336.record import RunRecord, Status
from cs336.studies.ceilings_files import NO_CEILINGS_HERE, data_sheet_curves
from cs336.sweep.run import run_sweep
from tests.faults.harness import Witness

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(900)]
SEED, COUNT = 628, 6
MOST_BYTES = 60 * 2**30
FP8_CAPABILITY = (8, 9)
LEAST_INSIDE = 4
"""Of six steps whose intervals have nine of ten each, fewer are inside in 1.6 % of all draws."""


def drawn(gpu_name: str) -> Iterator[RunConfig]:
    """Training steps as --fast --fp8 computes them, from GPT-2's width to that of 2.7B."""
    rng = random.Random(SEED)
    kept = 0
    while kept < COUNT:
        heads, d_head = rng.randint(6, 32), rng.choice((64, 80, 128))
        shape = {
            "arch": rng.choice([*Arch]),
            "vocab_size": rng.choice((10_000, 32_000, 50_257)),
            "context_length": 128 * rng.randint(2, 16),
            "num_layers": rng.randint(6, 32),
            "num_heads": heads,
            "d_model": heads * d_head,
            "d_ff": 128 * round(rng.uniform(2, 4.5) * heads * d_head / 128),
        }
        asked = {"fp8": True, "checkpoint_blocks": 0, "batch_size": rng.randint(1, 8)}
        if not 768 <= heads * d_head <= 2560 or heads * d_head % 128:
            continue
        config = make_fast_config(
            Device.CUDA, asked, NamedGpu(gpu_name), size="small", **asked, **shape
        )
        if FastMemory(config).peak_bytes < MOST_BYTES:
            kept += 1
            yield replace(config, warmup_steps=6, measured_steps=10)


def score(config: RunConfig, record: RunRecord, curves: Curves) -> bool:
    """Print the errors of both forecasts, and return whether the time lies in its interval."""
    assert record.status is Status.OK, record.failure
    step, time = record.measurement(Phase.STEP), step_time(config, curves)
    assert step is not None
    assert time is not None
    assert time.low_s is not None
    assert time.high_s is not None
    assert record.memory is not None
    peak_bytes, foretold_bytes = record.memory.peak_allocated_bytes, predicted_peak_bytes(config)
    assert foretold_bytes is not None
    print(
        f"{config.label}: step {1e3 * step.median_s:.2f} ms, foretold {1e3 * time.step_s:.2f} "
        f"({100 * (time.step_s / step.median_s - 1):+.1f} %, {1e3 * time.low_s:.2f} to "
        f"{1e3 * time.high_s:.2f}); peak {peak_bytes / 2**30:.2f} GiB, foretold "
        f"{100 * (foretold_bytes / peak_bytes - 1):+.2f} %"
    )
    assert foretold_bytes == pytest.approx(peak_bytes, rel=0.03)
    return time.low_s <= step.median_s <= time.high_s


def test_drawn_steps_in_fp8_are_as_foretold(tmp_path):
    """Times by the ceilings that come with the program, or else the data sheet's."""
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a GPU with matmuls in fp8")
    name = torch.cuda.get_device_name()
    configs = list(drawn(name))
    prepare_forecasts(configs)
    curves, device = NO_CEILINGS_HERE.curves(name), find_device(name)
    if curves is None and device is not None:
        curves = data_sheet_curves(device)
    if curves is None:
        pytest.skip("the rates of this device are not known")
    records = run_sweep(configs, tmp_path, Witness(), timeout_s=300).records
    by_key = {record.config.key: record for record in records}
    inside = [score(config, by_key[config.key], curves) for config in configs]
    assert sum(inside) >= LEAST_INSIDE
