"""The declaration of a setting of a run: all that other modules need to know besides its type and
default.

`fused_loss: Annotated[bool, Setting("...", rules=(...))] = False` in a configuration class gives
the setting its flag, help, checks, place in labels, column in tables and phrase in notes.
"""

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from .text import shorten, text_of

MAX_WORD = 40
"""Most characters of one value in words; a longer one, such as a path, loses its middle."""

MOST = 2**63 - 1
"""Largest number of any setting: what the types of PyTorch and of files hold."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that the configuration must meet wherever a setting is not at its default."""

    is_met: Callable[[Any], bool]
    """Takes the configuration."""
    otherwise: str
    """Error message; `{flag}` stands for the flag of the setting, `{config.name}` for any value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByDevice:
    """Defaults that depend on the device: the value of a single run or of a study, and the
    values of a sweep.
    """

    gpu: Any
    cpu: Any
    gpu_sweep: tuple[Any, ...] = ()
    cpu_sweep: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting; what it leaves out follows from the name, type and default
    of the field.
    """

    help: str = ""
    """Help text of the flag; a setting without it has no flag."""
    flag: str = ""
    """Name of the flag, if it is not the field's."""
    metavar: str = ""
    """Placeholder for the value in the help, if it is not the type."""
    default: str = ""
    """The default in the words of the help, where a rule decides it."""
    by_device: ByDevice | None = None
    plural: str = ""
    """Name of the flag of a sweep, which takes several values; empty if a sweep takes one value
    too.
    """
    several: str = ""
    """Sentence that the help of a sweep adds."""
    chosen_by_fast: bool = False
    """--fast chooses the value, and refuses a flag that asks for another."""
    is_shortcut: bool = False
    """Makes the same step faster: the ladder starts without it, and memory is predicted only
    without it.
    """
    least: int | None = None
    most: int | None = None
    rules: tuple[Rule, ...] = ()
    """What the setting needs, and what it cannot be combined with."""
    word: str | None = None
    """Word before the value in labels and names, as in `batch 8`; empty for none. By default the
    heading.
    """
    label: int | None = 4
    """Place in labels: smaller numbers come first, equal ones in order of declaration. A setting
    with 0 is always shown, one with None never, and any other only if it is not at its default.
    """
    heading: str = ""
    """Heading of its column; by default the name with spaces."""
    column: str | None = None
    """Name of its column, if it is not the field's; empty if the column of another setting shows
    the value.
    """
    cells: Mapping[Any, str] = field(default_factory=dict)
    """Texts of values in the column, where they are not the values."""
    note: str = ""
    """Phrase in notes below tables, with `{}` for the value; by default as in labels."""
    notes: Mapping[Any, str] = field(default_factory=dict)
    """Phrases for single values."""


_DECLARED: dict[type, tuple[tuple[Field[Any], Setting], ...]] = {}


def declared(config: object) -> tuple[tuple[Field[Any], Setting], ...]:
    """The fields of a configuration, or of its class, each with its declaration (a default one
    if it has none).
    """
    kind = config if isinstance(config, type) else type(config)
    if kind not in _DECLARED:
        found = []
        for each in fields(kind):
            metadata = getattr(each.type, "__metadata__", ())
            found.append(
                (each, next((item for item in metadata if isinstance(item, Setting)), Setting()))
            )
        _DECLARED[kind] = tuple(found)
    return _DECLARED[kind]


def flag_of(name: str, setting: Setting | None = None) -> str:
    """The flag of a setting, or of the field of this name, as it is typed: `--batch-size`."""
    word = name if setting is None else setting.flag or name
    return f"--{word.replace('_', '-')}"


def heading_of(name: str, setting: Setting) -> str:
    """Heading of the setting's column."""
    return setting.heading or name.replace("_", " ")


def in_words(name: str, setting: Setting, value: object) -> str:
    """A setting in a few words: `batch 8`, `no ranges`; empty for unknown."""
    word = heading_of(name, setting) if setting.word is None else setting.word
    if value is None or isinstance(value, bool):
        return "" if value is None else word if value else f"no {word}"
    text = text_of(value)
    short = (
        text if len(text) <= MAX_WORD else f"{text[: MAX_WORD // 2 - 1]}…{text[-MAX_WORD // 2 :]}"
    )
    return f"{word}{' ' if word not in ('', '#') else ''}{short}"


def in_note(name: str, setting: Setting, value: object) -> str:
    """A setting as notes below tables say it: `a checkpoint every 2 blocks`."""
    if not setting.note or value is False:
        return in_words(name, setting, value)
    return setting.notes.get(value) or setting.note.format(text_of(value))


def make_choices(config: object) -> None:
    """Replace plain strings by the enum members that they name, because code compares members by
    identity.

    Raises ValueError for other strings.
    """
    for each, _ in declared(config):
        if isinstance(each.default, StrEnum):
            object.__setattr__(config, each.name, type(each.default)(getattr(config, each.name)))


def non_defaults(config: object) -> dict[str, object]:
    """Scalar fields that differ from their defaults, so that a field added later leaves earlier
    keys as they are.
    """
    values = ((each, getattr(config, each.name)) for each, _ in declared(config))
    return {
        each.name: value
        for each, value in values
        if value != each.default and not is_dataclass(value)
    }


def check(config: object) -> None:
    """Raise ValueError for a value outside its limits or against a rule; the message names the
    setting or its flag.
    """
    settings = [(each, setting, getattr(config, each.name)) for each, setting in declared(config)]
    for each, setting, value in settings:
        if value == ():
            raise ValueError(f"{each.name} needs at least one value")
        values = value if isinstance(value, tuple) else (value,)
        if setting.least is not None and min(values) < setting.least:
            raise ValueError(f"{each.name} must be at least {setting.least}, got {min(values)}")
        if isinstance(values[0], int) and max(values) > (most := setting.most or MOST):
            raise ValueError(
                f"{each.name} must be at most {most}, got {shorten(str(max(values)), MAX_WORD)}"
            )
    for each, setting, value in settings:
        for rule in setting.rules if value != each.default else ():
            if not rule.is_met(config):
                raise ValueError(
                    rule.otherwise.format(flag=flag_of(each.name, setting), config=config)
                )
