"""The declaration of a setting of a run: all that other modules need to know besides its type and
default.

`fused_loss: Annotated[bool, Setting("...", rules=(...))] = False` in a configuration class gives
the setting its flag, help, checks, place in labels, column in tables and phrase in notes.
"""

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any, Literal

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
    label: int | None = 1
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
    noted: Literal["always", "first", "unusual", "never"] = "unusual"
    """When notes below tables name the setting: always; if it is not at its default, before others
    (first) or after them (unusual); or never, as a column or an axis shows it.
    """
    csv_place: int | None = None
    """Place of its column in CSV files, which always have it: up to 19 the model and the step, from
    20 shortcuts, from 30 what tells runs apart, from 40 what seldom differs. Without a place, the
    column comes after these, in order of declaration, if a run has another value than the default.
    """
    always_in_csv: bool = False
    """CSV files have the column although it has no place."""
    name_place: int | None = None
    """Place in names and among the distinguishing columns of tables, where it is not the place in
    CSV files.
    """
    named_last: bool = False
    """Names and tables have it only where runs do not differ in any other setting."""
    group: str = ""
    """CSV files have the columns of all settings of a group if they have one of them."""
    implied_by_size: bool = False
    """The preset size decides it, so that tables show it only for runs of one size that differ."""
    binds_own_model: bool = False
    """The user's own model must keep to it; it may choose all else in `ModelConfig` itself."""
    used_with: tuple[str, tuple[StrEnum, ...]] | None = None
    """Another setting and its values with which this one has an effect. With other values it has
    its default, so that runs that do the same have the same key.
    """
    without_cost: bool = False
    """It changes no operation and no tensor of the step."""
    is_common: bool = False
    """`--help` shows the flag of a command with many."""
    leads_flags: bool = False
    """The flag, and the part of default names, comes before those of the model and of the step."""


shortcut = partial(Setting, is_shortcut=True)
"""Declares a setting that makes the same step faster."""


@cache
def _declared(kind: type) -> tuple[tuple[Field[Any], Setting], ...]:
    """The fields of a configuration class, each with the `Setting` in its annotation."""
    pairs = []
    for field_ in fields(kind):
        metadata = getattr(field_.type, "__metadata__", ())
        settings = [item for item in metadata if isinstance(item, Setting)]
        pairs.append((field_, settings[0] if settings else Setting()))
    return tuple(pairs)


def declared(config: object) -> tuple[tuple[Field[Any], Setting], ...]:
    """The fields of a configuration, or of its class, each with its declaration (a default one
    if it has none).
    """
    return _declared(config if isinstance(config, type) else type(config))


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
    if value is None:
        return ""
    if isinstance(value, bool):
        return word if value else f"no {word}"
    text = f"{value:g}" if isinstance(value, float) else text_of(value)
    if len(text) > MAX_WORD:
        text = f"{text[: MAX_WORD // 2 - 1]}…{text[-MAX_WORD // 2 :]}"
    return f"{word}{text}" if word in ("", "#") else f"{word} {text}"


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
    for choice, _ in declared(config):
        if isinstance(choice.default, StrEnum):
            member = type(choice.default)(getattr(config, choice.name))
            object.__setattr__(config, choice.name, member)


def non_defaults(config: object) -> dict[str, object]:
    """Scalar fields that differ from their defaults, so that a field added later leaves earlier
    keys as they are.
    """
    values = {}
    for scalar, _ in declared(config):
        value = getattr(config, scalar.name)
        if value != scalar.default and not is_dataclass(value):
            values[scalar.name] = value
    return values


def check(config: object) -> None:
    """Raise ValueError for a value outside its limits or against a rule; the message names the
    setting or its flag.
    """
    settings = [(part, setting, getattr(config, part.name)) for part, setting in declared(config)]
    for part, setting, value in settings:
        _check_limits(part.name, setting, value if isinstance(value, tuple) else (value,))
    for part, setting, value in settings:
        if value != part.default:
            _check_rules(part.name, setting, config)


def _check_limits(name: str, setting: Setting, values: tuple[Any, ...]) -> None:
    """Raise ValueError for values of the setting below its `least` or above its `most`."""
    if not values:
        raise ValueError(f"{name} needs at least one value")
    if setting.least is not None and min(values) < setting.least:
        raise ValueError(f"{name} must be at least {setting.least}, got {min(values)}")
    most = setting.most or MOST
    if isinstance(values[0], int) and max(values) > most:
        got = shorten(str(max(values)), MAX_WORD)
        raise ValueError(f"{name} must be at most {most}, got {got}")


def _check_rules(name: str, setting: Setting, config: object) -> None:
    """Raise ValueError for the first rule of the setting that the configuration does not meet."""
    for rule in setting.rules:
        if not rule.is_met(config):
            raise ValueError(rule.otherwise.format(flag=flag_of(name, setting), config=config))
