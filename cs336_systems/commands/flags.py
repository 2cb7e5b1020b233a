"""Flags that several commands share, as dataclasses, and the configuration that they describe.

Flags of settings are made from the declarations in config.py.
"""

import contextlib
import difflib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from ..config import (
    MAX_MEASURED_RANKS,
    SIZES,
    UNSIZED,
    USED_WITH,
    Arch,
    Attention,
    Device,
    ModelConfig,
    Parallel,
    Precision,
    Profiler,
    RunConfig,
    SdpaBackend,
)
from ..measure.inputs import check_factory, parameters_of
from ..measure.nvml import alike, disturbances, visible_gpus, why_none_visible
from ..model.fast.choose import check_packages, describe_fast, fastest, missing_packages
from ..settings import Setting, declared, flag_of
from ..text import plain_word, print_aside
from .outcome import UsageError

MAX_NAME_LENGTH = 100

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""A flag that is off unless it is given."""
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
"""A group of flags, under its own heading in the help and without a prefix."""
DeviceChoice = Literal["auto", "cpu", "cuda"]
DeviceFlag = Annotated[
    DeviceChoice, tyro.conf.arg(help="Where to run; auto is the GPU if there is one.")
]


COMMON = frozenset(
    {
        "size",
        "sizes",
        "context_length",
        "context_lengths",
        "batch_size",
        "mode",
        "modes",
        "precision",
        "precisions",
        "mixed_precision",
        "attention",
        "optimizer",
        "compile",
        "model",
        "parallel",
        "ranks",
        "device",
        "warmup_steps",
        "measured_steps",
        "fast",
        "profile",
        "nsys",
        "memory",
        "repeats",
        "name",
        "output",
        "dry_run",
        "json",
        "fit",
        "memory_gib",
        "device_name",
        "parameters",
        "tokens",
        "rungs",
        "network_gb_per_s",
    }
)
"""Flags that `--help` shows of a command with more than FEW; `--help-all` shows all."""
FEW = 20
HELP, HELP_ALL = ("-h", "--help"), "--help-all"
NEEDED = {
    "could not convert string to float: (.*)": "a number",
    r"invalid literal for int\(\) with base 10: (.*)": "a whole number",
    r"Exceeds the limit .*value has (\d+ digits)": "a shorter number",
    r"no type matching .* could be instantiated from (\[.*?\])\.": "such values",
}
"""What a flag needs, by the parser's error for another text."""


def parse(
    kind: Callable[..., T], prog: str, argv: Sequence[str] | None, description: str | None = None
) -> T:
    """The arguments in `argv`; raise UsageError for those that are wrong, and SystemExit after
    help.
    """
    config = (tyro.conf.EnumChoicesFromValues, tyro.conf.HelptextFromCommentsOff)
    if os.environ.get("NO_COLOR"):
        getattr(tyro, "_experimental_options", {})["ansi_codes"] = False  # tyro has no public way
    words = list(sys.argv[1:] if argv is None else argv)
    names = flag_names(kind)
    description = _unwrapped(description or inspect.getdoc(kind) or "")
    if HELP_ALL in words:
        words = [HELP[-1]]
    elif len(names) > FEW and not set(words).isdisjoint(HELP):
        kind = _with_common_flags(kind)
        description += f"\n\n{prog} {HELP_ALL} shows {len(names)} flags."
    said = io.StringIO()
    try:
        args = [_as_declared(word, names) for word in words]
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, prog=prog, args=args, description=description, config=config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except SystemExit as end:
        if not end.code:
            raise
        raise UsageError(f"{_in_a_line(said.getvalue())} ({prog} --help)") from None


def _unwrapped(text: str) -> str:
    """The text with a line for each paragraph; indented lines, such as examples, stay."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _in_a_line(box: str) -> str:
    """The error in a box that the parser has drawn, which goes on with help below a line."""
    said, hints = list[str](), list[str]()
    for row in box.splitlines()[1:-1]:
        text = row.strip("│ ")
        is_line = len(text) > 3 and set(text) <= set("─-")
        if said or not is_line:  # without these characters, there is a line above the error too
            (hints if hints or is_line else said).append(text)
    message = re.sub(r"^Error parsing (\w+Arguments: )?", "", " ".join(said))
    flag = message.partition(":")[0]
    meant = [hint for hint in hints if re.match("--?[a-z]", hint)]
    if not flag.startswith("-"):
        return f"{message}; did you mean {meant[0].split()[0]}?" if meant else message
    for error, kind in NEEDED.items():
        if wrong := re.search(error, message):
            return f"{meant[0]} needs {kind}, got {wrong[1]}"
    return message


def flag_names(kind: Callable[..., object]) -> frozenset[str]:
    """The fields of a class of arguments, and of its groups."""
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return frozenset()
    groups = {each.name: _group_of(each) for each in fields(kind)}
    return frozenset().union(
        *({name} if group is None else flag_names(group) for name, group in groups.items())
    )


def _group_of(each: Field[Any]) -> type | None:
    """The class of arguments that the field holds, or None if it is a flag."""
    kind = get_args(each.type)[0] if get_origin(each.type) is Annotated else each.type
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def _as_declared(word: str, names: Collection[str]) -> str:
    """The word, with `--size` for `--sizes` and the other way round where the command has only
    the other one.
    """
    flag, equals, value = word.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    other = name.removesuffix("s") if name.endswith("s") else f"{name}s"
    is_other = flag.startswith("--") and name not in names and other in names
    return f"--{other.replace('_', '-')}{equals}{value}" if is_other else word


def _with_common_flags(kind: Any) -> Any:  # noqa: ANN401 (a class of arguments)
    """The class of arguments without the flags of specialists, for its help."""
    own: dict[str, Any] = {"__annotations__": {}, "__doc__": kind.__doc__}
    for each in fields(kind):
        if (group := _group_of(each)) is not None:
            shown: Any = _with_common_flags(group)
            own["__annotations__"][each.name] = Annotated[shown, tyro.conf.OmitArgPrefixes]
            own[each.name] = field(default_factory=shown)
        elif each.name not in COMMON:
            own["__annotations__"][each.name] = Annotated[each.type, tyro.conf.Suppress]
            own[each.name] = each.default
    return dataclass(frozen=True, kw_only=True)(type(kind.__name__, (kind,), own))


def unset(metavar: str | None, default: object, text: str | None = None) -> object:
    """What the help shows for a flag whose default is chosen by a rule; `text` is its help if it
    has no docstring.
    """
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})", help=text)


RulesFile = Annotated[Path | None, unset("TOML", "none")]
"""A file of rules for the classes of kernels."""


def choices(kind: type[StrEnum], *, many: bool = False) -> PrimitiveConstructorSpec[Any]:
    """Parse a member of `kind`, or several; None if the flag was not given.

    The parser's own handling would list None among the choices, and the choices in no fixed order.
    """
    values = tuple(member.value for member in kind)

    def parsed(words: list[str]) -> object:
        members = tuple(map(kind, words))
        return members if many else members[0]

    def written(value: Any) -> list[str]:  # noqa: ANN401 (one member, several, or None)
        return [] if value is None else [str(member) for member in (value if many else (value,))]

    return PrimitiveConstructorSpec(
        nargs="*" if many else 1,
        metavar=f"{{{','.join(values)}}}",
        instance_from_str=parsed,
        is_instance=lambda value: value is None or isinstance(value, tuple if many else kind),
        str_from_instance=written,
        choices=values,
    )


def _all_settings() -> Iterator[tuple[Field[Any], Setting]]:
    for each, setting in declared(RunConfig):
        yield from declared(ModelConfig) if each.name == "model" else ((each, setting),)


FIELDS = {each.name: (each, setting) for each, setting in _all_settings()}
"""The settings of a run by name; the model's settings replace the field `model`."""
AXES = tuple(name for name, (_, setting) in FIELDS.items() if setting.plural)
"""Settings that a sweep takes several values of."""
FIRST = ("size", "context_length", "mode", "precision", "warmup_steps", "checkpoint_blocks")
"""Settings whose flags, and parts of default names, come before those of the model and of the
step.
"""
OF_MODEL = tuple(
    name
    for name, (each, setting) in FIELDS.items()
    if setting.help
    and name not in FIRST
    and (name == "model_factory" or (each, setting) in declared(ModelConfig))
)
OF_STEP = tuple(
    name
    for name, (_, setting) in FIELDS.items()
    if setting.help and name not in (*FIRST, *OF_MODEL)
)
NOT_ALONE = tuple(
    name
    for name, (each, setting) in FIELDS.items()
    if setting.rules and (each.default is False or (setting.is_shortcut and each.default == 0))
)
"""Switches and numbers with rules. Most rules require other settings, which --fast may have to
choose first.
"""


class Flags:
    """A group of flags; `with_flags` makes some of them from the declarations of settings."""

    settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The names of the settings by the flags made from them."""

    if TYPE_CHECKING:  # the flags that are made

        def __init__(self, **values: Any) -> None: ...  # noqa: ANN401

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401

    def given(self) -> dict[str, Any]:
        """The settings whose flags have a value, by name; the others are left to the
        configuration's rules.
        """
        values = {name: getattr(self, flag) for flag, name in self.settings.items()}
        return {name: value for name, value in values.items() if value is not None}


def with_flags(
    *names: str,
    many: Collection[str] = (),
    rules: Mapping[str, str] | None = None,
    **defaults: object,
) -> Callable[[type[T]], type[T]]:
    """Make a class of arguments a dataclass that begins with a flag for each of these settings.

    Flags of the settings in `many` take several values. `defaults` are the command's own default
    values, by the names of settings. `rules` are defaults that the command chooses by a rule, in
    the words of the help; such a flag is None if it is not given.
    """

    def add(kind: type[T]) -> type[T]:
        flags = {
            name: _made(
                *FIELDS[name],
                many=name in many,
                rule=(rules or {}).get(name),
                own_default=defaults.get(name),
            )
            for name in names
        }
        return _add_flags(kind, flags)

    return add


def with_flags_of(config: type) -> Callable[[type[T]], type[T]]:
    """Make a class of arguments a dataclass that begins with a flag for each setting that `config`
    declares.

    The flag of a tuple takes several values.
    """
    flags = {
        each.name: _made(each, setting, many=get_origin(get_args(each.type)[0]) is tuple)
        for each, setting in declared(config)
        if setting.help
    }
    return lambda kind: _add_flags(kind, flags)


def _add_flags(kind: type[T], flags: Mapping[str, tuple[str, object, object]]) -> type[T]:
    """Make the class a dataclass that begins with these flags, by the names of their settings."""
    for flag, _, default in flags.values():
        setattr(kind, flag, default)
    kind.__annotations__ = {
        flag: annotation for flag, annotation, _ in flags.values()
    } | kind.__annotations__
    made = dataclass(frozen=True, kw_only=True)(kind)
    settings = {flag: name for name, (flag, _, _) in flags.items()}
    made.settings = MappingProxyType(settings)  # type: ignore[attr-defined]
    return made


def _made(
    each: Field[Any],
    setting: Setting,
    *,
    many: bool,
    rule: str | None = None,
    own_default: object = None,
) -> tuple[str, object, object]:
    """Name, annotated type and default of the flag of a setting; the default is None where a
    rule chooses.
    """
    declared_type, *_ = get_args(each.type)
    kind = next(iter(get_args(declared_type)), declared_type)  # of `str | None`, str
    default = each.default if own_default is None else own_default
    text = " ".join(filter(None, (setting.help, setting.several if many else "")))
    flag = (setting.plural if many else setting.flag) or each.name
    rule = rule or _rule(setting, many) or (str(default) if setting.chosen_by_fast else "")
    if isinstance(default, bool):
        switch = (
            (tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint=""))
            if not default
            else ()
        )
        return flag, Annotated[bool, *switch, tyro.conf.arg(help=text)], default
    values = tuple[kind, ...] if many else kind  # type: ignore[valid-type]
    if not rule:
        is_one = many and not isinstance(default, tuple)
        return flag, Annotated[values, tyro.conf.arg(help=text)], (default,) if is_one else default
    is_choice = issubclass(kind, StrEnum)
    word = setting.metavar or kind.__name__.upper()
    metavar = (
        None if is_choice and not setting.metavar else f"{word} [{word} ...]" if many else word
    )
    parser = (choices(kind, many=many),) if is_choice else ()
    return flag, Annotated[values | None, *parser, unset(metavar, rule, text)], None


def _rule(setting: Setting, many: bool) -> str:
    """A default that is not one value, in the words of the help."""
    if (found := setting.by_device) is None:
        return setting.default
    if many:
        gpu, cpu = (
            " ".join(map(str, each))
            for each in (found.gpu_sweep or found.gpu, found.cpu_sweep or found.cpu)
        )
        return f"{gpu} on a GPU, {cpu} on a CPU"
    return ", ".join(
        filter(None, (f"{found.gpu} on a GPU", f"{found.cpu} on a CPU", setting.default))
    )


@with_flags(*OF_MODEL)
class ModelArguments(Flags):
    """What differs from the preset."""


@with_flags(*OF_MODEL, many=AXES)
class SweepModelArguments(Flags):
    """What differs from the preset."""


@with_flags(*OF_STEP)
class StepArguments(Flags):
    """What one step does."""

    device: DeviceFlag = "auto"


@with_flags(*OF_STEP, many=AXES)
class SweepStepArguments(Flags):
    """What one step does."""

    device: DeviceFlag = "auto"


@dataclass(frozen=True, kw_only=True)
class KeepingArguments:
    """What becomes of earlier results in the same directory."""

    fresh: Switch = False
    """Measure everything again; earlier records are kept beside."""
    allow_mixed: Switch = False
    """Go on with records that come from another GPU, driver, torch, code, own model or token
    file.
    """


@dataclass(frozen=True, kw_only=True)
class MeasuringArguments(KeepingArguments):
    """How the runs of a sweep are measured, and when they are measured again."""

    timeout_s: float = 600.0
    """Longest time for one run (seconds); the start of its process may take as long, and at
    least 60 s.
    """

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError for a time that is no limit."""
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"--timeout-s must be positive and finite, got {timeout_s}")


def check_repeats(repeats: int, least: int = 1) -> None:
    """Raise ValueError for an impossible number of processes, or fewer than `least`."""
    if not least <= repeats <= 1000:
        raise ValueError(f"--repeats must be from {least} to 1000, got {repeats}")


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
    if size not in SIZES:
        by_lower = {name.lower(): name for name in SIZES}
        close = difflib.get_close_matches(size.lower(), by_lower, n=1)
        hint = f"; did you mean {by_lower[close[0]]}?" if close else "."
        raise ValueError(f"unknown size {size!r}{hint} Sizes: {', '.join(SIZES)}")
    parallel = settings.get("parallel", Parallel.NONE)
    if parallel is not Parallel.NONE and "ranks" not in settings:
        raise ValueError(
            f"--parallel {parallel} needs --ranks, the number of processes that share a step, got "
            "none"
        )
    preset = SIZES[size]
    if context_length is None:
        usual = (
            default_on(device, "context_length")
            if preset.arch is Arch.CS336
            else preset.context_length
        )
        context_length = int(usual)
    of_model = {each.name for each in fields(ModelConfig)} & settings.keys()
    shape = replace(
        preset, context_length=context_length, **{name: settings.pop(name) for name in of_model}
    )
    checkpoint_blocks = settings.get("checkpoint_blocks", 0)
    if checkpoint_blocks > shape.num_layers and settings.get("model_factory") is None:
        raise ValueError(
            f"--checkpoint-blocks must be from 0 to the {shape.num_layers} blocks that {size} has "
            f"here, got {checkpoint_blocks}"
        )
    if "tokens" in settings:
        check_tokens(settings["tokens"], shape.context_length)
    is_changed = any(
        getattr(shape, name) != getattr(preset, name)
        for name in ("d_model", "d_ff", "num_layers", "num_heads")
    )
    size = "custom" if is_changed else size
    config = RunConfig(size=size, model=shape, device=device, **settings)
    named = {
        "--model": config.model_factory,
        "--own-ddp": config.own_ddp,
        "--own-optimizer": config.own_optimizer,
    }
    for flag, name in named.items():
        if name is not None:
            check_factory(name, flag)
    return config


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
    asked = {name: settings[name] for name in given if name in settings}
    config = (
        make_fast_config(device, asked, many=many, **settings)
        if fast
        else make_config(device, **settings)
    )
    return checked_factory(config, given, many=many)


def _with_own_parts(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with `own` where one names an own part; raise ValueError for one that another
    makes useless.
    """
    for name, (other, values) in USED_WITH.items():
        if settings.get(name, FIELDS[name][0].default) == FIELDS[name][0].default:
            continue
        if len(values) == 1 and settings.get(other) in (None, Parallel.NONE):
            settings[other] = values[0]
        if settings.get(other) not in values:
            needed = " or ".join(values)
            flag, of_other = (flag_of(each, FIELDS[each][1]) for each in (name, other))
            raise ValueError(
                f"{flag} needs {of_other} {needed}, got {settings.get(other) or 'none'}"
            )
    return settings


def checked_factory(config: RunConfig, given: Collection[str], *, many: bool = False) -> RunConfig:
    """The run itself; raise ValueError for a flag of the model's shape that the user's own factory
    does not take.

    `given` are the names of the settings that the user gave, with `many` by the flags of a sweep.
    The vocabulary and the context shape the tokens of any model, so they always have an effect. A
    factory whose source does not tell its parameters is accepted.
    """
    taken = None if config.model_factory is None else parameters_of(config.model_factory)
    if taken is None:
        return config
    values = {
        name: getattr(config.model, name)
        for name in OF_MODEL
        if name not in ("model_factory", "vocab_size")
    }
    ignored = {
        name: value
        for name, value in values.items()
        if name not in taken and value != FIELDS[name][0].default
    }
    preset = SIZES.get(config.size)
    if preset and preset.vocab_size == FIELDS["vocab_size"][0].default and not taken & {*values}:
        ignored |= {"size": config.size} if config.size != default_on(config.device, "size") else {}
    for name in [name for name in ignored if name in given]:
        raise ValueError(
            f"{_typed(name, many)} {ignored[name]} would do nothing: the factory "
            f"{config.model_factory} does not take "
            f"{'any dimension of the model' if name == 'size' else name}; leave it out"
        )
    if taken & ({*values} - {"context_length"}):
        return config
    # the rest is nothing to the model: one configuration, whatever sizes a sweep goes through
    shape = config.model
    model = replace(
        SIZES["small"], vocab_size=shape.vocab_size, context_length=shape.context_length
    )
    return replace(config, size=UNSIZED, model=model)


def _typed(name: str, many: bool) -> str:
    """The flag of a setting as it is typed, with `many` that of a sweep."""
    setting = FIELDS[name][1]
    return flag_of(setting.plural if many and setting.plural else name, setting)


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
    if (
        config.ranks > 1
        and config.device is Device.CUDA
        and (found := len(alike(visible_gpus()))) < config.ranks
    ):
        raise ValueError(
            f"--ranks {config.ranks} needs as many GPUs of one kind that this process can see "
            f"(CUDA_VISIBLE_DEVICES), found {found}"
        )
    check_packages(config)
    return config


def default_on(device: Device, name: str) -> Any:  # noqa: ANN401 (the type of the setting)
    """The default of a setting that depends on the device."""
    found = FIELDS[name][1].by_device
    assert found is not None
    return found.gpu if device is Device.CUDA else found.cpu


def make_fast_config(
    device: Device,
    asked: Mapping[str, Any],
    *,
    many: bool = False,
    **settings: Any,  # noqa: ANN401
) -> RunConfig:
    """The configuration of these settings in the fastest way known for this machine's device
    (--fast).

    `asked` are the settings that the user gave, with `many` by the flags of a sweep. Raises
    ValueError for one that cannot be combined with --fast, or that differs from what --fast
    chooses. Unless --checkpoint-blocks is given, there are checkpoints where the step does not fit
    the GPU without.
    """
    from ..costs.fast_memory import with_checkpoints

    # a switch that needs other settings is valid only once --fast has chosen these, so it is set at
    # the end
    first = {name: value for name, value in settings.items() if name not in NOT_ALONE}
    if first.get("sdpa_backend", SdpaBackend.AUTO) is not SdpaBackend.AUTO:
        first.setdefault("attention", Attention.SDPA)
    gpus = visible_gpus() if device is Device.CUDA else ()
    fast = fastest(make_config(device, **first), gpus[0].name if gpus else None)
    for name, (_, setting) in FIELDS.items():
        chosen = getattr(fast if hasattr(fast, name) else fast.model, name)
        if setting.chosen_by_fast and asked.get(name, chosen) != chosen:
            flag = _typed(name, many)
            what = flag.removeprefix("--").replace("-", " ")
            raise ValueError(
                f"--fast chooses {what} itself, here {chosen}: leave out {flag} {asked[name]}"
            )
    switches: dict[str, Any] = {name: asked[name] for name in NOT_ALONE if asked.get(name)}
    if asked.get("fp8") or asked.get("selective_checkpoints"):
        switches.setdefault("fused_activations", False)  # neither can be combined with it
    if asked.get("expandable_segments") and fast.is_shared:
        switches.setdefault("cuda_graph", False)  # a graph would exclude expandable segments
    fast = replace(fast, **switches)
    memory_bytes = (gpus[0].usable_bytes or gpus[0].memory_bytes) if gpus else None
    if memory_bytes is None or "checkpoint_blocks" in asked:
        return fast
    return with_checkpoints(fast, memory_bytes, keeps_graph=bool(asked.get("cuda_graph")))


def explain_fast(configs: Iterable[RunConfig]) -> None:
    """Print on standard error what --fast chose, and what it does without because a package
    cannot be used.
    """
    configs = list(configs)
    for chosen in dict.fromkeys(map(describe_fast, configs)):
        print_aside(f"fast: {chosen}")
    gpus = visible_gpus()
    missing = (
        line
        for config in configs
        for line in missing_packages(config, gpus[0].name if gpus else None)
    )
    for line in dict.fromkeys(missing):
        print_aside(f"note: {line}")


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
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise ValueError(f"two profilers cannot watch one process, got {flags}: choose one")
    return PROFILERS[asked[0]] if asked else Profiler.NONE


def profiled_config(plain: RunConfig, profiler: Profiler, first_step: bool = False) -> RunConfig:
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


def checked_name(name: str) -> str:
    """The name itself; raise ValueError unless it is a plain, portable directory name."""
    if not re.fullmatch(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,{MAX_NAME_LENGTH - 1}}}", name):
        raise ValueError(
            f"--name must be 1 to {MAX_NAME_LENGTH} letters, digits, '_', '.', '+' or '-', "
            f"beginning with a letter, digit or '_'; got {name[:120]!r}"
        )
    return name


def value_or(value: T | None, default: T) -> T:
    """The value, or the default where the flag was not given."""
    return default if value is None else value


def study_name(name: str | None, precisions: Sequence[Precision], device: DeviceChoice) -> str:
    """The name given, or precisions and device, so that machines that share a directory do not
    collide.
    """
    if name is not None:
        return checked_name(name)
    return "_".join(
        (plain_word("-".join(dict.fromkeys(precisions))), device_word(resolve_device(device)))
    )


def resolve_device(device: DeviceChoice) -> Device:
    """The device to use; raise ValueError for cuda where this process can see no GPU."""
    found = bool(visible_gpus())
    if device == "cuda" and not found:
        raise ValueError(
            "--device cuda needs an NVIDIA GPU that this process can see (CUDA_VISIBLE_DEVICES), "
            "found none; try --device cpu"
        )
    return Device.CUDA if device == "cuda" or (device == "auto" and found) else Device.CPU


def explain_cpu_fallback(device: DeviceChoice) -> None:
    """Print on standard error why `auto` means the CPU although the machine has GPUs, if none of
    them is visible.
    """
    if device == "auto" and (why := why_none_visible()) is not None:
        print_aside(f"note: --device auto takes the CPU: {why}")


def look_at_machine(device: Device) -> None:
    """Say on standard error, before a measurement, what may put its times in doubt."""
    if found := disturbances(visible_gpus() if device is Device.CUDA else ()):
        print_aside(f"in doubt: {'; '.join(found)}")


def in_flags(message: str, names: Collection[str]) -> str:
    """The message with the flags in place of the fields of these names, unless they are part of
    a longer word.
    """
    long = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    return re.sub(
        rf"(?<![\w./\"'-])({long})(?![\w./\"'-])",
        lambda name: f"--{name[0].replace('_', '-')}",
        message,
    )


def _number(words: list[str]) -> float:
    digits, scale = words[0], 1.0
    if digits[-1:].upper() in SCALES:
        digits, scale = digits[:-1], SCALES[digits[-1].upper()]
    try:
        return float(digits) * scale
    except ValueError:
        raise ValueError(f"could not convert string to float: {words[0]!r}") from None


SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
Number = Annotated[
    float,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=_number,
        is_instance=lambda value: value is None or isinstance(value, int | float),
        str_from_instance=lambda value: [] if value is None else [str(value)],
    ),
]
"""A number that may end as in `70B` or `15T`."""


def device_word(device: Device) -> str:
    """The device as part of a directory's name; `gpu` for one that is not in this machine."""
    gpus = visible_gpus()
    return "cpu" if device is Device.CPU else plain_word(gpus[0].name) if gpus else "gpu"
