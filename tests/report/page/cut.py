"""Drawn pages with texts and values of any length, and where a browser cuts their texts."""

import random

from cs336.report.charts import Bar, Style
from cs336.report.page.blocks import Bars, Entry, Facts, Glance, Page, Prose, TableBlock, Tile
from tests.report.page.pages import make_page, make_picture, make_steps

CUT = """() => {
  const cut = [];
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode());) {
    if (!text.data.trim() || text.parentElement.closest(".thumbnail")) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    for (const box of range.getClientRects()) {
      const picture = text.parentElement.ownerSVGElement;
      let around = picture ?? text.parentElement;
      for (; around && box.width && around.tagName !== "MAIN"; around = around.parentElement) {
        const style = getComputedStyle(around);
        if (style.display === "inline") continue;
        const isScrolled = ["auto", "scroll"].includes(style.overflowX);
        const edge = around.getBoundingClientRect();
        const isHigh = box.top < edge.top - 1 || box.bottom > edge.bottom + 1;
        const isWide = box.left < edge.left - 1 || box.right > edge.right + 1;
        if (!isScrolled && (isWide || isHigh && (picture || style.overflowY === "hidden"))) {
          cut.push(`${around.tagName}.${around.className}: ${text.data.trim().slice(0, 60)}`);
          break;
        }
        if (isScrolled || ["TD", "TH"].includes(around.tagName)) break; // a reader scrolls there
      }
    }
  }
  return cut;
}"""
"""The texts of a page of which a part lies outside of an element around them."""

OVERLAPS = """() => [...document.querySelectorAll(".lane")].filter((lane) => {
  const parts = [...lane.children].map((part) => part.getBoundingClientRect());
  const boxes = parts.filter((box) => box.width);
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return boxes.some((a, i) => boxes.some((b, k) => i < k && meet(a, b)));
}).map((lane) => lane.textContent)"""
"""The bars of which two parts, such as name and figures, lie on each other."""

BROKEN = """() => {
  const broken = [], flag = "--[a-z][a-z-]+", unit = "(ms|%|GiB|µs)(?!\\\\w)";
  const quantity = RegExp(`[\\\\d.,]*\\\\d( ± [\\\\d.,]+)?( \\\\?)? ${unit}|${flag}`, "g");
  for (const place of document.querySelectorAll("main :is(p, td, dd, .legend span)")) {
    const texts = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
    for (let text; (text = texts.nextNode());) {
      for (const found of text.data.replaceAll("\\u00a0", " ").matchAll(quantity)) {
        const range = document.createRange();
        range.setStart(text, found.index);
        range.setEnd(text, found.index + found[0].length);
        const boxes = [...range.getClientRects()];
        const width = boxes.reduce((sum, box) => sum + box.width, 0);
        const isWide = width > place.getBoundingClientRect().width - 20;
        const lines = new Set(boxes.map((box) => Math.round(box.top)));
        if (lines.size > 1 && !isWide) broken.push(found[0]);
      }
    }
  }
  return broken;
}"""
"""The quantities and flags of a page within which a line ends, although they fit into one."""


def drawn_page(seed: int) -> Page:
    """A page of every kind of block, whose texts and values are drawn."""
    rng = random.Random(seed)
    names = [_name(rng) for _ in range(rng.choice([1, 2, 9, 30]))]
    bars = [_bars(rng, names), _bars(rng, names[:1])]
    tiles = [Tile(_name(rng), _figure(rng), _name(rng)) for _ in range(4)]
    glance = Glance(answer=f"{_name(rng)} {_figure(rng)}.", more=_name(rng), bars=bars, tiles=tiles)
    table = make_steps(_name(rng), names={_name(rng): rng.uniform(1e-9, 1e9) for _ in range(5)})
    blocks = [
        TableBlock(id="steps", table=table),
        make_picture(_name(rng)),
        Prose(paragraphs=names),
        Facts(rows=[(_name(rng), f"{_figure(rng)}, {_figure(rng)} --warmup-steps")]),
        _bars(rng, [_name(rng) for _ in range(20)]),
    ]
    page = make_page(*blocks)
    chapter = page.chapters[0]
    entry = Entry(link="index.html", name=_name(rng), page=page)
    listed = type(chapter)(id="all", title=_name(rng), blocks=[entry])
    return Page(title=_name(rng), glance=glance, chapters=[chapter, listed])


def _bars(rng: random.Random, names: list[str]) -> Bars:
    styles = {
        name: Style(colour="#0072B2", pattern=rng.choice(["", "/"]))
        for name in ("a" * 30, "b", "c")
    }
    bars = []
    for name in names:
        scale = 10 ** rng.uniform(-6, 6)
        parts = {part: scale * rng.random() for part in styles}
        figures = [_figure(rng) for _ in range(rng.choice([0, 1, 2]))]
        failed = rng.random() < 0.2
        bar = (
            Bar(name=name, failure=_name(rng))
            if failed
            else Bar(name=name, parts=parts, figures=figures)
        )
        bars.append(bar)
    return Bars(title=_name(rng), bars=bars, styles=styles, unit="ms")


def _name(rng: random.Random) -> str:
    word = rng.choice(["ctx 128", "xl", "path.to.a_module" * rng.choice([1, 8]), "W" * 70, "small"])
    return " ".join([word] * rng.choice([1, 1, 3, 20]))


def _figure(rng: random.Random) -> str:
    value = 10 ** rng.uniform(-9, 9)
    return f"{value:,.2f} ± {value / 7:,.3f} ? {rng.choice(['ms', 'GiB', 'x'])}"
