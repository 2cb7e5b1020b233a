"""Flags that several commands share, as dataclasses.

Flags of settings are made from the declarations in config/.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_origin

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from ..config import ModelConfig, Precision, RunConfig
from ..settings import Setting, declared
from ..text import plain_word
from .machine import DeviceChoice, DeviceFlag, device_word, resolve_device

MAX_NAME_LENGTH = 100

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""A flag that is off unless it is given."""
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
"""A group of flags, under its own heading in the help and without a prefix."""


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
        """The members of the enumeration that these words name; a single member unless several are
        allowed.
        """
        members = tuple(map(kind, words))
        return members if many else members[0]

    return PrimitiveConstructorSpec(
        nargs="*" if many else 1,
        metavar=f"{{{','.join(values)}}}",
        instance_from_str=parsed,
        is_instance=_is_none,
        str_from_instance=_in_no_words,
        choices=values,
    )


def _is_none(value: object) -> bool:
    """Whether the value is the default of a flag whose default is chosen by a rule."""
    return value is None


def _in_no_words(_: object) -> list[str]:
    """The command-line words of a default that is chosen by a rule: none, since the help tells the
    rule.
    """
    return []


def _all_settings() -> Iterator[tuple[Field[Any], Setting]]:
    """The settings of a run in the order of their flags."""
    for attribute, setting in declared(RunConfig):
        if attribute.name == "model":
            yield from declared(ModelConfig)
        else:
            yield attribute, setting


SETTING_FIELDS = {attribute.name: (attribute, setting) for attribute, setting in _all_settings()}
"""The settings of a run by name; the model's settings replace the field `model`."""
AXES = tuple(name for name, (_, setting) in SETTING_FIELDS.items() if setting.plural)
"""Settings that a sweep takes several values of."""
FIRST = tuple(name for name, (_, setting) in SETTING_FIELDS.items() if setting.leads_flags)
"""Settings whose flags, and parts of default names, come before those of the model and of the
step.
"""
_SHOWN = [name for name, (_, setting) in SETTING_FIELDS.items() if setting.help]
_WITH_FLAGS = [name for name in _SHOWN if name not in FIRST]
_OF_MODEL = {"model_factory", *(attribute.name for attribute, _ in declared(ModelConfig))}
OF_MODEL = tuple(name for name in _WITH_FLAGS if name in _OF_MODEL)
OF_STEP = tuple(name for name in _WITH_FLAGS if name not in _OF_MODEL)


class Flags:
    """A group of flags; `with_flags` makes some of them from the declarations of settings."""

    settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The names of the settings by the flags made from them."""

    if TYPE_CHECKING:  # the flags that are made

        def __init__(self, **values: Any) -> None: ...  # noqa: ANN401

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401

    def given(self) -> dict[str, Any]:
        """The settings whose flags have a value, by name, with those of the groups in this one; the
        others are left to the configuration's rules.
        """
        values = {name: getattr(self, flag) for flag, name in self.settings.items()}
        for group in vars(self).values():
            if isinstance(group, Flags):
                values |= group.given()
        return {name: value for name, value in values.items() if value is not None}


def with_flags(
    *names: str,
    many: Collection[str] = (),
    rules: Mapping[str, str] = MappingProxyType({}),
    **defaults: object,
) -> Callable[[type[T]], type[T]]:
    """Make a class of arguments a dataclass that begins with a flag for each of these settings.

    Flags of the settings in `many` take several values. `defaults` are the command's own default
    values, by the names of settings. `rules` are defaults that the command chooses by a rule, in
    the words of the help; such a flag is None if it is not given.
    """
    flags = {}
    for name in names:
        attribute, setting = SETTING_FIELDS[name]
        default = defaults.get(name, attribute.default)
        flags[name] = _flag(attribute, setting, default, name in many, rules.get(name, ""))
    return lambda kind: _add_flags(kind, flags)


def with_flags_of(config: type) -> Callable[[type[T]], type[T]]:
    """Make a class of arguments a dataclass that begins with a flag for each setting that `config`
    declares.

    The flag of a tuple takes several values.
    """
    flags = {}
    for attribute, setting in declared(config):
        if setting.help:
            is_tuple = get_origin(get_args(attribute.type)[0]) is tuple
            flags[attribute.name] = _flag(attribute, setting, attribute.default, is_tuple, "")
    return lambda kind: _add_flags(kind, flags)


def _add_flags(kind: type[T], flags: Mapping[str, tuple[str, object, object]]) -> type[T]:
    """Make the class a dataclass that begins with these flags, by the names of their settings."""
    annotations = {}
    for flag, annotation, default in flags.values():
        annotations[flag] = annotation
        setattr(kind, flag, default)
    kind.__annotations__ = annotations | kind.__annotations__
    made = dataclass(frozen=True, kw_only=True)(kind)
    settings = {flag: name for name, (flag, _, _) in flags.items()}
    made.settings = MappingProxyType(settings)  # type: ignore[attr-defined]
    return made


def _flag(
    attribute: Field[Any], setting: Setting, default: object, many: bool, rule: str
) -> tuple[str, object, object]:
    """Name, annotated type and default of the flag of a setting; with `many` the flag takes
    several values.

    `rule` is the rule by which the command chooses the default, in the words of the help; if it is
    empty, the setting's own rule holds, if any. With either rule the returned default is None,
    which means that the flag was not given.
    """
    declared_type, *_ = get_args(attribute.type)
    # the first member of a union such as `str | None`, or the element type of a tuple
    kind = next(iter(get_args(declared_type)), declared_type)
    text = f"{setting.help} {setting.several}" if many and setting.several else setting.help
    other_name = setting.plural if many else setting.flag
    flag = other_name or attribute.name
    if isinstance(default, bool):
        annotation: Any = bool if default else Switch
        return flag, Annotated[annotation, tyro.conf.arg(help=text)], default
    values = tuple[kind, ...] if many else kind  # type: ignore[valid-type]
    rule = rule or _rule(setting, many)
    if not rule and setting.chosen_by_fast:
        # None, unlike the default value, shows --fast that the flag was not given
        rule = str(default)
    if not rule:
        if many and not isinstance(default, tuple):
            default = (default,)
        return flag, Annotated[values, tyro.conf.arg(help=text)], default
    if issubclass(kind, StrEnum):
        parser: tuple[object, ...] = (choices(kind, many=many),)
        metavar = setting.metavar or None
    else:
        parser = ()
        metavar = setting.metavar or kind.__name__.upper()
    if many and metavar:
        metavar = f"{metavar} [{metavar} ...]"
    return flag, Annotated[values | None, *parser, unset(metavar, rule, text)], None


def _rule(setting: Setting, many: bool) -> str:
    """A default that is not one value, in the words of the help."""
    usual = setting.by_device
    if usual is None:
        return setting.default
    if many:
        gpu = " ".join(map(str, usual.gpu_sweep or usual.gpu))
        cpu = " ".join(map(str, usual.cpu_sweep or usual.cpu))
        return f"{gpu} on a GPU, {cpu} on a CPU"
    rule = f"{usual.gpu} on a GPU, {usual.cpu} on a CPU"
    return f"{rule}, {setting.default}" if setting.default else rule


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
class FormatArguments:
    """Formats of tables besides CSV and Markdown."""

    tex: Switch = False
    """Write the tables for LaTeX too (.tex)."""
    typ: Switch = False
    """Write the tables for Typst too (.typ)."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The endings of the files that are asked for."""
        return tuple(ending for ending in ("tex", "typ") if getattr(self, ending))


@dataclass(frozen=True, kw_only=True)
class OutputArguments(FormatArguments):
    """Where a command writes that otherwise only prints."""

    output: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: write nothing)")
    ] = None
    """Directory for what is printed: tables (CSV, Markdown), and JSON, pictures or a page where
    the command has them.
    """

    def __post_init__(self) -> None:
        """Raise ValueError if a format of files is asked for without --output."""
        if self.formats and self.output is None:
            raise ValueError(f"--{self.formats[0]} needs --output, the directory to write to")


@dataclass(frozen=True, kw_only=True)
class KeepingArguments(FormatArguments):
    """What becomes of earlier results in the same directory, and how new ones are written."""

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
        """Raise ValueError for a time limit that is none."""
        check_timeout(self.timeout_s)


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError for a time that is no limit."""
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"--timeout-s must be positive and finite, got {timeout_s}")


def check_top(top: int) -> None:
    """Raise ValueError for a table without rows."""
    if top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")


def check_repeats(repeats: int, least: int = 1) -> None:
    """Raise ValueError for an impossible number of processes, or fewer than `least`."""
    if not least <= repeats <= 1000:
        raise ValueError(f"--repeats must be from {least} to 1000, got {repeats}")


def checked_name(name: str, flag: str = "--name") -> str:
    """The name itself, given by this flag; raise ValueError unless it is a plain, portable
    directory name.
    """
    if not re.fullmatch(rf"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,{MAX_NAME_LENGTH - 1}}}", name):
        raise ValueError(
            f"{flag} must be 1 to {MAX_NAME_LENGTH} letters, digits, '_', '.', '+' or '-', "
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
    words = plain_word("-".join(dict.fromkeys(precisions)))
    return f"{words}_{device_word(resolve_device(device))}"


def scaled_number(text: str) -> float:
    """The number of a text that may end in a letter of SCALES; raise ValueError for another one."""
    digits, scale = text, 1.0
    if digits[-1:].upper() in SCALES:
        digits, scale = digits[:-1], SCALES[digits[-1].upper()]
    try:
        return float(digits) * scale
    except ValueError:
        raise ValueError(f"could not convert string to float: {text!r}") from None


def _number(words: list[str]) -> float:
    """The number in the only word."""
    return scaled_number(words[0])


SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
ScaledNumber = Annotated[
    float,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=_number,
        is_instance=_is_none,
        str_from_instance=_in_no_words,
    ),
]
"""A number that may end as in `70B` or `15T`."""
