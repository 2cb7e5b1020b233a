"""Names configurations by the settings that distinguish them: in columns of a table, in words and
in names of files.

The `identity` of a run is all of its settings by column. `distinguishing` chooses the columns in
which runs differ, and `shared_settings` puts the settings that they have in common in words. The
settings are the fields of RunConfig and ModelConfig, so that a field that is added there needs no
change here.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

from ..config import (
    SETTINGS,
    SIZES,
    UNSIZED,
    WATCHED,
    Attention,
    CompileMode,
    Mode,
    ModelConfig,
    RunConfig,
    SdpaBackend,
)
from ..settings import Setting, heading_of, in_note, in_words
from ..text import LONGEST_PART, shortened, text_of
from .columns import Column

Identity: TypeAlias = dict[str, Any]
"""All settings of a run by column; None is unknown. Two are equal only if configuration and
device are the same.
"""

SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")
"""Columns of the model's inner sizes, which are empty for a user's own model because they are
unknown.
"""
SHORTCUTS = (
    "checkpoint_blocks",
    "pad_vocabulary",
    "cast_once",
    "cuda_graph",
    "learning_rate",
    "fused_loss",
    "fp8",
    "fused_blocks",
)
"""Columns of settings that make a step smaller or faster, and of the learning rate."""
LEADING = (
    "size",
    "arch",
    *SHAPE,
    "vocab_size",
    "context_length",
    "batch_size",
    "mode",
    "precision",
    "attention",
    "compile",
    "optimizer",
    "device_name",
    *SHORTCUTS,
    "profiler",
    "repeat",
)
"""First columns of the CSV files of profiles; all other settings are the last columns."""
UNLISTED = ("phases", "ranges", "tokens", "seed", "rope_theta")
"""Settings that results.csv has after the columns of RESULTS."""
LISTED = (*LEADING, *UNLISTED, "device", "warmup_steps", "measured_steps", "digest")
"""Columns that CSV files always have; any other setting has one if a run differs from its
default.
"""
PARALLEL = ("parallel", "ranks", "shard_optimizer")
TOGETHER = (PARALLEL, ("selective_checkpoints", "keep_hidden", "expandable_segments"))
"""Groups of settings that have columns if one of the group has."""
_DEFAULTS = {
    field.name: field.default for part in (ModelConfig, RunConfig) for field in fields(part)
}
NOT_OF_A_LOOP = ("optimizer", "learning_rate", "compile", "seed")
"""Settings that are not known of a watched loop."""
MUST_KEEP = ("context_length", "vocab_size")
"""Settings that a user's own model must have; the others are only offered to its factory."""
MAX_FILE_NAME = 100
"""Longest name of a file without its ending, in characters; the names of pictures are a little
longer.
"""

ALWAYS = ("size", "context_length")
"""Columns that tables and names always have, whether configurations differ in them or not."""
_FIRST = (
    "mode",
    "precision",
    "batch_size",
    "attention",
    "compile",
    "optimizer",
    "arch",
    "device_name",
    "profiler",
    *SHORTCUTS,
)
"""Settings that come first in names and tables; the others follow in the order of their
declaration.
"""
_IMPLIED = (*SHAPE, "vocab_size")
"""Settings that follow from a preset size."""
_LAST = ("repeat", "device", "digest")
"""Columns that are used only if runs do not differ in any other."""
_FIRST_IN_NOTES = (
    "device_name",
    "arch",
    "batch_size",
    "mode",
    "precision",
    "attention",
    "compile",
    "optimizer",
    "warmup_steps",
    "measured_steps",
)
_ALWAYS_IN_NOTES = {*_FIRST_IN_NOTES} - {"compile"}
"""Settings that notes name even if they have their usual values."""
_BESIDE_NOTES = ("size", *SHAPE, "context_length", "profiler", "repeat", "device", "digest")
"""Settings that notes leave out, because a column or an axis shows them."""
_USUALLY_OFF = {field.name for field in fields(RunConfig) if field.default is False}
"""Settings that names leave out where they are off."""
OTHERS: Mapping[str, Setting] = MappingProxyType(
    {
        "device_name": Setting(heading="device", word="", note="{}"),
        "digest": Setting(heading="record"),
    }
)
"""Columns that are not settings and may distinguish runs, declared as settings are."""


def identities(runs: Iterable[tuple[RunConfig, str | None]]) -> list[Identity]:
    """The identity of each run, given with the name of its device.

    If all known names are the same, runs without a name get it too.
    """
    found = [identity(config, device_name) for config, device_name in runs]
    devices = {row["device_name"] for row in found} - {None}
    return (
        [row | {"device_name": next(iter(devices))} for row in found]
        if len(devices) == 1
        else found
    )


def identity(config: RunConfig, device_name: str | None) -> Identity:
    """The identity of a run: the columns LEADING and UNLISTED, then all other settings, then the
    digest.
    """
    return {**_settings(config), "device_name": device_name}


@cache
def _settings(config: RunConfig) -> Identity:
    found = {**_by_columns(settings_of(config)), "size": size_text(config), "digest": config.digest}
    return {name: found.get(name) for name in (*LEADING, *UNLISTED, *found)}


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The values of all settings, those of the model among them."""
    return {
        field.name: getattr(part, field.name)
        for part in (config, config.model)
        for field in fields(part)
        if field.name != "model"
    }


def usual_settings(config: RunConfig) -> dict[str, Any]:
    """The default values of all settings for a run of this size."""
    preset = SIZES.get(config.size)
    usual = {field.name: field.default for field in fields(config) if field.name != "model"}
    return usual | {
        field.name: getattr(preset, field.name, field.default) for field in fields(config.model)
    }


def _by_columns(values: Mapping[str, Any]) -> Identity:
    """The settings by column. Some columns combine two settings, or write a value in other
    words.
    """
    is_own = values["model_factory"] is not None
    is_watched = is_own and values["model_factory"].startswith(f"{WATCHED}:")
    attention, backend = values["attention"], values["sdpa_backend"]
    by_block = values["compile_blocks"] and values["compile"] is not CompileMode.NONE
    has_backend = attention is not Attention.NAIVE and backend is not SdpaBackend.AUTO
    found = {
        **values,
        **(dict.fromkeys(SHAPE) if is_own else {}),
        **(dict.fromkeys(NOT_OF_A_LOOP) if is_watched else {}),
        "arch": None if is_watched else values["model_factory"] if is_own else values["arch"],
        "vocab_size": None if values["size"] == UNSIZED else values["vocab_size"],
        "attention": None if is_own else f"{attention}-{backend}" if has_backend else attention,
        "parallel": values["own_ddp"] or values["parallel"],
        **({} if is_watched else {"optimizer": values["own_optimizer"] or values["optimizer"]}),
        **(
            {}
            if is_watched
            else {"compile": f"{values['compile']}-blocks" if by_block else values["compile"]}
        ),
    }
    cells = {}
    for name, value in found.items():
        setting = _setting(name)
        if column := name if setting.column is None else setting.column:
            cells[column] = setting.cells.get(
                value, str(value) if isinstance(value, StrEnum) else value
            )
    return cells


@cache
def _setting(name: str) -> Setting:
    """How the setting, or the column, of this name is declared."""
    return OTHERS.get(name) or SETTINGS.get(name, Setting())


def heading(name: str) -> str:
    """Heading of the column of this name."""
    return heading_of(name, _setting(name))


def size_text(config: RunConfig) -> str:
    """The name of the size; for a user's own model, that of its factory and the sizes that it was
    offered.

    These are the preset's name and all values that differ from the preset; none where the factory
    takes no sizes.
    """
    if config.model_factory is None:
        return config.size
    usual = usual_settings(config)
    offered = {field.name: getattr(config.model, field.name) for field in fields(config.model)}
    changed = [
        f"{name} {text_of(value)}"
        for name, value in offered.items()
        if name not in MUST_KEEP and value != usual[name]
    ]
    preset = [] if config.size in ("custom", UNSIZED) else [config.size]
    name = config.model_factory.partition(":")[2]
    return ", ".join((" ".join([name, *preset]), *([] if config.size == UNSIZED else changed)))


def trailing(rows: Sequence[Identity]) -> list[str]:
    """The last columns of the CSV files of profiles: all settings that are not in LEADING."""
    return [name for name in without_unused(rows) if name not in (*LEADING, "digest")]


def without_unused(rows: Sequence[Identity]) -> list[str]:
    """All columns, but of the settings that are not LISTED only those that one of the runs uses."""
    names = list(rows[0]) if rows else []
    used = {
        name
        for name in names
        if name in LISTED or any(row.get(name) != _DEFAULTS.get(name) for row in rows)
    }
    used.update(*(group for group in TOGETHER if not used.isdisjoint(group)))
    return [name for name in names if name in used]


def distinguishing(rows: Sequence[Identity], always: Sequence[str] = ALWAYS) -> list[str]:
    """The columns that distinguish the rows: `always`, and every setting of which the rows have
    several values.

    Settings that follow from a size count only if rows of one size differ in them. Columns of _LAST
    are added until no two different rows look the same.
    """
    settings = [
        name for name in (rows[0] if rows else ()) if name not in (*always, *_IMPLIED, *_LAST)
    ]
    ordered = sorted(
        settings, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)
    )
    found = [*always, *(name for name in ordered if _varies(rows, name))]
    by_size: dict[str, list[Identity]] = {}
    for row in rows if "size" in found else ():
        by_size.setdefault(row["size"], []).append(row)
    found += [name for name in _IMPLIED if any(_varies(own, name) for own in by_size.values())]
    num_different = len({tuple(row.values()) for row in rows})
    left = iter(name for name in (*ordered, *_IMPLIED, *_LAST) if name not in found)
    while len({tuple(_cell(row.get(name)) for name in found) for row in rows}) < num_different:
        if (name := next(left, None)) is None:
            break
        found += [name] if len({row.get(name) for row in rows}) > 1 else []
    return found


def _varies(rows: Sequence[Identity], name: str) -> bool:
    """Whether the column has several values, apart from unknown."""
    return len({row.get(name) for row in rows} - {None}) > 1


def _cell(value: object) -> str:
    return shortened(text_of(value), LONGEST_PART)


def identity_columns(
    rows: Sequence[Mapping[str, Any]], always: Sequence[str] = ALWAYS
) -> list[Column]:
    """The distinguishing columns of a table; each row has its identity under `identity`."""
    found = [row["identity"] for row in rows]
    return [
        Column(heading(name), numeric=_is_numeric(found, name), key=name, text=_identity_cell(name))
        for name in distinguishing(found, always)
    ]


def _identity_cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: _cell(row["identity"][name])


def _is_numeric(rows: Sequence[Identity], name: str) -> bool:
    values = [row[name] for row in rows if row[name] is not None]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def rows_without(rows: Sequence[Identity], names: Collection[str]) -> list[Identity]:
    """The rows without these columns."""
    return [
        {name: value for name, value in row.items() if name not in (*names, "digest")}
        for row in rows
    ]


def names_of(
    rows: Sequence[Identity], *, always: Sequence[str] = ALWAYS, without: Sequence[str] = ()
) -> list[str]:
    """A name for each row, of its distinguishing settings: `small ctx 128 bf16`. Different rows
    have different names.

    Rows that differ only in the settings `without` have the same name.
    """
    kept = rows_without(rows, without) if without else rows
    shown = distinguishing(kept, [name for name in always if name not in without])
    names = [" ".join(filter(None, (_word(name, row[name]) for name in shown))) for row in kept]
    same = Counter(
        name
        for name, _ in {(name, tuple(row.values())) for name, row in zip(names, kept, strict=True)}
    )
    return [
        name if same[name] == 1 else f"{name} {_hashed(repr(list(row.values())))}"
        for name, row in zip(names, kept, strict=True)
    ]


def by_name(
    rows: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], float | None],
    *,
    always: Sequence[str] = ALWAYS,
    without: Sequence[str] = (),
) -> dict[str, float]:
    """The value of each row that has one, by the name of the row, which has its identity under
    `identity`.
    """
    names = names_of([row["identity"] for row in rows], always=always, without=without)
    return {
        name: found
        for name, row in zip(names, rows, strict=True)
        if (found := value(row)) is not None
    }


def _word(name: str, value: object) -> str:
    return "" if value is False and name in _USUALLY_OFF else in_words(name, _setting(name), value)


def shared_settings(
    runs: Sequence[tuple[RunConfig, str | None]], also: Collection[str] = ()
) -> str:
    """The settings that all runs share, in words; each run is given with the name of its device.

    Settings with their default values are left out unless they are in `also`.
    """
    rows, usual = identities(runs), [_by_columns(usual_settings(config)) for config, _ in runs]
    noted = [name for name, setting in SETTINGS.items() if setting.note]
    unused = () if any(config.mode is Mode.TRAIN for config, _ in runs) else ("optimizer",)
    texts = []
    for name in dict.fromkeys((*_FIRST_IN_NOTES, *noted, *(rows[0] if rows else ()))):
        values = {row[name] for row in rows} - {None}
        is_unusual = any(
            row[name] != other.get(name) for row, other in zip(rows, usual, strict=True)
        )
        is_noted = (is_unusual or name in _ALWAYS_IN_NOTES) and name not in (
            *_BESIDE_NOTES,
            *unused,
        )
        if len(values) == 1 and (is_noted or name in also):
            texts.append(in_note(name, _setting(name), *values))
    return ", ".join(texts)


def file_names(names: Iterable[str]) -> list[str]:
    """Names of files for these names, without endings: no two are the same, even if the file
    system ignores case.
    """
    found: dict[str, str] = {}
    for stem in map(file_name, names):
        numbered = (stem if number == 1 else f"{stem}_{number}" for number in itertools.count(1))
        free = next(candidate for candidate in numbered if candidate.casefold() not in found)
        found[free.casefold()] = free
    return list(found.values())


def file_name(name: str) -> str:
    """A name of a file for this name, without an ending: at most MAX_FILE_NAME portable
    characters.
    """
    plain = re.sub("[^A-Za-z0-9.+]+", "_", name)
    return plain if len(plain) <= MAX_FILE_NAME else f"{plain[: MAX_FILE_NAME - 9]}_{_hashed(name)}"


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
