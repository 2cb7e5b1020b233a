"""Text from files, printed so that it cannot do harm, and counts in words.

Such text may hold escape sequences, which a terminal would obey, or a name that is a megabyte long.
It becomes inert where it leaves this program: here on its way to a terminal, in `report/formats.py`
in tables and CSV files, in `report/page/chapters.py` in HTML, in `report/draw.py` in pictures.
"""

import os
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Sequence

LONGEST_LINE = 4000
"""Most characters of a line that is printed, unless its caller wants fewer."""
LONGEST_PART = 300
"""Most characters of a quoted text within a message of this program."""
_UNIT = (
    r"(?:%|[nµm]?s|[KMGTk]?i?B(?:/s)?|[GT]?FLOPs?(?:/s|/byte)?|[MG]Hz|W|bytes|tokens/s|days|"
    r"(?:GPU-)?hours)(?![\w/])"
)
_JOINTS = re.compile(rf"(?<=[\d?]) (?={_UNIT})|(?<=\d) (?=±|\?(?!\w))|(?<=±) (?=\d)")
"""Spaces within a quantity, such as those of `30 ± 4 ? ms`."""
_OF_SETTINGS = re.compile(r" (?=\d[\d.]*(?: |$))")
"""Spaces before the numbers of a configuration's settings, such as those of `ctx 128 batch 4`."""
_CONTROLS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of control characters, direction marks, lone surrogates and line
separators.
"""


def inert_line(text: str, longest: int = LONGEST_LINE) -> str:
    """The text on one line of at most `longest` characters, in which nothing controls a terminal or
    a parser.

    Control characters, line ends and marks of direction become visible escapes such as `\\x1b`. A
    longer text loses its middle, and the line says how much that was. An inert line stays as it is.
    """
    return _cut(text, longest, _visible)


def unbroken(text: str, joint: str = "\N{NO-BREAK SPACE}") -> str:
    """The text with a joint in place of each space at which no line may end: between a number and
    its unit, its deviation or a mark of doubt.
    """
    return _JOINTS.sub(joint, text)


def unbroken_label(label: str) -> str:
    """The label of a configuration, of which no line ends between a setting and its number."""
    return _OF_SETTINGS.sub("\N{NO-BREAK SPACE}", label)


def print_line(text: str) -> None:
    """Print one line on standard output."""
    print(inert_line(text))


def print_aside(text: str) -> None:
    """Print one line on standard error: a note, a warning or an error."""
    print(inert_line(text), file=sys.stderr, flush=True)


def command_line(words: Sequence[str]) -> str:
    """The words as a line to type: shells of Windows know no single quotes."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def plain_word(text: str) -> str:
    """The text with hyphens in place of characters that are awkward in a file name."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text).strip("-")


def shortened(text: str, longest: int) -> str:
    """The text with all its lines; if it is longer than `longest` characters, a note in place of
    its middle.
    """
    return _cut(text, longest, str)


def shorten(text: str, longest: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _cut(text: str, longest: int, show: Callable[[str], str]) -> str:
    """`show(text)`, or that of the text's beginning and end where the whole would be longer than
    `longest`.
    """
    if len(text) <= longest:
        whole = show(text)
        if len(whole) <= longest:
            return whole
    room = longest - len(_left_out(len(text)))
    first, last = room - room // 3, room // 3
    head, tail = text[:first], text[len(text) - last :]
    while (length := len(show(head))) > first:
        head = head[: len(head) * first // length]
    while (length := len(show(tail))) > last:
        tail = tail[len(tail) - len(tail) * last // length :]
    return show(head) + _left_out(len(text) - len(head) - len(tail)) + show(tail)


def _left_out(count: int) -> str:
    """The note that stands in place of so many characters that were left out."""
    return f" … ({count} characters left out) … "


def _visible(text: str) -> str:
    """The text with an escape in the place of each control character."""
    return text if text.isprintable() else text.translate(_ESCAPES)


class _Escapes(dict[int, str]):
    """Replacement of each character by its code point; most characters replace themselves."""

    def __missing__(self, code: int) -> str:
        """The character of this code, or its escape if it is a control character; remembered for
        next time.
        """
        character = chr(code)
        is_control = unicodedata.category(character) in _CONTROLS
        self[code] = character.encode("unicode_escape").decode() if is_control else character
        return self[code]


_ESCAPES = _Escapes()


def text_of(value: object) -> str:
    """A value as text: numbers as short as they stay exact; empty for unknown."""
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return "" if value is None else str(value)


def counted(count: int, noun: str) -> str:
    """The count with its noun: `1 block`, `2,000 blocks`."""
    plural = "" if count == 1 else "s"
    return f"{count:,} {noun}{plural}"
