"""What a reader does with a page, in Chromium."""

import importlib.util
import os
import shutil
from dataclasses import replace
from functools import cache

import pytest

from cs336.analysis.kernels.step_profile import StepLabel
from cs336.commands.rebuild import load
from cs336.report.charts import Bar, Style
from cs336.report.page.blocks import Bars, TableBlock
from cs336.report.page.chapters import page_of
from cs336.report.page.directory import Directory
from cs336.report.page.html import TABLES, to_html
from cs336.report.results import Results
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.memory.entry import MemoryEntry
from cs336.text import inert_line
from tests.committed import DATA
from tests.report.page.cut import BROKEN, CUT, OVERLAPS, drawn_page
from tests.report.page.pages import (
    HOSTILE_TEXTS,
    TIMES,
    make_page,
    make_steps,
    page_with,
    table_page,
)
from tests.report.sections.kernels.profiles import make_profile
from tests.report.sections.memory.profiles import make_memory

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium():
    """One tab for all tests: each new one would be another process of the browser, or two."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install -e '.[dev]'"
    )
    if importlib.util.find_spec(TABLES[0]) is None:
        pytest.skip("needs the extra report: pip install -e '.[report]'")
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        pytest.skip("needs the browser of Debian: apt-get install chromium")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=binary, args=["--in-process-gpu", *sandbox]
        )
        tab = browser.new_page(color_scheme="light")
        tab.set_default_timeout(60_000)
        requests, console = [], []
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: console.append(message.text))
        tab.on("pageerror", lambda error: console.append(str(error)))
        yield tab, requests, console
        browser.close()


@pytest.fixture
def show(chromium, tmp_path):
    """Opens a page from disk; at the end, its console must be empty and nothing requested but
    the file.
    """
    tab, requests, console = chromium
    for seen in (requests, console):
        seen.clear()

    def opened(text, width=1280, height=900, table=None):
        path = tmp_path / "index.html"
        path.write_text(text)
        tab.set_viewport_size({"width": width, "height": height})
        tab.goto(path.as_uri())
        if table is not None:
            tab.locator(table).scroll_into_view_if_needed()
            tab.wait_for_selector(f"{table} .dt-column-order:visible")
        return tab

    yield opened
    tab.emulate_media(media="screen")
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [
        url for url in requests if url.startswith(tmp_path.as_uri())
    ]
    assert console == []


@cache
def small_page():
    return to_html(table_page())


def sizes(tab):
    return tab.locator("#steps tbody tr td:first-child").all_inner_texts()


def test_a_column_is_sorted_by_its_unrounded_values_and_what_is_unknown_comes_last(show) -> None:
    tab = show(small_page(), table="#steps")
    head = tab.locator("#steps th", has_text="time")
    head.click()
    tab.wait_for_selector("#steps th[aria-sort=ascending]")
    assert sizes(tab) == ["xl", "small", "medium", "large"]
    head.locator("[role=button]").press("Enter")
    tab.wait_for_selector("#steps th[aria-sort=descending]")
    assert sizes(tab) == ["medium", "small", "xl", "large"]


def test_the_rows_of_a_long_table_are_filtered(show) -> None:
    times = TIMES | {f"size {number}": 0.1 for number in range(10)}
    steps = TableBlock(id="steps", table=make_steps(names=times))
    few = TableBlock(id="few", table=make_steps())
    tab = show(to_html(make_page(steps, few)), table="#few")
    # one box, although there are two tables
    tab.get_by_role("searchbox").fill("medium")
    assert sizes(tab) == ["medium"]
    tab.get_by_role("searchbox").fill("")
    assert tab.locator("tr.failed td").nth(1).inner_text() == "out of memory"


def test_a_single_row_is_neither_sorted_nor_filtered_and_its_headings_explain_themselves(
    show,
) -> None:
    one = TableBlock(id="one", table=make_steps(names={"small": 0.1}))
    tab = show(to_html(make_page(one, TableBlock(id="steps", table=make_steps()))), table="#steps")
    assert tab.locator("#one :is([role=button], input)").count() == 0
    tab.focus("#one th:has-text('time')")
    assert tab.locator("#page-about").inner_text() == "Time of one step."


def test_a_heading_explains_itself_to_the_mouse_and_to_the_keyboard(show) -> None:
    tab = show(small_page(), table="#steps")
    about = tab.locator("#page-about")
    tab.hover("#steps th:has-text('time')")
    assert about.inner_text() == "Time of one step."
    tab.mouse.move(0, 0)
    assert not about.is_visible()
    tab.focus("#steps th:has-text('time') [role=button]")
    assert about.inner_text() == "Time of one step."


FIRST = {"e2e_benchmark/train": 1, "kineto_profiles/train": 2, "memory_profiles/first_step": 1}
"""Directories of a grid, of a profiled run and of a memory study, with the number of bars of
their first screen.
"""


@cache
def page_of_directory(name):
    return to_html(page_of(load(DATA / name)))


@pytest.mark.parametrize("directory", FIRST)
def test_answer_bars_tiles_and_trust_stand_on_the_first_screen(show, directory) -> None:
    tab = show(page_of_directory(directory), height=800)
    bottoms = {
        part: [
            box["y"] + box["height"]
            for box in (own.bounding_box() for own in tab.locator(f"#glance {part}").all())
        ]
        for part in (".answer", ".bars", ".tiles > div", ".trust")
    }
    counts = {part: len(found) for part, found in bottoms.items()}
    assert counts == {".answer": 1, ".bars": FIRST[directory], ".tiles > div": 4, ".trust": 1}
    assert max(max(found) for found in bottoms.values()) <= 800
    for bars in tab.locator("#glance .bars").all():
        shares = bars.evaluate(
            """own => [...own.querySelectorAll(".track")].map((track) =>
                [...track.children].reduce((sum, part) => sum + part.offsetWidth, 0)
                / track.clientWidth)"""
        )
        assert max(shares) == pytest.approx(1.0, abs=0.03), "the longest bar has the whole width"
    tab.set_viewport_size({"width": 400, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("kind", ["trace", "snapshot"])
def test_the_page_of_a_file_has_a_first_screen_and_fits_a_phone(show, tmp_path, kind) -> None:
    beside = make_profile().pictured
    labels = tuple(StepLabel(kind=name) for name in ("prefill", "decode"))
    steps = (beside, replace(beside, step=1 - beside.step))
    trace = make_profile(beside=steps, step_labels=labels)
    results = Results(records=(), kernels=[Explained(profile=trace)])
    if kind == "snapshot":
        results = Results(records=(), memory=[MemoryEntry(profile=make_memory())])
    tab = show(to_html(page_of(Directory(path=tmp_path, results=results))), height=800)
    for part in (".answer", ".bars", ".tiles > div"):
        boxes = [place.bounding_box() for place in tab.locator(f"#glance {part}").all()]
        assert boxes
        assert max(box["y"] + box["height"] for box in boxes) <= 800
    assert len(tab.locator("figure.block svg").all()) == (2 if kind == "trace" else 1)
    tab.set_viewport_size({"width": 400, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_wide_table_folds_columns_and_says_that_it_scrolls(show) -> None:
    tab = show(page_of_directory("e2e_benchmark/train"), height=800)
    assert not tab.is_visible("#results th:has-text('backward')")
    assert not tab.locator("#results .scroll.cut").count()
    tab.check("#results .unfold input")
    assert tab.is_visible("#results th:has-text('backward')")
    tab.wait_for_selector("#results .scroll.cut")
    tab.locator("#results .scroll").evaluate("own => own.scrollLeft = own.scrollWidth")
    tab.wait_for_selector("#results .scroll:not(.cut)")


def test_pictures_follow_the_theme_and_are_printed_in_light(show) -> None:
    tab = show(small_page(), table="#steps")
    assert tab.locator("#bars text", has_text="Bars of small").is_visible()

    def looks():
        parts = {"#bars text": "fill", "body": "backgroundColor"}
        return [
            tab.evaluate(f"getComputedStyle(document.querySelector('{at}')).{what}")
            for at, what in parts.items()
        ]

    light = looks()
    assert light == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
    tab.click("#page-theme")
    assert looks() == ["rgb(230, 230, 230)", "rgb(20, 23, 27)"]
    tab.emulate_media(media="print")
    assert looks() == light
    assert not tab.locator("button:visible, nav:visible, input:visible").count()
    assert tab.pdf().startswith(b"%PDF")


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("text", ["".join(sorted(HOSTILE_TEXTS)[:-1]), "x" * 300])
def test_a_hostile_text_is_shown_as_it_is_and_the_layout_holds(show, text) -> None:
    tab = show(to_html(page_with(text)), width=400, table="#steps")
    tab.click("main details.block > summary")
    assert all(
        inert_line(word) in tab.inner_text("main pre")
        for word in text.replace("\t", " ").split(" ")
    )
    assert (
        tab.locator("#steps tbody td").first.inner_text().split()
        == inert_line(text.expandtabs(4)).split()
    )
    assert inert_line(text)[:20] in "".join(tab.locator("#bars text").all_text_contents())
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("main img, main script, main style, main a, svg a").count() == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


def assert_nothing_is_cut(tab) -> None:
    """On wide and narrow windows, and on paper, whose width inside of its margins is 718 pixels."""
    for width, media in ((1920, "screen"), (1280, "screen"), (718, "print"), (400, "screen")):
        tab.emulate_media(media=media)
        tab.set_viewport_size({"width": width, "height": 900})
        assert tab.evaluate(CUT) == [], width
        assert tab.evaluate(OVERLAPS) == [], width
        assert tab.evaluate(BROKEN) == [], width
        if media == "screen":
            assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("seed", [1, 3, 4, 6])
def test_no_text_is_cut_and_none_lies_on_another(show, seed) -> None:
    assert_nothing_is_cut(show(to_html(drawn_page(seed))))


@pytest.mark.parametrize("directory", FIRST)
def test_no_text_of_a_published_page_is_cut(show, directory) -> None:
    assert_nothing_is_cut(show(page_of_directory(directory)))


def test_bars_of_very_different_lengths_are_shares_beside_their_length(show) -> None:
    """Parts of 1 and 3 are a quarter and three quarters, also where a bar is 100 times as long."""
    styles = {"a": Style(colour="#0072B2"), "b": Style(colour="#E69F00")}
    scales = (1.0, 10.0, 100.0)
    bars = [Bar(name=f"x{scale}", parts={"a": scale / 4, "b": 3 * scale / 4}) for scale in scales]
    for shown, is_share in ((bars, True), (bars[1:2], False)):
        block = Bars(title="Bars", bars=shown, styles=styles, unit="ms")
        tab = show(to_html(make_page(block)))
        for track in tab.locator(".track").all():
            first, second = (part.bounding_box()["width"] for part in track.locator("i").all())
            assert second / first == pytest.approx(3, rel=0.05)
        boxes = [point.bounding_box() for point in tab.locator(".scale b").all()]
        assert len(boxes) == (len(shown) if is_share else 0)
        if is_share:
            places = [box["x"] for box in boxes]
            assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=1)


def test_a_kernel_of_a_table_leads_to_its_launches_in_the_timeline(show, tmp_path) -> None:
    profile = make_profile()
    name = next(kernel.name for kernel in profile.kernels if kernel.phase is None)
    pictured = replace(profile.pictured, places={name: (0, 250, 999)})
    results = Results(records=(), kernels=[Explained(profile=replace(profile, pictured=pictured))])
    tab = show(to_html(page_of(Directory(path=tmp_path, results=results))), table="#kernels")
    tab.locator("#kernels a[data-places]").first.click()
    lanes = tab.locator("#picture-timeline .marks").bounding_box()
    marks = [mark.bounding_box()["x"] for mark in tab.locator(".marks i").all()]
    shares = [(mark - lanes["x"]) / lanes["width"] for mark in marks]
    assert shares == pytest.approx([0, 0.25, 0.999], abs=2 / lanes["width"])
    assert name in tab.inner_text("#picture-timeline + *, #picture-timeline")


def test_without_a_timeline_no_kernel_leads_to_it(show, tmp_path) -> None:
    profile = make_profile()
    places = {kernel.name: (0,) for kernel in profile.kernels}
    for pieces, leads in ((profile.pictured.pieces, True), ((), False)):
        pictured = replace(profile.pictured, places=places, pieces=pieces)
        entry = Explained(profile=replace(profile, pictured=pictured))
        results = Results(records=(), kernels=[entry])
        tab = show(to_html(page_of(Directory(path=tmp_path, results=results))))
        assert (tab.locator("#kernels a").count() > 0) is leads


def test_a_picture_has_a_title_and_a_sentence_and_colours_stay_apart_where_they_are_forced(
    show,
) -> None:
    tab = show(to_html(table_page()))
    picture = tab.get_by_role("img", name="Bars of small")
    about = picture.get_attribute("aria-describedby")
    assert "small" in tab.locator(f"#{about}").text_content()
    tab = show(page_of_directory("e2e_benchmark/train"))
    tab.emulate_media(forced_colors="active")
    colours = tab.evaluate(
        """[...document.querySelectorAll("#glance .track:first-child i, .lane:first-child i")]
            .map((part) => getComputedStyle(part).backgroundColor)"""
    )
    tab.emulate_media(forced_colors="none")
    assert len(set(colours)) == 3
