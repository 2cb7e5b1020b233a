"""Names configurations by the settings that distinguish them: in columns of a table, in words and
in names of files.

The `identity` of a run is all of its settings by column. `distinguishing` chooses the columns in
which runs differ, and `shared_settings` puts the settings that they have in common in words. The
settings are the fields of RunConfig and ModelConfig, so that a field that is added there needs no
change here.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import cache, partial
from typing import Any, TypeAlias

from ..config import (
    SETTINGS,
    SIZES,
    UNSIZED,
    Attention,
    CompileMode,
    Mode,
    ModelConfig,
    RunConfig,
    SdpaBackend,
)
from ..settings import Setting, heading_of, in_note, in_words
from ..subject import Subject, WatchedLoop
from ..text import LONGEST_PART, shortened, text_of
from .column import Column

Identity: TypeAlias = dict[str, Any]
"""All settings of a run by column; None is unknown. Two are equal only if configuration and
device are the same.
"""

MAX_FILE_NAME = 100
"""Longest name of a file without its ending, in characters; the names of pictures are a little
longer.
"""
ALWAYS = ("size", "context_length")
"""Columns that tables and names always have, whether configurations differ in them or not."""
OTHERS = {
    "device_name": Setting(heading="device", word="", note="{}", noted="always", csv_place=15),
    "digest": Setting(heading="record", noted="never", always_in_csv=True, named_last=True),
}
"""Columns that are not settings and may distinguish runs, declared as settings are."""
_DECLARED: dict[str, Setting] = {
    setting.column or name: setting for name, setting in SETTINGS.items()
}
_DECLARED |= OTHERS
"""The declarations of all columns by name, and of the settings that have no column."""
_UNDECLARED = Setting()
_DEFAULTS = {
    field.name: field.default for part in (ModelConfig, RunConfig) for field in fields(part)
}


def _setting(name: str) -> Setting:
    """How the setting, or the column, of this name is declared."""
    return _DECLARED.get(name, _UNDECLARED)


def _csv_place(name: str) -> float:
    """Place of the column in CSV files; the same for all that have none, after the others."""
    place = _setting(name).csv_place
    return math.inf if place is None else place


def _name_place(name: str) -> float:
    """The setting's place in the names of runs, to sort by."""
    place = _setting(name).name_place
    return _csv_place(name) if place is None else place


_ORDERED = sorted(_DECLARED, key=_csv_place)
"""All columns in the order of CSV files."""


def placed_settings(first: int, last: int) -> list[str]:
    """The settings with these places in CSV files, in order."""
    return [name for name in _ORDERED if name not in OTHERS and first <= _csv_place(name) <= last]


def _where(is_chosen: Callable[[Setting], bool]) -> list[str]:
    """The columns whose declared setting `is_chosen` accepts, in the order of CSV files."""
    return [name for name in _ORDERED if is_chosen(_setting(name))]


LEADING = [name for name in _ORDERED if _csv_place(name) < 40]
"""First columns of the CSV files of profiles; all other settings are the last columns."""
SHAPE = _where(lambda setting: setting.implied_by_size and not setting.binds_own_model)
"""Columns of the model's inner sizes, which are empty for a user's own model because they are
unknown.
"""
_IMPLIED = _where(lambda setting: setting.implied_by_size)
_NAMED_LAST = _where(lambda setting: setting.named_last)
_NOTED_FIRST = ["device_name", *_where(lambda setting: setting.noted in ("always", "first"))]
_USUALLY_OFF = {name for name, default in _DEFAULTS.items() if default is False}
"""Settings that names leave out where they are off."""


def identities(runs: Iterable[tuple[Subject, str | None]]) -> list[Identity]:
    """The identity of each run, given with the name of its device.

    If all known names are the same, runs without a name get it too.
    """
    rows = [identity(subject, device_name) for subject, device_name in runs]
    devices = {row["device_name"] for row in rows} - {None}
    if len(devices) != 1:
        return rows
    return [row | {"device_name": next(iter(devices))} for row in rows]


def identity(subject: Subject, device_name: str | None) -> Identity:
    """The identity of a run: the columns with a place, then all other settings, then the digest."""
    return {**_settings(subject), "device_name": device_name}


@cache
def _settings(subject: Subject) -> Identity:
    """The columns that identify a run's configuration: settings with a place in CSV files in their
    order, then all others, size and digest among them.
    """
    cells = _by_columns(settings_of(subject))
    if isinstance(subject, WatchedLoop):
        cells["tokens"] = None  # of a run None means random tokens
    else:
        cells["size"] = size_text(subject)
    cells["digest"] = subject.digest
    placed = [name for name in _ORDERED if _setting(name).csv_place is not None]
    return {name: cells.get(name) for name in (*placed, *cells)}


def settings_of(subject: Subject) -> dict[str, Any]:
    """The values of all settings, those of the model among them; None for those that were not seen
    of a watched loop, whose size is its name.
    """
    if isinstance(subject, WatchedLoop):
        values = {name: getattr(subject, name, None) for name in SETTINGS}
        return values | {"size": subject.name}
    values = {}
    for part in (subject, subject.model):
        for field in fields(part):
            values[field.name] = getattr(part, field.name)
    del values["model"]  # its own settings stand for it
    return values


def usual_settings(subject: Subject) -> dict[str, Any]:
    """The default values of all settings for a run of this size."""
    of_run = fields(RunConfig)
    of_model = fields(ModelConfig)
    preset = None
    if isinstance(subject, RunConfig):
        of_run = fields(subject)
        of_model = fields(subject.model)
        preset = SIZES.get(subject.size)
    usual = {field.name: field.default for field in of_run if field.name != "model"}
    return usual | {field.name: getattr(preset, field.name, field.default) for field in of_model}


def _by_columns(values: Mapping[str, Any]) -> Identity:
    """The values of settings by CSV column; some columns combine two settings or write a value in
    words.
    """
    shown = dict(values)
    shown["parallel"] = values["own_ddp"] or values["parallel"]
    shown["optimizer"] = values["own_optimizer"] or values["optimizer"]
    if values["compile_blocks"] and values["compile"] is not CompileMode.NONE:
        shown["compile"] = f"{values['compile']}-blocks"
    has_backend = values["sdpa_backend"] is not SdpaBackend.AUTO
    if values["attention"] is Attention.SDPA and has_backend:
        shown["attention"] = f"{values['attention']}-{values['sdpa_backend']}"
    if values["size"] == UNSIZED:
        shown["vocab_size"] = None
    factory = values["model_factory"]
    if factory is not None:
        shown |= dict.fromkeys((*SHAPE, "attention")) | {"arch": factory}
    cells = {}
    for name, value in shown.items():
        setting = SETTINGS.get(name, Setting())
        column = setting.column
        if column is None:
            column = name
        if column:
            text = str(value) if isinstance(value, StrEnum) else value
            cells[column] = setting.cells.get(value, text)
    return cells


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
    name = config.model_factory.partition(":")[2]
    if config.size == UNSIZED:
        return name
    if config.size != "custom":
        name = f"{name} {config.size}"
    words = [name]
    usual = usual_settings(config)
    for field in fields(config.model):
        value = getattr(config.model, field.name)
        if not _setting(field.name).binds_own_model and value != usual[field.name]:
            words.append(f"{field.name} {text_of(value)}")
    return ", ".join(words)


def trailing(rows: Sequence[Identity]) -> list[str]:
    """The last columns of the CSV files of profiles: settings that some row uses, other than those
    that come first (LEADING) and the digest.
    """
    return [name for name in without_unused(rows) if name not in (*LEADING, "digest")]


def without_unused(rows: Sequence[Identity]) -> list[str]:
    """All columns, without those of settings that no run uses and CSV files need not have."""
    names = list(rows[0]) if rows else []
    used = set()
    for name in names:
        setting = _setting(name)
        values = {row.get(name) for row in rows}
        is_always_there = setting.csv_place is not None or setting.always_in_csv
        if is_always_there or values - {None, _DEFAULTS.get(name)}:
            used.add(name)
    groups = {_setting(name).group for name in used} - {""}
    return [name for name in names if name in used or _setting(name).group in groups]


def distinguishing(rows: Sequence[Identity], always: Sequence[str] = ALWAYS) -> list[str]:
    """The columns that distinguish the rows: first `always`, then every setting of which the rows
    have several values.

    Settings that a size implies are shown only if rows of one size differ in them. As long as rows
    that differ still look the same, further columns are added, at last those that are named last,
    such as the digest.
    """
    if not rows:
        return [*always]
    placed_otherwise = {*always, *_IMPLIED, *_NAMED_LAST}
    names = [name for name in rows[0] if name not in placed_otherwise]
    ordered = sorted(names, key=_name_place)
    shown = [*always, *(name for name in ordered if _varies(rows, name))]
    by_size: dict[str, list[Identity]] = {}
    for row in rows if "size" in shown else ():
        by_size.setdefault(row["size"], []).append(row)
    for name in _IMPLIED:
        if any(_varies(of_one_size, name) for of_one_size in by_size.values()):
            shown.append(name)
    # cells cut long values, and a value may be unknown, so rows that differ can look the same
    num_different = len({tuple(row.values()) for row in rows})
    for name in (*ordered, *_IMPLIED, *_NAMED_LAST):
        looks = set()
        for row in rows:
            looks.add(tuple(_cell(row.get(column)) for column in shown))
        if len(looks) == num_different:
            break
        if name not in shown and len({row.get(name) for row in rows}) > 1:
            shown.append(name)
    return shown


def _varies(rows: Sequence[Identity], name: str) -> bool:
    """Whether the rows have different values in the column, not counting unknown ones."""
    return len({row.get(name) for row in rows} - {None}) > 1


def _cell(value: object) -> str:
    """A setting's value as text, cut to LONGEST_PART characters; a switch is on or off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return shortened(text_of(value), LONGEST_PART)


def identity_columns(
    rows: Sequence[Mapping[str, Any]], always: Sequence[str] = ALWAYS
) -> list[Column]:
    """Table columns of the settings that distinguish the rows; each row holds its settings under
    the key `identity`.
    """
    runs = [row["identity"] for row in rows]
    columns = []
    for name in distinguishing(runs, always):
        values = {run[name] for run in runs} - {None}
        is_numeric = all(type(value) in (int, float) for value in values)
        text = partial(_identity_cell, name)
        columns.append(Column(heading(name), numeric=is_numeric, key=name, text=text))
    return columns


def _identity_cell(name: str, row: Mapping[str, Any]) -> str:
    """The value of the setting of this name in the row, which has its identity."""
    return _cell(row["identity"][name])


def names_of(rows: Sequence[Identity], always: Sequence[str] = ALWAYS) -> list[str]:
    """A name for each row, of its distinguishing settings: `small ctx 128 bf16`. Different rows
    have different names.
    """
    shown = distinguishing(rows, always)
    names = []
    for row in rows:
        words = [_word(name, row[name]) for name in shown]
        names.append(" ".join(word for word in words if word))
    values = [tuple(row.values()) for row in rows]
    same = Counter(name for name, _ in set(zip(names, values, strict=True)))
    for place, (name, cells) in enumerate(zip(names, values, strict=True)):
        if same[name] > 1:
            names[place] = f"{name} {_hashed(repr(list(cells)))}"
    return names


def short_names_of(rows: Sequence[Identity]) -> list[str]:
    """A name for each row for a sentence: the columns `ALWAYS`, and as few others as tell the row
    from all others; the whole name where no few settings do.
    """
    shown = distinguishing(rows)
    names = []
    for row, name in zip(rows, names_of(rows), strict=True):
        telling = _telling(row, rows, shown)
        names.append(" ".join(_word(column, row[column]) for column in telling) or name)
    return names


def _telling(row: Identity, rows: Sequence[Identity], shown: Sequence[str]) -> list[str]:
    """Of the `shown` columns, in their order, a few that tell the row from all others: again and
    again the one that leaves the fewest alike. Empty if they cannot, as where a switch that is off
    has no word.
    """
    chosen = {*ALWAYS}
    words = {column: _word(column, row[column]) for column in shown}
    while alike := [other for other in rows if other != row and _are_alike(row, other, chosen)]:
        left = {}
        for column in words:
            if words[column] and column not in chosen:
                number = sum(_are_alike(row, other, {column}) for other in alike)
                left[column] = (number, words[column] == "none")  # alone that says nothing
        best = min(left, key=left.__getitem__, default="")
        if not best or left[best][0] == len(alike):
            return []
        chosen.add(best)
    return [column for column in shown if column in chosen and words[column]]


def _are_alike(row: Identity, other: Identity, columns: Collection[str]) -> bool:
    """Whether two rows have the same values in these columns."""
    return all(row[column] == other[column] for column in columns)


def _word(name: str, value: object) -> str:
    """A setting's value as it stands in the name of a run; empty for a switch that is usually off
    and is off here.
    """
    return "" if value is False and name in _USUALLY_OFF else in_words(name, _setting(name), value)


def shared_settings(runs: Sequence[tuple[Subject, str | None]], also: Collection[str] = ()) -> str:
    """The settings that all runs share, in words; each run is given with the name of its device.

    What was not seen of a watched loop or of a user's model is not known to be shared; a run that
    failed early does not know its device.
    Settings with their default values are left out unless they are in `also`.
    """
    rows = identities(runs)
    of_first = rows[0] if rows else ()
    usual = [_by_columns(usual_settings(subject)) for subject, _ in runs]
    phrased = [name for name, setting in SETTINGS.items() if setting.note]
    is_trained = any(subject.mode is Mode.TRAIN for subject, _ in runs)
    has_loop = any(isinstance(subject, WatchedLoop) for subject, _ in runs)
    texts = []
    for name in dict.fromkeys((*_NOTED_FIRST, *phrased, *of_first)):
        setting = _setting(name)
        is_noted = setting.noted == "always"
        for row, defaults in zip(rows, usual, strict=True):
            is_noted |= row[name] != defaults.get(name)
        if setting.noted == "never" or (name == "optimizer" and not is_trained):
            is_noted = False
        values = {row[name] for row in rows}
        if name == "device_name" and not has_loop:
            values.discard(None)
        if len(values) == 1 and None not in values and (is_noted or name in also):
            texts.append(in_note(name, setting, *values))
    return ", ".join(texts)


def file_names(names: Iterable[str]) -> list[str]:
    """Names of files for these names, without endings: no two are the same, even if the file
    system ignores case.
    """
    taken: dict[str, str] = {}
    for stem in map(file_name, names):
        free, number = stem, 1
        while free.casefold() in taken:
            number += 1
            free = f"{stem}_{number}"
        taken[free.casefold()] = free
    return list(taken.values())


def file_name(name: str) -> str:
    """A name of a file for this name, without an ending: at most MAX_FILE_NAME portable
    characters.
    """
    plain = re.sub("[^A-Za-z0-9.+]+", "_", name)
    if len(plain) <= MAX_FILE_NAME:
        return plain
    return f"{plain[: MAX_FILE_NAME - 9]}_{_hashed(name)}"


def _hashed(text: str) -> str:
    """The first eight hexadecimal digits of the text's SHA-256 digest, to tell shortened names
    apart.
    """
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
