"""A page as one HTML file that makes no network requests.

All but sorting and filtering works without a script. With the extra `report` the file embeds
DataTables (from itables), compressed. Every text is escaped, and the Content-Security-Policy allows
only the script whose hash it names. Equal pages are written as equal bytes.
"""

import base64
import gzip
import hashlib
import importlib.metadata
import importlib.resources
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from ...files import write_atomically
from ...text import inert_line, unbroken, unbroken_label
from .blocks import Page, PictureBlock, TableBlock

PAGE_FILE = "index.html"
"""The page for a browser, beside the tables."""
TABLES = ("itables", "html/dt_bundle.js")
"""The package that sorts tables, and its file, which the page embeds."""
LONGEST_LINE = 100_000
"""Most characters of a line of text."""


def write_page(page: Page, path: Path) -> None:
    """Write the page to the file at once, so that an interrupted writer leaves the earlier one
    whole.
    """
    write_atomically(path, to_html(page).encode())


def to_html(page: Page) -> str:
    """The page as text; raise ValueError where two parts have one identifier."""
    blocks = [block for chapter in page.chapters for block in chapter.blocks]
    names = [chapter.id for chapter in page.chapters]
    names += [block.id for block in blocks if isinstance(block, TableBlock | PictureBlock)]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(
                f"each part of a page needs an identifier of its own, got {name!r} twice"
            )
    script = _read("page.js")
    has_tables = any(isinstance(block, TableBlock) for block in blocks)
    return _TEMPLATES.get_template("page.html").render(
        page=page,
        hash=_base64(hashlib.sha256(script.encode()).digest()),
        style=Markup(_read("page.css")),
        script=Markup(script),
        packed=_library() if has_tables else {},
    )


def _visible(value: object) -> object:
    """The text with its line breaks kept, tabs expanded, and escapes in place of other control
    characters; values that are no plain text stay as they are.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(inert_line(line.expandtabs(4), LONGEST_LINE) for line in value.split("\n"))


def _unbroken(text: str) -> Markup:
    """The text as HTML in which no line ends within a quantity or a flag."""
    whole = str(escape(unbroken(str(_visible(text)))))
    return Markup(_FLAG.sub(r'<span class="flag">\g<0></span>', whole))


def _read(name: str) -> str:
    """The text of a file in this package's folder, such as the page's template."""
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _base64(data: bytes) -> str:
    """The bytes in base64, as ASCII text."""
    return base64.b64encode(data).decode()


@cache
def _library() -> Mapping[str, Markup]:
    """The script of the extra `report`, compressed, without importing its package; empty where it
    is not installed.
    """
    package, file = TABLES
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(f"{package}/{file}")))
        script = path.read_bytes()
    except (importlib.metadata.PackageNotFoundError, FileNotFoundError):
        return {}
    # mtime=0 because equal pages are equal bytes
    return {"tables": Markup(_base64(gzip.compress(script, mtime=0)))}


_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]{1,30}(?![\w-])")
"""A browser would end a line at any of its hyphens."""
_TEMPLATES = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
    finalize=_visible,
    loader=jinja2.FunctionLoader(_read),
)
_TEMPLATES.filters["unbroken"] = _unbroken
_TEMPLATES.filters["unbroken_label"] = unbroken_label
