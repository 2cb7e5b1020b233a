"""Tiny runs and their records, as another machine would make them."""

from dataclasses import replace

from cs336.config import ModelConfig, Phase, RunConfig
from cs336.record import Environment, Identity, Measurement, RunRecord, Status

IDENTITY = Identity(
    device_name="NVIDIA H200", driver="570.1", torch="2.13.0", code="0123456789abcdef"
)
SHAPE = ModelConfig(vocab_size=11, context_length=8, d_model=8, d_ff=16, num_layers=1, num_heads=2)


def grid(count, **changes):
    """`count` runs, no two of which are equal."""
    base = RunConfig(size="custom", model=SHAPE, warmup_steps=2, measured_steps=2)
    return [replace(base, seed=index, **changes) for index in range(count)]


def record_of(config, identity=IDENTITY):
    times = (Measurement(Phase.FORWARD, (0.1, 0.2)), Measurement(Phase.STEP, (0.1, 0.2)))
    environment = Environment(
        identity=identity,
        python="3.12",
        platform="Linux",
        host="host",
        cpu="cpu",
        cpu_count=8,
        torch_threads=8,
        float32_matmul_precision="highest",
        package_version="0",
    )
    return RunRecord(
        config=config,
        status=Status.OK,
        started_at="2026-11-23T00:00:00+00:00",
        measurements=times,
        environment=environment,
    )
