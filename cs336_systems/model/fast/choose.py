"""The fastest known way to compute the same step on a device, chosen by rule; `cs336 ladder`
measures each choice.

Shape, batch, mode, steps, seed, device and data stay as they are. The result is the same up to
rounding, which `cs336 ladder` checks.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ... import __version__
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
from ...costs.fast_memory import peak_bytes
from ...costs.hardware import find_device
from ...files import user_cache, write_atomically
from ...settings import declared, flag_of, in_note
from ...text import print_aside

NICE_VOCABULARY = 128
"""Multiple to pad a vocabulary to."""
ALIGNMENT = 8
"""Elements in half precision that tensor cores load at once, 16 bytes; matmuls of other widths
are far slower.
"""
QUACK, FLASH_4 = "quack-kernels", "flash-attn-4"
"""The packages whose matmuls compute activations too, and of FlashAttention 4."""
VERSIONS = {QUACK: "0.6", FLASH_4: "4.0.0b36"}
"""How the versions begin that this project was tested with; what it calls of these packages may
change in others.
"""
OF_PACKAGE = {"fused_activations": QUACK, "packed_attention": FLASH_4}
"""The settings that need a package on a GPU."""
IMPORTED_BY = {QUACK: "feed_forward_kernel", FLASH_4: "attention_kernel"}
"""The modules beside this one that import what the fast model needs of the package."""
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

    On a GPU: bf16 with weights cast once and split masters, fused attention, blocks compiled one by
    one with fused kernels between their matmuls, on Hopper with the packages of `.[fused]`
    activations within matmuls and, unless another kernel of attention is named, FlashAttention 4,
    fused loss and AdamW, each phase one CUDA graph (from 4 warm-up steps on), and a vocabulary
    padded where its size is no multiple of `ALIGNMENT`. A GPU known to have no bf16 keeps its
    precision. A user's own model gets what works for any model: bf16, compilation, fused AdamW. If
    PyTorch's DDP or FSDP shares the step, weights are not cast once, blocks are not fused and there
    are no graphs. A user's own model with sharded parameters is not compiled. On a CPU compilation
    costs more than it saves and bf16 is seldom faster, so both stay as configured. The memory
    profiler cannot see inside a graph, so it excludes graphs.
    """
    optimizer = OptimizerKind.FUSED if config.mode is Mode.TRAIN else config.optimizer
    own = config.model_factory is not None
    model = config.model
    if not own:
        is_asked = model.sdpa_backend is not SdpaBackend.AUTO
        backend = (
            model.sdpa_backend if is_asked else best_sdpa_backend(model, config.device, device_name)
        )
        model = replace(model, attention=Attention.SDPA, sdpa_backend=backend)
    common = replace(config, optimizer=optimizer, model=model)
    if config.device is Device.CPU:
        return common
    precision = Precision.BF16 if has_bf16(device_name) else config.precision
    # other modes capture CUDA graphs themselves, which cannot be part of the step's graphs
    keeps_mode = config.compile is CompileMode.MAX_AUTOTUNE_NO_CUDAGRAPHS
    compile_mode = config.compile if keeps_mode else CompileMode.DEFAULT
    common = replace(common, precision=precision)
    if own:
        return (
            common if config.parallel.shards_parameters else replace(common, compile=compile_mode)
        )
    # the memory profiler cannot see inside a graph, and scaling fp16's gradients reads a value
    can_replay = precision is not Precision.FP16 and config.profiler is not Profiler.MEMORY
    warms_up = config.warmup_steps > EAGER_STEPS_BEFORE_GRAPH
    has_copies = (
        precision is Precision.BF16
        and config.parallel.takes_any_tensor
        and config.model.d_model % PACKED_MULTIPLE == 0
    )
    return replace(
        common,
        compile=compile_mode,
        compile_blocks=True,
        pad_vocabulary=config.pad_vocabulary
        if config.pad_vocabulary > 1 or config.model.vocab_size % ALIGNMENT == 0
        else NICE_VOCABULARY,
        cast_once=has_copies,
        split_masters=has_copies and config.mode is Mode.TRAIN,
        fused_loss=precision is not Precision.FP16,
        fused_blocks=has_copies,
        fused_activations=has_copies
        and not (config.fp8 or config.selective_checkpoints or config.is_shared)
        and can_fuse_activations(config.model, device_name, is_usable),
        packed_attention=has_copies
        and (
            config.packed_attention
            or (
                config.model.sdpa_backend is SdpaBackend.AUTO
                and can_pack_attention(config.model, device_name, is_usable)
            )
        ),
        cuda_graph=warms_up and can_replay and config.parallel.takes_any_tensor,
    )


def has_bf16(device_name: str | None) -> bool:
    """Whether the GPU computes in bf16; an unknown GPU is assumed to be recent, so that it does."""
    device = None if device_name is None else find_device(device_name)
    return device is None or Precision.BF16 in device.peak_flops_per_s


def is_installed(package: str) -> bool:
    """Whether this package is installed in a tested version, and can be imported with all that
    it imports.
    """
    return why_unusable(package) is None


def why_unusable(package: str) -> str | None:
    """Why this package cannot be used, to be put after its name; None if it can."""
    found, tested = version_of(package), VERSIONS[package]
    if found is None:
        return "is not installed"
    if not f"{found}.".startswith(f"{tested}."):
        return f"is installed in version {found}, and was tested in {tested}"
    return import_failure(f"{__package__}.{IMPORTED_BY[package]}")


@functools.cache
def import_failure(module: str) -> str | None:
    """Why the module cannot be imported; None if it can.

    A process tries once for each environment, which takes many seconds, and the user's cache keeps
    the answer.
    """
    kept = _kept_answer(module)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        answer = kept.read_text()
        if answer == CAN_BE_IMPORTED:
            return None
        if answer.startswith(CANNOT_BE_IMPORTED):
            return f"{answer} (as {kept} says)"
    print_aside(
        f"looking whether {module.rpartition('.')[2]} can be imported, once for this environment"
    )
    failure = _import_elsewhere(module)
    with contextlib.suppress(OSError):  # without a cache it is looked at each time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, (failure or CAN_BE_IMPORTED).encode(errors="replace"))
    return failure


CAN_BE_IMPORTED, CANNOT_BE_IMPORTED = "can be imported", "cannot be imported: "


def _import_elsewhere(module: str) -> str | None:
    """Why the module cannot be imported, by the last line of a process that tried."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", f"import os, {module}; os._exit(0)"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    said = done.stderr.splitlines() or [f"its process ended with status {done.returncode}"]
    return f"{CANNOT_BE_IMPORTED}{said[-1]}" if done.returncode else None


def _kept_answer(module: str) -> Path:
    """The file for whether the module can be imported, of what that may depend on.

    That is Python, its path, all packages and when they were installed, the driver, the machine,
    and variables.
    """
    parts = [module, __version__, sys.version, platform.node(), *sys.path]
    for folder in map(Path, sys.path):
        with contextlib.suppress(OSError):
            parts += sorted(
                f"{each.name} {each.stat().st_mtime_ns}" for each in folder.glob("*.dist-info")
            )
    with contextlib.suppress(OSError):
        parts.append(DRIVER.read_text())
    names = sorted(name for name in os.environ if name.startswith(VARIABLES))
    parts += [f"{name}={os.environ[name]}" for name in names]
    digest = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:20]
    return user_cache() / "imports" / f"{module}.{digest}"


DRIVER = Path("/proc/driver/nvidia/version")
VARIABLES = ("CUDA", "CUTE", "LD_", "NVIDIA", "PYTHON", "TORCH", "TRITON")
"""How the names of variables begin on which imports of these packages may depend."""


def forget_answer(module: str) -> None:
    """Have the next command look anew whether the module can be imported, because it cannot
    where it was needed.
    """
    with contextlib.suppress(OSError):
        _kept_answer(module).unlink()


def check_packages(config: RunConfig) -> None:
    """Raise ValueError for a setting whose package cannot be used; a CPU needs none."""
    for name, package in OF_PACKAGE.items() if config.device is Device.CUDA else ():
        if getattr(config, name) and not is_installed(package):
            raise ValueError(package_needed(name, str(why_unusable(package))))


def package_needed(name: str, why: str) -> str:
    """The error for a setting that is asked for although its package cannot be used."""
    package = OF_PACKAGE[name]
    flag = flag_of(name, SETTINGS[name])
    return f"{flag} needs {package} {VERSIONS[package]}, which {why}: pip install '.[fused]'"


def missing_packages(fast: RunConfig, device_name: str | None) -> Iterator[str]:
    """What a step chosen by --fast does without because a package cannot be used, and why."""
    model = fast.model
    if model.sdpa_backend is best_sdpa_backend(model, fast.device, device_name):
        fast = replace(fast, model=replace(model, sdpa_backend=SdpaBackend.AUTO))
    ideal = fastest(fast, device_name, lambda _: True)
    for name, package in OF_PACKAGE.items():
        if (
            getattr(ideal, name)
            and not getattr(fast, name)
            and (why := why_unusable(package)) is not None
        ):
            yield (
                f"no {in_note(name, SETTINGS[name], True)}, as {package} {why} (pip install "
                "'.[fused]')"
            )


def version_of(package: str) -> str | None:
    """The installed version of this package; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def can_fuse_activations(
    model: ModelConfig, device_name: str | None, is_usable: Callable[[str], bool] | None = None
) -> bool:
    """Whether the activation can be computed within matmuls: on a Hopper GPU, with QuACK, if
    their width fits.
    """
    return (
        model.d_ff % PACKED_MULTIPLE == 0
        and _is_hopper(device_name)
        and (is_usable or is_installed)(QUACK)
    )


def can_pack_attention(
    model: ModelConfig, device_name: str | None, is_usable: Callable[[str], bool] | None = None
) -> bool:
    """Whether attention can be FlashAttention 4's: on a Hopper GPU, with its package, for the
    widths of its heads.
    """
    return (
        model.d_head in FLASH_4_HEADS
        and _is_hopper(device_name)
        and (is_usable or is_installed)(FLASH_4)
    )


def _is_hopper(device_name: str | None) -> bool:
    return device_name is not None and bool(_HOPPER.search(device_name))


def best_sdpa_backend(model: ModelConfig, device: Device, device_name: str | None) -> SdpaBackend:
    """The fastest of PyTorch's attention kernels for this shape; auto where no rule knows the
    device or the shape.

    On an H200 cuDNN's kernels take 0.5 to 0.75 of the time of flash, causal, with heads of 64 and
    128 and contexts from 1024 to 32,768. Flash attention is for GPUs that have bf16 (Ampere and
    later).
    """
    if device is Device.CPU or device_name is None or model.d_head > FLASH_MAX_HEAD:
        return SdpaBackend.AUTO
    fits_cudnn = model.d_head <= CUDNN_MAX_HEAD and model.d_head % ALIGNMENT == 0
    if fits_cudnn and _CUDNN_DEVICES.search(device_name):
        return SdpaBackend.CUDNN
    return (
        SdpaBackend.FLASH
        if find_device(device_name) and has_bf16(device_name)
        else SdpaBackend.AUTO
    )


def describe_fast(config: RunConfig) -> str:
    """What is chosen, in one line: `bf16, sdpa attention, cudnn, fused optimizer, compile
    default, ...`.
    """
    words = [str(config.precision)]
    for part in (config.model, config):
        for each, setting in declared(part):
            is_chosen = setting.chosen_by_fast or setting.is_shortcut or each.name == "sdpa_backend"
            # before, or below
            is_said = each.name in ("precision", "selective_checkpoints", "keep_hidden")
            if is_chosen and not is_said and (value := getattr(part, each.name)) != each.default:
                words.append(in_note(each.name, setting, value))
    return ", ".join([*words, *_checkpoints(config)])


def _checkpoints(config: RunConfig) -> Iterator[str]:
    """Checkpoints, with the memory that the step would need without them."""
    if config.checkpoint_blocks:
        names = (
            ("selective_checkpoints", "keep_hidden")
            if config.selective_checkpoints
            else ("checkpoint_blocks",)
        )
        values = ((name, getattr(config, name)) for name in names)
        words = " of which ".join(
            in_note(name, SETTINGS[name], value) for name, value in values if value
        )
        without = config.with_defaults(
            "checkpoint_blocks", "selective_checkpoints", "keep_hidden", "loss_chunks"
        )
        yield (
            f"{words} ({peak_bytes(without) / 2**30:.0f} GiB without)"
            if config.fused_blocks
            else words
        )
