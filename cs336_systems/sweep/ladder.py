"""The ladder: rungs from the slow way to the fast way, one change at a time, and the gate that each
rung must pass.

To add a rung, add a change to `_changes`: its name, what it changes in words, whether it applies,
its new settings.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..config import (
    PACKED_MULTIPLE,
    SIZES,
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
from ..costs.accounting import count_parameters
from ..costs.hardware import find_device
from ..files import LADDER, FileError, encode_json, read_json, write_atomically
from ..model.fast.choose import (
    NICE_VOCABULARY,
    best_sdpa_backend,
    can_fuse_activations,
    can_pack_attention,
)

FORMAT_VERSION = 1
REASON_STEPS = 3
"""Number of profiled steps of a rung."""
GATE_STEPS = 20
"""Number of first steps whose losses are compared."""
MIN_FP8_PARAMETERS = 10**9
"""Least parameter count for fp8: in smaller models casts cost what matmuls gain (measurements of
torchao's fp8).
"""
MIN_FALL = 1e-3
"""Least fall of the reference's loss, as a share of the first loss; with a smaller fall there is
no verdict.
"""
BOUNDS: Mapping[Precision, float] = MappingProxyType(
    {Precision.FP32: 1e-3, Precision.TF32: 2e-3, Precision.BF16: 5e-3}
)
"""By precision, the largest distance from the reference's losses that passes, as a share of how far
these fall.

In fp32 losses differ by the order of sums, by 5e-6 at most, and repeats on a GPU are not all alike.
In bf16, which has 8 significant bits, 2e-4 to 2e-3 was observed; tf32, which has 11, lies between.
Defects lie farther off: attention that sees the future by 9e-3 to 9e-2, targets shifted by one by
3e-2 and more, weights that are not updated by 1. (Observed on a CPU, with models of width 64 to 512
and depth 2 to 24, 256 to 512 tokens per step, and learning rates about the one below. With 32
tokens per step rounding averages out less, and bf16 fails.) The gate does not find defects that
AdamW undoes, such as a common factor of all gradients, or that hardly show in 20 steps, such as a
missing weight decay.
"""
FP8_BOUND = 2.5e-2
"""The bound for rungs whose matmuls are in fp8, in place of bf16's. fp8 has 4 significant bits.

Under the conditions above, with three seeds for each shape and architecture, 3e-3 to 2.1e-2 was
observed. Only one of three models of depth 24 over 256 tokens was at 2.8e-2, which fails; over 1024
tokens such models are at 1.0e-2 to 1.4e-2.

The bound is too wide to always find attention that sees the future; the gate finds that at the
earlier rungs, which differ from this one in their matmuls only. Wrong casts lie farther off:
without a unit by 0.24 and more, with a unit wrong by a tenth by 0.15, with the largest elements
clipped by 0.48, with one bit less by 2.7e-2.
"""


def gate_learning_rate(d_model: int) -> float:
    """The learning rate at which losses distinguish best between a right step and a wrong one.

    The rate falls with the width, because at the same rate the losses of wide models would fall too
    fast. At 1e-3, without a learning-rate warm-up, rounding alone drives the losses of large models
    apart, and even 1e-4 is too much for 24 layers of width 256; at a hundredth of that the losses
    hardly fall.
    """
    return 5e-3 / d_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A configuration, and how it differs from the rung before."""

    name: str
    change: str
    """The difference in words."""
    config: RunConfig


class _Change(NamedTuple):
    """The step from one rung to the next."""

    name: str
    words: str
    applies: bool
    fields: Mapping[str, Any]
    """Fields of the configuration, and their new values."""


def _fused_attention(base: RunConfig, backend: SdpaBackend) -> dict[str, Any]:
    """The settings that replace naive attention by PyTorch's fused attention with this backend."""
    return {"model": replace(base.model, attention=Attention.SDPA, sdpa_backend=backend)}


def _suits_fp8(base: RunConfig, device_name: str | None) -> bool:
    """Whether the model is large and its sizes fit fp8, and the device is known to have it."""
    if count_parameters(base.model) < MIN_FP8_PARAMETERS or base.fp8_misfit:
        return False
    device = None if device_name is None else find_device(device_name)
    return device is not None and device.fp8_peak_flops_per_s is not None


def _changes(base: RunConfig, device_name: str | None) -> Iterator[_Change]:
    """All changes in their order, including those that do not apply here.

    What a change needs before it: `cast-once` and `graph` need `fused`; `cast-once` also `bf16`;
    `fused-loss` needs `blocks`; `fused-blocks`, `split`, `fp8` and `moments` need `cast-once`;
    `activations`, `packed` and `stream` need `fused-blocks`. A CPU has no fused AdamW that also
    writes copies, and no tensor cores that need a padded vocabulary. A user's own model is not
    changed inside, and it may wait for the device, which a CUDA graph cannot record. If no rule
    knows the device, PyTorch chooses the kernel of fused attention. fp8 is for large models whose
    sizes fit it, on devices known to have it.
    """
    on_gpu, ours = base.device is Device.CUDA, base.model_factory is None
    on_gpu_ours = on_gpu and ours
    yield _Change("tf32", "fp32 matmuls in TF32", on_gpu, {"precision": Precision.TF32})
    yield _Change("bf16", "autocast to bf16", True, {"precision": Precision.BF16})
    words = "torch.compile, model and loss as one"
    yield _Change("compile", words, True, {"compile": CompileMode.DEFAULT})

    best = best_sdpa_backend(base.model, base.device, device_name)
    flash = best if best is SdpaBackend.AUTO else SdpaBackend.FLASH
    fields = _fused_attention(base, flash)
    yield _Change("attention", f"fused attention ({flash})", ours, fields)
    words = f"vocabulary padded to a multiple of {NICE_VOCABULARY}"
    applies = on_gpu_ours and base.model.vocab_size % NICE_VOCABULARY > 0
    yield _Change("vocabulary", words, applies, {"pad_vocabulary": NICE_VOCABULARY})
    yield _Change("fused", "fused AdamW", True, {"optimizer": OptimizerKind.FUSED})
    applies = ours and best is SdpaBackend.CUDNN
    fields = _fused_attention(base, SdpaBackend.CUDNN)
    yield _Change("cudnn", "attention by cuDNN", applies, fields)

    copies = on_gpu_ours and base.model.d_model % PACKED_MULTIPLE == 0
    yield _Change("cast-once", "bf16 weights beside fp32 masters", copies, {"cast_once": True})
    words = "each phase of the step a CUDA graph"
    yield _Change("graph", words, on_gpu_ours, {"cuda_graph": True})
    yield _Change("blocks", "compiled block by block", ours, {"compile_blocks": True})
    words = "logits become their gradient in place"
    yield _Change("fused-loss", words, on_gpu_ours, {"fused_loss": True})
    words = "norms add their branch, GELU its bias; embedding's gradient in one pass"
    yield _Change("fused-blocks", words, copies, {"fused_blocks": True})
    words = "masters stored as their copies and remainders"
    yield _Change("split", words, copies, {"split_masters": True})
    yield _Change("embedding", "embedding in bf16", copies, {"bf16_embedding": True})
    applies = copies and can_fuse_activations(base.model, device_name)
    words = "GELU or SwiGLU within the products"
    yield _Change("activations", words, applies, {"fused_activations": True})
    applies = copies and can_pack_attention(base.model, device_name)
    words = "attention by FlashAttention 4, q, k and v side by side"
    yield _Change("packed", words, applies, {"packed_attention": True})
    applies = on_gpu_ours and _suits_fp8(base, device_name)
    fields = {"fp8": True, "fused_activations": False}
    yield _Change("fp8", "block products in fp8", applies, fields)
    yield _Change("stream", "residual stream in bf16", copies, {"bf16_stream": True})
    yield _Change("moments", "AdamW's moments in bf16", copies, {"bf16_moments": True})


_ALL_CHANGES = tuple(_changes(RunConfig(size="tiny", model=SIZES["tiny"]), None))
RUNG_NAMES = ("fp32", *(change.name for change in _ALL_CHANGES))
"""Names of all rungs in their order, including those that apply to some configurations only."""
CHANGED = frozenset[str]().union(*(change.fields for change in _ALL_CHANGES))
"""Settings that some rung changes."""


def rungs(base: RunConfig, device_name: str | None = None) -> tuple[Rung, ...]:
    """The ladder for the shape, batch, data and steps of `base` on the device of that name (None if
    not known).

    Changes that `base` has already are undone first. Changes that do not apply are left out.
    """
    plain = replace(base.model, attention=Attention.NAIVE, sdpa_backend=SdpaBackend.AUTO)
    config = replace(
        base.without_shortcuts,
        model=plain,
        mode=Mode.TRAIN,
        precision=Precision.FP32,
        optimizer=OptimizerKind.FOREACH,
        sync_phases=False,
    )
    attention = "" if config.model_factory else "attention written out, "  # theirs was not seen
    words = f"true fp32, eager, {attention}foreach AdamW"
    rungs = [Rung(name="fp32", change=words, config=config)]
    for change in _changes(config, device_name):
        if change.applies:
            config = replace(config, **change.fields)
            rungs.append(Rung(name=change.name, change=change.words, config=config))
    return tuple(rungs)


def chosen(ladder: Sequence[Rung], names: Sequence[str]) -> tuple[Rung, ...]:
    """The first rung and those named; the change of a rung includes the changes of rungs left out
    before it.

    Raises ValueError for a name that the ladder does not have, and says so if other ladders have
    it.
    """
    known = [rung.name for rung in ladder]
    if unknown := [name for name in names if name not in known]:
        why = ""
        if unknown[0] in RUNG_NAMES:
            why = " for this model, on this device and with what is installed"
        raise ValueError(f"there is no rung {unknown[0]!r}{why}; there are: {', '.join(known)}")
    rungs: list[Rung] = []
    changes: list[str] = []
    for rung in ladder:
        changes.append(rung.change)
        if not rungs or rung.name in names:
            rungs.append(replace(rung, change=", ".join(changes)))
            changes = []
    return tuple(rungs)


def reason_run(rung: Rung) -> RunConfig:
    """The rung under torch.profiler, with few steps, because all steps are alike."""
    measured_steps = min(REASON_STEPS, rung.config.measured_steps)
    return replace(rung.config, profiler=Profiler.KINETO, measured_steps=measured_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Whether a rung computes what the first does: its losses compared with the reference's at
    each of GATE_STEPS.
    """

    bound: float
    """Largest distance that passes; all distances are shares of the fall of the reference's
    loss.
    """
    loss: float | None = None
    """Loss at the last of the steps; None unless finite."""
    last: float | None = None
    """Distance at the last of the steps."""
    largest: float | None = None
    """Distance at any of the steps."""
    missing: str = ""
    """Why there is no verdict; empty if there is one."""

    @property
    def passed(self) -> bool | None:
        """None without a verdict. Losses that are not finite fail."""
        if self.missing:
            return None
        return self.largest is not None and self.largest <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class _LadderFile:
    """Content of the JSON file that `write_ladder` writes."""

    rungs: tuple[Rung, ...]
    format_version: int = FORMAT_VERSION


Losses = Sequence[float | None]
"""Losses of one process, step by step; None for one that is not finite."""


def judge(
    precision: Precision,
    processes: Sequence[Losses],
    references: Sequence[Losses],
    *,
    fp8: bool = False,
) -> Gate:
    """The gate of a rung of this precision, from the losses of its worst process and the
    reference's mean losses.
    """
    bound = FP8_BOUND if fp8 else BOUNDS[precision]
    expected = _mean_losses(references)
    if expected is None:
        return Gate(bound=bound, missing=f"the reference has no {GATE_STEPS} finite losses")
    fall = expected[0] - expected[-1]
    if fall < MIN_FALL * abs(expected[0]):
        return Gate(
            bound=bound, missing=f"the reference's loss falls by less than {MIN_FALL:.1%} of itself"
        )
    if not processes or any(len(losses) < GATE_STEPS for losses in processes):
        return Gate(bound=bound, missing=f"there are no {GATE_STEPS} losses")
    mean = _mean_losses(processes)
    if mean is None:
        return Gate(bound=bound)
    last = largest = 0.0
    for losses in processes:
        known = [loss for loss in losses[:GATE_STEPS] if loss is not None]
        distances = [abs(loss - other) / fall for loss, other in zip(known, expected, strict=True)]
        last = max(last, distances[-1])
        largest = max(largest, *distances)
    return Gate(bound=bound, loss=mean[-1], last=last, largest=largest)


def _mean_losses(processes: Sequence[Losses]) -> list[float] | None:
    """The mean of each step's loss over the processes; None unless each has GATE_STEPS finite
    losses.
    """
    if not processes or any(len(losses) < GATE_STEPS for losses in processes):
        return None
    steps = zip(*(losses[:GATE_STEPS] for losses in processes), strict=True)
    finite = [[loss for loss in step if loss is not None] for step in steps]
    if any(len(step) < len(processes) for step in finite):
        return None
    return [statistics.fmean(step) for step in finite]


def write_ladder(ladder: Sequence[Rung], path: Path) -> None:
    """Write the rungs as JSON, from which a report knows the rung of each record."""
    write_atomically(path, encode_json(_LadderFile(rungs=tuple(ladder))))


def read_ladder(path: Path) -> tuple[Rung, ...]:
    """The rungs in `path`; raise FileError if there are none."""
    rungs = read_json(path, _LadderFile, LADDER, version=FORMAT_VERSION, error=FileError).rungs
    if not rungs:
        raise FileError(path, "a ladder needs at least one rung, found none")
    return rungs
