"""The page of a forecast: the answer and its bars, then the tables."""

from collections.abc import Iterable
from pathlib import Path

from ...text import plain_word
from ..charts import Chart
from ..section import Section
from .blocks import Bars, Chapter, Glance, Page, TableBlock, bars_of
from .html import PAGE_FILE, write_page

LONGEST_NAME = 100


def write_forecast_page(
    title: str, sentences: Iterable[str], section: Section, directory: Path
) -> Path:
    """Write the page into the directory, which is made if need be, and return its path."""
    answer, *more = [*sentences] or [title]
    bars: list[Bars] = []
    for picture in section.pictures:
        if isinstance(picture, Chart):
            bars += bars_of(picture)
    blocks = [
        TableBlock(id=f"{section.name}{number or ''}", table=table)
        for number, table in enumerate(section.tables)
    ]
    page = Page(
        title=title,
        glance=Glance(answer=answer, more=" ".join(more), bars=bars),
        chapters=[Chapter(id="tables", title="Tables", blocks=blocks)],
    )
    directory.mkdir(parents=True, exist_ok=True)
    write_page(page, directory / PAGE_FILE)
    return directory / PAGE_FILE


def folder_of(kind: str, label: str) -> Path:
    """Where the page of a forecast of this kind is, below the current directory."""
    return Path("data") / kind / (plain_word(label)[:LONGEST_NAME].strip(".-") or "page")
