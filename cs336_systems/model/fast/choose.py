"""The fastest known way to compute the same step on a device, chosen by rule; `cs336 ladder`
measures each choice.

Shape, batch, mode, steps, seed, device and data stay as they are. The result is the same up to
rounding, which `cs336 ladder` checks.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ...config import (
    EAGER_STEPS_BEFORE_GRAPH,
    FLASH_4_HEADS,
    PACKED_MULTIPLE,
    SETTINGS,
    Attention,
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Precision,
    Profiler,
    RunConfig,
    SdpaBackend,
)
from ...costs.fast_memory import FastMemory
from ...costs.hardware import find_device
from ...settings import declared, in_note
from . import packages
from .packages import FLASH_4, OF_PACKAGE, QUACK

NICE_VOCABULARY = 128
"""Multiple to pad a vocabulary to."""
MATMUL_MULTIPLE = 8
"""Elements that tensor cores load at once, 16 bytes; matmuls of other widths are far slower."""
MAX_STREAM_LAYERS = 12
"""Most layers with which a residual stream in bf16 has passed the ladder's gate."""
CUDNN_MAX_HEAD, FLASH_MAX_HEAD = 128, 256
"""Widest head of each backend."""
_CUDNN_DEVICES = re.compile(r"\b(H100|H200|GH200|B200)\b")
_HOPPER = re.compile(r"\b(H20|H100|H200|H800|GH200)\b")


def fastest(
    config: RunConfig, device_name: str | None, is_usable: Callable[[str], bool] | None = None
) -> RunConfig:
    """The fastest known settings for this step on the device with this name (NVML's; None if not
    known).

    `is_usable` says of a package whether it can be used, in the place of `is_installed`.

    On a GPU a model of this program gets what `_of_fast_model` says; a user's own gets what works
    for any: bf16, compilation (unless its parameters are sharded), fused AdamW. A GPU known to have
    no bf16 keeps its precision. On a CPU compilation costs more than it saves and bf16 is seldom
    faster, so both stay as configured.
    """
    optimizer = OptimizerKind.FUSED if config.mode is Mode.TRAIN else config.optimizer
    common = replace(config, optimizer=optimizer)
    has_factory = config.model_factory is not None
    if not has_factory:
        backend = config.model.sdpa_backend
        if backend is SdpaBackend.AUTO:
            backend = best_sdpa_backend(config.model, config.device, device_name)
        model = replace(config.model, attention=Attention.SDPA, sdpa_backend=backend)
        common = replace(common, model=model)
    if config.device is Device.CPU:
        return common
    if has_bf16(device_name):
        common = replace(common, precision=Precision.BF16)
    # other modes capture CUDA graphs themselves, which cannot be part of the step's graphs
    keeps_mode = config.compile is CompileMode.MAX_AUTOTUNE_NO_CUDAGRAPHS
    compile_mode = config.compile if keeps_mode else CompileMode.DEFAULT
    if not has_factory:
        settings = _of_fast_model(config, common.precision, device_name, is_usable)
        return replace(common, compile=compile_mode, **settings)
    if config.parallel.shards_parameters:
        return common
    return replace(common, compile=compile_mode)


def _of_fast_model(
    config: RunConfig,
    precision: Precision,
    device_name: str | None,
    is_usable: Callable[[str], bool] | None,
) -> dict[str, Any]:
    """Settings of the fast model on a GPU, in the place of those of `config`.

    In bf16 weights are cast once, with split masters and, where losses allow it
    (`can_round_stream`), the residual stream in bf16; blocks have fused kernels between their
    matmuls, on Hopper with the packages of `.[fused]` activations within matmuls and, unless
    another kernel of attention is named, FlashAttention 4. If PyTorch's DDP or FSDP shares the
    step, or queries are grouped, weights are not cast. Each phase is a CUDA graph from 4 warm-up
    steps on, and a vocabulary is padded where its size is no multiple of `MATMUL_MULTIPLE`.
    """
    vocabulary_multiple = config.pad_vocabulary
    if vocabulary_multiple == 1 and config.model.vocab_size % MATMUL_MULTIPLE:
        vocabulary_multiple = NICE_VOCABULARY
    is_fp16 = precision is Precision.FP16
    # the memory profiler cannot see inside a graph, and scaling fp16's gradients reads a value
    can_replay = not is_fp16 and config.profiler is not Profiler.MEMORY
    warms_up = config.warmup_steps > EAGER_STEPS_BEFORE_GRAPH
    has_copies = (
        precision is Precision.BF16
        and config.parallel.takes_any_tensor
        and config.model.d_model % PACKED_MULTIPLE == 0
        and not config.model.num_kv_heads  # its q, k and v are one matmul, of three equal parts
    )
    fuses_activations = (
        has_copies
        and not (config.fp8 or config.selective_checkpoints)
        # 8B by fsdp took 765 ms with it, and on another day 749 to 754 without
        and not config.parallel.shards_parameters
        and can_fuse_activations(config.model, device_name, is_usable)
    )
    packs_attention = has_copies and config.packed_attention
    if has_copies and config.model.sdpa_backend is SdpaBackend.AUTO:
        packs_attention = packs_attention or can_pack_attention(
            config.model, device_name, is_usable
        )
    return {
        "compile_blocks": True,
        "pad_vocabulary": vocabulary_multiple,
        "cast_once": has_copies,
        "split_masters": has_copies and config.mode is Mode.TRAIN,
        "fused_loss": not is_fp16,
        "fused_blocks": has_copies,
        "fused_activations": fuses_activations,
        "packed_attention": packs_attention,
        "bf16_embedding": has_copies,
        "bf16_stream": has_copies and can_round_stream(config),
        "cuda_graph": warms_up and can_replay and config.parallel.takes_any_tensor,
    }


def can_round_stream(config: RunConfig) -> bool:
    """Whether a residual stream in bf16 keeps the losses within the ladder's bound.

    It doubles the distance that bf16 has from fp32, which grows with the number of layers: 0.07 %
    of the loss's fall in gpt2 of 12 layers, and 0.54 % in gpt2-xl of 48, where 0.5 % are allowed.
    In fp8, whose bound is 2.5 %, it was 1.8 % in gpt2-xl.
    """
    return config.fp8 or config.model.num_layers <= MAX_STREAM_LAYERS


def has_bf16(device_name: str | None) -> bool:
    """Whether the GPU computes in bf16; an unknown GPU is assumed to be recent, so that it does."""
    device = None if device_name is None else find_device(device_name)
    return device is None or Precision.BF16 in device.peak_flops_per_s


def missing_packages(fast: RunConfig, device_name: str | None) -> Iterator[str]:
    """What a step chosen by --fast does without because a package cannot be used, and why."""
    if fast.device is Device.CPU or fast.model_factory is not None:
        return
    model = fast.model
    if model.sdpa_backend is best_sdpa_backend(model, fast.device, device_name):
        fast = replace(fast, model=replace(model, sdpa_backend=SdpaBackend.AUTO))
    # only the settings of packages are read: checkpoints that were chosen since may exclude others
    ideal = _of_fast_model(fast, fast.precision, device_name, lambda _: True)
    for name, package in OF_PACKAGE.items():
        if not ideal[name] or getattr(fast, name):
            continue
        why = packages.why_unusable(package)
        if why is not None:
            yield (
                f"no {in_note(name, SETTINGS[name], True)}, as {package} {why} (pip install "
                "'.[fused]')"
            )


def can_fuse_activations(
    model: ModelConfig, device_name: str | None, is_usable: Callable[[str], bool] | None = None
) -> bool:
    """Whether QuACK can compute the activation within matmuls: on Hopper, if their width fits."""
    fits = model.d_ff % PACKED_MULTIPLE == 0 and _is_hopper(device_name)
    return fits and (is_usable or packages.is_installed)(QUACK)


def can_pack_attention(
    model: ModelConfig, device_name: str | None, is_usable: Callable[[str], bool] | None = None
) -> bool:
    """Whether attention can be FlashAttention 4's: on Hopper, for its widths of heads."""
    return (
        model.d_head in FLASH_4_HEADS
        and _is_hopper(device_name)
        and (is_usable or packages.is_installed)(FLASH_4)
    )


def _is_hopper(device_name: str | None) -> bool:
    """Whether a GPU of this name is of NVIDIA's Hopper generation; False if unknown."""
    return device_name is not None and bool(_HOPPER.search(device_name))


def best_sdpa_backend(model: ModelConfig, device: Device, device_name: str | None) -> SdpaBackend:
    """The fastest of PyTorch's attention kernels for this shape; auto where no rule knows the
    device or the shape.

    On an H200 cuDNN's kernels take 0.5 to 0.75 of the time of flash, causal, with heads of 64 and
    128 and contexts from 1024 to 32,768. Flash attention needs a GPU that has bf16.
    """
    if device is Device.CPU or device_name is None or model.d_head > FLASH_MAX_HEAD:
        return SdpaBackend.AUTO
    fits_cudnn = model.d_head <= CUDNN_MAX_HEAD and model.d_head % MATMUL_MULTIPLE == 0
    if fits_cudnn and _CUDNN_DEVICES.search(device_name):
        return SdpaBackend.CUDNN
    is_known = find_device(device_name) is not None
    return SdpaBackend.FLASH if is_known and has_bf16(device_name) else SdpaBackend.AUTO


def describe_fast(config: RunConfig) -> str:
    """What is chosen, in one line: `bf16, sdpa attention, cudnn, fused optimizer, ...`."""
    words = [str(config.precision)]
    for part in (config.model, config):
        for field, setting in declared(part):
            is_chosen = setting.chosen_by_fast or setting.is_shortcut
            # precision comes first, and checkpoints last
            is_said = field.name in ("precision", "selective_checkpoints", "keep_hidden")
            value = getattr(part, field.name)
            if value == field.default or is_said:
                continue
            if is_chosen or field.name == "sdpa_backend":
                words.append(in_note(field.name, setting, value))
    return ", ".join([*words, *_checkpoints(config)])


def _checkpoints(config: RunConfig) -> Iterator[str]:
    """Checkpoints, with the memory that the step would need without them."""
    if not config.checkpoint_blocks:
        return
    names = ["checkpoint_blocks"]
    if config.selective_checkpoints:
        names = ["selective_checkpoints", "keep_hidden"]
    values = {name: getattr(config, name) for name in names}
    notes = [in_note(name, SETTINGS[name], value) for name, value in values.items() if value]
    words = " of which ".join(notes)
    if config.fused_blocks:
        without = config.with_defaults(
            "checkpoint_blocks", "selective_checkpoints", "keep_hidden", "loss_chunks"
        )
        words = f"{words} ({FastMemory(without).peak_bytes / 2**30:.0f} GiB without)"
    yield words
