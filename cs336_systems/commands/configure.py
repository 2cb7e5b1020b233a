"""The configuration of a run that flags describe, and whether it can run here."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ..config import (
    MAX_MEASURED_RANKS,
    SIZES,
    UNSIZED,
    USED_WITH,
    Arch,
    Attention,
    CompileMode,
    Device,
    ModelConfig,
    Parallel,
    Precision,
    Profiler,
    RunConfig,
    SdpaBackend,
)
from ..measure.inputs import check_factory, parameters_of
from ..measure.nvml import alike, visible_gpus
from ..model.fast.choose import describe_fast, fastest, missing_packages
from ..model.fast.packages import check_packages
from ..model_file import is_model_file, longest_context
from ..settings import flag_of
from ..text import print_aside
from .flags import OF_MODEL, SETTING_FIELDS, value_or
from .machine import first_gpu


def check_tokens(name: str, context_length: int) -> None:
    """Raise ValueError unless the file begins as one of enough tokens does; the tokens
    themselves are not read.
    """
    # numpy is slow to import, and few command lines need it
    from ..model.tokens import open_tokens

    if not Path(name).is_file():
        raise ValueError(f"--tokens needs a .npy file of integers, and {name!r} is no file")
    try:
        open_tokens(Path(name), context_length)
    except ValueError as error:
        raise ValueError(f"--tokens {error}".replace("\n", "\\n")) from error


def make_config(
    device: Device,
    *,
    size: str,
    context_length: int | None = None,
    **settings: Any,  # noqa: ANN401
) -> RunConfig:
    """One configuration from settings; raise ValueError for a value that is unknown or cannot be
    run.
    """
    preset = _preset(size)
    parallel = settings.get("parallel", Parallel.NONE)
    if parallel is not Parallel.NONE and "ranks" not in settings:
        raise ValueError(
            f"--parallel {parallel} needs --ranks, the number of processes that share a step, got "
            "none"
        )
    of_model = {attribute.name for attribute in fields(ModelConfig)} & settings.keys()
    changes = {name: settings.pop(name) for name in of_model}
    file = str(settings.get("model_factory", ""))
    if is_model_file(file):
        changes.setdefault("attention", Attention.SDPA)  # as transformers chooses it
    if context_length is None:
        context_length = preset.context_length
        if preset.arch is Arch.CS336:
            context_length = default_on(device, "context_length")
        if is_model_file(file):
            context_length = min(context_length, longest_context(file) or context_length)
    model = replace(preset, context_length=context_length, **changes)
    blocks = settings.get("checkpoint_blocks", 0)
    if blocks > model.num_layers and settings.get("model_factory") is None:
        raise ValueError(
            f"--checkpoint-blocks must be from 0 to the {model.num_layers} blocks that {size} has "
            f"here, got {blocks}"
        )
    if "tokens" in settings:
        check_tokens(settings["tokens"], model.context_length)
    shape = ("d_model", "d_ff", "num_layers", "num_heads")
    if any(getattr(model, name) != getattr(preset, name) for name in shape):
        size = "custom"
    config = RunConfig(size=size, model=model, device=device, **settings)
    for name in ("model_factory", "own_ddp", "own_optimizer"):
        factory = getattr(config, name)
        if factory is not None:
            check_factory(factory, _typed(name))
    return config


def _preset(size: str) -> ModelConfig:
    """The model of this size; raise ValueError for an unknown one."""
    if size in SIZES:
        return SIZES[size]
    by_lower = {name.lower(): name for name in SIZES}
    close = difflib.get_close_matches(size.lower(), by_lower, n=1)
    hint = f"; did you mean {by_lower[close[0]]}?" if close else "."
    raise ValueError(f"unknown size {size!r}{hint} Sizes: {', '.join(SIZES)}")


def config_of(
    device: Device,
    given: Mapping[str, Any],
    point: Mapping[str, Any],
    *,
    fast: bool,
    many: bool = False,
) -> RunConfig:
    """The run of the settings `given` by the user, by the flags of a sweep if `many`, and of
    those of `point` first.
    """
    settings = {**given, **point}
    if not many:  # a sweep has several values of the settings that others need
        settings = _with_own_parts(settings)
    if fast:
        asked = {name: settings[name] for name in given if name in settings}
        config = make_fast_config(device, asked, **settings)
    else:
        config = make_config(device, **settings)
    return checked_factory(config, given)


def _with_own_parts(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with `own` where one names an own part; raise ValueError for one that another
    makes useless.
    """
    for name, (other, values) in USED_WITH.items():
        default = SETTING_FIELDS[name][0].default
        if settings.get(name, default) == default:
            continue
        if len(values) == 1 and settings.get(other) in (None, Parallel.NONE):
            settings[other] = values[0]
        if settings.get(other) not in values:
            raise ValueError(
                f"{_typed(name)} needs {_typed(other)} {' or '.join(values)}, got "
                f"{settings.get(other) or 'none'}"
            )
    return settings


def _switches(fast: RunConfig, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of NOT_ALONE that were asked for, and what they exclude or allow in the fastest
    step.
    """
    switches = {name: asked[name] for name in NOT_ALONE if asked.get(name)}
    if asked.get("fp8") or asked.get("selective_checkpoints"):
        switches.setdefault("fused_activations", False)  # neither can be combined with it
    if asked.get("fp8"):
        # what fp8 rounds lets the stream be rounded too
        switches.setdefault("bf16_stream", fast.fused_blocks)
    if asked.get("expandable_segments") and fast.is_shared:
        switches.setdefault("cuda_graph", False)  # a graph would exclude expandable segments
    return switches


def checked_factory(config: RunConfig, given: Collection[str]) -> RunConfig:
    """The run, with the size `UNSIZED` if the user's own factory takes no size but the context;
    raise ValueError for a flag of the model's shape that the factory does not take.

    `given` are the names of the settings that the user gave. The vocabulary and the context shape
    the tokens of any model, so they always have an effect. A factory whose source does not tell its
    parameters is accepted.
    """
    taken = None if config.model_factory is None else parameters_of(config.model_factory)
    if taken is None:
        return config
    shape = [name for name in OF_MODEL if name not in ("model_factory", "vocab_size")]
    sizes = taken.intersection(shape)
    kept = ["vocab_size", "context_length"]
    if is_model_file(config.model_factory):
        sizes.discard("attention")
        kept.append("attention")
    ignored: dict[str, object] = {}
    for name in shape:
        value = getattr(config.model, name)
        if name not in taken and value != SETTING_FIELDS[name][0].default:
            ignored[name] = value
    preset = SIZES.get(config.size)
    is_usual_vocabulary = preset and preset.vocab_size == SETTING_FIELDS["vocab_size"][0].default
    is_asked = config.size != default_on(config.device, "size")
    if is_usual_vocabulary and is_asked and not sizes:
        ignored["size"] = config.size
    for name in ignored:
        if name in given:
            what = "any dimension of the model" if name == "size" else name
            raise ValueError(
                f"{_typed(name)} {ignored[name]} would do nothing: the factory "
                f"{config.model_factory} does not take {what}; leave it out"
            )
    if sizes:
        return config
    # the rest is nothing to the model: one configuration, whatever sizes a sweep goes through
    settings = {name: getattr(config.model, name) for name in kept}
    return replace(config, size=UNSIZED, model=replace(SIZES["small"], **settings))


def _typed(name: str) -> str:
    """The flag of a setting in the form in which the user types it: `--batch-size`."""
    return flag_of(name, SETTING_FIELDS[name][1])


def checked_here(config: RunConfig) -> RunConfig:
    """The run itself; raise ValueError if it cannot run here.

    It then has too many ranks, or more than this process sees GPUs of one kind, or needs a package
    that cannot be used.
    """
    if config.ranks > MAX_MEASURED_RANKS:
        raise ValueError(
            f"--ranks must be at most {MAX_MEASURED_RANKS} for a step that is run, got "
            f"{config.ranks}"
        )
    if config.ranks > 1 and config.device is Device.CUDA:
        num_gpus = len(alike(visible_gpus()))
        if num_gpus < config.ranks:
            raise ValueError(
                f"--ranks {config.ranks} needs as many GPUs of one kind that this process can see "
                f"(CUDA_VISIBLE_DEVICES), found {num_gpus}"
            )
    check_packages(config)
    return config


def default_on(device: Device, name: str) -> Any:  # noqa: ANN401 (the type of the setting)
    """The default of a setting whose default depends on the device."""
    usual = SETTING_FIELDS[name][1].by_device
    assert usual is not None
    return usual.gpu if device is Device.CUDA else usual.cpu


NOT_ALONE = tuple(
    name
    for name, (attribute, setting) in SETTING_FIELDS.items()
    if setting.rules
    and (attribute.default is False or (setting.is_shortcut and attribute.default == 0))
)
"""Switches and numbers with rules. Most rules require other settings, which --fast may have to
choose first.
"""


class NamedGpu(NamedTuple):
    """A GPU that need not be here, and its memory, if checkpoints are to be chosen by it."""

    name: str | None
    memory_bytes: int | None = None


def gpu_here() -> NamedGpu:
    """This machine's first GPU; without a name if there is none."""
    gpu = first_gpu()
    if gpu is None:
        return NamedGpu(None)
    return NamedGpu(gpu.name, gpu.usable_bytes or gpu.memory_bytes)


def make_fast_config(
    device: Device,
    asked: Mapping[str, Any],
    meant: NamedGpu | None = None,
    **settings: Any,  # noqa: ANN401
) -> RunConfig:
    """The configuration of these settings in the fastest way known (--fast) for the GPU that is
    meant, by default this machine's.

    `asked` are the settings that the user gave. Raises ValueError for one that cannot be combined
    with --fast, or that differs from what --fast chooses. Unless --checkpoint-blocks is given,
    there are checkpoints where the step does not fit the GPU without. Blocks in which torch.compile
    would find nothing to fuse are not compiled, unless --compile or --compile-blocks is given.
    """
    from ..costs.fast_memory import with_checkpoints

    # a setting that needs others is valid only once --fast has chosen these, so it is set at the
    # end
    later = (*NOT_ALONE, "compile")
    first = {name: value for name, value in settings.items() if name not in later}
    if first.get("sdpa_backend", SdpaBackend.AUTO) is not SdpaBackend.AUTO:
        first.setdefault("attention", Attention.SDPA)
    if device is not Device.CUDA:
        meant = NamedGpu(None)
    elif meant is None:
        meant = gpu_here()
    fast = fastest(make_config(device, **first), meant.name)
    wants_eager = asked.get("compile") is CompileMode.NONE
    for name, (_, setting) in SETTING_FIELDS.items():
        # whether there is anything to compile is known at the end
        if setting.chosen_by_fast and not (name == "compile" and wants_eager):
            _check_choice(name, fast, asked)
    switches = _switches(fast, asked)
    is_asked = asked.get("compile_blocks") or ("compile" in asked and not wants_eager)
    if asked.get("fp8") and asked.get("selective_checkpoints") and not is_asked:
        fast = fast.with_defaults("compile", "compile_blocks")  # they exclude each other
    fast = replace(fast, **switches)
    was_compiled = fast.compile is not CompileMode.NONE
    if meant.memory_bytes is not None and "checkpoint_blocks" not in asked:
        fast = with_checkpoints(fast, meant.memory_bytes, keeps_graph=bool(asked.get("cuda_graph")))
    if is_asked and was_compiled and fast.compile is CompileMode.NONE:
        raise ValueError(
            "this step fits the GPU only with selective checkpoints, and with those, blocks in fp8 "
            "are not compiled: leave out --compile"
        )
    if fast.has_nothing_to_compile and not is_asked:
        return fast.with_defaults("compile", "compile_blocks")
    if wants_eager:
        _check_choice("compile", fast, asked)
    return fast


def _check_choice(name: str, fast: RunConfig, asked: Mapping[str, Any]) -> None:
    """Raise ValueError if the user asked for another value of a setting than --fast chose."""
    chosen = getattr(fast if hasattr(fast, name) else fast.model, name)
    if asked.get(name, chosen) != chosen:
        flag = _typed(name)
        what = flag.removeprefix("--").replace("-", " ")
        raise ValueError(
            f"--fast chooses {what} itself, here {chosen}: leave out {flag} {asked[name]}"
        )


def explain_fast(configs: Iterable[RunConfig]) -> None:
    """Print on standard error what --fast chose, and what it does without because a package
    cannot be used.
    """
    configs = list(configs)
    for chosen in dict.fromkeys(map(describe_fast, configs)):
        print_aside(f"fast: {chosen}")
    gpu = first_gpu()
    device_name = None if gpu is None else gpu.name
    notes = chain.from_iterable(missing_packages(config, device_name) for config in configs)
    for note in dict.fromkeys(notes):
        print_aside(f"note: {note}")


PROFILERS = {
    "nsys": Profiler.NSYS,
    "profile": Profiler.KINETO,
    "memory": Profiler.MEMORY,
    "memory_first_step": Profiler.MEMORY,
}
"""The profiler of each flag that asks for one."""


def chosen_profiler(arguments: object) -> Profiler:
    """The profiler that these flags ask for; raise ValueError for several."""
    asked = [name for name in PROFILERS if getattr(arguments, name, False)]
    if len(asked) > 1:
        flags = " and ".join(map(flag_of, asked))
        raise ValueError(f"two profilers cannot watch one process, got {flags}: choose one")
    return PROFILERS[asked[0]] if asked else Profiler.NONE


def profiled_config(plain: RunConfig, profiler: Profiler, first_step: bool) -> RunConfig:
    """The same run under a profiler. The memory profiler records at most two steps, as steady
    steps are alike.
    """
    if profiler is not Profiler.MEMORY:
        return replace(plain, profiler=profiler)
    # a replayed graph allocates nothing, and the analysis of the history assumes fixed segments
    plain = replace(plain.without_graph, expandable_segments=False)
    if first_step:
        return replace(plain, profiler=profiler, warmup_steps=0, measured_steps=1)
    return replace(plain, profiler=profiler, measured_steps=min(2, plain.measured_steps))


def one_precision(precision: Precision | None, mixed_precision: bool) -> Precision:
    """The precision asked for, by default fp32; raise ValueError if --mixed-precision
    contradicts it.
    """
    if mixed_precision and precision not in (None, Precision.BF16):
        raise ValueError(
            f"--mixed-precision means bf16, but the precision asked for is {precision}"
        )
    return Precision.BF16 if mixed_precision else value_or(precision, Precision.FP32)
