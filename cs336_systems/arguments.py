"""The flags of the commands, as dataclasses, and the configurations that they mean."""

import difflib
import hashlib
import itertools
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from cs336_systems.analysis.compare import interleave
from cs336_systems.config import (
    SIZES,
    Arch,
    Attention,
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Precision,
    RunConfig,
    SdpaBackend,
)
from cs336_systems.nvml import visible_gpus

GPU_SIZES = ("small", "medium", "large", "xl", "2.7B")
GPU_CONTEXT_LENGTHS = (128, 256, 512)
CPU_SIZES = ("tiny",)
CPU_CONTEXT_LENGTHS = (64, 128, 256)
MAX_NAME_LENGTH = 100

T = TypeVar("T")
DeviceChoice = Literal["auto", "cpu", "cuda"]
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""A flag that is off unless it is given."""
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
"""A group of flags, under its own heading in the help and without a prefix."""


def _unset(metavar: str, default: str) -> object:
    """How the help shows a flag whose default is not a value but a rule."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """What differs from the preset."""

    vocab_size: Annotated[int | None, _unset("INT", "the preset's")] = None
    """Entries of the vocabulary (tokens)."""
    d_model: Annotated[int | None, _unset("INT", "the preset's")] = None
    """Width of the residual stream (elements)."""
    d_ff: Annotated[int | None, _unset("INT", "the preset's")] = None
    """Width of the feed-forward layer (elements)."""
    num_layers: Annotated[int | None, _unset("INT", "the preset's")] = None
    """Blocks, one after the other."""
    num_heads: Annotated[int | None, _unset("INT", "the preset's")] = None
    """Attention heads; must divide d_model."""
    rope_theta: Annotated[float | None, _unset("FLOAT", "10000.0")] = None
    """Base of the rotary position embedding's wavelengths."""
    attention: Attention = Attention.NAIVE
    """naive: scores, softmax and values one by one. sdpa: PyTorch's fused attention."""
    sdpa_backend: SdpaBackend = SdpaBackend.AUTO
    """Which kernel sdpa may use; auto lets PyTorch choose."""
    model: Annotated[str | None, _unset("MODULE:FACTORY", "this project's model")] = None
    """Your own model as package.module:factory. The factory is called with those of vocab_size, context_length,
    d_model, d_ff, num_layers, num_heads, rope_theta that its signature names; the model it returns maps int64
    (batch, sequence) to logits (batch, sequence, vocabulary)."""


@dataclass(frozen=True, kw_only=True)
class StepArguments:
    """What one step does."""

    batch_size: int = 4
    """Sequences in a batch."""
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    """adamw: written out, one tensor at a time. foreach, fused: PyTorch's."""
    compile: CompileMode = CompileMode.NONE
    """Mode of torch.compile; none is eager."""
    compile_blocks: Switch = False
    """Compile block by block: seconds instead of tens of seconds to wait."""
    measured_steps: int = 10
    """Steps that are timed, after the warm-up."""
    sync_phases: Switch = False
    """Synchronise after every phase, the textbook way, instead of recording events on the stream."""
    ranges: bool = True
    """Annotate the step with NVTX ranges."""
    tokens: Annotated[str | None, _unset("FILE", "random tokens")] = None
    """Token file to read batches from (.npy, one axis, uint16 or int32)."""
    device: DeviceChoice = "auto"
    """Where to run; auto is the GPU if there is one."""
    seed: int = 0
    """Seed of the weights and the tokens."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkArguments:
    """Time one step of training: forward, backward and optimizer, with warm-up and synchronisation.

    The record, with every raw time, goes to OUTPUT/e2e_benchmark/single/runs/. Under `nsys profile` the same
    command makes a report with named ranges.
    """

    size: Annotated[str | None, _unset("NAME", "small on a GPU, tiny on a CPU")] = None
    """Preset: tiny, small, medium, large, xl, 2.7B, 10B, gpt2, gpt2-medium, gpt2-large, gpt2-xl."""
    context_length: Annotated[int | None, _unset("INT", "512 on a GPU, 128 on a CPU, 1024 for gpt2")] = None
    """Tokens in a sequence."""
    mode: Mode = Mode.TRAIN
    """How much of a step: inference (no graph), forward (with the graph), forward-backward, train."""
    precision: Precision = Precision.FP32
    """fp32 (true fp32), tf32, bf16 or fp16 (autocast around forward and loss)."""
    mixed_precision: Switch = False
    """Short for --precision bf16."""
    warmup_steps: int = 5
    """Steps before the timed ones."""
    model: Flat[ModelArguments] = field(default_factory=ModelArguments)
    step: Flat[StepArguments] = field(default_factory=StepArguments)
    output: Path = Path("data")
    """Directory for results."""
    json: Switch = False
    """Print the record as JSON instead of a table."""

    def config(self) -> RunConfig:
        """The run that these flags mean; raise ValueError where they mean none."""
        device = resolve_device(self.step.device)
        return make_config(
            self.model, self.step, device,
            size=(GPU_SIZES if device is Device.CUDA else CPU_SIZES)[0] if self.size is None else self.size,
            context_length=self.context_length,
            mode=self.mode,
            precision=_one_precision(self.precision, self.mixed_precision),
            warmup_steps=self.warmup_steps,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SweepArguments:
    """Time a grid of sizes, context lengths, modes and precisions, each run in a fresh process, and write tables.

    Records, tables (CSV, Markdown, LaTeX, Typst) and plots go to OUTPUT/e2e_benchmark/NAME/. The same command
    again goes on where an interrupted sweep stopped; what ran out of memory or failed has a row of its own.
    """

    sizes: Annotated[
        tuple[str, ...] | None, _unset("NAME [NAME ...]", "small medium large xl 2.7B on a GPU, tiny on a CPU")
    ] = None
    """Presets: tiny, small, medium, large, xl, 2.7B, 10B, gpt2, gpt2-medium, gpt2-large, gpt2-xl."""
    context_lengths: Annotated[
        tuple[int, ...] | None, _unset("INT [INT ...]", "128 256 512 on a GPU, 64 128 256 on a CPU")
    ] = None
    """Tokens in a sequence."""
    modes: tuple[Mode, ...] = (Mode.TRAIN,)
    """How much of a step: inference, forward, forward-backward, train."""
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    """fp32, tf32, bf16, fp16; with fp32 and another, the tables get a speed-up column."""
    mixed_precision: Switch = False
    """Short for --precisions bf16."""
    warmup_steps: tuple[int, ...] = (5,)
    """Steps before the timed ones; several make a warm-up study."""
    repeats: int = 1
    """Fresh processes per configuration, interleaved; the confidence interval is then over process means."""
    model: Flat[ModelArguments] = field(default_factory=ModelArguments)
    step: Flat[StepArguments] = field(default_factory=StepArguments)
    name: Annotated[str | None, _unset("NAME", "mode, precision, what differs from the defaults, device")] = None
    """Name of the directory."""
    output: Path = Path("data")
    """Directory for results."""
    timeout_s: float = 600.0
    """Longest time for one run (seconds)."""
    fresh: Switch = False
    """Measure everything again; earlier records are kept beside."""
    allow_mixed: Switch = False
    """Go on in a directory whose records come from another GPU, driver, torch or code."""
    dry_run: Switch = False
    """Print what would run, and stop."""

    def __post_init__(self) -> None:
        for name in ("sizes", "context_lengths", "modes", "precisions", "warmup_steps"):
            if getattr(self, name) == ():
                raise ValueError(f"--{name.replace('_', '-')} needs at least one value")
        _check_limits(self, least_repeats=1)

    @property
    def chosen_precisions(self) -> tuple[Precision, ...]:
        if not self.mixed_precision:
            return self.precisions
        return tuple(_one_precision(precision, True) for precision in self.precisions)

    def configs(self) -> list[RunConfig]:
        """The grid in the order to run, without duplicates; repeats go forth and back (A B B A)."""
        device = resolve_device(self.step.device)
        on_gpu = device is Device.CUDA
        grid = itertools.product(
            self.sizes or (GPU_SIZES if on_gpu else CPU_SIZES),
            self.context_lengths or (GPU_CONTEXT_LENGTHS if on_gpu else CPU_CONTEXT_LENGTHS),
            self.modes,
            self.chosen_precisions,
            self.warmup_steps,
        )
        once = [
            make_config(
                self.model, self.step, device,
                size=size, context_length=context_length, mode=mode, precision=precision, warmup_steps=warmup_steps,
            )
            for size, context_length, mode, precision, warmup_steps in grid
        ]  # fmt: skip
        configs = list(dict.fromkeys(once))
        return [replace(configs[index], repeat=repeat) for index, repeat in interleave(len(configs), self.repeats)]

    def directory(self) -> Path:
        """Where this sweep's results go; raise ValueError for a name that is no plain directory name."""
        return self.output / "e2e_benchmark" / (default_name(self) if self.name is None else checked_name(self.name))


def _check_limits(arguments: "SweepArguments | CompareArguments", least_repeats: int) -> None:
    if not 0 < arguments.timeout_s < float("inf"):
        raise ValueError(f"--timeout-s must be positive and finite, got {arguments.timeout_s}")
    if not least_repeats <= arguments.repeats <= 1000:
        raise ValueError(f"--repeats must be from {least_repeats} to 1000, got {arguments.repeats}")


def resolve_device(device: DeviceChoice) -> Device:
    """The device meant; raise ValueError for cuda on a machine without."""
    found = bool(visible_gpus())
    if device == "cuda" and not found:
        raise ValueError(
            "--device cuda needs an NVIDIA GPU that this process can see (CUDA_VISIBLE_DEVICES), found none; "
            "try --device cpu"
        )
    return Device.CUDA if device == "cuda" or (device == "auto" and found) else Device.CPU


def make_config(
    model: ModelArguments,
    step: StepArguments,
    device: Device,
    *,
    size: str,
    context_length: int | None,
    mode: Mode,
    precision: Precision,
    warmup_steps: int,
) -> RunConfig:
    """One configuration from flags; raise ValueError where a value cannot be meant."""
    if size not in SIZES:
        close = difflib.get_close_matches(size, SIZES, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"unknown size {size!r}{hint} Sizes: {', '.join(SIZES)}")
    preset = SIZES[size]
    if context_length is None and preset.arch is Arch.CS336:
        context_length = 512 if device is Device.CUDA else 128
    if step.tokens is not None and not Path(step.tokens).is_file():
        raise ValueError(f"--tokens needs a .npy file of uint16 or int32 tokens, and {step.tokens!r} is no file")
    overrides = {f.name: getattr(model, f.name) for f in fields(model) if f.name != "model"}
    shape = replace(
        preset,
        **{name: value for name, value in overrides.items() if value is not None},
        context_length=preset.context_length if context_length is None else context_length,
    )
    return RunConfig(
        size=size if _same_shape(shape, preset) else "custom",
        model=shape,
        mode=mode,
        precision=precision,
        device=device,
        warmup_steps=warmup_steps,
        model_factory=model.model,
        **{f.name: getattr(step, f.name) for f in fields(step) if f.name != "device"},
    )


def _same_shape(a: ModelConfig, b: ModelConfig) -> bool:
    return all(getattr(a, name) == getattr(b, name) for name in ("d_model", "d_ff", "num_layers", "num_heads"))


def _one_precision(precision: Precision, mixed_precision: bool) -> Precision:
    if mixed_precision and precision not in (Precision.FP32, Precision.BF16):
        raise ValueError(f"--mixed-precision means bf16, but the precision asked for is {precision}")
    return Precision.BF16 if mixed_precision else precision


def checked_name(name: str) -> str:
    """The name itself; raise ValueError unless it is a plain, portable directory name."""
    if not re.fullmatch(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,{MAX_NAME_LENGTH - 1}}}", name):
        raise ValueError(
            f"--name must be 1 to {MAX_NAME_LENGTH} letters, digits, '_', '.', '+' or '-', beginning with a letter, "
            f"digit or '_'; got {name[:120]!r}"
        )
    return name


def default_name(sweep: SweepArguments) -> str:
    """Modes, precisions, what differs from the defaults, and the device, so that machines do not collide."""
    device = resolve_device(sweep.step.device)
    different = [
        f"{name}-{value}"
        for arguments in (sweep.model, sweep.step)
        for name, value in _differences(arguments, skip=("device",))
    ]
    axes = _differences(sweep, skip=("modes", "precisions", "mixed_precision", "model", "step", "name", "output",
                                     "timeout_s", "fresh", "allow_mixed", "dry_run"))  # fmt: skip
    parts = [
        "-".join(dict.fromkeys(sweep.modes)),
        "-".join(dict.fromkeys(sweep.chosen_precisions)),
        *(f"{name}-{value}" for name, value in axes),
        *different,
        visible_gpus()[0].name if device is Device.CUDA else "cpu",
    ]
    name = "_".join(re.sub(r"[^A-Za-z0-9.+]+", "-", part).strip("-") for part in parts)
    if len(name) > MAX_NAME_LENGTH:
        name = f"{name[: MAX_NAME_LENGTH - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def _differences(arguments: object, skip: tuple[str, ...]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for f in fields(arguments):  # type: ignore[arg-type]
        value = getattr(arguments, f.name)
        if f.name not in skip and value != f.default:
            found.append((f.name, "-".join(map(str, value)) if isinstance(value, tuple) else str(value)))
    return found


@dataclass(frozen=True, kw_only=True)
class PrecisionArguments:
    """Show what accumulation and autocast do to precision, as observed on this machine."""

    device: DeviceChoice = "auto"
    """Where to observe autocast; auto is the CPU, and the GPU too where there is one."""
    json: Switch = False
    """Print JSON instead of tables."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: write nothing)")] = None
    """Directory to write both tables to, as CSV, Markdown, LaTeX and Typst."""

    def devices(self) -> tuple[Device, ...]:
        """Devices to observe; raise ValueError where a GPU is asked for and there is none."""
        chosen = resolve_device(self.device)
        return (Device.CPU, Device.CUDA) if self.device == "auto" and chosen is Device.CUDA else (chosen,)


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Make the tables and plots of finished runs again, from one sweep's directory or several together."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR ...]")]
    """Directories of sweeps (each with runs/ in it)."""
    output: Annotated[Path | None, _unset("DIR", "the directory itself, if there is one only")] = None
    """Where to write."""


@dataclass(frozen=True, kw_only=True)
class CompareArguments:
    """Say which of two configurations is faster, slower, or that one cannot tell.

    A and B are each the flags of benchmark.py in quotes, such as "--size small --no-ranges"; their runs are
    interleaved A B B A, every one a fresh process, and the verdict rests on the means of the processes. Or they
    are directories of finished sweeps.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """Flags in quotes, or the directory of a sweep that holds repeats of one configuration."""
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """What to compare it with."""
    repeats: int = 5
    """Fresh processes of each."""
    name: str = "compare"
    """Name of the directory under OUTPUT/e2e_benchmark/ for the records."""
    output: Path = Path("data")
    """Directory for results."""
    timeout_s: float = 600.0
    """Longest time for one run (seconds)."""
    fresh: Switch = False
    """Measure everything again; earlier records are kept beside."""
    allow_mixed: Switch = False
    """Compare records from different hardware or software."""

    def __post_init__(self) -> None:
        _check_limits(self, least_repeats=2)  # one process tells nothing of the spread


Command = (
    Annotated[CompareArguments, tyro.conf.subcommand("compare")]
    | Annotated[ReportArguments, tyro.conf.subcommand("report")]
)
"""What follows `cs336`."""
