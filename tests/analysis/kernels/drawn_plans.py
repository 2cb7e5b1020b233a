"""What a drawn program does, how it names its ranges, and what its file lacks."""

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

Part = StrEnum(
    "Part",
    "FORWARD LOSS BACKWARD WEIGHTS OPTIMIZER ZERO_GRAD CLIP EVALUATION DATA STEP PREFILL DECODE "
    "CLOSURE",
)
"""A part of a program, whether a range of the file names it or not; forward and backward run inside
of the call of the optimizer that is a closure.
"""
PHASES = tuple(Part)[:9]
"""Parts that kernels can be of."""
Pause = StrEnum("Pause", "NOTHING RANGE COLLECTOR ALLOCATION COMPILING WAITING DATA PREPARING")
"""What keeps the host from launching."""


NAMES = tomllib.loads(Path(__file__).with_name("drawn_names.toml").read_text())
STYLES: Mapping[str, Mapping[str, str]] = NAMES["styles"]
UNLISTED = ("iteration", "deepspeed", "short", "words")
"""Styles whose names a reader need not know."""
EARLY = ("lightning", "iteration")
"""Styles whose first batch is taken before the step begins."""


def _of(*choices: object, training: bool = False) -> Any:
    """A field that is drawn from these, for all programs or for training alone; else the first."""
    return field(default=choices[0], metadata={"choices": choices, "training": training})


_trained = partial(_of, training=True)
_SELDOM, _OFTEN = (False, False, False, False, True), (False, False, True)
_HIDES = _trained(None, None, *tuple(Pause)[:5])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a drawn program does, how its ranges are named, and what its file lacks."""

    seed: int
    kind: str
    style: str
    """Whose names the ranges have."""
    limit: str = _of("gpu", "gpu", "host", "data", "copies")
    """What takes longest; `ranks`, if one is slow."""
    is_nsys: bool = _of(False, False, False, True)
    steps: int = _of(4, 2, 3, 5)
    micro_batches: int = _trained(1, 1, 2, 4)
    layers: int = _of(2, 3, 4)
    loader: str = _of(*["", "_SingleProcess", "_MultiProcessing"] * 2, "get_batch")
    """PyTorch's loader, whose range its profiler records, or the range of one's own, or none."""
    zero_grad: str = _trained("", "first", "last")
    fills: bool = _trained(*_OFTEN)
    """Gradients are set to zero by a kernel, instead of being released."""
    optimizer: str = _trained("torch", "torch", "kernels", "plain", "")
    """`torch` has its range, `kernels` only names of kernels, `plain` neither, or none."""
    steps_of_micro: bool = _trained(*_OFTEN)
    """The profiler's step is called after each micro-batch."""
    clips: bool = _trained(*_OFTEN)
    evaluates: bool = _trained(*_SELDOM)
    checkpoints: bool = _trained(*_SELDOM)
    compiled: bool = _of(*_OFTEN)
    graph: str = _of("", "", "step", "", "parts")
    """What is launched as CUDA graphs."""
    side_stream: bool = _trained(*_SELDOM)
    reads_loss: bool = _of(True, True, False)
    reads_in_forward: bool = _of(*_SELDOM)
    queue: int = _of(1024, 1024, 24)
    """Launches that wait for the device before the next one makes the host wait."""
    ranks: int = _trained(1, 1, 1, 1, 4)
    is_sharded: bool = _trained(False, False, True)
    """Ranks gather parameters and scatter gradients, and reduce none."""
    slow_rank: int = _trained(0, 1, 2, 3)
    devices: int = _trained(1, 1, 1, 2)
    modules: bool = _of(False, True)
    hides: Pause | None = _HIDES
    """What keeps the host from launching for milliseconds in each step."""
    around: str = _of("", "", "", "", "epoch 0", "training")
    """A range around the whole program."""
    decoy: str = _of(
        *[""] * 6,
        *("lr_scheduler.step", "log forward pass", "save optimizer state"),
        *("backward compatibility", "data parallel group"),
    )
    """A range after each step whose name has a word of a phase, and which is none."""
    prefetches: bool = _trained(*_SELDOM)
    """Another thread copies the batch and prepares it on the device."""
    is_pageable: bool = _of(False, True)
    """Batches are copied from pageable memory, so that the host waits for them."""
    is_mixed: bool = _of(*_OFTEN)
    """A server's prefill has some decoding in it."""
    cut: tuple[float, float] = _of((0.0, 1.0), (0.0, 1.0), (0.0, 0.8), (0.25, 1.0), (0.3, 0.7))
    """The part of the run, by time, that the profiler records."""
    dropped: str = _of("", "", "", "call", "operator", "range", "kernel")
    """The kind of events that the file loses at random."""
    shift_ns: int = _of(0, 0, 0, 0, -400_000, 3_000_000)
    """How far the device's clock is off."""


def draw(seed: int) -> Plan:
    """The plan of this seed, without what its other parts forbid."""
    random_ = random.Random(seed)
    kind = random_.choices(("training", "inference", "server", "pipeline"), [6, 2, 2, 1])[0]
    drawn: dict[str, Any] = {"style": random_.choice(NAMES["styles_of"][kind])}
    for option in fields(Plan):
        if option.metadata and (kind == "training" or not option.metadata["training"]):
            drawn[option.name] = random_.choice(option.metadata["choices"])
    plan = Plan(seed=seed, kind=kind, **drawn)
    if plan.style == "lightning":
        plan = replace(plan, micro_batches=1, ranks=1, optimizer="torch", graph="", hides=None)
        plan = replace(plan, zero_grad="between", side_stream=False, reads_in_forward=False)
    if plan.is_nsys:
        plan = replace(plan, ranks=1)
    if plan.ranks > 1:
        plan = replace(plan, devices=1, limit=random_.choice(("ranks", plan.limit)))
        if random_.random() < 0.6:
            plan = replace(plan, cut=(0.0, 1.0), dropped="")
    if plan.ranks > 1 or plan.micro_batches > 1:
        plan = replace(plan, graph="")
    can_count = plan.micro_batches > 1 and plan.style in ("torch", "hashes")
    return replace(
        plan,
        reads_in_forward=plan.reads_in_forward and not plan.graph,
        steps_of_micro=plan.steps_of_micro and can_count,
    )
