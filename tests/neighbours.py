"""Pairs of valid configurations that differ in one setting alone, for every setting there is: a
new one takes part.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, replace
from enum import StrEnum
from typing import Any

from cs336.config import (
    Attention,
    CompileMode,
    Device,
    ModelConfig,
    OptimizerKind,
    Parallel,
    Precision,
    RunConfig,
)


def make_bases(run: type[RunConfig], model: type[ModelConfig]) -> tuple[RunConfig, ...]:
    """Configurations to begin from; no single one has valid neighbours in all settings, as some
    need others.
    """
    shape = model(context_length=128, d_model=64, d_ff=256, num_layers=2, num_heads=4)
    sdpa = replace(shape, attention=Attention.SDPA)
    plain = run(size="custom", model=shape)
    on_gpu = replace(plain, device=Device.CUDA)
    in_bf16 = replace(on_gpu, precision=Precision.BF16, optimizer=OptimizerKind.FUSED)
    cast_once = replace(in_bf16, cast_once=True)
    fused = replace(cast_once, model=sdpa, fused_blocks=True, checkpoint_blocks=1)
    own_code = {"own_ddp": "mine:DDP", "own_optimizer": "mine:SGD"}
    return (
        on_gpu,
        replace(on_gpu, model=sdpa),
        replace(cast_once, compile=CompileMode.DEFAULT, compile_blocks=True),
        replace(fused, model=replace(sdpa, num_heads=1), fused_loss=True),
        replace(fused, selective_checkpoints=True),
        replace(cast_once, cuda_graph=True),
        replace(plain, parallel=Parallel.DDP_FLAT),
        replace(plain, model_factory="mine:make"),
        replace(on_gpu, parallel=Parallel.OWN, optimizer=OptimizerKind.OWN, **own_code),
    )


def settings_of(config: RunConfig) -> list[tuple[str, "Field[Any]"]]:
    """Every setting, beside `model` for those of the model."""
    run = [("", field) for field in fields(config) if field.name != "model"]
    return run + [("model", field) for field in fields(config.model)]


def other_values(value: object) -> Sequence[object]:
    """What else the setting might be."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, StrEnum):
        return [other for other in type(value) if other is not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, value + 16]
    if isinstance(value, float):
        return [value * 1.0000001 + 1e-9, value / 2 + 0.1]
    return ["pkg.mod:make" if value is None else f"{value}x", "t.npy"]


def replaced(config: RunConfig, where: str, name: str, value: object) -> RunConfig:
    """The configuration with another value of one setting."""
    change: dict[str, Any] = {name: value}
    return (
        replace(config, model=replace(config.model, **change))
        if where
        else replace(config, **change)
    )


def neighbours(
    bases: Sequence[RunConfig], where: str, name: str, **fixed: Any
) -> list[tuple[RunConfig, RunConfig]]:
    """Pairs that differ in this setting alone, one for each base that has any."""
    pairs: dict[RunConfig, tuple[RunConfig, RunConfig]] = {}
    for base in bases:
        values = other_values(getattr(base.model if where else base, name))
        for value in [(0,)] if name == "blocks" else values:
            with contextlib.suppress(ValueError):
                first = replace(base, **fixed)
                second = replaced(first, where, name, value)
                if first != second:
                    pairs.setdefault(base, (first, second))
    return list(pairs.values())


def each_configuration() -> Iterator[RunConfig]:
    """The bases and their neighbours in every setting."""
    bases = make_bases(RunConfig, ModelConfig)
    for where, field in settings_of(bases[0]):
        pairs = neighbours(bases, where, field.name)
        assert pairs, f"no base is valid with another value of {field.name}: add one to make_bases"
        for pair in pairs:
            yield from pair
