"""Flags that several commands share, as dataclasses, and the configuration that they mean."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from cs336_systems.commands.device import DeviceChoice, device_word, plain_word, resolve_device
from cs336_systems.commands.outcome import UsageError
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
    Profiler,
    RunConfig,
    SdpaBackend,
)
from cs336_systems.measure.nvml import visible_gpus
from cs336_systems.model.fast.choose import fastest
from cs336_systems.sweep.inputs import check_factory

GPU_SIZES = ("small", "medium", "large", "xl", "2.7B")
GPU_CONTEXT_LENGTHS = (128, 256, 512)
CPU_SIZES = ("tiny",)
CPU_CONTEXT_LENGTHS = (64, 128, 256)
MAX_NAME_LENGTH = 100

PLAIN: Mapping[str, object] = {
    field.name: field.default
    for field in (*fields(ModelConfig), *fields(RunConfig))
    if field.name in ("attention", "optimizer", "compile", "pad_vocabulary")
}
"""What flags mean that were not given, so that --fast may choose: the configuration's own defaults."""

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""A flag that is off unless it is given."""
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
"""A group of flags, under its own heading in the help and without a prefix."""


def parse(kind: Callable[..., T], prog: str, argv: Sequence[str] | None, description: str | None = None) -> T:
    """The arguments in `argv`; raise UsageError where a value contradicts another, exit where it does not parse."""
    try:
        return tyro.cli(kind, prog=prog, args=argv, description=description, config=(tyro.conf.EnumChoicesFromValues,))
    except ValueError as error:
        raise UsageError(str(error)) from error


def unset(metavar: str | None, default: object, text: str | None = None) -> object:
    """How the help shows a flag whose default is not a value but a rule; `text` where a docstring cannot say it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})", help=text)


def choices(kind: type[StrEnum], *, many: bool = False) -> PrimitiveConstructorSpec[Any]:
    """Parse a member of `kind`, or several, where None stands for a flag that was not given.

    The parser's own way lists None among the choices, and all of them in no order.
    """
    values = tuple(member.value for member in kind)

    def parsed(words: list[str]) -> object:
        members = tuple(map(kind, words))
        return members if many else members[0]

    def said(value: Any) -> list[str]:  # noqa: ANN401 (one member, several, or None)
        return [] if value is None else [str(member) for member in (value if many else (value,))]

    return PrimitiveConstructorSpec(
        nargs="*" if many else 1,
        metavar=f"{{{','.join(values)}}}",
        instance_from_str=parsed,
        is_instance=lambda value: value is None or isinstance(value, tuple if many else kind),
        str_from_instance=said,
        choices=values,
    )


_OWN_MODEL = (
    "Your own model as package.module:factory. The factory is called with those of "
    f"{', '.join(f.name for f in fields(ModelConfig))} that its signature names; the model it returns maps int64 "
    "(batch, sequence) to logits (batch, sequence, vocabulary)."
)


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """What differs from the preset."""

    vocab_size: Annotated[int | None, unset("INT", "the preset's")] = None
    """Entries of the vocabulary (tokens)."""
    d_model: Annotated[int | None, unset("INT", "the preset's")] = None
    """Width of the residual stream (elements)."""
    d_ff: Annotated[int | None, unset("INT", "the preset's")] = None
    """Width of the feed-forward layer (elements)."""
    num_layers: Annotated[int | None, unset("INT", "the preset's")] = None
    """Blocks, one after the other."""
    num_heads: Annotated[int | None, unset("INT", "the preset's")] = None
    """Attention heads; must divide d_model."""
    rope_theta: Annotated[float | None, unset("FLOAT", "10000.0")] = None
    """Base of the rotary position embedding's wavelengths."""
    attention: Annotated[Attention | None, choices(Attention), unset(None, PLAIN["attention"])] = None
    """naive: scores, softmax and values one by one. sdpa: PyTorch's fused attention."""
    sdpa_backend: SdpaBackend = SdpaBackend.AUTO
    """Which kernel sdpa may use; auto lets PyTorch choose."""
    model: Annotated[str | None, unset("MODULE:FACTORY", "this project's model", _OWN_MODEL)] = None


@dataclass(frozen=True, kw_only=True)
class StepArguments:
    """What one step does."""

    batch_size: int = 4
    """Sequences in a batch."""
    optimizer: Annotated[OptimizerKind | None, choices(OptimizerKind), unset(None, PLAIN["optimizer"])] = None
    """adamw: written out, one tensor at a time. foreach, fused: PyTorch's."""
    compile: Annotated[CompileMode | None, choices(CompileMode), unset(None, PLAIN["compile"])] = None
    """Mode of torch.compile; none is eager."""
    compile_blocks: Switch = False
    """Compile block by block: seconds instead of tens of seconds to wait."""
    pad_vocabulary: Annotated[int | None, unset("INT", PLAIN["pad_vocabulary"])] = None
    """Compute logits for a vocabulary rounded up to a multiple of this; the surplus is left out of the loss."""
    cast_once: Switch = False
    """Keep a bf16 copy of each linear layer's weights beside the fp32 masters, so that autocast need not cast them in
    every step. The optimizer updates both."""
    fused_loss: Switch = False
    """Fused cross-entropy: forward overwrites the logits with their gradient, which saves time and memory."""
    fused_blocks: Switch = False
    """Fused kernels between the matrix products: residual addition with norm, bias with GELU, and the embedding's
    backward in one pass, whose sums are not the same to the last bit every time. Needs --cast-once."""
    fp8: Switch = False
    """Compute the linear layers of the blocks in fp8: for large models, on GPUs from Ada and Hopper on; with other
    rounding than bf16's, so --fast does so only if asked."""
    cuda_graph: Switch = False
    """Record the step as CUDA graphs, one for each phase, and replay these. Needs at least --warmup-steps 4."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW."""
    measured_steps: int = 10
    """Steps that are timed, after the warm-up."""
    sync_phases: Switch = False
    """Synchronise after every phase, the textbook way, instead of recording events on the stream."""
    ranges: bool = True
    """Annotate the step with NVTX ranges."""
    tokens: Annotated[str | None, unset("FILE", "random tokens")] = None
    """Token file to read batches from (.npy, one axis of integers)."""
    device: DeviceChoice = "auto"
    """Where to run; auto is the GPU if there is one."""
    seed: int = 0
    """Seed of the weights and the tokens."""


def check_limits(timeout_s: float, repeats: int, least_repeats: int) -> None:
    """Raise ValueError for a time or a number of processes that nobody can mean."""
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"--timeout-s must be positive and finite, got {timeout_s}")
    if not least_repeats <= repeats <= 1000:
        raise ValueError(f"--repeats must be from {least_repeats} to 1000, got {repeats}")


def check_tokens(name: str, context_length: int) -> None:
    """Raise ValueError unless the file begins as one of enough tokens does; the tokens themselves are not read."""
    from cs336_systems.model.tokens import open_tokens  # numpy is slow to import, and few command lines need it

    if not Path(name).is_file():
        raise ValueError(f"--tokens needs a .npy file of integers, and {name!r} is no file")
    try:
        open_tokens(Path(name), context_length)
    except ValueError as error:
        raise ValueError(f"--tokens {error}".replace("\n", "\\n")) from error


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
    checkpoint_blocks: int = 0,
) -> RunConfig:
    """One configuration from flags; raise ValueError where a value cannot be meant."""
    if size not in SIZES:
        close = difflib.get_close_matches(size, SIZES, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ValueError(f"unknown size {size!r}{hint} Sizes: {', '.join(SIZES)}")
    preset = SIZES[size]
    if context_length is None and preset.arch is Arch.CS336:
        context_length = 512 if device is Device.CUDA else 128
    overrides = _given(model, but="model")
    shape = replace(
        preset,
        **overrides,
        context_length=preset.context_length if context_length is None else context_length,
    )
    if checkpoint_blocks > shape.num_layers and model.model is None:
        raise ValueError(
            f"--checkpoint-blocks must be from 0 to the {shape.num_layers} blocks that {size} has here, "
            f"got {checkpoint_blocks}"
        )
    if step.tokens is not None:
        check_tokens(step.tokens, shape.context_length)
    config = RunConfig(
        size=size if _same_shape(shape, preset) else "custom",
        model=shape,
        mode=mode,
        precision=precision,
        device=device,
        warmup_steps=warmup_steps,
        checkpoint_blocks=checkpoint_blocks,
        model_factory=model.model,
        **_given(step, but="device"),
    )
    if config.model_factory is not None:
        check_factory(config.model_factory)
    return config


def _given(group: ModelArguments | StepArguments, but: str) -> dict[str, Any]:
    """The values by the name of their field; those that were not given are for the configuration to choose."""
    values = {f.name: getattr(group, f.name) for f in fields(group) if f.name != but}
    return {name: value for name, value in values.items() if value is not None}


NOT_ALONE = ("compile_blocks", "cast_once", "fused_loss", "fused_blocks", "fp8", "cuda_graph")
"""Flags that need others, which --fast sets."""


def without_shortcuts(model: ModelArguments, step: StepArguments) -> tuple[ModelArguments, StepArguments]:
    """What `faster` is to begin with: a valid run, whatever needs a choice that --fast has yet to make."""
    none: dict[str, Any] = dict.fromkeys(NOT_ALONE, False)
    if model.attention is None and model.sdpa_backend is not SdpaBackend.AUTO:
        model = replace(model, attention=Attention.SDPA)
    return model, replace(step, **none)


def faster(
    config: RunConfig, model: ModelArguments, step: StepArguments, precision: Precision | None, precision_flag: str
) -> RunConfig:
    """The same step in the fastest way known for this machine's device (--fast), with the shortcuts asked for too.

    `precision` is what `precision_flag` asks for, None where it was not given. Raises ValueError where a flag does not
    go with it, or asks for other than what is chosen.
    """
    gpus = visible_gpus() if config.device is Device.CUDA else ()
    fast = fastest(config, gpus[0].name if gpus else None)
    pairs = (
        ("--attention", model.attention, fast.model.attention),
        (precision_flag, precision, fast.precision),
        ("--optimizer", step.optimizer, fast.optimizer),
        ("--compile", step.compile, fast.compile),
        ("--pad-vocabulary", step.pad_vocabulary, fast.pad_vocabulary),
    )
    for flag, asked, chosen in pairs:
        if asked is not None and asked != chosen:
            what = flag.removeprefix("--").replace("-", " ")
            raise ValueError(f"--fast chooses {what} itself, here {chosen}: leave out {flag} {asked}")
    besides: dict[str, Any] = {name: True for name in NOT_ALONE if getattr(step, name)}
    return replace(fast, **besides)


def profiled_config(plain: RunConfig, profiler: Profiler, first_step: bool = False) -> RunConfig:
    """The same run under a profiler; a history of memory need not be long: all steady steps are alike."""
    if profiler is not Profiler.MEMORY:
        return replace(plain, profiler=profiler)
    plain = replace(plain, cuda_graph=False)  # a replayed graph allocates nothing
    if first_step:
        return replace(plain, profiler=profiler, warmup_steps=0, measured_steps=1)
    return replace(plain, profiler=profiler, measured_steps=min(2, plain.measured_steps))


def _same_shape(a: ModelConfig, b: ModelConfig) -> bool:
    return all(getattr(a, name) == getattr(b, name) for name in ("d_model", "d_ff", "num_layers", "num_heads"))


def one_precision(precision: Precision | None, mixed_precision: bool) -> Precision:
    """The precision meant, fp32 where none was asked for; raise ValueError where --mixed-precision contradicts it."""
    if mixed_precision and precision not in (None, Precision.BF16):
        raise ValueError(f"--mixed-precision means bf16, but the precision asked for is {precision}")
    return Precision.BF16 if mixed_precision else value_or(precision, Precision.FP32)


def checked_name(name: str) -> str:
    """The name itself; raise ValueError unless it is a plain, portable directory name."""
    if not re.fullmatch(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,{MAX_NAME_LENGTH - 1}}}", name):
        raise ValueError(
            f"--name must be 1 to {MAX_NAME_LENGTH} letters, digits, '_', '.', '+' or '-', beginning with a letter, "
            f"digit or '_'; got {name[:120]!r}"
        )
    return name


def value_or(value: T | None, default: T) -> T:
    """The value, or the default where the flag was not given."""
    return default if value is None else value


def study_name(name: str | None, precisions: Sequence[Precision], device: DeviceChoice) -> str:
    """The name given, or precisions and device, so that machines that share a directory do not collide."""
    if name is not None:
        return checked_name(name)
    return "_".join((plain_word("-".join(dict.fromkeys(precisions))), device_word(resolve_device(device))))
