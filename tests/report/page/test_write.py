"""The page as a file: what it holds, and what it must not."""

import base64
import hashlib
import re
from functools import cache
from html.parser import HTMLParser

import pytest

from cs336.report.page import html
from cs336.report.page.blocks import TableBlock
from cs336.report.page.html import to_html, write_page
from tests.report.page.pages import (
    HOSTILE_TEXTS,
    make_page,
    make_picture,
    make_steps,
    page_with,
    table_page,
)
from tests.report.page.parsed import Parsed as Cells


class Parsed(HTMLParser):
    """Tags with the names of their attributes, and the scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.policy = [], {}, ""
        self._into = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        own = dict(attributes)
        # of a long text
        self.tags.append((tag, *sorted(own.keys() - ({"class"} if tag == "td" else set()))))
        if own.get("http-equiv") == "Content-Security-Policy":
            self.policy = own["content"]
        self._into = self.scripts.setdefault(own.get("id", ""), [""]) if tag == "script" else None

    def handle_endtag(self, tag):
        self._into = None

    def handle_data(self, data):
        if self._into is not None:
            self._into[0] += data


def test_a_cell_has_its_value_for_sorting_and_an_unknown_one_none() -> None:
    cells = Cells(to_html(make_page(TableBlock(id="a", table=make_steps())))).cells
    assert cells["a.2.1"] == ["out of memory", ""]
    assert float(cells["a.0.1"][1]) == 0.0995


@cache
def tags_with(text):
    return Parsed(to_html(page_with(text))).tags


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_a_hostile_text_adds_no_tag_and_no_attribute(text) -> None:
    """In a picture it may be on more lines, which are tags of the picture."""
    of_pictures = {"text", "tspan", "g", "use", "path", "defs", "clippath", "rect"}
    made, harmless = map(tags_with, (text, "harmless"))
    assert [own for own in made if own[0] not in of_pictures] == [
        own for own in harmless if own[0] not in of_pictures
    ]
    assert {own for own in made if own[0] in of_pictures} <= {
        *harmless,
        ("tspan", "x", "y"),
        ("text", "style", "transform"),
    }


def test_only_the_script_of_the_page_may_run_and_the_same_page_is_the_same_bytes() -> None:
    text = to_html(table_page())
    found = Parsed(text)
    digest = base64.b64encode(hashlib.sha256(found.scripts[""][0].encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in found.policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}' blob:"
    assert not any("http" in rule or "*" in rule for rule in rules.values())
    assert text == to_html(table_page())


def test_without_the_extra_the_page_has_plain_tables_and_its_pictures(monkeypatch) -> None:
    monkeypatch.setattr(html, "TABLES", ("an_absent_package", "file"))
    html._library.cache_clear()
    text = to_html(table_page())
    html._library.cache_clear()
    assert set(Parsed(text).scripts) == {""}
    assert Cells(text).cells["steps.1.0"][0] == "medium"
    assert "Bars of small</text>" in text


def test_pictures_of_one_page_share_no_identifier() -> None:
    """Those of a picture begin with a hash of its own, which its links lead to."""
    first, second = (make_picture(identifier=name) for name in "ab")
    own = [set(re.findall(r' id="(.*?)"', block.svg)) for block in (first, second)]
    linked = [set(re.findall(r'(?:url\(|href=")#([^)"]+)', block.svg)) for block in (first, second)]
    assert own[0]
    assert not own[0] & own[1]
    assert linked[0] <= own[0]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path) -> None:
    path = tmp_path / "index.html"
    write_page(table_page(), path)
    old = path.read_bytes()
    with pytest.raises(ValueError, match="'steps' twice"):
        write_page(make_page(*[TableBlock(id="steps", table=make_steps())] * 2), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def luminance(colour):
    """Relative luminance of a colour such as `#a3170b`, by WCAG 2."""
    channels = (value / 255 for value in bytes.fromhex(colour[1:]))
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1])
def test_every_colour_of_text_stands_out_from_every_background(theme) -> None:
    """By 4.5 to 1, which WCAG 2 asks of small text."""
    declared = re.findall(r"--([a-z]+): light-dark\((#\w{6}), (#\w{6})\)", to_html(make_page()))
    levels = {name: luminance(colours[theme]) for name, *colours in declared}
    backgrounds = [levels.pop(name) for name in ("paper", "raised")]
    del levels["line"]
    assert {"text", "quiet", "accent", "failed"} <= {*levels}
    for name, level in levels.items():
        for background in backgrounds:
            dark, light = sorted((level, background))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, name
