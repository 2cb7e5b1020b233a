"""From the slow way to the fast way, one change at a time: the rungs, and the gate that each must pass.

To add a rung, add a line to `_changes`: its name, what it changes in words, whether it applies, the fields it sets.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cs336_systems.config import (
    Attention,
    CompileMode,
    Device,
    Mode,
    OptimizerKind,
    Precision,
    Profiler,
    RunConfig,
    SdpaBackend,
)
from cs336_systems.costs.accounting import count_parameters
from cs336_systems.costs.hardware import find_device
from cs336_systems.files import LADDER, FileError, encode_json, read_json, write_atomically
from cs336_systems.model.fast.choose import NICE_VOCABULARY, best_sdpa_backend

FORMAT_VERSION = 1
REASON_STEPS = 3
"""Steps that are profiled."""
GATE_STEPS = 20
"""Steps whose losses are compared, from the first."""
MIN_FP8_PARAMETERS = 10**9
"""Smaller models spend on casts what their products save, as those found who measured torchao's fp8."""
MIN_FALL = 1e-3
"""Of the first loss: where the reference falls less, it says nothing."""
BOUNDS: Mapping[Precision, float] = MappingProxyType(
    {
        Precision.FP32: 1e-3,
        Precision.TF32: 2e-3,
        Precision.BF16: 5e-3,
    }
)
"""Largest distance from the reference's losses that passes, as a share of how far these fall, by a rung's precision.

fp32 differs by the order of its sums: 5e-6 at most observed, and repeats of the same on a GPU are not all alike. bf16
has 8 bits: 2e-4 to 2e-3 observed. tf32 has 11: in between. Attention that sees the future is off by 9e-3 to 9e-2,
targets shifted by one by 3e-2 and more, weights that are not updated by 1. (Observed on a CPU, with models of 64 to 512
wide and 2 to 24 deep, 256 to 512 tokens a step, rates about the one below; over 32 tokens rounding averages out less,
and bf16 fails.) What AdamW undoes, a common factor of all gradients, and what hardly shows in 20 steps, a weight decay
forgotten, passes.
"""
FP8_BOUND = 2.5e-2
"""In place of bf16's where products are in fp8, which has 4 bits: 3e-3 to 2.1e-2 observed, as above, with three seeds
for each shape and architecture, but for one of three models 24 deep over 256 tokens: 2.8e-2, which fails (over 1024
tokens such models are at 1.0e-2 to 1.4e-2).

Too wide for attention that sees the future wherever that is off by little: it is the rungs below, which differ from
this one in nothing but the products, that tell it. Casts that are wrong are off by more: without a unit by 0.24 and
more, with one wrong by a tenth by 0.15, with the largest elements cut off by 0.48, with one bit less by 2.7e-2.
"""


def gate_learning_rate(d_model: int) -> float:
    """At which the losses say most: rates for all widths alike make the losses of wide models fall too fast.

    At 1e-3, without a warm-up, rounding alone drives the losses of large models apart, 1e-4 is too much for 24 layers
    256 wide already; at a hundredth of that they hardly fall.
    """
    return 5e-3 / d_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A configuration, and what sets it apart from the one before."""

    name: str
    change: str
    """In words."""
    config: RunConfig


@dataclass(frozen=True, slots=True)
class _Change:
    """How one rung comes from the last."""

    name: str
    words: str
    applies: bool
    fields: Mapping[str, Any]
    """Of the configuration, and their new values."""


def _changes(base: RunConfig, device_name: str | None) -> tuple[_Change, ...]:
    """In order; `cast-once` and `graph` need `fused` before them, `cast-once` also `bf16`, `fused-loss` `blocks`, and
    `fused-blocks` and `fp8` `cast-once`.

    On a CPU there is no AdamW that writes two copies at once, and no tensor core to pad a vocabulary for. A user's
    model is as it is, and may wait for the device, which no graph holds. Where no rule knows the device, PyTorch
    chooses the kernel of fused attention. fp8 is for large models whose sizes fit it, on devices known to have it.
    """
    best = best_sdpa_backend(base.model, base.device, device_name)
    flash = best if best is SdpaBackend.AUTO else SdpaBackend.FLASH
    on_gpu, ours = base.device is Device.CUDA, base.model_factory is None
    awkward = base.model.vocab_size % NICE_VOCABULARY > 0
    is_large = count_parameters(base.model) >= MIN_FP8_PARAMETERS and not base.fp8_misfit

    def fused(backend: SdpaBackend) -> dict[str, Any]:
        return {"model": replace(base.model, attention=Attention.SDPA, sdpa_backend=backend)}

    return (
        _Change("tf32", "fp32 products in TF32", on_gpu, {"precision": Precision.TF32}),
        _Change("bf16", "autocast to bf16", True, {"precision": Precision.BF16}),
        _Change("compile", "torch.compile, model and loss as one", True, {"compile": CompileMode.DEFAULT}),
        _Change("attention", f"fused attention ({flash})", ours, fused(flash)),
        _Change(
            "vocabulary", f"vocabulary a multiple of {NICE_VOCABULARY}", on_gpu and ours and awkward,
            {"pad_vocabulary": NICE_VOCABULARY},
        ),
        _Change("fused", "fused AdamW", True, {"optimizer": OptimizerKind.FUSED}),
        _Change("cudnn", "attention by cuDNN", ours and best is SdpaBackend.CUDNN, fused(SdpaBackend.CUDNN)),
        _Change("cast-once", "bf16 weights beside fp32 masters", on_gpu and ours, {"cast_once": True}),
        _Change("graph", "each phase of the step a CUDA graph", on_gpu and ours, {"cuda_graph": True}),
        _Change("blocks", "compiled block by block", ours, {"compile_blocks": True}),
        _Change("fused-loss", "logits become their gradient in place", on_gpu and ours, {"fused_loss": True}),
        _Change(
            "fused-blocks", "norms add their branch, GELU its bias; embedding's gradient in one pass", on_gpu and ours,
            {"fused_blocks": True},
        ),
        _Change("fp8", "block products in fp8", on_gpu and ours and is_large and _has_fp8(device_name), {"fp8": True}),
    )  # fmt: skip


def _has_fp8(device_name: str | None) -> bool:
    device = None if device_name is None else find_device(device_name)
    return device is not None and device.fp8_peak_flops_per_s is not None


def rungs(base: RunConfig, device_name: str | None = None) -> tuple[Rung, ...]:
    """The ladder for the shape, batch, data and steps of `base` on the device of that name (None: not known).

    Whatever `base` itself has of what the rungs add is taken away first. What does not apply is left out.
    """
    plain = replace(base.model, attention=Attention.NAIVE, sdpa_backend=SdpaBackend.AUTO)
    config = replace(
        base.without_shortcuts, model=plain, mode=Mode.TRAIN, precision=Precision.FP32, optimizer=OptimizerKind.FOREACH,
        sync_phases=False,
    )  # fmt: skip
    found = [Rung(name="fp32", change="true fp32, eager, attention written out, foreach AdamW", config=config)]
    for change in _changes(config, device_name):
        if change.applies:
            config = replace(config, **change.fields)
            found.append(Rung(name=change.name, change=change.words, config=config))
    return tuple(found)


def chosen(ladder: Sequence[Rung], names: Sequence[str]) -> tuple[Rung, ...]:
    """Those rungs of the ladder, the first always among them; what was left out between two is the later one's change.

    Raises ValueError for a name that is none of the ladder's.
    """
    known = [rung.name for rung in ladder]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no rung {unknown[0]!r} here; there are: {', '.join(known)}")
    found: list[Rung] = []
    changes: list[str] = []
    for rung in ladder:
        changes.append(rung.change)
        if not found or rung.name in names:
            found.append(replace(rung, change=", ".join(changes)))
            changes = []
    return tuple(found)


def reference(first: Rung) -> RunConfig:
    """What gives the losses of the first rung where that does not fit into memory: the same step, activations computed
    again. Raises ValueError for a user's own model."""
    return replace(first.config, checkpoint_blocks=1)


def reason_run(rung: Rung) -> RunConfig:
    """The rung under torch.profiler; a few steps are enough, all being alike."""
    measured_steps = min(REASON_STEPS, rung.config.measured_steps)
    return replace(rung.config, profiler=Profiler.KINETO, measured_steps=measured_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Whether a rung computes what the first one does: its losses against the reference's, at each of GATE_STEPS."""

    bound: float
    """As all distances, a share of how far the reference's loss falls."""
    loss: float | None = None
    """At the last of the steps; None unless finite."""
    last: float | None = None
    """Distance at the last of the steps."""
    largest: float | None = None
    """Distance at any of the steps."""
    missing: str = ""
    """Why there is no verdict; empty where there is one."""

    @property
    def passed(self) -> bool | None:
        """None where there is no verdict. Losses that are not finite fail."""
        return None if self.missing else self.largest is not None and self.largest <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class _LadderFile:
    rungs: tuple[Rung, ...]
    format_version: int = FORMAT_VERSION


Losses = Sequence[float | None]
"""Of one process, step by step; None where not finite."""


def judge(
    precision: Precision, processes: Sequence[Losses], references: Sequence[Losses], *, fp8: bool = False
) -> Gate:
    """The gate for a rung of that precision, by the losses of its processes, of which the worst counts.

    The reference is the mean of its own processes.
    """
    bound = FP8_BOUND if fp8 else BOUNDS[precision]
    expected = _mean_losses(references)
    if expected is None:
        return Gate(bound=bound, missing=f"the reference has no {GATE_STEPS} finite losses")
    fall = expected[0] - expected[-1]
    if fall < MIN_FALL * abs(expected[0]):
        return Gate(bound=bound, missing=f"the reference's loss falls by less than {MIN_FALL:.1%} of itself")
    if not processes or any(len(losses) < GATE_STEPS for losses in processes):
        return Gate(bound=bound, missing=f"there are no {GATE_STEPS} losses")
    mean = _mean_losses(processes)
    if mean is None:
        return Gate(bound=bound)
    distances = [
        [abs(loss - wanted) / fall for loss, wanted in zip(losses, expected, strict=False) if loss is not None]
        for losses in processes
    ]
    return Gate(
        bound=bound,
        loss=mean[-1],
        last=max(each[-1] for each in distances),
        largest=max(max(each) for each in distances),
    )


def _mean_losses(processes: Sequence[Losses]) -> list[float] | None:
    """Step by step over the processes; None unless each has GATE_STEPS finite losses."""
    if not processes or any(len(losses) < GATE_STEPS for losses in processes):
        return None
    steps = zip(*(losses[:GATE_STEPS] for losses in processes), strict=True)
    finite = [[loss for loss in step if loss is not None] for step in steps]
    if any(len(step) < len(processes) for step in finite):
        return None
    return [statistics.fmean(step) for step in finite]


def write_ladder(ladder: Sequence[Rung], path: Path) -> None:
    """Write the rungs as JSON, by which the records can be told apart later."""
    write_atomically(path, encode_json(_LadderFile(rungs=tuple(ladder))))


def read_ladder(path: Path) -> tuple[Rung, ...]:
    """The rungs in `path`; raise FileError where there are none."""
    found = read_json(path, _LadderFile, LADDER, version=FORMAT_VERSION, error=FileError).rungs
    if not found:
        raise FileError(path, "a ladder needs at least one rung, found none")
    return found
