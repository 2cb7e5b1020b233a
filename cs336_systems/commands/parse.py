"""Argv becomes a dataclass of arguments, by tyro: help that shows common flags first, and errors in
one line.
"""

import contextlib
import difflib
import inspect
import io
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tyro

from ..config import SETTINGS
from ..settings import flag_of
from .outcome import UsageError

T = TypeVar("T")
COMMON = {
    "mixed_precision",
    "device",
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
    "rungs",
    "gpus",
    "tokens",
    "price",
    "global_batch",
    "budget_gib",
    "days",
    "derive",
}
for _name, _setting in SETTINGS.items():
    if _setting.is_common:
        COMMON |= {_setting.flag or _name, _setting.plural or _name}
"""Flags that `--help` shows of a command with more than FEW, among them those of common settings;
`--help-all` shows all.
"""
FEW = 20
HELP, HELP_ALL = ("-h", "--help"), "--help-all"
EXPECTED = {
    "could not convert string to float: (.*)": "a number",
    r"invalid literal for int\(\) with base 10: (.*)": "a whole number",
    r"Exceeds the limit .*value has (\d+ digits)": "a shorter number",
    r"no type matching .* could be instantiated from (\[.*?\])\.": "such values",
}
"""What a flag needs, by the parser's error for another text."""
REWORDED = {
    r"Missing from (.*?): (\S+) .*": r"\1 needs \2",
    r"Missing value for argument '(.*?)'.*": r"\1 needs a value, got none",
    r"invalid choice (.*?) for argument '(.*?)'\. Expected one of \((.*?)\)\.": (
        r"\2 must be one of \3, got \1"
    ),
    # a third side of compare
    r"Unrecognized options:  (-.*)": r"flags of a step stand in the quotes of A and of B, got \1",
    r"Unrecognized options: (-.*)": r"there is no flag \1",
    r"Unrecognized options: (.*)": r"one argument too many: \1",
}
"""How this program words what the parser says otherwise: what is needed, and what came."""


def parse(
    kind: Callable[..., T], prog: str, words: Sequence[str], examples: Sequence[str] = ()
) -> T:
    """The arguments in `words`; raise UsageError for those that are wrong, and SystemExit after
    help, which begins with the lines of `examples`.
    """
    config = (tyro.conf.EnumChoicesFromValues, tyro.conf.HelptextFromCommentsOff)
    if os.environ.get("NO_COLOR"):
        getattr(tyro, "_experimental_options", {})["ansi_codes"] = False  # tyro has no public way
    names = flag_names(kind)
    description = inspect.getdoc(kind) or ""
    if HELP_ALL in words:
        words = [HELP[-1]]
        kind = _for_help(kind, names)
    elif not set(words).isdisjoint(HELP):
        shown: Collection[str] = names
        if len(names) > FEW:
            shown = COMMON
            description += f"\n\n{prog} {HELP_ALL} shows {len(names)} flags."
        kind = _for_help(kind, shown)
    description = "\n".join([*examples, "", wrapped(description)])
    printed = io.StringIO()
    try:
        words = [as_declared(word, names) for word in words]
        with contextlib.redirect_stderr(printed):
            return tyro.cli(kind, prog=prog, args=words, description=description, config=config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except SystemExit as end:
        if not end.code:
            raise
        message = _unknown_flags(words, kind) or _in_a_line(printed.getvalue())
        raise UsageError(f"{message} ({prog} --help)") from None


def wrapped(text: str) -> str:
    """The paragraphs of a text at the width of the terminal. The lines after the first are
    indented: tyro would join those that begin with a letter.
    """
    width = shutil.get_terminal_size().columns
    wrap = textwrap.TextWrapper(width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n\n".join(map(wrap.fill, text.split("\n\n")))


def _unknown_flags(words: Sequence[str], kind: Any) -> str:  # noqa: ANN401 (a class of arguments)
    """An error message about flags that the command does not have, with similar ones; empty if it
    has all of them. The parser's own message may name the flag's value instead.
    """
    names = flag_names(kind)
    known = [flag_of(name) for name in sorted(names) if not _is_positional(kind, name)]
    flags = [word.partition("=")[0] for word in words if re.match("--?[a-z]", word)]
    unknown = [flag for flag in flags if not is_flag(flag, known)]
    if not unknown or not names:
        return ""
    close = difflib.get_close_matches(unknown[0], known, n=2, cutoff=0.7)
    hint = f"; did you mean {' or '.join(sorted(close))}?" if close else ""
    return f"there is no flag {', '.join(unknown)}{hint}"


def is_flag(word: str, flags: Collection[str]) -> bool:
    """Whether the word is one of these flags, or turns one off that is on: `--no-ranges`."""
    flag = word.partition("=")[0].replace("_", "-")
    return flag in flags or flag.replace("--no-", "--", 1) in flags


def _is_positional(kind: Any, name: str) -> bool:  # noqa: ANN401 (a class of arguments)
    """Whether the command takes the argument of this name without a flag."""
    declared = kind.__dataclass_fields__.get(name)  # a group's flags are not among them
    return declared is not None and tyro.conf.Positional in get_args(declared.type)


def _in_a_line(box: str) -> str:
    """The error message of tyro as one line, from the box that tyro prints.

    In the box the error comes first. Below a horizontal rule follow hints: the help of the flag at
    fault.
    """
    error: list[str] = []
    hints: list[str] = []
    for row in box.splitlines()[1:-1]:
        text = row.strip("│ ")
        is_rule = len(text) > 3 and set(text) <= set("─-")
        if is_rule and not error:
            continue  # a box drawn in ASCII has a rule above the error too
        if hints or is_rule:
            hints.append(text)
        else:
            error.append(text)
    message = re.sub(r"^Error parsing (\w+Arguments: )?", "", " ".join(error))
    for theirs, ours in REWORDED.items():
        message = re.sub(theirs, ours, message)
    if not message.startswith("-"):
        return message
    for pattern, needed in EXPECTED.items():
        wrong = re.search(pattern, message)
        if wrong:
            flag = next(hint for hint in hints if re.match("--?[a-z]", hint))
            return f"{flag} needs {needed}, got {wrong[1]}"
    return message


def flag_names(kind: Callable[..., object]) -> frozenset[str]:
    """The fields of a class of arguments, and of its groups."""
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return frozenset()
    names = set[str]()
    for declared in fields(kind):
        group = _group_of(declared)
        names |= {declared.name} if group is None else flag_names(group)
    return frozenset(names)


def _group_of(declared: Field[Any]) -> type | None:
    """The class of arguments that the field holds, or None if it is a flag."""
    kind = declared.type
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def as_declared(word: str, names: Collection[str]) -> str:
    """The word, with `--size` for `--sizes` and the other way round where the command has only
    the other one.
    """
    flag, equals, value = word.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    other = name.removesuffix("s") if name.endswith("s") else f"{name}s"
    is_other = flag.startswith("--") and name not in names and other in names
    return f"{flag_of(other)}{equals}{value}" if is_other else word


def _for_help(kind: Any, shown: Collection[str]) -> Any:  # noqa: ANN401 (a class of arguments)
    """A class of arguments for help: without the flags that are not `shown`, and with each help
    text in one line, which tyro wraps to the width of the terminal.
    """
    # slow to import, and only help needs it; tyro reads docstrings with it, and keeps their lines
    from docstring_parser import parse_from_object

    texts: dict[str, str] = {}
    for parent in reversed(kind.__mro__[:-1]):
        for documented in parse_from_object(parent).params:
            texts[documented.arg_name] = documented.description or ""
    members: dict[str, Any] = {"__annotations__": {}, "__doc__": kind.__doc__}
    for declared in fields(kind):
        group = _group_of(declared)
        annotation: Any = declared.type
        members[declared.name] = declared.default
        if group is not None:
            for_help: Any = _for_help(group, shown)
            annotation = Annotated[for_help, tyro.conf.OmitArgPrefixes]
            members[declared.name] = field(default_factory=for_help)
        elif declared.name not in shown:
            annotation = Annotated[annotation, tyro.conf.Suppress]
        elif text := texts.get(declared.name):
            annotation = Annotated[annotation, tyro.conf.arg(help=" ".join(text.split()))]
        members["__annotations__"][declared.name] = annotation
    return dataclass(frozen=True, kw_only=True)(type(kind.__name__, (kind,), members))


def in_flags(message: str, names: Collection[str]) -> str:
    """The message with the flags in place of the fields of these names, unless they are quoted or
    part of a longer word.
    """
    long = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    return re.sub(
        rf"(?<![\w./\"'`-])({long})(?![\w./\"'`-])", lambda name: flag_of(name[0]), message
    )
