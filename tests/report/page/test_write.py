"""The page as a file: what it holds, and what it must not."""

import base64
import gzip
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from markupsafe import Markup

from cs336_systems.report.page import write
from cs336_systems.report.page.write import (
    Chapter,
    Figure,
    Integers,
    Linked,
    Page,
    Prose,
    TableBlock,
    to_html,
    write_page,
)
from tests.report.page.pages import HOSTILE_TEXTS, figure_page, make_page, make_steps, page_with, table_page
from tests.report.page.parsed import Parsed as Cells


class Parsed(HTMLParser):
    """Tags with the names of their attributes, the text and the order of each cell, and the scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.policy, self.cells = [], {}, "", Cells(text).cells
        self._into = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        own = dict(attributes)
        self.tags.append((tag, *sorted(own.keys() - ({"class"} if tag == "td" else set()))))  # of a long text
        if own.get("http-equiv") == "Content-Security-Policy":
            self.policy = own["content"]
        self._into = None
        if tag == "script":
            self._into = self.scripts.setdefault(own.get("id", ""), [""])

    def handle_endtag(self, tag):
        self._into = None

    def handle_data(self, data):
        if self._into is not None:
            self._into[0] += data

    def unpacked(self, name):
        return json.loads(self.inflated(name))

    def inflated(self, name):
        return gzip.decompress(base64.b64decode(self.scripts[f"packed-{name}"][0]))


def parsed(page):
    return Parsed(to_html(page))


def test_a_value_that_is_not_known_has_no_order_and_a_text_without_value_has_its_number() -> None:
    table = make_steps()
    without = replace(table, values=(), rows=(("small", "1,234 ± 5", ""), *table.rows[1:]))
    cells = parsed(make_page(TableBlock(id="a", table=table), TableBlock(id="b", table=without))).cells
    assert cells["a.2.1"] == ["out of memory", ""]
    assert float(cells["a.0.1"][1]) == 0.0995
    assert cells["b.0.1"] == ["1,234 ± 5", "1234"]
    assert cells["b.0.2"] == ["", ""]


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_a_hostile_text_adds_no_tag_and_no_attribute(text) -> None:
    made, harmless = parsed(page_with(text)), parsed(page_with("harmless"))
    assert made.tags == harmless.tags
    assert [Parsed(own).tags for own in made.unpacked("runs").values()] == [
        Parsed(own).tags for own in harmless.unpacked("runs").values()
    ]
    assert len(harmless.unpacked("runs")["run-a"]) > 20


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_plotly_finds_no_markup_and_no_mathematics_in_a_text(text) -> None:
    figures = parsed(page_with(text)).unpacked("figures")

    def texts(value):
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [value] if isinstance(value, str) else [found for part in parts for found in texts(part)]

    found = texts(figures)
    marked = figures["bars"]["data"][1]["hovertemplate"]
    assert marked.endswith("<extra></extra>")
    assert not re.search(r"[<$]|&(?!\w+;|#\d+;)", "".join(own for own in found if own != marked) + marked[:-15])
    if len(text) < 100 and text.isprintable():
        assert text in map(html.unescape, found)


def test_what_a_caller_marks_as_markup_stays_and_what_is_not_a_number_is_left_out() -> None:
    """Numbers have six digits, but for integers, which may count nanoseconds."""
    y = (1, float("nan"), float("inf"), 1234.56789, -1e-9 / 3, 123456789)
    spec = {"data": [{"hovertemplate": Markup("<b>{}</b>").format("a<b"), "y": y}]}
    assert parsed(make_page(Figure(id="a", title="A", spec=spec))).unpacked("figures")["a"] == {
        "data": [{"hovertemplate": "<b>a&lt;b</b>", "y": [1, None, None, 1234.57, -3.33333e-10, 123456789]}]
    }


def test_columns_of_integers_are_kept_as_bytes_the_lowest_first() -> None:
    columns = [[0, 1, -1, 127, -128, 128], [], [3], [2**52, -(2**52), 255, -256], list(range(-70_000, 70_000, 999))]
    figures = [Figure(id=f"a{n}", title="A", spec={"own": Integers(own)}) for n, own in enumerate(columns)]
    found = parsed(make_page(*figures))
    numbers = found.inflated("numbers")
    for n, own in enumerate(columns):
        begin, count, width = found.unpacked("figures")[f"a{n}"]["own"]
        entries = [int.from_bytes(numbers[begin + i : begin + count * width : count], "little") for i in range(count)]
        assert [-(entry + 1) // 2 if entry % 2 else entry // 2 for entry in entries] == own


def test_only_the_script_of_the_page_may_run_and_the_same_page_is_the_same_bytes() -> None:
    text = to_html(figure_page())
    found = Parsed(text)
    digest = base64.b64encode(hashlib.sha256(found.scripts[""][0].encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in found.policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}' blob:"
    assert not any("http" in rule or "*" in rule for rule in rules.values())
    assert text == to_html(figure_page())


def test_without_the_extra_the_page_has_plain_tables_and_the_pngs(monkeypatch) -> None:
    monkeypatch.setattr(write.importlib.util, "find_spec", lambda name: None)
    write._libraries.cache_clear()
    figure = Figure(id="a", title="A", spec={"data": []}, png="data:image/png;base64,AAAA")
    text = to_html(make_page(TableBlock(id="steps", table=make_steps()), figure))
    write._libraries.cache_clear()
    assert 'src="data:image/png;base64,AAAA"' in text
    found = Parsed(text)
    assert set(found.scripts) == {"", "packed-figures", "packed-numbers", "packed-copies", "packed-runs"}
    assert found.cells["steps.1.0"][0] == "medium"


def test_what_is_kept_of_a_run_is_packed_and_chapters_hold_chapters() -> None:
    inner = Chapter(id="a/inner", title="Inner", blocks=table_page().chapters[0].blocks)
    outer = Chapter(id="a", title="Outer", source="a/", chapters=[inner], is_closed=True)
    text = to_html(Page(title="A report", chapters=[outer]))
    found = Parsed(text)
    (inside,) = found.unpacked("runs").values()
    assert '{\n "key": "a"\n}' in html.unescape(inside)
    assert '"key"' not in html.unescape(text)
    assert found.cells["steps.1.0"][0] == "medium"
    assert [own for own in found.tags if own == ("details", "class", "id")] == [("details", "class", "id")] * 2
    with pytest.raises(ValueError, match="'a/inner' twice"):
        to_html(Page(title="A report", chapters=[outer, inner]))


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path) -> None:
    path = tmp_path / "index.html"
    write_page(table_page(), path)
    old = path.read_bytes()
    with pytest.raises(ValueError, match=r"steps\.9\.9"):
        write_page(make_page(Prose(paragraphs=[("A sentence.", "steps.9.9")])), path)
    with pytest.raises(ValueError, match="'steps' twice"):
        write_page(make_page(*[TableBlock(id="steps", table=make_steps())] * 2), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_the_numbers_of_a_sentence_are_links_to_their_cells_even_where_it_is_closed() -> None:
    sentence = Linked((("Between ", ""), ("10", "steps.0.1"), (" and ", ""), ("20 ms", "steps.1.1"), (".", "")))
    table = TableBlock(id="steps", table=make_steps())
    for prose in (Prose(paragraphs=[sentence]), Prose(paragraphs=[], more=[sentence])):
        text = to_html(make_page(prose, table))
        (shown,) = re.findall(r"<p>(Between.*?)</p>", text, re.DOTALL)
        links = re.findall(r'<a href="#(.*?)">(.*?)</a>', shown)
        assert [(label, target) for target, label in links] == [each for each in sentence.parts if each[1]]
        assert re.sub("<.*?>", "", shown) == sentence.text
        assert ("<details" in text.partition("<p>Between")[0]) == bool(prose.more)
        with pytest.raises(ValueError, match=r"steps\.0\.1"):
            to_html(make_page(prose))
