"""What a reader does with a page, in Chromium."""

import importlib.util
import os
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs336_systems.report.compared import Sides, compare_sides
from cs336_systems.report.formats import to_latex, to_markdown, to_typst
from cs336_systems.report.page.collection import Collection
from cs336_systems.report.page.figures import height_of, spec_of
from cs336_systems.report.page.pictured import IDLE, Lane, Name, StepPicture
from cs336_systems.report.page.whole import collection_page
from cs336_systems.report.page.write import LIBRARIES, Figure, to_html, write_page
from cs336_systems.report.plots.charts import Axis, Bar, Chart, Panel, Style
from cs336_systems.text import inert_line
from tests.report.making import make_config, make_record
from tests.report.page.pages import HOSTILE_TEXTS, csv_of, figure_page, large_step, make_page, page_with, table_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[dev]'")
    for package, _ in LIBRARIES.values():
        if importlib.util.find_spec(package) is None:
            pytest.skip("needs the extra report: pip install -e '.[report]'")
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        pytest.skip("needs the browser of Debian: apt-get install chromium")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def show(chromium, tmp_path):
    """Opens a page from disk; at the end, its console must be empty and nothing requested but the file."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(60_000)
    seen = SimpleNamespace(requests=[], console=[])

    def opened(page, width=1280, fragment=""):
        path = tmp_path / "index.html"
        write_page(page, path)
        tab = context.new_page()
        tab.set_viewport_size({"width": width, "height": 900})
        tab.on("request", lambda request: seen.requests.append(request.url))
        tab.on("console", lambda message: seen.console.append(message.text))
        tab.on("pageerror", lambda error: seen.console.append(str(error)))
        tab.goto(path.as_uri() + fragment)
        first = next(name for name in ("#steps", "#kernels", "#comparison") if tab.query_selector(name))
        tab.locator(first).scroll_into_view_if_needed()
        tab.wait_for_selector(f"{first} .tools:visible, {first} .main-svg")
        return tab

    yield opened
    context.close()
    assert [url for url in seen.requests if not url.startswith(("data:", "blob:"))] == [
        url for url in seen.requests if url.startswith(tmp_path.as_uri())
    ]
    assert seen.console == []


def until(tab, expression):
    """Wait until the expression is true. Playwright's own way evaluates texts in the page, whose policy forbids it."""
    end = time.monotonic() + 60
    while not tab.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.02)


def sizes(tab):
    return tab.locator("#steps tbody tr td:first-child").all_inner_texts()


def test_a_column_is_sorted_by_its_unrounded_values_and_what_is_unknown_comes_last(show) -> None:
    tab = show(table_page())
    head = tab.locator("#steps th", has_text="time")
    head.click()
    tab.wait_for_selector("#steps th[aria-sort=ascending]")
    assert sizes(tab) == ["xl", "small", "medium", "large"]
    head.locator("[role=button]").press("Enter")
    tab.wait_for_selector("#steps th[aria-sort=descending]")
    assert sizes(tab) == ["medium", "small", "xl", "large"]


def test_rows_are_filtered_and_columns_hidden_and_a_link_to_a_cell_brings_both_back(show) -> None:
    tab = show(table_page())
    tab.fill("#steps input[type=search]", "medium")
    assert sizes(tab) == ["medium"]
    tab.click("#steps summary:text('Columns')")
    tab.get_by_role("checkbox", name="time ms").uncheck()
    assert "time" not in tab.inner_text("#steps thead")
    tab.keyboard.press("Escape")
    assert not tab.is_visible("#steps .columns")
    tab.click("text=Show it in the table")
    cell = tab.locator("[id='steps.3.1']")
    assert "marked" in cell.get_attribute("class")
    assert cell.inner_text() == "10"
    assert tab.locator("tr.failed td").nth(1).inner_text() == "out of memory"


def copied(tab, name):
    tab.click("#steps summary:text('Copy')")
    tab.click(f"[data-copy={name}]")
    tab.wait_for_selector(f"#page-message:has-text('{name}')")
    return tab.evaluate("navigator.clipboard.readText()")


def test_a_table_is_copied_as_its_files_have_it_and_then_as_it_is_seen(show) -> None:
    page = table_page('A note: a | b & c "d".')
    block = page.chapters[0].blocks[1]
    writers = {"Markdown": to_markdown, "LaTeX": to_latex, "Typst": to_typst}
    tab = show(page)
    for name, write in writers.items():
        assert copied(tab, name) == write(block.table)
    assert copied(tab, "CSV") == block.csv
    tab.locator("#steps th", has_text="steps").click(click_count=2)  # the largest number first
    tab.wait_for_selector("#steps th[aria-sort=descending]")
    tab.fill("#steps input[type=search]", "l")
    assert sizes(tab) == ["xl", "large", "small"]
    tab.click("#steps summary:text('Columns')")
    tab.get_by_role("checkbox", name="time ms").uncheck()
    table = block.table
    seen = replace(
        table,
        headings=(table.headings[0], table.headings[2]),
        rows=tuple((table.rows[number][0], table.rows[number][2]) for number in (3, 2, 0)),
    )
    for name, write in writers.items():
        assert copied(tab, name) == write(seen)
    assert copied(tab, "CSV") == csv_of([table.values[number] for number in (3, 2, 0)], ("device", "size"))


def test_a_heading_explains_itself_to_the_mouse_and_to_the_keyboard(show) -> None:
    tab = show(table_page())
    about = tab.locator("#page-about")
    tab.hover("#steps th:has-text('time')")
    assert about.inner_text() == "Time of one step."
    tab.mouse.move(0, 0)
    assert not about.is_visible()
    tab.focus("#steps th:has-text('time') [role=button]")
    assert about.inner_text() == "Time of one step."


def test_a_run_opens_by_keyboard_and_by_a_link(show) -> None:
    tab = show(table_page())
    assert not tab.is_visible("text='key'")
    tab.focus("#run-a summary")
    tab.keyboard.press("Enter")
    assert tab.inner_text("#run-a pre") == '{\n "key": "a"\n}'
    tab.keyboard.press("Enter")
    assert not tab.is_visible("#run-a pre")
    tab.click("text=There is a run. >> a")
    tab.wait_for_selector("#run-a pre", state="visible")


def drawn(tab):
    return tab.evaluate("document.querySelector('#kernels .drawing').data[0].type")


def test_one_step_is_zoomed_by_wheel_and_keys_to_one_kernel_and_back(show) -> None:
    tab = show(figure_page())
    place = tab.locator("#kernels .drawing")
    assert drawn(tab) == "heatmap"  # 2,001 kernels
    assert "idle" in place.inner_text()
    assert "forward" in place.inner_text()
    place.evaluate("async (place) => place.zoom([3.98995, 3.9902])")
    until(tab, "document.querySelector('#kernels .drawing').data[0].type === 'bar'")
    area = tab.locator("#kernels .nsewdrag").first.evaluate("(place) => place.getBoundingClientRect().toJSON()")
    tab.mouse.move(area["x"] + area["width"] * 0.3, area["y"] + area["height"] * 0.75)
    tab.wait_for_selector("#kernels .hoverlayer:has-text('tiny gemm')")
    assert "0.05\xa0µs" in tab.text_content("#kernels .hoverlayer")
    place.focus()
    tab.keyboard.press("0")
    until(tab, "document.querySelector('#kernels .drawing').range()[1] === 4")
    tab.keyboard.press("+")
    until(tab, "document.querySelector('#kernels .drawing').range().join() === '1,3'")
    tab.mouse.wheel(0, -250)
    until(tab, "(([from, to]) => to - from < 1)(document.querySelector('#kernels .drawing').range())")


def seen_ms(tab):
    return tab.evaluate("document.querySelector('#kernels .drawing').range()")


def test_one_step_is_zoomed_by_dragging_and_a_double_click_shows_all_again(show) -> None:
    tab = show(figure_page())
    area = tab.locator("#kernels .nsewdrag").first.evaluate("(place) => place.getBoundingClientRect().toJSON()")
    x, y = area["x"], area["y"] + area["height"] / 2
    tab.mouse.move(x + 0.25 * area["width"], y)
    tab.mouse.down()
    tab.mouse.move(x + 0.4 * area["width"], y, steps=4)
    tab.mouse.move(x + 0.5 * area["width"], y, steps=4)
    tab.mouse.up()
    until(tab, "document.querySelector('#kernels .drawing').range()[1] < 3")
    assert seen_ms(tab) == pytest.approx([1, 2], abs=0.02)  # of 4 ms
    tab.mouse.dblclick(x + 0.5 * area["width"], y)
    until(tab, "document.querySelector('#kernels .drawing').range().join() === '0,4'")


def test_kernels_are_found_by_name_and_by_length_with_the_keyboard_alone(show) -> None:
    tab = show(figure_page())
    said = tab.locator("#kernels .found")
    tab.focus("#kernels input")
    tab.keyboard.type("TINY")
    tab.keyboard.press("Enter")
    until(tab, "(([from, to]) => to - from < 0.001)(document.querySelector('#kernels .drawing').range())")
    assert [word.strip() for word in said.inner_text().replace("\xa0", " ").split("·")] == [
        "1 of 1: tiny gemm", "softmax, stream 7, too", "0.05 µs, from 3.99 ms",
    ]  # fmt: skip
    start, end = seen_ms(tab)
    assert start < 3.99 < 3.99005 < end
    tab.wait_for_selector("#kernels .bartext:text-is('tiny gemm')", state="attached")  # which is drawn after the zoom
    tab.fill("#kernels input", "void gemm")  # the profiler's name, 2 us apart
    for expected, key in ((0, "Enter"), (0.002, "Enter"), (0.004, "Enter"), (0.002, "Shift+Enter")):
        tab.press("#kernels input", key)
        place = f"from {expected:g}\xa0ms, launched 7\xa0µs before · void gemm<float>"
        tab.wait_for_selector(f"#kernels .found:has-text('{place}')")
    assert said.inner_text().startswith("2 of 2000: gemm · matrix product, forward, forward, stream 7 · 1\xa0µs")
    tab.fill("#kernels input", "late")
    tab.press("#kernels input", "Enter")
    tab.wait_for_selector("#kernels .found:has-text('late launch · idle, host in forward · 500\xa0µs, from 2.5\xa0ms')")
    tab.fill("#kernels input", "no such kernel")
    tab.press("#kernels input", "Enter")
    assert said.inner_text().startswith("No kernel")
    tab.fill("#kernels input", "")
    for number in (1, 2):
        tab.focus("#kernels button:text('Next longest')")
        tab.keyboard.press("Enter")
        tab.wait_for_selector(f"#kernels .found:has-text('{number} of 2001')")
        assert "· 1\xa0µs" in said.inner_text()  # the tiny one is the shortest


def test_a_click_on_a_kernel_says_which_it_is(show) -> None:
    tab = show(figure_page())
    area = tab.locator("#kernels .nsewdrag").first.evaluate("(place) => place.getBoundingClientRect().toJSON()")
    x, y = area["x"] + 0.5 * area["width"], area["y"] + 0.5 * area["height"]  # the second of three lanes
    tab.mouse.click(x, y)
    tab.wait_for_selector("#kernels .found:has-text('gemm · matrix product')")
    place = "document.querySelector('#kernels .drawing')"
    start = tab.evaluate(f"(({{selected: [l, i], figure}}) => figure.lanes[l].start[i])({place}.own)")
    assert abs(start - 2_000_000) < 10_000
    tab.locator("#kernels .drawing").evaluate("async (place) => place.zoom([1.9999, 2.0001])")
    tab.wait_for_timeout(400)  # or plotly takes the next click for the second half of a double click
    tab.mouse.click(area["x"] + 0.75 * area["width"], y)
    tab.wait_for_selector("#kernels .found:has-text('from 2\xa0ms')")


def test_a_column_shows_the_class_that_ran_longest_in_it_and_is_idle_where_half_of_it_is(show) -> None:
    """First, fifteen short kernels run for 60 % of the time, and a long one for 25 %; then that alone."""
    names = [Name(short="short", kind="a"), Name(short="long", kind="b"), Name(short="late", kind=IDLE)]
    begins = [10_000 * number for number in range(5_000)]
    rows = [row for at in begins for row in [*((at + 400 * n, at + 400 * n + 400, 0) for n in range(15)),
                                             (at + 6_000, at + 8_500, 1)] if at < 25_000_000 or row[2]]  # fmt: skip
    idle = [(at + (8_500 if at < 25_000_000 else 0), at + (10_000 if at < 25_000_000 else 6_000)) for at in begins]
    lanes = [
        Lane(label=IDLE, start_ns=[a for a, _ in idle], end_ns=[b for _, b in idle], name=[2] * len(idle)),
        Lane(label="s", start_ns=[a for a, *_ in rows], end_ns=[b for _, b, _ in rows], name=[n for *_, n in rows]),
    ]
    colours = {"a": "#0072B2", "b": "#D55E00"}
    picture = StepPicture(length_ns=50_000_000, lanes=lanes, names=names, colours=colours, phases={})
    tab = show(make_page(Figure(id="kernels", title="One step", spec=picture.spec, height=320)))
    late, kernels = tab.evaluate("document.querySelector('#kernels .drawing').data[0].z")
    half = len(kernels) // 2
    assert (set(kernels[: half - 1]), set(kernels[half + 1 :])) == ({0}, {1})
    assert (set(late[: half - 1]), set(late[half + 1 :])) == ({None}, {2})


def test_every_zoom_of_a_step_of_15_000_kernels_is_drawn_at_once(show) -> None:
    """Within 100 ms on an idle machine, where the median takes 50; here others may be running."""
    picture = large_step(15_000)
    tab = show(make_page(Figure(id="kernels", title="One step", spec=picture.spec, height=320)))
    assert drawn(tab) == "heatmap"
    times = tab.locator("#kernels .drawing").evaluate(
        """async (place) => {
            const whole = place.range()[1], times = [];
            for (let n = 0; n < 15; n++) {
                const width = whole / 4 ** (n % 7), started = performance.now();
                await place.zoom([whole / 3, whole / 3 + width]);
                await new Promise(requestAnimationFrame);
                times.push(performance.now() - started);
            }
            return times;
        }"""
    )
    assert statistics.median(times) < 400


def test_figures_follow_the_theme_and_are_printed_as_images_in_light(show) -> None:
    tab = show(figure_page())
    colour = "getComputedStyle(document.querySelector('#kernels .xtick text')).fill"
    before = tab.evaluate(colour)
    tab.click("#page-theme")
    until(tab, f"{colour} !== '{before}'")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    until(tab, "loaded !== null")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")  # as the menu of the browser does, which does not wait
    tab.emulate_media(media="print")
    assert tab.locator("svg.printed:visible").count() == 2  # the run is closed
    assert tab.locator("#bars svg.printed .point").count() == 2
    assert tab.locator("#kernels svg.printed image").count()  # all kernels of the step
    assert "stream 7" in tab.text_content("#kernels svg.printed")
    assert not tab.locator(".drawing:visible, button:visible, nav:visible, .keys:visible").count()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    ink = "getComputedStyle(document.querySelector('#kernels svg.printed .xtick text')).fill"
    assert tab.evaluate(ink) == before
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.pdf().startswith(b"%PDF")  # with both events once more
    tab.emulate_media(media="screen")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.locator(".printed").count() == 0


def test_a_table_is_printed_whole(show) -> None:
    tab = show(table_page())
    tab.fill("#steps input[type=search]", "medium")
    assert sizes(tab) == ["medium"]
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert sizes(tab) == ["small", "medium", "large", "xl"]


@pytest.mark.parametrize("text", ["".join(sorted(HOSTILE_TEXTS)[:-1]), "x" * 300])
def test_a_hostile_text_is_shown_as_it_is_and_the_layout_holds(show, text) -> None:
    tab = show(page_with(text), width=400)
    for name in ("bars", "kernels"):
        tab.locator(f"#{name}").scroll_into_view_if_needed()
        tab.wait_for_selector(f"#{name} .main-svg")
    tab.fill("#kernels input", "tiny")
    tab.press("#kernels input", "Enter")
    tab.wait_for_selector("#kernels .found:has-text('1 of 1: tiny')")
    assert inert_line(text)[:30] in tab.inner_text("#kernels .found")
    tab.click("#run-a summary")
    assert all(inert_line(word) in tab.inner_text("#run-a pre") for word in text.replace("\t", " ").split(" "))
    assert tab.inner_text("[id='steps.0.0']").split() == inert_line(text).split()
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("main img, main script, main style, main a:not([href^='#']), svg a").count() == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    assert inert_line(text)[:30] in "".join(tab.locator("#bars .annotation-text").all_text_contents())


@pytest.mark.parametrize("width", [400, 1280])
def test_only_wide_tables_scroll_and_only_in_their_box(show, width) -> None:
    tab = show(table_page("A note of many words that must wrap. " * 10), width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.is_visible("#steps .tools")


def test_a_verdict_leads_to_its_row_and_the_picture_of_ratios_answers(show) -> None:
    sides = [
        [
            make_record(make_config(context_length=context, precision=precision), [step_s * factor] * 3)
            for context, factor in ((128, 1), (256, ratio), (512, 1.001))
        ]
        for precision, step_s, ratio in (("fp32", 0.1, 1), ("bf16", 0.1, 0.25))
    ]
    found = compare_sides(Sides(a="there/a", b="there/b", records=("a", "b")), sides)
    tab = show(collection_page(Collection(root=Path("x"), comparisons={Path(): found})))
    tab.locator("#verdicts a", has_text="0.250").first.click()
    cell = tab.locator("#comparison td:target")
    assert cell.inner_text() == "0.250"
    assert cell.is_visible()
    tab.fill("#comparison input[type=search]", "cannot tell")
    assert tab.locator("#comparison tbody tr:visible").count() == 2
    figure = tab.locator("#figure-ratios")
    figure.scroll_into_view_if_needed()
    tab.wait_for_selector("#figure-ratios .points path")
    box = figure.locator(".points path").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.wait_for_selector("#figure-ratios .hovertext")
    words = figure.locator(".hovertext").text_content()
    assert ("256" in words, "0.25" in words) == (True, True)


def test_a_page_opened_at_a_cell_shows_it(show) -> None:
    tab = show(table_page(), fragment="#steps.2.1")
    assert tab.locator("td.marked").inner_text() == "out of memory"
    tab.fill("#steps input[type=search]", "medium")
    tab.evaluate("location.hash = '#steps.0.2'")  # no link of the page leads there, and it is filtered out
    tab.wait_for_function("document.querySelector('td.marked')?.textContent === '10'")


def test_a_script_that_gets_into_the_page_does_not_run(show, tmp_path) -> None:
    """The policy of the page itself, for a text that some day is not escaped."""
    text = to_html(table_page()).replace(
        "</main>", "<script>window.hacked = 1</script><b onclick='window.hacked = 1'>b</b></main>"
    )
    (tmp_path / "other.html").write_text(text)
    tab = show(table_page())
    context = tab.context.new_page()
    context.goto((tmp_path / "other.html").as_uri())
    context.click("b:text-is('b')")
    assert context.evaluate("window.hacked") is None


def test_on_a_narrow_screen_legend_and_long_names_take_nothing_from_the_plot(show) -> None:
    name = "a configuration with many settings that differ"
    bars = [{"type": "bar", "orientation": "h", "x": [1], "y": [0], "name": f"class of kernels {n}"} for n in range(9)]
    layout = {
        "barmode": "stack", "yaxis": {"tickvals": [0], "ticktext": [name]}, "margin": {"t": 10, "b": 40},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
    }  # fmt: skip
    spec = {"data": bars, "layout": layout}
    tab = show(make_page(Figure(id="kernels", title="Classes", spec=spec, height=200)), width=400)
    area = tab.evaluate("document.querySelector('#kernels .nsewdrag').getBoundingClientRect().toJSON()")
    assert area["height"] > 100
    assert area["width"] > 400 / 3
    words = tab.locator("#kernels .legendtext").all()
    box = tab.locator("#kernels .drawing").bounding_box()
    assert len(words) == 9
    assert all(word.bounding_box()["y"] + 10 < box["y"] + box["height"] for word in words)
    assert " ".join(tab.locator("#kernels .ytick tspan").all_text_contents()) == name


def test_a_chart_answers_on_hover_and_its_panels_stand_below_each_other_on_a_narrow_screen(show) -> None:
    panels = [
        Panel(x=Axis(names=["small"]), y=Axis(unit="ms"), title=title, bars=[Bar(name="small", parts={"forward": ms})])
        for title, ms in (("context 128", 12.5), ("context 256", 31.0))
    ]
    styles = {"forward": Style(colour="#0072B2")}
    chart = Chart(name="times", title="Times", settings="", panels=panels, columns=2, legend=1, styles=styles)
    page = make_page(Figure(id="kernels", title="Times", spec=spec_of(chart), height=height_of(chart)))

    def tops(tab):
        boxes = [tab.locator(f"#kernels .annotation:has-text('{panel.title}')").bounding_box() for panel in panels]
        return [box["y"] for box in boxes]

    tab = show(page)
    assert tops(tab)[0] == tops(tab)[1]
    box = tab.locator("#kernels .bars path").nth(1).bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.wait_for_selector("#kernels .hoverlayer:has-text('context 256, small: forward: 31.00 ms')")
    narrow = show(page, width=400)
    assert tops(narrow)[1] > tops(narrow)[0] + 100


def test_a_table_of_the_grid_can_be_sorted_soon_after_the_page_is_opened(chromium, grid_page, tmp_path) -> None:
    """Within 1 s on an idle machine, where it takes 0.4; here others may be running."""
    (tmp_path / "grid.html").write_text(grid_page[0])
    tab = chromium.new_page()
    tab.goto(f"{(tmp_path / 'grid.html').as_uri()}#results", wait_until="commit")
    until(tab, "document.querySelector('#results .tools:not([hidden])') !== null")
    sorted_ms = tab.evaluate(
        """async () => {
            document.querySelector("#results th:nth-child(4)").click();
            const frame = () => new Promise(requestAnimationFrame);
            while (!document.querySelector("#results th[aria-sort=ascending]")) await frame();
            return performance.now();
        }"""
    )
    tab.close()
    print(f"sorted after {sorted_ms:.0f} ms")
    assert sorted_ms < 5000
