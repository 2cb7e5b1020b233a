"""A report as one HTML file: findings, tables that sort and are copied, pictures that answer; nothing is requested.

Tables are read without a script too. With the extra `report` the page carries, packed, DataTables (of itables) and the
script of plotly; without it, it shows plain tables and the PNGs. Every text is escaped, and a Content-Security-Policy
lets no other script run.
"""

import base64
import gzip
import importlib.resources
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from cs336_systems.files import write_atomically
from cs336_systems.report.columns import Column
from cs336_systems.report.formats import to_csv, to_latex, to_markdown, to_typst
from cs336_systems.report.table import Table

COPIES = {"Markdown": to_markdown, "LaTeX": to_latex, "Typst": to_typst}
"""What a table is copied as, besides CSV."""

LIBRARIES = {"tables": ("itables", "html/dt_bundle.js"), "plotly": ("plotly", "package_data/plotly.min.js")}
"""Scripts that the page carries, by their identifiers in it: the package and its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """Sentences, each with the identifier of the cell that it rests on, or an empty text."""

    paragraphs: Sequence[tuple[str, str]]
    heading: str = ""
    kind: str = "prose"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell as text, and the value that it is sorted by where the text does not sort itself."""

    id: str
    text: str
    numeric: bool
    order: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow:
    """The cells of one row; `failed` rows stand out."""

    cells: Sequence[Cell]
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBlock:
    """A table below an identifier, with a sentence on where its values come from."""

    id: str
    table: Table
    csv: str = ""
    """All values of the subject, for copying; the cells as they are shown where it is empty."""
    source: str = ""
    kind: str = "table"

    @property
    def cells(self) -> Iterator[CellRow]:
        """Rows of cells, each below the identifier `TABLE.ROW.COLUMN`."""
        table = self.table
        for number, row in enumerate(table.rows):
            values = table.values[number] if number < len(table.values) else {}
            cells = [
                Cell(
                    id=f"{self.id}.{number}.{place}", text=text, numeric=heading.numeric, order=_order(heading, values)
                )
                for place, (heading, text) in enumerate(zip(table.headings, row, strict=True))
            ]
            yield CellRow(cells=cells, failed=number in table.failed)

    @property
    def copies(self) -> dict[str, str]:
        """The table in every format that it can be copied as."""
        shown = to_csv([heading.label for heading in self.table.headings], self.table.rows)
        return {name: write(self.table) for name, write in COPIES.items()} | {"CSV": self.csv or shown}


def _order(heading: Column, values: Mapping[str, Any]) -> float | None:
    """The value below the heading, unrounded."""
    value = values.get(heading.key) if heading.numeric and heading.key else None
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture: plotly's data and layout, or one step kernel by kernel; the PNG stands in its place without plotly."""

    id: str
    title: str
    spec: Mapping[str, Any]
    png: str = ""
    """As a `data:` address; empty where there is none."""
    source: str = ""
    height: int = 420
    kind: str = "figure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, closed until somebody opens it: texts below headings."""

    id: str
    title: str
    texts: Sequence[tuple[str, str]]
    kind: str = "run"


Block = Prose | TableBlock | Figure | Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """What belongs together, below one heading."""

    id: str
    title: str
    blocks: Sequence[Block]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All chapters of a report; `source` says of which hardware and code."""

    title: str
    chapters: Sequence[Chapter]
    source: str = ""


def write_page(page: Page, path: Path) -> None:
    """Write the page to the file at once, so that an interrupted writer leaves the earlier one whole."""
    write_atomically(path, to_html(page).encode())


def to_html(page: Page) -> str:
    """The page as text."""
    blocks = [block for chapter in page.chapters for block in chapter.blocks]
    data = {
        "copies": {block.id: block.copies for block in blocks if isinstance(block, TableBlock)},
        "figures": {block.id: block.spec for block in blocks if isinstance(block, Figure)},
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_read("page.html")).render(
        page=page,
        nonce=secrets.token_urlsafe(16),
        style=Markup(_read("page.css")),
        script=Markup(_read("page.js")),
        table_style=Markup(_of_package("itables", "html/dt_bundle.css").decode()),
        formats=(*COPIES, "CSV"),
        packed=[("data", _packed(text.encode())), *_libraries(bool(data["figures"]))],
    )


def _read(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text()


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


@cache
def _libraries(with_plotly: bool) -> tuple[tuple[str, str], ...]:
    """The scripts of the extra `report`, packed; none of one that is not installed."""
    found = []
    for name, (package, file) in LIBRARIES.items():
        if (content := _of_package(package, file)) and (with_plotly or name != "plotly"):
            found.append((name, _packed(content)))
    return tuple(found)


def _of_package(package: str, file: str) -> bytes:
    try:
        return (importlib.resources.files(package) / file).read_bytes()
    except ModuleNotFoundError:
        return b""
